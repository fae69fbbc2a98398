//! Nested blocks.

use crate::ir::{Name, OpId, ValueId};

use super::{BuildError, Builder};

type Built<T> = Result<T, BuildError>;

impl Builder {
    /// `cond`: one of two blocks runs. Both see every value around them and return equally many values of equal types.
    ///
    /// # Errors
    /// [`BuildError`] of either block, or when they do not match.
    pub fn cond(
        &mut self,
        pred: ValueId,
        yes: impl FnOnce(&mut Builder) -> Built<Vec<ValueId>>,
        no: impl FnOnce(&mut Builder) -> Built<Vec<ValueId>>,
    ) -> Built<Vec<ValueId>> {
        let name = self.next_name.take().unwrap_or_else(|| "cond".to_owned());
        let op = self.insert("cond", &name, [("pred", pred.into())])?;
        let built = self.nested(op, &[], |b, _| yes(b)).and_then(|()| self.nested(op, &[], |b, _| no(b)));
        self.close(op, &name, built)
    }

    /// `while_loop`: `body` maps the loop variables to their next values as long as `condition` holds of them.
    ///
    /// # Errors
    /// [`BuildError`] of either block, or when a variable changes its type.
    pub fn while_loop(
        &mut self,
        vars: &[ValueId],
        condition: impl FnOnce(&mut Builder, &[ValueId]) -> Built<ValueId>,
        body: impl FnOnce(&mut Builder, &[ValueId]) -> Built<Vec<ValueId>>,
    ) -> Built<Vec<ValueId>> {
        let name = self.next_name.take().unwrap_or_else(|| "while_loop".to_owned());
        let op = self.insert("while_loop", &name, [("loop_vars", vars.into())])?;
        // Core ML wants the inputs of both blocks to have the same names.
        let inputs: Vec<(Name, ValueId)> =
            vars.iter().enumerate().map(|(i, &v)| (self.f.fresh_name(&format!("{name}_var{i}")), v)).collect();
        let built = self
            .nested(op, &inputs, |b, vars| Ok(vec![condition(b, vars)?]))
            .and_then(|()| self.nested(op, &inputs, body));
        self.close(op, &name, built)
    }

    /// Builds one nested block, whose inputs have the types of these values.
    fn nested(
        &mut self,
        op: OpId,
        inputs: &[(Name, ValueId)],
        build: impl FnOnce(&mut Builder, &[ValueId]) -> Built<Vec<ValueId>>,
    ) -> Built<()> {
        let block = self.f.add_block(op);
        let mut vars = Vec::with_capacity(inputs.len());
        for (name, like) in inputs {
            let ty = self.f.ty(*like).clone();
            vars.push(self.f.add_block_input(block, name.clone(), ty));
        }
        let depth = self.blocks.len();
        self.blocks.push(block);
        let outputs = build(self, &vars).and_then(|outputs| {
            outputs.iter().try_for_each(|v| self.check_visible(*v))?;
            Ok(outputs)
        });
        self.blocks.truncate(depth);
        for v in outputs? {
            self.f.add_output(block, v);
        }
        Ok(())
    }

    /// Types the op from its blocks, or takes it back when a block failed.
    fn close(&mut self, op: OpId, name: &str, built: Built<()>) -> Built<Vec<ValueId>> {
        built.inspect_err(|_| self.f.erase_op(op))?;
        self.type_results(op, name)
    }
}

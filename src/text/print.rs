//! Printing of programs, functions and ops.

use std::fmt::{self, Write as _};

use super::value::{Elide, content};
use super::{OPSET_TAGS, is_plain, value};
use crate::ir::{
    BlockId, Function, Literal, LiteralData, Name, OpData, OpId, Operand, Program, Symbol, Use, ValueId, ValueType,
};

/// Constants of at most this many elements are written at their uses in the short spelling.
const INLINE_ELEMENTS: u64 = 16;

/// A line longer than this breaks the signature, one input a line.
const WIDTH: usize = 120;

/// How to print.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrintOptions {
    /// The exact spelling: every `const` op on its own and all attributes.
    pub full: bool,
    /// Constants with more elements than this print as `...`, which does not parse.
    pub elide_above: Option<u64>,
}

impl PrintOptions {
    /// The program.
    pub fn program(&self, p: &Program) -> String {
        let version = if p.specification_version() >= 9 { "1.3" } else { "1.0" };
        let mut out = format!("program({version}) [specificationVersion = {}", p.specification_version());
        if let Some(name) = p.default_function() {
            let _ = write!(out, ", defaultFunction = {}", value::quoted(name, '"'));
        }
        out.push_str("] {\n");
        for f in p.functions() {
            let mut printer = Printer::new(f, *self);
            printer.indent = 1;
            printer.function();
            out.push_str(&printer.out);
        }
        out.push_str("}\n");
        out
    }

    /// One function, without the program around it.
    pub fn function(&self, f: &Function) -> String {
        let mut printer = Printer::new(f, *self);
        printer.function();
        printer.out
    }
}

/// The program in the short spelling.
pub fn print_program(p: &Program) -> String {
    PrintOptions::default().program(p)
}

/// One function in the short spelling.
pub fn print_function(f: &Function) -> String {
    PrintOptions::default().function(f)
}

/// One op in the short spelling, without its nested blocks and long constants.
pub fn print_op(f: &Function, op: OpId) -> String {
    let mut printer = Printer::new(f, PrintOptions { full: false, elide_above: Some(INLINE_ELEMENTS) });
    printer.op_head(op);
    printer.out
}

/// A name, in backticks where it must be.
struct Spelled<'n>(&'n Name);

impl fmt::Display for Spelled<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if is_plain(self.0) { f.write_str(self.0) } else { f.write_str(&value::quoted(self.0, '`')) }
    }
}

struct Printer<'p> {
    f: &'p Function,
    options: PrintOptions,
    indent: usize,
    out: String,
}

impl<'p> Printer<'p> {
    fn new(f: &'p Function, options: PrintOptions) -> Self {
        Printer { f, options, indent: 0, out: String::new() }
    }

    fn start_line(&mut self) {
        self.out.extend(std::iter::repeat_n("  ", self.indent));
    }

    fn put(&mut self, text: impl fmt::Display) {
        let _ = write!(self.out, "{text}");
    }

    /// `items`, each printed by `one`, with commas between them.
    fn list<T>(&mut self, items: impl IntoIterator<Item = T>, mut one: impl FnMut(&mut Self, T)) {
        for (i, item) in items.into_iter().enumerate() {
            if i > 0 {
                self.out.push_str(", ");
            }
            one(self, item);
        }
    }

    fn name(&mut self, v: ValueId) {
        self.put(Spelled(self.f.value(v).name()));
    }

    fn typed_name(&mut self, v: ValueId) {
        self.put(format_args!("{} {}", self.f.ty(v), Spelled(self.f.value(v).name())));
    }

    fn elide(&self) -> Elide {
        Elide(self.options.elide_above)
    }

    fn function(&mut self) {
        let f = self.f;
        self.start_line();
        let is_tag = OPSET_TAGS.iter().any(|(tag, _)| f.opset() == *tag);
        let opset = if is_tag { value::quoted(f.opset(), '`') } else { Spelled(f.opset()).to_string() };
        self.put(format_args!("func {}<{opset}>", Spelled(f.name())));
        self.signature();
        self.bounds();
        self.out.push_str(" {\n");
        self.block_body(f.body());
        self.out.push_str(";\n");
    }

    fn signature(&mut self) {
        let inputs = self.f.inputs();
        let start = self.out.len();
        self.out.push('(');
        self.list(inputs.iter().copied(), Self::typed_name);
        self.out.push(')');
        if self.out.len() <= WIDTH {
            return;
        }
        self.out.truncate(start);
        self.out.push_str("(\n");
        self.indent += 2;
        for (i, &v) in inputs.iter().enumerate() {
            self.start_line();
            self.typed_name(v);
            self.out.push_str(if i + 1 < inputs.len() { ",\n" } else { ")" });
        }
        self.indent -= 2;
    }

    /// The bounds of unknown sizes, where there are any.
    fn bounds(&mut self) {
        let f = self.f;
        let mut word = " where ";
        for (i, range) in (0..f.symbol_count()).map(|i| (i, f.symbol_range(Symbol(i as u32)))) {
            if range.lo == 0 && range.hi.is_none() {
                continue;
            }
            self.put(format_args!("{word}{} <= s{i}", range.lo));
            if let Some(hi) = range.hi {
                self.put(format_args!(" <= {hi}"));
            }
            word = ", ";
        }
    }

    /// The ops, the closing brace and the outputs of a block whose opening brace is printed.
    fn block_body(&mut self, b: BlockId) {
        let f = self.f;
        self.indent += 1;
        for op in f.ops(b) {
            if f.op(op).results().iter().any(|&v| self.inlined(&Operand::Value(v)).is_some()) {
                continue;
            }
            self.start_line();
            self.op(op);
            self.out.push('\n');
        }
        self.indent -= 1;
        self.start_line();
        self.out.push_str("} -> (");
        self.list(f.block(b).outputs().iter().copied(), Self::name);
        self.out.push(')');
    }

    fn op(&mut self, op: OpId) {
        self.op_head(op);
        let f = self.f;
        if !f.op(op).blocks().is_empty() {
            self.out.push(' ');
        }
        self.list(f.op(op).blocks().iter().copied(), |p, b| {
            p.out.push_str("block(");
            p.list(f.block(b).inputs().iter().copied(), Self::typed_name);
            p.out.push_str(") {\n");
            p.block_body(b);
        });
        self.out.push(';');
    }

    fn op_head(&mut self, op: OpId) {
        let data = self.f.op(op);
        self.list(data.results().iter().copied(), Self::typed_name);
        if !data.results().is_empty() {
            self.out.push_str(" = ");
        }
        // A `const` in backticks has no `val` in its parentheses that is an attribute.
        let val = self.const_val(data);
        let plain = *data.kind() != *"const" || data.param("val").is_empty();
        if plain {
            self.put(Spelled(data.kind()));
        } else {
            self.put(value::quoted(data.kind(), '`'));
        }
        self.out.push('(');
        let separator = self.params(data);
        if let Some(literal) = val {
            self.put(format_args!("{separator}val = "));
            match data.results() {
                [v] if *self.f.ty(*v) == literal.ty => self.put(content(literal, self.elide())),
                _ => self.put(value::typed(literal, self.elide())),
            }
        }
        self.out.push(')');
        self.attributes(data);
    }

    /// `val` of a `const` that is printed in parentheses.
    fn const_val(&self, data: &OpData) -> Option<&'p Literal> {
        let f = self.f;
        if *data.kind() != *"const" || !data.param("val").is_empty() {
            return None;
        }
        data.attributes().find(|(n, _)| **n == *"val").map(|(_, l)| f.literal(l))
    }

    /// Values first, constants last; each in name order. Returns what to put before a further item.
    fn params(&mut self, data: &OpData) -> &'static str {
        let constant = |p: &Self, operands: &[Operand]| operands.iter().all(|o| p.literal_of(o).is_some());
        let (literals, values): (Vec<_>, Vec<_>) = data.params().partition(|(_, o)| constant(self, o));
        let separator = if literals.is_empty() && values.is_empty() { "" } else { ", " };
        self.list(values.into_iter().chain(literals), |p, (name, operands)| {
            p.put(format_args!("{} = ", Spelled(name)));
            match operands {
                [one] => p.operand(one),
                several => {
                    p.out.push('(');
                    p.list(several, Self::operand);
                    p.out.push(')');
                }
            }
        });
        separator
    }

    fn operand(&mut self, operand: &Operand) {
        match (self.literal_of(operand), operand) {
            (Some(literal), _) => self.put(value::shortest(literal, self.elide())),
            (None, Operand::Value(v)) => self.name(*v),
            (None, Operand::Literal(_)) => {}
        }
    }

    fn attributes(&mut self, data: &OpData) {
        let f = self.f;
        let const_val = self.const_val(data).is_some();
        let full = self.options.full;
        let shown = data.attributes().filter(|(n, _)| !(const_val && **n == *"val") && (full || **n != *"name"));
        let shown: Vec<_> = shown.collect();
        if shown.is_empty() {
            return;
        }
        self.out.push('[');
        self.list(shown, |p, (name, l)| {
            p.put(format_args!("{} = {}", Spelled(name), value::shortest(f.literal(l), p.elide())));
        });
        self.out.push(']');
    }

    /// The literal that is printed for an operand.
    fn literal_of(&self, operand: &Operand) -> Option<&'p Literal> {
        match operand {
            Operand::Literal(l) => Some(self.f.literal(*l)),
            Operand::Value(_) => self.inlined(operand),
        }
    }

    /// The literal of a `const` op that is printed at its uses.
    fn inlined(&self, operand: &Operand) -> Option<&'p Literal> {
        let f = self.f;
        let &Operand::Value(v) = operand else { return None };
        let op = f.producer(v)?;
        let data = f.op(op);
        if self.options.full || data.params().next().is_some() || data.results().len() != 1 {
            return None;
        }
        let literal = f.const_value(v)?;
        let bare = data.attributes().all(|(n, _)| **n == *"val" || **n == *"name") && data.blocks().is_empty();
        let uses = f.value(v).uses();
        let used = !uses.is_empty() && !uses.iter().any(|u| matches!(u, Use::Output { .. }));
        (bare && used && *f.ty(v) == literal.ty && is_small(literal)).then_some(literal)
    }
}

/// Whether a constant is a scalar or a short vector.
fn is_small(literal: &Literal) -> bool {
    let ValueType::Tensor(ty) = &literal.ty else { return false };
    let inline = matches!(literal.data, LiteralData::Bytes(_) | LiteralData::Strings(_));
    inline && ty.rank() <= 1 && ty.volume().is_some_and(|n| n <= INLINE_ELEMENTS)
}

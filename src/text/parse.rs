//! Parsing of programs, functions, blocks and ops.

use std::collections::HashMap;

use super::lex::{Lexer, Token};
use super::{MAX_DEPTH, OPSET_TAGS, ParseError, is_plain};
use crate::ir::{
    ArrayFeature, BlockId, Dim, Feature, FeatureKind, Flexibility, Function, Interface, Literal, LiteralId, Name,
    NoWeights, OpId, OpSpec, Operand, Place, Program, SymbolRange, TensorType, ValueId, ValueType,
};

/// Reads a program in any spelling of MIL text.
///
/// Literal operands become literal bindings. The interface of each function is derived from its signature; no weights
/// are attached.
///
/// # Errors
/// With line and column, when the text is not MIL text, names a value that is not visible, or a constant does not fit
/// its type.
pub fn parse(text: &str) -> Result<Program, ParseError> {
    Parser::new(text)?.program()
}

type Result<T, E = ParseError> = std::result::Result<T, E>;

pub(super) struct Parser<'t> {
    lexer: Lexer<'t>,
    /// Where the current token starts.
    at: usize,
    pub(super) token: Token,
    depth: usize,
    /// Bounds of the unknown sizes of the current function.
    pub(super) symbols: Vec<SymbolRange>,
    /// Whether the current function has a `?` for a size.
    pub(super) anonymous: bool,
    /// Visible values, innermost block last.
    scopes: Vec<HashMap<Name, ValueId>>,
}

/// The parenthesised parameters and the bracketed attributes of an op.
#[derive(Default)]
struct Arguments {
    inputs: Vec<(Name, Vec<Operand>)>,
    attributes: Vec<(Name, LiteralId)>,
}

impl<'t> Parser<'t> {
    fn new(text: &'t str) -> Result<Self> {
        let mut lexer = Lexer::new(text);
        let (at, token) = lexer.next()?;
        let (symbols, scopes) = (Vec::new(), Vec::new());
        Ok(Parser { lexer, at, token, depth: 0, symbols, anonymous: false, scopes })
    }

    // Tokens.

    pub(super) fn error<T>(&self, message: impl Into<String>) -> Result<T> {
        Err(self.lexer.error(self.at, message))
    }

    pub(super) fn expected<T>(&self, what: &str) -> Result<T> {
        self.error(format!("expected {what}, found {}", self.token))
    }

    pub(super) fn advance(&mut self) -> Result<Token> {
        let (at, token) = self.lexer.next()?;
        self.at = at;
        Ok(std::mem::replace(&mut self.token, token))
    }

    pub(super) fn is(&self, c: char) -> bool {
        self.token == Token::Punct(c)
    }

    pub(super) fn is_word(&self, word: &str) -> bool {
        matches!(&self.token, Token::Word(w) if w == word)
    }

    pub(super) fn eat(&mut self, c: char) -> Result<bool> {
        let found = self.is(c);
        if found {
            self.advance()?;
        }
        Ok(found)
    }

    pub(super) fn expect(&mut self, c: char) -> Result<()> {
        if self.eat(c)? { Ok(()) } else { self.expected(&Token::Punct(c).to_string()) }
    }

    fn expect_word(&mut self, word: &str) -> Result<()> {
        if !self.is_word(word) {
            return self.expected(&format!("`{word}`"));
        }
        self.advance().map(|_| ())
    }

    /// Items up to `close`, with commas between them.
    pub(super) fn list(&mut self, close: char, mut one: impl FnMut(&mut Self) -> Result<()>) -> Result<()> {
        if self.eat(close)? {
            return Ok(());
        }
        loop {
            one(self)?;
            if self.eat(close)? {
                return Ok(());
            }
            self.expect(',')?;
        }
    }

    /// Guards recursion.
    pub(super) fn nested<T>(&mut self, inner: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.depth == MAX_DEPTH {
            return self.error("nested too deeply");
        }
        self.depth += 1;
        let out = inner(self);
        self.depth -= 1;
        out
    }

    /// An identifier or a name in backticks.
    fn name(&mut self, what: &str) -> Result<Name> {
        match self.token {
            Token::Word(_) | Token::Name(_) => match self.advance()? {
                Token::Word(s) | Token::Name(s) => Ok(s.into()),
                _ => self.expected(what),
            },
            _ => self.expected(what),
        }
    }

    pub(super) fn unsigned(&mut self, what: &str) -> Result<u64> {
        match &self.token {
            Token::Number(n) => match n.parse() {
                Ok(n) => self.advance().map(|_| n),
                Err(_) => self.expected(what),
            },
            _ => self.expected(what),
        }
    }

    // Programs.

    fn program(&mut self) -> Result<Program> {
        self.expect_word("program")?;
        self.expect('(')?;
        let Token::Number(_) = self.token else { return self.expected("a version") };
        self.advance()?;
        self.expect(')')?;
        let attributes = self.attributes()?;
        let mut functions: Vec<Function> = Vec::new();
        self.expect('{')?;
        while !self.eat('}')? {
            let at = self.at;
            let f = self.function()?;
            if functions.iter().any(|g| g.name() == f.name()) {
                return Err(self.lexer.error(at, format!("function `{}` is there already", f.name())));
            }
            functions.push(f);
        }
        if self.token != Token::End {
            return self.expected("the end");
        }
        let find = |name: &str| attributes.iter().find(|(n, _)| *n == *name).map(|(_, l)| l);
        let version = match find("specificationVersion").map(|l| l.to_ints(&NoWeights).unwrap_or_default()) {
            Some(v) => v.first().and_then(|&v| i32::try_from(v).ok()),
            // The first opset, of iOS 15, came with specification version 6.
            None => Some(functions.iter().map(|f| f.opset_version() as i32).max().map_or(9, |n| n.saturating_add(1))),
        };
        let Some(version) = version else { return self.error("`specificationVersion` is not a number") };
        let mut program = Program::new(version);
        if let Some(default) = find("defaultFunction") {
            let Some(name) = default.as_str() else { return self.error("`defaultFunction` is not a string") };
            program.set_default_function(Some(name.into()));
        }
        functions.into_iter().for_each(|f| program.add_function(f));
        Ok(program)
    }

    /// Bracketed attributes, if there are any.
    fn attributes(&mut self) -> Result<Vec<(Name, Literal)>> {
        let mut out = Vec::new();
        if self.eat('[')? {
            self.list(']', |p| {
                let name = p.name("an attribute")?;
                if out.iter().any(|(n, _)| *n == name) {
                    return p.error(format!("attribute `{name}` is there already"));
                }
                p.expect('=')?;
                let literal = p.literal(None)?;
                out.push((name, literal));
                Ok(())
            })?;
        }
        Ok(out)
    }

    // Functions.

    fn function(&mut self) -> Result<Function> {
        self.expect_word("func")?;
        self.symbols.clear();
        self.anonymous = false;
        let name = self.name("the name of a function")?;
        self.expect('<')?;
        let opset = self.opset()?;
        self.expect('>')?;
        let mut f = Function::new(name, opset);
        self.scopes = vec![HashMap::new()];
        self.expect('(')?;
        self.list(')', |p| {
            let (ty, name) = p.typed_name()?;
            let v = f.add_input(name.clone(), ty);
            p.define(name, v);
            Ok(())
        })?;
        self.attributes()?;
        if self.is_word("where") {
            self.bounds()?;
        }
        let body = f.body();
        self.block_body(&mut f, body)?;
        self.eat(';')?;
        for range in self.symbols.drain(..) {
            f.add_symbol(range);
        }
        let interface = interface(&f);
        f.set_interface(interface);
        f.reset_revision();
        Ok(f)
    }

    fn opset(&mut self) -> Result<Name> {
        let is_word = matches!(self.token, Token::Word(_));
        let name = self.name("an opset")?;
        let tag = OPSET_TAGS.iter().find(|(tag, _)| is_word && name == *tag);
        Ok(tag.map_or(name, |(_, opset)| (*opset).into()))
    }

    /// `where 1 <= s0 <= 64, 0 <= s1`.
    fn bounds(&mut self) -> Result<()> {
        self.expect_word("where")?;
        loop {
            let lo = self.unsigned("a lower bound")?;
            self.expect('≤')?;
            let symbol = self.symbol()?;
            let hi = if self.eat('≤')? { Some(self.unsigned("an upper bound")?) } else { None };
            if let Some(range) = self.symbols.get_mut(symbol.index()) {
                *range = SymbolRange { lo, hi };
            }
            if !self.eat(',')? {
                return Ok(());
            }
        }
    }

    fn typed_name(&mut self) -> Result<(ValueType, Name)> {
        Ok((self.value_type()?, self.name("the name of a value")?))
    }

    fn define(&mut self, name: Name, v: ValueId) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(name, v);
        }
    }

    fn value(&mut self) -> Result<ValueId> {
        let found = match &self.token {
            Token::Word(n) | Token::Name(n) => self.scopes.iter().rev().find_map(|s| s.get(n.as_str())).copied(),
            _ => return self.expected("the name of a value"),
        };
        match found {
            Some(v) => self.advance().map(|_| v),
            None => self.error(format!("no value {} is visible here", self.token)),
        }
    }

    // Blocks and ops.

    /// `{ ops } -> (outputs)`.
    fn block_body(&mut self, f: &mut Function, b: BlockId) -> Result<()> {
        self.expect('{')?;
        while !self.eat('}')? {
            self.op(f, b)?;
        }
        self.expect('→')?;
        self.expect('(')?;
        self.list(')', |p| {
            let v = p.value()?;
            f.add_output(b, v);
            Ok(())
        })
    }

    fn op(&mut self, f: &mut Function, b: BlockId) -> Result<()> {
        let mut results = Vec::new();
        if self.at_type() {
            loop {
                let (ty, name) = self.typed_name()?;
                results.push((name, ty));
                if !self.eat(',')? {
                    break;
                }
            }
            self.expect('=')?;
        }
        let is_const = self.is_word("const");
        let kind = self.name("an op")?;
        let val_type = match &results[..] {
            [(_, ty)] if is_const => Some(ty.clone()),
            _ => None,
        };
        let mut arguments = self.arguments(f, is_const, val_type.as_ref())?;
        for (name, literal) in self.attributes()? {
            if arguments.attributes.iter().any(|(n, _)| *n == name) {
                return self.error(format!("attribute `{name}` is there already"));
            }
            arguments.attributes.push((name, f.intern(literal)));
        }
        let Arguments { inputs, attributes } = arguments;
        let op = f.insert_op(Place::End(b), OpSpec { kind, inputs, attributes, results });
        self.blocks(f, op)?;
        self.expect(';')?;
        for &v in f.op(op).results() {
            self.define(f.value(v).name().clone(), v);
        }
        Ok(())
    }

    fn arguments(&mut self, f: &mut Function, is_const: bool, val_type: Option<&ValueType>) -> Result<Arguments> {
        let mut out = Arguments::default();
        self.expect('(')?;
        self.list(')', |p| {
            let name = p.name("a parameter")?;
            if out.inputs.iter().any(|(n, _)| *n == name) || out.attributes.iter().any(|(n, _)| *n == name) {
                return p.error(format!("parameter `{name}` is there already"));
            }
            p.expect('=')?;
            if is_const && name == "val" {
                let literal = p.literal(val_type)?;
                out.attributes.push((name, f.intern(literal)));
                return Ok(());
            }
            let mut operands = Vec::new();
            if p.eat('(')? {
                p.list(')', |p| {
                    operands.push(p.operand(f)?);
                    Ok(())
                })?;
            } else {
                operands.push(p.operand(f)?);
            }
            out.inputs.push((name, operands));
            Ok(())
        })?;
        Ok(out)
    }

    fn operand(&mut self, f: &mut Function) -> Result<Operand> {
        let is_name = match &self.token {
            Token::Name(_) => true,
            Token::Word(w) => is_plain(w),
            _ => false,
        };
        if is_name {
            return Ok(Operand::Value(self.value()?));
        }
        let literal = self.literal(None)?;
        Ok(Operand::Literal(f.intern(literal)))
    }

    /// `block(inputs) { ops } -> (outputs)`, several with commas between them.
    fn blocks(&mut self, f: &mut Function, op: OpId) -> Result<()> {
        if !self.is_word("block") {
            return Ok(());
        }
        loop {
            self.nested(|p| p.block(f, op))?;
            if !self.eat(',')? {
                return Ok(());
            }
        }
    }

    fn block(&mut self, f: &mut Function, op: OpId) -> Result<()> {
        self.expect_word("block")?;
        let b = f.add_block(op);
        self.scopes.push(HashMap::new());
        self.expect('(')?;
        self.list(')', |p| {
            let (ty, name) = p.typed_name()?;
            let v = f.add_block_input(b, name.clone(), ty);
            p.define(name, v);
            Ok(())
        })?;
        self.block_body(f, b)?;
        self.scopes.pop();
        Ok(())
    }
}

/// What a description would say of the function's signature.
fn interface(f: &Function) -> Interface {
    let feature = |v: ValueId, make: fn(ArrayFeature) -> FeatureKind, ty: &TensorType| Feature {
        name: f.value(v).name().clone(),
        short_description: String::new(),
        kind: make(array(f, ty)),
        optional: false,
    };
    let arrays = |values: &[ValueId]| {
        values.iter().filter_map(|&v| Some(feature(v, FeatureKind::Array, f.tensor(v)?))).collect::<Vec<_>>()
    };
    let states = f.inputs().iter().filter_map(|&v| Some(feature(v, FeatureKind::State, f.ty(v).as_state()?)));
    let mut outputs = arrays(f.outputs());
    for array in outputs.iter_mut().filter_map(|o| match &mut o.kind {
        FeatureKind::Array(a) if a.flexibility != Flexibility::Fixed => Some(a),
        _ => None,
    }) {
        *array = ArrayFeature { shape: Vec::new(), flexibility: Flexibility::Fixed, ..array.clone() };
    }
    Interface { inputs: arrays(f.inputs()), outputs, states: states.collect() }
}

/// Unknown sizes are as small as they may be by default.
fn array(f: &Function, ty: &TensorType) -> ArrayFeature {
    let range = |d: &Dim| match d.as_known() {
        Some(n) => (n, Some(n)),
        None => match d.symbols() {
            [s] if d.coef() == 1 => (f.symbol_range(*s).lo.max(1), f.symbol_range(*s).hi),
            _ => (1, None),
        },
    };
    let ranges: Vec<_> = ty.shape.iter().map(range).collect();
    let shape = ranges.iter().map(|(lo, _)| *lo).collect();
    let flexibility = if ty.known_shape().is_some() { Flexibility::Fixed } else { Flexibility::Ranges(ranges) };
    ArrayFeature { dtype: Some(ty.dtype), shape, flexibility, default: None }
}

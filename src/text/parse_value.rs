//! Parsing of types and literals.

use std::sync::Arc;

use super::lex::Token;
use super::parse::Parser;
use super::value::item_type;
use super::{ParseError, number};
use crate::ir::{
    BlobRef, DType, Dim, Literal, LiteralData, NoWeights, Shape, Symbol, SymbolRange, TensorType, ValueType, pack_ints,
};

type Result<T, E = ParseError> = std::result::Result<T, E>;

/// More unknown sizes than this in one function are taken for an error of the text.
const MAX_SYMBOLS: u32 = 1 << 16;

/// One element of a literal.
enum Scalar {
    Text(String),
    Number(String),
    Truth(bool),
}

impl Parser<'_> {
    /// Whether a type starts here.
    pub(super) fn at_type(&self) -> bool {
        match &self.token {
            Token::Word(w) => {
                matches!(w.as_str(), "tensor" | "list" | "tuple" | "dict" | "state") || DType::from_name(w).is_some()
            }
            _ => self.is('?'),
        }
    }

    pub(super) fn value_type(&mut self) -> Result<ValueType> {
        self.nested(Self::any_type)
    }

    fn any_type(&mut self) -> Result<ValueType> {
        if self.eat('?')? {
            return Ok(ValueType::Missing);
        }
        if !self.at_type() {
            return self.expected("a type");
        }
        let Token::Word(word) = self.advance()? else { return self.expected("a type") };
        if let Some(dtype) = DType::from_name(&word) {
            return Ok(TensorType::new(dtype, []).into());
        }
        self.expect('<')?;
        let ty = match word.as_str() {
            "tensor" => self.tensor_type()?,
            "list" => {
                let element = Box::new(self.value_type()?);
                self.expect(',')?;
                let length = if self.eat('?')? { None } else { Some(self.dim()?) };
                ValueType::List { element, length }
            }
            "dict" => {
                let key = Box::new(self.value_type()?);
                self.expect(',')?;
                ValueType::Dictionary { key, value: Box::new(self.value_type()?) }
            }
            "state" => match self.value_type()? {
                ValueType::Tensor(t) => ValueType::State(t),
                other => return self.error(format!("a state wraps a tensor, not {other}")),
            },
            _ => {
                let mut types = Vec::new();
                self.list('>', |p| {
                    types.push(p.value_type()?);
                    Ok(())
                })?;
                return Ok(ValueType::Tuple(types));
            }
        };
        self.expect('>')?;
        Ok(ty)
    }

    fn tensor_type(&mut self) -> Result<ValueType> {
        let dtype = match &self.token {
            Token::Word(w) => DType::from_name(w),
            _ => None,
        };
        let Some(dtype) = dtype else { return self.expected("an element type") };
        self.advance()?;
        self.expect(',')?;
        self.expect('[')?;
        if self.eat('*')? {
            self.expect(']')?;
            return Ok(ValueType::Unranked(dtype));
        }
        let mut shape = Shape::new();
        self.list(']', |p| {
            shape.push(p.dim()?);
            Ok(())
        })?;
        Ok(TensorType { dtype, shape }.into())
    }

    /// `8`, `s0`, `6*s0*s1` or `?`.
    fn dim(&mut self) -> Result<Dim> {
        if self.is('?') {
            self.anonymous = true;
            self.symbols.push(SymbolRange { lo: 0, hi: None });
            if self.symbols.len() > MAX_SYMBOLS as usize {
                return self.error("too many unknown sizes");
            }
            self.advance()?;
            return Ok(Dim::unknown(Symbol(self.symbols.len() as u32 - 1)));
        }
        let mut dim = Dim::known(1);
        loop {
            let factor = match self.token {
                Token::Number(_) => Dim::known(self.unsigned("a size")?),
                _ => Dim::unknown(self.symbol()?),
            };
            match dim.checked_mul(&factor) {
                Some(product) => dim = product,
                None => return self.error("the size overflows"),
            }
            if !self.eat('*')? {
                return Ok(dim);
            }
        }
    }

    /// A symbol, known from here on.
    pub(super) fn symbol(&mut self) -> Result<Symbol> {
        let number = match &self.token {
            Token::Word(w) => w.strip_prefix('s').and_then(|n| n.parse::<u32>().ok()),
            _ => None,
        };
        let Some(number) = number else { return self.expected("a size") };
        if number >= MAX_SYMBOLS {
            return self.error("too many unknown sizes");
        }
        if self.anonymous {
            return self.error("`?` and named unknown sizes do not mix in one function");
        }
        while self.symbols.len() <= number as usize {
            self.symbols.push(SymbolRange { lo: 0, hi: None });
        }
        self.advance()?;
        Ok(Symbol(number))
    }

    /// A literal: `type(content)`, the content alone where `expected` gives the type, or one that implies its type.
    pub(super) fn literal(&mut self, expected: Option<&ValueType>) -> Result<Literal> {
        self.nested(|p| {
            if p.at_type() {
                let ty = p.value_type()?;
                p.expect('(')?;
                let data = p.content(&ty)?;
                p.expect(')')?;
                return Ok(Literal { ty, data });
            }
            match expected {
                Some(ty) => Ok(Literal { ty: ty.clone(), data: p.content(ty)? }),
                None => p.bare(),
            }
        })
    }

    fn content(&mut self, ty: &ValueType) -> Result<LiteralData> {
        match &self.token {
            Token::Word(w) => match w.as_str() {
                "BLOBFILE" => return self.blob(),
                "bytes" => return self.raw_bytes(),
                "strings" => return self.raw_strings(),
                "absent" => {
                    self.advance()?;
                    return Ok(LiteralData::Absent);
                }
                _ => {}
            },
            Token::Punct('{') => return self.pairs(ty),
            Token::Punct('(') => return self.items(ty, ')'),
            Token::Punct('[') if matches!(ty, ValueType::List { .. } | ValueType::Tuple(_)) => {
                return self.items(ty, ']');
            }
            Token::Punct('.') => return self.error("this constant was left out when the text was printed"),
            _ => {}
        }
        let Some(tensor) = ty.as_tensor() else { return self.expected(&format!("content of type {ty}")) };
        let mut scalars = Vec::new();
        self.scalars(&mut scalars)?;
        if tensor.volume() != Some(scalars.len() as u64) {
            return self.error(format!("the number of elements, {}, does not fill {ty}", scalars.len()));
        }
        self.pack(tensor.dtype, scalars)
    }

    /// A literal of a type that its content implies.
    fn bare(&mut self) -> Result<Literal> {
        let is_vector = self.is('[');
        let mut scalars = Vec::new();
        if !matches!(self.token, Token::Number(_) | Token::Str(_) | Token::Word(_) | Token::Punct('[')) {
            return self.expected("a value or a constant");
        }
        self.scalars(&mut scalars)?;
        let is_whole = |s: &Scalar| matches!(s, Scalar::Number(n) if n.parse::<i64>().is_ok());
        let dtype = match scalars.first() {
            None => return self.error("an empty constant needs a type"),
            Some(Scalar::Text(_)) => DType::String,
            Some(Scalar::Truth(_)) => DType::Bool,
            Some(Scalar::Number(_)) if scalars.iter().all(is_whole) => DType::I32,
            Some(Scalar::Number(_)) => DType::F32,
        };
        let shape = [scalars.len() as u64];
        let ty = TensorType::fixed(dtype, if is_vector { &shape } else { &[] });
        Ok(Literal { ty: ty.into(), data: self.pack(dtype, scalars)? })
    }

    fn pack(&self, dtype: DType, scalars: Vec<Scalar>) -> Result<LiteralData> {
        if dtype == DType::String {
            let text = scalars.into_iter().map(|s| match s {
                Scalar::Text(text) => Ok(Arc::from(text)),
                _ => self.error("expected a string"),
            });
            return Ok(LiteralData::Strings(text.collect::<Result<Vec<Arc<str>>>>()?.into()));
        }
        let raw = scalars.into_iter().map(|s| {
            let text = match &s {
                Scalar::Text(text) | Scalar::Number(text) => text,
                Scalar::Truth(true) => "true",
                Scalar::Truth(false) => "false",
            };
            number::read(dtype, text).or_else(|message| self.error(message))
        });
        Ok(LiteralData::Bytes(pack_ints(dtype, &raw.collect::<Result<Vec<i64>>>()?).into()))
    }

    /// One element, or elements in nested brackets, row by row.
    fn scalars(&mut self, out: &mut Vec<Scalar>) -> Result<()> {
        if self.eat('[')? {
            return self.nested(|p| p.list(']', |p| p.scalars(out)));
        }
        let scalar = match self.advance()? {
            Token::Number(n) => Scalar::Number(n),
            Token::Str(s) => Scalar::Text(s),
            Token::Word(w) if w == "true" || w == "false" => Scalar::Truth(w == "true"),
            Token::Word(w) if w == "inf" => Scalar::Number(w),
            Token::Word(w) if w == "nan" => Scalar::Number(self.nan()?),
            other => return self.error(format!("expected an element before this, found {other}")),
        };
        out.push(scalar);
        Ok(())
    }

    /// The rest of `nan` or `nan(0x7e01)`.
    fn nan(&mut self) -> Result<String> {
        if !self.eat('(')? {
            return Ok("nan".into());
        }
        let Token::Number(bits) = self.advance()? else { return self.expected("the bits of a nan") };
        self.expect(')')?;
        Ok(format!("nan({bits})"))
    }

    /// `BLOBFILE("file", 64)` or `BLOBFILE(path = string("file"), offset = uint64(64))`.
    fn blob(&mut self) -> Result<LiteralData> {
        self.advance()?;
        self.expect('(')?;
        self.keyword("path")?;
        let path = self.literal(None)?;
        self.expect(',')?;
        self.keyword("offset")?;
        let u64_type = ValueType::from(TensorType::fixed(DType::U64, &[]));
        let offset = self.literal(Some(&u64_type))?;
        self.expect(')')?;
        match (path.as_str(), offset.to_ints(&NoWeights).as_deref()) {
            (Some(file), Ok(&[offset])) => Ok(LiteralData::Blob(BlobRef { file: file.into(), offset: offset as u64 })),
            _ => self.error("a blob is a path and an offset"),
        }
    }

    fn keyword(&mut self, word: &str) -> Result<()> {
        if self.is_word(word) {
            self.advance()?;
            self.expect('=')?;
        }
        Ok(())
    }

    fn string(&mut self) -> Result<String> {
        match self.token {
            Token::Str(_) => match self.advance()? {
                Token::Str(s) => Ok(s),
                _ => self.expected("a string"),
            },
            _ => self.expected("a string"),
        }
    }

    fn raw_bytes(&mut self) -> Result<LiteralData> {
        self.advance()?;
        self.expect('(')?;
        let text = self.string()?;
        self.expect(')')?;
        let digits: Option<Vec<u8>> = text.chars().map(|c| c.to_digit(16).map(|d| d as u8)).collect();
        match digits.as_deref().map(<[u8]>::as_chunks::<2>) {
            Some((pairs, [])) => {
                Ok(LiteralData::Bytes(pairs.iter().map(|[hi, lo]| hi << 4 | lo).collect::<Vec<u8>>().into()))
            }
            _ => self.error("bytes are pairs of hexadecimal digits"),
        }
    }

    fn raw_strings(&mut self) -> Result<LiteralData> {
        self.advance()?;
        self.expect('(')?;
        let mut out = Vec::new();
        self.list(')', |p| {
            out.push(Arc::<str>::from(p.string()?));
            Ok(())
        })?;
        Ok(LiteralData::Strings(out.into()))
    }

    fn items(&mut self, ty: &ValueType, close: char) -> Result<LiteralData> {
        self.advance()?;
        let mut items = Vec::new();
        self.list(close, |p| {
            items.push(p.literal(item_type(ty, items.len()))?);
            Ok(())
        })?;
        Ok(LiteralData::Items(items))
    }

    fn pairs(&mut self, ty: &ValueType) -> Result<LiteralData> {
        let (key, value) = match ty {
            ValueType::Dictionary { key, value } => (Some(&**key), Some(&**value)),
            _ => (None, None),
        };
        self.advance()?;
        let mut pairs = Vec::new();
        self.list('}', |p| {
            p.expect('{')?;
            let key = p.literal(key)?;
            p.expect(',')?;
            let value = p.literal(value)?;
            p.expect('}')?;
            pairs.push((key, value));
            Ok(())
        })?;
        Ok(LiteralData::Pairs(pairs))
    }
}

//! Patterns.

use std::collections::BTreeMap;

use crate::ir::{Function, Name, OpId, Operand, ValueId};

/// A tree of ops as text, checked when it is built.
///
/// ```text
/// softmax(x = add(x = mul(x = ?scores, y = ?scale), y = ?mask), axis = -1)
/// ```
///
/// An op matches by kind and by the parameters that the pattern names; others may be bound to anything. `?name` binds a
/// value and must bind the same value wherever it occurs, `_` matches any value, and numbers, `true`, `false` and
/// quoted strings match constants, however they are stored. `x` and `y` of commutative ops match either way round.
/// Matching follows definitions, never position or names, and stays inside one block.
#[derive(Clone, PartialEq, Debug)]
pub struct Pattern {
    root: Node,
}

#[derive(Clone, PartialEq, Debug)]
enum Node {
    Any,
    Var(Name),
    Op(Name, Vec<(Name, Node)>),
    Number(f64),
    Bool(bool),
    Text(String),
}

/// What the variables of a pattern were bound to.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Match {
    values: BTreeMap<Name, ValueId>,
    ops: Vec<OpId>,
}

impl Match {
    /// The value bound to `?name`.
    pub fn get(&self, name: &str) -> Option<ValueId> {
        self.values.get(name).copied()
    }
    /// The matched ops, in the order in which the pattern names them.
    pub fn ops(&self) -> &[OpId] {
        &self.ops
    }
}

/// Why a pattern is not one.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("pattern, column {column}: {message}")]
pub struct PatternError {
    /// Where, counted from one.
    pub column: usize,
    /// What is wrong.
    pub message: String,
}

impl Pattern {
    /// Parses a pattern; its root is an op.
    ///
    /// # Errors
    /// [`PatternError`] with the column.
    pub fn parse(text: &str) -> Result<Pattern, PatternError> {
        let mut p = Parser { text, at: 0, depth: 0 };
        let root = p.node()?;
        p.space();
        if p.at < text.len() {
            return Err(p.error("expected the end"));
        }
        match root {
            Node::Op(..) => Ok(Pattern { root }),
            _ => Err(PatternError { column: 1, message: "the root must be an op".into() }),
        }
    }

    /// Matches the pattern with its root at `op`.
    pub fn matches(&self, f: &Function, op: OpId) -> Option<Match> {
        let Node::Op(kind, params) = &self.root else { return None };
        let mut found = Match::default();
        match_op(f, op, kind, params, &mut found).then_some(found)
    }
}

const COMMUTATIVE: &[&str] =
    &["add", "mul", "maximum", "minimum", "equal", "not_equal", "logical_and", "logical_or", "logical_xor"];

fn match_op(f: &Function, op: OpId, kind: &str, params: &[(Name, Node)], found: &mut Match) -> bool {
    if f.op(op).kind() != kind {
        return false;
    }
    let before = found.clone();
    if match_params(f, op, params, false, found) {
        return true;
    }
    *found = before.clone();
    if COMMUTATIVE.contains(&kind) && match_params(f, op, params, true, found) {
        return true;
    }
    *found = before;
    false
}

fn match_params(f: &Function, op: OpId, params: &[(Name, Node)], swapped: bool, found: &mut Match) -> bool {
    found.ops.push(op);
    params.iter().all(|(name, node)| {
        let name = match (&**name, swapped) {
            ("x", true) => "y",
            ("y", true) => "x",
            (other, _) => other,
        };
        match f.op(op).param(name) {
            [operand] => match_operand(f, op, operand, node, found),
            _ => false,
        }
    })
}

fn match_operand(f: &Function, reader: OpId, operand: &Operand, node: &Node, found: &mut Match) -> bool {
    match node {
        Node::Any => true,
        Node::Var(name) => match operand {
            Operand::Value(v) => *found.values.entry(name.clone()).or_insert(*v) == *v,
            Operand::Literal(_) => false,
        },
        Node::Op(kind, params) => operand
            .as_value()
            .and_then(|v| f.producer(v))
            .filter(|&p| f.op(p).block() == f.op(reader).block())
            .is_some_and(|p| match_op(f, p, kind, params, found)),
        Node::Number(n) => f.operand_literal(operand).is_some_and(|l| {
            let w = &**f.weights();
            !l.is_blob()
                && (l.to_ints(w).is_ok_and(|v| v.len() == 1 && v[0] as f64 == *n)
                    || l.to_floats(w).is_ok_and(|v| v.len() == 1 && v[0] == *n))
        }),
        Node::Bool(b) => f.operand_ints(operand).is_some_and(|v| v == [i64::from(*b)]),
        Node::Text(t) => f.operand_literal(operand).and_then(|l| l.as_str()).is_some_and(|s| s == t),
    }
}

struct Parser<'t> {
    text: &'t str,
    at: usize,
    depth: usize,
}

impl Parser<'_> {
    fn error(&self, message: &str) -> PatternError {
        PatternError { column: self.at + 1, message: message.into() }
    }

    fn space(&mut self) {
        self.at += self.text[self.at..].len() - self.text[self.at..].trim_start().len();
    }

    fn eat(&mut self, c: char) -> bool {
        self.space();
        let hit = self.text[self.at..].starts_with(c);
        if hit {
            self.at += c.len_utf8();
        }
        hit
    }

    fn word(&mut self) -> &str {
        self.space();
        let rest = &self.text[self.at..];
        let len = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(rest.len());
        self.at += len;
        &rest[..len]
    }

    fn node(&mut self) -> Result<Node, PatternError> {
        self.depth += 1;
        if self.depth > 64 {
            return Err(self.error("nested too deeply"));
        }
        let node = self.node_inside();
        self.depth -= 1;
        node
    }

    fn node_inside(&mut self) -> Result<Node, PatternError> {
        self.space();
        let rest = &self.text[self.at..];
        if self.eat('?') {
            let name = self.word().to_string();
            return if name.is_empty() { Err(self.error("expected a name")) } else { Ok(Node::Var(name.into())) };
        }
        if self.eat('"') {
            let Some(len) = self.text[self.at..].find('"') else { return Err(self.error("expected a closing quote")) };
            let text = self.text[self.at..self.at + len].to_string();
            self.at += len + 1;
            return Ok(Node::Text(text));
        }
        if rest.starts_with(|c: char| c.is_ascii_digit() || c == '-') {
            let len = rest.find(|c: char| !"+-.0123456789eE".contains(c)).unwrap_or(rest.len());
            let number = rest[..len].parse().map_err(|_| self.error("expected a number"))?;
            self.at += len;
            return Ok(Node::Number(number));
        }
        let start = self.at;
        let word = self.word().to_string();
        match &word[..] {
            "" => return Err(self.error("expected an op, ?name, _ or a constant")),
            "_" => return Ok(Node::Any),
            "true" => return Ok(Node::Bool(true)),
            "false" => return Ok(Node::Bool(false)),
            _ => {}
        }
        if crate::opset::row(&word).is_none() {
            self.at = start;
            return Err(self.error(&format!("`{word}` is no op that this crate knows")));
        }
        if !self.eat('(') {
            return Err(self.error("expected ("));
        }
        let mut params = Vec::new();
        while !self.eat(')') {
            if !params.is_empty() && !self.eat(',') {
                return Err(self.error("expected , or )"));
            }
            let name: Name = self.word().into();
            if name.is_empty() || !self.eat('=') {
                return Err(self.error("expected parameter ="));
            }
            params.push((name, self.node()?));
        }
        Ok(Node::Op(word.into(), params))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_patterns_say_where() {
        for (text, column) in
            [("", 1), ("?x", 1), ("add(x = nosuchop(x = _))", 9), ("add(x = ?a", 11), ("add(x = ?a) y", 13)]
        {
            let e = Pattern::parse(text).unwrap_err();
            assert_eq!(e.column, column, "{text}: {e}");
        }
    }
}

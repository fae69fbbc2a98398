//! Tokens of MIL text.

use std::fmt;

/// Where and why text could not be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("line {line}, column {column}: {message}")]
pub struct ParseError {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// What was wrong.
    pub message: String,
}

/// A token.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Token {
    /// An identifier or a word of the grammar.
    Word(String),
    /// A name in backticks.
    Name(String),
    /// A string in double quotes.
    Str(String),
    /// A number, as written; also `-inf`.
    Number(String),
    /// Anything else: one character, `->` (as `→`) or `<=` (as `≤`).
    Punct(char),
    /// The end of the text.
    End,
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Token::Word(s) | Token::Name(s) | Token::Number(s) => write!(f, "`{s}`"),
            Token::Str(s) => write!(f, "{s:?}"),
            Token::Punct('→') => f.write_str("`->`"),
            Token::Punct('≤') => f.write_str("`<=`"),
            Token::Punct(c) => write!(f, "`{c}`"),
            Token::End => f.write_str("the end"),
        }
    }
}

/// Splits text into tokens.
#[derive(Debug)]
pub(super) struct Lexer<'t> {
    text: &'t str,
    at: usize,
}

impl<'t> Lexer<'t> {
    pub(super) fn new(text: &'t str) -> Self {
        Lexer { text, at: 0 }
    }

    /// An error at a byte position.
    pub(super) fn error(&self, at: usize, message: impl Into<String>) -> ParseError {
        let before = self.text.get(..at).unwrap_or(self.text);
        let line_start = before.rfind('\n').map_or(0, |i| i + 1);
        ParseError {
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
            message: message.into(),
        }
    }

    /// The next token and the byte position where it starts.
    pub(super) fn next(&mut self) -> Result<(usize, Token), ParseError> {
        self.skip_blank();
        let start = self.at;
        let token = match self.peek() {
            None => Token::End,
            Some(c) if c.is_ascii_alphabetic() || c == '_' => {
                Token::Word(self.take_while(|c| c.is_ascii_alphanumeric() || c == '_' || c == '@').to_owned())
            }
            Some('"') => Token::Str(self.quoted('"')?),
            Some('`') => Token::Name(self.quoted('`')?),
            Some(c) if c.is_ascii_digit() => self.number(start),
            Some('-') => match self.rest().as_bytes().get(1) {
                Some(b'>') => self.two('→'),
                Some(c) if c.is_ascii_digit() => {
                    self.at += 1;
                    self.number(start)
                }
                Some(c) if c.is_ascii_alphabetic() => {
                    self.at += 1;
                    self.take_while(|c| c.is_ascii_alphabetic());
                    Token::Number(self.text[start..self.at].to_owned())
                }
                _ => self.one('-'),
            },
            Some('<') if self.rest().starts_with("<=") => self.two('≤'),
            Some(c) => self.one(c),
        };
        Ok((start, token))
    }

    fn rest(&self) -> &'t str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn one(&mut self, c: char) -> Token {
        self.at += c.len_utf8();
        Token::Punct(c)
    }

    fn two(&mut self, c: char) -> Token {
        self.at += 2;
        Token::Punct(c)
    }

    fn take_while(&mut self, accept: impl Fn(char) -> bool) -> &'t str {
        let rest = self.rest();
        let len = rest.find(|c| !accept(c)).unwrap_or(rest.len());
        self.at += len;
        &rest[..len]
    }

    fn skip_blank(&mut self) {
        loop {
            self.take_while(char::is_whitespace);
            if !self.rest().starts_with("//") {
                return;
            }
            self.take_while(|c| c != '\n');
        }
    }

    /// Digits, a point, and an exponent with its sign (`e` in decimal, `p` in hexadecimal).
    fn number(&mut self, start: usize) -> Token {
        let hex = self.rest().starts_with("0x");
        let mut last = ' ';
        while let Some(c) = self.peek() {
            let exponent = if hex { last == 'p' } else { last == 'e' || last == 'E' };
            if !(c.is_ascii_alphanumeric() || c == '.' || (exponent && (c == '+' || c == '-'))) {
                break;
            }
            last = c;
            self.at += 1;
        }
        Token::Number(self.text[start..self.at].to_owned())
    }

    fn quoted(&mut self, quote: char) -> Result<String, ParseError> {
        let start = self.at;
        let rest = self.rest();
        let mut out = String::new();
        let mut chars = rest.char_indices().skip(1);
        while let Some((i, c)) = chars.next() {
            let escaped = match c {
                c if c == quote => {
                    self.at += i + c.len_utf8();
                    return Ok(out);
                }
                '\\' => chars.next().map(|(_, c)| c),
                c => {
                    out.push(c);
                    continue;
                }
            };
            match escaped {
                Some(c @ ('\\' | '"' | '`' | '\'')) => out.push(c),
                Some('n') => out.push('\n'),
                Some('r') => out.push('\r'),
                Some('t') => out.push('\t'),
                Some('0') => out.push('\0'),
                Some('u') => {
                    let digits: String =
                        chars.by_ref().map(|(_, c)| c).skip_while(|&c| c == '{').take_while(|&c| c != '}').collect();
                    let c = u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32);
                    out.push(c.ok_or_else(|| self.error(start + i, "this is not the number of a character"))?);
                }
                _ => return Err(self.error(start + i, "unknown escape")),
            }
        }
        Err(self.error(start, format!("no closing {quote}")))
    }
}

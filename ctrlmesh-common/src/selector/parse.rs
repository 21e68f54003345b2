//! The string form of a selector, read as the API server reads it.
//!
//! A scanner and a recursive descent, as in apimachinery, with its corners: `in` and `notin` are words of the
//! grammar only where an operator may stand, an empty value is a value, `x in (,a)` has two, and a NUL byte ends a
//! word, or, where no word has begun, the whole text.

use std::collections::BTreeSet;
use std::iter::Peekable;
use std::vec;

use super::{Condition, Requirement, RequirementError, Selector};

/// A text that is no selector.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseSelectorError {
    /// A word or sign stands where something else must.
    #[error("found {found:?}, expected {expected}")]
    Unexpected {
        /// The word; empty at the end of the text.
        found: String,
        /// What may stand there.
        expected: &'static str,
    },
    /// The bound of `>` or `<` is no integer of 64 bits.
    #[error("{value:?} is not an integer, which `>` and `<` need")]
    NotAnInteger {
        /// What was given.
        value: String,
    },
    /// A requirement that is well formed but not allowed.
    #[error("invalid requirement on {key:?}")]
    Requirement {
        /// The label's key.
        key: String,
        /// What is wrong with it.
        source: RequirementError,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token<'a> {
    Word(&'a str),
    Sign(&'static str),
    End,
}

/// The signs of the grammar, the longer of two before its prefix.
const SIGNS: [&str; 9] = ["==", "!=", "=", "!", ">", "<", "(", ")", ","];

struct Parser<'a> {
    tokens: Peekable<vec::IntoIter<Token<'a>>>,
}

/// Parses a whole selector.
pub(super) fn selector(text: &str) -> Result<Selector, ParseSelectorError> {
    let mut parser = Parser { tokens: scan(text).into_iter().peekable() };
    let mut requirements = Vec::new();
    if *parser.peek() == Token::End {
        return Ok(Selector { requirements });
    }
    loop {
        requirements.push(parser.requirement()?);
        match parser.next() {
            Token::End => return Ok(Selector { requirements }),
            Token::Sign(",") => {}
            other => return unexpected(&other, "`,` or the end"),
        }
    }
}

impl<'a> Token<'a> {
    fn text(&self) -> &'a str {
        match *self {
            Self::Word(text) | Self::Sign(text) => text,
            Self::End => "",
        }
    }
}

impl<'a> Parser<'a> {
    fn next(&mut self) -> Token<'a> {
        self.tokens.next().unwrap_or(Token::End)
    }

    fn peek(&mut self) -> &Token<'a> {
        self.tokens.peek().unwrap_or(&Token::End)
    }

    fn requirement(&mut self) -> Result<Requirement, ParseSelectorError> {
        let negated = *self.peek() == Token::Sign("!");
        if negated {
            self.next();
        }
        let key = match self.next() {
            Token::Word(key) => key,
            other => return unexpected(&other, "`!` or a key"),
        };
        let bare = matches!(self.peek(), Token::End | Token::Sign(","));
        let condition = match (negated, bare) {
            (true, _) => Condition::DoesNotExist,
            (false, true) => Condition::Exists,
            (false, false) => self.condition()?,
        };
        Requirement::new(key, condition)
            .map_err(|source| ParseSelectorError::Requirement { key: key.to_owned(), source })
    }

    fn condition(&mut self) -> Result<Condition, ParseSelectorError> {
        Ok(match self.next() {
            Token::Sign("=" | "==") => Condition::Equals(self.value()?.to_owned()),
            Token::Sign("!=") => Condition::NotEquals(self.value()?.to_owned()),
            Token::Sign(">") => Condition::GreaterThan(self.integer()?),
            Token::Sign("<") => Condition::LessThan(self.integer()?),
            Token::Word("in") => Condition::In(self.values()?),
            Token::Word("notin") => Condition::NotIn(self.values()?),
            other => return unexpected(&other, "`=`, `==`, `!=`, `in`, `notin`, `>` or `<`"),
        })
    }

    /// One value; nothing before a comma or the end is the empty value.
    fn value(&mut self) -> Result<&'a str, ParseSelectorError> {
        if matches!(self.peek(), Token::End | Token::Sign(",")) {
            return Ok("");
        }
        match self.next() {
            Token::Word(value) => Ok(value),
            other => unexpected(&other, "a value"),
        }
    }

    fn integer(&mut self) -> Result<i64, ParseSelectorError> {
        let value = self.value()?;
        // The value must also be one that a label may have, which excludes a sign.
        let digits = !value.is_empty() && value.len() <= 63 && value.bytes().all(|byte| byte.is_ascii_digit());
        value
            .parse()
            .ok()
            .filter(|_| digits)
            .ok_or_else(|| ParseSelectorError::NotAnInteger { value: value.to_owned() })
    }

    /// `(a,b)`; nothing between two signs is the empty value.
    fn values(&mut self) -> Result<BTreeSet<String>, ParseSelectorError> {
        match self.next() {
            Token::Sign("(") => {}
            other => return unexpected(&other, "`(`"),
        }
        let mut values = BTreeSet::new();
        loop {
            let value = match self.peek() {
                Token::Word(value) => *value,
                _ => "",
            };
            if !value.is_empty() {
                self.next();
            }
            values.insert(value.to_owned());
            match self.next() {
                Token::Sign(",") => {}
                Token::Sign(")") => return Ok(values),
                other => return unexpected(&other, "`,` or `)`"),
            }
        }
    }
}

fn unexpected<T>(found: &Token<'_>, expected: &'static str) -> Result<T, ParseSelectorError> {
    Err(ParseSelectorError::Unexpected { found: found.text().to_owned(), expected })
}

fn scan(text: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    let mut rest = text;
    loop {
        rest = rest.trim_start_matches([' ', '\t', '\r', '\n']);
        if rest.is_empty() || rest.starts_with('\0') {
            return tokens;
        }
        let token = match SIGNS.iter().find(|sign| rest.starts_with(**sign)) {
            Some(sign) => Token::Sign(sign),
            None => Token::Word(&rest[..rest.find(ends_word).unwrap_or(rest.len())]),
        };
        rest = &rest[token.text().len()..];
        // The server's scanner swallows the NUL that ends a word or sign, and goes on behind it.
        rest = rest.strip_prefix('\0').unwrap_or(rest);
        tokens.push(token);
    }
}

fn ends_word(character: char) -> bool {
    matches!(character, '=' | '!' | '(' | ')' | ',' | '>' | '<' | ' ' | '\t' | '\r' | '\n' | '\0')
}

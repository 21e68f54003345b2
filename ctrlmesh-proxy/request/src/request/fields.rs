//! Parses field selectors, as apimachinery's `pkg/fields/selector.go` does.

use std::borrow::Cow;
use std::ops::Range;

use super::url;

pub const NAME: &str = "metadata.name";

pub const NAMESPACE: &str = "metadata.namespace";

/// The terms of a field selector, in the order in which they stand.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FieldSelector {
    terms: Vec<Term>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Term {
    pub field: String,
    /// Whether the field must have the value, or must not.
    pub equals: bool,
    /// The value, without its escapes.
    pub value: String,
    /// Where the value stands in the selector's text, with its escapes.
    pub at: Range<usize>,
    raw: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FieldSelectorError {
    #[error("a term of the field selector has no operator")]
    NoOperator,
    /// A backslash before anything but itself, a comma or an equals sign.
    #[error("a value of the field selector holds an invalid escape")]
    Escape,
    #[error("a value of the field selector holds `=`")]
    Unescaped,
}

impl FieldSelector {
    /// # Errors
    /// Where the server refuses it.
    pub fn parse(text: &[u8]) -> Result<Self, FieldSelectorError> {
        let mut terms = Vec::new();
        let mut start = 0;
        while start <= text.len() {
            let end = start + term_length(&text[start..]);
            if end > start {
                terms.push(Term::parse(text, start..end)?);
            }
            start = end + 1;
        }
        Ok(Self { terms })
    }

    pub fn terms(&self) -> &[Term] {
        &self.terms
    }

    /// The value that `field` must have; of several, the one that the server finds first.
    pub fn required(&self, field: &str) -> Option<&str> {
        let required = self.terms.iter().filter(|term| term.equals && term.field == field);
        required.min_by(|one, other| one.raw.cmp(&other.raw)).map(|term| term.value.as_str())
    }

    /// The name that the objects must have, where it is one that a path could hold.
    pub fn required_name(&self) -> Option<String> {
        self.required(NAME).filter(|name| !matches!(*name, "." | "..") && !name.contains(['/', '%'])).map(str::to_owned)
    }
}

impl Term {
    fn parse(text: &[u8], at: Range<usize>) -> Result<Self, FieldSelectorError> {
        let raw = &text[at.clone()];
        let is_operator = |at: &usize| raw[*at] == b'=' || raw[*at..].starts_with(b"!=");
        let operator = (0..raw.len()).find(is_operator).ok_or(FieldSelectorError::NoOperator)?;
        let equals = raw[operator] == b'=';
        let length = if equals && !raw[operator..].starts_with(b"==") { 1 } else { 2 };
        let value = operator + length;
        Ok(Self {
            field: url::text(Cow::Borrowed(&raw[..operator])).into_owned(),
            equals,
            value: unescape(&raw[value..])?,
            at: at.start + value..at.end,
            raw: raw.to_vec(),
        })
    }
}

/// The bytes before the first comma that is not escaped.
fn term_length(text: &[u8]) -> usize {
    let mut escaped = false;
    let comma = text.iter().position(|byte| {
        let ends = *byte == b',' && !escaped;
        escaped = *byte == b'\\' && !escaped;
        ends
    });
    comma.unwrap_or(text.len())
}

fn unescape(value: &[u8]) -> Result<String, FieldSelectorError> {
    let value = url::text(Cow::Borrowed(value));
    let mut plain = String::with_capacity(value.len());
    let mut characters = value.chars();
    while let Some(character) = characters.next() {
        plain.push(match character {
            '\\' => {
                characters.next().filter(|next| matches!(next, '\\' | ',' | '=')).ok_or(FieldSelectorError::Escape)?
            }
            '=' | ',' => return Err(FieldSelectorError::Unescaped),
            other => other,
        });
    }
    Ok(plain)
}

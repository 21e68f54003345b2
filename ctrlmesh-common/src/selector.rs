//! Label selectors in the string form of `?labelSelector=`.
//!
//! The grammar is exactly the API server's (apimachinery `pkg/labels/selector.go`), so that both accept the same
//! selectors with the same meaning.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use crate::names::label;

mod overlap;
mod parse;
mod syntax;

pub use parse::ParseSelectorError;
pub use syntax::{KeyError, ValueError, check_key, check_value};

/// Labels of an object: key to value.
pub type Labels = BTreeMap<String, String>;

/// A conjunction of requirements; without any it matches everything.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Selector {
    requirements: Vec<Requirement>,
}

/// One condition on one label.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Requirement {
    key: String,
    condition: Condition,
}

/// What a requirement asks of its label.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Condition {
    /// The label is there and its value is this one: `key=value`, `key==value`.
    Equals(String),
    /// The label is not there, or has another value: `key!=value`.
    NotEquals(String),
    /// The label is there and its value is one of these (never empty): `key in (a,b)`.
    In(BTreeSet<String>),
    /// The label is not there, or its value is none of these (never empty): `key notin (a,b)`.
    NotIn(BTreeSet<String>),
    /// The label is there: `key`.
    Exists,
    /// The label is not there: `!key`.
    DoesNotExist,
    /// The label is there and its value is an integer greater than this: `key>5`.
    GreaterThan(i64),
    /// The label is there and its value is an integer less than this: `key<5`.
    LessThan(i64),
}

/// A requirement that no selector may hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequirementError {
    /// The label's key is malformed.
    #[error("invalid label key")]
    Key(#[source] KeyError),
    /// A value is malformed.
    #[error("invalid label value")]
    Value(#[source] ValueError),
    /// `in` or `notin` with no value at all.
    #[error("`in` and `notin` need at least one value")]
    NoValues,
    /// A value where only the presence of the label is asked for.
    #[error("`Exists` and `DoesNotExist` take no values")]
    UnwantedValues,
}

impl Selector {
    /// Matches everything.
    pub fn everything() -> Self {
        Self::default()
    }

    /// Matches nothing: asks for a label that is there and is not.
    pub fn nothing() -> Self {
        let key = || label::SHARDING_HASH.to_owned();
        let requirement = |condition| Requirement { key: key(), condition };
        Self::from_iter([Condition::Exists, Condition::DoesNotExist].map(requirement))
    }

    /// Parses the string form.
    ///
    /// # Errors
    /// Where the API server would answer 400: a word out of place, or a malformed key or value.
    pub fn parse(text: &str) -> Result<Self, ParseSelectorError> {
        parse::selector(text)
    }

    /// Whether it has no requirement, and so matches everything.
    pub fn is_empty(&self) -> bool {
        self.requirements.is_empty()
    }

    /// The requirements, in the order in which they were given.
    pub fn requirements(&self) -> &[Requirement] {
        &self.requirements
    }

    /// Matches what both match.
    #[must_use]
    pub fn and(mut self, other: &Self) -> Self {
        self.requirements.extend(other.requirements.iter().cloned());
        self
    }

    /// Whether `labels` satisfy every requirement.
    pub fn matches(&self, labels: &Labels) -> bool {
        self.requirements.iter().all(|requirement| requirement.matches(labels))
    }

    /// Whether some labels satisfy both selectors.
    ///
    /// Exact: where it says no, no object can ever match both.
    pub fn overlaps(&self, other: &Self) -> bool {
        overlap::satisfiable(self.requirements.iter().chain(&other.requirements))
    }
}

impl FromStr for Selector {
    type Err = ParseSelectorError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text)
    }
}

impl FromIterator<Requirement> for Selector {
    fn from_iter<I: IntoIterator<Item = Requirement>>(requirements: I) -> Self {
        Self { requirements: requirements.into_iter().collect() }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        join(out, &self.requirements)
    }
}

impl Requirement {
    /// A requirement on the label `key`.
    ///
    /// # Errors
    /// Where the key or a value is not what a label may have, or a set of values is empty.
    pub fn new(key: impl Into<String>, condition: Condition) -> Result<Self, RequirementError> {
        let key = key.into();
        check_key(&key).map_err(RequirementError::Key)?;
        match &condition {
            Condition::Equals(value) | Condition::NotEquals(value) => {
                check_value(value).map_err(RequirementError::Value)?;
            }
            Condition::In(values) | Condition::NotIn(values) => {
                if values.is_empty() {
                    return Err(RequirementError::NoValues);
                }
                values.iter().try_for_each(|value| check_value(value)).map_err(RequirementError::Value)?;
            }
            // The bound is written as a value, and a value has no sign.
            Condition::GreaterThan(bound) | Condition::LessThan(bound) => {
                check_value(&bound.to_string()).map_err(RequirementError::Value)?;
            }
            Condition::Exists | Condition::DoesNotExist => {}
        }
        Ok(Self { key, condition })
    }

    /// The label's key.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// What is asked of the label.
    pub fn condition(&self) -> &Condition {
        &self.condition
    }

    /// Whether `labels` satisfy it.
    pub fn matches(&self, labels: &Labels) -> bool {
        self.condition.admits(labels.get(&self.key).map(String::as_str))
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = &self.key;
        match &self.condition {
            Condition::Equals(value) => write!(out, "{key}={value}"),
            Condition::NotEquals(value) => write!(out, "{key}!={value}"),
            Condition::In(values) => {
                write!(out, "{key} in (")?;
                join(out, values)?;
                out.write_str(")")
            }
            Condition::NotIn(values) => {
                write!(out, "{key} notin (")?;
                join(out, values)?;
                out.write_str(")")
            }
            Condition::Exists => out.write_str(key),
            Condition::DoesNotExist => write!(out, "!{key}"),
            Condition::GreaterThan(bound) => write!(out, "{key}>{bound}"),
            Condition::LessThan(bound) => write!(out, "{key}<{bound}"),
        }
    }
}

impl Condition {
    /// Whether a label with this value (`None`: not there) satisfies it.
    pub fn admits(&self, value: Option<&str>) -> bool {
        match (self, value) {
            (Self::Equals(wanted), Some(value)) => wanted == value,
            (Self::NotEquals(unwanted), Some(value)) => unwanted != value,
            (Self::In(wanted), Some(value)) => wanted.contains(value),
            (Self::NotIn(unwanted), Some(value)) => !unwanted.contains(value),
            (Self::Exists, Some(_)) | (Self::NotEquals(_) | Self::NotIn(_) | Self::DoesNotExist, None) => true,
            (Self::GreaterThan(bound), Some(value)) => value.parse::<i64>().is_ok_and(|value| value > *bound),
            (Self::LessThan(bound), Some(value)) => value.parse::<i64>().is_ok_and(|value| value < *bound),
            (Self::DoesNotExist, Some(_))
            | (Self::Equals(_) | Self::In(_) | Self::Exists | Self::GreaterThan(_) | Self::LessThan(_), None) => false,
        }
    }
}

/// Writes `parts` with a comma between two.
fn join<T: fmt::Display>(out: &mut fmt::Formatter<'_>, parts: impl IntoIterator<Item = T>) -> fmt::Result {
    for (at, part) in parts.into_iter().enumerate() {
        if at > 0 {
            out.write_str(",")?;
        }
        write!(out, "{part}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;

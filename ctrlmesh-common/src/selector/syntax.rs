//! The syntax of a label's key and value (apimachinery `pkg/api/validate/content/kube.go`).

use crate::names::is_dns_subdomain;

/// Longest name part of a key, and longest value, in bytes.
pub(super) const MAX_NAME_BYTES: usize = 63;

/// A key that no label may have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{key:?} is not an optional DNS subdomain and `/`, then 1 to 63 of A-Z a-z 0-9 - _ . with an alphanumeric at both ends"
)]
pub struct KeyError {
    /// What was given.
    pub key: String,
}

/// A value that no label may have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{value:?} is neither empty nor 1 to 63 of A-Z a-z 0-9 - _ . with an alphanumeric at both ends")]
pub struct ValueError {
    /// What was given.
    pub value: String,
}

/// Whether a label may be called `key`.
///
/// # Errors
/// Where the API server would refuse it.
pub fn check_key(key: &str) -> Result<(), KeyError> {
    let ok = match key.split_once('/') {
        None => is_name(key),
        Some((prefix, name)) => is_dns_subdomain(prefix) && is_name(name),
    };
    if ok { Ok(()) } else { Err(KeyError { key: key.to_owned() }) }
}

/// Whether a label may have this `value`.
///
/// # Errors
/// Where the API server would refuse it.
pub fn check_value(value: &str) -> Result<(), ValueError> {
    if value.is_empty() || is_name(value) { Ok(()) } else { Err(ValueError { value: value.to_owned() }) }
}

fn is_name(text: &str) -> bool {
    text.len() <= MAX_NAME_BYTES
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
        && [text.bytes().next(), text.bytes().last()]
            .into_iter()
            .all(|end| end.is_some_and(|byte| byte.is_ascii_alphanumeric()))
}

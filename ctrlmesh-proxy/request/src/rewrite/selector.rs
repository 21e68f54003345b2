//! Puts the policy's selector and the lock's name into a target.
//!
//! One `labelSelector` is left. It stands before all that the client wrote, and the policy's requirements stand in it
//! before the client's text. So the client cannot end, hide or replace them: the server's scanner stops at a NUL byte,
//! and the first of repeated keys counts.

use ctrlmesh_common::selector::Selector;

use crate::decide::NotOlderThan;
use crate::request::{FieldSelector, NAME, Pair, Query, RequestInfo};

/// The parameter that selects by labels.
const LABEL_SELECTOR: &str = "labelSelector";

/// The parameter that tells which part of its objects a Table holds.
const INCLUDE_OBJECT: &str = "includeObject";

/// Digits of percent escapes.
const HEX: &[u8; 16] = b"0123456789ABCDEF";

/// The query that asks for what the client asks for and `policy` matches.
pub fn narrowed(query: &[u8], policy: &Selector) -> Vec<u8> {
    let query = Query::new(query);
    let client = query.pairs().find(|pair| pair.is(LABEL_SELECTOR));
    let mut narrowed = format!("{LABEL_SELECTOR}={}", escaped(policy.to_string().as_bytes())).into_bytes();
    if let Some(client) = client.filter(|pair| !asks_for_everything(pair)) {
        narrowed.extend(b"%2C");
        narrowed.extend(client.raw_value);
    }
    let others = query.pairs().filter(|pair| !pair.is(LABEL_SELECTOR) && !query.raw().is_empty());
    for pair in others {
        narrowed.push(b'&');
        narrowed.extend(pair.raw);
    }
    narrowed
}

/// The query that asks for a state from this version on.
pub(super) fn not_older_than(query: &[u8], than: NotOlderThan) -> Vec<u8> {
    let replaced = |pair: &Pair<'_>| than.all && pair.is("limit");
    at_version(query, than.version, "NotOlderThan", replaced)
}

/// The query that asks for the state at this version.
pub(super) fn exactly(query: &[u8], version: u64) -> Vec<u8> {
    at_version(query, version, "Exact", |_| false)
}

/// The query that asks for this version, without what is `replaced`.
fn at_version(query: &[u8], version: u64, matching: &str, replaced: impl Fn(&Pair<'_>) -> bool) -> Vec<u8> {
    let mut asking = format!("resourceVersion={version}&resourceVersionMatch={matching}").into_bytes();
    let is_version = |pair: &Pair<'_>| ["resourceVersion", "resourceVersionMatch"].iter().any(|key| pair.is(key));
    let pairs = Query::new(query).pairs().filter(|pair| !query.is_empty() && !is_version(pair) && !replaced(pair));
    for pair in pairs {
        asking.push(b'&');
        asking.extend(pair.raw);
    }
    asking
}

/// The path with another name in the place of the object's.
pub(super) fn renamed_path(request: &RequestInfo<'_>, name: &str) -> Vec<u8> {
    let at = request.path()[..request.name_range().start].matches('/').count();
    let segments = request.raw_path().split(|byte| *byte == b'/').enumerate();
    let renamed: Vec<&[u8]> =
        segments.map(|(number, segment)| if number == at { name.as_bytes() } else { segment }).collect();
    renamed.join(&b'/')
}

/// The query with `to` in the place of `from` wherever its field selector compares the name.
pub(super) fn renamed_fields(query: &[u8], from: &str, to: &str) -> Vec<u8> {
    let mut left = 1;
    let pairs = Query::new(query).pairs().map(|pair| {
        let counts = left > 0 && pair.is("fieldSelector");
        left -= usize::from(counts);
        match pair.decoded.as_ref().filter(|_| counts) {
            Some((_, value)) => renamed_pair(&pair, value, from, to),
            None => pair.raw.to_vec(),
        }
    });
    pairs.collect::<Vec<_>>().join(&b'&')
}

/// Whether a Table is asked for that holds nothing of the objects in its rows.
pub(super) fn is_without_objects(request: &RequestInfo<'_>) -> bool {
    request.query().text(INCLUDE_OBJECT).is_some_and(|included| included == "None")
}

/// The query that asks for a Table as it is where nothing is said of that: with the objects' metadata.
pub(super) fn with_objects(query: &[u8]) -> Vec<u8> {
    let pairs = Query::new(query).pairs().filter(|pair| !pair.is(INCLUDE_OBJECT));
    pairs.map(|pair| pair.raw).collect::<Vec<_>>().join(&b'&')
}

/// Escapes bytes so that the server reads them as one value, whatever is in them.
pub fn escaped(text: &[u8]) -> String {
    let mut escaped = String::with_capacity(text.len() * 2);
    for byte in text {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~') {
            escaped.push(char::from(*byte));
        } else {
            escaped.push('%');
            escaped.extend([byte >> 4, byte & 15].map(|digit| char::from(HEX[usize::from(digit)])));
        }
    }
    escaped
}

fn renamed_pair(pair: &Pair<'_>, value: &[u8], from: &str, to: &str) -> Vec<u8> {
    let fields = FieldSelector::parse(value).unwrap_or_default();
    let named = fields.terms().iter().filter(|term| term.field == NAME && term.value == from);
    let mut renamed = Vec::with_capacity(value.len() + to.len());
    let mut kept = 0;
    for term in named {
        renamed.extend(&value[kept..term.at.start]);
        renamed.extend(to.as_bytes());
        kept = term.at.end;
    }
    renamed.extend(&value[kept..]);
    let key = &pair.raw[..pair.raw.len() - pair.raw_value.len()];
    let mut whole = key.to_vec();
    whole.extend(escaped(&renamed).into_bytes());
    whole
}

/// Whether the client's selector has no requirement.
fn asks_for_everything(pair: &Pair<'_>) -> bool {
    let text = pair.decoded.as_ref().and_then(|(_, value)| std::str::from_utf8(value).ok());
    text.and_then(|text| Selector::parse(text).ok()).is_some_and(|selector| selector.is_empty())
}

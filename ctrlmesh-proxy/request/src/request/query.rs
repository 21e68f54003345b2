//! Reads the parameters of a query.
//!
//! As Go's `net/url.ParseQuery` and the conversion to `ListOptions` read it: malformed pairs are dropped, and the
//! first of repeated keys counts.

use std::borrow::Cow;

use ctrlmesh_common::selector::Selector;

use super::fields::FieldSelector;
use super::url;

/// As many pairs as the server reads; of more, it reads none.
const MAX_PAIRS: usize = 10_000;

/// A query as it was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Query<'a> {
    raw: &'a [u8],
}

/// Key and value, without their escapes.
pub type DecodedPair<'a> = (Cow<'a, [u8]>, Cow<'a, [u8]>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair<'a> {
    /// As it was sent, without the `&` at its ends.
    pub raw: &'a [u8],
    /// The value as it was sent: what is behind the first `=`.
    pub raw_value: &'a [u8],
    /// `None` where the server drops the pair.
    pub decoded: Option<DecodedPair<'a>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ListOptions {
    pub(super) watch: bool,
    /// The name that `fieldSelector` requires.
    pub(super) name: Option<String>,
}

impl<'a> Query<'a> {
    pub fn new(raw: &'a [u8]) -> Self {
        Self { raw }
    }

    /// The text behind the question mark, as it was sent.
    pub fn raw(self) -> &'a [u8] {
        self.raw
    }

    /// Of a query that is too long, the server reads no pair.
    pub fn is_too_long(self) -> bool {
        !self.has_room_for(0)
    }

    /// Whether the server still reads it with so many pairs more.
    pub fn has_room_for(self, more: usize) -> bool {
        let pairs = || self.raw.split(|byte| *byte == b'&').count();
        self.raw.len() + more < MAX_PAIRS || pairs() + more <= MAX_PAIRS
    }

    /// All pairs, also those that the server drops.
    pub fn pairs(self) -> impl Iterator<Item = Pair<'a>> {
        let too_long = self.is_too_long();
        self.raw.split(|byte| *byte == b'&').map(move |raw| Pair::new(raw, too_long))
    }

    /// The first value of `key`, which is the one that counts.
    pub fn first(self, key: &str) -> Option<Cow<'a, [u8]>> {
        let decoded = self.pairs().filter_map(|pair| pair.decoded);
        decoded.into_iter().find(|(name, _)| name.as_ref() == key.as_bytes()).map(|(_, value)| value)
    }

    pub fn text(self, key: &str) -> Option<Cow<'a, str>> {
        self.first(key).map(url::text)
    }

    /// A switch: there, and neither `0` nor `false`.
    pub fn is_set(self, key: &str) -> bool {
        self.text(key).is_some_and(|value| value != "0" && !folds_to_false(&value))
    }

    /// What `ListOptions` say; where they do not convert, only whether they ask for a watch.
    pub(super) fn list_options(self) -> ListOptions {
        if self.raw.is_empty() {
            return ListOptions::default();
        }
        let Some(fields) = self.converted() else {
            let watch = self.text("watch").is_some_and(|value| !matches!(&*value.to_lowercase(), "false" | "0"));
            return ListOptions { watch, name: None };
        };
        ListOptions { watch: self.is_set("watch"), name: fields.required_name() }
    }

    /// The field selector, where all of `ListOptions` convert.
    fn converted(self) -> Option<FieldSelector> {
        let number = |key| self.text(key).is_none_or(|value| value.parse::<i64>().is_ok());
        let labels = self.text("labelSelector").is_none_or(|value| Selector::parse(&value).is_ok());
        if !number("timeoutSeconds") || !number("limit") || !labels {
            return None;
        }
        FieldSelector::parse(&self.first("fieldSelector").unwrap_or_default()).ok()
    }
}

impl<'a> Pair<'a> {
    fn new(raw: &'a [u8], too_long: bool) -> Self {
        let (key, raw_value) = url::cut(raw, b'=');
        let dropped = too_long || raw.is_empty() || raw.contains(&b';');
        let decoded =
            if dropped { None } else { url::unescape(key, b' ').ok().zip(url::unescape(raw_value, b' ').ok()) };
        Self { raw, raw_value, decoded }
    }

    /// Whether the server reads it as a value of `key`.
    pub fn is(&self, key: &str) -> bool {
        self.decoded.as_ref().is_some_and(|(name, _)| name.as_ref() == key.as_bytes())
    }
}

/// Go's `strings.EqualFold(value, "false")`: the long s folds to s.
fn folds_to_false(value: &str) -> bool {
    let folded = value.chars().map(|character| if character == 'ſ' { 's' } else { character.to_ascii_lowercase() });
    folded.eq("false".chars())
}

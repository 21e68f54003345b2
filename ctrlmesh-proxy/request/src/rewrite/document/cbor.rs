//! Finds CBOR items (RFC 8949), and writes maps of texts.
//!
//! The API server writes text as byte strings, and reads both kinds of strings. So both are text here.

use std::borrow::Cow;
use std::ops::Range;

/// Deeper than any object of Kubernetes, and shallow enough for any stack.
const MAX_DEPTH: usize = 128;

/// The head of an item.
#[derive(Clone, Copy, Debug)]
struct Head {
    major: u8,
    /// The length, count or number; `None` for indefinite length.
    argument: Option<usize>,
    /// The first byte behind the head.
    end: usize,
}

/// Finds the end of an item that comes in pieces.
#[derive(Clone, Debug, Default)]
pub(super) struct Scan {
    /// Up to where the item is understood.
    pub(super) at: usize,
    /// How many items are missing in each that is open; nothing where a break ends it.
    open: Vec<Option<usize>>,
    begun: bool,
}

/// The tag that marks a body as CBOR.
const SELF_DESCRIBED: &[u8] = b"\xd9\xd9\xf7";

const BYTES: u8 = 2;
const TEXT: u8 = 3;
const ARRAY: u8 = 4;
const MAP: u8 = 5;
const TAG: u8 = 6;
const SIMPLE: u8 = 7;

/// What ends an item of indefinite length.
const BREAK: u8 = 0xff;

/// The one item of a body, behind its tags.
pub(super) fn root(body: &[u8]) -> Option<Range<usize>> {
    let end = item_end(body, 0, 0)?;
    (end == body.len()).then_some(untagged(body, 0)?..end)
}

/// The values of the key `name` in the map at `at`; none where it is no map.
pub(super) fn fields(body: &[u8], at: Range<usize>, name: &str) -> Option<Vec<Range<usize>>> {
    let map = head(body, untagged(body, at.start)?)?;
    let mut found = Vec::new();
    if map.major != MAP {
        return Some(found);
    }
    let (mut next, mut left) = (map.end, map.argument);
    while more(body, next, &mut left)? {
        let key = next..item_end(body, next, 0)?;
        let value = key.end..item_end(body, key.end, 0)?;
        next = value.end;
        if text(&body[key]).is_some_and(|key| key == name) {
            found.push(value);
        }
    }
    Some(found)
}

/// The items of the array at `at`; none where it is no array.
pub(super) fn elements(body: &[u8], at: Range<usize>) -> Option<Vec<Range<usize>>> {
    let array = head(body, untagged(body, at.start)?)?;
    let mut found = Vec::new();
    if array.major != ARRAY {
        return Some(found);
    }
    let (mut next, mut left) = (array.end, array.argument);
    while more(body, next, &mut left)? {
        let end = item_end(body, next, 0)?;
        found.push(next..end);
        next = end;
    }
    Some(found)
}

/// The text that an item spells.
pub(super) fn text(item: &[u8]) -> Option<Cow<'_, str>> {
    let start = untagged(item, 0)?;
    let string = head(item, start)?;
    if !matches!(string.major, BYTES | TEXT) {
        return None;
    }
    if let Some(length) = string.argument {
        return Some(String::from_utf8_lossy(item.get(string.end..string.end.checked_add(length)?)?));
    }
    let (mut spelled, mut next) = (Vec::new(), string.end);
    while item.get(next) != Some(&BREAK) {
        let chunk = head(item, next)?;
        let end = chunk.end.checked_add(chunk.argument?)?;
        spelled.extend(item.get(chunk.end..end)?);
        next = end;
    }
    Some(Cow::Owned(String::from_utf8_lossy(&spelled).into_owned()))
}

/// A byte string that spells `text`, as the API server writes text.
pub(in crate::rewrite) fn text_item(text: &str) -> Vec<u8> {
    string(BYTES, text)
}

/// A number.
pub(in crate::rewrite) fn number(number: u16) -> Vec<u8> {
    written(0, usize::from(number))
}

/// A map, marked as CBOR as the API server marks objects.
pub(in crate::rewrite) fn map(pairs: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut map = [SELF_DESCRIBED, &written(MAP, pairs.len())].concat();
    map.extend(pairs.iter().flat_map(|(key, value)| [text_item(key), value.clone()].concat()));
    map
}

/// The map with more pairs, which come first; the map itself where it has no count.
pub(super) fn with_pairs(map: &[u8], pairs: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let found = untagged(map, 0).and_then(|at| head(map, at)).filter(|head| head.major == MAP);
    let Some((head, count)) = found.and_then(|head| Some((head, head.argument?))) else {
        return map.to_vec();
    };
    let mut extended = [SELF_DESCRIBED, &written(MAP, count + pairs.len())].concat();
    extended.extend(pairs.iter().flat_map(|(key, value)| [text_item(key), value.clone()].concat()));
    extended.extend(&map[head.end..]);
    extended
}

/// A head of the shortest form.
fn written(major: u8, argument: usize) -> Vec<u8> {
    let major = major << 5;
    let [.., third, second, first, last] = (argument as u64).to_be_bytes();
    match argument {
        0..=23 => vec![major | last],
        24..=0xff => vec![major | 0x18, last],
        0x100..=0xffff => vec![major | 0x19, first, last],
        _ => vec![major | 0x1a, third, second, first, last],
    }
}

impl Scan {
    /// The end of the item at the beginning of `body`; `None` where it is cut short or malformed.
    pub(super) fn end(&mut self, body: &[u8]) -> Option<usize> {
        if !self.begun {
            self.begun = true;
            self.open.push(Some(1));
        }
        while let Some(missing) = self.open.last_mut() {
            match missing {
                Some(0) => drop(self.open.pop()),
                None if body.get(self.at)? == &BREAK => {
                    self.at += 1;
                    self.open.pop();
                }
                _ => self.item(body)?,
            }
        }
        Some(self.at)
    }

    /// Reads the head of the next item, and its bytes if it is no container.
    fn item(&mut self, body: &[u8]) -> Option<()> {
        let item = head(body, self.at)?;
        let inside = match (item.major, item.argument) {
            (TAG, Some(_)) => {
                self.at = item.end;
                return Some(());
            }
            (0 | 1 | SIMPLE, Some(_)) => None,
            (BYTES | TEXT, Some(length)) => {
                self.at = item.end.checked_add(length).filter(|end| *end <= body.len())?;
                self.count();
                return Some(());
            }
            (ARRAY | MAP | BYTES | TEXT, _) if self.open.len() > MAX_DEPTH => return None,
            (MAP, Some(pairs)) => Some(Some(pairs.saturating_mul(2))),
            (ARRAY, left) => Some(left),
            (MAP | BYTES | TEXT, None) => Some(None),
            _ => return None,
        };
        self.at = item.end;
        self.count();
        self.open.extend(inside);
        Some(())
    }

    /// One item fewer is missing.
    fn count(&mut self) {
        if let Some(Some(missing)) = self.open.last_mut() {
            *missing -= 1;
        }
    }
}

/// The end of the item at `start`; `None` where it is cut short or malformed.
pub(super) fn item_end(body: &[u8], start: usize, depth: usize) -> Option<usize> {
    if depth > MAX_DEPTH {
        return None;
    }
    let item = head(body, start)?;
    let (mut next, mut left) = match (item.major, item.argument) {
        (0 | 1, Some(_)) => return Some(item.end),
        (SIMPLE, _) => return item.argument.map(|_| item.end),
        (BYTES | TEXT, Some(length)) => {
            return item.end.checked_add(length).filter(|end| *end <= body.len());
        }
        (TAG, Some(_)) => return item_end(body, item.end, depth + 1),
        (ARRAY, left) => (item.end, left),
        (MAP, left) => (item.end, left.map(|pairs| pairs.saturating_mul(2))),
        (BYTES | TEXT, None) => (item.end, None),
        _ => return None,
    };
    while more(body, next, &mut left)? {
        next = item_end(body, next, depth + 1)?;
    }
    Some(next + usize::from(item.argument.is_none()))
}

/// Whether another item follows: counts down, or looks for the break.
fn more(body: &[u8], next: usize, left: &mut Option<usize>) -> Option<bool> {
    match left {
        Some(0) => Some(false),
        Some(left) => {
            *left -= 1;
            Some(true)
        }
        None => body.get(next).map(|byte| *byte != BREAK),
    }
}

fn untagged(body: &[u8], mut at: usize) -> Option<usize> {
    for _ in 0..MAX_DEPTH {
        let item = head(body, at)?;
        if item.major != TAG {
            return Some(at);
        }
        at = item.end;
    }
    None
}

fn head(body: &[u8], at: usize) -> Option<Head> {
    let first = *body.get(at)?;
    let (major, low) = (first >> 5, first & 0x1f);
    let length = match low {
        0..=23 => {
            return Some(Head { major, argument: Some(usize::from(low)), end: at + 1 });
        }
        24 => 1,
        25 => 2,
        26 => 4,
        27 => 8,
        31 if matches!(major, BYTES..=MAP) => {
            return Some(Head { major, argument: None, end: at + 1 });
        }
        _ => return None,
    };
    let end = at + 1 + length;
    let number = body.get(at + 1..end)?.iter().fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
    Some(Head { major, argument: Some(usize::try_from(number).ok()?), end })
}

fn string(major: u8, text: &str) -> Vec<u8> {
    let mut string = written(major, text.len());
    string.extend(text.as_bytes());
    string
}

//! The items of a JSON list, one by one.

use super::super::{LockError, MAX_BODY_BYTES};
use super::put;
use crate::decide::Rename;
use crate::rewrite::document::{DocumentError, Encoding};

/// The most that may stand between two items, in bytes.
const MAX_SEPARATOR_BYTES: usize = 4096;

/// How many objects and arrays the items stand in: the list, and its array.
const ITEMS_DEPTH: usize = 2;

/// Follows a list.
#[derive(Debug, Default)]
pub(super) struct Reader {
    /// How many objects and arrays are open.
    depth: usize,
    text: Text,
    /// The last text among the list's own fields: a name, if a colon follows.
    name: Vec<u8>,
    array: Option<Array>,
}

/// Whether a text is open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Text {
    #[default]
    None,
    Open,
    /// Behind a backslash.
    Escape,
}

/// The array of the items.
#[derive(Debug)]
struct Array {
    of_rows: bool,
    item: Vec<u8>,
    /// The bytes before the first item, and before this one.
    lead: Option<Vec<u8>>,
    separator: Vec<u8>,
    /// Whether an item was passed on.
    passed: bool,
}

impl Reader {
    pub(super) fn feed(&mut self, bytes: &[u8], rename: &Rename, out: &mut Vec<u8>) -> Result<(), LockError> {
        let mut rest = bytes;
        while let Some((byte, behind)) = rest.split_first() {
            if self.text == Text::Open {
                let end = memchr::memchr2(b'"', b'\\', rest).unwrap_or(rest.len());
                if end > 0 {
                    self.keep(&rest[..end], out)?;
                    rest = &rest[end..];
                    continue;
                }
            }
            rest = behind;
            self.take(*byte, rename, out)?;
        }
        Ok(())
    }

    /// Bytes inside of a text.
    fn keep(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), LockError> {
        if let Some(array) = &mut self.array {
            return array.keep(bytes);
        }
        self.see(bytes);
        out.extend_from_slice(bytes);
        Ok(())
    }

    /// A byte that may mean something.
    fn take(&mut self, byte: u8, rename: &Rename, out: &mut Vec<u8>) -> Result<(), LockError> {
        let between = self.array.is_some() && self.depth == ITEMS_DEPTH;
        let before = self.depth;
        self.count(byte)?;
        let Some(array) = &mut self.array else {
            out.push(byte);
            if byte == b'[' && before + 1 == ITEMS_DEPTH {
                self.array = Array::named(&self.name);
            }
            return Ok(());
        };
        if !between {
            array.keep(&[byte])?;
            return if self.depth == ITEMS_DEPTH { array.pass(rename, out) } else { Ok(()) };
        }
        match byte {
            b'{' => array.keep(b"{"),
            b']' => {
                out.extend_from_slice(&array.separator);
                out.push(byte);
                self.array = None;
                Ok(())
            }
            b',' | b' ' | b'\t' | b'\r' | b'\n' if array.separator.len() < MAX_SEPARATOR_BYTES => {
                array.separator.push(byte);
                Ok(())
            }
            _ => Err(malformed()),
        }
    }

    /// Follows texts and depth.
    fn count(&mut self, byte: u8) -> Result<(), LockError> {
        self.text = match (self.text, byte) {
            (Text::None, b'"') => {
                self.name.clear();
                Text::Open
            }
            (Text::None, b'{' | b'[') => {
                self.depth += 1;
                Text::None
            }
            (Text::None, b'}' | b']') => {
                self.depth = self.depth.checked_sub(1).ok_or_else(malformed)?;
                Text::None
            }
            (Text::Open, b'"') => Text::None,
            (Text::Open, b'\\') => Text::Escape,
            (Text::Escape, _) => Text::Open,
            (text, _) => text,
        };
        Ok(())
    }

    fn see(&mut self, bytes: &[u8]) {
        if self.depth + 1 == ITEMS_DEPTH && self.name.len() <= b"items".len() {
            self.name.extend_from_slice(&bytes[..bytes.len().min(8)]);
        }
    }
}

impl Array {
    /// The array with this name, if it is of items.
    fn named(name: &[u8]) -> Option<Self> {
        let of_rows = match name {
            b"items" => false,
            b"rows" => true,
            _ => return None,
        };
        Some(Self { of_rows, item: Vec::new(), lead: None, separator: Vec::new(), passed: false })
    }

    fn keep(&mut self, bytes: &[u8]) -> Result<(), LockError> {
        if self.item.len() + bytes.len() > MAX_BODY_BYTES {
            return Err(LockError::TooLarge);
        }
        self.item.extend_from_slice(bytes);
        Ok(())
    }

    /// Passes the item on that is whole.
    fn pass(&mut self, rename: &Rename, out: &mut Vec<u8>) -> Result<(), LockError> {
        let separator = std::mem::take(&mut self.separator);
        let lead = self.lead.get_or_insert_with(|| separator.clone());
        let before = out.len();
        out.extend_from_slice(if self.passed { &separator } else { lead });
        if put(&self.item, Encoding::Json, self.of_rows, rename, out)? {
            self.passed = true;
        } else {
            out.truncate(before);
        }
        self.item.clear();
        Ok(())
    }
}

fn malformed() -> LockError {
    LockError::Document(DocumentError::Malformed { encoding: Encoding::Json })
}

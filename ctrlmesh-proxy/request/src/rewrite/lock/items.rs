//! Renames locks in a long list, item by item.
//!
//! Only the values of `items` and `rows` in JSON, and the repeated field of a protobuf list, are looked at. A protobuf
//! list begins with its length. So a field that no list has fills the gap of a hidden or shorter item; readers skip it.

mod json;
mod protobuf;

use super::{LockError, Renaming};
use crate::decide::Rename;
use crate::rewrite::document::{Document, Encoding};

/// Renames in a list whose bytes come piece by piece.
#[derive(Debug)]
pub struct Items {
    rename: Rename,
    list: List,
}

#[derive(Debug)]
enum List {
    Json(json::Reader),
    Protobuf(protobuf::Reader),
}

impl Items {
    /// Of a list in `encoding`; `None` where it can only be read as a whole.
    pub fn new(encoding: Encoding, rename: Rename) -> Option<Self> {
        let list = match encoding {
            Encoding::Json => List::Json(json::Reader::default()),
            Encoding::Protobuf => List::Protobuf(protobuf::Reader::default()),
            Encoding::Cbor => return None,
        };
        Some(Self { rename, list })
    }

    /// Takes the next bytes; what goes to the client is put behind `out`.
    ///
    /// # Errors
    /// Where this is no list, or an item of it is too large or malformed.
    pub fn feed(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), LockError> {
        match &mut self.list {
            List::Json(reader) => reader.feed(bytes, &self.rename, out),
            List::Protobuf(reader) => reader.feed(bytes, &self.rename, out),
        }
    }
}

/// Puts an item as the client sees it behind `out`; whether it sees it at all.
fn put(item: &[u8], encoding: Encoding, is_row: bool, rename: &Rename, out: &mut Vec<u8>) -> Result<bool, LockError> {
    let mut renaming = Renaming::of(item, encoding, rename)?;
    let document: Document<'_> = renaming.document;
    let node = document.item()?;
    if if is_row { renaming.is_hidden_row(&node)? } else { renaming.is_hidden(&node)? } {
        return Ok(false);
    }
    if is_row {
        renaming.row(&node)?;
    } else {
        renaming.object(&node)?;
    }
    out.extend_from_slice(&document.apply(renaming.edits)?);
    Ok(true)
}

#[cfg(test)]
mod tests;

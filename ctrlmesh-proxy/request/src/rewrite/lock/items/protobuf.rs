//! The items of a protobuf list, one by one.

use super::super::{LockError, MAX_BODY_BYTES};
use super::put;
use crate::decide::Rename;
use crate::rewrite::document::{DocumentError, Encoding, is_list, protobuf_field};

/// The prefix of the envelope.
const PREFIX: &[u8] = b"k8s\0";

/// Tags of fields with a length: the envelope's type and content, and a list's item.
const TYPE: u64 = 1 << 3 | 2;
const RAW: u64 = 2 << 3 | 2;
const ITEM: u64 = 2 << 3 | 2;

/// The tag of a field that no list has: number 15, with a length.
const FILLER: u8 = 15 << 3 | 2;

/// The longest tag with its length or number, in bytes.
const MAX_HEAD_BYTES: usize = 20;

/// Follows a list.
#[derive(Debug, Default)]
pub(super) struct Reader {
    /// How much of the prefix has come.
    prefix: usize,
    /// The beginning of a field.
    head: Vec<u8>,
    /// The current field, and the bytes that are missing of it.
    field: Field,
    missing: usize,
    kept: Vec<u8>,
    /// The bytes that are missing of the list, once it has begun.
    list: Option<usize>,
    /// Whether the envelope's kind is a list's.
    is_list: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Field {
    /// Its head is read.
    #[default]
    Head,
    /// It passes.
    Passing,
    /// It is kept until it is whole.
    Type,
    Item,
}

impl Reader {
    pub(super) fn feed(&mut self, bytes: &[u8], rename: &Rename, out: &mut Vec<u8>) -> Result<(), LockError> {
        let prefix = bytes.len().min(PREFIX.len() - self.prefix);
        let (begin, mut rest) = bytes.split_at(prefix);
        if begin != &PREFIX[self.prefix..self.prefix + prefix] {
            return Err(malformed());
        }
        self.prefix += prefix;
        out.extend_from_slice(begin);
        while !rest.is_empty() {
            let wanted = if self.field == Field::Head { 1 } else { self.missing };
            let (piece, behind) = rest.split_at(wanted.min(rest.len()));
            rest = behind;
            if let Some(list) = &mut self.list {
                *list = list.checked_sub(piece.len()).ok_or_else(malformed)?;
            }
            self.take(piece, rename, out)?;
            if self.list == Some(0) && self.field == Field::Head && self.head.is_empty() {
                self.list = None;
            }
        }
        Ok(())
    }

    fn take(&mut self, piece: &[u8], rename: &Rename, out: &mut Vec<u8>) -> Result<(), LockError> {
        if self.field == Field::Head {
            self.head.extend_from_slice(piece);
            self.begin(out)?;
        } else {
            self.missing -= piece.len();
            match self.field {
                Field::Item => self.kept.extend_from_slice(piece),
                Field::Type => {
                    self.kept.extend_from_slice(piece);
                    out.extend_from_slice(piece);
                }
                Field::Head | Field::Passing => out.extend_from_slice(piece),
            }
        }
        if self.field != Field::Head && self.missing == 0 {
            self.end(rename, out)?;
        }
        Ok(())
    }

    /// Begins a field once its head is whole.
    fn begin(&mut self, out: &mut Vec<u8>) -> Result<(), LockError> {
        let Some((tag, behind)) = varint(&self.head) else { return self.unfinished() };
        let payload = match tag % 8 {
            0 => varint(behind).map(|_| 0),
            1 => Some(8),
            2 => varint(behind).map(|(length, _)| length),
            5 => Some(4),
            _ => return Err(malformed()),
        };
        let Some(payload) = payload else { return self.unfinished() };
        self.missing = usize::try_from(payload).map_err(|_too_long| malformed())?;
        self.field = match (self.list.is_some(), tag) {
            (false, TYPE) => Field::Type,
            (false, RAW) if self.is_list => {
                out.append(&mut self.head);
                self.list = Some(std::mem::take(&mut self.missing));
                return Ok(());
            }
            (true, ITEM) => Field::Item,
            _ => Field::Passing,
        };
        if self.field != Field::Passing && self.missing > MAX_BODY_BYTES {
            return Err(LockError::TooLarge);
        }
        if self.field != Field::Item {
            out.append(&mut self.head);
        }
        Ok(())
    }

    fn unfinished(&self) -> Result<(), LockError> {
        if self.head.len() < MAX_HEAD_BYTES { Ok(()) } else { Err(malformed()) }
    }

    fn end(&mut self, rename: &Rename, out: &mut Vec<u8>) -> Result<(), LockError> {
        let field = std::mem::take(&mut self.field);
        let kept = std::mem::take(&mut self.kept);
        match field {
            Field::Head | Field::Passing => Ok(()),
            Field::Type => {
                self.is_list = is_list(&kept);
                Ok(())
            }
            Field::Item => {
                let room = std::mem::take(&mut self.head).len() + kept.len();
                let mut item = Vec::with_capacity(kept.len());
                let mut used = 0;
                if put(&kept, Encoding::Protobuf, false, rename, &mut item)? {
                    let item = protobuf_field(2, &item);
                    used = item.len();
                    out.extend_from_slice(&item);
                }
                fill(room.checked_sub(used).ok_or_else(malformed)?, out)
            }
        }
    }
}

/// Padding: an unknown field of exactly so many bytes.
pub(super) fn fill(bytes: usize, out: &mut Vec<u8>) -> Result<(), LockError> {
    if bytes == 0 {
        return Ok(());
    }
    let length = (1..=4).find(|length| bytes - 1 < length + (1 << (7 * length)));
    let length = length.filter(|_| bytes > 1).ok_or_else(malformed)?;
    out.push(FILLER);
    let mut payload = bytes.checked_sub(1 + length).ok_or_else(malformed)?;
    let end = out.len() + length + payload;
    for place in 1..=length {
        let more = if place < length { 0x80 } else { 0 };
        out.push(u8::try_from(payload & 0x7f).unwrap_or_default() | more);
        payload >>= 7;
    }
    out.resize(end, 0);
    Ok(())
}

/// A number, and what is behind it; `None` where it is not whole.
pub(super) fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut number = 0_u64;
    for (place, byte) in bytes.iter().take(10).enumerate() {
        number |= u64::from(byte & 0x7f) << (7 * place.min(9));
        if *byte < 0x80 {
            return Some((number, &bytes[place + 1..]));
        }
    }
    None
}

fn malformed() -> LockError {
    LockError::Document(DocumentError::Malformed { encoding: Encoding::Protobuf })
}

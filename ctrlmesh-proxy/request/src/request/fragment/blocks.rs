//! Paths with a `#` in the header blocks of HTTP/2.
//!
//! Blocks are walked, not decoded: a path stands in a literal that names `:path`, which every encoder does by the static
//! table, and all else is stepped over by its length. A path that comes from the dynamic table was such a literal before;
//! once one of those held a `#`, which of them a later block means is not known, and none is taken.

use std::cell::RefCell;
use std::rc::Rc;

use super::Look;

/// What a client sends first.
const PREFACE_BYTES: usize = 24;

/// Length, type, flags and stream of a frame.
const HEAD_BYTES: usize = 9;

/// Types of frames.
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const CONTINUATION: u8 = 9;

/// Flags of frames.
const ACK: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// The most of a block that is kept, in bytes; a connection with a longer one is not taken on either.
const MAX_BLOCK_BYTES: usize = 2 << 20;

/// How many entries the static table has, and which of them are paths.
const STATIC: usize = 61;
const PATHS: [usize; 2] = [4, 5];

/// The name of a path, and the same in Huffman's code.
const NAME: &[u8] = b":path";
const NAME_ENCODED: &[u8] = &[0xb9, 0x58, 0xd3, 0x3f];

/// Where the codes of each length end: a code below is whole. Longer ones stand for bytes that no target may hold.
const ENDS: [(u32, u32); 10] = [
    (5, 0x0a),
    (6, 0x2e),
    (7, 0x7c),
    (8, 0xfe),
    (10, 0x3fd),
    (11, 0x7fd),
    (12, 0xffc),
    (13, 0x1ffe),
    (14, 0x3ffe),
    (15, 0x7fff),
];

/// The code of `#`.
const HASH: (u32, u32) = (12, 0xffa);

/// Looks for paths with a `#`.
#[derive(Debug, Default)]
pub struct Blocks {
    /// How much of the preface has come.
    preface: usize,
    /// How much of a frame's head has come, and that.
    got: usize,
    head: [u8; HEAD_BYTES],
    /// What is missing of the frame's payload.
    missing: usize,
    /// The payload's beginning, where it is needed and came in pieces.
    payload: Vec<u8>,
    /// The block's beginning, where it has several frames, and whether it is to go on.
    block: Vec<u8>,
    open: bool,
    /// Streams whose path held a `#`.
    cut: Vec<u32>,
    /// Whether a path in the dynamic table may hold one.
    tainted: bool,
    /// Whether too much came to be looked at.
    lost: bool,
    /// How many SETTINGS came.
    settings: u64,
}

/// A string of a header block.
#[derive(Clone, Copy)]
struct Text<'b> {
    bytes: &'b [u8],
    encoded: bool,
}

// === impl Blocks ===

impl Blocks {
    /// Whether the path of the request on `stream` was longer; asked of each, in their order.
    pub fn cut(&mut self, stream: u32) -> bool {
        if self.cut.is_empty() {
            return self.lost;
        }
        let cut = self.cut.contains(&stream);
        self.cut.retain(|other| *other > stream);
        cut || self.lost
    }

    /// How many SETTINGS have come, each of which is to be acknowledged.
    pub fn settings(&self) -> u64 {
        self.settings
    }

    /// Whether the head of a request has begun and is not whole.
    pub fn amid_head(&self) -> bool {
        self.open || self.got == HEAD_BYTES && self.needs_payload()
    }

    /// A frame whose payload is needed.
    fn frame(&mut self, payload: &[u8]) {
        let (kind, flags) = (self.head[3], self.head[4]);
        let fragment = if kind == HEADERS { fragment(payload, flags) } else { Some(payload) };
        // What is malformed ends the connection.
        let fragment = fragment.unwrap_or_default();
        if kind == HEADERS {
            self.block.clear();
        }
        self.open = flags & END_HEADERS == 0;
        if self.open {
            self.lost |= self.block.len() + fragment.len() > MAX_BLOCK_BYTES;
            if !self.lost {
                self.block.extend_from_slice(fragment);
            }
        } else if self.block.is_empty() {
            self.judge(fragment);
        } else {
            let mut block = std::mem::take(&mut self.block);
            block.extend_from_slice(fragment);
            self.judge(&block);
        }
    }

    fn judge(&mut self, block: &[u8]) {
        let (mut rest, mut known, mut cut) = (block, false, false);
        while let Some(field) = field(&mut rest) {
            if !field.is_path {
                continue;
            }
            known = true;
            if field.value.is_some_and(Text::holds_hash) {
                cut = true;
                self.tainted |= field.is_indexed;
            }
        }
        if cut || self.tainted && !known {
            let [.., a, b, c, d] = self.head;
            self.cut.push(u32::from_be_bytes([a & 0x7f, b, c, d]));
        }
    }

    fn needs_payload(&self) -> bool {
        matches!(self.head[3], HEADERS | CONTINUATION)
    }

    fn begin(&mut self) {
        let [a, b, c, ..] = self.head;
        self.missing = u32::from_be_bytes([0, a, b, c]) as usize;
        self.settings += u64::from(self.head[3] == SETTINGS && self.head[4] & ACK == 0);
        self.payload.clear();
        if self.missing == 0 {
            self.end(&[]);
        }
    }

    fn end(&mut self, payload: &[u8]) {
        self.got = 0;
        if self.needs_payload() {
            self.frame(payload);
        }
    }

    /// Takes a piece of a payload.
    fn take(&mut self, piece: &[u8]) {
        self.missing -= piece.len();
        if self.missing == 0 && self.payload.is_empty() {
            return self.end(piece);
        }
        if self.needs_payload() {
            self.payload.extend_from_slice(piece);
        }
        if self.missing == 0 {
            let payload = std::mem::take(&mut self.payload);
            self.end(&payload);
        }
    }
}

impl Look for Blocks {
    fn look(&mut self, bytes: &[u8]) {
        let skipped = bytes.len().min(PREFACE_BYTES - self.preface);
        self.preface += skipped;
        let mut rest = &bytes[skipped..];
        while !rest.is_empty() {
            let wanted = if self.got < HEAD_BYTES { HEAD_BYTES - self.got } else { self.missing };
            let (piece, behind) = rest.split_at(wanted.min(rest.len()));
            rest = behind;
            if self.got == HEAD_BYTES {
                self.take(piece);
                continue;
            }
            self.head[self.got..self.got + piece.len()].copy_from_slice(piece);
            self.got += piece.len();
            if self.got == HEAD_BYTES {
                self.begin();
            }
        }
    }

    fn unfinished(&self) -> usize {
        self.block.len() + self.payload.len()
    }
}

impl Look for Rc<RefCell<Blocks>> {
    fn look(&mut self, bytes: &[u8]) {
        self.borrow_mut().look(bytes);
    }

    fn unfinished(&self) -> usize {
        self.borrow().unfinished()
    }
}

/// One header of a block.
struct Field<'b> {
    is_path: bool,
    /// Whether later blocks may mean it by its number.
    is_indexed: bool,
    value: Option<Text<'b>>,
}

/// The next header; `None` at the end, or where it is malformed, which ends the connection.
fn field<'b>(block: &mut &'b [u8]) -> Option<Field<'b>> {
    let first = *block.first()?;
    let (bits, is_indexed) = match first {
        0x80.. => {
            let index = number(block, 7)?;
            let is_path = PATHS.contains(&index);
            return Some(Field { is_path, is_indexed: index > STATIC, value: None });
        }
        0x40.. => (6, true),
        0x20.. => {
            number(block, 5)?;
            return Some(Field { is_path: false, is_indexed: false, value: None });
        }
        _ => (4, false),
    };
    let is_path = match number(block, bits)? {
        0 => text(block)?.is_name(),
        index => PATHS.contains(&index),
    };
    Some(Field { is_path, is_indexed, value: Some(text(block)?) })
}

/// A number whose first `bits` bits stand in the first byte.
fn number(block: &mut &[u8], bits: u32) -> Option<usize> {
    let (first, mut rest) = block.split_first()?;
    let most = (1 << bits) - 1;
    let mut number = usize::from(*first) & most;
    if number == most {
        for shift in (0..28).step_by(7) {
            let (next, behind) = rest.split_first()?;
            rest = behind;
            number += usize::from(next & 0x7f) << shift;
            if next & 0x80 == 0 {
                *block = rest;
                return Some(number);
            }
        }
        return None;
    }
    *block = rest;
    Some(number)
}

fn text<'b>(block: &mut &'b [u8]) -> Option<Text<'b>> {
    let encoded = block.first()? & 0x80 != 0;
    let length = number(block, 7)?;
    let (bytes, rest) = block.split_at_checked(length)?;
    *block = rest;
    Some(Text { bytes, encoded })
}

/// A frame's part of a block.
fn fragment(payload: &[u8], flags: u8) -> Option<&[u8]> {
    let mut payload = payload;
    let mut padding = 0;
    if flags & PADDED != 0 {
        let (length, rest) = payload.split_first()?;
        (padding, payload) = (usize::from(*length), rest);
    }
    if flags & PRIORITY != 0 {
        payload = payload.get(5..)?;
    }
    payload.get(..payload.len().checked_sub(padding)?)
}

// === impl Text ===

impl Text<'_> {
    fn is_name(self) -> bool {
        self.bytes == if self.encoded { NAME_ENCODED } else { NAME }
    }

    fn holds_hash(self) -> bool {
        if !self.encoded {
            return self.bytes.contains(&b'#');
        }
        // Nine ones in a row, which its code begins with, leave five at an end of a byte. Few other codes do.
        let may = self.bytes.iter().any(|byte| byte & 0x1f == 0x1f || byte & 0xf8 == 0xf8);
        may && self.decoded_holds_hash()
    }

    fn decoded_holds_hash(self) -> bool {
        let (mut code, mut length) = (0, 0);
        for byte in self.bytes {
            for bit in (0..8).rev() {
                code = code << 1 | u32::from(byte >> bit & 1);
                length += 1;
                if (length, code) == HASH {
                    return true;
                }
                if length > 15 {
                    return false;
                }
                if ENDS.iter().any(|(of, end)| *of == length && code < *end) {
                    (code, length) = (0, 0);
                }
            }
        }
        false
    }
}

#[cfg(test)]
mod tests;

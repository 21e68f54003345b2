//! Reads the frame headers that a client sends over HTTP/2: counts SETTINGS, and tells whether a header block is open.
//!
//! h2 reports neither. Payloads are stepped over.

use std::cell::RefCell;
use std::rc::Rc;

use crate::serve::tap::HeadObserver;

/// The length of the connection preface.
const PREFACE_BYTES: usize = 24;

/// Length, type, flags and stream of a frame.
const FRAME_HEADER_BYTES: usize = 9;

const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const CONTINUATION: u8 = 9;

const ACK: u8 = 0x1;
const END_HEADERS: u8 = 0x4;

#[derive(Debug, Default)]
pub(super) struct Frames {
    /// Bytes of the preface that have come.
    preface: usize,
    /// Bytes of `header` that have come.
    got: usize,
    header: [u8; FRAME_HEADER_BYTES],
    /// Bytes that are missing of the frame's payload.
    missing: usize,
    /// Whether a CONTINUATION is to follow.
    open_block: bool,
    /// Bytes of an unfinished header block that have come.
    block_bytes: usize,
    settings: u64,
}

impl Frames {
    /// SETTINGS frames that have to be acknowledged.
    pub(super) fn settings(&self) -> u64 {
        self.settings
    }

    /// Whether a header block has begun and is not whole.
    pub(super) fn is_amid_head(&self) -> bool {
        self.open_block || self.got == FRAME_HEADER_BYTES && self.is_of_block()
    }

    fn observe(&mut self, bytes: &[u8]) {
        let skipped = bytes.len().min(PREFACE_BYTES - self.preface);
        self.preface += skipped;
        let mut rest = &bytes[skipped..];
        while !rest.is_empty() {
            if self.got == FRAME_HEADER_BYTES {
                let bytes = self.missing.min(rest.len());
                self.take_payload(bytes);
                rest = &rest[bytes..];
                continue;
            }
            let wanted = FRAME_HEADER_BYTES - self.got;
            let (piece, behind) = rest.split_at(wanted.min(rest.len()));
            self.header[self.got..self.got + piece.len()].copy_from_slice(piece);
            self.got += piece.len();
            rest = behind;
            if self.got == FRAME_HEADER_BYTES {
                self.begin_frame();
            }
        }
    }

    fn is_of_block(&self) -> bool {
        matches!(self.header[3], HEADERS | CONTINUATION)
    }

    fn begin_frame(&mut self) {
        let [a, b, c, kind, flags, ..] = self.header;
        self.missing = u32::from_be_bytes([0, a, b, c]) as usize;
        self.settings += u64::from(kind == SETTINGS && flags & ACK == 0);
        self.take_payload(0);
    }

    /// Steps over the next `bytes` of the payload.
    fn take_payload(&mut self, bytes: usize) {
        self.missing -= bytes;
        let of_block = self.is_of_block();
        if of_block {
            self.block_bytes += bytes;
        }
        if self.missing > 0 {
            return;
        }
        self.got = 0;
        if of_block {
            self.open_block = self.header[4] & END_HEADERS == 0;
            self.block_bytes = if self.open_block { self.block_bytes } else { 0 };
        }
    }
}

impl HeadObserver for Rc<RefCell<Frames>> {
    fn observe(&mut self, bytes: &[u8]) {
        self.borrow_mut().observe(bytes);
    }

    fn unfinished_bytes(&self) -> usize {
        self.borrow().block_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u8::try_from(payload.len()).unwrap();
        [&[0, 0, length, kind, flags, 0, 0, 0, 1], payload].concat()
    }

    fn observed(bytes: &[u8], size: usize) -> Frames {
        let mut frames = Frames::default();
        bytes.chunks(size).for_each(|piece| frames.observe(piece));
        frames
    }

    #[test]
    fn settings_are_counted_but_not_their_acknowledgements() {
        let settings = [frame(SETTINGS, 0, b"123456"), frame(SETTINGS, ACK, b""), frame(SETTINGS, 0, b"")];
        // A payload that looks like a frame is none.
        let data = frame(0, 0, &frame(SETTINGS, 0, b""));
        let stream = [vec![0; PREFACE_BYTES], settings.concat(), data].concat();
        for size in 1..=stream.len() {
            let frames = observed(&stream, size);
            assert_eq!((frames.settings(), frames.is_amid_head()), (2, false), "{size}");
        }
    }

    #[test]
    fn a_head_is_open_from_its_first_frame_header_to_its_end() {
        let before = [vec![0; PREFACE_BYTES], frame(SETTINGS, 0, b"")].concat();
        let head =
            [frame(HEADERS, 0, b"abc"), frame(CONTINUATION, 0, b""), frame(CONTINUATION, END_HEADERS, b"de")].concat();
        let stream = [before.clone(), head].concat();
        for size in 1..=stream.len() {
            for end in before.len()..=stream.len() {
                let frames = observed(&stream[..end], size);
                let inside = end >= before.len() + FRAME_HEADER_BYTES && end < stream.len();
                assert_eq!(frames.is_amid_head(), inside, "{size} {end}");
            }
        }
        assert_eq!(observed(&stream[..stream.len() - 1], 7).block_bytes, 4);
        assert_eq!(observed(&stream, 7).block_bytes, 0);
    }
}

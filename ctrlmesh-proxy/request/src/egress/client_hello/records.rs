//! Takes a TLS connection's handshake out of its records.

use std::ops::RangeInclusive;

use super::{NotTls, fields};

/// The kind of record that holds a part of the handshake.
const HANDSHAKE: u8 = 22;

/// The longest record, in bytes: what is encrypted may be 256 longer than what it holds (RFC 8446, section 5.2).
const MAX_RECORD_BYTES: usize = (16 << 10) + 256;

/// The content of each record that has arrived; of the last one as much as has arrived.
pub(super) struct Fragments<'a> {
    rest: &'a [u8],
}

impl<'a> Fragments<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }
}

impl<'a> Iterator for Fragments<'a> {
    type Item = Result<&'a [u8], NotTls>;

    fn next(&mut self) -> Option<Self::Item> {
        if !may_begin(self.rest) {
            self.rest = &[];
            return Some(Err(NotTls));
        }
        let (header, behind) = self.rest.split_at_checked(5)?;
        let length = fields::number(&header[3..]);
        if !(1..=MAX_RECORD_BYTES).contains(&length) {
            self.rest = &[];
            return Some(Err(NotTls));
        }
        let (fragment, rest) = behind.split_at(length.min(behind.len()));
        self.rest = rest;
        Some(Ok(fragment))
    }
}

/// Whether a record can begin so: kind and version are right, as far as they have arrived.
fn may_begin(record: &[u8]) -> bool {
    let is = |at: usize, expected: RangeInclusive<u8>| record.get(at).is_none_or(|byte| expected.contains(byte));
    is(0, HANDSHAKE..=HANDSHAKE) && is(1, 3..=3) && is(2, 0..=4)
}

//! Finds the frames of a watch in a stream that comes in pieces.

use std::ops::Range;

use super::cbor::Scan;
use super::{DocumentError, Encoding};

/// Finds frames one after the other. Bytes of an incomplete frame are not read twice.
#[derive(Clone, Debug)]
pub(in crate::rewrite) struct Framer {
    encoding: Encoding,
    /// How much of a line holds no end of it.
    searched: usize,
    scan: Scan,
}

impl Framer {
    /// At the beginning of a frame.
    pub(in crate::rewrite) fn new(encoding: Encoding) -> Self {
        Self { encoding, searched: 0, scan: Scan::default() }
    }

    /// How much of `rest` may belong to the frame that began with `begun` and is not whole: at least one byte.
    pub(in crate::rewrite) fn at_most(&self, begun: &[u8], rest: &[u8]) -> usize {
        let missing = match self.encoding {
            Encoding::Json => memchr::memchr(b'\n', rest).map(|end| end + 1),
            Encoding::Protobuf => {
                let length = begun.first_chunk::<4>().map_or(0, |length| u32::from_be_bytes(*length));
                usize::try_from(length).ok().map(|length| (4 + length).saturating_sub(begun.len()))
            }
            // Where an item ends is known once it has been read.
            Encoding::Cbor => None,
        };
        missing.map_or(rest.len(), |missing| missing.clamp(1, rest.len().max(1)))
    }

    /// The first whole frame of `stream`: where it stands, and where the next begins. `None` where it is not whole yet:
    /// the next call is to begin with the same bytes.
    pub(in crate::rewrite) fn next(&mut self, stream: &[u8]) -> Result<Option<(Range<usize>, usize)>, DocumentError> {
        match self.encoding {
            Encoding::Json => {
                let rest = stream.get(self.searched..).unwrap_or_default();
                let end = memchr::memchr(b'\n', rest).map(|length| self.searched + length);
                self.searched = if end.is_some() { 0 } else { stream.len() };
                Ok(end.map(|end| (0..end, end + 1)))
            }
            Encoding::Protobuf => {
                let Some(length) = stream.first_chunk::<4>() else {
                    return Ok(None);
                };
                let end =
                    4 + usize::try_from(u32::from_be_bytes(*length)).map_err(|_error| self.encoding.malformed())?;
                Ok((end <= stream.len()).then_some((4..end, end)))
            }
            Encoding::Cbor => {
                let end = self.scan.end(stream);
                if end.is_some() {
                    self.scan = Scan::default();
                }
                Ok(end.map(|end| (0..end, end)))
            }
        }
    }
}

/// A frame with its length or newline.
pub fn framed(frame: &[u8], encoding: Encoding) -> Vec<u8> {
    match encoding {
        Encoding::Json => [frame, b"\n"].concat(),
        Encoding::Cbor => frame.to_vec(),
        Encoding::Protobuf => {
            let length = u32::try_from(frame.len()).unwrap_or(u32::MAX);
            [&length.to_be_bytes()[..], frame].concat()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rewrite::document::cbor;

    /// An object with all that CBOR has, in definite and in indefinite length.
    fn item() -> Vec<u8> {
        let inner = cbor::map(&[("a", cbor::number(300)), ("b", cbor::text_item("text"))]);
        let mut array = vec![0x9f, 0x01, 0xf6, 0x7f, 0x61, b'x', 0x62, b'y', b'z', 0xff];
        array.extend(&inner);
        array.extend([0xfb, 1, 2, 3, 4, 5, 6, 7, 8, 0xff]);
        cbor::map(&[("inner", inner), ("array", array), ("empty", vec![0xa0])])
    }

    #[test]
    fn what_was_looked_at_of_a_frame_is_not_looked_at_again() {
        let json = b"{\"a\": \"b\"}".to_vec();
        for (encoding, frame) in [(Encoding::Json, json), (Encoding::Cbor, item())] {
            let whole = framed(&frame, encoding);
            let mut framer = Framer::new(encoding);
            let mut seen = whole.clone();
            for end in 0..whole.len() {
                assert_eq!(framer.next(&seen[..end]), Ok(None), "{encoding:?} {end}");
                // Were it looked at again, it would be the end of something.
                let known = if encoding == Encoding::Json { end } else { framer.scan.at };
                assert!(known + 9 >= end, "{encoding:?} {end}");
                seen[..known].fill(if encoding == Encoding::Json { b'\n' } else { 0xff });
            }
            let found = framer.next(&seen);
            assert_eq!(found, Ok(Some((0..frame.len(), whole.len()))), "{encoding:?}");
            // The next frame is begun anew.
            let mut next = Framer { encoding, ..framer };
            assert_eq!(next.next(&whole), Ok(Some((0..frame.len(), whole.len()))));
        }
    }
}

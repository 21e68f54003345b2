//! Follows a watch: where its frames end, and which version the client has seen.
//!
//! At most the first and the last frame that end in a chunk are read, and small ones only when their version is asked
//! for; unless the caller reads each.

use std::ops::Range;

#[cfg(test)]
use super::document::Document;
use super::document::{self, Encoding};
use crate::request::RequestInfo;

mod difference;
mod event;
mod splice;
mod websocket;

pub use super::document::framed;
pub use difference::{Difference, difference};
use event::{EventSummary, starts_as_added};
pub use event::{ObjectChange, object_change};
pub use splice::{Expired, NextRead, Splice, expired, list_accept, list_version, newest};
pub use websocket::{error_frames, error_stream};

/// The longest frame that is waited for, in bytes: twenty of the largest objects that the API server takes.
pub const MAX_FRAME_BYTES: usize = 64 * 1024 * 1024;

/// Frames up to this size are kept until their version is asked for, in bytes. Larger ones are read at once, so that an
/// idle watch holds little.
const MAX_UNREAD_BYTES: usize = 4096;

/// A stream that is no watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("a watch frame is longer than {MAX_FRAME_BYTES} bytes")]
    TooLarge,
    #[error("read a watch frame")]
    Document(#[from] document::DocumentError),
}

/// Finds the frames of a stream one after the other.
#[derive(Clone, Debug)]
pub struct Framer(document::Framer);

/// Follows the frames of one watch.
#[derive(Clone, Debug)]
pub struct Frames {
    encoding: Encoding,
    framer: Framer,
    phase: Phase,
    at: Option<u64>,
    /// The last frame, if it was not read yet.
    unread: Vec<u8>,
    /// A frame that has begun.
    partial: Vec<u8>,
}

/// How the versions of events are ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Events come in the order of their versions.
    Live,
    /// Events are objects that were there before, in any order; what comes after them shows that they ended.
    Initial,
    /// As `Initial`, but a bookmark ends them, and the client waits for it.
    InitialUntilBookmark,
}

impl Framer {
    pub fn new(encoding: Encoding) -> Self {
        Self(document::Framer::new(encoding))
    }

    /// The first whole frame of `stream`: where it stands (without its length or newline), and where the next begins.
    /// Where it is not whole yet, the next call is to begin with the same bytes.
    ///
    /// # Errors
    /// Where no frame of this encoding begins so.
    pub fn next(&mut self, stream: &[u8]) -> Result<Option<(Range<usize>, usize)>, FrameError> {
        let found = self.0.next(stream)?;
        let length = found.as_ref().map_or(stream.len(), |(_, next)| *next);
        if length > MAX_FRAME_BYTES { Err(FrameError::TooLarge) } else { Ok(found) }
    }
}

impl Frames {
    /// For the answer to `request`, from its beginning.
    pub fn new(encoding: Encoding, request: &RequestInfo<'_>) -> Self {
        let query = request.query();
        let version = query.text("resourceVersion").and_then(|version| version.parse::<u64>().ok());
        let at = version.filter(|version| *version > 0);
        let phase = match (query.is_set("sendInitialEvents"), at) {
            (true, _) => Phase::InitialUntilBookmark,
            (false, Some(_)) => Phase::Live,
            (false, None) => Phase::Initial,
        };
        let at = at.filter(|_| phase == Phase::Live);
        let framer = Framer::new(encoding);
        Self { encoding, framer, phase, at, unread: Vec::new(), partial: Vec::new() }
    }

    /// Takes the next bytes, all of which may be sent on. Returns the end of the last frame that ends in them.
    ///
    /// # Errors
    /// The bytes are no frames. Those before were right, but the stream cannot be followed any more.
    pub fn feed(&mut self, chunk: &[u8]) -> Result<Option<usize>, FrameError> {
        self.feed_each(chunk, |_| {})
    }

    /// As [`Self::feed`]. `on_live` gets each frame that ends in `chunk`, without its length or newline, but for those
    /// of objects that were there before.
    ///
    /// # Errors
    /// As [`Self::feed`].
    pub fn feed_each(&mut self, chunk: &[u8], mut on_live: impl FnMut(&[u8])) -> Result<Option<usize>, FrameError> {
        let Some(begun) = self.complete(chunk, &mut on_live)? else { return Ok(None) };
        let end = begun + self.take(&chunk[begun..], &mut on_live)?;
        self.partial.extend(&chunk[end..]);
        Ok((end > 0).then_some(end))
    }

    /// Whether nothing of a frame has been sent on that is not whole.
    pub fn at_boundary(&self) -> bool {
        self.partial.is_empty()
    }

    /// The version up to which the client has seen everything; `None` where that is not known.
    pub fn at(&mut self) -> Option<u64> {
        let unread = std::mem::take(&mut self.unread);
        if !unread.is_empty() {
            self.read(&unread);
        }
        self.at
    }

    /// Completes the frame that has begun, if one has: where `chunk` goes on behind it; `None` where it is not whole
    /// yet.
    fn complete(&mut self, chunk: &[u8], on_live: &mut impl FnMut(&[u8])) -> Result<Option<usize>, FrameError> {
        if self.partial.is_empty() {
            return Ok(Some(0));
        }
        let mut taken = 0;
        while taken < chunk.len() {
            let rest = &chunk[taken..];
            let rest = &rest[..self.framer.0.at_most(&self.partial, rest)];
            self.partial.extend(rest);
            taken += rest.len();
            if let Some((frame, next)) = self.framer.next(&self.partial)? {
                let mut partial = std::mem::take(&mut self.partial);
                let begun = taken - (partial.len() - next);
                self.take_frame(&partial[frame.clone()]);
                if self.phase == Phase::Live && !frame.is_empty() {
                    on_live(&partial[frame]);
                }
                partial.clear();
                partial.shrink_to(MAX_UNREAD_BYTES);
                self.partial = partial;
                return Ok(Some(begun));
            }
        }
        Ok(None)
    }

    /// Takes the whole frames at the beginning of `stream`, and returns their end.
    fn take(&mut self, stream: &[u8], on_live: &mut impl FnMut(&[u8])) -> Result<usize, FrameError> {
        let (mut end, mut last) = (0, 0..0);
        while let Some((frame, next)) = self.framer.next(&stream[end..])? {
            let at = end + frame.start..end + frame.end;
            end += next;
            // An empty line is no event, and hides none.
            if at.is_empty() {
                continue;
            }
            last = at;
            if self.phase != Phase::Live {
                self.read(&stream[last.clone()]);
            }
            if self.phase == Phase::Live {
                on_live(&stream[last.clone()]);
            }
        }
        if self.phase == Phase::Live {
            self.take_frame(&stream[last]);
        }
        Ok(end)
    }

    /// An empty line is no frame.
    fn take_frame(&mut self, frame: &[u8]) {
        if frame.is_empty() {
            return;
        }
        if self.phase != Phase::Live {
            return self.read(frame);
        }
        self.unread.clear();
        if frame.len() > MAX_UNREAD_BYTES {
            self.unread.shrink_to_fit();
            self.read(frame);
        } else {
            self.unread.extend(frame);
        }
    }

    fn read(&mut self, frame: &[u8]) {
        if self.phase != Phase::Live && starts_as_added(frame, self.encoding) {
            return;
        }
        // Neither a frame that cannot be read nor an ERROR has a version.
        let Some(event) = EventSummary::read(frame, self.encoding) else {
            self.at = None;
            return;
        };
        let ends = match self.phase {
            Phase::Live => false,
            Phase::Initial => !event.is_added,
            Phase::InitialUntilBookmark => event.is_bookmark && event.ends_initial_events,
        };
        if ends {
            self.phase = Phase::Live;
        }
        if self.phase == Phase::Live {
            self.at = event.version;
        }
    }
}

#[cfg(test)]
mod tests;

//! How do the frames of a watch pass in which locks are renamed?

use bytes::{Buf as _, Bytes, BytesMut};
use ctrlmesh_request::decide::Rename;
use ctrlmesh_request::rewrite::Encoding;
use ctrlmesh_request::rewrite::lock;
use ctrlmesh_request::rewrite::watch;
use ctrlmesh_request::rewrite::watch::{FrameError, Framer, Frames};

use crate::net::body::BodyError;

/// Frames whose lock is renamed pass one by one.
#[derive(Debug)]
pub(super) struct Renaming {
    rename: Rename,
    framer: Option<Framer>,
    partial: BytesMut,
}

impl Renaming {
    /// Of a watch at its beginning.
    pub(super) fn new(rename: Rename) -> Self {
        Self { rename, framer: None, partial: BytesMut::new() }
    }

    /// Another watch begins; what has come of a frame belongs to the one that ended.
    pub(super) fn begin(&mut self) {
        self.framer = None;
        self.partial.clear();
    }

    /// Whole frames, of which nothing is known yet, with their lock renamed.
    pub(super) fn whole(&mut self, frames: &[u8], encoding: Encoding) -> Result<Bytes, BodyError> {
        self.begin();
        self.partial.extend_from_slice(frames);
        self.take(encoding, |_| Ok(()))
    }

    /// The whole frames that `data` completes, with their lock renamed.
    pub(super) fn pass(
        &mut self,
        data: &[u8],
        encoding: Encoding,
        frames: &mut Frames,
    ) -> Result<Bytes, BodyError> {
        self.partial.extend_from_slice(data);
        let passed = self.take(encoding, |frame| frames.feed(frame).map(drop))?;
        if self.partial.len() > lock::MAX_BODY_BYTES {
            return Err(BodyError::GivenUp);
        }
        Ok(passed)
    }

    /// Takes out all whole frames; each is shown before it is changed.
    fn take(
        &mut self,
        encoding: Encoding,
        mut show: impl FnMut(&[u8]) -> Result<(), FrameError>,
    ) -> Result<Bytes, BodyError> {
        let mut taken = Vec::new();
        let given_up = |_broken| BodyError::GivenUp;
        let framer = self.framer.get_or_insert_with(|| Framer::new(encoding));
        while let Some((frame, next)) = framer.next(&self.partial).map_err(given_up)? {
            show(&self.partial[..next]).map_err(given_up)?;
            let renamed = lock::frame(&self.partial[frame], encoding, &self.rename);
            if let Some(renamed) = renamed.map_err(|_broken| BodyError::GivenUp)? {
                taken.extend(watch::framed(&renamed, encoding));
            }
            self.partial.advance(next);
        }
        Ok(taken.into())
    }
}

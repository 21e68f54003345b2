//! Renames the leader-election lock in the frames of a watch.

use bytes::{Buf as _, Bytes, BytesMut};
use ctrlmesh_request::decide::Rename;
use ctrlmesh_request::rewrite::Encoding;
use ctrlmesh_request::rewrite::lock;
use ctrlmesh_request::rewrite::watch;
use ctrlmesh_request::rewrite::watch::{FrameError, Framer, Frames};

use crate::net::body::BodyError;

#[derive(Debug)]
pub(super) struct LockRenamer {
    rename: Rename,
    framer: Option<Framer>,
    partial: BytesMut,
}

impl LockRenamer {
    pub(super) fn new(rename: Rename) -> Self {
        Self { rename, framer: None, partial: BytesMut::new() }
    }

    /// Drops the incomplete frame of a watch that has ended.
    pub(super) fn reset(&mut self) {
        self.framer = None;
        self.partial.clear();
    }

    /// Renames in whole frames of a splice.
    pub(super) fn rename_whole(&mut self, frames: &[u8], encoding: Encoding) -> Result<Bytes, BodyError> {
        self.reset();
        self.partial.extend_from_slice(frames);
        self.take(encoding, |_| Ok(()))
    }

    /// Renames in the frames that `data` completes; keeps the rest. `on_live` as in [`Frames::feed_each`].
    pub(super) fn rename_completed(
        &mut self,
        data: &[u8],
        encoding: Encoding,
        frames: &mut Frames,
        mut on_live: impl FnMut(&[u8]),
    ) -> Result<Bytes, BodyError> {
        self.partial.extend_from_slice(data);
        let passed = self.take(encoding, |frame| frames.feed_each(frame, &mut on_live).map(drop))?;
        if self.partial.len() > lock::MAX_BODY_BYTES {
            return Err(BodyError::GivenUp);
        }
        Ok(passed)
    }

    /// Takes out all whole frames. `inspect` gets each before it is changed.
    fn take(
        &mut self,
        encoding: Encoding,
        mut inspect: impl FnMut(&[u8]) -> Result<(), FrameError>,
    ) -> Result<Bytes, BodyError> {
        let mut taken = Vec::new();
        let given_up = |_broken| BodyError::GivenUp;
        let framer = self.framer.get_or_insert_with(|| Framer::new(encoding));
        while let Some((frame, next)) = framer.next(&self.partial).map_err(given_up)? {
            inspect(&self.partial[..next]).map_err(given_up)?;
            let renamed = lock::frame(&self.partial[frame], encoding, &self.rename);
            if let Some(renamed) = renamed.map_err(|_broken| BodyError::GivenUp)? {
                taken.extend(watch::framed(&renamed, encoding));
            }
            self.partial.advance(next);
        }
        Ok(taken.into())
    }
}

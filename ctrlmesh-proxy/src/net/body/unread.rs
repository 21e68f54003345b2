//! What of bodies has been read on one side, and is not yet written on the other?

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use bytes::{Buf, Bytes};

use crate::net::memory_budget::{Backlog, Waiting};

/// What waits on a connection without being counted, and in what steps the rest is: an ordinary response touches nothing
/// that threads share.
const STEP_BYTES: usize = 64 << 10;

/// What holding a part of a body takes beside its bytes.
const BESIDE_BYTES: usize = 256;

/// What an API server may send of a response before it hears that nobody reads it: the window of a stream.
pub const AHEAD_BYTES: u32 = 1 << 20;

/// What waits on one connection of a client.
#[derive(Debug)]
pub struct Unread {
    backlog: Arc<Backlog>,
    bytes: Cell<usize>,
    counted: RefCell<Waiting>,
}

/// A part of a body that waits to be written. It is counted until it is, or until it is given up.
#[derive(Debug)]
pub struct Piece {
    bytes: Bytes,
    counted: usize,
    unread: Rc<Unread>,
}

/// More waits for a client already than may.
#[derive(Debug)]
pub struct TooMuch;

// === impl Unread ===

impl Unread {
    /// Nothing yet; what there will be counts in `backlog`.
    pub fn new(backlog: Arc<Backlog>) -> Rc<Self> {
        let counted = RefCell::new(backlog.nothing());
        Rc::new(Self { backlog, bytes: Cell::default(), counted })
    }

    /// Where it counts.
    pub fn backlog(&self) -> &Arc<Backlog> {
        &self.backlog
    }

    /// Lets a part of a body wait, and counts it `times` over.
    ///
    /// # Errors
    /// Where too much waits already.
    pub fn piece(self: &Rc<Self>, bytes: Bytes, times: usize) -> Result<Piece, TooMuch> {
        let counted = if bytes.is_empty() { 0 } else { bytes.len() * times + BESIDE_BYTES };
        self.count(self.bytes.get() + counted)?;
        Ok(Piece { bytes, counted, unread: self.clone() })
    }

    /// Counts what may come of a response that its client does not read.
    ///
    /// # Errors
    /// Where too much waits already.
    pub fn ahead(&self) -> Result<Waiting, TooMuch> {
        self.backlog.wait(AHEAD_BYTES as usize).ok_or(TooMuch)
    }

    /// So much waits now.
    fn count(&self, bytes: usize) -> Result<(), TooMuch> {
        let whole_steps = bytes / STEP_BYTES * STEP_BYTES;
        if !self.counted.borrow_mut().set(whole_steps) {
            return Err(TooMuch);
        }
        self.bytes.set(bytes);
        Ok(())
    }
}

// === impl Piece ===

impl Piece {
    /// The first `length` bytes; the rest stays.
    #[must_use]
    pub fn split_to(&mut self, length: usize) -> Self {
        let bytes = self.bytes.split_to(length);
        let counted = self.counted.min(length);
        self.counted -= counted;
        Self { bytes, counted, unread: self.unread.clone() }
    }
}

impl Buf for Piece {
    fn remaining(&self) -> usize {
        self.bytes.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.bytes.chunk()
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // Less always fits.
        let _fits = self.unread.count(self.unread.bytes.get().saturating_sub(self.counted));
    }
}

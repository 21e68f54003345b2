//! Counts the bytes of bodies that were read from one side and are not yet written to the other.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use bytes::{Buf, Bytes};

use crate::net::memory_budget::{MemoryBudget, Reservation};

/// A connection reserves its budget in steps of this size. So an ordinary response touches nothing that threads share.
const STEP_BYTES: usize = 64 << 10;

/// The memory that one part of a body takes beside its bytes.
const OVERHEAD_BYTES: usize = 256;

/// What an API server may send of a response that nobody reads: the window of a stream.
pub const READ_AHEAD_BYTES: u32 = 1 << 20;

/// The bytes that wait on one client connection.
#[derive(Debug)]
pub struct UnreadBytes {
    budget: Arc<MemoryBudget>,
    bytes: Cell<usize>,
    /// `bytes`, rounded down to whole steps.
    reservation: RefCell<Reservation>,
}

/// A part of a body, counted until it is written or dropped.
#[derive(Debug)]
pub struct CountedBytes {
    bytes: Bytes,
    counted: usize,
    unread: Rc<UnreadBytes>,
}

#[derive(Debug)]
pub struct BudgetExceeded;

impl UnreadBytes {
    pub fn new(budget: Arc<MemoryBudget>) -> Rc<Self> {
        let reservation = RefCell::new(budget.empty_reservation());
        Rc::new(Self { budget, bytes: Cell::default(), reservation })
    }

    pub fn budget(&self) -> &Arc<MemoryBudget> {
        &self.budget
    }

    /// Counts `bytes` `times` over, for copies elsewhere.
    pub fn count_bytes(self: &Rc<Self>, bytes: Bytes, times: usize) -> Result<CountedBytes, BudgetExceeded> {
        let counted = if bytes.is_empty() { 0 } else { bytes.len() * times + OVERHEAD_BYTES };
        self.set(self.bytes.get() + counted)?;
        Ok(CountedBytes { bytes, counted, unread: self.clone() })
    }

    /// Memory for what the API server may send of a response that its client does not read.
    pub fn reserve_read_ahead(&self) -> Result<Reservation, BudgetExceeded> {
        self.budget.reserve(READ_AHEAD_BYTES as usize).ok_or(BudgetExceeded)
    }

    fn set(&self, bytes: usize) -> Result<(), BudgetExceeded> {
        let whole_steps = bytes / STEP_BYTES * STEP_BYTES;
        if !self.reservation.borrow_mut().resize(whole_steps) {
            return Err(BudgetExceeded);
        }
        self.bytes.set(bytes);
        Ok(())
    }
}

impl CountedBytes {
    /// The first `length` bytes; the rest stays.
    #[must_use]
    pub fn split_to(&mut self, length: usize) -> Self {
        let bytes = self.bytes.split_to(length);
        let counted = self.counted.min(length);
        self.counted -= counted;
        Self { bytes, counted, unread: self.unread.clone() }
    }
}

impl Buf for CountedBytes {
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

impl Drop for CountedBytes {
    fn drop(&mut self) {
        // Less always fits.
        let _fits = self.unread.set(self.unread.bytes.get().saturating_sub(self.counted));
    }
}

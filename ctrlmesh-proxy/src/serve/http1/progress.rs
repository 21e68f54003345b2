//! Counts the bytes of a request head that a client has sent over HTTP/1.1 and not ended.
//!
//! The stream counts and the service reads, so the counters are shared. Where a body ends is not known here: whatever
//! comes while no request is being answered counts as the next head.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::serve::tap::HeadObserver;

#[derive(Debug, Default)]
pub(super) struct HeadProgress {
    heard_since_answer: AtomicBool,
    answering: AtomicBool,
    bytes: AtomicUsize,
}

impl HeadProgress {
    /// The head of a request is whole.
    pub(super) fn begin_answer(&self) {
        self.answering.store(true, Ordering::Relaxed);
        self.bytes.store(0, Ordering::Relaxed);
    }

    /// The response's head is there. After an upgrade, `expects_request` is false: no further head can come.
    pub(super) fn end_answer(&self, expects_request: bool) {
        self.heard_since_answer.store(false, Ordering::Relaxed);
        self.answering.store(!expects_request, Ordering::Relaxed);
    }

    /// Whether bytes have come since the last answer: most likely the beginning of another request.
    pub(super) fn is_amid_request(&self) -> bool {
        self.heard_since_answer.load(Ordering::Relaxed)
    }
}

impl HeadObserver for Arc<HeadProgress> {
    fn observe(&mut self, bytes: &[u8]) {
        self.heard_since_answer.store(true, Ordering::Relaxed);
        if !self.answering.load(Ordering::Relaxed) {
            self.bytes.fetch_add(bytes.len(), Ordering::Relaxed);
        }
    }

    fn unfinished_bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_after_an_answer_begin_another_request() {
        let progress = Arc::<HeadProgress>::default();
        assert!(!progress.is_amid_request());
        progress.clone().observe(b"GET /a HTTP/1.1\r\nHost: k\r\n\r\n");
        assert_eq!(progress.unfinished_bytes(), 28);
        progress.begin_answer();
        progress.clone().observe(b"a body");
        assert_eq!(progress.unfinished_bytes(), 0);
        progress.end_answer(true);
        assert!(!progress.is_amid_request());
        progress.clone().observe(b"G");
        assert!(progress.is_amid_request());
        assert_eq!(progress.unfinished_bytes(), 1);
    }
}

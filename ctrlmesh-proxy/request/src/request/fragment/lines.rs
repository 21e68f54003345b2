//! Request lines of HTTP/1.1 whose target holds a `#`.
//!
//! Where a body begins and ends is not known here, so what is looked for is a target, by what stands behind it: a space
//! and `HTTP/`. What looks so in a body is the target of no request.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Look;

/// The longest target that is looked at, in bytes: no longer one is taken.
const MAX_TARGET_BYTES: usize = 80 << 10;

/// How many targets are remembered that no request had yet: what looks so in bodies, of logs perhaps, is among them.
const MAX_FOUND: usize = 1024;

/// How long they may be altogether, in bytes.
const MAX_FOUND_BYTES: usize = 1 << 20;

/// What stands behind a target.
const VERSION: &[u8] = b"HTTP/";

/// Looks for targets with a `#`.
#[derive(Debug, Default)]
pub struct Lines {
    /// What may be the beginning of one.
    held: Vec<u8>,
    found: Arc<Found>,
}

/// Targets with a `#` that were found, where there is none asking takes no lock; and whether more has come.
#[derive(Debug, Default)]
pub struct Found {
    any: AtomicBool,
    targets: Mutex<Targets>,
    /// Whether anything came since the last request was answered.
    amid: AtomicBool,
    /// Whether a request's head has come of which the answer has not begun, and what has come since none was under way.
    asked: AtomicBool,
    head: AtomicUsize,
}

#[derive(Debug, Default)]
struct Targets {
    /// What stands before the `#`, for each, in the order in which they came.
    cut: VecDeque<Vec<u8>>,
    /// How long these are.
    bytes: usize,
    /// Whether there were too many. What came later is not known then.
    lost: bool,
}

/// What a `#` stands in.
enum Part {
    /// In a target.
    Target,
    /// In what may yet become one.
    Unfinished,
    /// In something else.
    Nothing,
}

// === impl Lines ===

impl Lines {
    /// What is found, as it is found.
    pub fn found(&self) -> Arc<Found> {
        self.found.clone()
    }

    /// Looks at all that is there; where what may go on begins.
    fn search(&self, bytes: &[u8]) -> usize {
        let mut from = 0;
        while let Some(at) = memchr::memchr(b'#', &bytes[from..]).map(|length| from + length) {
            let start = word(&bytes[..at]);
            let end = memchr::memchr(b' ', &bytes[at..]).map_or(bytes.len(), |length| at + length);
            match part(&bytes[start..end], bytes.get(end + 1..).unwrap_or_default()) {
                Part::Target => self.found.add(&bytes[start..at]),
                Part::Unfinished => return start,
                Part::Nothing => {}
            }
            // What else stands in it is a part of the same.
            from = end;
        }
        word(bytes)
    }
}

impl Look for Lines {
    fn look(&mut self, bytes: &[u8]) {
        self.found.amid.store(true, Ordering::Relaxed);
        if !self.found.asked.load(Ordering::Relaxed) {
            self.found.head.fetch_add(bytes.len(), Ordering::Relaxed);
        }
        let mut held = std::mem::take(&mut self.held);
        let bytes = if held.is_empty() {
            bytes
        } else {
            held.extend_from_slice(bytes);
            &held
        };
        let rest = &bytes[self.search(bytes)..];
        let may_be_target = matches!(rest.first(), Some(b'/' | b'h' | b'H'));
        if may_be_target && rest.len() <= MAX_TARGET_BYTES && !ends_line(rest) {
            self.held = rest.to_vec();
        }
    }

    fn unfinished(&self) -> usize {
        self.found.head.load(Ordering::Relaxed)
    }
}

// === impl Found ===

impl Found {
    /// Whether the target of a request that was read as `target` was longer, or may have been. `first` says that it is
    /// the connection's first request: nothing stands before that.
    pub fn cut(&self, target: &str, first: bool) -> bool {
        if !self.any.load(Ordering::Relaxed) {
            return false;
        }
        let mut targets = self.targets();
        // An absolute URI ends in its path, which may be missing.
        let had = |cut: &Vec<u8>| {
            let absolute = !cut.starts_with(b"/");
            cut == target.as_bytes()
                || absolute && (target == "/" || cut.ends_with(target.as_bytes()))
        };
        let Some(at) = targets.cut.iter().position(had) else { return targets.lost && !first };
        // Those before it stand in bodies.
        let before: usize = targets.cut.drain(..=at).map(|cut| cut.len()).sum();
        targets.bytes -= before;
        self.any.store(targets.lost || !targets.cut.is_empty(), Ordering::Relaxed);
        drop(targets);
        true
    }

    /// Whether later requests on this connection can no longer be told from what they were cut off to: it is to carry
    /// none.
    pub fn is_lost(&self) -> bool {
        self.any.load(Ordering::Relaxed) && self.targets().lost
    }

    /// Says that a request was answered; where `goes_on`, another may come.
    pub fn settle(&self, goes_on: bool) {
        self.amid.store(false, Ordering::Relaxed);
        self.asked.store(!goes_on, Ordering::Relaxed);
    }

    /// Says that the head of a request is whole.
    pub fn begin(&self) {
        self.asked.store(true, Ordering::Relaxed);
        self.head.store(0, Ordering::Relaxed);
    }

    /// Whether more has come since: the beginning of another, most likely.
    pub fn is_amid(&self) -> bool {
        self.amid.load(Ordering::Relaxed)
    }

    fn add(&self, target: &[u8]) {
        let mut targets = self.targets();
        let bytes = targets.bytes + target.len();
        targets.lost |= targets.cut.len() >= MAX_FOUND || bytes > MAX_FOUND_BYTES;
        if !targets.lost {
            targets.bytes = bytes;
            targets.cut.push_back(target.to_vec());
        }
        drop(targets);
        self.any.store(true, Ordering::Relaxed);
    }

    fn targets(&self) -> MutexGuard<'_, Targets> {
        self.targets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where the last word begins.
fn word(bytes: &[u8]) -> usize {
    memchr::memrchr(b' ', bytes).map_or(0, |space| space + 1)
}

/// What a `#` in `word` stands in, before `behind`.
fn part(word: &[u8], behind: &[u8]) -> Part {
    if ends_line(word) {
        Part::Nothing
    } else if behind.starts_with(VERSION) {
        Part::Target
    } else if VERSION.starts_with(behind) {
        Part::Unfinished
    } else {
        Part::Nothing
    }
}

fn ends_line(bytes: &[u8]) -> bool {
    memchr::memchr2(b'\r', b'\n', bytes).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A body that ends in no newline stands right before a request line.
    const STREAM: &str = "POST /a?x HTTP/1.1\r\nHost: k\r\nX-Note: #1 GET /x# HTTP\r\n\r\n\
        {\"a\":\"# GET /z# HTTP/1.1 \"}DELETE /api/v1/namespaces/a#b#c/pods/x HTTP/1.1\r\n\
        Host: k\r\n\r\nGET /q?y#z HTTP/1.1\n\nGET http://k/w#v HTTP/1.1\r\n\r\n";

    #[test]
    fn a_target_with_a_fragment_is_found_however_the_bytes_come() {
        for size in 1..=STREAM.len() {
            let mut lines = Lines::default();
            STREAM.as_bytes().chunks(size).for_each(|chunk| lines.look(chunk));
            let found = lines.found();
            assert!(!found.cut("/a?x", false), "{size}");
            assert!(found.cut("/api/v1/namespaces/a", false), "{size}");
            assert!(!found.cut("/api/v1/namespaces/a", false), "{size}");
            assert!(found.cut("/q?y", false), "{size}");
            assert!(found.cut("/w", false), "{size}");
            assert!(lines.held.is_empty() && !found.any.load(Ordering::Relaxed), "{size}");
        }
    }

    #[test]
    fn what_comes_after_an_answer_is_the_beginning_of_another_request() {
        let mut lines = Lines::default();
        let found = lines.found();
        assert!(!found.is_amid());
        lines.look(b"GET /a HTTP/1.1\r\nHost: k\r\n\r\n");
        found.settle(true);
        assert!(!found.is_amid());
        lines.look(b"G");
        assert!(found.is_amid());
    }

    #[test]
    fn what_is_held_is_bounded() {
        let mut lines = Lines::default();
        for _ in 0..100 {
            lines.look(&[b'/'; 4096]);
            assert!(lines.held.len() <= MAX_TARGET_BYTES);
        }
        for _ in 0..MAX_FOUND {
            assert!(!lines.found.is_lost());
            lines.look(b"GET /x# HTTP/1.1\r\n");
        }
        assert!(!lines.found.cut("/other", false));
        for _ in 0..2 {
            lines.look(b"GET /y# HTTP/1.1\r\n");
        }
        assert!(lines.found.targets().cut.len() == MAX_FOUND && lines.found.is_lost());
        // What is later may be anything, and what is first is known.
        assert!(lines.found.cut("/other", false) && !lines.found.cut("/other", true));
        assert!(lines.found.cut("/x", true));
    }

    #[test]
    fn what_is_remembered_is_bounded_in_bytes_too() {
        let mut lines = Lines::default();
        let line = format!("GET /{}# HTTP/1.1\r\n", "x".repeat(MAX_TARGET_BYTES / 2));
        for _ in 0..100 {
            lines.look(line.as_bytes());
        }
        let found = lines.found();
        assert!(found.is_lost() && found.targets().bytes <= MAX_FOUND_BYTES);
        let target = format!("/{}", "x".repeat(MAX_TARGET_BYTES / 2));
        while !found.targets().cut.is_empty() {
            assert!(found.cut(&target, false));
        }
        assert_eq!(found.targets().bytes, 0);
    }
}

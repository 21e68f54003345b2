//! How much of bodies may be held at once?
//!
//! What is held whole is bounded for a connection, for its pod and for the thread: who does not finish what it sends takes
//! the room of nobody else.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use crate::net::accept::PodSlot;

/// How much is held for a client connection, in bytes: two of the longest bodies, and small ones beside them.
const MAX_CONNECTION_BYTES: usize = 8 << 20;

/// How much is held for a pod on a thread, in bytes, where a process serves many.
const MAX_POD_BYTES: usize = 16 << 20;

/// How much a thread holds, in bytes.
const MAX_THREAD_BYTES: usize = 64 << 20;

thread_local! {
    static THREAD: RefCell<Thread> = RefCell::default();
}

/// What a thread holds now, and for whom.
#[derive(Default)]
struct Thread {
    bytes: usize,
    pods: HashMap<PodSlot, usize>,
}

/// What is held for a client connection now.
#[derive(Debug)]
pub(crate) struct Room {
    pod: Option<PodSlot>,
    bytes: Cell<usize>,
}

/// A share of what is held, given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Held<'r> {
    room: &'r Room,
    bytes: usize,
}

// === impl Room ===

impl Room {
    /// For a connection of `pod`, where the process serves many.
    pub(crate) fn of(pod: Option<PodSlot>) -> Self {
        Self { pod, bytes: Cell::default() }
    }

    /// Nothing yet.
    pub(crate) fn begin(&self) -> Held<'_> {
        Held { room: self, bytes: 0 }
    }

    /// Takes room; whether there was so much.
    fn take(&self, bytes: usize) -> bool {
        THREAD.with_borrow_mut(|thread| {
            let connection = self.bytes.get() + bytes;
            let pod =
                self.pod.map(|pod| thread.pods.get(&pod).copied().unwrap_or_default() + bytes);
            let all = thread.bytes + bytes;
            let fits = connection <= MAX_CONNECTION_BYTES
                && pod.is_none_or(|pod| pod <= MAX_POD_BYTES)
                && all <= MAX_THREAD_BYTES;
            if fits {
                self.bytes.set(connection);
                thread.bytes = all;
                if let Some((slot, bytes)) = self.pod.zip(pod) {
                    thread.pods.insert(slot, bytes);
                }
            }
            fits
        })
    }

    fn give_back(&self, bytes: usize) {
        self.bytes.set(self.bytes.get() - bytes);
        THREAD.with_borrow_mut(|thread| {
            thread.bytes -= bytes;
            if let Some(slot) = self.pod
                && let Some(pod) = thread.pods.get_mut(&slot)
            {
                *pod -= bytes;
                if *pod == 0 {
                    thread.pods.remove(&slot);
                }
            }
        });
    }
}

// === impl Held ===

impl Held<'_> {
    /// Holds so much more, if there is room.
    #[must_use]
    pub(crate) fn more(&mut self, bytes: usize) -> bool {
        let fits = self.room.take(bytes);
        self.bytes += if fits { bytes } else { 0 };
        fits
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.room.give_back(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn a_connection_that_holds_too_much_leaves_room_to_the_others_of_its_pod() {
        let (one, other) = (Room::of(None), Room::of(None));
        let mut held = one.begin();
        assert!(held.more(MAX_CONNECTION_BYTES) && !held.more(1));
        assert!(!one.begin().more(1));
        assert!(other.begin().more(3 * MIB));
        drop(held);
        assert!(one.begin().more(3 * MIB));
    }

    #[test]
    fn a_pod_that_holds_too_much_leaves_room_to_the_others() {
        let rooms: Vec<Room> = (0..8).map(|_| Room::of(Some(PodSlot(1)))).collect();
        let mut held: Vec<_> = rooms.iter().map(Room::begin).collect();
        let taken = held.iter_mut().filter_map(|held| held.more(4 * MIB).then_some(())).count();
        assert_eq!(taken, MAX_POD_BYTES / (4 * MIB));
        let other = Room::of(Some(PodSlot(2)));
        assert!(other.begin().more(3 * MIB));
        drop(held);
        assert!(rooms[7].begin().more(3 * MIB));
        THREAD.with_borrow(|thread| assert!(thread.bytes == 0 && thread.pods.is_empty()));
    }

    #[test]
    fn what_a_thread_holds_is_bounded_whoever_asks() {
        let rooms: Vec<Room> = (0..20).map(|slot| Room::of(Some(PodSlot(slot)))).collect();
        let mut held: Vec<_> = rooms.iter().map(Room::begin).collect();
        let taken = held.iter_mut().filter_map(|held| held.more(8 * MIB).then_some(())).count();
        assert_eq!(taken, MAX_THREAD_BYTES / (8 * MIB));
    }
}

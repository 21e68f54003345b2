//! Counts requests by the namespace of their objects, with a bounded number of counts.
//!
//! Only busy namespaces have a count of their own: those that had a twentieth of a minute's requests. All others share
//! one. What came before a namespace was busy stays in the shared count, so no count falls. A namespace that makes room
//! for another one loses its count.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

/// A namespace is busy that has had one of so many parts of a window's requests, so no more are busy in one window.
const PARTS: u64 = 20;

/// Namespaces with a count of their own: those of this window, and as many from before.
const MAX_SHOWN: usize = 40;

/// No namespace is busy that has had fewer requests in a window.
const MIN_REQUESTS: u64 = 60;

const WINDOW: Duration = Duration::from_mins(1);

/// Namespaces of which a window knows the count. Further ones are not busy in it.
const MAX_IN_WINDOW: usize = 4_096;

/// A namespace that was not busy for so many windows gives its count up where another one needs room.
const IDLE_WINDOWS: u32 = 10;

/// What all other namespaces are called. No namespace has such a name.
pub(super) const OTHERS: &str = "_other";

/// Longer names are no names of namespaces (RFC 1123 labels).
const MAX_NAME_BYTES: usize = 63;

#[derive(Debug)]
pub(super) struct BusyNamespaces {
    shown: HashMap<String, ShownCount>,
    /// Of all other namespaces.
    others: u64,
    window: HashMap<String, u64>,
    window_total: u64,
    window_ends: Instant,
}

#[derive(Debug, Default)]
struct ShownCount {
    requests: u64,
    /// Windows that have ended since it was busy.
    idle: u32,
}

impl BusyNamespaces {
    pub(super) fn new(now: Instant) -> Self {
        let (shown, window) = (HashMap::new(), HashMap::new());
        Self { shown, others: 0, window, window_total: 0, window_ends: now + WINDOW }
    }

    pub(super) fn count(&mut self, namespace: &str, now: Instant) {
        if now >= self.window_ends {
            self.end_window(now);
        }
        self.window_total += 1;
        if self.is_busy_now(namespace) {
            self.show(namespace);
        }
        match self.shown.get_mut(namespace) {
            Some(shown) => shown.requests += 1,
            None => self.others += 1,
        }
    }

    /// The requests of each namespace with a count of its own, by name, and those of all [`OTHERS`].
    pub(super) fn counts(&self) -> Vec<(String, u64)> {
        let shown = self.shown.iter().map(|(name, shown)| (name.clone(), shown.requests));
        shown.chain([(OTHERS.to_owned(), self.others)]).collect()
    }

    /// Counts a request of this window, and tells whether the namespace has its share of them.
    fn is_busy_now(&mut self, namespace: &str) -> bool {
        if !self.window.contains_key(namespace) {
            if self.window.len() == MAX_IN_WINDOW || namespace.len() > MAX_NAME_BYTES {
                return false;
            }
            self.window.insert(namespace.to_owned(), 0);
        }
        let Some(count) = self.window.get_mut(namespace) else { return false };
        *count += 1;
        *count >= MIN_REQUESTS && *count * PARTS >= self.window_total
    }

    fn show(&mut self, namespace: &str) {
        if let Some(shown) = self.shown.get_mut(namespace) {
            shown.idle = 0;
            return;
        }
        if self.shown.len() == MAX_SHOWN {
            let idle = self.shown.iter().filter(|(_, shown)| shown.idle >= IDLE_WINDOWS);
            let longest = idle.max_by_key(|(_, shown)| shown.idle).map(|(name, _)| name.clone());
            let Some(longest) = longest else { return };
            self.shown.remove(&longest);
        }
        self.shown.insert(namespace.to_owned(), ShownCount::default());
    }

    fn end_window(&mut self, now: Instant) {
        let missed = now.duration_since(self.window_ends).as_secs() / WINDOW.as_secs();
        let ended = u32::try_from(missed).unwrap_or(u32::MAX).saturating_add(1);
        for shown in self.shown.values_mut() {
            shown.idle = shown.idle.saturating_add(ended);
        }
        self.window.clear();
        self.window_total = 0;
        self.window_ends = now + WINDOW;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(namespaces: &mut BusyNamespaces, name: &str, requests: u64, now: Instant) {
        (0..requests).for_each(|_| namespaces.count(name, now));
    }

    fn shown(namespaces: &BusyNamespaces) -> Vec<&str> {
        namespaces.shown.keys().map(String::as_str).collect()
    }

    #[test]
    fn a_busy_namespace_has_a_count_of_its_own() {
        let now = Instant::now();
        let mut namespaces = BusyNamespaces::new(now);
        for at in 0..1_000 {
            namespaces.count(&format!("quiet-{at}"), now);
        }
        count(&mut namespaces, "busy", 200, now);
        assert_eq!(shown(&namespaces), ["busy"]);
        assert_eq!(namespaces.shown["busy"].requests, 200 - MIN_REQUESTS + 1);
        assert_eq!(namespaces.others, 1_000 + MIN_REQUESTS - 1);
    }

    #[test]
    fn counts_never_fall_and_lose_no_request() {
        let (mut now, mut total) = (Instant::now(), 0);
        let mut namespaces = BusyNamespaces::new(now);
        let mut before: HashMap<String, u64> = HashMap::new();
        for step in 0_u64..2_000 {
            now += Duration::from_millis(step % 300);
            let requests = step % 7 * 30;
            count(&mut namespaces, &format!("n{}", step * step % 37), requests, now);
            total += requests;
            let after: HashMap<String, u64> = namespaces.counts().into_iter().collect();
            assert!(before.iter().all(|(name, count)| after[name] >= *count));
            assert_eq!(after.values().sum::<u64>(), total);
            before = after;
        }
        assert!(before.len() > 2, "{before:?}");
    }

    #[test]
    fn only_one_that_was_idle_for_long_makes_room() {
        let mut now = Instant::now();
        let mut namespaces = BusyNamespaces::new(now);
        for at in 0..MAX_SHOWN {
            now += WINDOW;
            count(&mut namespaces, &format!("n{at:02}"), MIN_REQUESTS, now);
        }
        assert_eq!(namespaces.shown.len(), MAX_SHOWN);
        now += WINDOW;
        count(&mut namespaces, "next", MIN_REQUESTS, now);
        let shown = shown(&namespaces);
        assert!(shown.len() == MAX_SHOWN && shown.contains(&"next") && !shown.contains(&"n00"), "{shown:?}");
        let mut all_busy = BusyNamespaces::new(now);
        for at in 0..MAX_SHOWN + 5 {
            now += WINDOW / 5;
            count(&mut all_busy, &format!("n{at:02}"), MIN_REQUESTS, now);
        }
        assert!(!all_busy.shown.contains_key("n44"), "nobody was idle for long");
    }

    #[test]
    fn memory_is_bounded() {
        let now = Instant::now();
        let mut namespaces = BusyNamespaces::new(now);
        for at in 0..3 * MAX_IN_WINDOW {
            namespaces.count(&format!("n{at}"), now);
        }
        assert_eq!((namespaces.window.len(), namespaces.shown.len()), (MAX_IN_WINDOW, 0));
        count(&mut namespaces, &"x".repeat(64), 3 * MIN_REQUESTS, now + WINDOW);
        assert!(namespaces.shown.is_empty() && namespaces.window.is_empty(), "no namespace is called so");
    }
}

//! Turns what a watch reports into batches of events, and says which of them were not printed yet.
//!
//! Pure. After a version that expired, the watch lists everything anew.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::events::v1::Event;
use kube::ResourceExt as _;
use kube::runtime::watcher;

use super::entry::Entry;

/// Namespace and name of an event.
type Key = (String, String);

/// Where a watch stands.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// What a list under way has so far.
    listing: Vec<Event>,
    /// How often each event had come when it was printed.
    printed: BTreeMap<Key, i32>,
}

/// Events that came together.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) events: Vec<Event>,
    /// Whether these are all events that there are.
    pub(super) is_listing: bool,
}

impl Changes {
    /// `None`: nothing came, or not all of a list yet.
    pub(super) fn take(&mut self, change: watcher::Event<Event>) -> Option<Batch> {
        match change {
            watcher::Event::Init => self.listing.clear(),
            watcher::Event::InitApply(event) => self.listing.push(event),
            watcher::Event::InitDone => {
                let events = std::mem::take(&mut self.listing);
                let there: BTreeSet<Key> = events.iter().map(key).collect();
                self.printed.retain(|key, _| there.contains(key));
                return Some(Batch { events, is_listing: true });
            }
            watcher::Event::Apply(event) => return Some(Batch { events: vec![event], is_listing: false }),
            watcher::Event::Delete(event) => drop(self.printed.remove(&key(&event))),
        }
        None
    }

    /// Those that were not printed, or have come again since. They count as printed from now on.
    pub(super) fn unprinted(&mut self, entries: Vec<Entry>) -> Vec<Entry> {
        let mut is_new = |entry: &Entry| {
            let before = self.printed.insert((entry.namespace.clone(), entry.name.clone()), entry.count);
            before.is_none_or(|before| before < entry.count)
        };
        entries.into_iter().filter(|entry| is_new(entry)).collect()
    }
}

fn key(event: &Event) -> Key {
    (event.namespace().unwrap_or_default(), event.name_any())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::entry::entries;
    use super::*;

    fn event(name: &str, count: i32) -> Event {
        serde_json::from_value(json!({"metadata": {"namespace": "ops", "name": name}, "deprecatedCount": count,
            "reportingController": "ctrlmesh-manager"}))
        .unwrap()
    }

    /// The names of what would be printed.
    fn printed(changes: &mut Changes, change: watcher::Event<Event>) -> Vec<String> {
        let events = changes.take(change).map(|batch| batch.events).unwrap_or_default();
        changes.unprinted(entries(&events, None)).into_iter().map(|entry| entry.name).collect()
    }

    #[test]
    fn a_list_is_one_batch() {
        let mut changes = Changes::default();
        assert_eq!(printed(&mut changes, watcher::Event::Init), [""; 0]);
        assert_eq!(printed(&mut changes, watcher::Event::InitApply(event("a", 1))), [""; 0]);
        assert_eq!(printed(&mut changes, watcher::Event::InitApply(event("b", 1))), [""; 0]);
        assert_eq!(printed(&mut changes, watcher::Event::InitDone), ["a", "b"]);
    }

    #[test]
    fn an_event_is_printed_again_when_it_comes_again() {
        let mut changes = Changes::default();
        for (count, expected) in [(1, 1), (1, 0), (2, 1), (2, 0)] {
            assert_eq!(printed(&mut changes, watcher::Event::Apply(event("a", count))).len(), expected, "{count}");
        }
        assert_eq!(printed(&mut changes, watcher::Event::Delete(event("a", 2))), [""; 0]);
        assert_eq!(printed(&mut changes, watcher::Event::Apply(event("a", 1))), ["a"], "another of the same name");
    }

    #[test]
    fn a_list_anew_repeats_nothing_and_forgets_what_is_gone() {
        let mut changes = Changes::default();
        printed(&mut changes, watcher::Event::Apply(event("a", 1)));
        printed(&mut changes, watcher::Event::Apply(event("gone", 1)));
        printed(&mut changes, watcher::Event::Init);
        printed(&mut changes, watcher::Event::InitApply(event("a", 1)));
        printed(&mut changes, watcher::Event::InitApply(event("b", 1)));
        assert_eq!(printed(&mut changes, watcher::Event::InitDone), ["b"]);
        assert_eq!(printed(&mut changes, watcher::Event::Apply(event("gone", 1))), ["gone"]);
    }
}

//! Who has how many connections?
//!
//! Who has most is known without looking at everybody: ten thousand proxies come back together, each from an address of its
//! own.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use tokio_util::sync::CancellationToken;

/// How many connections one pod may have: one, while it comes back another one, and some that have not been found dead.
pub(super) const MOST_OF_ONE: usize = 8;

/// The connections that there are.
#[derive(Debug, Default)]
pub(super) struct Places {
    last: u64,
    by_address: HashMap<IpAddr, OfOne>,
    by_pod: HashMap<String, usize>,
    /// All connections, and those that are not proven.
    all: Ranks,
    unproven: Ranks,
}

/// Connections by address: how many there are, and who has most.
#[derive(Debug, Default)]
struct Ranks {
    total: usize,
    counts: BTreeSet<(usize, IpAddr)>,
}

/// The connections from one address, in the order in which they came.
#[derive(Debug, Default)]
struct OfOne {
    places: BTreeMap<u64, Place>,
    unproven: usize,
}

/// One connection.
#[derive(Debug)]
pub(super) struct Place {
    proven: bool,
    leave: CancellationToken,
}

// === impl Places ===

impl Places {
    /// How many there are; of those that are not proven only, if so asked.
    pub(super) fn total(&self, unproven: bool) -> usize {
        if unproven { self.unproven.total } else { self.all.total }
    }

    /// How many `address` has; of those that are not proven only, if so asked.
    pub(super) fn count(&self, address: IpAddr, unproven: bool) -> usize {
        self.by_address.get(&address).map_or(0, |of_one| of_one.count(unproven))
    }

    /// One more of `address`, that has not proved itself: its number, and what ends when it has to go.
    pub(super) fn take(&mut self, address: IpAddr) -> (u64, CancellationToken) {
        let leave = CancellationToken::new();
        self.last += 1;
        let number = self.last;
        self.change(address, |of_one| {
            of_one.unproven += 1;
            of_one.places.insert(number, Place { proven: false, leave: leave.clone() });
        });
        (number, leave)
    }

    pub(super) fn is_proven(&self, address: IpAddr, number: u64) -> bool {
        let place = self.by_address.get(&address).and_then(|of_one| of_one.places.get(&number));
        place.is_some_and(|place| place.proven)
    }

    /// Marks the place as that of one who has proved himself, if it is still his.
    pub(super) fn prove(&mut self, address: IpAddr, number: u64) {
        self.change(address, |of_one| {
            let place = of_one.places.get_mut(&number).filter(|place| !place.proven);
            if let Some(place) = place {
                place.proven = true;
                of_one.unproven -= 1;
            }
        });
    }

    /// Counts one more connection of the pod, where it may have one.
    pub(super) fn take_one_of(&mut self, pod: &str) -> bool {
        let count = self.by_pod.entry(pod.to_owned()).or_default();
        let room = *count < MOST_OF_ONE;
        *count += usize::from(room);
        room
    }

    /// Counts one less.
    pub(super) fn give_back_one_of(&mut self, pod: &str) {
        let Some(count) = self.by_pod.get_mut(pod) else { return };
        *count -= 1;
        if *count == 0 {
            self.by_pod.remove(pod);
        }
    }

    /// Takes the oldest place of the address that has the most, where that is more than `address` would have with it.
    pub(super) fn give_way(&mut self, address: IpAddr, unproven: bool) -> bool {
        let ranks = if unproven { &self.unproven } else { &self.all };
        let own = self.count(address, unproven);
        let Some((_, greedy)) = ranks.counts.last().copied().filter(|(most, _)| *most > own + 1)
        else {
            return false;
        };
        let mut of_one = self.by_address[&greedy].places.iter();
        let oldest = of_one.find(|(_, place)| !(unproven && place.proven)).map(|(one, _)| *one);
        let place = oldest.and_then(|number| self.remove(greedy, number));
        place.is_some_and(|place| {
            place.leave.cancel();
            true
        })
    }

    pub(super) fn remove(&mut self, address: IpAddr, number: u64) -> Option<Place> {
        self.change(address, |of_one| {
            let place = of_one.places.remove(&number)?;
            of_one.unproven -= usize::from(!place.proven);
            Some(place)
        })
    }

    /// Changes what `address` has, and what is counted of it.
    fn change<T>(&mut self, address: IpAddr, change: impl FnOnce(&mut OfOne) -> T) -> T {
        let of_one = self.by_address.entry(address).or_default();
        let before = (of_one.count(false), of_one.count(true));
        let changed = change(of_one);
        let after = (of_one.count(false), of_one.count(true));
        if after.0 == 0 {
            self.by_address.remove(&address);
        }
        self.all.change(address, before.0, after.0);
        self.unproven.change(address, before.1, after.1);
        changed
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        let ranks = [&self.all, &self.unproven];
        self.by_address.is_empty()
            && self.by_pod.is_empty()
            && ranks.iter().all(|ranks| ranks.total == 0 && ranks.counts.is_empty())
    }
}

// === impl Ranks ===

impl Ranks {
    fn change(&mut self, address: IpAddr, before: usize, after: usize) {
        if before == after {
            return;
        }
        self.total = self.total - before + after;
        self.counts.remove(&(before, address));
        if after > 0 {
            self.counts.insert((after, address));
        }
    }
}

// === impl OfOne ===

impl OfOne {
    /// How many there are; of those that are not proven only, if so asked.
    fn count(&self, unproven: bool) -> usize {
        if unproven { self.unproven } else { self.places.len() }
    }
}

//! Counts connections by address and by pod.
//!
//! The address with the most is found without a scan: ten thousand proxies reconnect together, each from its own
//! address.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use tokio_util::sync::CancellationToken;

/// One, another one while it reconnects, and some whose end is not noticed yet.
pub(super) const MOST_OF_ONE: usize = 8;

#[derive(Debug, Default)]
pub(super) struct ConnectionTable {
    last: u64,
    by_address: HashMap<IpAddr, AddressConnections>,
    by_pod: HashMap<String, usize>,
    all: Ranks,
    unproven: Ranks,
}

/// Addresses ordered by their number of connections.
#[derive(Debug, Default)]
struct Ranks {
    total: usize,
    counts: BTreeSet<(usize, IpAddr)>,
}

/// The connections of one address, oldest first.
#[derive(Debug, Default)]
struct AddressConnections {
    connections: BTreeMap<u64, Connection>,
    unproven: usize,
}

#[derive(Debug)]
pub(super) struct Connection {
    proven: bool,
    leave: CancellationToken,
}

impl ConnectionTable {
    pub(super) fn total(&self, unproven: bool) -> usize {
        if unproven { self.unproven.total } else { self.all.total }
    }

    pub(super) fn count(&self, address: IpAddr, unproven: bool) -> usize {
        self.by_address.get(&address).map_or(0, |of_one| of_one.count(unproven))
    }

    /// Adds an unproven connection. Returns its number, and a token that is cancelled when it must end.
    pub(super) fn take(&mut self, address: IpAddr) -> (u64, CancellationToken) {
        let leave = CancellationToken::new();
        self.last += 1;
        let number = self.last;
        self.change(address, |of_one| {
            of_one.unproven += 1;
            of_one.connections.insert(number, Connection { proven: false, leave: leave.clone() });
        });
        (number, leave)
    }

    pub(super) fn is_proven(&self, address: IpAddr, number: u64) -> bool {
        let connection = self.by_address.get(&address).and_then(|of_one| of_one.connections.get(&number));
        connection.is_some_and(|connection| connection.proven)
    }

    /// Does nothing if the connection was removed meanwhile.
    pub(super) fn prove(&mut self, address: IpAddr, number: u64) {
        self.change(address, |of_one| {
            let connection = of_one.connections.get_mut(&number).filter(|connection| !connection.proven);
            if let Some(connection) = connection {
                connection.proven = true;
                of_one.unproven -= 1;
            }
        });
    }

    /// Counts a connection of the pod. False where it has too many.
    pub(super) fn take_one_of(&mut self, pod: &str) -> bool {
        let count = self.by_pod.entry(pod.to_owned()).or_default();
        let room = *count < MOST_OF_ONE;
        *count += usize::from(room);
        room
    }

    pub(super) fn give_back_one_of(&mut self, pod: &str) {
        let Some(count) = self.by_pod.get_mut(pod) else { return };
        *count -= 1;
        if *count == 0 {
            self.by_pod.remove(pod);
        }
    }

    /// Ends the oldest connection of the address with the most, if that address has more than `address` would have.
    pub(super) fn give_way(&mut self, address: IpAddr, unproven: bool) -> bool {
        let ranks = if unproven { &self.unproven } else { &self.all };
        let own = self.count(address, unproven);
        let Some((_, greedy)) = ranks.counts.last().copied().filter(|(most, _)| *most > own + 1) else {
            return false;
        };
        let mut of_one = self.by_address[&greedy].connections.iter();
        let oldest = of_one.find(|(_, connection)| !(unproven && connection.proven)).map(|(one, _)| *one);
        let connection = oldest.and_then(|number| self.remove(greedy, number));
        connection.is_some_and(|connection| {
            connection.leave.cancel();
            true
        })
    }

    pub(super) fn remove(&mut self, address: IpAddr, number: u64) -> Option<Connection> {
        self.change(address, |of_one| {
            let connection = of_one.connections.remove(&number)?;
            of_one.unproven -= usize::from(!connection.proven);
            Some(connection)
        })
    }

    /// Changes the connections of `address`, and updates the ranks.
    fn change<T>(&mut self, address: IpAddr, change: impl FnOnce(&mut AddressConnections) -> T) -> T {
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

impl AddressConnections {
    fn count(&self, unproven: bool) -> usize {
        if unproven { self.unproven } else { self.connections.len() }
    }
}

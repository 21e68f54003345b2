//! How does a relay say that it lives, and for whom?
//!
//! It beats for the pods that lead to it, says of each whether native IPv6 does, and takes that back when it ends. What
//! goes wrong with that is said once, until it is something else.

use std::collections::BTreeSet;
use std::path::Path;

use ctrlmesh_common::kernel::{NATIVE_IPV6, Pod};

use super::cgroup::{Found, Hierarchy};
use super::pin::{Pins, Slot};
use super::record::{Record, State};
use super::{Error, cgroup, map, status};

/// Where a relay takes connections.
pub(super) struct Place {
    pub(super) port: u16,
    /// Inode of the network namespace.
    pub(super) namespace: u64,
    /// Whether our prefix is local.
    pub(super) ipv6: bool,
}

/// What a relay has said so far.
pub(super) struct Beats {
    place: Place,
    /// Whose pods these are.
    owner: String,
    /// Where pods are that others see elsewhere.
    found: Found,
    /// Pods of which it was said that nothing can be known.
    unseen: BTreeSet<Slot>,
    /// Pods whose native IPv6 connections lead here.
    native: BTreeSet<Slot>,
}

/// What went wrong at last.
#[derive(Default)]
pub(super) struct Complaint(Option<String>);

// === impl Complaint ===

impl Complaint {
    /// What went wrong, if that is news.
    pub(super) fn news<T>(&mut self, result: Result<T, Error>) -> Option<String> {
        let now = result.err().map(|error| format!("{:#}", anyhow::Error::from(error)));
        let news = now.clone().filter(|now| self.0.as_ref() != Some(now));
        self.0 = now;
        news
    }
}

// === impl Beats ===

impl Beats {
    pub(super) fn at(place: Place, owner: &str) -> Self {
        let (owner, found) = (owner.to_owned(), Found::default());
        Self { place, owner, found, unseen: BTreeSet::new(), native: BTreeSet::new() }
    }

    /// Beats for the pods of its owner's that lead here. One whose processes are all in other network namespaces has another proxy at the
    /// same port; one without processes may get some that are here. Where processes cannot be looked at we do not know,
    /// and do not say that we live: that is said once of each pod.
    pub(super) fn beat(&mut self, root: &Path) -> Result<(), Error> {
        let pins = Pins::at(root);
        if !pins.exist()? {
            return Ok(());
        }
        let mut maps = map::Maps::open(&pins)?;
        let hierarchy = Hierarchy::find()?;
        let census = hierarchy.census();
        let records = self.attached(&pins)?;
        self.found.keep(&records.iter().map(|record| record.cgroup.id).collect());
        for Record { slot, cgroup, .. } in records {
            let pod = maps.pods.get(&slot.index(), 0).map_err(Error::map("PODS"))?;
            if pod.port != self.place.port.to_be() {
                continue;
            }
            let Some(path) = self.found.find(&census, &cgroup) else { continue };
            let namespaces = cgroup::namespaces(&path);
            let here = namespaces.has(self.place.namespace);
            let only = here && namespaces.found.len() == 1 && namespaces.unseen.is_none();
            if let Some(error) = namespaces.unseen.filter(|_| !here) {
                if self.unseen.insert(slot) {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(%slot, error, "no beat for a pod whose network namespace is unknown");
                }
                continue;
            }
            self.unseen.remove(&slot);
            if !here && !namespaces.found.is_empty() {
                continue;
            }
            let now = status::now();
            maps.heartbeats.set(pod.heartbeat, now, 0).map_err(Error::map("HEARTBEATS"))?;
            if only {
                self.lead(&pins, &mut maps, slot, &pod)?;
            }
        }
        Ok(())
    }

    /// Says that native IPv6 does not lead here any more: whoever listens at the port next may not take it.
    pub(super) fn end(&mut self, root: &Path) -> Result<(), Error> {
        let pins = Pins::at(root);
        if self.native.is_empty() || !pins.exist()? {
            return Ok(());
        }
        let mut maps = map::Maps::open(&pins)?;
        for Record { slot, .. } in self.attached(&pins)? {
            let pod = maps.pods.get(&slot.index(), 0).map_err(Error::map("PODS"))?;
            if self.native.contains(&slot) && pod.port == self.place.port.to_be() {
                say_native(&pins, &mut maps, slot, false)?;
            }
        }
        Ok(())
    }

    fn attached(&self, pins: &Pins) -> Result<Vec<Record>, Error> {
        let own = |record: &Record| record.owner == self.owner && record.state == State::Attached;
        Ok(pins.records()?.into_iter().filter(own).collect())
    }

    /// A pod that leads here alone does so with its native IPv6 connections, too, if they can.
    fn lead(
        &mut self,
        pins: &Pins,
        maps: &mut map::Maps,
        slot: Slot,
        pod: &Pod,
    ) -> Result<(), Error> {
        if (pod.flags & NATIVE_IPV6 != 0) != self.place.ipv6 {
            say_native(pins, maps, slot, self.place.ipv6)?;
        }
        if self.place.ipv6 {
            self.native.insert(slot);
        }
        Ok(())
    }
}

/// Says whether native IPv6 reaches us. With the lock, because loaders write the same entry.
fn say_native(pins: &Pins, maps: &mut map::Maps, slot: Slot, native: bool) -> Result<(), Error> {
    let _lock = pins.lock()?;
    let pod = maps.pods.get(&slot.index(), 0).map_err(Error::map("PODS"))?;
    let flag = if native { NATIVE_IPV6 } else { 0 };
    let pod = Pod { flags: pod.flags & !NATIVE_IPV6 | flag, ..pod };
    maps.pods.set(slot.index(), pod, 0).map_err(Error::map("PODS"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_wrong_is_said_once_until_it_is_something_else() {
        let mut complaint = Complaint::default();
        let mut said = |result| complaint.news::<()>(result).is_some();
        assert!(!said(Ok(())));
        assert!(said(Err(Error::NoCgroup2)));
        assert!(!said(Err(Error::NoCgroup2)) && !said(Err(Error::NoCgroup2)));
        assert!(said(Err(Error::NoObject)));
        assert!(!said(Ok(())));
        assert!(said(Err(Error::NoObject)));
    }
}

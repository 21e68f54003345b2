//! Sends the heartbeats of a relay, for the pods whose connections lead to it.
//!
//! It also sets for each pod whether native IPv6 leads to the relay, and clears that when the relay ends. An error is
//! logged once until it changes.

use std::collections::BTreeSet;
use std::path::Path;

use ctrlmesh_common::kernel::{NATIVE_IPV6, Pod};
use ctrlmesh_runtime::telemetry;

use crate::Error;
use crate::host::cgroup::{CgroupPaths, Hierarchy};
use crate::host::namespaces;
use crate::interceptor::status;
use crate::pins::record::{Record, State};
use crate::pins::{Pins, Slot};
use crate::programs::map;

/// Where a relay takes connections.
pub(crate) struct RelayAddress {
    pub(crate) port: u16,
    /// Inode of the network namespace.
    pub(crate) namespace: u64,
    /// Whether our prefix is local.
    pub(crate) ipv6: bool,
}

/// What a relay has said so far.
pub(crate) struct RelayHeartbeat {
    address: RelayAddress,
    /// Whose pods these are.
    owner: String,
    /// Where pods are that others see elsewhere.
    found: CgroupPaths,
    /// Pods of which it was said that nothing can be known.
    unseen: BTreeSet<Slot>,
    /// Pods whose native IPv6 connections lead here.
    native: BTreeSet<Slot>,
}

/// What went wrong at last.
#[derive(Default)]
pub(crate) struct LastError(Option<String>);

impl LastError {
    /// What went wrong, if that is news.
    pub(crate) fn if_changed<T>(&mut self, result: Result<T, Error>) -> Option<String> {
        let now = result.err().map(|error| telemetry::chain(&error));
        let changed = now.clone().filter(|now| self.0.as_ref() != Some(now));
        self.0 = now;
        changed
    }
}

impl RelayHeartbeat {
    pub(crate) fn at(address: RelayAddress, owner: &str) -> Self {
        let (owner, found) = (owner.to_owned(), CgroupPaths::default());
        Self { address, owner, found, unseen: BTreeSet::new(), native: BTreeSet::new() }
    }

    /// Sends heartbeats for the pods of its owner's that lead here. One whose processes are all in other network
    /// namespaces has another proxy at the same port; one without processes may get some that are here. Where processes
    /// cannot be looked at we do not know, and do not say that we live: that is said once of each pod.
    pub(crate) fn beat(&mut self, root: &Path) -> Result<(), Error> {
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
            if pod.port != self.address.port.to_be() {
                continue;
            }
            let Some(path) = self.found.find(&census, &cgroup) else { continue };
            let namespaces = namespaces::of(&path);
            let here = namespaces.has(self.address.namespace);
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
    pub(crate) fn end(&mut self, root: &Path) -> Result<(), Error> {
        let pins = Pins::at(root);
        if self.native.is_empty() || !pins.exist()? {
            return Ok(());
        }
        let mut maps = map::Maps::open(&pins)?;
        for Record { slot, .. } in self.attached(&pins)? {
            let pod = maps.pods.get(&slot.index(), 0).map_err(Error::map("PODS"))?;
            if self.native.contains(&slot) && pod.port == self.address.port.to_be() {
                set_native(&pins, &mut maps, slot, false)?;
            }
        }
        Ok(())
    }

    fn attached(&self, pins: &Pins) -> Result<Vec<Record>, Error> {
        let own = |record: &Record| record.owner == self.owner && record.state == State::Attached;
        Ok(pins.records()?.into_iter().filter(own).collect())
    }

    /// A pod that leads here alone does so with its native IPv6 connections, too, if they can.
    fn lead(&mut self, pins: &Pins, maps: &mut map::Maps, slot: Slot, pod: &Pod) -> Result<(), Error> {
        if (pod.flags & NATIVE_IPV6 != 0) != self.address.ipv6 {
            set_native(pins, maps, slot, self.address.ipv6)?;
        }
        if self.address.ipv6 {
            self.native.insert(slot);
        }
        Ok(())
    }
}

/// Says whether native IPv6 reaches us. With the lock, because loaders write the same entry.
fn set_native(pins: &Pins, maps: &mut map::Maps, slot: Slot, native: bool) -> Result<(), Error> {
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
    fn an_error_is_logged_once_until_it_changes() {
        let mut last = LastError::default();
        let mut logged = |result| last.if_changed::<()>(result).is_some();
        assert!(!logged(Ok(())));
        assert!(logged(Err(Error::NoCgroup2)));
        assert!(!logged(Err(Error::NoCgroup2)) && !logged(Err(Error::NoCgroup2)));
        assert!(logged(Err(Error::NoObject)));
        assert!(!logged(Ok(())));
        assert!(logged(Err(Error::NoObject)));
    }
}

//! What the kernel's programs read about a pod: written, changed, and cleared, in an order in which every connection
//! finds either all of the old or all of the new.

use std::collections::BTreeSet;

use aya::maps::MapError;
use ctrlmesh_common::kernel::{
    Inbound, InboundKey, MAX_PODS, Member, NATIVE_IPV6, Pod, ROLE_PASS, ROLE_REDIRECT,
};

use super::attach::{self, Attach};
use super::cgroup::{Cgroup, Hierarchy};
use super::map::{self, Maps};
use super::pin::{Pins, Slot};
use super::record::{Record, State};
use super::{Error, table};

/// The maps and the records of one owner.
pub(super) struct Register {
    pub(super) pins: Pins,
    pub(super) maps: Maps,
    pub(super) owner: String,
    pub(super) hierarchy: Hierarchy,
}

// === impl Register ===

impl Register {
    /// The pod in a slot, if it is attached and this owner's.
    pub(super) fn owned(&self, slot: Slot) -> Result<Record, Error> {
        let record = self.pins.record(slot).filter(|record| {
            record.owner == self.owner && record.state == State::Attached && record.lives()
        });
        record.ok_or_else(|| Error::NotYours { number: slot.index(), owner: self.owner.clone() })
    }

    pub(super) fn pod(&self, slot: Slot) -> Result<Pod, Error> {
        self.maps.pods.get(&slot.index(), 0).map_err(Error::map("PODS"))
    }

    /// Writes everything the programs read about a pod; its own cgroup last. What fails leaves the pod as it was, but for
    /// targets that it shares with others.
    pub(super) fn enrol(
        &mut self,
        slot: Slot,
        cgroup: &Cgroup,
        pod: &Attach,
        known: Option<&Record>,
    ) -> Result<(), Error> {
        let except = self.exceptions(cgroup, pod)?;
        let before = self.pod(slot)?;
        let ensured = table::ensure(&mut self.maps, &self.owner, &pod.targets)?;
        for passing in &except {
            self.pins.note(slot, &format!("pass-{}", passing.id), &passing.path)?;
            self.join(
                passing.id,
                Member { slot: slot.get(), role: ROLE_PASS, ..Member::default() },
            )?;
        }
        let value = pod.entry(slot, &before, ensured.table);
        self.set(slot, value)?;
        if let Err(error) = self.lead(slot, cgroup.id, &value) {
            self.set(slot, before)?;
            return Err(error);
        }
        if let Some(replaced) = ensured.replaced {
            self.follow(replaced, ensured.table)?;
        }
        let gone =
            known.into_iter().flat_map(|record| &record.except).filter(|old| !except.contains(old));
        for old in gone {
            self.expel(old.id, slot)?;
            self.pins.remove(slot, &format!("pass-{}", old.id))?;
        }
        let exchanged = before.table(before.generation).is_some() && value.tables != before.tables;
        if exchanged { self.tidy() } else { Ok(()) }
    }

    /// From now on native IPv6 targets are reached through our prefix.
    pub(super) fn native(&mut self, slot: Slot) -> Result<(), Error> {
        let pod = self.pod(slot)?;
        self.set(slot, Pod { flags: pod.flags | NATIVE_IPV6, ..pod })
    }

    /// Clears everything about a pod whose links are gone.
    pub(super) fn clear(&mut self, slot: Slot) -> Result<(), Error> {
        let record = self.pins.record(slot);
        for cgroup in record.iter().flat_map(|record| record.except.iter().chain([&record.cgroup]))
        {
            self.expel(cgroup.id, slot)?;
        }
        if slot.real() {
            self.vacate(slot)?;
        }
        self.pins.release(slot)?;
        self.tidy()
    }

    /// Removes a cgroup that has this slot.
    pub(super) fn expel(&mut self, cgroup: u64, slot: Slot) -> Result<(), Error> {
        match self.maps.members.get(&cgroup, 0) {
            Ok(member) if member.slot == slot.get() => {}
            Err(error) if !map::absent(&error) => return Err(Error::map("MEMBERS")(error)),
            _ => return Ok(()),
        }
        match self.maps.members.remove(&cgroup) {
            Err(error) if !map::absent(&error) => Err(Error::map("MEMBERS")(error)),
            _ => Ok(()),
        }
    }

    /// Empties the tables that no pod uses or remembers.
    pub(super) fn tidy(&mut self) -> Result<(), Error> {
        let mut used = BTreeSet::new();
        for slot in self.pins.slots()?.into_iter().filter(|slot| slot.real()) {
            used.extend(self.pod(slot)?.tables);
        }
        table::collect(&mut self.maps, &used)
    }

    fn exceptions(&self, cgroup: &Cgroup, pod: &Attach) -> Result<Vec<Cgroup>, Error> {
        let except = pod.except.iter().map(|path| self.hierarchy.cgroup(path));
        let except = except.collect::<Result<Vec<_>, _>>()?;
        let below =
            |passing: &&Cgroup| passing.id != cgroup.id && passing.path.starts_with(&cgroup.path);
        match except.iter().find(|passing| !below(passing)) {
            Some(stranger) => {
                Err(Error::NotBelow { path: stranger.path.clone(), pod: cgroup.path.clone() })
            }
            None => Ok(except),
        }
    }

    /// Brings this owner's other pods from a table that is used up to the one that has its name now.
    fn follow(&mut self, replaced: u16, table: u16) -> Result<(), Error> {
        let records = self.pins.records()?;
        let own = |record: &&Record| record.owner == self.owner && record.slot.real();
        for record in records.iter().filter(own).cloned().collect::<Vec<_>>() {
            let pod = self.pod(record.slot)?;
            if pod.table(pod.generation) == Some(replaced) {
                let pod = attach::with_table(&pod, table);
                self.set(record.slot, pod)?;
                self.lead(record.slot, record.cgroup.id, &pod)?;
            }
        }
        table::close(&mut self.maps, replaced)
    }

    /// Connections of this cgroup are of this pod, and have its newest generation.
    fn lead(&mut self, slot: Slot, cgroup: u64, pod: &Pod) -> Result<(), Error> {
        let generation = pod.generation;
        let table = pod.table(generation).unwrap_or_default();
        self.join(cgroup, Member { slot: slot.get(), role: ROLE_REDIRECT, table, generation })
    }

    fn join(&mut self, cgroup: u64, member: Member) -> Result<(), Error> {
        let inserted = self.maps.members.insert(cgroup, member, 0);
        inserted.map_err(|error| self.maps.refused("MEMBERS", error))
    }

    fn set(&mut self, slot: Slot, pod: Pod) -> Result<(), Error> {
        self.maps.pods.set(slot.index(), pod, 0).map_err(Error::map("PODS"))
    }

    /// Leaves nothing in a slot that the next pod could take for its own.
    fn vacate(&mut self, slot: Slot) -> Result<(), Error> {
        let inbound: Vec<(InboundKey, Inbound)> = self
            .maps
            .inbound
            .iter()
            .collect::<Result<_, MapError>>()
            .map_err(Error::map("INBOUND"))?;
        let own = |inbound: &Inbound| inbound.listener / 2 == slot.index();
        for (key, _) in inbound.iter().filter(|(_, inbound)| own(inbound)) {
            self.maps.inbound.remove(key).map_err(Error::map("INBOUND"))?;
        }
        for listener in [slot.index() * 2, slot.index() * 2 + 1] {
            map::clear(&mut self.maps.inbound_listeners, listener, "INBOUND_LISTENERS")?;
        }
        map::clear(&mut self.maps.listeners, slot.index(), "LISTENERS")?;
        let before = self.pod(slot)?;
        self.set(slot, attach::vacated(&before))?;
        self.silence(slot.index(), slot)?;
        self.silence(before.heartbeat, slot)
    }

    /// Forgets a beat that no other pod is measured by.
    fn silence(&mut self, number: u32, slot: Slot) -> Result<(), Error> {
        if number >= MAX_PODS {
            return Ok(());
        }
        for other in self.pins.slots()?.into_iter().filter(|other| *other != slot && other.real()) {
            let pod = self.pod(other)?;
            if pod.port != 0 && pod.heartbeat == number {
                return Ok(());
            }
        }
        self.maps.heartbeats.set(number, 0, 0).map_err(Error::map("HEARTBEATS"))
    }
}

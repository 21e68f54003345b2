//! Writes, changes and clears the entries that the kernel programs read about a pod.
//!
//! The order is such that every connection finds either all old entries or all new ones.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::kernel::{MAX_PODS, Member, NATIVE_IPV6, Pod};

use crate::Error;
use crate::host::cgroup::{Cgroup, CgroupPaths, Hierarchy};
use crate::interceptor::attach::{self, Attach};
use crate::interceptor::status;
use crate::pins::record::{Record, State};
use crate::pins::{Pins, Slot};
use crate::programs::map::{self, Maps};
use crate::programs::target_table;

/// The maps and the records of one owner.
pub(crate) struct Register {
    pub(crate) pins: Pins,
    pub(crate) maps: Maps,
    pub(crate) owner: String,
    pub(crate) hierarchy: Hierarchy,
    /// Pods that others of this owner's have recorded where they see them.
    found: CgroupPaths,
    /// Pods by the number of their heartbeat, as far as they were looked for.
    beating: BTreeMap<u32, Slot>,
}

impl Register {
    pub(crate) fn new(pins: Pins, maps: Maps, owner: String, hierarchy: Hierarchy) -> Self {
        let (found, beating) = (CgroupPaths::default(), BTreeMap::new());
        Self { pins, maps, owner, hierarchy, found, beating }
    }

    /// The pod in a slot, if it is attached and this owner's.
    pub(crate) fn owned(&mut self, slot: Slot) -> Result<Record, Error> {
        let record = self.pins.record(slot).filter(|record| {
            let own = record.owner == self.owner && record.state == State::Attached;
            own && self.found.find(&self.hierarchy.census(), &record.cgroup).is_some()
        });
        record.ok_or_else(|| Error::NotYours { number: slot.index(), owner: self.owner.clone() })
    }

    /// Says that the proxy with this number lives, if it is that of a pod of this owner's. Takes no lock: who says that
    /// he lives does not wait.
    pub(crate) fn beat(&mut self, number: u32) -> Result<(), Error> {
        let known = self.beating.get(&number).copied();
        if !known.is_some_and(|slot| self.measured(slot, number)) {
            let mut slots = self.pins.slots()?.into_iter().filter(|slot| slot.real());
            let slot = slots.find(|slot| self.measured(*slot, number));
            let stranger = || Error::NotYours { number, owner: self.owner.clone() };
            self.beating.insert(number, slot.ok_or_else(stranger)?);
        }
        let set = self.maps.heartbeats.set(number, status::now(), 0);
        set.map_err(Error::map("HEARTBEATS"))
    }

    /// Whether a slot is an attached pod of this owner's that has this heartbeat.
    fn measured(&mut self, slot: Slot, number: u32) -> bool {
        self.pod(slot).is_ok_and(|pod| pod.heartbeat == number)
            // The first is the quicker one.
            && (self.pins.holds(slot, &self.owner) || self.owned(slot).is_ok())
    }

    /// This owner's pods whose cgroups are not gone. One that is elsewhere than it was recorded, because the file
    /// system is, is recorded there from now on. Where only a part of the cgroups is to be seen, the others are not
    /// gone.
    pub(crate) fn living(&self) -> Result<Vec<Record>, Error> {
        let census = self.hierarchy.census();
        let mut living = Vec::new();
        for mut record in self.pins.records()? {
            if record.owner != self.owner {
                continue;
            }
            match census.find(&record.cgroup) {
                Some(path) if path != record.cgroup.path => {
                    self.pins.note(record.slot, "cgroup", &path)?;
                    record.cgroup.path = path;
                }
                None if self.hierarchy.sees_what(record.view) => continue,
                _ => {}
            }
            living.push(record);
        }
        Ok(living)
    }

    pub(crate) fn pod(&self, slot: Slot) -> Result<Pod, Error> {
        self.maps.pods.get(&slot.index(), 0).map_err(Error::map("PODS"))
    }

    /// Writes everything the programs read about a pod; its own cgroup last. What fails leaves the pod as it was, but
    /// for targets that it shares with others.
    pub(crate) fn enrol(
        &mut self,
        slot: Slot,
        cgroup: &Cgroup,
        pod: &Attach,
        known: Option<&Record>,
    ) -> Result<(), Error> {
        let except = self.exceptions(slot, cgroup, pod)?;
        let before = self.pod(slot)?;
        let ensured = target_table::ensure(&mut self.maps, &self.owner, &pod.targets)?;
        let value = pod.entry(slot, &before, ensured.table);
        let former = known.map_or(&[][..], |record| &record.except);
        let led = self.pass(slot, &except).and_then(|()| {
            self.set(slot, value)?;
            self.lead(slot, cgroup.id, &value).or_else(|error| self.set(slot, before).and(Err(error)))
        });
        if let Err(error) = led {
            self.unpass(slot, except.iter().filter(|passing| !former.contains(passing)))?;
            return Err(error);
        }
        if let Some(replaced) = ensured.replaced {
            self.follow(replaced, ensured.table)?;
        }
        self.unpass(slot, former.iter().filter(|old| !except.contains(old)))?;
        let exchanged = before.table(before.generation).is_some() && value.tables != before.tables;
        if exchanged { self.tidy() } else { Ok(()) }
    }

    /// From now on native IPv6 targets are reached through our prefix, or over IPv4.
    pub(crate) fn native(&mut self, slot: Slot, native: bool) -> Result<(), Error> {
        let pod = self.pod(slot)?;
        let flag = if native { NATIVE_IPV6 } else { 0 };
        self.set(slot, Pod { flags: pod.flags & !NATIVE_IPV6 | flag, ..pod })
    }

    /// Clears everything about a pod whose links are gone.
    pub(crate) fn clear(&mut self, slot: Slot) -> Result<(), Error> {
        let record = self.pins.record(slot);
        for cgroup in record.iter().flat_map(|record| record.except.iter().chain([&record.cgroup])) {
            self.expel(cgroup.id, slot)?;
        }
        if slot.real() {
            self.vacate(slot)?;
        }
        self.pins.release(slot)?;
        self.tidy()
    }

    /// Removes a cgroup that has this slot.
    pub(crate) fn expel(&mut self, cgroup: u64, slot: Slot) -> Result<(), Error> {
        match self.maps.members.get(&cgroup, 0) {
            Ok(member) if member.slot() == slot.get() => {}
            Err(error) if !map::absent(&error) => return Err(Error::map("MEMBERS")(error)),
            _ => return Ok(()),
        }
        match self.maps.members.remove(&cgroup) {
            Err(error) if !map::absent(&error) => Err(Error::map("MEMBERS")(error)),
            _ => Ok(()),
        }
    }

    /// Empties the tables that no pod uses or remembers.
    pub(crate) fn tidy(&mut self) -> Result<(), Error> {
        let mut used = BTreeSet::new();
        for slot in self.pins.slots()?.into_iter().filter(|slot| slot.real()) {
            used.extend(self.pod(slot)?.tables);
        }
        target_table::collect(&mut self.maps, &used)
    }

    /// Lets the connections of these cgroups pass.
    fn pass(&mut self, slot: Slot, except: &[Cgroup]) -> Result<(), Error> {
        for Cgroup { path, id } in except {
            self.pins.note(slot, &format!("pass-{id}"), path)?;
            self.join(*id, Member::passing(*id, slot.get()))?;
        }
        Ok(())
    }

    /// Lets the connections of these cgroups pass no more.
    fn unpass<'a>(&mut self, slot: Slot, cgroups: impl Iterator<Item = &'a Cgroup>) -> Result<(), Error> {
        for Cgroup { id, .. } in cgroups {
            self.expel(*id, slot)?;
            self.pins.remove(slot, &format!("pass-{id}"))?;
        }
        Ok(())
    }

    fn exceptions(&self, slot: Slot, cgroup: &Cgroup, pod: &Attach) -> Result<Vec<Cgroup>, Error> {
        let except = pod.except.iter().map(|path| self.hierarchy.cgroup(path));
        let except = except.collect::<Result<Vec<_>, _>>()?;
        let below = |passing: &&Cgroup| passing.id != cgroup.id && passing.path.starts_with(&cgroup.path);
        match except.iter().find(|passing| !below(passing)) {
            Some(stranger) => Err(Error::NotBelow { path: stranger.path.clone(), pod: cgroup.path.clone() }),
            None => self.unattached(slot, &except).map(|()| except),
        }
    }

    /// A cgroup that is attached by itself, or excepted by another pod, keeps its own entry.
    fn unattached(&self, slot: Slot, except: &[Cgroup]) -> Result<(), Error> {
        for passing in except {
            self.unexcepted(passing, Some(slot))?;
            if let Some(record) = self.pins.find(passing)?
                && record.slot != slot
            {
                return Err(Error::Owned { cgroup: record.cgroup.path, owner: record.owner });
            }
        }
        Ok(())
    }

    /// A cgroup that is excepted by another pod than that of this slot keeps its entry: without it, the proxy there
    /// would be its own client.
    pub(crate) fn unexcepted(&self, cgroup: &Cgroup, slot: Option<Slot>) -> Result<(), Error> {
        let member = match self.maps.members.get(&cgroup.id, 0) {
            Err(error) if map::absent(&error) => return Ok(()),
            member => member.map_err(Error::map("MEMBERS"))?,
        };
        let excepts =
            |record: &Record| Some(record.slot) != slot && record.except.iter().any(|one| one.id == cgroup.id);
        match self.pins.record(Slot::new(member.slot())).filter(excepts) {
            Some(Record { cgroup: Cgroup { path: pod, .. }, owner, .. }) => {
                Err(Error::Excepted { cgroup: cgroup.path.clone(), pod, owner })
            }
            None => Ok(()),
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
        target_table::close(&mut self.maps, replaced)
    }

    /// Connections of this cgroup are of this pod, and have its newest generation.
    fn lead(&mut self, slot: Slot, cgroup: u64, pod: &Pod) -> Result<(), Error> {
        let small = |number: u16| u8::try_from(number).unwrap_or_default();
        let table = small(pod.table(pod.generation).unwrap_or_default());
        self.join(cgroup, Member::redirected(cgroup, slot.get(), table, small(pod.generation)))
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
        for key in self.maps.inbound_of(slot)? {
            self.maps.inbound.remove(&key).map_err(Error::map("INBOUND"))?;
        }
        for listener in [slot.index() * 2, slot.index() * 2 + 1] {
            map::clear(&mut self.maps.inbound_listeners, listener, "INBOUND_LISTENERS")?;
        }
        map::clear(&mut self.maps.listeners, slot.index(), "LISTENERS")?;
        self.maps.forget_connections(|connection| connection.slot == slot.get())?;
        let before = self.pod(slot)?;
        self.set(slot, attach::vacated(&before))?;
        self.silence(slot.index(), slot)?;
        self.silence(before.heartbeat, slot)
    }

    /// Clears a heartbeat, unless another pod has the same number.
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

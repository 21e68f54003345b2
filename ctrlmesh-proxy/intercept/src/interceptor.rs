//! Attaches pods and lets go of them; everything that changes the kernel's state goes through here.

pub(crate) mod attach;
pub(crate) mod status;
pub(crate) mod register;
pub(crate) mod serve;
pub(crate) mod uninstall;

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use ctrlmesh_common::kernel::{MAX_PODS, Member, Outcome};

use crate::Error;
use crate::host::cgroup::{Cgroup, Hierarchy};
use crate::interceptor::attach::{Attach, Options};
use crate::interceptor::register::Register;
use crate::interceptor::status::Status;
use crate::pins::record::{Record, State};
use crate::pins::{Pins, Slot};
use crate::programs::link;
use crate::programs::map::Maps;
use crate::programs::object::{Limits, Object};
use crate::programs::original::Originals;
use crate::programs::target_table;

/// How long a loader that has much to do leaves the lock to others between two pods: who waits for it has to wake up
/// first.
const TURN: Duration = Duration::from_micros(200);

/// The kernel's programs and maps, in the hands of one owner.
pub struct Interceptor {
    pub(crate) register: Register,
    root: PathBuf,
    limits: Limits,
    pub(crate) object: Object,
    /// Cgroups of proxies that ask for `SO_ORIGINAL_DST`.
    pub(crate) answered: Vec<Cgroup>,
}

impl Interceptor {
    /// Makes the maps or adopts those that are pinned, and mends this owner's attachments: programs of another version,
    /// and those that are missing, are replaced. A pod where that fails goes on with what it has, and is warned of.
    ///
    /// # Errors
    /// If there is no cgroup2 or BPF file system, a capability or a kernel feature is missing.
    pub fn open(options: Options) -> Result<Self, Error> {
        let Options { pins: root, owner, limits } = options;
        let hierarchy = Hierarchy::find()?;
        let mut pins = Pins::at(&root);
        let lock = pins.acquire()?;
        let object = Object::load(&pins, limits)?;
        let maps = Maps::open(&pins)?;
        let register = Register::new(pins, maps, owner, hierarchy);
        let mut interceptor = Self { register, root, limits, object, answered: Vec::new() };
        for (slot, error) in interceptor.replace(lock, false)? {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(%slot, error, "programs of a pod not replaced, the former ones go on");
        }
        Ok(interceptor)
    }

    /// Replaces programs of another version, if this owner has any pinned.
    pub(crate) fn adopt(options: &Options) -> Result<(), Error> {
        let pins = Pins::at(&options.pins);
        if !pins.exist()? {
            return Ok(());
        }
        let fingerprint = Object::fingerprint();
        for record in pins.records()? {
            let own = record.owner == options.owner && record.state != State::Claimed;
            if own && !link::whole(&pins, &record, &fingerprint)? {
                return Self::open(options.clone()).map(drop);
            }
        }
        Ok(())
    }

    /// Replaces the programs of every pod of this owner by freshly loaded ones, without a gap.
    ///
    /// # Errors
    /// If one cannot be attached: the former one stays then, and all others are replaced.
    pub fn upgrade(&mut self) -> Result<(), Error> {
        let lock = self.register.pins.lock()?;
        let mut object = Object::load(&self.register.pins, self.limits)?;
        self.answered.retain(Cgroup::is_there);
        for cgroup in &self.answered {
            match link::attach_getsockopt(&mut object, cgroup) {
                // It may have gone since it was looked for.
                Err(error) if cgroup.is_there() => return Err(error),
                _ => {}
            }
        }
        // With the old object its `getsockopt` attachments go; the new ones are there.
        self.object = object;
        let failed = self.replace(lock, true)?.into_iter().next();
        failed.map_or(Ok(()), |(_, error)| Err(error))
    }

    /// Attaches a pod, or changes how it is attached. An attachment outlives this process.
    ///
    /// # Errors
    /// If the cgroup is none, is another owner's or excepted from the one above, or a table is full. A pod that fails
    /// closed is attached all the same when a table is full, with no targets: its connections are refused until it is
    /// attached properly.
    pub fn attach(&mut self, pod: &Attach) -> Result<Slot, Error> {
        let _lock = self.register.pins.lock()?;
        if let Some(reserved) = pod.targets.list.iter().find(|target| target.is_reserved()) {
            return Err(Error::Reserved(*reserved));
        }
        if !target_table::fits(&pod.targets) {
            // It is the caller's mistake, and no reason to close a pod that was not attached.
            return self.full(target_table::full());
        }
        let cgroup = self.register.hierarchy.cgroup(&pod.cgroup)?;
        let known = self.register.pins.find(&cgroup)?.filter(|record| record.slot.real());
        let beyond = self.register.pins.without_slot(&cgroup)?;
        beyond.iter().chain(&known).try_for_each(|record| self.mine(record))?;
        self.register.unexcepted(&cgroup, known.as_ref().map(|record| record.slot))?;
        let slot = match &known {
            Some(record) => record.slot,
            None => match self.claim(&cgroup) {
                Ok(slot) => slot,
                Err(error) if !beyond.is_empty() || pod.fail_open => return Err(error),
                Err(error) => {
                    let slot = self.register.pins.claim_without_slot(&cgroup, &self.register.owner)?;
                    self.close(slot, &cgroup)?;
                    return Err(error);
                }
            },
        };
        if let Some(view) = self.register.hierarchy.view() {
            self.register.pins.note(slot, "view", Path::new(&view.to_string()))?;
        }
        let slot = self.settle(slot, &cgroup, pod, known.as_ref())?;
        for closed in beyond {
            self.forget(closed.slot)?;
        }
        Ok(slot)
    }

    /// Lets go of a pod.
    ///
    /// # Errors
    /// If nothing is attached there, or it is another owner's.
    pub fn detach(&mut self, cgroup: &Path) -> Result<(), Error> {
        let _lock = self.register.pins.lock()?;
        let pins = &self.register.pins;
        let mut records = Vec::new();
        if let Ok(cgroup) = self.register.hierarchy.cgroup(cgroup) {
            records.extend(pins.find(&cgroup)?.filter(|record| record.slot.real()));
            records.extend(pins.without_slot(&cgroup)?);
        }
        if records.is_empty() {
            // Perhaps it is gone, or cannot be seen from here; by its folder, or as it was named when it was there.
            let name = cgroup.strip_prefix("/").unwrap_or(cgroup);
            let below = self.register.hierarchy.mount().join(name);
            let at = |record: &Record| [cgroup, &below].contains(&record.cgroup.path.as_path());
            records.extend(pins.records()?.into_iter().filter(at));
        }
        if records.is_empty() {
            return Err(Error::NotAttached(cgroup.to_owned()));
        }
        records.iter().try_for_each(|record| self.mine(record))?;
        records.into_iter().try_for_each(|record| self.forget(record.slot))
    }

    /// Removes what belongs to this owner's cgroups that are gone, and what a crashed loader left half made.
    ///
    /// # Errors
    /// If a pin or an entry cannot be removed.
    pub fn sweep(&mut self) -> Result<Vec<Slot>, Error> {
        let _lock = self.register.pins.lock()?;
        let owner = &self.register.owner;
        // Another owner may see cgroups by another path: only it can say that one is gone.
        let others = self.register.pins.records()?;
        let others = others.into_iter().filter(|record| record.owner != *owner);
        let own = self.register.living()?;
        let own = own.into_iter().filter(|record| record.state != State::Claimed);
        let live: Vec<Slot> = others.chain(own).map(|record| record.slot).collect();
        let slots = self.register.pins.slots()?;
        let dead: Vec<Slot> = slots.into_iter().filter(|slot| !live.contains(slot)).collect();
        for slot in &dead {
            self.forget(*slot)?;
        }
        let members = self.register.maps.members.iter();
        let members: Vec<(u64, Member)> = members.collect::<Result<_, _>>().map_err(Error::map("MEMBERS"))?;
        for (id, member) in members {
            let slot = Slot::new(member.slot());
            if !live.contains(&slot) {
                self.register.expel(id, slot)?;
            }
        }
        Ok(dead)
    }

    /// Removes what is stored of connections to ports at any address whose clients closed them so long ago. A proxy may
    /// accept a connection that its client has closed, so some seconds are due.
    ///
    /// # Errors
    /// If the table cannot be read or written.
    pub fn forget_connections_closed_for(&mut self, age: Duration) -> Result<(), Error> {
        let age = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
        let before = status::now().saturating_sub(age);
        self.register.maps.forget_connections(|one| one.closed_ns != 0 && one.closed_ns <= before)
    }

    /// How many connections to ports at any address are stored.
    ///
    /// # Errors
    /// If the table cannot be read.
    pub fn stored_connections(&self) -> Result<usize, Error> {
        self.register.maps.stored_connections()
    }

    /// What explains redirected connections.
    ///
    /// # Errors
    /// If the tables cannot be opened.
    pub fn originals(&self) -> Result<Originals, Error> {
        Originals::open(&self.root)
    }

    /// What is attached, and what happened so far.
    ///
    /// # Errors
    /// If the tables cannot be read.
    pub fn status(&self) -> Result<Status, Error> {
        Status::of(&self.register.pins, &self.register.maps)
    }

    /// Cgroups of this owner's pods.
    pub(crate) fn own(&self) -> Result<BTreeSet<PathBuf>, Error> {
        let attachments = self.status()?.attachments.into_iter();
        let own = attachments.filter(|attachment| attachment.owner == self.register.owner);
        Ok(own.map(|attachment| attachment.cgroup).collect())
    }

    /// Cgroups of this owner's pods that have these programs, all of them.
    pub(crate) fn whole(&self) -> Result<BTreeSet<PathBuf>, Error> {
        let _lock = self.register.pins.lock()?;
        let mut whole = BTreeSet::new();
        for record in self.register.living()? {
            let hooked = record.state != State::Claimed && record.cgroup.is_there();
            if hooked && self.has_these(&record)? {
                whole.insert(record.cgroup.path);
            }
        }
        Ok(whole)
    }

    fn mine(&self, record: &Record) -> Result<(), Error> {
        if record.owner == self.register.owner {
            return Ok(());
        }
        let Record { cgroup, owner, .. } = record.clone();
        Err(Error::Owned { cgroup: cgroup.path, owner })
    }

    fn claim(&mut self, cgroup: &Cgroup) -> Result<Slot, Error> {
        let limit = self.limits.pods.unwrap_or(MAX_PODS);
        let claimed = self.register.pins.claim(cgroup, &self.register.owner, limit);
        claimed.or_else(|error| self.full(error))
    }

    /// Enrols and attaches the pod of a slot. What fails leaves an attached pod attached, a closed one closed, and of
    /// another nothing, unless it fails closed and a table is full.
    fn settle(&mut self, slot: Slot, cgroup: &Cgroup, pod: &Attach, known: Option<&Record>) -> Result<Slot, Error> {
        let state = known.map_or(State::Claimed, |record| record.state);
        let by_port = pod.targets.list.iter().any(|target| target.is_any_address());
        if by_port {
            self.register.pins.set_by_port(slot)?;
        }
        let whole = match known {
            Some(record) => self.has_these(&Record { by_port: by_port || record.by_port, ..record.clone() })?,
            None => false,
        };
        if known.is_some_and(|record| record.cgroup.path != cgroup.path) {
            self.register.pins.note(slot, "cgroup", &cgroup.path)?;
        }
        // Mended before anything is changed: a pod that cannot be hooked goes on with what it had.
        if !whole && state != State::Claimed {
            self.hook(slot, cgroup)?;
        }
        if let Err(error) = self.register.enrol(slot, cgroup, pod, known) {
            let closes = matches!(error, Error::Full { .. }) && !pod.fail_open;
            match state {
                State::Claimed if closes => self.close(slot, cgroup)?,
                State::Claimed => self.forget(slot)?,
                State::Closed | State::Attached => self.register.tidy()?,
            }
            return self.full(error);
        }
        if state == State::Claimed
            && let Err(error) = self.hook(slot, cgroup)
        {
            self.forget(slot)?;
            return Err(error);
        }
        self.register.pins.set_state(slot, State::Attached)?;
        Ok(slot)
    }

    /// Attaches a pod that no table knows: the programs refuse what they do not know.
    fn close(&mut self, slot: Slot, cgroup: &Cgroup) -> Result<(), Error> {
        self.hook(slot, cgroup)?;
        self.register.pins.set_state(slot, State::Closed)
    }

    fn hook(&mut self, slot: Slot, cgroup: &Cgroup) -> Result<(), Error> {
        link::attach(&mut self.object, &self.register.pins, slot, cgroup)?;
        self.register.pins.note(slot, "object", Path::new(&Object::fingerprint()))
    }

    /// Replaces the programs of this owner's pods: of all, or of those where one is of another version or missing. Says
    /// of which it could not. The lock is had for one pod at a time: others may have to attach theirs meanwhile.
    fn replace(&mut self, lock: File, all: bool) -> Result<Vec<(Slot, Error)>, Error> {
        let living = self.register.living()?;
        drop(lock);
        let mut failed = Vec::new();
        for record in living {
            if !all && self.has_these(&record).unwrap_or_default() {
                continue;
            }
            let lock = self.register.pins.lock()?;
            // It may have gone since it was looked for.
            if let Err(error) = self.renew(&record, all)
                && record.cgroup.is_there()
            {
                failed.push((record.slot, error));
            }
            drop(lock);
            thread::sleep(TURN);
        }
        Ok(failed)
    }

    /// Replaces the programs of one pod, if its slot is still its.
    fn renew(&mut self, known: &Record, always: bool) -> Result<(), Error> {
        let its = |record: &Record| {
            let own = record.owner == self.register.owner && record.state != State::Claimed;
            own && record.cgroup.id == known.cgroup.id
        };
        let Some(record) = self.register.pins.record(known.slot).filter(its) else {
            return Ok(());
        };
        if !always && self.has_these(&record)? {
            return Ok(());
        }
        self.hook(record.slot, &record.cgroup)?;
        self.replace_inbound(&record)
    }

    /// Whether a pod has these programs, all of them.
    fn has_these(&self, record: &Record) -> Result<bool, Error> {
        link::whole(&self.register.pins, record, &Object::fingerprint())
    }

    /// Removes a pod: its links first, so that no program runs without its tables.
    fn forget(&mut self, slot: Slot) -> Result<(), Error> {
        link::detach(&self.register.pins, slot)?;
        self.register.clear(slot)
    }

    /// Counts a full table, and hands every error on.
    fn full<T>(&mut self, error: Error) -> Result<T, Error> {
        if matches!(error, Error::Full { .. }) {
            self.register.maps.add(Outcome::TableFull)?;
        }
        Err(error)
    }
}

impl std::fmt::Debug for Interceptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Interceptor")
            .field("root", &self.root)
            .field("owner", &self.register.owner)
            .finish_non_exhaustive()
    }
}

//! Attaches pods and lets go of them; everything that changes the kernel's state goes through here.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use ctrlmesh_common::kernel::{
    FAIL_OPEN, Inbound, InboundKey, MAX_CGROUPS, MAX_INBOUND, Member, Outcome, Pod, ROLE_PASS,
    ROLE_REDIRECT,
};

use super::attach::{Attach, Options};
use super::cgroup::{Cgroup, Hierarchy};
use super::listener::Namespace;
use super::map::{self, Maps};
use super::object::{Limits, Object};
use super::original::Originals;
use super::pin::{Pins, Record, Slot};
use super::status::{self, Status};
use super::{Error, link, privilege, table};

/// The kernel's programs and maps, in the hands of one owner.
pub struct Interceptor {
    pins: Pins,
    root: PathBuf,
    owner: String,
    limits: Limits,
    hierarchy: Hierarchy,
    object: Object,
    maps: Maps,
}

// === impl Interceptor ===

impl Interceptor {
    /// Makes the maps or adopts those that are pinned, and replaces this owner's programs where they are of another
    /// version.
    ///
    /// # Errors
    /// If there is no cgroup2 or BPF file system, a capability or a kernel feature is missing.
    pub fn open(options: Options) -> Result<Self, Error> {
        let Options { pins: root, owner, limits } = options;
        let hierarchy = Hierarchy::find()?;
        let pins = Pins::at(&root);
        pins.create()?;
        let lock = pins.lock()?;
        let object = Object::load(&pins, limits)?;
        let maps = Maps::open(&pins)?;
        let mut interceptor = Self { pins, root, owner, limits, hierarchy, object, maps };
        interceptor.replace(|record, fingerprint| record.object.as_deref() != Some(fingerprint))?;
        drop(lock);
        Ok(interceptor)
    }

    /// Replaces the programs of every pod of this owner by freshly loaded ones, without a gap.
    ///
    /// # Errors
    /// If one cannot be attached; the former one stays then.
    pub fn upgrade(&mut self) -> Result<(), Error> {
        let _lock = self.pins.lock()?;
        self.object = Object::load(&self.pins, self.limits)?;
        self.replace(|_, _| true)
    }

    /// Attaches a pod, or changes how it is attached. An attachment outlives this process.
    ///
    /// # Errors
    /// If the cgroup is none or is another owner's, or a table is full. A pod that fails closed is attached all the same
    /// when a table is full, with no targets: its connections are refused until it is attached properly.
    pub fn attach(&mut self, pod: &Attach) -> Result<Slot, Error> {
        let _lock = self.pins.lock()?;
        let cgroup = self.hierarchy.cgroup(&pod.cgroup)?;
        let known = self.pins.find(&cgroup)?;
        self.mine(known.as_ref())?;
        let slot = known
            .as_ref()
            .map_or_else(|| self.pins.claim(&cgroup, &self.owner), |record| Ok(record.slot));
        let slot = slot.or_else(|error| self.full(error))?;
        let enrolled = self.enrol(slot, &cgroup, pod, known.as_ref());
        let new = known.is_none_or(|record| record.object.is_none());
        match enrolled {
            Ok(()) => {}
            Err(error) if new && (pod.fail_open || !matches!(error, Error::Full { .. })) => {
                self.forget(slot)?;
                return self.full(error);
            }
            Err(error) if !new => return self.full(error),
            Err(error) => {
                link::attach(&mut self.object, &self.pins, slot, &cgroup)?;
                return self.full(error);
            }
        }
        if let Err(error) = link::attach(&mut self.object, &self.pins, slot, &cgroup) {
            if new {
                self.forget(slot)?;
            }
            return Err(error);
        }
        self.pins.note(slot, "object", Path::new(&Object::fingerprint()))?;
        Ok(slot)
    }

    /// Lets go of a pod.
    ///
    /// # Errors
    /// If nothing is attached there, or it is another owner's.
    pub fn detach(&mut self, cgroup: &Path) -> Result<(), Error> {
        let _lock = self.pins.lock()?;
        let record = match self.hierarchy.cgroup(cgroup) {
            Ok(cgroup) => self.pins.find(&cgroup)?,
            Err(_) => self.pins.records()?.into_iter().find(|record| record.cgroup.path == cgroup),
        };
        self.mine(record.as_ref())?;
        let record = record.ok_or_else(|| Error::NotAttached(cgroup.to_owned()))?;
        self.forget(record.slot)
    }

    /// Removes what belongs to this owner's cgroups that are gone, and what a crashed loader left half made.
    ///
    /// # Errors
    /// If a pin or an entry cannot be removed.
    pub fn sweep(&mut self) -> Result<Vec<Slot>, Error> {
        let _lock = self.pins.lock()?;
        let live: BTreeSet<Slot> = self
            .pins
            .records()?
            .into_iter()
            // Another owner may see cgroups by another path: only it can say that one is gone.
            .filter(|record| record.owner != self.owner || record.lives())
            .map(|record| record.slot)
            .collect();
        let dead: Vec<Slot> =
            self.pins.slots()?.into_iter().filter(|slot| !live.contains(slot)).collect();
        for slot in &dead {
            self.forget(*slot)?;
        }
        let members: Vec<(u64, Member)> =
            self.maps.members.iter().collect::<Result<_, _>>().map_err(Error::map("MEMBERS"))?;
        for (id, _) in
            members.into_iter().filter(|(_, member)| !live.contains(&Slot::new(member.slot)))
        {
            self.expel(id)?;
        }
        Ok(dead)
    }

    /// Says which socket takes the redirected connections of a pod attached with `ListenerCheck::Held`. When the socket
    /// closes, or its process dies, the kernel knows at once.
    ///
    /// # Errors
    /// If the socket does not listen.
    pub fn listen(&mut self, slot: Slot, listener: &TcpListener) -> Result<(), Error> {
        self.maps.listeners.set(slot.index(), listener, 0).map_err(Error::map("LISTENERS"))
    }

    /// Says that the proxy with this number lives.
    ///
    /// # Errors
    /// If the number is too large.
    pub fn beat(&mut self, number: u32) -> Result<(), Error> {
        self.maps.heartbeats.set(number, status::now(), 0).map_err(Error::map("HEARTBEATS"))
    }

    /// Gives connections that arrive at `address` in a pod's network namespace to `listener`, one of
    /// [`super::listener::inbound`] for its family. The proxy itself reaches the server behind from a loopback address, [`super::INBOUND_SOURCE`].
    ///
    /// # Errors
    /// If the namespace is none, or a table is full.
    pub fn take_inbound(
        &mut self,
        slot: Slot,
        namespace: &Namespace,
        address: SocketAddr,
        listener: &TcpListener,
        fail_open: bool,
    ) -> Result<(), Error> {
        let _lock = self.pins.lock()?;
        let entry = slot.index() * 2 + u32::from(address.is_ipv6());
        self.maps
            .inbound_listeners
            .set(entry, listener, 0)
            .map_err(Error::map("INBOUND_LISTENERS"))?;
        let key = InboundKey { address: address.ip().into(), port: u32::from(address.port()) };
        let value = Inbound { listener: entry, flags: if fail_open { FAIL_OPEN } else { 0 } };
        let inserted = self.maps.inbound.insert(key, value, 0);
        inserted.or_else(|error| no_room("INBOUND", MAX_INBOUND, error))?;
        link::attach_inbound(&mut self.object, &self.pins, slot, namespace)
    }

    /// Answers `SO_ORIGINAL_DST` to the processes of a proxy's cgroup, for as long as this process lives: what it is for
    /// is proxies that cannot read the tables.
    ///
    /// # Errors
    /// If the cgroup is none.
    pub fn answer_original_destination(&mut self, cgroup: &Path) -> Result<(), Error> {
        let cgroup = self.hierarchy.cgroup(cgroup)?;
        let folder =
            std::fs::File::open(&cgroup.path).map_err(Error::file("open", &cgroup.path))?;
        let failed = |source| Error::Attach {
            program: "getsockopt",
            to: cgroup.path.clone(),
            source: Box::new(source),
        };
        let attached = self.object.attach_getsockopt(&folder)?;
        attached.map_err(|error| privilege::explain("attach program `getsockopt`", error, failed))
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
        Status::of(&self.pins, &self.maps)
    }

    fn mine(&self, record: Option<&Record>) -> Result<(), Error> {
        match record {
            Some(record) if record.owner != self.owner => Err(Error::Owned {
                cgroup: record.cgroup.path.clone(),
                owner: record.owner.clone(),
            }),
            _ => Ok(()),
        }
    }

    fn replace(&mut self, stale: impl Fn(&Record, &str) -> bool) -> Result<(), Error> {
        let fingerprint = Object::fingerprint();
        let records = self.pins.records()?.into_iter();
        for record in records.filter(|record| {
            record.owner == self.owner && record.lives() && stale(record, &fingerprint)
        }) {
            link::attach(&mut self.object, &self.pins, record.slot, &record.cgroup)?;
            self.pins.note(record.slot, "object", Path::new(&fingerprint))?;
        }
        Ok(())
    }

    /// Writes everything the programs read about a pod; its cgroups last.
    fn enrol(
        &mut self,
        slot: Slot,
        cgroup: &Cgroup,
        pod: &Attach,
        known: Option<&Record>,
    ) -> Result<(), Error> {
        let except = pod
            .except
            .iter()
            .map(|path| self.hierarchy.cgroup(path))
            .collect::<Result<Vec<_>, _>>()?;
        let below =
            |passing: &&Cgroup| passing.id != cgroup.id && passing.path.starts_with(&cgroup.path);
        if let Some(stranger) = except.iter().find(|passing| !below(passing)) {
            let (path, pod) = (stranger.path.clone(), cgroup.path.clone());
            return Err(Error::NotBelow { path, pod });
        }
        let table = table::ensure(&mut self.maps, &self.owner, &pod.targets)?;
        let value = pod.entry(slot, table);
        self.maps.pods.set(slot.index(), value, 0).map_err(Error::map("PODS"))?;
        for passing in &except {
            self.pins.note(slot, &format!("pass-{}", passing.id), &passing.path)?;
            self.join(passing.id, slot, ROLE_PASS)?;
        }
        self.join(cgroup.id, slot, ROLE_REDIRECT)?;
        let gone =
            known.into_iter().flat_map(|record| &record.except).filter(|old| !except.contains(old));
        for old in gone {
            self.expel(old.id)?;
            self.pins.remove(slot, &format!("pass-{}", old.id))?;
        }
        Ok(())
    }

    fn join(&mut self, cgroup: u64, slot: Slot, role: u16) -> Result<(), Error> {
        let inserted = self.maps.members.insert(cgroup, Member { slot: slot.get(), role }, 0);
        inserted
            .or_else(|error| no_room("MEMBERS", self.limits.cgroups.unwrap_or(MAX_CGROUPS), error))
    }

    fn expel(&mut self, cgroup: u64) -> Result<(), Error> {
        match self.maps.members.remove(&cgroup) {
            Err(error) if !map::absent(&error) => Err(Error::map("MEMBERS")(error)),
            _ => Ok(()),
        }
    }

    /// Removes a pod: its links first, so that no program runs without its tables.
    fn forget(&mut self, slot: Slot) -> Result<(), Error> {
        link::detach(&self.pins, slot)?;
        let records = self.pins.records()?;
        for record in records.iter().filter(|record| record.slot == slot) {
            for cgroup in record.except.iter().chain([&record.cgroup]) {
                self.expel(cgroup.id)?;
            }
        }
        let inbound: Vec<(InboundKey, Inbound)> =
            self.maps.inbound.iter().collect::<Result<_, _>>().map_err(Error::map("INBOUND"))?;
        for (key, _) in
            inbound.into_iter().filter(|(_, inbound)| inbound.listener / 2 == slot.index())
        {
            self.maps.inbound.remove(&key).map_err(Error::map("INBOUND"))?;
        }
        self.maps.pods.set(slot.index(), Pod::default(), 0).map_err(Error::map("PODS"))?;
        self.pins.release(slot)?;
        let rest = records.iter().filter(|record| record.slot != slot);
        let used =
            rest.map(|record| self.maps.pods.get(&record.slot.index(), 0).map(|pod| pod.table));
        let used = used.collect::<Result<_, _>>().map_err(Error::map("PODS"))?;
        table::collect(&mut self.maps, &used)
    }

    /// Counts a full table, and hands every error on.
    fn full<T>(&mut self, error: Error) -> Result<T, Error> {
        if matches!(error, Error::Full { .. }) {
            self.maps.add(Outcome::TableFull)?;
        }
        Err(error)
    }
}

impl std::fmt::Debug for Interceptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Interceptor")
            .field("root", &self.root)
            .field("owner", &self.owner)
            .finish_non_exhaustive()
    }
}

fn no_room(table: &'static str, entries: u32, error: aya::maps::MapError) -> Result<(), Error> {
    Err(if map::full(&error) { Error::Full { table, entries } } else { Error::map(table)(error) })
}

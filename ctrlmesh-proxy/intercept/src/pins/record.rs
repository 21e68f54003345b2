//! The record of each pod, and the slot that it has.
//!
//! A slot that was released is used again only after all others, so that an old number does not soon mean another pod.
//! Numbers from [`MAX_PODS`] on are pods for which there was no slot, and whose connections are all refused.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, symlink};
use std::path::{Path, PathBuf};

use ctrlmesh_common::kernel::MAX_PODS;

use crate::Error;
use crate::host::cgroup::Cgroup;
use crate::pins::{self, Pins, Slot};

/// The program that is told of the end of each socket. Only pods with a target at any address need it.
pub(crate) const SOCK_RELEASE: &str = "sock_release";

/// The note on a pod that has a target at any address.
const BY_PORT: &str = "by-port";

/// How far attaching a pod got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// The slot is taken, and nothing is attached.
    Claimed,
    /// Attached without targets, because a table was full: every TCP connection is refused.
    Closed,
    /// Attached.
    Attached,
}

/// What is recorded about a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) slot: Slot,
    pub(crate) cgroup: Cgroup,
    pub(crate) owner: String,
    /// The cgroup below which its owner saw everything when it was attached.
    pub(crate) view: Option<u64>,
    pub(crate) state: State,
    /// Fingerprint of the object whose programs are attached at the cgroup.
    pub(crate) object: Option<String>,
    /// Cgroups below whose connections pass.
    pub(crate) except: Vec<Cgroup>,
    /// The network namespace in which webhook calls are taken: where it was found, and its inode.
    pub(crate) netns: Option<(PathBuf, u64)>,
    /// Fingerprint of the object whose program is attached there.
    pub(crate) inbound_object: Option<String>,
    /// Whether the pod has, or had, a target that is a port at any address.
    pub(crate) by_port: bool,
}

impl State {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Claimed => "claimed",
            Self::Closed => "closed",
            Self::Attached => "attached",
        }
    }

    fn of(name: &str) -> Option<Self> {
        [Self::Claimed, Self::Closed, Self::Attached].into_iter().find(|state| state.name() == name)
    }
}

impl Pins {
    /// Every pod, by slot. What was left half made is none.
    pub(crate) fn records(&self) -> Result<Vec<Record>, Error> {
        let mut records: Vec<Record> = self.slots()?.into_iter().filter_map(|slot| self.record(slot)).collect();
        records.sort_by_key(|record| record.slot);
        Ok(records)
    }

    /// The pod whose cgroup this is.
    pub(crate) fn find(&self, cgroup: &Cgroup) -> Result<Option<Record>, Error> {
        let record = self.holder(cgroup.id)?.and_then(|slot| self.record(slot));
        Ok(record.filter(|record| record.cgroup.id == cgroup.id))
    }

    /// Pods with this cgroup for which there was no slot.
    pub(crate) fn without_slot(&self, cgroup: &Cgroup) -> Result<Vec<Record>, Error> {
        let slots = self.slots()?.into_iter().filter(|slot| !slot.real());
        let records = slots.filter_map(|slot| self.record(slot));
        Ok(records.filter(|record| record.cgroup.id == cgroup.id).collect())
    }

    /// Takes a free slot of the first `limit` and records who has it.
    pub(crate) fn claim(&self, cgroup: &Cgroup, owner: &str, limit: u32) -> Result<Slot, Error> {
        let taken: BTreeSet<Slot> = self.slots()?.into_iter().collect();
        let limit = u16::try_from(limit.min(MAX_PODS)).unwrap_or(u16::MAX);
        let next = fs::read_link(self.next()).ok();
        let next = next.and_then(|next| next.to_str()?.parse().ok()).filter(|next| *next < limit);
        let next: u16 = next.unwrap_or_default();
        let free = (next..limit).chain(0..next).map(Slot::new).find(|slot| !taken.contains(slot));
        let slot = free.ok_or(Error::Full { table: "PODS", entries: u32::from(limit) })?;
        self.make(slot, cgroup, owner)?;
        link(Path::new(&(slot.get() + 1).to_string()), &self.next())?;
        Ok(slot)
    }

    /// Records a pod for which there is no slot.
    pub(crate) fn claim_without_slot(&self, cgroup: &Cgroup, owner: &str) -> Result<Slot, Error> {
        let taken: BTreeSet<Slot> = self.slots()?.into_iter().collect();
        let first = u16::try_from(MAX_PODS).unwrap_or(u16::MAX);
        let free = (first..u16::MAX).map(Slot::new).find(|slot| !taken.contains(slot));
        let slot = free.ok_or(Error::Full { table: "PODS", entries: MAX_PODS })?;
        self.make(slot, cgroup, owner)?;
        Ok(slot)
    }

    /// Writes one record of a pod, replacing the former one.
    pub(crate) fn note(&self, slot: Slot, name: &str, text: &Path) -> Result<(), Error> {
        link(text, &self.pod(slot).join(name))
    }

    /// Records how far a pod got.
    pub(crate) fn set_state(&self, slot: Slot, state: State) -> Result<(), Error> {
        self.note(slot, "state", Path::new(state.name()))
    }

    /// Records that the end of the pod's connections counts.
    pub(crate) fn set_by_port(&self, slot: Slot) -> Result<(), Error> {
        self.note(slot, BY_PORT, Path::new("yes"))
    }

    /// Whether it does. A program for it may be there without the note, as an earlier version attached it to all.
    pub(crate) fn is_by_port(&self, slot: Slot) -> bool {
        let folder = self.pod(slot);
        folder.join(BY_PORT).is_symlink() || folder.join(SOCK_RELEASE).exists()
    }

    /// Removes one record or pin of a pod, if it is there.
    pub(crate) fn remove(&self, slot: Slot, name: &str) -> Result<(), Error> {
        pins::forget(&self.pod(slot).join(name))
    }

    /// Removes a pod's folder; links in it are detached.
    pub(crate) fn release(&self, slot: Slot) -> Result<(), Error> {
        let folder = self.pod(slot);
        if let Some(record) = self.record(slot)
            && self.holder(record.cgroup.id)? == Some(slot)
        {
            pins::forget(&self.entry(record.cgroup.id))?;
        }
        for name in self.names(slot)?.into_iter().flatten() {
            pins::forget(&folder.join(name))?;
        }
        fs::remove_dir(&folder).map_err(Error::file("remove", folder))
    }

    /// What is recorded in a slot, if it is whole.
    pub(crate) fn record(&self, slot: Slot) -> Option<Record> {
        let read = |name: &str| fs::read_link(self.pod(slot).join(name)).ok();
        let text = |name: &str| read(name)?.into_os_string().into_string().ok();
        let except = self.names(slot).ok()??.into_iter().filter_map(|name| {
            let id = name.strip_prefix("pass-")?.parse().ok()?;
            Some(Cgroup { path: read(&name)?, id })
        });
        let netns = || Some((read("netns")?, text("netns-id")?.parse().ok()?));
        Some(Record {
            slot,
            cgroup: Cgroup { path: read("cgroup")?, id: text("id")?.parse().ok()? },
            owner: text("owner")?,
            view: text("view").and_then(|view| view.parse().ok()),
            state: State::of(&text("state")?)?,
            object: text("object"),
            except: except.collect(),
            netns: netns(),
            inbound_object: text("inbound-object"),
            by_port: self.is_by_port(slot),
        })
    }

    /// Whether a slot is an attached pod of this owner's, and its cgroup is still the same.
    pub(crate) fn holds(&self, slot: Slot, owner: &str) -> bool {
        let read = |name: &str| fs::read_link(self.pod(slot).join(name)).ok();
        let is = |name: &str, text: &str| read(name).is_some_and(|found| found == Path::new(text));
        let inode = || Some(fs::metadata(read("cgroup")?).ok()?.ino().to_string());
        is("owner", owner) && is("state", State::Attached.name()) && inode().is_some_and(|inode| is("id", &inode))
    }

    fn make(&self, slot: Slot, cgroup: &Cgroup, owner: &str) -> Result<(), Error> {
        let folder = self.pod(slot);
        DirBuilder::new().mode(0o700).create(&folder).map_err(Error::file("create", folder))?;
        self.note(slot, "cgroup", &cgroup.path)?;
        self.note(slot, "id", Path::new(&cgroup.id.to_string()))?;
        self.note(slot, "owner", Path::new(owner))?;
        self.set_state(slot, State::Claimed)?;
        link(Path::new(&slot.to_string()), &self.entry(cgroup.id))
    }

    /// The slot that says it has this cgroup.
    fn holder(&self, cgroup: u64) -> Result<Option<Slot>, Error> {
        match fs::read_link(self.entry(cgroup)) {
            Ok(slot) => Ok(slot.to_str().and_then(|slot| slot.parse().ok()).map(Slot::new)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::file("read", self.entry(cgroup))(error)),
        }
    }
}

/// Makes or replaces a symbolic link, at once.
fn link(text: &Path, path: &Path) -> Result<(), Error> {
    // A dot in a name is not allowed there.
    let mut next = path.as_os_str().to_owned();
    next.push("-next");
    let next = PathBuf::from(next);
    pins::forget(&next)?;
    symlink(text, &next).map_err(Error::file("write", &next))?;
    fs::rename(&next, path).map_err(Error::file("replace", path))
}

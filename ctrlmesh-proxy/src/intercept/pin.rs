//! Where are maps and links kept so that they outlive the process?
//!
//! ```text
//! /sys/fs/bpf/ctrlmesh/v1/            0700: whoever can open a pin can use it
//!   maps/PODS …
//!   pods/<slot>/connect4 …            links; removing one detaches
//!   pods/<slot>/cgroup -> /sys/fs/cgroup/…    records are symbolic links: a BPF file system knows no other text
//!   pods/<slot>/{id,owner,object} -> …
//!   pods/<slot>/pass-<cgroup id> -> …
//!   cgroups/<id> -> <slot>            written last, removed first
//! ```
//! One process at a time changes anything: it holds a lock on the folder.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::path::{Path, PathBuf};

use ctrlmesh_common::kernel::{LAYOUT, MAX_PODS};
use nix::errno::Errno;
use nix::mount::{self, MsFlags};
use nix::sys::statfs::{self, BPF_FS_MAGIC};

use super::cgroup::Cgroup;
use super::{Error, privilege};

const BPFFS: &str = "/sys/fs/bpf";

/// Every map that is pinned: name, in the order of the kernel's `maps.rs`.
pub(super) const MAPS: [&str; 11] = [
    "MEMBERS",
    "PODS",
    "TARGETS",
    "DESTINATIONS",
    "TABLES",
    "LISTENERS",
    "HEARTBEATS",
    "INBOUND",
    "INBOUND_LISTENERS",
    "COUNTERS",
    "EVENTS",
];

/// A pod's place on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(transparent)]
pub struct Slot(u16);

/// The folder of all pins.
#[derive(Clone, Debug)]
pub(super) struct Pins {
    root: PathBuf,
}

/// What is recorded about a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) slot: Slot,
    pub(super) cgroup: Cgroup,
    pub(super) owner: String,
    /// Fingerprint of the object whose programs are attached; none while they are being attached.
    pub(super) object: Option<String>,
    /// Cgroups below whose connections pass.
    pub(super) except: Vec<Cgroup>,
}

/// Where pins go unless told otherwise.
pub fn default_pins() -> PathBuf {
    PathBuf::from(format!("{BPFFS}/ctrlmesh/v{LAYOUT}"))
}

// === impl Slot ===

impl Slot {
    /// The slot that an encoded address names.
    pub fn new(slot: u16) -> Self {
        Self(slot)
    }

    /// Its number.
    pub fn get(self) -> u16 {
        self.0
    }

    /// Its index in maps.
    pub(super) fn index(self) -> u32 {
        u32::from(self.0)
    }
}

impl std::fmt::Display for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

// === impl Pins ===

impl Pins {
    /// The pins below `root`, which need not exist.
    pub(super) fn at(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Makes the folders; mounts the BPF file system at its usual place if nobody did.
    pub(super) fn create(&self) -> Result<(), Error> {
        if !self.on_bpffs() {
            self.mount().map_err(|source| Error::NoBpffs { path: self.root.clone(), source })?;
        }
        for folder in [self.maps(), self.pods(), self.cgroups()] {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&folder)
                .map_err(|error| refused("create", &folder, error))?;
        }
        Ok(())
    }

    /// Whether anything was ever pinned here. Not while the first loader is at it.
    pub(super) fn exist(&self) -> Result<bool, Error> {
        for path in MAPS.map(|name| self.map(name)) {
            if !path.try_exists().map_err(|error| refused("look for", &path, error))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits until no other process changes anything. The lock ends with the file.
    pub(super) fn lock(&self) -> Result<File, Error> {
        let file = File::open(&self.root).map_err(Error::file("open", &self.root))?;
        file.lock().map_err(Error::file("lock", &self.root))?;
        Ok(file)
    }

    pub(super) fn map(&self, name: &str) -> PathBuf {
        self.maps().join(name)
    }

    pub(super) fn hook(&self, slot: Slot, hook: &str) -> PathBuf {
        self.pod(slot).join(hook)
    }

    /// Every pod, by slot. What was left half made is none.
    pub(super) fn records(&self) -> Result<Vec<Record>, Error> {
        let mut records: Vec<Record> =
            self.slots()?.into_iter().filter_map(|slot| self.record(slot)).collect();
        records.sort_by_key(|record| record.slot);
        Ok(records)
    }

    /// The pod whose cgroup this is.
    pub(super) fn find(&self, cgroup: &Cgroup) -> Result<Option<Record>, Error> {
        let slot = match fs::read_link(self.entry(cgroup.id)) {
            Ok(slot) => slot,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::file("read", self.entry(cgroup.id))(error)),
        };
        let slot = slot.to_str().and_then(|slot| slot.parse().ok()).map(Slot);
        Ok(slot.and_then(|slot| self.record(slot)).filter(|record| record.cgroup.id == cgroup.id))
    }

    /// Slots that were made, recorded or not.
    pub(super) fn slots(&self) -> Result<Vec<Slot>, Error> {
        let folder = self.pods();
        let entries = fs::read_dir(&folder).map_err(Error::file("read", &folder))?;
        Ok(entries
            .flatten()
            .filter_map(|entry| Some(Slot(entry.file_name().to_str()?.parse().ok()?)))
            .collect())
    }

    /// Takes a free slot and records who has it.
    pub(super) fn claim(&self, cgroup: &Cgroup, owner: &str) -> Result<Slot, Error> {
        let taken: std::collections::BTreeSet<Slot> = self.slots()?.into_iter().collect();
        let free = (0..u16::try_from(MAX_PODS).unwrap_or(u16::MAX))
            .map(Slot)
            .find(|slot| !taken.contains(slot));
        let slot = free.ok_or(Error::Full { table: "PODS", entries: MAX_PODS })?;
        let folder = self.pod(slot);
        DirBuilder::new().mode(0o700).create(&folder).map_err(Error::file("create", folder))?;
        self.note(slot, "cgroup", &cgroup.path)?;
        self.note(slot, "id", Path::new(&cgroup.id.to_string()))?;
        self.note(slot, "owner", Path::new(owner))?;
        let entry = self.entry(cgroup.id);
        forget(&entry)?;
        symlink(slot.to_string(), &entry).map_err(Error::file("write", entry))?;
        Ok(slot)
    }

    /// Writes one record of a pod, replacing the former one.
    pub(super) fn note(&self, slot: Slot, name: &str, text: &Path) -> Result<(), Error> {
        let path = self.pod(slot).join(name);
        let next = self.pod(slot).join(format!("{name}-next"));
        forget(&next)?;
        symlink(text, &next).map_err(Error::file("write", &next))?;
        fs::rename(&next, &path).map_err(Error::file("write", path))
    }

    /// Removes one record or pin of a pod, if it is there.
    pub(super) fn remove(&self, slot: Slot, name: &str) -> Result<(), Error> {
        forget(&self.pod(slot).join(name))
    }

    /// Removes a pod's folder; links in it are detached.
    pub(super) fn release(&self, slot: Slot) -> Result<(), Error> {
        let folder = self.pod(slot);
        if let Some(record) = self.record(slot) {
            forget(&self.entry(record.cgroup.id))?;
        }
        for name in self.names(slot)? {
            forget(&folder.join(name))?;
        }
        fs::remove_dir(&folder).map_err(Error::file("remove", folder))
    }

    /// Names of everything in a pod's folder.
    pub(super) fn names(&self, slot: Slot) -> Result<Vec<String>, Error> {
        let folder = self.pod(slot);
        let entries = fs::read_dir(&folder).map_err(Error::file("read", folder))?;
        Ok(entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect())
    }

    fn record(&self, slot: Slot) -> Option<Record> {
        let read = |name: &str| fs::read_link(self.pod(slot).join(name)).ok();
        let text = |name: &str| read(name)?.into_os_string().into_string().ok();
        let except = self.names(slot).ok()?.into_iter().filter_map(|name| {
            let id = name.strip_prefix("pass-")?.parse().ok()?;
            Some(Cgroup { path: read(&name)?, id })
        });
        Some(Record {
            slot,
            cgroup: Cgroup { path: read("cgroup")?, id: text("id")?.parse().ok()? },
            owner: text("owner")?,
            object: text("object"),
            except: except.collect(),
        })
    }

    /// Mounts the BPF file system at its usual place, if that is where the pins go. Nothing is mounted over another one,
    /// which would hide what is pinned there.
    fn mount(&self) -> Result<(), Errno> {
        if !self.root.starts_with(BPFFS) {
            return Err(Errno::ENOTSUP);
        }
        // Whoever comes second waits here, and finds it mounted.
        let folder = File::open(BPFFS).map_err(errno)?;
        folder.lock().map_err(errno)?;
        if self.on_bpffs() {
            return Ok(());
        }
        mount::mount(Some("bpf"), BPFFS, Some("bpf"), MsFlags::empty(), Some("mode=0700"))
    }

    fn on_bpffs(&self) -> bool {
        let existing = self.root.ancestors().find(|path| path.exists()).unwrap_or(&self.root);
        statfs::statfs(existing).is_ok_and(|fs| fs.filesystem_type() == BPF_FS_MAGIC)
    }

    fn entry(&self, cgroup: u64) -> PathBuf {
        self.cgroups().join(cgroup.to_string())
    }

    fn cgroups(&self) -> PathBuf {
        self.root.join("cgroups")
    }

    fn maps(&self) -> PathBuf {
        self.root.join("maps")
    }

    fn pods(&self) -> PathBuf {
        self.root.join("pods")
    }

    fn pod(&self, slot: Slot) -> PathBuf {
        self.pods().join(slot.to_string())
    }
}

// === impl Record ===

impl Record {
    /// Whether the cgroup is still the one that was attached.
    pub(super) fn lives(&self) -> bool {
        use std::os::unix::fs::MetadataExt as _;
        fs::metadata(&self.cgroup.path).is_ok_and(|folder| folder.ino() == self.cgroup.id)
    }
}

/// Pins are root's: whoever may not touch them is told which capabilities are missing.
fn refused(doing: &'static str, path: &Path, error: io::Error) -> Error {
    privilege::explain(format!("{doing} {}", path.display()), error, Error::file(doing, path))
}

fn errno(error: io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::UnknownErrno, Errno::from_raw)
}

fn forget(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::file("remove", path)(error))
        }
        _ => Ok(()),
    }
}

//! Maps and links that are pinned so that they outlive the process.
//!
//! ```text
//! /sys/fs/bpf/ctrlmesh/v1/            0700: whoever can open a pin can use it
//!   maps/PODS …
//!   pods/<slot>/connect4 …            links; removing one detaches
//!   pods/<slot>/cgroup -> /sys/fs/cgroup/…    records are symbolic links: a BPF file system knows no other text
//!   pods/<slot>/{id,owner,state,object,netns,inbound-object} -> …
//!   pods/<slot>/pass-<cgroup id> -> …
//!   cgroups/<id> -> <slot>            written last, removed first
//!   next -> <slot>                    where the search for a free slot goes on
//! ```
//! One process at a time changes anything: it holds a lock on the folder.

pub(crate) mod permissions;
pub(crate) mod record;

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use ctrlmesh_common::kernel::{LAYOUT, MAX_PODS};
use nix::errno::Errno;
use nix::mount::{self, MsFlags};
use nix::sys::statfs::{self, BPF_FS_MAGIC};

use crate::Error;
use crate::host::privilege;

const BPFFS: &str = "/sys/fs/bpf";

/// How often others may remove the folder before we have locked it.
const ATTEMPTS: usize = 100;

/// Every map that is pinned: name, in the order of the kernel's `maps.rs`.
pub(crate) const MAPS: [&str; 12] = [
    "MEMBERS",
    "PODS",
    "TARGETS",
    "DESTINATIONS",
    "TABLES",
    "LISTENERS",
    "HEARTBEATS",
    "INBOUND",
    "INBOUND_LISTENERS",
    "CONNECTIONS",
    "COUNTERS",
    "EVENTS",
];

/// A pod's place on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(transparent)]
pub struct Slot(u16);

/// The folder of all pins.
#[derive(Clone, Debug)]
pub(crate) struct Pins {
    root: PathBuf,
    /// Device and inode of the folder whose maps are open.
    opened: Option<(u64, u64)>,
}

/// Where pins go unless told otherwise.
pub fn default_pins() -> PathBuf {
    PathBuf::from(format!("{BPFFS}/ctrlmesh/v{LAYOUT}"))
}

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
    pub(crate) fn index(self) -> u32 {
        u32::from(self.0)
    }

    /// Whether the maps have a place for it.
    pub(crate) fn real(self) -> bool {
        self.index() < MAX_PODS
    }
}

impl std::fmt::Display for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Whether what is mounted here is mounted for the first process that we see too: of a container that sees the
/// machine's processes, that is the machine's. Where nobody says, it is.
fn is_of_the_machine() -> bool {
    let mounts = |process: &str| fs::metadata(format!("/proc/{process}/ns/mnt")).ok();
    let same = |own: fs::Metadata, first: fs::Metadata| own.ino() == first.ino();
    mounts("self").zip(mounts("1")).is_none_or(|(own, first)| same(own, first))
}

impl Pins {
    /// The pins below `root`, which need not exist.
    pub(crate) fn at(root: &Path) -> Self {
        Self { root: root.to_owned(), opened: None }
    }

    /// Makes the folders and locks them; mounts the BPF file system at its usual place if nobody did. From now on only
    /// this folder is locked, and none that takes its place.
    pub(crate) fn acquire(&mut self) -> Result<File, Error> {
        if !self.on_bpffs() {
            self.mount().map_err(|source| Error::NoBpffs { path: self.root.clone(), source })?;
        }
        permissions::refuse_mount_point(&self.root)?;
        let lock = self.lock_new()?;
        permissions::ensure_private_above(&self.root)?;
        self.fill()?;
        let folder = lock.metadata().map_err(|error| refused("lock", &self.root, error))?;
        self.opened = Some((folder.dev(), folder.ino()));
        Ok(lock)
    }

    /// Fails if the folder is elsewhere than on a BPF file system.
    pub(crate) fn only_on_bpffs(&self) -> Result<(), Error> {
        let error = || Error::NoBpffs { path: self.root.clone(), source: Errno::ENOTSUP };
        self.on_bpffs().then_some(()).ok_or_else(error)
    }

    /// Makes the folders below the root, and looks whether all are for their owner alone. With the lock.
    pub(crate) fn fill(&self) -> Result<(), Error> {
        for folder in self.folders() {
            create(&folder).map_err(|error| refused("create", &folder, error))?;
            permissions::ensure_private(&folder)?;
        }
        Ok(())
    }

    /// Whether anything was ever pinned here, for its owner alone. Not while the first loader is at it.
    pub(crate) fn exist(&self) -> Result<bool, Error> {
        // Before it is known that anything is there: a folder that goes now is none.
        let trusted = permissions::ensure_private_above(&self.root)
            .and_then(|()| self.folders().iter().try_for_each(|folder| permissions::ensure_private(folder)));
        for path in MAPS.map(|name| self.map(name)) {
            if !path.try_exists().map_err(|error| refused("look for", &path, error))? {
                return Ok(false);
            }
        }
        trusted.map(|()| true)
    }

    /// All folders that are there once anything was pinned.
    fn folders(&self) -> [PathBuf; 4] {
        [self.root.clone(), self.maps(), self.pods(), self.cgroups()]
    }

    /// Waits until no other process changes anything. The lock ends with the file.
    ///
    /// A folder that was removed and made anew holds other maps than those that are open.
    pub(crate) fn lock(&self) -> Result<File, Error> {
        let lock = self.lock_made()?.ok_or_else(|| self.gone())?;
        let folder = lock.metadata().map_err(|error| refused("lock", &self.root, error))?;
        let same = self.opened.is_none_or(|opened| opened == (folder.dev(), folder.ino()));
        same.then_some(lock).ok_or_else(|| Error::Replaced(self.root.clone()))
    }

    /// The same, if the folder is there.
    pub(crate) fn lock_made(&self) -> Result<Option<File>, Error> {
        let denied = |error| refused("lock", &self.root, error);
        let absent = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
        loop {
            let file = match File::open(&self.root) {
                Err(error) if absent(&error) => return Ok(None),
                opened => opened.map_err(denied)?,
            };
            file.lock().map_err(denied)?;
            let locked = file.metadata().map_err(denied)?;
            // Whoever had the lock may have removed the folder, and another one may be there now.
            match fs::metadata(&self.root) {
                Ok(now) if (now.dev(), now.ino()) == (locked.dev(), locked.ino()) => {
                    return Ok(Some(file));
                }
                Err(error) if !absent(&error) => return Err(denied(error)),
                _ => {}
            }
        }
    }

    /// The same, with the folder made if need be.
    fn lock_new(&self) -> Result<File, Error> {
        for _ in 0..ATTEMPTS {
            match create(&self.root) {
                // Somebody removed the folder above.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                made => made.map_err(|error| refused("create", &self.root, error))?,
            }
            // None, if somebody removed it before we had it.
            if let Some(lock) = self.lock_made()? {
                return Ok(lock);
            }
        }
        Err(self.gone())
    }

    fn gone(&self) -> Error {
        Error::file("lock", &self.root)(io::ErrorKind::NotFound.into())
    }

    pub(crate) fn map(&self, name: &str) -> PathBuf {
        self.maps().join(name)
    }

    pub(crate) fn hook(&self, slot: Slot, hook: &str) -> PathBuf {
        self.pod(slot).join(hook)
    }

    /// Mounts the BPF file system at its usual place, if that is where the pins go. Nothing is mounted over another
    /// one, which would hide what is pinned there.
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
        // Mounted for this process alone, as in a container, the pins would end with it, and with them what they hold.
        if !is_of_the_machine() {
            return Err(Errno::EXDEV);
        }
        mount::mount(Some("bpf"), BPFFS, Some("bpf"), MsFlags::empty(), Some("mode=0700"))
    }

    fn on_bpffs(&self) -> bool {
        let existing = self.root.ancestors().find(|path| path.exists()).unwrap_or(&self.root);
        statfs::statfs(existing).is_ok_and(|fs| fs.filesystem_type() == BPF_FS_MAGIC)
    }

    /// Removes everything but the pods, which are released before, the folder itself too.
    pub(crate) fn remove_all(&self) -> Result<(), Error> {
        for folder in [self.cgroups(), self.maps(), self.pods()] {
            for entry in fs::read_dir(&folder).map_err(Error::file("read", &folder))?.flatten() {
                forget(&entry.path())?;
            }
            fs::remove_dir(&folder).map_err(Error::file("remove", &folder))?;
        }
        for entry in fs::read_dir(&self.root).map_err(Error::file("read", &self.root))?.flatten() {
            // What a loader left half made too.
            forget(&entry.path())?;
        }
        fs::remove_dir(&self.root).map_err(Error::file("remove", &self.root))?;
        // The folder of all versions, if this was the last.
        match self.root.parent().filter(|parent| parent.ends_with("ctrlmesh")).map(fs::remove_dir) {
            // Another version is there, or whoever removed that was quicker.
            Some(Err(error))
                if error.kind() != io::ErrorKind::DirectoryNotEmpty && error.kind() != io::ErrorKind::NotFound =>
            {
                Err(Error::file("remove", &self.root)(error))
            }
            _ => Ok(()),
        }
    }

    /// Names of everything in a pod's folder; nothing, if there is none: who has no lock may see it go.
    pub(crate) fn names(&self, slot: Slot) -> Result<Option<Vec<String>>, Error> {
        let folder = self.pod(slot);
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            entries => entries.map_err(Error::file("read", folder))?,
        };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        Ok(Some(names.collect()))
    }

    /// Slots that were made, recorded or not.
    pub(crate) fn slots(&self) -> Result<Vec<Slot>, Error> {
        let folder = self.pods();
        let entries = fs::read_dir(&folder).map_err(Error::file("read", &folder))?;
        Ok(entries.flatten().filter_map(|entry| Some(Slot::new(entry.file_name().to_str()?.parse().ok()?))).collect())
    }

    /// Where the search for a free slot goes on.
    pub(crate) fn next(&self) -> PathBuf {
        self.root.join("next")
    }

    /// Where it stands which slot has a cgroup.
    pub(crate) fn entry(&self, cgroup: u64) -> PathBuf {
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

    /// A pod's folder.
    pub(crate) fn pod(&self, slot: Slot) -> PathBuf {
        self.pods().join(slot.to_string())
    }
}

fn create(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

fn refused(doing: &'static str, path: &Path, error: io::Error) -> Error {
    privilege::explain_pin(doing, path, error, Error::file(doing, path))
}

fn errno(error: io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::UnknownErrno, Errno::from_raw)
}

/// Removes a file, if it is there.
pub(crate) fn forget(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::file("remove", path)(error)),
        _ => Ok(()),
    }
}

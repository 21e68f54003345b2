//! The folder of one run, and the removal of folders that killed runs left.
//!
//! Each run has a folder of its own, 0700, and holds a lock in it while it lives. The kernel releases the lock however
//! the process ends. So a lock that is free marks a folder that can be removed.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::{env, process};

use nix::unistd;

/// The file that a living run holds locked.
const LOCK: &str = "lock";

/// The file that says which cgroup belongs to a run.
const CGROUP: &str = "cgroup";

/// The file that says where its pins are.
const PINS: &str = "pins";

/// A run's folder; removed when dropped.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    /// Held until the process ends.
    lock: Option<File>,
}

/// Why files cannot be kept.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FolderError {
    #[error("{doing} `{path}` (--run-dir DIR takes another folder)")]
    File { doing: &'static str, path: PathBuf, source: io::Error },
    #[error("`{path}` is not a folder that only this user can enter: remove it, or set XDG_RUNTIME_DIR")]
    NotOurs { path: PathBuf },
}

/// The folder of all of a user's runs.
pub(crate) fn usual() -> PathBuf {
    let user = unistd::geteuid();
    if user.is_root() {
        return PathBuf::from("/run/ctrlmesh/run");
    }
    match env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty()) {
        Some(path) => PathBuf::from(path).join("ctrlmesh"),
        None => env::temp_dir().join(format!("ctrlmesh-{user}")),
    }
}

impl Folder {
    /// Makes a new folder below `root`, and hands those of runs that were killed to `sweep` before they are removed.
    pub(crate) fn create(root: &Path, sweep: impl Fn(&Self)) -> Result<Self, FolderError> {
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700).create(root).map_err(failed("create", root))?;
        let about = fs::symlink_metadata(root).map_err(failed("look at", root))?;
        if !about.is_dir() || about.uid() != unistd::geteuid().as_raw() || about.mode() & 0o077 != 0 {
            return Err(FolderError::NotOurs { path: root.to_owned() });
        }
        // One at a time: what is half made would look as if it had been left.
        let all = File::open(root).map_err(failed("open", root))?;
        all.lock().map_err(failed("lock", root))?;
        for entry in fs::read_dir(root).map_err(failed("read", root))?.flatten() {
            if !lives(&entry.path()) {
                sweep(&Self { path: entry.path(), lock: None });
            }
        }
        let mut folder = Self { path: new_folder(root)?, lock: None };
        let lock = folder.new_file(LOCK)?;
        lock.lock().map_err(failed("lock", &folder.path))?;
        folder.lock = Some(lock);
        Ok(folder)
    }

    /// What tells this run from others.
    pub(crate) fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Makes a folder in it.
    pub(crate) fn subfolder(&self, name: &str) -> Result<PathBuf, FolderError> {
        let path = self.path.join(name);
        DirBuilder::new().mode(0o700).create(&path).map_err(failed("create", &path))?;
        Ok(path)
    }

    /// Makes a link in it.
    pub(crate) fn link(&self, to: &Path, name: &str) -> Result<(), FolderError> {
        let path = self.path.join(name);
        symlink(to, &path).map_err(failed("create", &path))
    }

    /// Writes a file that only this user can read.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> Result<PathBuf, FolderError> {
        let path = self.path.join(name);
        self.new_file(name)?.write_all(bytes).map_err(failed("write", &path))?;
        Ok(path)
    }

    /// Notes a cgroup and pins, before they are made, for whoever has to remove them.
    pub(crate) fn note(&self, cgroup: &Path, pins: &Path) -> Result<(), FolderError> {
        for (name, path) in [(PINS, pins), (CGROUP, cgroup)] {
            let file = self.path.join(name);
            fs::write(&file, path.as_os_str().as_encoded_bytes()).map_err(failed("write", &file))?;
        }
        Ok(())
    }

    /// The cgroup and pins that were noted.
    pub(crate) fn noted(&self) -> Option<(PathBuf, PathBuf)> {
        let read = |name| fs::read_to_string(self.path.join(name)).ok().map(PathBuf::from);
        read(CGROUP).zip(read(PINS))
    }

    fn new_file(&self, name: &str) -> Result<File, FolderError> {
        let path = self.path.join(name);
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        options.open(&path).map_err(failed("create", &path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What cannot be removed is left to the next run.
        let _left = fs::remove_dir_all(&self.path);
    }
}

/// Whether the run that a folder belongs to is still there.
fn lives(folder: &Path) -> bool {
    File::open(folder.join(LOCK)).is_ok_and(|lock| matches!(lock.try_lock(), Err(TryLockError::WouldBlock)))
}

/// A folder that did not exist: process ids repeat in other PID namespaces.
fn new_folder(root: &Path) -> Result<PathBuf, FolderError> {
    let mut number = 0;
    loop {
        let path = root.join(format!("{}-{number}", process::id()));
        match DirBuilder::new().mode(0o700).create(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            Err(error) => return Err(failed("create", &path)(error)),
        }
    }
}

fn failed(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FolderError {
    let path = path.to_owned();
    move |source| FolderError::File { doing, path, source }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn files_are_for_this_user_only_and_gone_afterwards() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().join("run");
        let folder = Folder::create(&root, |_| ()).unwrap();
        let file = folder.write("key", b"secret").unwrap();
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(&folder.path).unwrap().permissions().mode() & 0o777, 0o700);
        drop(folder);
        assert_eq!(fs::read_dir(&root).unwrap().count(), 0);
    }

    #[test]
    fn a_killed_runs_leftovers_are_swept_a_living_run_stays() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().join("run");
        let builder = |name: &str| {
            let path = root.join(name);
            DirBuilder::new().recursive(true).mode(0o700).create(&path).unwrap();
            Folder { path, lock: None }
        };
        DirBuilder::new().mode(0o700).create(&root).unwrap();
        let killed = builder("killed");
        killed.write(LOCK, b"").unwrap();
        killed.note(Path::new("/c"), Path::new("/p")).unwrap();
        std::mem::forget(killed);
        let living = builder("living");
        let lock = living.new_file(LOCK).unwrap();
        lock.lock().unwrap();
        let swept = std::cell::RefCell::new(Vec::new());
        let folder = Folder::create(&root, |left| swept.borrow_mut().push(left.noted())).unwrap();
        assert_eq!(*swept.borrow(), [Some(("/c".into(), "/p".into()))]);
        assert!(!root.join("killed").exists() && living.path.exists() && folder.path.exists());
    }

    #[test]
    fn whoever_cannot_write_here_is_told_how_to_write_elsewhere() {
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join("file");
        fs::write(&file, "").unwrap();
        let error = Folder::create(&file.join("runs"), |_| {}).unwrap_err();
        assert!(error.to_string().contains("--run-dir DIR takes another folder"), "{error}");
    }

    #[test]
    fn a_folder_that_others_can_enter_is_refused() {
        let root = tempfile::tempdir().unwrap();
        fs::set_permissions(root.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let error = Folder::create(root.path(), |_| ()).unwrap_err();
        assert!(matches!(error, FolderError::NotOurs { .. }));
    }
}

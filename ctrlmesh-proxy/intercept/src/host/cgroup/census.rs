//! Finds recorded cgroups again, by the number that the kernel gives each.

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::fs::{self, DirEntry};
use std::os::unix::fs::{DirEntryExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

/// A cgroup that exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup {
    /// Its folder.
    pub path: PathBuf,
    /// What the kernel calls it.
    pub id: u64,
}

/// Finds cgroups again that were recorded, perhaps by somebody who saw them elsewhere: a container may have the file
/// system at another place than its host.
pub(crate) struct Census<'a> {
    mount: &'a Path,
    /// Every cgroup by its number, once one was not where it was recorded.
    all: OnceCell<HashMap<u64, PathBuf>>,
}

/// Where cgroups were found that were not where they were recorded, for who looks again and again.
#[derive(Debug, Default)]
pub(crate) struct CgroupPaths(HashMap<u64, Option<PathBuf>>);

/// Folders below a folder, level by level.
pub(super) struct Levels {
    level: Vec<PathBuf>,
}

impl<'a> Census<'a> {
    /// Looks below the folder where the file system is mounted.
    pub(super) fn new(mount: &'a Path) -> Self {
        Self { mount, all: OnceCell::new() }
    }

    /// Where a cgroup is; nothing, if it is gone.
    pub(crate) fn find(&self, cgroup: &Cgroup) -> Option<PathBuf> {
        if cgroup.is_there() {
            return Some(cgroup.path.clone());
        }
        self.below(cgroup.id)
    }

    /// The path of the cgroup with this number; nothing, if it is gone.
    pub(super) fn below(&self, id: u64) -> Option<PathBuf> {
        let all = self
            .all
            .get_or_init(|| Levels::below(self.mount).flatten().map(|entry| (entry.ino(), entry.path())).collect());
        // It may have gone since we looked.
        let found = Cgroup { path: all.get(&id)?.clone(), id };
        found.is_there().then_some(found.path)
    }
}

impl CgroupPaths {
    /// Where a cgroup is; nothing, if it is gone. One that was not found once is gone for ever: no other gets its
    /// number.
    pub(crate) fn find(&mut self, census: &Census<'_>, cgroup: &Cgroup) -> Option<PathBuf> {
        if cgroup.is_there() {
            return Some(cgroup.path.clone());
        }
        let known = self.0.entry(cgroup.id).or_insert_with(|| census.below(cgroup.id));
        let known = Cgroup { path: known.clone()?, id: cgroup.id };
        known.is_there().then_some(known.path)
    }

    /// Forgets the cgroups that are not among these.
    pub(crate) fn keep(&mut self, ids: &HashSet<u64>) {
        self.0.retain(|id, _| ids.contains(id));
    }
}

impl Cgroup {
    /// Whether it is still at its path.
    pub(crate) fn is_there(&self) -> bool {
        fs::metadata(&self.path).is_ok_and(|folder| folder.ino() == self.id)
    }
}

impl Levels {
    pub(super) fn below(root: &Path) -> Self {
        Self { level: vec![root.to_owned()] }
    }
}

impl Iterator for Levels {
    type Item = Vec<DirEntry>;

    fn next(&mut self) -> Option<Vec<DirEntry>> {
        // A folder may go while we look: then it is not the one that is looked for.
        let entries = self.level.iter().filter_map(|folder| fs::read_dir(folder).ok());
        let folders: Vec<DirEntry> =
            entries.flatten().flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).collect();
        self.level = folders.iter().map(DirEntry::path).collect();
        (!folders.is_empty()).then_some(folders)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup_that_is_gone_is_looked_for_once() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("kubepods/pod");
        fs::create_dir_all(&folder).unwrap();
        let id = fs::metadata(&folder).unwrap().ino();
        let elsewhere = Cgroup { path: PathBuf::from("/elsewhere/kubepods/pod"), id };
        let gone = Cgroup { path: folder.join("gone"), id: u64::MAX };
        let mut found = CgroupPaths::default();
        for looks in [true, false, false] {
            let census = Census::new(root.path());
            assert_eq!(found.find(&census, &elsewhere), Some(folder.clone()));
            assert_eq!(found.find(&census, &gone), None);
            assert_eq!(census.all.get().is_some(), looks);
        }
        found.keep(&HashSet::from([id]));
        assert_eq!(found.0.len(), 1);
    }
}

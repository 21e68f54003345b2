//! Finds the cgroup of a pod or of a container.
//!
//! On machines with cgroup v2 only, and on hybrid ones. Container runtimes name the folders in two ways, by driver:
//! cgroupfs `kubepods/burstable/pod<uid>/<id>`, systemd
//! `kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid with underscores>.slice/<runtime>-<id>.scope`.
//! Guaranteed pods have no folder for their class; below a kubelet in a container everything is nested once more. So
//! pods are found by their own folder's name, wherever it is.

use std::cell::OnceCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, DirEntry};
use std::io;
use std::os::unix::fs::{DirEntryExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::statfs::{self, CGROUP2_SUPER_MAGIC};

use crate::Error;
use crate::host::privilege;

/// Levels below the root in which a pod is looked for: a node in a container in a node needs nine.
const DEPTH: usize = 12;

/// What the kernel calls the root of all cgroups, on every machine.
const ROOT: u64 = 1;

/// The cgroup2 file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    mount: PathBuf,
}

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
    hierarchy: &'a Hierarchy,
    /// Every cgroup by its number, once one was not where it was recorded.
    all: OnceCell<HashMap<u64, PathBuf>>,
}

/// Where cgroups were found that were not where they were recorded, for who looks again and again.
#[derive(Debug, Default)]
pub(crate) struct CgroupPaths(HashMap<u64, Option<PathBuf>>);

impl Hierarchy {
    /// Finds where cgroup2 is mounted.
    ///
    /// # Errors
    /// If it is not.
    pub fn find() -> Result<Self, Error> {
        let path = "/proc/self/mountinfo";
        let mounts = fs::read_to_string(path).map_err(Error::file("read", path))?;
        mount(&mounts).map(|mount| Self { mount }).ok_or(Error::NoCgroup2)
    }

    /// Where it is mounted.
    pub fn mount(&self) -> &Path {
        &self.mount
    }

    /// The cgroup at `path`: a folder of the file system, or as `/proc/PID/cgroup` writes it.
    ///
    /// A cgroup that is named by another mount of the file system is found below ours, so that each has one path.
    ///
    /// # Errors
    /// If there is none, or it is the root.
    pub fn cgroup(&self, path: &Path) -> Result<Cgroup, Error> {
        let not = || Error::NotACgroup { path: path.to_owned(), mount: self.mount.clone() };
        let below = self.mount.join(path.strip_prefix("/").unwrap_or(path));
        let folder = if path.starts_with(&self.mount) || !below.is_dir() { path.to_owned() } else { below };
        let folder = folder.canonicalize().ok().ok_or_else(not)?;
        let cgroup = statfs::statfs(&folder).is_ok_and(|fs| fs.filesystem_type() == CGROUP2_SUPER_MAGIC);
        if !cgroup || !folder.is_dir() {
            return Err(not());
        }
        let is = |path: &Path| fs::metadata(path).map(|folder| (folder.dev(), folder.ino()));
        let found = is(&folder).map_err(Error::file("read", &folder))?;
        // Of this mount, which may show a part only, or of any other.
        if found.1 == ROOT || is(&self.mount).is_ok_and(|root| root == found) {
            return Err(Error::RootCgroup(folder));
        }
        let id = found.1;
        let seen = if folder.starts_with(&self.mount) { None } else { self.census().below(id) };
        Ok(Cgroup { path: seen.unwrap_or(folder), id })
    }

    /// Whether what cannot be seen is gone, where it was seen from the cgroup `view`: all cgroups are to be seen, or
    /// just those that were then, and not only those of another container or part.
    pub(crate) fn sees_what(&self, view: Option<u64>) -> bool {
        self.view().is_some_and(|root| root == ROOT || Some(root) == view)
    }

    /// The cgroup below which everything is seen.
    pub(crate) fn view(&self) -> Option<u64> {
        Some(fs::metadata(&self.mount).ok()?.ino())
    }

    /// The cgroups that this process is in, its own first.
    pub(crate) fn around(&self) -> Result<Vec<Cgroup>, Error> {
        let own = self.own()?;
        let folders = own.ancestors().take_while(|path| path.starts_with(&self.mount));
        let found =
            folders.filter_map(|path| Some(Cgroup { path: path.to_owned(), id: fs::metadata(path).ok()?.ino() }));
        Ok(found.collect())
    }

    /// Finds recorded cgroups again, all in one look.
    pub(crate) fn census(&self) -> Census<'_> {
        Census { hierarchy: self, all: OnceCell::new() }
    }

    /// The cgroup that this process is in; the root, too.
    ///
    /// # Errors
    /// If `/proc` cannot be read.
    pub fn own(&self) -> Result<PathBuf, Error> {
        let path = "/proc/self/cgroup";
        let text = fs::read_to_string(path).map_err(Error::file("read", path))?;
        let own = text.lines().find_map(|line| line.strip_prefix("0::/")).ok_or(Error::NoCgroup2)?;
        Ok(self.mount.join(own))
    }

    /// The cgroup of the pod with this UID.
    ///
    /// # Errors
    /// If there is none.
    pub fn pod(&self, uid: &str) -> Result<Cgroup, Error> {
        let missing = || Error::NoSuchCgroup { name: uid.to_owned(), below: self.mount.clone() };
        let names = [format!("pod{uid}"), format!("-pod{}.slice", uid.replace('-', "_"))];
        let [cgroupfs, systemd] = &names;
        let found = find(&self.mount, DEPTH, |name| name == cgroupfs || name.ends_with(systemd.as_str()));
        self.cgroup(&found.ok_or_else(missing)?)
    }

    /// The cgroup of the container with this id in the pod's.
    ///
    /// # Errors
    /// If there is none.
    pub fn container(&self, pod: &Cgroup, id: &str) -> Result<Cgroup, Error> {
        let missing = || Error::NoSuchCgroup { name: id.to_owned(), below: pod.path.clone() };
        let found = find(&pod.path, 1, |name| is_container(name, id));
        self.cgroup(&found.ok_or_else(missing)?)
    }
}

impl Census<'_> {
    /// Where a cgroup is; nothing, if it is gone.
    pub(crate) fn find(&self, cgroup: &Cgroup) -> Option<PathBuf> {
        if cgroup.is_there() {
            return Some(cgroup.path.clone());
        }
        self.below(cgroup.id)
    }

    fn below(&self, id: u64) -> Option<PathBuf> {
        let all = self.all.get_or_init(|| {
            let levels = Levels { level: vec![self.hierarchy.mount.clone()] };
            levels.flatten().map(|entry| (entry.ino(), entry.path())).collect()
        });
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

/// Network namespaces of the processes in a cgroup.
#[derive(Debug, Default)]
pub struct Namespaces {
    /// Each by its inode and a path by which it can be opened for as long as the process lives, the oldest one in it.
    /// That of the oldest of all is the first: a pod begins in its own, and what comes later may have made another for
    /// itself, as sandboxes of browsers do.
    pub found: Vec<(u64, PathBuf)>,
    /// Why there may be others.
    pub unseen: Option<Error>,
}

/// What is seen of processes: by when they began and their number, the namespace of each.
#[derive(Default)]
struct Processes {
    seen: BTreeMap<(u64, u32), (u64, PathBuf)>,
    unseen: Option<Error>,
}

/// Network namespaces of the processes in a cgroup and below it.
pub fn namespaces(cgroup: &Path) -> Namespaces {
    let mut processes = Processes::default();
    let mut folders = vec![cgroup.to_owned()];
    while let Some(folder) = folders.pop() {
        // A folder may go while we look, and one of threads lists no processes; those are listed above.
        let listed = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
        for process in listed.lines().filter_map(|number| number.parse().ok()) {
            processes.add(&folder, process);
        }
        let below = fs::read_dir(&folder).into_iter().flatten().flatten();
        let below = below.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        folders.extend(below.map(|entry| entry.path()));
    }
    let Processes { seen, unseen } = processes;
    let mut known = HashSet::new();
    let found = seen.into_values().filter(|(inode, _)| known.insert(*inode)).collect();
    Namespaces { found, unseen }
}

impl Namespaces {
    /// Whether the one with this inode is among them.
    pub(crate) fn has(&self, inode: u64) -> bool {
        self.found.iter().any(|(found, _)| *found == inode)
    }
}

impl Processes {
    fn add(&mut self, folder: &Path, number: u32) {
        // So the kernel writes a process that has no number here.
        if number == 0 {
            self.unseen = Some(Error::OtherPids(folder.to_owned()));
            return;
        }
        let process = Path::new("/proc").join(number.to_string());
        let path = process.join("ns/net");
        match fs::metadata(&path) {
            Ok(namespace) => {
                let began = fs::read_to_string(process.join("stat")).ok();
                // One that ends while we look is nobody's oldest.
                let began = began.as_deref().and_then(began_at).unwrap_or(u64::MAX);
                self.seen.insert((began, number), (namespace.ino(), path));
            }
            // It ended while we looked: then it has no namespace any more.
            Err(error) if gone(&error) => {}
            Err(error) => {
                let error = privilege::explain_process("find network namespace", &path, error);
                self.unseen = Some(error);
            }
        }
    }
}

/// When a process began, in ticks since the machine did, by its `/proc/PID/stat` (`proc(5)`, field 22).
fn began_at(stat: &str) -> Option<u64> {
    // The second field is the program's name, with whatever is in it.
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_whitespace().nth(19)?.parse().ok()
}

/// Whether an error of `/proc` says that there is no such process.
fn gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(Errno::ESRCH as i32)
}

/// Whether a folder is that of a container, and not of the monitor that the runtime runs beside it.
fn is_container(name: &str, id: &str) -> bool {
    let name = name.strip_suffix(".scope").unwrap_or(name);
    let Some(runtime) = name.strip_suffix(id) else { return false };
    runtime.is_empty() || runtime.strip_suffix('-').is_some_and(|runtime| !runtime.ends_with("conmon"))
}

/// The mount point of the first cgroup2 file system in a `mountinfo`.
fn mount(mountinfo: &str) -> Option<PathBuf> {
    mountinfo.lines().find_map(|line| {
        let (mount, fs) = line.split_once(" - ")?;
        let point = mount.split(' ').nth(4)?;
        fs.starts_with("cgroup2 ").then(|| PathBuf::from(point.replace("\\040", " ")))
    })
}

/// Folders below a folder, level by level.
struct Levels {
    level: Vec<PathBuf>,
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

/// The first folder, breadth first, whose name `matches`.
fn find(root: &Path, depth: usize, matches: impl Fn(&str) -> bool) -> Option<PathBuf> {
    let levels = Levels { level: vec![root.to_owned()] };
    let mut folders = levels.take(depth).flatten();
    let found = folders.find(|entry| entry.file_name().to_str().is_some_and(&matches));
    found.map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "4b2f7a1e-93c1-4f6e-9d61-0f4b6f1f2a3b";
    const UID_SYSTEMD: &str = "4b2f7a1e_93c1_4f6e_9d61_0f4b6f1f2a3b";
    const CONTAINER: &str = "7c1f0e9d";

    fn pod_is_found_at(folder: &str) {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("system.slice/ssh.service")).unwrap();
        fs::create_dir_all(root.path().join("kubepods/podffffffff-0000-0000-0000-000000000000")).unwrap();
        fs::create_dir_all(root.path().join(folder)).unwrap();
        let names = [format!("pod{UID}"), format!("-pod{UID_SYSTEMD}.slice")];
        let found = find(root.path(), DEPTH, |name| name == names[0] || name.ends_with(&names[1]));
        assert_eq!(found, Some(root.path().join(folder)));
    }

    #[test]
    fn a_pod_is_found_under_the_cgroupfs_driver() {
        pod_is_found_at(&format!("kubepods/burstable/pod{UID}"));
        pod_is_found_at(&format!("kubepods/besteffort/pod{UID}"));
    }

    #[test]
    fn a_pod_is_found_under_the_systemd_driver() {
        pod_is_found_at(&format!("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_SYSTEMD}.slice"));
    }

    #[test]
    fn a_guaranteed_pod_has_no_folder_for_its_class() {
        pod_is_found_at(&format!("kubepods/pod{UID}"));
        pod_is_found_at(&format!("kubepods.slice/kubepods-pod{UID_SYSTEMD}.slice"));
    }

    #[test]
    fn a_pod_is_found_below_a_kubelet_in_a_container() {
        pod_is_found_at(&format!("kubelet/kubepods/burstable/pod{UID}"));
        pod_is_found_at(&format!(
            "system.slice/docker-1.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod{UID_SYSTEMD}.slice"
        ));
    }

    #[test]
    fn a_container_is_found_under_both_drivers_and_every_runtime() {
        for name in ["7c1f0e9d", "cri-containerd-7c1f0e9d.scope", "crio-7c1f0e9d.scope", "crio-7c1f0e9d"] {
            assert!(is_container(name, CONTAINER), "{name}");
        }
        assert!(is_container("docker-7c1f0e9d.scope", CONTAINER));
    }

    #[test]
    fn a_containers_monitor_is_not_the_container() {
        for name in ["crio-conmon-7c1f0e9d.scope", "crio-conmon-7c1f0e9d", "libpod-conmon-7c1f0e9d.scope"] {
            assert!(!is_container(name, CONTAINER), "{name}");
        }
        for name in ["7c1f0e9d0", "07c1f0e9d", "crio-7c1f0e9d0.scope", "crio-7c1f0e9.scope", ""] {
            assert!(!is_container(name, CONTAINER), "{name}");
        }
    }

    #[test]
    fn cgroup2_is_found_on_pure_and_on_hybrid_machines() {
        let pure = "31 24 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
        assert_eq!(mount(pure), Some(PathBuf::from("/sys/fs/cgroup")));
        let hybrid = "30 24 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n33 30 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                      32 30 0:28 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
        assert_eq!(mount(hybrid), Some(PathBuf::from("/sys/fs/cgroup/unified")));
        assert_eq!(mount("33 30 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"), None);
    }

    #[test]
    fn when_a_process_began_is_read_whatever_it_is_called() {
        let fields: Vec<String> = (3..=52).map(|field| field.to_string()).collect();
        for name in ["pause", "a b", ") 1 (", ""] {
            assert_eq!(began_at(&format!("7 ({name}) {}\n", fields.join(" "))), Some(22));
        }
        assert_eq!(began_at("7 (pause) S 1"), None);
    }

    #[test]
    fn a_cgroup_that_is_gone_is_looked_for_once() {
        let root = tempfile::tempdir().unwrap();
        let hierarchy = Hierarchy { mount: root.path().to_owned() };
        let folder = root.path().join("kubepods/pod");
        fs::create_dir_all(&folder).unwrap();
        let id = fs::metadata(&folder).unwrap().ino();
        let elsewhere = Cgroup { path: PathBuf::from("/elsewhere/kubepods/pod"), id };
        let gone = Cgroup { path: folder.join("gone"), id: u64::MAX };
        let mut found = CgroupPaths::default();
        for looks in [true, false, false] {
            let census = hierarchy.census();
            assert_eq!(found.find(&census, &elsewhere), Some(folder.clone()));
            assert_eq!(found.find(&census, &gone), None);
            assert_eq!(census.all.get().is_some(), looks);
        }
        found.keep(&HashSet::from([id]));
        assert_eq!(found.0.len(), 1);
    }

    #[test]
    fn a_folder_elsewhere_is_not_a_cgroup() {
        let folder = tempfile::tempdir().unwrap();
        let hierarchy = Hierarchy { mount: PathBuf::from("/sys/fs/cgroup") };
        assert!(matches!(hierarchy.cgroup(folder.path()), Err(Error::NotACgroup { .. })));
    }
}

//! Finds the cgroup of a pod or of a container.
//!
//! On machines with cgroup v2 only, and on hybrid ones. Container runtimes name the folders in two ways, by driver:
//! cgroupfs `kubepods/burstable/pod<uid>/<id>`, systemd
//! `kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid with underscores>.slice/<runtime>-<id>.scope`.
//! Guaranteed pods have no folder for their class; below a kubelet in a container everything is nested once more. So
//! pods are found by their own folder's name, wherever it is.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::sys::statfs::{self, CGROUP2_SUPER_MAGIC};

use crate::Error;

mod census;

pub use census::Cgroup;
use census::Levels;
pub(crate) use census::{Census, CgroupPaths};

/// Levels below the root in which a pod is looked for: a node in a container in a node needs nine.
const DEPTH: usize = 12;

/// What the kernel calls the root of all cgroups, on every machine.
const ROOT: u64 = 1;

/// The cgroup2 file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    mount: PathBuf,
}

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
        Census::new(&self.mount)
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

/// The first folder, breadth first, whose name `matches`.
fn find(root: &Path, depth: usize, matches: impl Fn(&str) -> bool) -> Option<PathBuf> {
    let mut folders = Levels::below(root).take(depth).flatten();
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
    fn a_folder_elsewhere_is_not_a_cgroup() {
        let folder = tempfile::tempdir().unwrap();
        let hierarchy = Hierarchy { mount: PathBuf::from("/sys/fs/cgroup") };
        assert!(matches!(hierarchy.cgroup(folder.path()), Err(Error::NotACgroup { .. })));
    }
}

//! Reads files as the processes of a pod see them.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_intercept::namespaces;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use tokio::sync::Semaphore;
use tokio::{task, time};

/// Threads of one pod that read at a time: a file system of the pod may block them for ever.
const MAX_READERS: usize = 2;

/// A file that takes longer is none.
const DEADLINE: Duration = Duration::from_secs(2);

/// Different file systems that are looked into.
const MAX_ROOTS: usize = 16;

/// The file systems of a pod's containers.
#[derive(Clone, Debug)]
pub struct PodFiles {
    whose: Arc<FileOwner>,
    readers: Arc<Semaphore>,
}

#[derive(Debug)]
enum FileOwner {
    /// This process is in the pod. It sees its own container only; Kubernetes mounts what concerns the network into
    /// all.
    Own,
    /// Those of the processes in this cgroup.
    OfCgroup(PathBuf),
}

impl PodFiles {
    /// Those of this process.
    pub fn own() -> Self {
        Self::of(FileOwner::Own)
    }

    /// Those of the processes in a cgroup.
    pub fn of_cgroup(cgroup: PathBuf) -> Self {
        Self::of(FileOwner::OfCgroup(cgroup))
    }

    fn of(whose: FileOwner) -> Self {
        Self { whose: Arc::new(whose), readers: Arc::new(Semaphore::new(MAX_READERS)) }
    }

    /// The first of `paths` that is a file, and has at most `max_bytes`, in the oldest container that has any of them.
    ///
    /// # Errors
    /// If that takes too long.
    pub(super) async fn read(&self, paths: &'static [&'static str], max_bytes: usize) -> io::Result<Option<Vec<u8>>> {
        self.find(move |root| paths.iter().find_map(|path| read(root, path, max_bytes))).await
    }

    /// All of `paths`, in the oldest container that has them all.
    ///
    /// # Errors
    /// If that takes too long.
    pub(crate) async fn read_all<const N: usize>(
        &self,
        paths: [String; N],
        max_bytes: usize,
    ) -> io::Result<Option<Vec<Vec<u8>>>> {
        self.find(move |root| paths.iter().map(|path| read(root, path, max_bytes)).collect()).await
    }

    /// What is found first in the root of a container, the oldest one first.
    async fn find<T: Send + 'static>(
        &self,
        in_root: impl Fn(&File) -> Option<T> + Send + 'static,
    ) -> io::Result<Option<T>> {
        let (whose, readers) = (self.whose.clone(), self.readers.clone());
        let found = async {
            let permit = readers.acquire_owned().await.map_err(io::Error::other)?;
            let found = task::spawn_blocking(move || {
                let found = whose.roots().iter().find_map(|root| in_root(&root.open()?));
                drop(permit);
                found
            });
            found.await.map_err(io::Error::other)
        };
        time::timeout(DEADLINE, found).await.map_err(io::Error::from).flatten()
    }
}

impl FileOwner {
    /// The oldest process's first.
    fn roots(&self) -> Vec<Root> {
        match self {
            Self::Own => vec![Root { folder: PathBuf::from("/"), namespace: None }],
            Self::OfCgroup(cgroup) => roots(cgroup),
        }
    }
}

/// The root of a container's file system.
struct Root {
    folder: PathBuf,
    /// The link to the mount namespace of the process by which it was found, and where that led.
    namespace: Option<(PathBuf, PathBuf)>,
}

impl Root {
    /// `None` where the process is gone: its PID may be another's by now.
    fn open(&self) -> Option<File> {
        let flags = (OFlag::O_PATH | OFlag::O_DIRECTORY).bits();
        let folder = OpenOptions::new().read(true).custom_flags(flags).open(&self.folder).ok()?;
        let is_same = |(link, led): &(PathBuf, PathBuf)| fs::read_link(link).is_ok_and(|leads| leads == *led);
        self.namespace.as_ref().is_none_or(is_same).then_some(folder)
    }
}

/// The roots of the processes in a cgroup, the oldest process first. Those of containers differ.
fn roots(cgroup: &Path) -> Vec<Root> {
    let mut roots: Vec<Root> = Vec::new();
    for process in namespaces::processes(cgroup) {
        let link = process.join("ns/mnt");
        let Ok(mounts) = fs::read_link(&link) else { continue };
        if roots.len() == MAX_ROOTS {
            break;
        }
        if roots.iter().all(|root| root.namespace.as_ref().is_none_or(|(_, known)| *known != mounts)) {
            roots.push(Root { folder: process.join("root"), namespace: Some((link, mounts)) });
        }
    }
    roots
}

/// Links are resolved within the root: what the pod wrote must not lead to our files.
fn read(root: &File, path: &str, max_bytes: usize) -> Option<Vec<u8>> {
    let how = OpenHow::new()
        // A pipe must not block.
        .flags(OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK | OFlag::O_NOCTTY)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let file = File::from(openat2(root, path, how).ok()?);
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    let limit = u64::try_from(max_bytes).unwrap_or(u64::MAX);
    let read = file.take(limit.saturating_add(1)).read_to_end(&mut bytes).ok()?;
    (read <= max_bytes).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    #[test]
    fn a_link_leads_nowhere_outside_the_root() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        fs::create_dir_all(root.join("etc")).unwrap();
        fs::write(folder.path().join("secret"), "ours").unwrap();
        fs::write(root.join("secret"), "the pod's").unwrap();
        fs::write(root.join("etc/hosts"), "hosts").unwrap();
        symlink("/secret", root.join("absolute")).unwrap();
        symlink("../../../secret", root.join("etc/above")).unwrap();
        symlink(folder.path().join("secret"), root.join("outside")).unwrap();
        mkfifo(&root.join("pipe"), Mode::S_IRWXU).unwrap();
        let root = Root { folder: root, namespace: None }.open().unwrap();
        let text = |path: &str| read(&root, path, 9).map(|bytes| String::from_utf8(bytes).unwrap());
        assert_eq!(text("etc/hosts").as_deref(), Some("hosts"));
        assert_eq!(text("/etc/hosts").as_deref(), Some("hosts"));
        assert_eq!(text("absolute").as_deref(), Some("the pod's"));
        assert_eq!(text("etc/above").as_deref(), Some("the pod's"));
        for path in ["outside", "pipe", "etc", "none"] {
            assert_eq!(text(path), None, "{path}");
        }
        assert_eq!(read(&root, "etc/hosts", 4), None, "too long");
    }

    #[tokio::test]
    async fn the_first_file_that_is_there_is_read() {
        static PATHS: [&str; 3] = ["/proc/self/nowhere", "/proc/self/cmdline", "/proc/version"];
        let read = PodFiles::own().read(&PATHS, 1 << 20).await.unwrap();
        assert_eq!(read, Some(fs::read("/proc/self/cmdline").unwrap()));
    }
}

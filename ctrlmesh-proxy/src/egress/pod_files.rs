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
        let (whose, readers) = (self.whose.clone(), self.readers.clone());
        let read = async {
            let permit = readers.acquire_owned().await.map_err(io::Error::other)?;
            let read = task::spawn_blocking(move || {
                let read = whose.read(paths, max_bytes);
                drop(permit);
                read
            });
            read.await.map_err(io::Error::other)
        };
        time::timeout(DEADLINE, read).await.map_err(io::Error::from).flatten()
    }
}

impl FileOwner {
    fn read(&self, paths: &[&str], max_bytes: usize) -> Option<Vec<u8>> {
        let roots = match self {
            Self::Own => vec![PathBuf::from("/")],
            Self::OfCgroup(cgroup) => roots(cgroup),
        };
        let in_root = |root: &PathBuf| paths.iter().find_map(|path| read(root, path, max_bytes));
        roots.iter().find_map(in_root)
    }
}

/// The roots of the processes in a cgroup, the oldest process first. Those of containers differ.
fn roots(cgroup: &Path) -> Vec<PathBuf> {
    let mut known = Vec::new();
    let mut roots = Vec::new();
    for process in namespaces::processes(cgroup) {
        let Ok(mounts) = fs::read_link(process.join("ns/mnt")) else { continue };
        if roots.len() == MAX_ROOTS {
            break;
        }
        if !known.contains(&mounts) {
            known.push(mounts);
            roots.push(process.join("root"));
        }
    }
    roots
}

/// Links are resolved within the root: what the pod wrote must not lead to our files.
fn read(root: &Path, path: &str, max_bytes: usize) -> Option<Vec<u8>> {
    let folder = OpenOptions::new().read(true).custom_flags((OFlag::O_PATH | OFlag::O_DIRECTORY).bits()).open(root);
    let how = OpenHow::new()
        // A pipe must not block.
        .flags(OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK | OFlag::O_NOCTTY)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let file = File::from(openat2(folder.ok()?, path, how).ok()?);
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

//! Watches the kubelet's cgroups for pods and containers that come and go.
//!
//! The kernel tells of folders that are made and removed in the kubelet's part of the cgroup tree, as either driver
//! lays it out (`cgroup.rs`): the part itself, the classes in it, the pods in those; what is in a container is its own
//! affair. Where the kernel cannot, the looks that are taken anyway have to do.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io, thread};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tracing::warn;

/// Levels below the root in which the kubelet's part is looked for.
const DEPTH: usize = 10;

/// Folders that come and go.
const CHANGES: AddWatchFlags = AddWatchFlags::IN_CREATE
    .union(AddWatchFlags::IN_DELETE)
    .union(AddWatchFlags::IN_ONLYDIR)
    .union(AddWatchFlags::IN_DONT_FOLLOW);

/// What the kernel tells.
pub(super) struct CgroupWatch {
    mount: PathBuf,
    told: Option<Told>,
    folders: HashMap<WatchDescriptor, PathBuf>,
}

struct Told {
    inotify: Arc<Inotify>,
    events: UnboundedReceiver<Vec<InotifyEvent>>,
}

impl CgroupWatch {
    /// Begins to watch the cgroups below `mount`.
    pub(super) fn new(mount: &Path) -> Self {
        let told = Told::begin().inspect_err(|error| {
            warn!(error = error as &dyn std::error::Error, "pods are noticed by looking only");
        });
        let mut this = Self { mount: mount.to_owned(), told: told.ok(), folders: HashMap::new() };
        this.find();
        this
    }

    /// Whether nothing is told, and somebody has to look.
    pub(super) fn is_blind(&self) -> bool {
        self.folders.is_empty()
    }

    /// Looks for the kubelet's part, where it was not there before.
    pub(super) fn find(&mut self) {
        if self.is_blind() && self.told.is_some() {
            let mut level = vec![self.mount.clone()];
            for _ in 0..DEPTH {
                let folders: Vec<PathBuf> =
                    level.iter().flat_map(|folder| folders(folder)).collect();
                let (kubelets, others) = folders.into_iter().partition(|path| is_kubelets(path));
                let kubelets: Vec<PathBuf> = kubelets;
                for folder in kubelets {
                    self.watch(folder);
                }
                level = others;
            }
        }
    }

    /// Completes when folders have come or gone.
    pub(super) async fn news(&mut self) {
        let events = match &mut self.told {
            Some(told) => told.events.recv().await,
            None => std::future::pending().await,
        };
        let Some(events) = events else {
            // Whoever read them has said why.
            return (self.told, self.folders) = (None, HashMap::new());
        };
        for event in &events {
            self.take(event);
        }
    }

    fn take(&mut self, event: &InotifyEvent) {
        if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
            // What was missed is found again from the top.
            self.folders.clear();
            return self.find();
        }
        if event.mask.contains(AddWatchFlags::IN_IGNORED) {
            self.folders.remove(&event.wd);
        }
        if event.mask.contains(AddWatchFlags::IN_CREATE | AddWatchFlags::IN_ISDIR)
            && let (Some(folder), Some(name)) = (self.folders.get(&event.wd), &event.name)
            && !is_pods(folder)
        {
            self.watch(folder.join(name));
        }
    }

    /// Watches a folder, and those in it down to the pods'.
    fn watch(&mut self, folder: PathBuf) {
        let Some(told) = &self.told else { return };
        match told.inotify.add_watch(&folder, CHANGES) {
            Ok(watch) => drop(self.folders.insert(watch, folder.clone())),
            // It is gone already.
            Err(Errno::ENOENT) => return,
            Err(errno) => {
                let error = io::Error::from(errno);
                return warn!(folder = %folder.display(), error = &error as &dyn std::error::Error, "not watched");
            }
        }
        // What was made in it before it was watched.
        if !is_pods(&folder) {
            for below in folders(&folder) {
                self.watch(below);
            }
        }
    }
}

impl Told {
    fn begin() -> io::Result<Self> {
        let inotify = Arc::new(Inotify::init(InitFlags::IN_CLOEXEC)?);
        let (sender, events) = mpsc::unbounded_channel();
        let reading = inotify.clone();
        thread::Builder::new()
            .name("cgroup_watch".to_owned())
            .spawn(move || read(&reading, &sender))?;
        Ok(Self { inotify, events })
    }
}

/// On a thread of its own, for reading waits. It ends with the first event that nobody wants.
fn read(inotify: &Inotify, events: &UnboundedSender<Vec<InotifyEvent>>) {
    loop {
        match inotify.read_events() {
            Ok(read) => {
                if events.send(read).is_err() {
                    return;
                }
            }
            Err(Errno::EINTR) => {}
            Err(errno) => {
                let error = io::Error::from(errno);
                let error = &error as &dyn std::error::Error;
                return warn!(error, "pods are noticed by looking only");
            }
        }
    }
}

/// Whether it is the top of the kubelet's part.
fn is_kubelets(folder: &Path) -> bool {
    name(folder).contains("kubepods")
}

/// Whether it is a pod's: `pod<uid>`, or `kubepods-burstable-pod<uid>.slice`.
fn is_pods(folder: &Path) -> bool {
    let name = name(folder);
    name.starts_with("pod") || name.contains("-pod")
}

fn name(folder: &Path) -> &str {
    folder.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

fn folders(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tempfile::TempDir;
    use tokio::time;

    use super::*;

    const UID: &str = "4b2f7a1e-93c1-4f6e-9d61-0f4b6f1f2a3b";

    async fn told(cgroup_watch: &mut CgroupWatch) {
        time::timeout(Duration::from_secs(30), cgroup_watch.news()).await.expect("to be told");
    }

    async fn is_seen(class: &str, pod: &str, container: &str) {
        let root = TempDir::new().unwrap();
        fs::create_dir_all(root.path().join("system.slice/ssh.service")).unwrap();
        let class = root.path().join(class);
        fs::create_dir_all(&class).unwrap();
        let mut cgroup_watch = CgroupWatch::new(root.path());
        assert!(!cgroup_watch.is_blind());
        // A pod that was there with its container before it was watched, and one that was not.
        let pod = class.join(pod);
        fs::create_dir_all(pod.join(container)).unwrap();
        told(&mut cgroup_watch).await;
        assert!(
            cgroup_watch.folders.values().any(|folder| *folder == pod),
            "{:?}",
            cgroup_watch.folders
        );
        fs::create_dir(pod.join("another")).unwrap();
        told(&mut cgroup_watch).await;
        assert!(
            cgroup_watch.folders.values().all(|folder| !folder.starts_with(pod.join(container)))
        );
        let watched = cgroup_watch.folders.len();
        fs::remove_dir(pod.join("another")).unwrap();
        fs::remove_dir(pod.join(container)).unwrap();
        fs::remove_dir(&pod).unwrap();
        while cgroup_watch.folders.len() == watched {
            told(&mut cgroup_watch).await;
        }
    }

    #[tokio::test]
    async fn pods_and_containers_are_seen_under_both_drivers() {
        is_seen("kubepods/burstable", &format!("pod{UID}"), "7c1f0e9d").await;
        let uid = UID.replace('-', "_");
        let pod = format!("kubepods-burstable-pod{uid}.slice");
        let class = "kubepods.slice/kubepods-burstable.slice";
        is_seen(class, &pod, "cri-containerd-7c1f0e9d.scope").await;
        is_seen("kubepods.slice", &format!("kubepods-pod{uid}.slice"), "crio-7c1f0e9d.scope").await;
        is_seen(
            "a/kubelet.slice/kubelet-kubepods.slice",
            &format!("kubelet-kubepods-pod{uid}.slice"),
            "x.scope",
        )
        .await;
    }

    #[tokio::test]
    async fn a_kubelet_that_comes_later_is_found_by_looking() {
        let root = TempDir::new().unwrap();
        let mut cgroup_watch = CgroupWatch::new(root.path());
        assert!(cgroup_watch.is_blind());
        fs::create_dir_all(root.path().join("kubepods/besteffort")).unwrap();
        cgroup_watch.find();
        assert_eq!(cgroup_watch.folders.len(), 2);
    }
}

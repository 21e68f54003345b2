//! Watches the kubelet's cgroups for pods and containers that come and go.
//!
//! Inotify reports the folders that are made and removed in the kubelet's part of the cgroup tree, down to the pods.
//! Both cgroup drivers are understood. Folders inside containers are not watched. Where inotify fails, the reconciler's
//! polling finds pods instead.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io, thread};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tracing::warn;

/// The kubelet's part is searched in so many levels below the root.
const DEPTH: usize = 10;

/// Creation and removal of folders.
const CHANGES: AddWatchFlags = AddWatchFlags::IN_CREATE
    .union(AddWatchFlags::IN_DELETE)
    .union(AddWatchFlags::IN_ONLYDIR)
    .union(AddWatchFlags::IN_DONT_FOLLOW);

/// The watched folders, and the events that come from them.
pub(super) struct CgroupWatch {
    mount: PathBuf,
    /// `None` where inotify failed.
    events: Option<KernelEvents>,
    folders: HashMap<WatchDescriptor, PathBuf>,
}

struct KernelEvents {
    inotify: Arc<Inotify>,
    queue: UnboundedReceiver<Vec<InotifyEvent>>,
}

impl CgroupWatch {
    /// Begins to watch the cgroups below `mount`.
    pub(super) fn new(mount: &Path) -> Self {
        let events = KernelEvents::begin().inspect_err(|error| {
            warn!(error = error as &dyn std::error::Error, "pods are noticed by looking only");
        });
        let (mount, events) = (mount.to_owned(), events.ok());
        let mut this = Self { mount, events, folders: HashMap::new() };
        this.find();
        this
    }

    /// Whether no folder is watched, so that only polling finds pods.
    pub(super) fn is_blind(&self) -> bool {
        self.folders.is_empty()
    }

    /// Searches the kubelet's part, unless it was found before.
    pub(super) fn find(&mut self) {
        if self.is_blind() && self.events.is_some() {
            let mut level = vec![self.mount.clone()];
            for _ in 0..DEPTH {
                let folders: Vec<PathBuf> = level.iter().flat_map(|folder| folders(folder)).collect();
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
    pub(super) async fn wait_for_change(&mut self) {
        let events = match &mut self.events {
            Some(events) => events.queue.recv().await,
            None => std::future::pending().await,
        };
        let Some(events) = events else {
            // The reading thread has logged why it ended.
            return (self.events, self.folders) = (None, HashMap::new());
        };
        for event in &events {
            self.take(event);
        }
    }

    fn take(&mut self, event: &InotifyEvent) {
        if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
            // Events were lost: search again from the top.
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
        let Some(events) = &self.events else { return };
        match events.inotify.add_watch(&folder, CHANGES) {
            Ok(watch) => drop(self.folders.insert(watch, folder.clone())),
            // The folder is gone already.
            Err(Errno::ENOENT) => return,
            Err(errno) => {
                let error = io::Error::from(errno);
                return warn!(folder = %folder.display(), error = &error as &dyn std::error::Error, "not watched");
            }
        }
        // Folders that were made in it before it was watched.
        if !is_pods(&folder) {
            for below in folders(&folder) {
                self.watch(below);
            }
        }
    }
}

impl KernelEvents {
    fn begin() -> io::Result<Self> {
        let inotify = Arc::new(Inotify::init(InitFlags::IN_CLOEXEC)?);
        let (sender, queue) = mpsc::unbounded_channel();
        let reading = inotify.clone();
        thread::Builder::new().name("cgroup_watch".to_owned()).spawn(move || read(&reading, &sender))?;
        Ok(Self { inotify, queue })
    }
}

/// Runs on a thread of its own, because reading blocks. Ends with the first event after the receiver is gone.
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

/// Whether `folder` is the top of the kubelet's part.
fn is_kubelets(folder: &Path) -> bool {
    name(folder).contains("kubepods")
}

/// Whether `folder` is a pod's: `pod<uid>`, or `kubepods-burstable-pod<uid>.slice`.
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

    async fn next_change(cgroup_watch: &mut CgroupWatch) {
        time::timeout(Duration::from_secs(30), cgroup_watch.wait_for_change()).await.expect("an event");
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
        next_change(&mut cgroup_watch).await;
        assert!(cgroup_watch.folders.values().any(|folder| *folder == pod), "{:?}", cgroup_watch.folders);
        fs::create_dir(pod.join("another")).unwrap();
        next_change(&mut cgroup_watch).await;
        assert!(cgroup_watch.folders.values().all(|folder| !folder.starts_with(pod.join(container))));
        let watched = cgroup_watch.folders.len();
        fs::remove_dir(pod.join("another")).unwrap();
        fs::remove_dir(pod.join(container)).unwrap();
        fs::remove_dir(&pod).unwrap();
        while cgroup_watch.folders.len() == watched {
            next_change(&mut cgroup_watch).await;
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
        is_seen("a/kubelet.slice/kubelet-kubepods.slice", &format!("kubelet-kubepods-pod{uid}.slice"), "x.scope").await;
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

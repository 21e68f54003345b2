//! Watches the kubelet's cgroups for pods and containers that come and go.
//!
//! Inotify reports the folders that are made and removed in the kubelet's part of the cgroup tree, down to the pods.
//! Both cgroup drivers are understood. Folders inside containers are not watched. Where inotify fails, the reconciler's
//! polling finds pods instead.
//!
//! The kernel also says when no process of a container is left (`populated` in `cgroup.events`, `cgroups(7)`): a second
//! or more before the kubelet does, which looks once a second.

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io, thread};

use ctrlmesh_common::wire::MAX_ENDED;
use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tracing::warn;

/// The kubelet's part is searched in so many levels below the root.
const DEPTH: usize = 10;

/// Where the kernel says whether a cgroup has processes.
const EVENTS: &str = "cgroup.events";

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
    containers: HashMap<WatchDescriptor, Container>,
    /// IDs of containers that have ended, the latest last, by the folder of their pod.
    ended: HashMap<PathBuf, VecDeque<String>>,
}

/// A container whose end is watched for.
struct Container {
    folder: PathBuf,
    /// Whether there was a process in it. Its folder is made before its first process.
    has_run: bool,
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
        let (folders, containers, ended) = (HashMap::new(), HashMap::new(), HashMap::new());
        let mut this = Self { mount, events, folders, containers, ended };
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
            (self.folders, self.containers) = <_>::default();
            self.events = None;
            return;
        };
        for event in &events {
            self.take(event);
        }
    }

    fn take(&mut self, event: &InotifyEvent) {
        if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
            // Events were lost: search again from the top, and look at each container.
            let watches: Vec<WatchDescriptor> = self.containers.keys().copied().collect();
            for watch in watches {
                self.look(watch);
            }
            self.forget(|path| !path.exists());
            self.ended.retain(|pod, _| pod.exists());
            self.folders.clear();
            return self.find();
        }
        if event.mask.contains(AddWatchFlags::IN_MODIFY) {
            self.look(event.wd);
        }
        let (Some(folder), Some(name)) = (self.folders.get(&event.wd), &event.name) else { return };
        let (in_pod, of) = (is_pods(folder), folder.join(name));
        if event.mask.contains(AddWatchFlags::IN_CREATE | AddWatchFlags::IN_ISDIR) {
            if in_pod { self.watch_container(of) } else { self.watch(of) }
        } else if event.mask.contains(AddWatchFlags::IN_DELETE | AddWatchFlags::IN_ISDIR) {
            // Perhaps nobody has looked since its last process ended.
            let its = self.containers.iter().filter(|(_, container)| container.folder == of);
            let its: Vec<WatchDescriptor> = its.map(|(watch, _)| *watch).collect();
            for watch in its {
                self.look(watch);
            }
            self.forget(|path| path.starts_with(&of));
            self.ended.remove(&of);
        }
    }

    /// Ends the watches of these folders. A cgroup that is removed ends none by itself before Linux 7.1.
    fn forget(&mut self, is_gone: impl Fn(&Path) -> bool) {
        let Some(events) = &self.events else { return };
        let folders = self.folders.extract_if(|_, folder| is_gone(folder)).map(|(watch, _)| watch);
        let containers = self.containers.extract_if(|_, one| is_gone(&one.folder)).map(|(watch, _)| watch);
        for watch in folders.chain(containers) {
            // It may have ended by itself.
            let _gone = events.inotify.rm_watch(watch);
        }
    }

    /// IDs of the containers of the pod with this folder that have ended, the latest last.
    pub(super) fn ended(&self, pod: &Path) -> impl Iterator<Item = &String> {
        self.ended.get(pod).into_iter().flatten()
    }

    /// Where that fails, the kubelet says later that the container has ended.
    fn watch_container(&mut self, folder: PathBuf) {
        let Some(events) = &self.events else { return };
        if let Ok(watch) = events.inotify.add_watch(&folder.join(EVENTS), AddWatchFlags::IN_MODIFY) {
            let has_run = is_populated(&folder) == Some(true);
            self.containers.entry(watch).or_insert(Container { folder, has_run }).has_run |= has_run;
        }
    }

    /// Notes whether a container has ended.
    fn look(&mut self, watch: WatchDescriptor) {
        let Some(container) = self.containers.get_mut(&watch) else { return };
        let Some(runs) = is_populated(&container.folder) else { return };
        let has_ended = std::mem::replace(&mut container.has_run, runs) && !runs;
        let (Some(id), Some(pod)) = (container_id(&container.folder), container.folder.parent()) else { return };
        if runs {
            // It was empty for a moment only.
            self.ended.entry(pod.to_owned()).or_default().retain(|one| one != id);
        } else if has_ended {
            let ended = self.ended.entry(pod.to_owned()).or_default();
            ended.push_back(id.to_owned());
            if ended.len() > MAX_ENDED {
                ended.pop_front();
            }
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
        for below in folders(&folder) {
            if is_pods(&folder) { self.watch_container(below) } else { self.watch(below) }
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

/// Whether a process is in the cgroup or below it; not, where the cgroup is gone. `None`: that cannot be seen now.
fn is_populated(cgroup: &Path) -> Option<bool> {
    match fs::read_to_string(cgroup.join(EVENTS)) {
        Ok(events) => Some(events.lines().any(|line| line == "populated 1")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Some(false),
        Err(error) => (error.raw_os_error() == Some(Errno::ENODEV as i32)).then_some(false),
    }
}

/// The container's ID in the name of its folder: `ID`, `RUNTIME-ID` or `RUNTIME-ID.scope`. `None`: it is that of the
/// monitor which the runtime runs beside a container.
fn container_id(folder: &Path) -> Option<&str> {
    let name = name(folder);
    let name = name.strip_suffix(".scope").unwrap_or(name);
    let (runtime, id) = name.rsplit_once('-').unwrap_or(("", name));
    (!id.is_empty() && !runtime.ends_with("conmon")).then_some(id)
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
    async fn the_end_of_a_container_is_seen_once_it_has_run() {
        let root = TempDir::new().unwrap();
        let pod = root.path().join("kubepods").join(format!("pod{UID}"));
        let (first, later) = (pod.join("cri-containerd-7c1f.scope"), pod.join("8d2a"));
        let say = |container: &Path, populated: u8| {
            fs::write(container.join(EVENTS), format!("populated {populated}\nfrozen 0\n")).unwrap();
        };
        fs::create_dir_all(&first).unwrap();
        say(&first, 1);
        let mut cgroup_watch = CgroupWatch::new(root.path());
        let ended = |cgroup_watch: &CgroupWatch| cgroup_watch.ended(&pod).cloned().collect::<Vec<_>>();
        assert!(ended(&cgroup_watch).is_empty());
        say(&first, 0);
        while ended(&cgroup_watch).is_empty() {
            next_change(&mut cgroup_watch).await;
        }
        assert_eq!(ended(&cgroup_watch), ["7c1f"]);
        // One that begins is empty before it has a process. The kernel has the file there before the folder is seen.
        let made = root.path().join("made");
        fs::create_dir(&made).unwrap();
        say(&made, 0);
        fs::rename(&made, &later).unwrap();
        cgroup_watch.watch_container(later.clone());
        say(&later, 1);
        while !cgroup_watch.containers.values().any(|one| one.folder == later && one.has_run) {
            next_change(&mut cgroup_watch).await;
        }
        assert_eq!(ended(&cgroup_watch), ["7c1f"]);
        // Its folder goes before anybody has looked.
        fs::remove_dir_all(&later).unwrap();
        while ended(&cgroup_watch).len() == 1 {
            next_change(&mut cgroup_watch).await;
        }
        assert_eq!(ended(&cgroup_watch), ["7c1f", "8d2a"]);
        fs::remove_dir_all(&pod).unwrap();
        while !ended(&cgroup_watch).is_empty() {
            next_change(&mut cgroup_watch).await;
        }
    }

    #[test]
    fn the_id_of_a_container_is_read_under_both_drivers_and_that_of_a_monitor_is_not() {
        let id = |name: &str| container_id(Path::new("/kubepods/pod1").join(name).as_path()).map(str::to_owned);
        for name in ["7c1f", "crio-7c1f", "cri-containerd-7c1f.scope", "crio-7c1f.scope"] {
            assert_eq!(id(name).as_deref(), Some("7c1f"), "{name}");
        }
        assert_eq!([id("crio-conmon-7c1f.scope"), id("crio-conmon-7c1f"), id("crio-.scope")], [None, None, None]);
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

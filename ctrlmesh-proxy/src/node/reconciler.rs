//! Attaches, listens for, and lets go of pods, as the list says.
//!
//! It is attached in the kernel, gets a listener in its network namespace and a policy. In that order: from the first
//! step on a pod's connections are refused, and they pass as its policy says after the last; a pod that cannot be
//! served waits, refused or passed as it asked for, and is tried again. A pod that is gone, or no longer on the list,
//! is let go of.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task;
use tokio::time;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::cgroup_watch::CgroupWatch;
use super::enrolled_pod::{Complaint, EnrolledPod, Here, Serving};
use super::error::{NodeError, NotServed};
use super::heartbeat::HeartbeatThread;
use super::network::{self, InheritedListener, NetworkId, Networks};
use super::pod_list::{CgroupLocation, Pod, ServedBy};
use super::pod_source::{PodSource, Source};
use crate::metrics::Metrics;
use crate::net::accept::{Acceptor, PodSlot};
use crate::policy;
use crate::policy::PodName;
use crate::session::ServedPod;
use ctrlmesh_intercept::cgroup::Hierarchy;
use ctrlmesh_intercept::listener::Namespace;
use ctrlmesh_intercept::{
    Attach, Attachment, Heartbeat, Interceptor, ListenerCheck, Options, Slot, Targets,
};
use ctrlmesh_runtime::drain::Drain;

/// Whose the attachments are.
pub(super) const OWNER: &str = "node";

/// How old the proxy's last beat may be before it counts as hanging: twenty beats.
const BEAT_MAX_AGE: Duration = Duration::from_secs(5);

/// How soon it is looked again at pods that are only being started.
const SOON: Duration = Duration::from_millis(10);

/// For how long after a change of the list pods count as being started.
const STARTING: Duration = Duration::from_mins(1);

/// What is redirected, and where to.
pub(super) struct ReconcilerConfig {
    pub(super) targets: Targets,
    pub(super) port: u16,
    pub(super) pins: PathBuf,
    /// Folder in which it is kept what pods may have read; without it, that is known of no pod.
    pub(super) state: Option<PathBuf>,
}

/// Keeps the kernel, the listeners and the policies as the list of pods says.
pub(super) struct Reconciler {
    pod_source: PodSource,
    wanted: Arc<Vec<Pod>>,
    /// What we were told to redirect, and that with wherever else the API server is.
    told: Targets,
    targets: Targets,
    interceptor: Interceptor,
    heartbeat: HeartbeatThread,
    hierarchy: Hierarchy,
    cgroup_watch: CgroupWatch,
    networks: Networks,
    pods: HashMap<PodName, EnrolledPod>,
    served: BySlot,
    /// Whether the kernel may hold what nobody wants.
    untidy: bool,
    /// What each pod waits for, so that it is said once.
    complaints: HashMap<PodName, Complaint>,
    /// Until when pods that are not served yet are looked at often.
    hurry: Instant,
    state: Option<PathBuf>,
    metrics: Arc<Metrics>,
    drain: Drain,
}

/// Where pods are published, by the slot that a connection names.
pub type BySlot = watch::Sender<Arc<HashMap<PodSlot, ServedPod>>>;

impl Reconciler {
    /// Loads the kernel programs and reads the list for the first time.
    ///
    /// # Errors
    /// If the kernel does not let us, or there is no list.
    pub(super) fn open(
        source: Source,
        ReconcilerConfig { targets, port, pins, state }: ReconcilerConfig,
        acceptor: Acceptor,
        served: BySlot,
        drain: Drain,
    ) -> Result<Self, NodeError> {
        let (pod_source, wanted) = PodSource::open(source)?;
        let interceptor = Interceptor::open(Options { pins, ..Options::new(OWNER) })?;
        let originals = Arc::new(interceptor.originals()?);
        let heartbeat = HeartbeatThread::begin(interceptor.heartbeat_writer()?, &drain)
            .map_err(NodeError::Heartbeat)?;
        let metrics = acceptor.metrics.clone();
        let (open, inherited, here) = (HashMap::new(), HashMap::new(), drain.clone());
        let hierarchy = Hierarchy::find()?;
        Ok(Self {
            pod_source,
            wanted: Arc::new(wanted),
            told: targets.clone(),
            targets,
            interceptor,
            heartbeat,
            cgroup_watch: CgroupWatch::new(hierarchy.mount()),
            hierarchy,
            networks: Networks { acceptor, originals, port, drain: here, open, inherited },
            pods: HashMap::new(),
            served,
            untidy: true,
            complaints: HashMap::new(),
            hurry: Instant::now() + STARTING,
            state,
            metrics,
            drain,
        })
    }

    /// Completes when there may be something to do that need not wait for the next look.
    pub(super) async fn news(&mut self) {
        let hurries = self.hurries();
        tokio::select! {
            () = self.pod_source.news() => {}
            () = self.cgroup_watch.news() => {}
            () = time::sleep(SOON), if hurries => {}
        }
    }

    /// Looks for what is only found by looking.
    pub(super) fn look(&mut self) {
        self.cgroup_watch.find();
    }

    /// Whether it is known which pods there are, or at least some.
    pub(super) fn knows(&mut self) -> bool {
        self.refresh();
        self.pod_source.is_whole() || !self.wanted.is_empty()
    }

    /// What the next process is to listen with.
    pub(super) fn listeners(&self) -> io::Result<Vec<InheritedListener>> {
        self.networks.listeners()
    }

    /// Looks at everything for the first time, with what the process before this one listened with.
    pub(super) async fn inherit(&mut self, listeners: Vec<InheritedListener>) {
        let by_network = listeners.into_iter().map(|one| (one.network, one));
        self.networks.inherited = by_network.collect();
        self.pass().await;
        self.networks.settle();
    }

    /// Listens no more: the kernel refuses what comes, until another process listens.
    pub(super) fn close(&mut self) {
        self.networks.open.clear();
        self.heartbeat.stop();
    }

    /// Whether a pod is only being started, and nobody tells when it is.
    fn hurries(&self) -> bool {
        let serving = self.pods.values().filter(|pod| pod.serving.is_some()).count();
        let known = if self.cgroup_watch.is_blind() { self.wanted.len() } else { self.pods.len() };
        serving < known && Instant::now() < self.hurry
    }

    /// Looks at everything once.
    pub(super) async fn pass(&mut self) {
        self.refresh();
        self.let_go();
        let mut found: HashSet<PathBuf> = HashSet::new();
        for pod in self.wanted.clone().iter() {
            let before = self.pods.get(&pod.name).is_some_and(|pod| pod.serving.is_some());
            if !before {
                let served = self.serve(pod, &mut found);
                self.note(&pod.name, served);
                // Connections of other pods wait to be accepted on this thread.
                task::yield_now().await;
            }
        }
        found.extend(self.pods.values().map(|pod| pod.cgroup.path.clone()));
        if self.untidy && self.pod_source.is_whole() {
            self.untidy = self.tidy(&found).inspect_err(warn_of("tidy the kernel up")).is_err();
        }
        let serving = self.pods.values().filter(|pod| pod.serving.is_some()).count();
        self.metrics.pods(serving, self.wanted.len() - serving.min(self.wanted.len()));
    }

    /// Takes the list, where it may have changed.
    fn refresh(&mut self) {
        match self.pod_source.changed() {
            Some(Ok(wanted)) => {
                self.wanted = Arc::new(wanted);
                self.hurry = Instant::now() + STARTING;
            }
            Some(Err(error)) => {
                let error = format!("{:#}", anyhow::Error::from(error));
                warn!(error, "list of pods refused, the last one stays");
            }
            None => {}
        }
        if let Some(servers) = self.pod_source.moved() {
            self.retarget(self.told.and(&servers));
        }
    }

    /// Has the kernel redirect something else, of pods that are attached, too; one where that fails keeps what it had.
    fn retarget(&mut self, targets: Targets) {
        self.targets = targets;
        for (name, pod) in &mut self.pods {
            pod.attach.targets = self.targets.clone();
            if let Err(error) = self.interceptor.attach(&pod.attach) {
                let error = format!("{:#}", anyhow::Error::from(error));
                warn!(pod = %name, error, "redirect all that is the API server's");
            }
        }
    }

    /// Lets go of the pods that are no longer what or where they were; in the kernel, that is done after those that are
    /// still wanted were attached anew, so that nothing of theirs passes in between.
    fn let_go(&mut self) {
        let wanted: HashMap<&PodName, &Pod> =
            self.wanted.iter().map(|pod| (&pod.name, pod)).collect();
        let stale = self.pods.iter().filter(|(name, enrolled)| {
            wanted.get(name).is_none_or(|pod| **pod != enrolled.pod) || !enrolled.lives()
        });
        let stale: Vec<(PodName, bool)> =
            stale.map(|(name, _)| (name.clone(), wanted.contains_key(name))).collect();
        // Of a pod that comes back it is said anew.
        self.complaints.retain(|name, _| wanted.contains_key(name));
        for (name, is_wanted) in stale {
            if let Some(EnrolledPod { slot, serving, .. }) = self.pods.remove(&name) {
                info!(pod = %name, "pod is served no more");
                if !is_wanted && let Some(served) = self.served.borrow().get(&PodSlot(slot.get())) {
                    served.history.let_go();
                }
                self.end(slot, serving);
                self.metrics.forget(&name.to_string());
                self.complaints.remove(&name);
                self.untidy = true;
            }
        }
    }

    /// Attaches a pod and takes its connections, as far as that was not done before.
    fn serve(&mut self, pod: &Pod, found: &mut HashSet<PathBuf>) -> Result<(), NotServed> {
        let slot = match self.pods.get(&pod.name) {
            Some(enrolled) => enrolled.slot,
            None => self.enrol(pod, found)?,
        };
        let (serving, begun) = match &pod.served_by {
            ServedBy::Sidecar { container: None } => return Err(NotServed::NoSidecar),
            ServedBy::Sidecar { .. } => (Serving::Inside, Ok(())),
            ServedBy::Node => {
                let (file, network) = self.network(pod)?;
                let here = Here { network, file, gone: CancellationToken::new() };
                let begun = self.begin(pod, slot, &here);
                (Serving::Here(here), begun)
            }
        };
        if begun.is_err() {
            self.end(slot, Some(serving));
        } else if let Some(enrolled) = self.pods.get_mut(&pod.name) {
            enrolled.serving = Some(serving);
        }
        begun
    }

    /// The network namespace of a pod that is enrolled.
    fn network(&self, pod: &Pod) -> Result<(PathBuf, NetworkId), NotServed> {
        if let Some(file) = &pod.network {
            let id = NetworkId::of(file).map_err(NotServed::Network)?;
            return Ok((file.clone(), id));
        }
        let cgroup = self.pods.get(&pod.name).map(|enrolled| &enrolled.cgroup.path);
        let (found, unseen) = cgroup.map(|path| network::of_processes(path)).unwrap_or_default();
        // That of the oldest process: a later one may have gone into one of its own.
        let found = found.into_iter().next().map(|(id, file)| (file, id));
        found.ok_or_else(|| unseen.map_or(NotServed::NoNetwork, NotServed::Network))
    }

    fn enrol(&mut self, pod: &Pod, found: &mut HashSet<PathBuf>) -> Result<Slot, NotServed> {
        let cgroup = match &pod.place {
            CgroupLocation::Cgroup(path) => self.hierarchy.cgroup(path)?,
            CgroupLocation::Uid(uid) => self.hierarchy.pod(uid)?,
        };
        found.insert(cgroup.path.clone());
        let own = self.hierarchy.own()?;
        if own.starts_with(&cgroup.path) {
            return Err(ctrlmesh_intercept::Error::Inside(cgroup.path).into());
        }
        let beats = Heartbeat { number: None, max_age: BEAT_MAX_AGE };
        let mut except = pod.except.clone();
        let (listener, heartbeat) = match &pod.served_by {
            ServedBy::Node => (ListenerCheck::Held, Some(beats)),
            ServedBy::Sidecar { container } => {
                if let Some(id) = container {
                    except.push(self.hierarchy.container(&cgroup, id)?.path);
                }
                (ListenerCheck::Port, None)
            }
        };
        let attach = Attach {
            cgroup: cgroup.path.clone(),
            except,
            targets: self.targets.clone(),
            port: self.networks.port,
            fail_open: pod.fail_open,
            listener,
            heartbeat,
            report: false,
        };
        let slot = self.interceptor.attach(&attach)?;
        let enrolled = EnrolledPod { pod: pod.clone(), cgroup, attach, slot, serving: None };
        self.pods.insert(pod.name.clone(), enrolled);
        Ok(slot)
    }

    /// Takes a pod's connections: first who serves them, then who accepts them, then who sends them.
    fn begin(
        &mut self,
        pod: &Pod,
        slot: Slot,
        Here { network, file, gone }: &Here,
    ) -> Result<(), NotServed> {
        let policy = self.pod_source.policy(pod, &self.metrics, &self.drain, gone)?;
        let history = pod.history(self.state.as_deref());
        let served = ServedPod { policy, history, gone: Some(gone.clone()) };
        self.publish(|pods| drop(pods.insert(PodSlot(slot.get()), served)));
        let listener = self.networks.join(*network, file, slot)?;
        self.interceptor.beat(u32::from(slot.get()))?;
        self.heartbeat.join(slot);
        if let Some(listener) = listener {
            self.interceptor.listen(slot, listener)?;
        }
        // Without it the pod goes on over IPv4.
        let native =
            Namespace::open(file).and_then(|network| self.interceptor.serve_ipv6(slot, &network));
        if let Err(error) = native {
            info!(pod = %pod.name, error = &error as &dyn std::error::Error, "no IPv6 of our own");
        }
        Ok(())
    }

    /// Takes no more connections of a pod, and ends those that there are.
    fn end(&mut self, slot: Slot, serving: Option<Serving>) {
        let Some(Serving::Here(Here { network, gone, .. })) = serving else { return };
        self.heartbeat.leave(slot);
        self.publish(|pods| drop(pods.remove(&PodSlot(slot.get()))));
        self.networks.leave(network, slot);
        gone.cancel();
    }

    fn publish(&self, change: impl FnOnce(&mut HashMap<PodSlot, ServedPod>)) {
        self.served.send_modify(|pods| change(Arc::make_mut(pods)));
    }

    /// Detaches what nobody wants: pods that are gone, and those that a former process was told to serve.
    fn tidy(&mut self, found: &HashSet<PathBuf>) -> Result<(), ctrlmesh_intercept::Error> {
        policy::tidy(self.state.as_deref(), self.wanted.iter().map(|pod| &pod.name));
        self.interceptor.sweep()?;
        let attachments = self.interceptor.status()?.attachments.into_iter();
        let own = attachments.filter(|attachment| attachment.owner == OWNER);
        // What only cannot be seen from here is left for who does see it: what is gone was swept.
        let orphan = |one: &Attachment| one.alive && !found.contains(&one.cgroup);
        for orphan in own.filter(orphan) {
            self.interceptor.detach(&orphan.cgroup)?;
            info!(cgroup = %orphan.cgroup.display(), "detached");
        }
        Ok(())
    }

    /// Says what became of a pod, if that is news.
    fn note(&mut self, name: &PodName, served: Result<(), NotServed>) {
        let Err(error) = served else {
            self.complaints.remove(name);
            return info!(pod = %name, "pod is served");
        };
        let error = format!("{:#}", anyhow::Error::from(error));
        let complaint = self.complaints.entry(name.clone());
        if complaint.or_insert_with(|| Complaint::new(error.clone())).due(&error) {
            warn!(pod = %name, error, "pod cannot be served yet");
        }
    }
}

fn warn_of(doing: &'static str) -> impl FnOnce(&ctrlmesh_intercept::Error) {
    move |error| warn!(error = error as &dyn std::error::Error, doing, "the kernel does not let us")
}

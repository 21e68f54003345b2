//! Attaches, listens for, and releases pods, as the list says.
//!
//! A pod is attached in the kernel, then gets a listener in its network namespace and a policy. After the first step
//! its connections are refused; after the last they pass as the policy says. A pod that cannot be served is tried
//! again; meanwhile its connections are refused, or pass if it fails open. A pod that is gone, or no longer on the
//! list, is released.

mod targets;
mod serving;
mod webhooks;
mod bypasses;

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use ctrlmesh_common::wire::Ended;
use tokio::sync::watch;
use tokio::{task, time};
use tracing::{info, warn};

use super::bypass::BypassGuard;
use super::cgroup_watch::CgroupWatch;
use super::enrolled_pod::{Complaint, EnrolledPod};
use super::error::{NodeError, NotServed, warn_of};
use super::heartbeat::HeartbeatThread;
use super::inbound;
use super::network::{InheritedListener, Networks};
use super::pod_list::{CgroupLocation, Pod, ServedBy};
use super::pod_source::{PodSource, Source};
use crate::metrics::Metrics;
use crate::net::accept::{Acceptor, PodSlot};
use crate::policy::{self, PodName};
use crate::session::ServedPod;
use ctrlmesh_intercept::cgroup::Hierarchy;
use ctrlmesh_intercept::{Attach, Attachment, Heartbeat, Interceptor, ListenerCheck, Options, Slot, Targets};
use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::{telemetry, unix_time};

/// The owner of the node's attachments.
pub(super) const OWNER: &str = "node";

/// The proxy counts as hanging when its last heartbeat is older: sixty intervals. A machine that is short of
/// processors, or that its hypervisor stops for a moment, beats late; nine seconds were seen.
const BEAT_MAX_AGE: Duration = Duration::from_secs(15);

/// Between two passes while pods are being started.
const FAST_INTERVAL: Duration = Duration::from_millis(10);

/// Pods count as being started for so long after a change of the list.
const STARTING: Duration = Duration::from_mins(1);

/// Pods that the process before this one served are waited for so long where they cannot be served yet. Meanwhile their
/// connections wait, too.
const EXPECTED_WAIT: Duration = Duration::from_secs(10);

/// What the kernel redirects and where to, and the state folders.
pub(super) struct ReconcilerConfig {
    pub(super) targets: Targets,
    pub(super) port: u16,
    pub(super) pins: PathBuf,
    /// Folder of the pods' histories; without it, every history is unknown.
    pub(super) state: Option<PathBuf>,
    /// For writes to what a new policy takes away.
    pub(super) write_drain_timeout: Duration,
    /// Whether what pods send to the API server past the proxy is dropped.
    pub(super) drop_bypass: bool,
}

/// Keeps the kernel, the listeners and the policies as the list of pods says.
pub(super) struct Reconciler {
    pod_source: PodSource,
    wanted: Arc<Vec<Pod>>,
    /// The targets of the command line.
    configured_targets: Targets,
    /// The same, with the API server's other addresses.
    targets: watch::Sender<Targets>,
    interceptor: Interceptor,
    heartbeat: HeartbeatThread,
    hierarchy: Hierarchy,
    cgroup_watch: CgroupWatch,
    networks: Networks,
    /// For calls to webhooks.
    callers: Acceptor,
    pods: HashMap<PodName, EnrolledPod>,
    served: BySlot,
    /// Whether the kernel may hold attachments of pods that are not on the list.
    needs_cleanup: bool,
    /// What each pod waits for.
    complaints: HashMap<PodName, Complaint>,
    /// Until then, pods that are not served yet are tried often.
    fast_until: Instant,
    /// Until then, the pods of the process before this one are waited for. `None` before all were tried once.
    expected_until: Option<Instant>,
    /// When connections that are over were last forgotten.
    forgotten: Instant,
    state: Option<PathBuf>,
    write_drain_timeout: Duration,
    /// Absent where nothing is dropped.
    bypass: Option<BypassGuard>,
    /// When the addresses of pods were read last.
    addresses_read: Instant,
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
        config: ReconcilerConfig,
        acceptor: Acceptor,
        served: BySlot,
        drain: Drain,
    ) -> Result<Self, NodeError> {
        let ReconcilerConfig { targets, port, pins, state, write_drain_timeout, drop_bypass } = config;
        let (pod_source, wanted) = PodSource::open(source)?;
        let interceptor = Interceptor::open(Options { pins, ..Options::new(OWNER) })?;
        let originals = Arc::new(interceptor.originals()?);
        let heartbeat =
            HeartbeatThread::begin(interceptor.heartbeat_writer()?, &drain).map_err(NodeError::Heartbeat)?;
        let metrics = acceptor.metrics.clone();
        let (open, inherited, accepting) = (HashMap::new(), HashMap::new(), drain.clone());
        let hierarchy = Hierarchy::find()?;
        let bypass = drop_bypass.then(|| BypassGuard::new(OWNER, pod_source.bypass_reports(), metrics.clone()));
        Ok(Self {
            pod_source,
            wanted: Arc::new(wanted),
            configured_targets: targets.clone(),
            targets: watch::Sender::new(targets),
            interceptor,
            heartbeat,
            cgroup_watch: CgroupWatch::new(hierarchy.mount()),
            hierarchy,
            callers: acceptor.for_callers(inbound::MAX_CONNECTIONS),
            networks: Networks { acceptor, originals, port, drain: accepting, open, inherited },
            pods: HashMap::new(),
            served,
            needs_cleanup: true,
            complaints: HashMap::new(),
            fast_until: Instant::now() + STARTING,
            expected_until: Some(Instant::now()),
            forgotten: Instant::now(),
            state,
            write_drain_timeout,
            bypass,
            addresses_read: Instant::now(),
            metrics,
            drain,
        })
    }

    /// Completes when something may have changed.
    pub(super) async fn wait_for_change(&mut self) {
        let polls_fast = self.polls_fast();
        tokio::select! {
            () = self.pod_source.wait_for_change() => {}
            () = self.cgroup_watch.wait_for_change() => {}
            () = time::sleep(FAST_INTERVAL), if polls_fast => {}
        }
    }

    /// Searches for the kubelet's cgroups, if they were not found before.
    pub(super) fn find_cgroups(&mut self) {
        self.cgroup_watch.find();
    }

    /// Whether the list of pods is complete, or names at least some.
    pub(super) fn knows_pods(&mut self) -> bool {
        self.refresh();
        self.pod_source.is_whole() || !self.wanted.is_empty()
    }

    /// The listeners for the next process.
    pub(super) fn listeners(&self) -> io::Result<Vec<InheritedListener>> {
        self.networks.listeners()
    }

    /// Does the first pass, with the listeners of the process before this one. Heartbeats begin with the listeners:
    /// that process may end before all pods are served here.
    pub(super) async fn inherit(&mut self, listeners: Vec<InheritedListener>) {
        let by_network = listeners.into_iter().map(|one| (one.network, one));
        self.networks.inherited = by_network.collect();
        self.networks.expected().for_each(|slot| self.heartbeat.join(slot));
        self.expected_until = None;
        self.drop_nothing_unasked();
        self.pass().await;
        self.expected_until = Some(Instant::now() + EXPECTED_WAIT);
    }

    /// Waits no more for pods of the process before this one, once all are served that are on the list, or after some
    /// time.
    fn settle(&mut self, unserved: usize) {
        let all = self.pod_source.is_whole() && unserved == 0;
        if !all && self.expected_until.is_none_or(|until| Instant::now() < until) {
            return;
        }
        self.networks.expected().for_each(|slot| self.heartbeat.leave(slot));
        self.networks.settle();
    }

    /// Closes the listeners. The kernel refuses new connections until another process listens.
    pub(super) fn close(&mut self) {
        self.networks.close();
        self.heartbeat.stop();
    }

    /// Whether a pod is being started, of which no event may come.
    fn polls_fast(&self) -> bool {
        let serving = self.pods.values().filter(|pod| pod.serving.is_some()).count();
        let known = if self.cgroup_watch.is_blind() { self.wanted.len() } else { self.pods.len() };
        serving < known && Instant::now() < self.fast_until
    }

    /// Brings the kernel, the listeners and the policies in line with the list, once.
    pub(super) async fn pass(&mut self) {
        self.refresh();
        self.release_stale();
        let mut found: HashSet<PathBuf> = HashSet::new();
        for pod in self.wanted.clone().iter() {
            let before = self.pods.get(&pod.name).is_some_and(|pod| pod.serving.is_some());
            if !before {
                let served = self.serve(pod, &mut found);
                self.log_outcome(&pod.name, served);
                // Connections of other pods wait to be accepted on this thread.
                task::yield_now().await;
            }
        }
        let serving = self.pods.values().filter(|pod| pod.serving.is_some()).count();
        let unserved = self.wanted.len() - serving.min(self.wanted.len());
        self.settle(unserved);
        self.follow_targets();
        self.follow_webhooks();
        self.forget_connections();
        self.report_ended();
        self.follow_bypasses().await;
        found.extend(self.pods.values().map(|pod| pod.cgroup.path.clone()));
        if self.needs_cleanup && self.pod_source.is_whole() {
            self.needs_cleanup = self.clean_up(&found).inspect_err(warn_of("tidy the kernel up")).is_err();
        }
        self.metrics.pods(serving, unserved);
    }

    /// Takes the list and the API server's addresses, where they may have changed.
    fn refresh(&mut self) {
        match self.pod_source.changed() {
            Some(Ok(wanted)) => {
                self.wanted = Arc::new(wanted);
                self.fast_until = Instant::now() + STARTING;
            }
            Some(Err(error)) => {
                let error = telemetry::chain(&error);
                warn!(error, "list of pods refused, the last one stays");
            }
            None => {}
        }
        if let Some(servers) = self.pod_source.changed_servers() {
            self.retarget(self.configured_targets.and(&servers));
        }
    }

    /// Releases the pods that are gone or changed. The kernel's attachments are removed later, after pods that are
    /// still on the list were attached anew, so that nothing of theirs passes in between.
    fn release_stale(&mut self) {
        let wanted: HashMap<&PodName, &Pod> = self.wanted.iter().map(|pod| (&pod.name, pod)).collect();
        let stale = self.pods.iter().filter(|(name, enrolled)| {
            wanted.get(name).is_none_or(|pod| **pod != enrolled.pod) || !enrolled.is_current()
        });
        let stale: Vec<(PodName, bool)> = stale.map(|(name, _)| (name.clone(), wanted.contains_key(name))).collect();
        // A pod that comes back is logged again.
        self.complaints.retain(|name, _| wanted.contains_key(name));
        for (name, is_wanted) in stale {
            if let Some(EnrolledPod { slot, serving, .. }) = self.pods.remove(&name) {
                info!(pod = %name, "pod is served no more");
                if !is_wanted && let Some(served) = self.served.borrow().get(&PodSlot(slot.get())) {
                    served.history.record_release();
                }
                self.end(slot, serving);
                self.metrics.pods.forget(&name.to_string());
                self.complaints.remove(&name);
                self.needs_cleanup = true;
            }
        }
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
        let targets = self.pod_source.targets(pod);
        let attach = Attach {
            cgroup: cgroup.path.clone(),
            except,
            targets: self.targets.borrow().and_of_pod(&targets),
            port: self.networks.port,
            fail_open: pod.fail_open,
            listener,
            heartbeat,
            report: false,
        };
        let (attach, targets) = self.answerable(pod, attach, targets);
        let slot = self.interceptor.attach(&attach)?;
        let ended = (unix_time::millis(SystemTime::now()), self.pod_source.publish_ended(pod));
        let (pod, refused, serving) = (pod.clone(), None, None);
        let enrolled = EnrolledPod { pod, cgroup, attach, targets, refused, slot, serving, ended };
        self.pods.insert(enrolled.pod.name.clone(), enrolled);
        Ok(slot)
    }

    /// Tells the manager which containers have ended.
    fn report_ended(&self) {
        for EnrolledPod { cgroup, ended: (since, publish), .. } in self.pods.values() {
            let containers: Vec<String> = self.cgroup_watch.ended(&cgroup.path).cloned().collect();
            let ended = (!containers.is_empty()).then(|| Arc::new(Ended { since: *since, containers }));
            publish.publish(ended);
        }
    }

    /// Detaches pods that are gone, and those of a former process that are not on the list.
    fn clean_up(&mut self, found: &HashSet<PathBuf>) -> Result<(), ctrlmesh_intercept::Error> {
        policy::remove_abandoned(self.state.as_deref(), self.wanted.iter().map(|pod| &pod.name));
        self.interceptor.sweep()?;
        let attachments = self.interceptor.status()?.attachments.into_iter();
        let own = attachments.filter(|attachment| attachment.owner == OWNER);
        // Cgroups that are gone were swept. One that only cannot be seen from here is left alone.
        let orphan = |one: &Attachment| one.alive && !found.contains(&one.cgroup);
        for orphan in own.filter(orphan) {
            self.interceptor.detach(&orphan.cgroup)?;
            info!(cgroup = %orphan.cgroup.display(), "detached");
        }
        Ok(())
    }

    /// Logs what became of a pod, once.
    fn log_outcome(&mut self, name: &PodName, served: Result<(), NotServed>) {
        let Err(error) = served else {
            self.complaints.remove(name);
            return info!(pod = %name, "pod is served");
        };
        let error = telemetry::chain(&error);
        let complaint = self.complaints.entry(name.clone());
        if complaint.or_insert_with(|| Complaint::new(error.clone())).is_due(&error) {
            warn!(pod = %name, error, "pod cannot be served yet");
        }
    }
}

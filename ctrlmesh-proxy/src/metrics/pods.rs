//! The metrics of each pod: which policy is in force for it, and what its requests to the API server come to.
//!
//! The series of a pod end when it is served no more. How many there are is bounded: see [`MAX_RESOURCES`],
//! [`MAX_MEMBERS`] and [`BusyNamespaces`].

mod collector;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock, Weak};
use std::time::Duration;

use ctrlmesh_runtime::sync::{lock, read, write};
use opentelemetry::trace::TraceId;
use prometheus_client::registry::Registry;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::busy_namespaces::BusyNamespaces;
use super::exemplar::LastTrace;
use super::histogram::AnswerTime;
use super::reasons::{OUTCOMES, VERBS};
use super::{Outcome, Verb};

/// Resources with series of their own, for each pod. Requests for further ones share those of `other`.
const MAX_RESOURCES: usize = 128;

const OTHER: &str = "other";

/// Member clusters with series of their own, for each pod. Requests to further ones share those of [`OTHER_MEMBERS`].
const MAX_MEMBERS: usize = 128;

/// No member has a name with a star.
const OTHER_MEMBERS: &str = "*";

/// Longer names are no names of a group or a resource (RFC 1123 subdomains).
const MAX_NAME_BYTES: usize = 253;

/// The metrics of all pods, by `NAMESPACE/NAME`; empty where a proxy does not know its pod.
#[derive(Clone, Debug)]
pub struct PodMetrics {
    pods: Arc<Mutex<BTreeMap<String, Pod>>>,
    /// Whether series have exemplars.
    traced: bool,
}

#[derive(Debug, Default)]
struct Pod {
    policy: Option<PodPolicyLabels>,
    requests: Weak<PodRequests>,
    /// Packets that it sent past its proxy.
    bypassed: u64,
}

/// What metrics say of a policy in force.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodPolicyLabels {
    pub epoch: u64,
    /// The shard that the pod belongs to; empty if it is not known.
    pub shard: String,
}

/// The requests of one pod.
#[derive(Debug)]
pub struct PodRequests {
    /// `NAMESPACE/NAME`, or empty.
    pod: String,
    /// In the order of group and resource.
    resources: RwLock<Vec<Arc<ResourceRequests>>>,
    namespaces: Mutex<BusyNamespaces>,
    /// By the member's name.
    members: Mutex<BTreeMap<String, Arc<MemberRequests>>>,
    /// In the order of [`VERBS`].
    answer_times: [AnswerTime; VERBS.len()],
}

/// The requests to one member cluster.
#[derive(Debug, Default)]
pub struct MemberRequests([AtomicU64; OUTCOMES.len()]);

/// The requests for one resource.
#[derive(Debug, Default)]
pub struct ResourceRequests {
    group: String,
    resource: String,
    counts: [[AtomicU64; OUTCOMES.len()]; VERBS.len()],
    /// By verb and outcome.
    traces: Mutex<BTreeMap<(usize, usize), LastTrace>>,
    watch_events: AtomicU64,
    response_bytes: AtomicU64,
}

impl PodMetrics {
    /// Where `traced`, series have exemplars.
    pub(super) fn register(registry: &mut Registry, traced: bool) -> Self {
        let metrics = Self { pods: Arc::default(), traced };
        registry.register_collector(Box::new(metrics.clone()));
        metrics
    }

    /// The requests of `pod`, which are shown as long as somebody holds them.
    pub fn requests(&self, pod: &str) -> Arc<PodRequests> {
        lock(&self.pods).entry(pod.to_owned()).or_default().requests(pod, self.traced)
    }

    /// Sets what is in force for `pod`, unless it is `gone`.
    pub fn set_policy(&self, pod: &str, policy: PodPolicyLabels, gone: &CancellationToken) {
        let mut pods = lock(&self.pods);
        if !gone.is_cancelled() {
            pods.entry(pod.to_owned()).or_default().policy = Some(policy);
        }
    }

    /// Counts packets that `pod` sent to the API server past its proxy.
    pub fn add_bypassed(&self, pod: &str, packets: u64) {
        lock(&self.pods).entry(pod.to_owned()).or_default().bypassed += packets;
    }

    /// Removes the series of `pod`, which is gone.
    pub fn forget(&self, pod: &str) {
        lock(&self.pods).remove(pod);
    }
}

impl Pod {
    fn requests(&mut self, pod: &str, traced: bool) -> Arc<PodRequests> {
        self.requests.upgrade().unwrap_or_else(|| {
            let requests = Arc::new(PodRequests::new(pod, traced));
            self.requests = Arc::downgrade(&requests);
            requests
        })
    }
}

impl Default for PodRequests {
    fn default() -> Self {
        Self::new("", false)
    }
}

impl PodRequests {
    fn new(pod: &str, traced: bool) -> Self {
        let namespaces = Mutex::new(BusyNamespaces::new(Instant::now()));
        let answer_times = VERBS.map(|_verb| AnswerTime::new(traced));
        let (pod, resources, members) = (pod.to_owned(), RwLock::default(), Mutex::default());
        Self { pod, resources, namespaces, members, answer_times }
    }

    /// `NAMESPACE/NAME` of the pod; empty where a proxy does not know it.
    pub fn pod(&self) -> &str {
        &self.pod
    }

    /// The requests for a resource. Both names are empty for paths that name none.
    pub fn resource(&self, group: &str, resource: &str) -> Arc<ResourceRequests> {
        let at = |all: &[Arc<ResourceRequests>], group: &str, resource: &str| {
            all.binary_search_by(|one| (one.group.as_str(), one.resource.as_str()).cmp(&(group, resource)))
        };
        let all = read(&self.resources);
        if let Ok(at) = at(&all, group, resource) {
            return all[at].clone();
        }
        drop(all);
        let mut all = write(&self.resources);
        let is_name = group.len().max(resource.len()) <= MAX_NAME_BYTES;
        let (group, resource) = if is_name && all.len() < MAX_RESOURCES { (group, resource) } else { ("", OTHER) };
        match at(&all, group, resource) {
            Ok(at) => all[at].clone(),
            Err(at) => {
                let (group, resource) = (group.to_owned(), resource.to_owned());
                let new = Arc::new(ResourceRequests { group, resource, ..ResourceRequests::default() });
                all.insert(at, new.clone());
                new
            }
        }
    }

    fn resources(&self) -> Vec<Arc<ResourceRequests>> {
        read(&self.resources).clone()
    }

    /// Counts a request for objects in `namespace`.
    pub fn in_namespace(&self, namespace: &str) {
        lock(&self.namespaces).count(namespace, Instant::now());
    }

    /// The requests to a member cluster.
    pub fn member(&self, cluster: &str) -> Arc<MemberRequests> {
        let mut members = lock(&self.members);
        if let Some(member) = members.get(cluster) {
            return Arc::clone(member);
        }
        let is_own = cluster.len() <= MAX_NAME_BYTES && members.len() < MAX_MEMBERS;
        let name = if is_own { cluster } else { OTHER_MEMBERS };
        Arc::clone(members.entry(name.to_owned()).or_default())
    }

    /// Records how long the API server's answer to a request took, as the pod sees it. `trace` is recorded.
    pub fn answered_after(&self, verb: Verb, time: Duration, trace: Option<TraceId>) {
        self.answer_times[verb.at()].observe(time, trace);
    }
}

impl MemberRequests {
    /// Counts a request.
    pub fn ended(&self, outcome: Outcome) {
        self.0[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }
}

impl ResourceRequests {
    /// Counts a request, whose `trace` is recorded.
    pub fn ended(&self, verb: Verb, outcome: Outcome, trace: Option<TraceId>) {
        self.counts[verb.at()][outcome as usize].fetch_add(1, Ordering::Relaxed);
        if let Some(trace) = trace {
            lock(&self.traces).entry((verb.at(), outcome as usize)).or_default().set(trace);
        }
    }

    pub fn watch_event(&self) {
        self.watch_events.fetch_add(1, Ordering::Relaxed);
    }

    pub fn response_bytes(&self, bytes: usize) {
        self.response_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;

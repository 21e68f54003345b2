//! Drops what pods of this node send to the API server past the proxy, counts it, and says so.
//!
//! Only of pods whose connections this process takes: what a sidecar sends comes from its pod's address, too. Pods that
//! may fail open may do so.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ctrlmesh_common::wire::Bypass;
use tokio::task;
use tracing::warn;

use super::enrolled_pod::EnrolledPod;
use crate::metrics::Metrics;
use crate::policy::{BypassReports, PodName, PublishBypass};
use ctrlmesh_intercept::{BypassFilter, Bypasses};

/// Between two looks at what was dropped, and at whether the table is still there.
const INTERVAL: Duration = Duration::from_secs(2);

/// Keeps the filter as the pods and the API server's addresses are.
pub(super) struct BypassGuard {
    /// Absent while it is being written.
    filter: Option<BypassFilter>,
    /// What it drops.
    rules: BypassRules,
    looked: Instant,
    /// Why it does not work, so that it is logged once.
    complaint: Option<String>,
    reports: BypassReports,
    /// What was dropped of pods that have sent something past their proxy.
    dropped: HashMap<PodName, (u64, PublishBypass)>,
    metrics: Arc<Metrics>,
}

/// What the filter is to drop.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct BypassRules {
    /// By address. One that two pods claim is neither's.
    pods: BTreeMap<IpAddr, PodName>,
    servers: BTreeSet<SocketAddr>,
    endpoints: BTreeSet<SocketAddr>,
}

impl BypassRules {
    /// Of pods that are attached. `servers` are all addresses of the API server, `endpoints` those of the processes.
    pub(super) fn of<'a>(
        pods: impl Iterator<Item = (&'a PodName, &'a EnrolledPod)>,
        servers: BTreeSet<SocketAddr>,
        endpoints: BTreeSet<SocketAddr>,
    ) -> Self {
        // Some connections of the others pass.
        let closed = pods.filter(|(_, enrolled)| !enrolled.pod.fail_open && enrolled.pod.except.is_empty());
        let claims = closed.flat_map(|(name, enrolled)| enrolled.addresses().iter().map(move |ip| (*ip, name)));
        let mut pods: BTreeMap<IpAddr, Option<PodName>> = BTreeMap::new();
        for (address, name) in claims {
            pods.entry(address).and_modify(|pod| *pod = None).or_insert_with(|| Some(name.clone()));
        }
        let pods = pods.into_iter().filter_map(|(address, pod)| Some((address, pod?))).collect();
        Self { pods, servers, endpoints }
    }
}

impl BypassGuard {
    pub(super) fn new(owner: &str, reports: BypassReports, metrics: Arc<Metrics>) -> Self {
        let filter = Some(BypassFilter::new(owner));
        let (rules, dropped) = (BypassRules::default(), HashMap::new());
        Self { filter, rules, looked: Instant::now(), complaint: None, reports, dropped, metrics }
    }

    /// Whether it is time to look what was dropped.
    pub(super) fn is_due(&self) -> bool {
        self.looked.elapsed() >= INTERVAL
    }

    /// Has the filter drop what it should, and takes down what it has dropped.
    pub(super) async fn follow(&mut self, rules: BypassRules) {
        // What failed is tried again at the next look only: each attempt may have the kernel look for a module.
        let is_new = self.rules != rules && self.complaint.is_none();
        if !is_new && !self.is_due() {
            return;
        }
        self.looked = Instant::now();
        let Some(mut filter) = self.filter.take() else { return };
        let BypassRules { pods, servers, endpoints } = rules.clone();
        let bypasses = Bypasses { pods: pods.into_keys().collect(), servers, endpoints };
        // The kernel may take some milliseconds, in which other connections wait to be accepted on this thread.
        let done = task::spawn_blocking(move || {
            let done = filter.dropped().and_then(|dropped| filter.apply(&bypasses).map(|_written| dropped));
            (filter, done)
        });
        let done = match done.await {
            Ok((filter, done)) => {
                self.filter = Some(filter);
                done
            }
            Err(panicked) => Err(io::Error::other(panicked)),
        };
        // Counted under the pods that had these addresses until now. The series of those that are gone have ended.
        let before = std::mem::replace(&mut self.rules, rules);
        self.dropped.retain(|name, _| self.rules.pods.values().any(|pod| pod == name));
        self.take_down(&before, done);
    }

    fn take_down(&mut self, before: &BypassRules, done: io::Result<BTreeMap<IpAddr, u64>>) {
        let dropped = match done {
            Ok(dropped) => dropped,
            Err(error) => {
                let error = error.to_string();
                if self.complaint.as_ref() != Some(&error) {
                    warn!(error, "what pods send to the API server past the proxy is not dropped");
                }
                self.complaint = Some(error);
                return self.metrics.bypass_filter(false);
            }
        };
        self.complaint = None;
        self.metrics.bypass_filter(true);
        for (address, packets) in dropped {
            let pod = before.pods.get(&address).filter(|pod| self.rules.pods.values().any(|one| one == *pod));
            let Some(pod) = pod else { continue };
            let first = || (0, self.reports.begin(pod.clone()));
            let (all, publish) = self.dropped.entry(pod.clone()).or_insert_with(first);
            if *all == 0 {
                warn!(pod = %pod, %address, "the pod sends packets to the API server past the proxy; they are dropped");
            }
            *all += packets;
            publish.publish(Some(Arc::new(Bypass { packets: *all })));
            self.metrics.pods.add_bypassed(&pod.to_string(), packets);
        }
    }
}

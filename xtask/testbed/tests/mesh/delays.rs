//! Measures how long pods take to start; no test asserts these figures.

use std::collections::BTreeMap;
use std::io::{Write as _, stderr};
use std::time::Duration;

use anyhow::Result;
use ctrlmesh_testbed::Space;
use ctrlmesh_testbed::audit_log::AuditEvent;
use jiff::Timestamp;

use crate::mesh;
use crate::mesh::operator;

/// What took how long, of many pods.
#[derive(Debug, Default)]
pub(crate) struct Delays {
    /// From the API server's taking a pod in to its saying so: admission is in it.
    made: Vec<Duration>,
    /// From the scheduler's decision to the pod's first request.
    asked: Vec<Duration>,
}

impl Delays {
    /// Of all pods that the operator has had in a namespace so far, as the audit log has it.
    pub(crate) fn of(space: Space<'_>) -> Result<Self> {
        let cluster = space.cluster();
        let pods = |event: &&AuditEvent| event.object.resource == "pods" && event.object.namespace == space.name();
        let made = mesh::requests(cluster, "kube-system", "replicaset-controller")?;
        let made = made.iter().filter(pods).filter(|event| event.verb == "create");
        let made = made.map(|event| passed(event.received, event.at));
        let bound = mesh::events(cluster, "\"binding\"")?;
        let bound = bound.iter().filter(pods).filter(|event| event.object.subresource == "binding");
        let mut asked: BTreeMap<String, Duration> = BTreeMap::new();
        let requests = mesh::requests(cluster, space.name(), operator::NAME)?;
        for bound in bound {
            let pod = &bound.object.name;
            let its = requests.iter().filter(|one| mesh::pod_of(one) == Some(pod));
            if let Some(first) = its.map(|one| one.received).min() {
                asked.insert(pod.clone(), passed(bound.at, first));
            }
        }
        Ok(Self { made: made.collect(), asked: asked.into_values().collect() })
    }

    /// For people.
    pub(crate) fn say(&self, what: &str) -> Result<()> {
        for (name, all) in [("made", &self.made), ("bound to first request", &self.asked)] {
            let (p50, p99) = (percentile(all, 50), percentile(all, 99));
            writeln!(stderr(), "{what}, {name}: {} pods, p50 {p50:?}, p99 {p99:?}", all.len())?;
        }
        Ok(())
    }
}

/// Zero where the clock went backwards.
fn passed(from: Timestamp, to: Timestamp) -> Duration {
    Duration::try_from(to.duration_since(from)).unwrap_or_default()
}

fn percentile(all: &[Duration], percent: usize) -> Duration {
    let mut sorted = all.to_vec();
    sorted.sort();
    let at = (sorted.len() * percent).div_ceil(100).max(1) - 1;
    sorted.get(at).copied().unwrap_or_default()
}

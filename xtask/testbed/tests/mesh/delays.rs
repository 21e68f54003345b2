//! Measures how long pods take to start; no test asserts these figures.

use std::collections::BTreeMap;
use std::io::{Write as _, stderr};
use std::time::Duration;

use anyhow::{Context as _, Result};
use ctrlmesh_testbed::Space;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use serde_json::Value;

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
        let pods = |event: &&Value| {
            let object = &event["objectRef"];
            object["resource"] == "pods" && object["namespace"] == space.name()
        };
        let made = mesh::requests(cluster, "kube-system", "replicaset-controller")?;
        let made = made.iter().filter(pods).filter(|event| event["verb"] == "create");
        let made = made
            .map(|event| Ok(time(event, "stageTimestamp")?.saturating_sub(time(event, "requestReceivedTimestamp")?)));
        let bound = mesh::events(cluster, "\"binding\"")?;
        let bound = bound.iter().filter(pods).filter(|event| event["objectRef"]["subresource"] == "binding");
        let mut asked: BTreeMap<String, Duration> = BTreeMap::new();
        let requests = mesh::requests(cluster, space.name(), operator::NAME)?;
        for bound in bound {
            let pod = bound["objectRef"]["name"].as_str().context("a pod's name")?;
            let its = requests.iter().filter(|one| mesh::pod_of(one) == Some(pod));
            let first = its.map(|one| time(one, "requestReceivedTimestamp")).collect::<Result<Vec<_>>>()?;
            if let Some(first) = first.into_iter().min() {
                asked.insert(pod.to_owned(), first.saturating_sub(time(bound, "stageTimestamp")?));
            }
        }
        Ok(Self { made: made.collect::<Result<_>>()?, asked: asked.into_values().collect() })
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

/// Since 1970.
fn time(event: &Value, field: &str) -> Result<Duration> {
    let time: MicroTime = serde_json::from_value(event[field].clone())?;
    Ok(Duration::from_micros(u64::try_from(time.0.as_microsecond())?))
}

fn percentile(all: &[Duration], percent: usize) -> Duration {
    let mut sorted = all.to_vec();
    sorted.sort();
    let at = (sorted.len() * percent).div_ceil(100).max(1) - 1;
    sorted.get(at).copied().unwrap_or_default()
}

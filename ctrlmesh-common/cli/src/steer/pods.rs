//! Says which pods of shards can take something over.

use std::collections::BTreeSet;

use ctrlmesh_common::api::ShardingConfig;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{Client, ResourceExt as _};

use crate::cluster::answer;
use crate::status::shards::{PodOverview, pods};
use crate::version::part::{enrolled, has_ended};

/// The manager renews the time of the last contact every 5 minutes. After twice that, in seconds, a proxy is away.
const AWAY: i64 = 600;

/// A pod of a shard.
#[derive(Clone, Debug)]
pub(super) struct ShardPod {
    pub(super) name: String,
    pub(super) node: Option<String>,
    /// Whether it can take something over: its proxy has a policy, and is in touch, and the pod stays. If the newest
    /// policy is not there yet, it is on its way to each such proxy.
    pub(super) is_live: bool,
}

/// What is known of pods beside the statuses of their shards.
#[derive(Clone, Debug)]
pub(super) struct LivePods {
    now: Timestamp,
    /// Namespace and name of those that end, or are not ready. Empty where the user may not list pods.
    leaving: BTreeSet<(String, String)>,
}

impl LivePods {
    pub(super) async fn read(client: &Client) -> Self {
        let pods = answer::list_all::<Pod>(client, &enrolled()).await.unwrap_or_default();
        let leaving = pods.iter().filter(|pod| leaves(pod));
        let leaving = leaving.map(|pod| (pod.namespace().unwrap_or_default(), pod.name_any())).collect();
        Self { now: Timestamp::now(), leaving }
    }

    #[cfg(test)]
    pub(super) fn at(now: Timestamp, leaving: &[(&str, &str)]) -> Self {
        let leaving = leaving.iter().map(|(namespace, name)| ((*namespace).to_owned(), (*name).to_owned()));
        Self { now, leaving: leaving.collect() }
    }

    /// The pods of a shard.
    pub(super) fn of(&self, shard: &ShardingConfig) -> Vec<ShardPod> {
        let namespace = shard.namespace().unwrap_or_default();
        let pod = |pod: PodOverview| {
            let is_in_touch = pod.last_contact.is_some_and(|then| self.now.duration_since(then).as_secs() < AWAY);
            let stays = !self.leaving.contains(&(namespace.clone(), pod.name.clone()));
            ShardPod { is_live: pod.epoch.is_some() && is_in_touch && stays, name: pod.name, node: pod.node }
        };
        pods(shard, None).into_iter().map(pod).collect()
    }
}

fn leaves(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let is_unready = conditions.into_iter().any(|one| one.type_ == "Ready" && one.status == "False");
    pod.metadata.deletion_timestamp.is_some() || has_ended(pod) || is_unready
}

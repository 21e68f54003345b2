//! Roots, shards and plans for tests.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::{ShardingConfig, ShardingConfigStatus};
use ctrlmesh_manager::rules::shard::{self, Labelling};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::pods::LivePods;
use crate::plan::change::RootPlan;
use crate::plan::live::Live;

/// Root `ops/web` of a Deployment with two shards, and these fields besides.
pub(super) fn root(more: Value) -> ShardingConfig {
    let websites = json!([{"relateResources": [{"apiGroups": ["web.example.com"], "resources": ["websites"]}]}]);
    let mut rule = json!({"prefix": "web", "targetDeployment": "web", "resourceSelector": websites,
        "auto": {"shardingSize": 2, "everyShardReplicas": 2}});
    more.as_object().unwrap().iter().for_each(|(key, value)| rule[key] = value.clone());
    serde_json::from_value(json!({
        "apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
        "metadata": {"namespace": "ops", "name": "web", "uid": "u"}, "spec": {"root": rule},
    }))
    .unwrap()
}

/// Name and node of a pod, and whether its proxy has a policy.
pub(super) type Pod<'a> = (&'a str, &'a str, bool);

/// By the name of a shard.
pub(super) type Pods<'a> = [(&'a str, &'a [Pod<'a>])];

/// The cluster with that root, and its shards with these pods.
pub(super) fn cluster(root: &ShardingConfig, pods: &Pods<'_>) -> Live {
    let labelling = Labelling::default();
    let divided = shard::divide(root, &labelling, &BTreeSet::new(), &[]).unwrap().unwrap();
    let mut root = root.clone();
    let ownership = Some(shard::table(&divided, &BTreeMap::new()));
    root.status = Some(ShardingConfigStatus { ownership, epoch: Some(3), ..ShardingConfigStatus::default() });
    let with_pods = |config: ShardingConfig| {
        let name = config.metadata.name.clone().unwrap();
        let of = pods.iter().find(|(shard, _)| *shard == name).map_or(&[][..], |(_, pods)| pods);
        let pods: Vec<Value> = of
            .iter()
            .map(|(name, node, has_policy)| {
                json!({"name": name, "node": node, "epoch": has_policy.then_some(3),
                "lastContact": now().to_string()})
            })
            .collect();
        ShardingConfig { status: serde_json::from_value(json!({"pods": pods})).unwrap(), ..config }
    };
    let made: Vec<ShardingConfig> = divided.into_iter().map(|shard| with_pods(shard.config)).collect();
    Live { configs: [root].into_iter().chain(made).collect(), namespaces: BTreeSet::new(), labelling }
}

pub(super) fn now() -> Timestamp {
    "2026-01-01T00:00:00Z".parse().unwrap()
}

/// No pod leaves.
pub(super) fn live_pods() -> LivePods {
    LivePods::at(now(), &[])
}

/// What `wanted` comes to in the cluster with the root as it is.
pub(super) fn plan(live: &ShardingConfig, wanted: &ShardingConfig) -> RootPlan {
    let cluster = cluster(live, &[]);
    cluster.change(wanted, &cluster.configs).unwrap().plan()
}

//! How long does it take to decide what everybody is told?

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::{annotation, label};
use ctrlmesh_manager::compile::{World, compile};
use ctrlmesh_manager::pod::Member;
use ctrlmesh_manager::shard::Labelling;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

/// How often it is done.
const ROUNDS: u32 = 5;

/// Compiles `configs` ShardingConfigs, a namespace each, and `pods` pods; prints the median.
pub(crate) fn measure(configs: usize, pods: usize) {
    let namespace = |number: usize| format!("ns-{number}");
    let shards: Vec<ShardingConfig> =
        (0..configs).map(|number| config(&namespace(number))).collect();
    let members: Vec<Member> = (0..pods)
        .map(|number| Member::from(&pod(&namespace(number % configs), number / configs)))
        .collect();
    let namespaces: BTreeSet<String> = (0..configs).map(namespace).collect();
    let (first_ordinals, labelling) = (BTreeMap::new(), Labelling::default());
    let world = World {
        configs: &shards,
        members: &members,
        namespaces: &namespaces,
        first_ordinals: &first_ordinals,
        labelling: &labelling,
    };
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        let compiled = compile(world, &BTreeMap::new());
        times.push(begun.elapsed());
        assert_eq!(compiled.policies.len(), pods, "{:?}", compiled.troubles.first());
    }
    times.sort();
    println!(
        "{configs} ShardingConfigs and {pods} pods compiled in {:.1?}\n",
        times[times.len() / 2]
    );
}

fn config(namespace: &str) -> ShardingConfig {
    let config = json!({
        "metadata": {"name": "shard", "namespace": namespace, "generation": 1, "uid": namespace},
        "spec": {
            "selector": {"matchLabels": {"app": "operator"}},
            "controller": {"leaderElectionName": "operator"},
            "limits": [{
                "relateResources": [{"apiGroups": [""], "resources": ["pods", "configmaps"]}],
                "selector": {"matchExpressions": [{
                    "key": label::SHARDING_HASH,
                    "operator": "In",
                    "values": ["0", "1", "2", "3", "4", "5", "6", "7"],
                }]},
            }],
        },
    });
    serde_json::from_value(config).unwrap()
}

fn pod(namespace: &str, number: usize) -> Pod {
    let pod = json!({
        "metadata": {
            "name": format!("operator-{number}"),
            "namespace": namespace,
            "uid": format!("{namespace}-{number}"),
            "labels": {"app": "operator", label::ENABLE_PROXY: "true"},
            "annotations": {annotation::INJECTED: "true"},
        },
    });
    serde_json::from_value(pod).unwrap()
}

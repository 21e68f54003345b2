//! How long it takes to compile the policies of all pods.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::{annotation, label};
use ctrlmesh_manager::rules::compile::{World, compile};
use ctrlmesh_manager::rules::pod::Member;
use ctrlmesh_manager::rules::shard::Labelling;
use ctrlmesh_manager::rules::shared::Shared;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use crate::cluster::IN_ONE;

/// How often it is done.
const ROUNDS: u32 = 5;

/// How many hashes each ShardingConfig has.
const HASHES: usize = 3;

/// Compiles `configs` ShardingConfigs, the shards of an operator in each namespace, which are compared with each other,
/// and `pods` pods; prints the median.
pub(crate) fn measure(configs: usize, pods: usize) {
    let namespace = |number: usize| format!("ns-{}", number / IN_ONE);
    let shards = (0..configs).map(|number| Shared::from(config(&namespace(number), number % IN_ONE)));
    let shards: Vec<_> = shards.collect();
    let members: Vec<_> = (0..pods)
        .map(|number| {
            let shard = number % configs;
            Shared::from(Member::from(&pod(&namespace(shard), shard % IN_ONE, number / configs)))
        })
        .collect();
    let namespaces: BTreeSet<String> = (0..configs).map(namespace).collect();
    let (first_ordinals, labelling) = (BTreeMap::new(), Labelling::default());
    let world = World {
        configs: &shards,
        breakers: &[],
        injections: &[],
        members: &members,
        namespaces: &namespaces,
        first_ordinals: &first_ordinals,
        unenrolled: &BTreeMap::new(),
        evidence: &BTreeMap::new(),
        leads: true,
        held_back: &BTreeSet::new(),
        waiting: &BTreeSet::new(),
        loads: &BTreeMap::new(),
        labelling: &labelling,
    };
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        let compiled = compile(world, &BTreeMap::new());
        times.push(begun.elapsed());
        assert!(compiled.troubles.is_empty(), "{:?}", compiled.troubles[0]);
        assert_eq!(compiled.policies.len(), pods);
    }
    times.sort();
    println!(
        "{configs} ShardingConfigs, {IN_ONE} of one operator, and {pods} pods compiled in {:.1?}\n",
        times[times.len() / 2]
    );
}

fn config(namespace: &str, shard: usize) -> ShardingConfig {
    let name = format!("shard-{shard}");
    let hashes = shard * HASHES..(shard + 1) * HASHES;
    let hashes: Vec<String> = hashes.map(|hash| hash.to_string()).collect();
    let config = json!({
        "metadata": {"name": name, "namespace": namespace, "generation": 1, "uid": format!("{namespace}-{name}")},
        "spec": {
            "selector": {"matchLabels": {"app": "operator", "shard": name}},
            "controller": {"leaderElectionName": "operator"},
            "limits": [{
                "selector": {"matchExpressions": [{
                    "key": label::SHARDING_HASH,
                    "operator": "In",
                    "values": hashes,
                }]},
            }],
        },
    });
    serde_json::from_value(config).unwrap()
}

fn pod(namespace: &str, shard: usize, number: usize) -> Pod {
    let pod = json!({
        "metadata": {
            "name": format!("operator-{shard}-{number}"),
            "namespace": namespace,
            "uid": format!("{namespace}-{shard}-{number}"),
            "labels": {"app": "operator", "shard": format!("shard-{shard}"), label::ENABLE_PROXY: "true"},
            "annotations": {annotation::INJECTED: "true"},
        },
    });
    serde_json::from_value(pod).unwrap()
}

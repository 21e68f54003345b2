//! Ends the containers of replicas, and measures how long it takes from the report of that until others own their
//! slots.

use std::collections::BTreeSet;
use std::time::Duration;

use ctrlmesh_common::slots::COUNT;
use ctrlmesh_common::wire::{MAX_ENDED, PodId};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::{self, Instant};

use crate::cluster::Cluster;
use crate::operators::{self, Applied};
use crate::pods::{container, now, path};
use crate::proxies::Proxies;
use crate::{LOOK_EVERY, PATIENCE, send};

/// What is left alone after an operator has settled, so that one death is not the other's: a status that decides
/// nothing is written once a second.
const PAUSE: Duration = Duration::from_millis(1500);

/// How long it took from the report that a replica's container has ended, each in ascending order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Deaths {
    /// Until the first of the other pods' proxies has the table that takes the slots away.
    pub(crate) decided: Vec<Duration>,
    /// Until all of them have one by which the other pods own everything.
    pub(crate) moved: Vec<Duration>,
}

/// Has `count` replicas die, one after the other, each of the next operator.
pub(crate) async fn measure(cluster: &Cluster, proxies: &Proxies, count: usize) -> Deaths {
    let mut deaths = Deaths::default();
    for death in 0..count {
        let number = death % cluster.operators.count();
        until_even(cluster, number).await;
        time::sleep(PAUSE).await;
        let (decided, moved) = die(cluster, proxies, number, death).await;
        deaths.decided.push(decided);
        deaths.moved.push(moved);
    }
    deaths.decided.sort();
    deaths.moved.sort();
    deaths
}

/// Waits until all replicas of an operator own their part.
async fn until_even(cluster: &Cluster, number: usize) {
    let begun = Instant::now();
    while !cluster.operators.is_even(number, 0) {
        assert!(begun.elapsed() < PATIENCE, "{} does not settle", operators::name(number));
        time::sleep(LOOK_EVERY).await;
    }
}

/// One replica dies, and is started again once it is known what came of it.
async fn die(cluster: &Cluster, proxies: &Proxies, number: usize, death: usize) -> (Duration, Duration) {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &operators::namespace(number));
    let replicas = cluster.operators.replicas;
    let name = format!("{}-{}", operators::name(number), death / cluster.operators.count() % replicas);
    let pod = pods.get(&name).await.unwrap();
    let uid = pod.metadata.uid.clone().unwrap();
    let node = pod.spec.as_ref().unwrap().node_name.clone().unwrap();
    let restarts = pod.status.as_ref().unwrap().container_statuses.as_ref().unwrap()[0].restart_count;
    let restarts = usize::try_from(restarts).unwrap();
    let (shard, others) = cluster.operators.with(number, |holders| {
        let shard = holders.get(&uid).unwrap().shard().unwrap().to_owned();
        let others = holders.replicas().map(|(uid, _)| uid.clone()).filter(|other| *other != uid);
        (shard, others.collect())
    });
    let seen = cluster.operators.observe(number);
    let begun = Instant::now();
    let id = PodId { namespace: operators::namespace(number), name: name.clone(), uid: uid.clone() };
    // Of those that ended before, the report goes on to speak.
    let ended = (restarts.saturating_sub(MAX_ENDED - 1)..=restarts).map(|restart| format!("{uid}-{restart}")).collect();
    proxies.report_ended(&node, id, ended);
    let times = time::timeout(PATIENCE, follow(seen, &shard, others)).await;
    let (decided, moved) = times.unwrap_or_else(|_| panic!("{name} died, and its slots stay nobody's"));
    let state = json!({"running": {"startedAt": now()}});
    let status = json!({"status": {"containerStatuses": [container(&uid, restarts + 1, true, &state)]}});
    send(&cluster.client, "PATCH", &format!("{}/status", path(&pod)), &status).await.unwrap();
    (decided - begun, moved - begun)
}

/// When the first of the `others` got a table without the `shard`, and when the last one got one by which all is owned.
async fn follow(
    mut seen: mpsc::UnboundedReceiver<Applied>,
    shard: &str,
    others: BTreeSet<String>,
) -> (Instant, Instant) {
    let (mut decided, mut done) = (None, BTreeSet::new());
    while let Some(Applied { at, uid, slots }) = seen.recv().await {
        if !others.contains(&uid) || slots.values().any(|owner| owner == shard) {
            continue;
        }
        let decided = *decided.get_or_insert(at);
        if slots.len() == usize::from(COUNT) {
            done.insert(uid);
        }
        if done == others {
            return (decided, at);
        }
    }
    unreachable!("the operator has its observer until another one comes")
}

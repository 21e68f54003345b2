//! Shards of two pods without an election: one works, and the other follows when it is away.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::ownership::{Ownership, STANDBY};
use serde_json::json;

use crate::bed::{Bed, teams};
use crate::load::Load;
use crate::moves::{UNHURRIED, UNOWNED, times};
use crate::pods;

/// How often the pod that works is away, and ends; `CTRLMESH_TEST_FULL=1` asks for ten times as many.
const ROUNDS: usize = 2;

/// The number of the pod that works for each shard, where it is one.
fn workers(bed: &Bed, table: &Ownership) -> BTreeMap<String, u16> {
    let owner = |number: &u16| table.pod_uids.get(bed.pods.get(&format!("op-{number}"))?.uid());
    let mut all: BTreeMap<String, Vec<u16>> = BTreeMap::new();
    for number in 0..4 {
        if let Some(shard) = owner(&number).filter(|owner| *owner != STANDBY) {
            all.entry(shard.clone()).or_default().push(number);
        }
    }
    all.into_iter().filter_map(|(shard, pods)| <[u16; 1]>::try_from(pods).ok().map(|[pod]| (shard, pod))).collect()
}

async fn one_works(fence: &str, test: &str) -> Result<()> {
    let Some(mut bed) = Bed::start(test).await? else { return Ok(()) };
    pods::workload(&bed, 4, true).await?;
    bed.root_without_lock(&json!({"fence": fence, "auto": {"shardingSize": 2, "everyShardReplicas": 2}})).await?;
    for number in 0..4 {
        bed.start_pod(number, true, &UNHURRIED).await?;
    }
    let table = bed.settled(|table| workers(&bed, table).len() == 2).await?;
    let load = Load::begin(&bed);
    let mut before = workers(&bed, &table);
    for _ in 0..times(ROUNDS) {
        // One is not ready, and one ends.
        let shards: Vec<(String, u16)> = before.clone().into_iter().collect();
        let [(first, away), (second, ended)] = shards.as_slice() else { anyhow::bail!("{before:?}") };
        bed.say_ready(*away, false).await?;
        bed.end_pod(*ended, Duration::ZERO).await?;
        let follows = |table: &Ownership| {
            let now = workers(&bed, table);
            [(first, away), (second, ended)]
                .iter()
                .all(|(shard, former)| now.get(*shard).is_some_and(|now| now != *former))
        };
        let table = bed.settled(follows).await?;
        bed.until_written(&teams().collect(), 2).await?;
        bed.say_ready(*away, true).await?;
        bed.start_pod(*ended, true, &UNHURRIED).await?;
        let same = bed.settled(|table| workers(&bed, table).len() == 2 && table.pods.len() == 4).await?;
        ensure!(workers(&bed, &same) == workers(&bed, &table), "who works goes on: {same:?}");
        before = workers(&bed, &same);
    }
    let root = bed.configs().get(crate::bed::ROOT).await?;
    let standing_by = root.status.and_then(|status| status.ownership).context("no table")?;
    ensure!(standing_by.pod_uids.values().filter(|owner| *owner == STANDBY).count() == 2, "{standing_by:?}");
    bed.verdict(load, UNOWNED).await.map(drop)
}

#[tokio::test]
async fn one_pod_of_a_shard_works_by_the_servers_fence() -> Result<()> {
    one_works("Server", "one_pod_of_a_shard_works_by_the_servers_fence").await
}

#[tokio::test]
async fn one_pod_of_a_shard_works_by_the_proxies() -> Result<()> {
    one_works("Proxy", "one_pod_of_a_shard_works_by_the_proxies").await
}

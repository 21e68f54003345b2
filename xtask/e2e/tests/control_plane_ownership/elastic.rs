//! Shares that follow the pods: replicas come and go, and one is not ready for a while, as the operator works.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::slots::COUNT;
use serde_json::{Value, json};

use crate::bed::{Bed, teams};
use crate::load::Load;
use crate::moves::{UNOWNED, times};
use crate::pods;

/// An operator that keeps no cache and comes back by a timer. A single pod has all objects at first: if they came back
/// faster than it works, those that it has not worked on yet would wait for ever, because they have a low priority.
const UNCACHED: [&str; 2] = ["--uncached=2s", "--leader-elect=false"];

/// How often it is scaled out and in; `CTRLMESH_TEST_FULL=1` asks for ten times as many.
const ROUNDS: usize = 1;

/// More than there are ever pods.
fn elastic(fence: &str) -> Value {
    json!({"fence": fence, "auto": {"shardingSize": 8}})
}

/// Whether so many shards own all slots, each as many as the others, or one more.
fn is_even(table: &Ownership, shards: usize) -> bool {
    let mut sizes: BTreeMap<&String, usize> = BTreeMap::new();
    for owner in table.slots.values() {
        *sizes.entry(owner).or_default() += 1;
    }
    let count = usize::from(COUNT);
    table.slots.len() == count && sizes.len() == shards && sizes.values().all(|size| size.abs_diff(count / shards) <= 1)
}

impl Bed {
    /// Has the operator so many pods, of which `running` run already.
    async fn scale(&mut self, running: u16, wanted: u16) -> Result<()> {
        pods::workload(self, usize::from(wanted), true).await?;
        for number in running..wanted {
            self.start_pod(number, true, &UNCACHED).await?;
        }
        for number in (wanted..running).rev() {
            self.end_pod(number, Duration::ZERO).await?;
        }
        self.settled(|table| is_even(table, usize::from(wanted))).await?;
        self.until_written(&teams().collect(), 1).await
    }
}

async fn follow_the_replicas(fence: &str, test: &str) -> Result<()> {
    let Some(mut bed) = Bed::start(test).await? else { return Ok(()) };
    pods::workload(&bed, 3, true).await?;
    bed.root(&elastic(fence)).await?;
    bed.scale(0, 3).await?;
    let load = Load::begin(&bed);
    for _ in 0..times(ROUNDS) {
        bed.scale(3, 5).await?;
        bed.scale(5, 2).await?;
        bed.scale(2, 3).await?;
        bed.say_ready(1, false).await?;
        let away = |table: &Ownership| table.shard_of("op-1").map(ToOwned::to_owned);
        bed.settled(|table| {
            is_even(table, 2) && !table.slots.values().any(|owner| Some(owner) == away(table).as_ref())
        })
        .await?;
        bed.until_written(&teams().collect(), 1).await?;
        bed.say_ready(1, true).await?;
        bed.settled(|table| is_even(table, 3)).await?;
    }
    bed.verdict(load, UNOWNED).await.map(drop)
}

#[tokio::test]
async fn elastic_shares_have_one_writer_by_the_servers_fence() -> Result<()> {
    follow_the_replicas("Server", "elastic_shares_have_one_writer_by_the_servers_fence").await
}

#[tokio::test]
async fn elastic_shares_have_one_writer_by_the_proxies() -> Result<()> {
    follow_the_replicas("Proxy", "elastic_shares_have_one_writer_by_the_proxies").await
}

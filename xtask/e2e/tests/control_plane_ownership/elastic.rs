//! Shares that follow the pods: replicas come and go, and one is not ready for a while, as the operator works.

use std::time::Duration;

use anyhow::Result;
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_testbed::shares::are_even;
use serde_json::{Value, json};

use crate::bed::{Bed, teams};
use crate::load::Load;
use crate::moves::{UNHURRIED, UNOWNED, times};
use crate::pods;

/// How often it is scaled out and in; `CTRLMESH_TEST_FULL=1` asks for ten times as many.
const ROUNDS: usize = 1;

/// More than there are ever pods.
fn elastic(fence: &str) -> Value {
    json!({"fence": fence, "auto": {"shardingSize": 8}})
}

impl Bed {
    /// Has the operator so many pods, of which `running` run already.
    async fn scale(&mut self, running: u16, wanted: u16) -> Result<()> {
        pods::workload(self, usize::from(wanted), true).await?;
        for number in running..wanted {
            self.start_pod(number, true, &UNHURRIED).await?;
        }
        for number in (wanted..running).rev() {
            self.end_pod(number, Duration::ZERO).await?;
        }
        self.settled(|table| are_even(table, usize::from(wanted))).await?;
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
            are_even(table, 2) && !table.slots.values().any(|owner| Some(owner) == away(table).as_ref())
        })
        .await?;
        bed.until_written(&teams().collect(), 1).await?;
        bed.say_ready(1, true).await?;
        bed.settled(|table| are_even(table, 3)).await?;
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

//! Pods that leave: a scale-in of pods that work through their grace period, and a root that comes back.

use std::time::Duration;

use anyhow::Result;
use serde_json::json;
use tokio::time;

use crate::bed::{Bed, slots_of, teams};
use crate::load::Load;
use crate::moves::{CANARY, UNCACHED, UNOWNED, slice, sliced, times};
use crate::pods;

/// How often it is scaled in; `CTRLMESH_TEST_FULL=1` asks for ten times as many.
const ROUNDS: usize = 2;

/// For how long pods work on after they were asked to end.
const GRACE: Duration = Duration::from_secs(5);

/// How long a root is away that is applied again.
const AWAY: Duration = Duration::from_millis(12_700);

/// Two shards of two pods each beside a canary, which is five pods; with three, one each.
fn of(replicas: u16) -> serde_json::Value {
    let each = if replicas == 5 { 2 } else { 1 };
    json!({"fence": "Server", "canary": {"replicas": 1, "inShardHash": ["0", "1", "2", "3"]},
        "auto": {"shardingSize": 2, "everyShardReplicas": each}})
}

#[tokio::test]
async fn pods_that_drain_after_a_scale_in_write_nothing_of_others() -> Result<()> {
    let flags = [&UNCACHED[..], &["--ignore-sigterm"]].concat();
    let Some(mut bed) = Bed::start("pods_that_drain_after_a_scale_in_write_nothing_of_others").await? else {
        return Ok(());
    };
    pods::workload(&bed, 5, true).await?;
    bed.root(&of(5)).await?;
    for number in 0..3 {
        bed.start_pod(number, true, &flags).await?;
    }
    let load = Load::begin(&bed);
    for _ in 0..times(ROUNDS) {
        pods::workload(&bed, 5, true).await?;
        bed.root(&of(5)).await?;
        for number in 3..5 {
            bed.start_pod(number, true, &flags).await?;
        }
        bed.settled(|table| table.pods.len() == 5).await?;
        bed.until_written(&teams().collect(), 1).await?;
        pods::workload(&bed, 3, true).await?;
        bed.root(&of(3)).await?;
        bed.terminate_pod(4).await?;
        bed.terminate_pod(3).await?;
        time::sleep(GRACE).await;
        bed.bury_pod(4, Duration::ZERO).await?;
        bed.bury_pod(3, Duration::ZERO).await?;
        bed.settled(|table| table.pods.len() == 3).await?;
        bed.until_written(&teams().collect(), 2).await?;
    }
    bed.verdict(load, UNOWNED).await.map(drop)
}

#[tokio::test]
async fn a_root_that_is_deleted_and_applied_again_is_taken_up() -> Result<()> {
    root_again("Server", "a_root_that_is_deleted_and_applied_again_is_taken_up").await
}

#[tokio::test]
async fn a_root_is_taken_up_again_where_only_proxies_fence() -> Result<()> {
    root_again("Proxy", "a_root_is_taken_up_again_where_only_proxies_fence").await
}

async fn root_again(fence: &str, test: &str) -> Result<()> {
    let Some(mut bed) = Bed::start(test).await? else { return Ok(()) };
    bed.sharded(fence, &UNCACHED).await?;
    let load = Load::begin(&bed);
    bed.until_written(&teams().collect(), 1).await?;
    bed.delete_root().await?;
    time::sleep(AWAY).await;
    let slots = slice(3)?;
    bed.until_no_root().await?;
    bed.root(&sliced(fence, &slots)).await?;
    bed.settled(|table| slots_of(table, CANARY) == slots).await?;
    bed.until_written(&teams().collect(), 2).await?;
    bed.verdict(load, UNOWNED).await.map(drop)
}

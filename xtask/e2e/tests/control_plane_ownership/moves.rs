//! A slice moves while the operator works.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Result, ensure};
use ctrlmesh_common::slots::Slot;
use serde_json::{Value, json};

use crate::bed::{Bed, slots_of, teams_of};
use crate::load::Load;
use crate::{pace, pods};

/// An operator that keeps no cache and comes back by a timer: it goes on with what it ever saw.
pub(crate) const UNCACHED: [&str; 2] = ["--uncached=200ms", "--leader-elect=false"];

/// The same, where a single pod may have all objects: if they came back faster than it works, those that it has not
/// worked on yet would wait for ever, because they have a low priority.
pub(crate) const UNHURRIED: [&str; 2] = ["--uncached=2s", "--leader-elect=false"];

/// The shard that slices move to and from.
pub(crate) const CANARY: &str = "op-0-canary";

/// For how long a slot may be nobody's in a move: the bound of the drain, and the machine's pace.
pub(crate) const UNOWNED: Duration = Duration::from_secs(20);

/// How often a slice moves; `CTRLMESH_TEST_FULL=1` asks for ten times as many.
const MOVES: usize = 2;

pub(crate) fn times(few: usize) -> usize {
    if ctrlmesh_testbed::is_full() { few * 10 } else { few }
}

/// A canary with these slots beside two shards.
pub(crate) fn sliced(fence: &str, slots: &BTreeSet<Slot>) -> Value {
    let hashes: Vec<String> = slots.iter().map(ToString::to_string).collect();
    json!({"fence": fence, "canary": {"replicas": 1, "inShardHash": hashes},
        "auto": {"shardingSize": 2, "everyShardReplicas": 1}})
}

/// Eight slots from this one on.
pub(crate) fn slice(from: usize) -> Result<BTreeSet<Slot>> {
    (from..from + 8).map(|slot| Ok(Slot::try_from(i64::try_from(slot % 32)?)?)).collect()
}

impl Bed {
    /// An enrolled operator of three pods, of which one is the canary.
    pub(crate) async fn sharded(&mut self, fence: &str, flags: &[&str]) -> Result<()> {
        pods::workload(self, 3, true).await?;
        self.root(&sliced(fence, &slice(0)?)).await?;
        for number in 0..3 {
            self.start_pod(number, true, flags).await?;
        }
        let first = slice(0)?;
        self.settled(|table| slots_of(table, CANARY) == first).await?;
        Ok(())
    }
}

/// What the fences are for, and that the witness sees it.
#[tokio::test]
async fn without_a_fence_the_former_owner_writes_on() -> Result<()> {
    let test = "without_a_fence_the_former_owner_writes_on";
    let Some(mut bed) = Bed::start(test).await? else { return Ok(()) };
    bed.sharded("Off", &UNCACHED).await?;
    let slots = slice(5)?;
    bed.root(&sliced("Off", &slots)).await?;
    bed.settled(|table| slots_of(table, CANARY) == slots).await?;
    let moved = teams_of(&slice(0)?.symmetric_difference(&slots).copied().collect());
    bed.until_written(&moved, 8).await?;
    let verdict = bed.check_writes()?;
    ensure!(!verdict.late.is_empty(), "{verdict}");
    ensure!(verdict.late.iter().all(|fault| moved.contains(&fault.object.namespace)), "only what moved: {verdict}");
    bed.has_passed = true;
    Ok(())
}

#[tokio::test]
async fn a_slice_moves_with_one_writer_by_the_servers_fence() -> Result<()> {
    slice_moves("Server", "a_slice_moves_with_one_writer_by_the_servers_fence").await
}

#[tokio::test]
async fn a_slice_moves_with_one_writer_by_the_proxies() -> Result<()> {
    slice_moves("Proxy", "a_slice_moves_with_one_writer_by_the_proxies").await
}

async fn slice_moves(fence: &str, test: &str) -> Result<()> {
    let Some(mut bed) = Bed::start(test).await? else { return Ok(()) };
    bed.sharded(fence, &UNCACHED).await?;
    let load = Load::begin(&bed);
    for round in 1..=times(MOVES) {
        let slots = slice(round * 5)?;
        bed.root(&sliced(fence, &slots)).await?;
        bed.settled(|table| slots_of(table, CANARY) == slots).await?;
        // The former owner would have come back to each of them meanwhile.
        bed.until_written(&teams_of(&slots), 4).await?;
    }
    pace::say(&bed, &format!("fence {fence}"))?;
    bed.verdict(load, UNOWNED).await.map(drop)
}

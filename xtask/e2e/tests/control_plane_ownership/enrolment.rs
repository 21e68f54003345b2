//! An operator that runs is enrolled by a rolling update, and leaves again by one.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::ownership::UNSHARDED;

use crate::bed::{Bed, slots_of, teams};
use crate::load::Load;
use crate::moves::{UNOWNED, slice, sliced, times};
use crate::pods;

/// An ordinary operator with a lock; its namespace is not to be found where it runs outside a pod.
const CACHED: [&str; 2] = ["--leader-elect", "--leader-election-namespace=ops"];

/// How often it is enrolled, and leaves; `CTRLMESH_TEST_FULL=1` asks for ten times as many.
const ROUNDS: usize = 2;

const PODS: u16 = 3;

/// How long a pod may take to end when it is asked to.
const GRACE: Duration = Duration::from_secs(10);

impl Bed {
    /// Makes the pods anew one after the other, the last first, as a StatefulSet does.
    async fn roll(&mut self, enrolled: bool) -> Result<()> {
        pods::workload(self, usize::from(PODS), enrolled).await?;
        for number in (0..PODS).rev() {
            self.end_pod(number, GRACE).await?;
            self.start_pod(number, enrolled, &CACHED).await?;
        }
        Ok(())
    }

    /// Waits until the operator has worked on everything that there is now.
    async fn works(&self) -> Result<()> {
        self.until_written(&teams().collect(), 1).await
    }
}

async fn enrolled_and_left(fence: &str, test: &str) -> Result<()> {
    let rounds = times(ROUNDS);
    let Some(mut bed) = Bed::start(test).await? else { return Ok(()) };
    pods::workload(&bed, usize::from(PODS), false).await?;
    for number in 0..PODS {
        bed.start_pod(number, false, &CACHED).await?;
    }
    let load = Load::begin(&bed);
    bed.works().await?;
    for round in 1..=rounds {
        bed.root(&sliced(fence, &slice(round)?)).await?;
        bed.roll(true).await.with_context(|| format!("enrolment {round}"))?;
        bed.settled(|table| slots_of(table, UNSHARDED).is_empty()).await?;
        bed.works().await?;
        bed.delete_root().await?;
        if fence == "Proxy" {
            // Nothing stops a pod without a proxy. So what its shards own is handed back before there is any.
            bed.until_no_root().await?;
        }
        bed.roll(false).await.with_context(|| format!("leaving {round}"))?;
        bed.until_no_root().await?;
        bed.works().await?;
    }
    let verdict = bed.verdict(load, UNOWNED).await?;
    ensure!(verdict.epochs > 2 * rounds, "the table never moved: {verdict}");
    Ok(())
}

#[tokio::test]
async fn a_running_operator_is_enrolled_and_leaves() -> Result<()> {
    enrolled_and_left("Server", "a_running_operator_is_enrolled_and_leaves").await
}

#[tokio::test]
async fn an_operator_is_enrolled_where_only_proxies_fence() -> Result<()> {
    enrolled_and_left("Proxy", "an_operator_is_enrolled_where_only_proxies_fence").await
}

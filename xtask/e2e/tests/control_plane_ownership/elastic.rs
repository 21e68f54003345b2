//! Shares that follow the pods: replicas come and go, and one is not ready for a while, as the operator works.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::names;
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_testbed::audit_log::AuditEvent;
use ctrlmesh_testbed::shares::are_even;
use serde_json::{Value, json};

use crate::bed::{Bed, LOCK, OPERATOR, object, teams};
use crate::load::Load;
use crate::moves::{UNHURRIED, UNOWNED, times};
use crate::pods;

/// How often it is scaled out and in; `CTRLMESH_TEST_FULL=1` asks for ten times as many.
const ROUNDS: usize = 1;

/// More than there are ever pods.
fn elastic(fence: &str) -> Value {
    json!({"fence": fence, "auto": {"shardingSize": 8}})
}

/// The operator elects a leader, and asks for its objects every 2 s.
const ELECTING: [&str; 3] = ["--uncached=2s", "--leader-elect", "--leader-election-namespace=ops"];

impl Bed {
    /// Says who holds a Lease, for a long time. Empty: nobody.
    async fn say_holder(&self, lease: &str, holder: &str) -> Result<()> {
        let now = jiff::Timestamp::now();
        let mut object = object("coordination.k8s.io/v1", "Lease", lease);
        object["spec"] = json!({"holderIdentity": holder, "leaseDurationSeconds": 3600,
            "acquireTime": format!("{now:.6}"), "renewTime": format!("{now:.6}"), "leaseTransitions": 1});
        let leases = format!("/apis/coordination.k8s.io/v1/namespaces/{OPERATOR}/leases");
        self.apply(leases, &object).await.map(drop)
    }

    /// How often somebody has read a Lease.
    fn reads_of_lease(&self, lease: &str) -> Result<usize> {
        let mut reads = 0;
        for log in self.plane.audit_logs() {
            let is_read = |event: &AuditEvent| {
                let is_lease = event.object.resource == "leases" && event.object.name == lease;
                is_lease && event.verb == "get" && event.stage == "ResponseComplete"
            };
            reads += AuditEvent::read(log, lease)?.iter().filter(|event| is_read(event)).count();
        }
        Ok(reads)
    }

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

/// A pod whose lock somebody else holds works on nothing. So it gets nothing, until it has taken its lock.
#[tokio::test]
async fn a_pod_without_its_lock_gets_nothing() -> Result<()> {
    let Some(mut bed) = Bed::start("a_pod_without_its_lock_gets_nothing").await? else { return Ok(()) };
    pods::workload(&bed, 3, true).await?;
    bed.root(&elastic("Server")).await?;
    bed.scale(0, 3).await?;
    let load = Load::begin(&bed);
    let table = bed.settled(|table| are_even(table, 3)).await?;
    let shard = table.shard_of("op-2").context("op-2 has no shard")?.to_owned();
    bed.end_pod(2, Duration::ZERO).await?;
    bed.settled(|table| are_even(table, 2)).await?;
    let lock = names::lock(LOCK, &shard);
    bed.say_holder(&lock, "somebody").await?;
    bed.start_unready(2, true, &ELECTING).await?;
    // By the second time, its proxy has seen what came of the first.
    bed.until("it to ask for its lock", async || {
        let reads = bed.reads_of_lease(&lock)?;
        ensure!(reads > 1, "{reads} reads");
        Ok(())
    })
    .await?;
    bed.say_ready(2, true).await?;
    bed.until_written(&teams().collect(), 3).await?;
    let table = bed.settled(|table| table.shard_of("op-2").is_some()).await?;
    ensure!(are_even(&table, 2) && !table.slots.values().any(|owner| *owner == shard), "{table:?}");
    bed.say_holder(&lock, "").await?;
    bed.settled(|table| are_even(table, 3)).await?;
    bed.until_written(&teams().collect(), 1).await?;
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

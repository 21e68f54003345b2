//! What became of a revision, by the audit log: what it owned, who its pods were, and what they wrote.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::api::{ShardingConfig, ShardingConfigStatus, TrialPhase};
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::slots::NamespaceHash;
use ctrlmesh_testbed::audit_log::AuditEvent;
use jiff::Timestamp;

use crate::bed::{DIVIDED, Operator, ROOT};
use crate::mesh::{self, operator};

/// A revision that was tried and rejected.
#[derive(Clone, Debug)]
pub(crate) struct RejectedTrial {
    /// The slots that it owned in its first step.
    slots: BTreeSet<String>,
    /// The UIDs of its pods.
    pods: BTreeSet<String>,
    /// The greatest step that it was in.
    last_step: i32,
    /// When the status said that it is rejected.
    rejected_at: Timestamp,
    /// When all slots were granted to the promoted version again.
    returned_at: Timestamp,
}

/// A write of the root's status.
struct StatusWrite {
    version: u64,
    at: Timestamp,
    status: ShardingConfigStatus,
}

impl RejectedTrial {
    /// Of the only trial of this revision so far.
    pub(crate) fn of(operator: Operator<'_>, revision: &str) -> Result<Self> {
        let history = history(operator)?;
        let tried: Vec<_> = history.iter().filter(|write| is_tried(write, revision)).collect();
        let trials = || tried.iter().filter_map(|write| write.status.rollout.as_ref()?.trial.as_ref());
        let first = trials().filter(|trial| trial.phase == TrialPhase::Analysing && trial.step == 1);
        let mut pods = BTreeSet::new();
        for write in &tried {
            let (Some(table), second) = (&write.status.ownership, is_second(write)) else { continue };
            let its = table.pod_uids.iter().filter(|(_, shard)| is_shard_of(shard, !second));
            pods.extend(its.map(|(uid, _)| uid.clone()));
        }
        let rejected = history.iter().position(|write| is_rejected(write, revision)).context("a rejection")?;
        let returned = history[rejected..].iter().find(|write| {
            let table = write.status.ownership.as_ref();
            table.is_some_and(|table| is_returned(table, is_second(write)))
        });
        Ok(Self {
            slots: first.flat_map(|trial| trial.slots.iter().cloned()).collect(),
            pods,
            last_step: trials().map(|trial| trial.step).max().context("a trial")?,
            rejected_at: history[rejected].at,
            returned_at: returned.context("the slots did not go back")?.at,
        })
    }

    /// Requires that it owned nothing beyond its first step of so many slots, and that its pods wrote only what was
    /// theirs there. Gives how much they wrote.
    pub(crate) fn stayed_in_first_step(&self, operator: Operator<'_>, slots: usize) -> Result<usize> {
        ensure!(self.last_step == 1, "it got to step {}", self.last_step);
        ensure!(self.slots.len() == slots, "it owned slots {:?} in its first step", self.slots);
        ensure!(!self.pods.is_empty(), "no pod of it may have written");
        let requests = mesh::requests(operator.space.cluster(), operator.space.name(), operator::NAME)?;
        let its = |one: &&AuditEvent| one.user.pod_uid().is_some_and(|uid| self.pods.contains(uid));
        let mut writes = 0;
        for write in requests.iter().filter(its).filter(|one| is_divided_write(one)) {
            let slot = NamespaceHash::default().slot(&write.object.namespace).to_string();
            ensure!(self.slots.contains(&slot), "slot {slot} is not of {:?}: {write:?}", self.slots);
            writes += 1;
        }
        Ok(writes)
    }

    /// Requires that its pods stored nothing of what the root divides, and made dry runs of it.
    pub(crate) fn stored_nothing(&self, operator: Operator<'_>) -> Result<()> {
        ensure!(self.last_step == 1, "it got to step {}", self.last_step);
        let requests = mesh::requests(operator.space.cluster(), operator.space.name(), operator::NAME)?;
        let its = |one: &&AuditEvent| one.user.pod_uid().is_some_and(|uid| self.pods.contains(uid));
        let (mut dry_runs, its) = (0, requests.iter().filter(its));
        for request in its {
            ensure!(!is_divided_write(request), "it has written: {request:?}");
            dry_runs += usize::from(request.query("dryRun").is_some());
        }
        ensure!(dry_runs > 0, "it meant to write nothing");
        Ok(())
    }

    /// From the verdict to the last slot's being granted back.
    pub(crate) fn returned_within(&self) -> Duration {
        Duration::try_from(self.returned_at.duration_since(self.rejected_at)).unwrap_or_default()
    }
}

/// All writes of the root's status, in their order.
fn history(operator: Operator<'_>) -> Result<Vec<StatusWrite>> {
    let events = mesh::events(operator.space.cluster(), "\"shardingconfigs\"")?;
    let mut history: Vec<StatusWrite> = events.into_iter().filter_map(|event| status_write(event, operator)).collect();
    history.sort_by_key(|write| (write.version, write.at));
    Ok(history)
}

/// `None` where it is no write that came about, or not of the operator's root.
fn status_write(event: AuditEvent, operator: Operator<'_>) -> Option<StatusWrite> {
    let object = &event.object;
    let is_root =
        object.resource == "shardingconfigs" && object.name == ROOT && object.namespace == operator.space.name();
    let is_done = event.stage == "ResponseComplete" && (200..300).contains(&event.response_status.code);
    if !is_root || !is_done || !event.is_write() {
        return None;
    }
    let root: ShardingConfig = serde_json::from_value(event.response_object).ok()?;
    let version = root.metadata.resource_version?.parse().ok()?;
    Some(StatusWrite { version, at: event.at, status: root.status? })
}

fn is_tried(write: &StatusWrite, revision: &str) -> bool {
    let trial = write.status.rollout.as_ref().and_then(|rollout| rollout.trial.as_ref());
    trial.is_some_and(|trial| trial.revision == revision)
}

fn is_rejected(write: &StatusWrite, revision: &str) -> bool {
    write.status.rollout.iter().flat_map(|rollout| &rollout.rejected).any(|one| one.revision == revision)
}

/// Whether the shards of the promoted version are those with the second names.
fn is_second(write: &StatusWrite) -> bool {
    write.status.rollout.as_ref().is_some_and(|rollout| rollout.second)
}

/// Whether every slot is of the shards with these names.
fn is_returned(table: &Ownership, second: bool) -> bool {
    table.is_total() && table.slots.values().all(|shard| is_shard_of(shard, second))
}

/// Whether a shard of the root has one of the second names, or one of the first ones.
fn is_shard_of(shard: &str, second: bool) -> bool {
    shard.ends_with(if second { "-second" } else { "-normal" })
}

/// Whether it writes something that the root divides, and was not refused by a fence. A status that the schema refuses
/// counts, too.
fn is_divided_write(event: &AuditEvent) -> bool {
    let object = &event.object;
    let dot = if object.api_group.is_empty() { "" } else { "." };
    let is_divided = DIVIDED.contains(&format!("{}{dot}{}", object.resource, object.api_group).as_str());
    let code = event.response_status.code;
    is_divided && event.is_write() && event.stage == "ResponseComplete" && ((200..300).contains(&code) || code == 422)
}

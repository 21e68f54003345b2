//! Which epoch is it for an operator, and what has its status to say?

use std::collections::BTreeMap;

use ctrlmesh_common::api::{ShardingConfig, ShardingConfigStatus};
use ctrlmesh_common::ownership::{MAX_EPOCH, Ownership};
use ctrlmesh_common::slots;

use super::{Operator, Policies, Record};

/// The record of a valid `operator` whose shards are told `policies`, which are in no epoch yet.
///
/// The epoch is the written one where what was written says the same; else it is later than all that were written for
/// the operator, its shards included, which stand by themselves while their root is switched off. One that leaves no room
/// for a later one, and was written by somebody else, is as none: it would be told nothing new for ever.
pub(super) fn of(
    operator: &Operator<'_>,
    policies: &Policies,
    configs: &[ShardingConfig],
) -> Record {
    let status = operator.status();
    let mut before = status.and_then(|status| status.ownership.clone()).unwrap_or_default();
    before.epoch = possible(before.epoch);
    let (written, newest) = (epoch(status), newest(operator, configs));
    let table = operator.table();
    let policy_digest = digest(table.as_ref(), texts(policies));
    let said = status.and_then(|status| status.policy_digest.as_ref());
    let unchanged = said == Some(&policy_digest)
        && written > 0
        && written == newest
        && table.as_ref().is_none_or(|table| !moved(&before, table));
    let next = newest.max(before.epoch) + 1;
    Record {
        epoch: if unchanged { written } else { next },
        policy_digest,
        written: unchanged,
        ownership: table.map(|table| {
            let after = table.after(&before);
            let changed = after.epoch != before.epoch || before.epoch == 0;
            Ownership { epoch: if changed { next } else { before.epoch }, ..after }
        }),
        shards: if operator.is_root() { alone(policies) } else { BTreeMap::new() },
        unserved: operator.unserved(),
    }
}

/// When what the pods are told last changed: where that is written down, the same for every replica.
pub(super) fn changed_at(operator: &Operator<'_>, record: &Record) -> Option<u64> {
    let status = operator.status().filter(|_| record.written)?;
    status.changed_at.as_ref()?.parse().ok()
}

/// Whether what stands in the status of `operator` is what its shards are told by `policies`.
pub(super) fn is_written(operator: &Operator<'_>, policies: &Policies) -> bool {
    let said = operator.status().and_then(|status| status.policy_digest.as_ref());
    said == Some(&digest(operator.table().as_ref(), texts(policies)))
}

/// The newest epoch that was written down for the operator, for a shard of its, or, where it is itself what a root has
/// made that makes nothing now, for that root: its pods were told by it.
fn newest(operator: &Operator<'_>, configs: &[ShardingConfig]) -> u64 {
    let affiliation =
        configs.iter().filter(|config| operator.is_shard(config) || operator.is_made_by(config));
    let epochs = affiliation.map(|config| epoch(config.status.as_ref()));
    epochs.chain([epoch(operator.status())]).max().unwrap_or_default()
}

/// Whether a pod is of another shard than before.
fn moved(before: &Ownership, after: &Ownership) -> bool {
    after.pods.iter().any(|(pod, shard)| before.pods.get(pod).is_some_and(|one| one != shard))
}

/// The shards, each with the hash that it would have by itself.
fn alone(policies: &Policies) -> BTreeMap<String, String> {
    let digest = |(name, text): (&str, &str)| (name.to_owned(), digest(None, [(name, text)]));
    texts(policies).map(digest).collect()
}

fn texts(policies: &Policies) -> impl Iterator<Item = (&str, &str)> {
    policies.iter().map(|(name, draft)| (name.as_str(), draft.text.as_str()))
}

/// A hash of who owns what, pods aside, and of what each shard is told.
fn digest<'a>(
    table: Option<&Ownership>,
    policies: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> String {
    let owned = table.map(|table| (&table.slots, &table.namespaces));
    // Maps of text to text, lists and numbers: there is nothing that JSON could not say.
    let owned = serde_json::to_string(&owned).unwrap_or_default();
    let policies = policies
        .into_iter()
        .map(|(name, text)| format!("{}:{text}", serde_json::to_string(name).unwrap_or_default()));
    let policies: Vec<String> = policies.collect();
    let text = format!("[{owned},{{{}}}]", policies.join(","));
    format!("{:016x}", slots::fnv1a(text.as_bytes()))
}

fn epoch(status: Option<&ShardingConfigStatus>) -> u64 {
    let epoch = status.and_then(|status| status.epoch);
    epoch.and_then(|epoch| u64::try_from(epoch).ok()).map(possible).unwrap_or_default()
}

/// The epoch, where there can be a later one; else 0.
fn possible(epoch: u64) -> u64 {
    if epoch < MAX_EPOCH { epoch } else { 0 }
}

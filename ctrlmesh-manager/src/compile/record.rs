//! Which epoch is it for an operator, and what has its status to say?

use std::collections::BTreeMap;

use ctrlmesh_common::api::{ShardingConfig, ShardingConfigStatus};
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::slots;

use super::{Operator, Record};

/// The record of a valid `operator` whose shards are told `policies`, which are in no epoch yet.
///
/// The epoch is the written one where what was written says the same; else it is later than all that were written for
/// the operator, its shards included, which stand by themselves while their root is switched off.
pub(super) fn of(
    operator: &Operator<'_>,
    policies: &BTreeMap<String, Policy>,
    configs: &[ShardingConfig],
) -> Record {
    let status = operator.status();
    let before = status.and_then(|status| status.ownership.clone()).unwrap_or_default();
    let (written, newest) = (epoch(status), newest(operator, configs));
    let table = operator.table();
    let policy_digest = digest(table.as_ref(), policies);
    let said = status.and_then(|status| status.policy_digest.as_ref());
    let unchanged = said == Some(&policy_digest)
        && written == newest
        && table.as_ref().is_none_or(|table| !moved(&before, table));
    let next = newest.max(before.epoch).saturating_add(1);
    Record {
        epoch: if unchanged { written } else { next },
        policy_digest,
        written: unchanged,
        ownership: table.map(|table| {
            let after = table.after(&before);
            let changed = after.epoch != before.epoch;
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
pub(super) fn is_written(operator: &Operator<'_>, policies: &BTreeMap<String, Policy>) -> bool {
    let said = operator.status().and_then(|status| status.policy_digest.as_ref());
    said == Some(&digest(operator.table().as_ref(), policies))
}

/// The newest epoch that was written down for the operator or for a shard of its.
fn newest(operator: &Operator<'_>, configs: &[ShardingConfig]) -> u64 {
    let shards = configs.iter().filter(|config| operator.is_shard(config));
    let epochs = shards.map(|config| epoch(config.status.as_ref()));
    epochs.chain([epoch(operator.status())]).max().unwrap_or_default()
}

/// Whether a pod is of another shard than before.
fn moved(before: &Ownership, after: &Ownership) -> bool {
    after.pods.iter().any(|(pod, shard)| before.pods.get(pod).is_some_and(|one| one != shard))
}

/// The shards, each with the hash that it would have by itself.
fn alone(policies: &BTreeMap<String, Policy>) -> BTreeMap<String, String> {
    let digest = |(name, policy): (&String, &Policy)| {
        (name.clone(), digest(None, &[(name.clone(), policy.clone())].into()))
    };
    policies.iter().map(digest).collect()
}

/// A hash of who owns what, pods aside, and of what each shard is told.
fn digest(table: Option<&Ownership>, policies: &BTreeMap<String, Policy>) -> String {
    let owned = table.map(|table| (&table.slots, &table.namespaces));
    // Maps of text to text, lists and numbers: there is nothing that JSON could not say.
    let text = serde_json::to_vec(&(owned, policies)).unwrap_or_default();
    format!("{:016x}", slots::fnv1a(&text))
}

fn epoch(status: Option<&ShardingConfigStatus>) -> u64 {
    let epoch = status.and_then(|status| status.epoch);
    epoch.and_then(|epoch| u64::try_from(epoch).ok()).unwrap_or_default()
}

//! Decides the epoch of an operator and what goes into its status.

use std::collections::BTreeMap;

use ctrlmesh_common::api::{ShardingConfig, ShardingConfigStatus};
use ctrlmesh_common::ownership::{MAX_EPOCH, Ownership};
use ctrlmesh_common::slots;

use super::{Drafts, Operator, Record, handover};
use crate::rules::shard::{self, Shard};

/// The record of a valid `operator`.
///
/// The epoch stays if the status has the same content. Else it is greater than all epochs of the operator and
/// its shards, which are standalone while their root is switched off. An epoch without room for a later one
/// was written by somebody else, and is ignored.
pub(super) fn of(operator: &Operator<'_>, drafts: &Drafts, configs: &[&ShardingConfig]) -> Record {
    let status = operator.status();
    let before = handover::current(operator.config());
    let (written, newest) = (epoch(status), newest(operator, configs));
    let table = operator.table();
    let policy_digest = digest(table, texts(drafts));
    let digest_in_status = status.and_then(|status| status.policy_digest.as_ref());
    let unchanged = digest_in_status == Some(&policy_digest)
        && written > 0
        && written == newest
        && table.is_none_or(|table| !moved(&before, table));
    let next = newest.max(before.epoch) + 1;
    let handover = operator.handover();
    let wanted = handover.map(|handover| handover.wanted.clone()).unwrap_or_default();
    let differs = status.map_or(!wanted.is_empty(), |status| status.wanted != wanted);
    let moves = handover.is_some_and(|handover| handover.step.table != before || differs);
    Record {
        epoch: if unchanged { written } else { next },
        policy_digest,
        written: unchanged,
        ownership: table.map(|table| {
            if handover.is_some() {
                return table.clone();
            }
            let after = table.clone().after(&before);
            let changed = after.epoch != before.epoch || before.epoch == 0;
            Ownership { epoch: if changed { next } else { before.epoch }, ..after }
        }),
        shards: if operator.is_root() { shard_digests(drafts) } else { BTreeMap::new() },
        unserved: operator.unserved(),
        waiting: handover.map(|handover| handover.waiting.clone()).unwrap_or_default(),
        moves,
        wanted,
    }
}

/// The version at which the policies last changed, if it is written; all replicas read the same.
pub(super) fn changed_at(operator: &Operator<'_>, record: &Record) -> Option<u64> {
    let status = operator.status().filter(|_| record.written)?;
    status.changed_at.as_ref()?.parse().ok()
}

/// Whether the status of `operator` has the hash of `drafts`.
pub(super) fn is_written(operator: &Operator<'_>, drafts: &Drafts) -> bool {
    let digest_in_status = operator.status().and_then(|status| status.policy_digest.as_ref());
    digest_in_status == Some(&digest(operator.table(), texts(drafts)))
}

/// The newest epoch in the status of the operator, of its shards, or of the inactive root that made it.
fn newest(operator: &Operator<'_>, configs: &[&ShardingConfig]) -> u64 {
    let related = configs.iter().filter(|config| operator.is_shard(config) || operator.is_made_by(config));
    let epochs = related.map(|config| epoch(config.status.as_ref()));
    epochs.chain([epoch(operator.status())]).max().unwrap_or_default()
}

/// The same for a root, from its parts.
pub(super) fn newest_of_root(root: &ShardingConfig, shards: &[Shard], configs: &[&ShardingConfig]) -> u64 {
    let is_shard = |config: &&&ShardingConfig| {
        shard::is_of(root, config) || shards.iter().any(|shard| shard::adopts(root, shard, config))
    };
    let epochs = configs.iter().filter(is_shard).map(|config| epoch(config.status.as_ref()));
    epochs.chain([epoch(root.status.as_ref())]).max().unwrap_or_default()
}

/// Whether a pod has another shard than before, or writes for another owner. One that is gone does not count.
fn moved(before: &Ownership, after: &Ownership) -> bool {
    let placed = after.pods.iter().any(|(pod, shard)| before.pods.get(pod).is_some_and(|one| one != shard));
    let taken = |table: &Ownership| table.revoked.as_ref().map(|revoked| revoked.pod_uids.clone()).unwrap_or_default();
    let (was_taken, is_taken) = (taken(before), taken(after));
    let owner = |uid: &String| before.pod_uids.get(uid);
    let writes = after
        .pod_uids
        .iter()
        .any(|(uid, now)| owner(uid).is_some_and(|owner| owner != now) || was_taken.contains_key(uid));
    placed || writes || is_taken.keys().any(|uid| !was_taken.contains_key(uid))
}

/// The hash of each shard by itself.
fn shard_digests(drafts: &Drafts) -> BTreeMap<String, String> {
    let digest = |(name, text): (&str, &[u8])| (name.to_owned(), digest(None, [(name, text)]));
    texts(drafts).map(digest).collect()
}

fn texts(drafts: &Drafts) -> impl Iterator<Item = (&str, &[u8])> {
    drafts.iter().map(|(name, draft)| (name.as_str(), &draft.json()[..]))
}

/// Hash of the ownership of slots and namespaces, of what is taken away, and of all policies.
fn digest<'a>(table: Option<&Ownership>, policies: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> String {
    let owned = table.map(|table| (&table.slots, &table.namespaces));
    let revoked = table.and_then(|table| table.revoked.as_ref());
    // Maps, strings, lists and numbers always serialise.
    let mut text = b"[".to_vec();
    text.extend(serde_json::to_vec(&owned).unwrap_or_default());
    if let Some(revoked) = revoked {
        text.push(b',');
        text.extend(serde_json::to_vec(&(&revoked.slots, &revoked.namespaces)).unwrap_or_default());
    }
    text.extend_from_slice(b",{");
    for (at, (name, policy)) in policies.into_iter().enumerate() {
        if at > 0 {
            text.push(b',');
        }
        text.extend(serde_json::to_vec(name).unwrap_or_default());
        text.push(b':');
        text.extend_from_slice(policy);
    }
    text.extend_from_slice(b"}]");
    format!("{:016x}", slots::fnv1a(&text))
}

fn epoch(status: Option<&ShardingConfigStatus>) -> u64 {
    let epoch = status.and_then(|status| status.epoch);
    epoch.and_then(|epoch| u64::try_from(epoch).ok()).map(extendable).unwrap_or_default()
}

/// 0 if there can be no later epoch.
pub(super) fn extendable(epoch: u64) -> u64 {
    if epoch < MAX_EPOCH { epoch } else { 0 }
}

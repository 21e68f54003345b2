//! Assigns pods to shards.
//!
//! A StatefulSet's pods are assigned by ordinal. A Deployment's pods keep a recorded shard, which they get at
//! admission by what their own revision lacks. So a rollout in any order ends with the same division, and
//! moves no pod on its way. A move takes a standby: a leader would leave its own shard without one.

use std::collections::BTreeMap;

use super::Share;

/// A pod of a Deployment that needs a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodRecord {
    pub pod: String,
    /// Of the pod's template.
    pub revision: String,
    /// Assigned before.
    pub shard: Option<String>,
    /// Being deleted: it keeps its shard, which needs another pod.
    pub terminating: bool,
    pub ready: bool,
    /// Whether another pod of its shard works in its place, as far as anybody but the operator knows.
    pub stands_by: bool,
    /// In seconds since 1970.
    pub created_at: Option<i64>,
}

/// Which pods of a Deployment may move to another shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moves {
    /// A rollout is under way, or a pod will be replaced.
    None,
    /// There are fewer pods than there should be. One that is not ready may be new, and the next may be on its way.
    Ready,
    All,
}

/// In the order of the shards, as many pods each as it should have. Further pods go to the normal shards in
/// turn. `None` if there is no shard.
pub fn by_ordinal(shares: &[Share], ordinal: u32) -> Option<&Share> {
    let mut left = usize::try_from(ordinal).ok()?;
    for share in shares {
        if left < share.replicas {
            return Some(share);
        }
        left -= share.replicas;
    }
    let normal: Vec<&Share> = shares.iter().filter(|share| !share.canary).collect();
    left.checked_rem(normal.len()).map(|at| normal[at])
}

/// The shard for a new pod of `revision`.
pub fn choose<'a>(shares: &'a [Share], records: &[PodRecord], revision: &str) -> Option<&'a Share> {
    let count = |share: &Share, revision: Option<&str>| {
        let of_share = |record: &&PodRecord| {
            !record.terminating
                && record.shard.as_deref() == Some(&share.name)
                && revision.is_none_or(|revision| record.revision == revision)
        };
        records.iter().filter(of_share).count()
    };
    shares.iter().min_by_key(|share| {
        let (here, all) = (count(share, Some(revision)), count(share, None));
        let full = here >= share.replicas;
        let lacking = share.replicas.saturating_sub(here);
        let beyond = here.saturating_sub(share.replicas);
        // First a shard without a pod of this revision, and of those one without any pod. Then the one that
        // lacks most. If none lacks any, a normal shard with the fewest spare pods.
        (here > 0, full, share.canary && full, all > 0, usize::MAX - lacking, beyond, all)
    })
}

/// The shard of every pod, by name. A pod keeps its shard while that exists.
///
/// Pods that may move do so: to a shard without any, and from shards with too many to those with too few.
pub fn assign(shares: &[Share], records: &[PodRecord], moves: Moves) -> BTreeMap<String, String> {
    let mut records = as_assigned(shares, records.to_vec());
    while let Some((pod, to)) = misplaced(shares, &records, moves) {
        records[pod].shard = Some(to);
    }
    records.into_iter().filter_map(|record| Some((record.pod, record.shard?))).collect()
}

/// The same pods, each with its shard. One whose shard is recorded nowhere yet has one all the same, and counts for the
/// next: without that, the next would get the same shard, and this one would have to move.
pub fn as_assigned(shares: &[Share], mut records: Vec<PodRecord>) -> Vec<PodRecord> {
    records.sort_by(|one, other| one.pod.cmp(&other.pod));
    for record in &mut records {
        let exists = |name: &String| shares.iter().any(|share| share.name == *name);
        record.shard = record.shard.take().filter(exists);
    }
    for at in 0..records.len() {
        if records[at].shard.is_none() {
            records[at].shard = choose(shares, &records, &records[at].revision).map(|share| share.name.clone());
        }
    }
    records
}

pub fn unserved<'a>(
    shares: impl IntoIterator<Item = &'a Share>,
    assignment: &'a BTreeMap<String, String>,
) -> impl Iterator<Item = &'a str> {
    let names = shares.into_iter().map(|share| share.name.as_str());
    names.filter(|name| !assignment.values().any(|shard| shard == name))
}

/// A pod that another shard needs more, and that shard. Every move reduces what is lacking, so the moves end.
fn misplaced(shares: &[Share], records: &[PodRecord], moves: Moves) -> Option<(usize, String)> {
    let count = |share: &Share| {
        let of_share = |record: &&PodRecord| !record.terminating && record.shard.as_deref() == Some(&share.name);
        records.iter().filter(of_share).count()
    };
    let counted: Vec<(&Share, usize)> = shares.iter().map(|share| (share, count(share))).collect();
    let empty = counted.iter().find(|(_, pods)| *pods == 0);
    let lacking = counted.iter().find(|(share, pods)| *pods < share.replicas);
    let most = |least: &dyn Fn(&Share) -> usize| {
        let donors = counted.iter().filter(|(share, pods)| *pods > least(share));
        donors.max_by_key(|(share, pods)| pods - least(share)).map(|(share, _)| *share)
    };
    let surplus = |share: &Share| share.replicas;
    let (from, to) = match (empty, lacking) {
        (Some((to, _)), _) => (most(&surplus).or_else(|| most(&|_| 1))?, to),
        (None, Some((to, _))) => (most(&surplus)?, to),
        (None, None) => return None,
    };
    Some((standby(records, &from.name, moves)?, to.name.clone()))
}

/// The pod of `shard` that is least likely to lead: one that is not ready, or that stands by, or else the youngest.
/// Never the only one that is ready.
fn standby(records: &[PodRecord], shard: &str, moves: Moves) -> Option<usize> {
    let staying = |record: &&PodRecord| !record.terminating && record.shard.as_deref() == Some(shard);
    let ready = records.iter().filter(staying).filter(|record| record.ready).count();
    let all = records.iter().enumerate().filter(|(_, record)| staying(record));
    let may_go = all.filter(|(_, record)| match moves {
        Moves::None => false,
        Moves::Ready => record.ready && ready > 1,
        Moves::All => !record.ready || ready > 1,
    });
    let standby = may_go.max_by_key(|(at, record)| (!record.ready, record.stands_by, record.created_at, *at));
    standby.map(|(at, _)| at)
}

#[cfg(test)]
mod tests;

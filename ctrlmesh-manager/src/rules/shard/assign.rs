//! Which pod is of which shard?
//!
//! A StatefulSet's pods by their ordinal. A Deployment's pods have none, so theirs is a record that is kept: a pod gets
//! a shard when it is admitted, by what its own revision lacks. So a rollout, whatever it replaces first, ends with the
//! same division, and moves no pod on its way.

use std::collections::BTreeMap;

use super::Share;

/// A pod that has to have a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodRecord {
    /// The pod's name.
    pub pod: String,
    /// The revision of the pod's template.
    pub revision: String,
    /// The shard that it was given.
    pub shard: Option<String>,
    /// Whether the pod is on its way out: it keeps its shard, and another is needed in its place.
    pub leaving: bool,
}

/// The shard of the pod with this ordinal: in the order of the shards, as many each as it should have. Pods beyond
/// that stand by for the normal shards in turn; none without any shard.
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

/// The shard for a new pod of `revision`, beside those that are there.
pub fn choose<'a>(shares: &'a [Share], seats: &[PodRecord], revision: &str) -> Option<&'a Share> {
    let count = |share: &Share, revision: Option<&str>| {
        let of_share = |seat: &&PodRecord| {
            !seat.leaving
                && seat.shard.as_deref() == Some(&share.name)
                && revision.is_none_or(|revision| seat.revision == revision)
        };
        seats.iter().filter(of_share).count()
    };
    shares.iter().min_by_key(|share| {
        let (here, all) = (count(share, Some(revision)), count(share, None));
        let full = here >= share.replicas;
        let lacking = share.replicas.saturating_sub(here);
        let beyond = here.saturating_sub(share.replicas);
        // First who has none of this revision, and of those who has none at all; then who lacks most; where nobody
        // lacks any, not the canary, and who has the fewest to spare.
        (here > 0, full, share.canary && full, all > 0, usize::MAX - lacking, beyond, all)
    })
}

/// The shard of every pod. A pod keeps the one that it has for as long as that exists.
///
/// Where `settled` (one revision, and nobody who goes will yet be replaced), pods also move: to a shard that has none, and
/// from shards with more pods than they should have to those with fewer. Empty where there is no shard.
pub fn assign(shares: &[Share], seats: &[PodRecord], settled: bool) -> BTreeMap<String, String> {
    let mut seats = seats.to_vec();
    seats.sort_by(|one, other| one.pod.cmp(&other.pod));
    for seat in &mut seats {
        let exists = |name: &String| shares.iter().any(|share| share.name == *name);
        seat.shard = seat.shard.take().filter(exists);
    }
    for at in 0..seats.len() {
        if seats[at].shard.is_none() {
            seats[at].shard =
                choose(shares, &seats, &seats[at].revision).map(|share| share.name.clone());
        }
    }
    if settled {
        while let Some((pod, to)) = misplaced(shares, &seats) {
            seats[pod].shard = Some(to);
        }
    }
    seats.into_iter().filter_map(|seat| Some((seat.pod, seat.shard?))).collect()
}

/// The shards that no pod is of.
pub fn unserved<'a>(
    shares: impl IntoIterator<Item = &'a Share>,
    assignment: &'a BTreeMap<String, String>,
) -> impl Iterator<Item = &'a str> {
    let names = shares.into_iter().map(|share| share.name.as_str());
    names.filter(|name| !assignment.values().any(|shard| shard == name))
}

/// A pod that another shard needs more, and that shard. Every move lessens what is lacking, so they come to an end.
fn misplaced(shares: &[Share], seats: &[PodRecord]) -> Option<(usize, String)> {
    let count = |share: &Share| {
        let of_share =
            |seat: &&PodRecord| !seat.leaving && seat.shard.as_deref() == Some(&share.name);
        seats.iter().filter(of_share).count()
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
    let last = seats
        .iter()
        .rposition(|seat| !seat.leaving && seat.shard.as_deref() == Some(&from.name))?;
    Some((last, to.name.clone()))
}

#[cfg(test)]
mod tests;

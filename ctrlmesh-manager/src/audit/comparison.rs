//! Compares the objects of each kind with who sees and watches them.
//!
//! Pure, but for the time.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::share;

use super::holders::{Holder, KindHolder, Watching};
use super::operators::{Audited, IntendedOwner, KindDivision, has_labels};
use crate::labels::{AlikeObjects, ListedKind, ObjectCounts};
use crate::rules::shard::Labelling;

/// Objects that are named as examples.
pub(super) const EXAMPLES: usize = 10;

/// Why an object has not exactly one owner that watches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Gap {
    /// It lacks the labels by which shards see it.
    Unlabelled,
    /// It is on its way from one shard to another.
    Moving,
    /// No shard is to own it.
    NoShard,
    /// Its shard has no pod.
    NoPod,
    /// Its shard has pods, and no proxy of them has a policy in force by which it sees the object.
    NoPolicy,
    /// Its shard sees it, and no pod of the shard watches it any more.
    Unwatched,
    /// Its shard sees it, and no pod of the shard ever watched it, as far as is known.
    NeverWatched,
    /// Its shard saw it, and nothing was heard of the shard's proxies for a while.
    ProxyAway,
    /// More than one shard sees it.
    Doubled,
}

impl Gap {
    /// Those of objects without an owner.
    pub(super) const UNOWNED: [Self; 8] = [
        Self::Unlabelled,
        Self::Moving,
        Self::NoShard,
        Self::NoPod,
        Self::NoPolicy,
        Self::Unwatched,
        Self::NeverWatched,
        Self::ProxyAway,
    ];

    /// As metrics have it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Unlabelled => "unlabelled",
            Self::Moving => "moving",
            Self::NoShard => "no_shard",
            Self::NoPod => "no_pod",
            Self::NoPolicy => "no_policy",
            Self::Unwatched => "unwatched",
            Self::NeverWatched => "never_watched",
            Self::ProxyAway => "proxy_away",
            Self::Doubled => "doubled",
        }
    }
}

/// By group and plural.
pub(super) type KindKey = (String, String);

/// Why, and whose the objects should be; without a shard where that is nobody's.
pub(super) type GapKey = (Gap, Option<String>);

/// By name of the operator, and kind.
pub(super) type Audit = BTreeMap<String, BTreeMap<KindKey, KindState>>;

/// What is known of one kind that an operator divides.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum KindState {
    Audited(KindAudit),
    /// Its objects are listed for the first time.
    InProgress,
    /// Its objects cannot be listed, or are not labelled.
    Unknown,
}

/// The objects of one kind that an operator divides.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct KindAudit {
    /// With exactly one owner that watches them.
    pub(super) owned: u64,
    /// All others.
    pub(super) gaps: BTreeMap<GapKey, GapObjects>,
    /// How many objects each shard is to own.
    pub(super) by_shard: BTreeMap<String, u64>,
}

/// Objects that have a gap.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct GapObjects {
    pub(super) count: u64,
    /// At most [`EXAMPLES`].
    pub(super) examples: Vec<String>,
    /// When they were last watched, in milliseconds since 1970; 0: not known.
    pub(super) last_watched: u64,
}

/// Compares the kinds of one operator. `holders` are what its pods have in force. `known` are kinds that its pods were
/// once known to watch; more are added.
pub(super) fn compare(
    audited: &Audited<'_>,
    holders: &[&Holder<'_>],
    objects: &ObjectCounts,
    labelling: &Labelling,
    known: &mut BTreeSet<KindKey>,
) -> BTreeMap<KindKey, KindState> {
    let labelled = objects.kinds().into_iter().filter(|(group, plural)| audited.divides(group, plural));
    let kinds: BTreeSet<KindKey> = labelled.chain(audited.needed_kinds()).collect();
    let mut compared = BTreeMap::new();
    for kind in kinds {
        let (group, plural) = (kind.0.as_str(), kind.1.as_str());
        let holders: Vec<KindHolder<'_>> = holders.iter().map(|holder| holder.of_kind(group, plural)).collect();
        if holders.iter().any(KindHolder::has_ever_watched) {
            known.insert(kind.clone());
        }
        // `*` stands for all kinds, and the operator may know only some of them.
        if !known.contains(&kind) && !audited.writes_out(group, plural) {
            continue;
        }
        let division = audited.kind(group, plural);
        let state = objects.with_kind(group, plural, |listed| match listed {
            ListedKind::Objects(alike) => {
                let mut audit = KindAudit::default();
                audit.by_shard.extend(division.shards().into_iter().map(|shard| (shard.to_owned(), 0)));
                alike.for_each(|objects| audit.add(&objects, audited, &division, &holders, labelling));
                KindState::Audited(audit)
            }
            ListedKind::InProgress => KindState::InProgress,
            ListedKind::Stale | ListedKind::Unlabelled => KindState::Unknown,
        });
        compared.insert(kind, state);
    }
    compared
}

impl KindAudit {
    fn add(
        &mut self,
        objects: &AlikeObjects<'_>,
        audited: &Audited<'_>,
        division: &KindDivision<'_>,
        holders: &[KindHolder<'_>],
        labelling: &Labelling,
    ) {
        let Some(intended) = division.intended_owner(objects) else { return };
        if let IntendedOwner::Shard(shard) = intended {
            *self.by_shard.entry(shard.to_owned()).or_default() += objects.count;
        }
        let seeing: Vec<&KindHolder<'_>> = holders.iter().filter(|holder| holder.sees(objects.labels)).collect();
        let mut shards: BTreeSet<Option<&str>> = seeing.iter().map(|holder| Some(holder.shard)).collect();
        if intended == IntendedOwner::Unsharded && audited.has_unenrolled() {
            // Of pods without a proxy it is not known what they watch.
            shards.insert(None);
        }
        let mut last_watched = 0;
        let gap = match shards.len() {
            0 if division.is_by_our_labels() && !has_labels(objects.labels, labelling, objects) => {
                Some(Gap::Unlabelled)
            }
            0 => Some(unseen(intended, audited)),
            1 if shards.contains(&None) => None,
            1 => {
                let watching = watching(&seeing, objects.namespace);
                if let Watching::No { last } = watching {
                    last_watched = last;
                }
                match watching {
                    Watching::Now => None,
                    Watching::No { .. } => Some(Gap::Unwatched),
                    Watching::Never => Some(Gap::NeverWatched),
                    Watching::Away => Some(Gap::ProxyAway),
                }
            }
            _ => Some(Gap::Doubled),
        };
        let Some(gap) = gap else {
            self.owned += objects.count;
            return;
        };
        let owner = match (gap, intended) {
            (Gap::Unwatched | Gap::NeverWatched | Gap::ProxyAway, _) => {
                seeing.first().map(|holder| holder.shard.to_owned())
            }
            (Gap::Doubled, _) => Some(shards.into_iter().flatten().collect::<Vec<_>>().join(" and ")),
            (_, IntendedOwner::Shard(shard)) => Some(shard.to_owned()),
            _ => None,
        };
        let of_gap = self.gaps.entry((gap, owner)).or_default();
        of_gap.count += objects.count;
        of_gap.last_watched = of_gap.last_watched.max(last_watched);
        let room = EXAMPLES.saturating_sub(of_gap.examples.len());
        of_gap.examples.extend(objects.examples(room).into_iter().take(room));
    }

    /// The objects with a gap, without those that have two owners.
    pub(super) fn unowned(&self) -> impl Iterator<Item = (Gap, &GapObjects)> {
        let gaps = self.gaps.iter().filter(|((gap, _), _)| *gap != Gap::Doubled);
        gaps.map(|((gap, _), objects)| (*gap, objects))
    }

    pub(super) fn doubled(&self) -> u64 {
        self.gaps.iter().filter(|((gap, _), _)| *gap == Gap::Doubled).map(|(_, objects)| objects.count).sum()
    }

    /// How many times as much as the mean the shard with the most objects is to own. `None`: there is nothing to own.
    pub(super) fn imbalance(&self) -> Option<f64> {
        share::imbalance(self.by_shard.values().copied())
    }
}

/// Why no shard sees objects that have their labels.
fn unseen(intended: IntendedOwner<'_>, audited: &Audited<'_>) -> Gap {
    match intended {
        IntendedOwner::Nobody { moves: true } => Gap::Moving,
        IntendedOwner::Nobody { moves: false } => Gap::NoShard,
        IntendedOwner::Shard(shard) if audited.is_staffed(shard) => Gap::NoPolicy,
        IntendedOwner::Shard(_) | IntendedOwner::Unsharded => Gap::NoPod,
    }
}

/// The best of what pods of one shard do.
fn watching(seeing: &[&KindHolder<'_>], namespace: Option<&str>) -> Watching {
    let all = seeing.iter().map(|holder| holder.watching(namespace));
    all.fold(Watching::Never, |best, one| match (best, one) {
        (Watching::Now, _) | (_, Watching::Now) => Watching::Now,
        (Watching::Away, _) | (_, Watching::Away) => Watching::Away,
        (Watching::No { last: one }, Watching::No { last: other }) => Watching::No { last: one.max(other) },
        (no @ Watching::No { .. }, Watching::Never) | (Watching::Never, no) => no,
    })
}

#[cfg(test)]
mod tests;

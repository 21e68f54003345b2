//! Which shards the versions of a root's operator have, and what a version on trial owns.
//!
//! Two versions never share a shard: the promoted one has the shards with the first names or with the second ones, and
//! the next version has the others. So the locks of a pod's shard stay the pod's own when its version is promoted.

use std::collections::BTreeSet;

use ctrlmesh_common::api::{RolloutStatus, ShardingConfig, Trial, TrialPhase};
use ctrlmesh_common::names;
use ctrlmesh_common::rollout;
use ctrlmesh_common::slots::{Slot, SlotSet};

/// The versions, as the root's status has them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Versions<'a> {
    status: Option<&'a RolloutStatus>,
    /// Whether the next version gets shards of its own.
    has_rollout: bool,
}

impl<'a> Versions<'a> {
    pub fn of(root: &'a ShardingConfig) -> Self {
        let status = root.status.as_ref().and_then(|status| status.rollout.as_ref());
        let has_rollout = root.spec.root.as_ref().is_some_and(|rule| rule.rollout.is_some());
        Self { status, has_rollout }
    }

    /// Whether the promoted version has the shards with the second names.
    pub fn promoted_is_second(self) -> bool {
        self.status.is_some_and(|status| status.second)
    }

    /// Whether the shards that own what no trial owns are those with the second names.
    pub fn main_is_second(self) -> bool {
        self.promoted_is_second() != self.is_promoting()
    }

    /// Whether pods of this revision are of the shards with the second names. Without a rollout there is one version.
    pub fn is_second(self, revision: Option<&str>) -> bool {
        match (self.status, revision) {
            (Some(status), Some(revision)) if self.has_rollout => rollout::is_second(status, revision),
            _ => self.main_is_second(),
        }
    }

    pub fn has_rollout(self) -> bool {
        self.has_rollout
    }

    /// The version that is tried.
    pub fn trial(self) -> Option<&'a Trial> {
        self.status?.trial.as_ref().filter(|_| self.has_rollout)
    }

    /// Whether the next version takes over everything.
    pub fn is_promoting(self) -> bool {
        self.trial().is_some_and(|trial| trial.phase == TrialPhase::Promoting)
    }

    /// The slots that the version on trial owns.
    pub(super) fn slots(self) -> SlotSet {
        let slots = self.trial().into_iter().flat_map(|trial| &trial.slots);
        slots.filter_map(|slot| slot.parse::<Slot>().ok()).collect()
    }

    /// The namespaces that it owns besides.
    pub(super) fn namespaces(self) -> BTreeSet<String> {
        self.trial().into_iter().flat_map(|trial| trial.namespaces.iter().cloned()).collect()
    }
}

/// The name of a root's shard. Validation has checked the length of the prefix.
pub(super) fn shard_name(prefix: &str, id: usize, second: bool) -> String {
    let name = if second { names::second_shard(prefix, id) } else { names::shard(prefix, id) };
    name.unwrap_or_else(|too_long| too_long.name)
}

/// Whether a root's shard of this name is one with a second name.
pub fn has_second_name(shard: &str) -> bool {
    shard.ends_with("-second")
}

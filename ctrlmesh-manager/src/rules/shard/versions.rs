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
    begins_with_shadow: bool,
}

/// A part of the objects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Slice {
    pub slots: SlotSet,
    /// Whatever their slots.
    pub namespaces: BTreeSet<String>,
}

impl<'a> Versions<'a> {
    pub fn of(root: &'a ShardingConfig) -> Self {
        let status = root.status.as_ref().and_then(|status| status.rollout.as_ref());
        let rollout = root.spec.root.as_ref().and_then(|rule| rule.rollout.as_ref());
        let begins_with_shadow = rollout.is_some_and(|rule| rule.steps.first().is_some_and(|step| step.shadow));
        Self { status, has_rollout: rollout.is_some(), begins_with_shadow }
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
        self.trial().filter(|trial| !trial.shadow).map(slots).unwrap_or_default()
    }

    /// The namespaces that it owns besides.
    pub(super) fn namespaces(self) -> BTreeSet<String> {
        let trial = self.trial().filter(|trial| !trial.shadow);
        trial.into_iter().flat_map(|trial| trial.namespaces.iter().cloned()).collect()
    }

    /// What pods of the version on trial may read before they own it: what they shadow, and what the step after that
    /// gives them, until it has come.
    pub fn read_unowned(self) -> Option<Slice> {
        let next = self.trial().filter(|trial| self.begins_with_shadow && trial.step == 2);
        let next = next.filter(|trial| matches!(trial.phase, TrialPhase::Analysing | TrialPhase::Waiting));
        self.shadowed().or_else(|| next.map(slice))
    }

    /// What the version on trial reads, where it owns nothing and its writes are dry runs.
    pub fn shadowed(self) -> Option<Slice> {
        let trial = self.trial().filter(|trial| trial.shadow)?;
        Some(slice(trial))
    }
}

fn slice(trial: &Trial) -> Slice {
    Slice { slots: slots(trial), namespaces: trial.namespaces.iter().cloned().collect() }
}

impl Slice {
    /// Whether an object is of it, by its slot and its namespace.
    pub fn has(&self, slot: Slot, namespace: Option<&str>) -> bool {
        self.slots.contains(slot) || namespace.is_some_and(|namespace| self.namespaces.contains(namespace))
    }
}

fn slots(trial: &Trial) -> SlotSet {
    trial.slots.iter().filter_map(|slot| slot.parse::<Slot>().ok()).collect()
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

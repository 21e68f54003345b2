//! Decides how a new version of an operator is tried: step by step, by what its pods do, and back when it fails.
//!
//! [`next`] takes the rule, the present status, and what is known of the pods. It returns the next status. It is pure,
//! and all that it remembers is in the status: a manager that starts anew goes on where the last one ended.
//!
//! - The *promoted* revision owns everything that no trial owns. A revision whose pods appear beside it is *tried*.
//! - The pods of the promoted revision and those of the next one are of different shards: see
//!   [`second_shard`](crate::names::second_shard).
//! - A revision owns nothing before the containers of one of its pods are ready, and while pods of a third revision
//!   live. Of several new revisions the one with the newest pod is tried.
//! - A step ends when its pause is over, the last check passed, and a pod runs. Too little traffic passes no check, and
//!   a check that fails begins the pause anew.
//! - In the last step the revision takes over pod by pod. It is promoted when no pod of the former one lives.
//! - A revision fails by more failed checks in one step than the rule puts up with, by containers that end again and
//!   again, by pods that do not start, or by command. Then it owns nothing from the next status on.

use std::time::Duration;

use jiff::Timestamp;

use crate::api::{CheckVerdict, Rollout, RolloutStatus, ShadowReport};

mod analysis;
mod command;
mod slice;
mod machine;

pub use analysis::{Sample, compare};
pub use command::Command;
pub use slice::{SlotLoads, slice};

/// How long the pods of a revision may take until the containers of one are ready.
pub const START_WITHIN: Duration = Duration::from_mins(10);

/// How long a revision that is tried may have no pod: a StatefulSet makes one anew only when the last is gone.
pub const ABSENT_WITHIN: Duration = Duration::from_mins(1);

/// How many restarts of its containers end the trial of a pod that does not run.
pub const MAX_RESTARTS: u32 = 3;

/// A pod of the workload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodFacts {
    /// Its revision.
    pub revision: String,
    /// In seconds since 1970.
    pub created_at: i64,
    /// Whether it is being deleted.
    pub terminating: bool,
    /// Whether all its containers have ended for good.
    pub stopped: bool,
    /// Whether its containers are ready.
    pub ready: bool,
    /// How often its containers were restarted.
    pub restarts: u32,
}

/// What is known at one moment.
#[derive(Clone, Debug)]
pub struct Observed<'a> {
    /// The enrolled pods of the workload.
    pub pods: &'a [PodFacts],
    /// The value of the annotation on the root.
    pub command: Option<&'a str>,
    /// The check that is due, if one is.
    pub check: Option<(CheckVerdict, String)>,
    /// How many objects each slot has; `None`: not all are counted yet. No step begins before they are.
    pub loads: Option<&'a SlotLoads>,
    /// What the revision that is tried would have written, where its step is one with `shadow`.
    pub shadow: Option<&'a ShadowReport>,
    /// What the first step consists of, where the root has a canary: slots and namespaces.
    pub canary: Option<(Vec<String>, Vec<String>)>,
    /// Why the template could not be put back.
    pub roll_back_error: Option<&'a str>,
    /// The present time.
    pub now: Timestamp,
}

/// The status that follows; `None` while there is no pod.
pub fn next(rule: &Rollout, status: Option<&RolloutStatus>, observed: &Observed<'_>) -> Option<RolloutStatus> {
    let Some(known) = status.filter(|status| !status.promoted.is_empty()) else {
        let promoted = first_promoted(observed.pods)?;
        // Pods that are there stay in their shards.
        return Some(RolloutStatus { promoted, ..status.cloned().unwrap_or_default() });
    };
    Some(machine::next(rule, known, observed))
}

/// Whether the pods of `revision` are of the shards with the second names. Those of one that is not promoted are of the
/// other shards.
pub fn is_second(status: &RolloutStatus, revision: &str) -> bool {
    status.second != (revision != status.promoted)
}

/// Of revisions that are there already none is tried: the one with the most ready pods owns everything, of equals the
/// older one.
fn first_promoted(pods: &[PodFacts]) -> Option<String> {
    let staying = pods.iter().filter(|pod| !pod.terminating && !pod.stopped);
    let rank = |pod: &&PodFacts| {
        let same = pods.iter().filter(|one| one.revision == pod.revision && one.ready && !one.terminating);
        (same.count(), -pod.created_at)
    };
    staying.max_by_key(rank).map(|pod| pod.revision.clone())
}

#[cfg(test)]
mod tests;

//! What becomes of a request?
//!
//! Takes the policy and what is asked, gives a decision; it changes nothing itself. Where a target could be read in
//! two ways, the decision is to refuse: whoever reads it the other way would have let it pass a limit.

use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::selector::Selector;

use crate::request::RequestInfo;

mod ambiguous;
mod lock;
mod shard;

pub use lock::{LockPlan, Rename};
pub use shard::{NotOlderThan, goes_on_from};

/// What becomes of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It is sent as it is, and so is the answer.
    Pass,
    /// It is answered here.
    Refuse(Refusal),
    /// It is changed before it is sent.
    Rewrite(Plan),
}

/// What is to be changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// What the objects must match besides what the client asks.
    pub selector: Option<Selector>,
    /// From which version on the answer has to be.
    pub not_older_than: Option<NotOlderThan>,
    /// How the leader-election lock is called on either side.
    pub lock: Option<LockPlan>,
}

/// Why a request is answered here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The path can be read in two ways.
    #[error("the path can be read in two ways: {what}")]
    AmbiguousPath {
        /// What is in it.
        what: &'static str,
    },
    /// The query can be read in two ways.
    #[error("the query can be read in two ways: with the policy it holds more than 10000 pairs")]
    AmbiguousQuery,
    /// The method is none that the API server knows for a resource, and the resource is limited.
    #[error("the method is not one that a resource of the API server has")]
    Method,
    /// The version that the client knows is from before its share of the resource changed.
    #[error(
        "the resource version {asked} is from before {changed_at}, when this pod's share of the resource changed"
    )]
    Expired {
        /// The version in the request.
        asked: u64,
        /// The version at which the policy changed.
        changed_at: u64,
    },
    /// A continue token that does not say which version it is of.
    #[error(
        "the continue token does not say of which version it is, and this pod's share of the resource changed at {changed_at}"
    )]
    UnknownContinue {
        /// The version at which the policy changed.
        changed_at: u64,
    },
    /// A name that only the server may know.
    #[error("the name {name:?} is kept for the leader-election locks of shards")]
    ReservedName {
        /// The name in the request.
        name: String,
    },
    /// A field selector that names the lock across namespaces.
    #[error(
        "the field selector names the leader-election lock, but no namespace: name the namespace in the path"
    )]
    LockAcrossNamespaces,
    /// Deleting a collection would delete every shard's lock.
    #[error(
        "deleting this collection would delete the leader-election locks of other shards: name the object"
    )]
    LockCollection,
}

// === impl Decision ===

impl Decision {
    /// The version at which the policy changed, where this follows from it: it holds only for a resource whose versions
    /// are counted as that one is.
    pub fn dated(&self) -> Option<u64> {
        match self {
            Self::Refuse(
                Refusal::Expired { changed_at, .. } | Refusal::UnknownContinue { changed_at },
            ) => Some(*changed_at),
            Self::Rewrite(plan) => plan.not_older_than.map(|it| it.version),
            Self::Pass | Self::Refuse(_) => None,
        }
    }
}

/// Decides about one request.
pub fn decide(policy: &Policy, request: &RequestInfo<'_>) -> Decision {
    decided(policy, request, Policy::changed_at)
}

/// The same for a resource whose versions are not those of the policy: when that changed says nothing about them.
pub fn decide_undated(policy: &Policy, request: &RequestInfo<'_>) -> Decision {
    decided(policy, request, |_, _, _| None)
}

/// When the limits on a resource changed.
type ChangedAt = fn(&Policy, &str, &str) -> Option<u64>;

fn decided(policy: &Policy, request: &RequestInfo<'_>, changed_at: ChangedAt) -> Decision {
    if policy.passes_everything() {
        return Decision::Pass;
    }
    match plan(policy, request, changed_at) {
        Err(refusal) => Decision::Refuse(refusal),
        Ok(plan) if plan == Plan::default() => Decision::Pass,
        Ok(plan) => Decision::Rewrite(plan),
    }
}

fn plan(
    policy: &Policy,
    request: &RequestInfo<'_>,
    changed_at: ChangedAt,
) -> Result<Plan, Refusal> {
    ambiguous::check(request)?;
    if !request.is_resource_request() {
        return Ok(Plan::default());
    }
    let changed_at = if request.is_collection() {
        changed_at(policy, request.api_group(), request.resource())
    } else {
        None
    };
    let selector = shard::selector(policy, request, changed_at)?;
    let not_older_than = changed_at.and_then(|at| shard::not_older_than(at, request));
    // Ours would be a pair too many, and the server would read none of them. The version's are two.
    let more = usize::from(selector.is_some()) + if not_older_than.is_some() { 2 } else { 0 };
    if more > 0 && !request.query().has_room_for(more) {
        return Err(Refusal::AmbiguousQuery);
    }
    let lock = policy.lock.as_ref().map_or(Ok(None), |lock| lock::plan(lock, request))?;
    Ok(Plan { selector, not_older_than, lock })
}

#[cfg(test)]
mod tests;

//! Decides whether a request passes, is refused, or is rewritten.
//!
//! A target that can be read in two ways is refused: a server that reads it the other way would let it past a limit.

use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::selector::Selector;

use crate::guard::Refused;
use crate::request::RequestInfo;

mod ambiguous;
mod fence;
mod lock;
mod member;
mod shadow;
mod shard;

pub use fence::{DRY_RUN, FencedWrite, Written, is_dry_run, is_event, is_token, is_write, lapses, written};
pub use lock::{InFields, LockPlan, Rename};
pub use shadow::becomes_dry_run;
pub use shard::{NotOlderThan, goes_on_from, oldest_wanted};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Request and response pass unchanged.
    Pass,
    /// The proxy answers.
    Refuse(Refusal),
    Rewrite(Plan),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Is added to the client's selector.
    pub selector: Option<Selector>,
    pub not_older_than: Option<NotOlderThan>,
    pub lock: Option<LockPlan>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the path can be read in two ways: {what}")]
    AmbiguousPath { what: &'static str },
    #[error("the query can be read in two ways: with the policy it holds more than 10000 pairs")]
    AmbiguousQuery,
    /// The method is none that the API server knows for a resource, and the resource is limited.
    #[error("the method is not one that a resource of the API server has")]
    Method,
    #[error("the resource version {asked} is from before {changed_at}, when this pod's share of the resource changed")]
    Expired { asked: u64, changed_at: u64 },
    #[error(
        "the continue token does not say of which version it is, and this pod's share of the resource changed at {changed_at}"
    )]
    UnknownContinue { changed_at: u64 },
    #[error("the name {name:?} is kept for the leader-election locks of shards")]
    ReservedName { name: String },
    #[error("the field selector names the leader-election lock, but no namespace: name the namespace in the path")]
    LockAcrossNamespaces,
    #[error("deleting this collection would delete the leader-election locks of other shards: name the object")]
    LockCollection,
    /// The API server would proxy the request to where nobody applies the policy.
    #[error(
        "the API server would proxy this to a {to}, where nothing keeps the pod to its share of the objects: `spec.allowProxy: true` of its ShardingConfig lets it pass"
    )]
    Proxied { to: &'static str },
    /// The pod may not write the object.
    #[error("{0}")]
    Fenced(Box<FencedWrite>),
    #[error(
        "the manager has not confirmed this pod's policy for 15 s, so another pod may own the object by now: nothing is written until it does"
    )]
    Unconfirmed,
    /// The pod is a shadow, and there is no dry run of what it asks for.
    #[error("this pod is a shadow, whose writes are dry runs, and {what} cannot be one")]
    Shadow { what: &'static str },
    /// The pod asks too often.
    #[error("{0}")]
    Guarded(Box<Refused>),
}

impl Decision {
    /// The version at which the policy changed, where this follows from it: it holds only for a resource whose versions
    /// are counted as that one is.
    pub fn dated(&self) -> Option<u64> {
        match self {
            Self::Refuse(Refusal::Expired { changed_at, .. } | Refusal::UnknownContinue { changed_at }) => {
                Some(*changed_at)
            }
            Self::Rewrite(plan) => plan.not_older_than.map(|it| it.version),
            Self::Pass | Self::Refuse(_) => None,
        }
    }
}

pub fn decide(policy: &Policy, request: &RequestInfo<'_>) -> Decision {
    decided(policy, request, Policy::changed_at)
}

/// Decides about a resource whose versions cannot be compared with the version at which the policy changed.
pub fn decide_undated(policy: &Policy, request: &RequestInfo<'_>) -> Decision {
    decided(policy, request, |_, _, _| None)
}

/// A subresource, and a verb in the path of old clients.
const PROXY: &str = "proxy";

/// Gives the version at which the limits on a resource changed.
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

fn plan(policy: &Policy, request: &RequestInfo<'_>, changed_at: ChangedAt) -> Result<Plan, Refusal> {
    ambiguous::check(request)?;
    if policy.is_shadow() {
        shadow::check(request)?;
    }
    if !request.is_resource_request() {
        return Ok(Plan::default());
    }
    if let (Some(cluster), Some(members)) = (request.cluster(), policy.members()) {
        return member::plan(policy, members, cluster, request);
    }
    if let Some(to) = proxied_to(request).filter(|_| policy.forbids_proxy()) {
        return Err(Refusal::Proxied { to });
    }
    let unless_lock = fence::check(policy, request)?;
    let mut plan = narrowed(policy, request, changed_at)?;
    plan.lock = policy.lock.as_ref().map_or(Ok(None), |lock| lock::plan(lock, request))?;
    match (&mut plan.lock, unless_lock) {
        (Some(lock), unless_lock) => lock.unless_lock = unless_lock,
        (None, Some(refused)) => return Err(Refusal::Fenced(refused)),
        (None, None) => {}
    }
    Ok(plan)
}

/// What the API server proxies a request to (`pkg/registry/core`, the connecters of subresource `proxy`). `None`: it
/// answers by itself. Exec, attach and port-forward are no such requests: what they reach is in a container.
fn proxied_to(request: &RequestInfo<'_>) -> Option<&'static str> {
    if !request.api_group().is_empty() || request.subresource() != PROXY && request.verb() != PROXY {
        return None;
    }
    match request.resource() {
        "pods" => Some("pod"),
        "services" => Some("service"),
        "nodes" => Some("node"),
        _ => None,
    }
}

/// Narrows a request for a collection. The plan has no lock yet.
fn narrowed(policy: &Policy, request: &RequestInfo<'_>, changed_at: ChangedAt) -> Result<Plan, Refusal> {
    let changed_at =
        if request.is_collection() { changed_at(policy, request.api_group(), request.resource()) } else { None };
    let selector = shard::selector(policy, request, changed_at)?;
    let not_older_than = changed_at.and_then(|at| shard::not_older_than(at, request));
    // Ours would be a pair too many, and the server would read none of them. The version's are two.
    let more = usize::from(selector.is_some()) + if not_older_than.is_some() { 2 } else { 0 };
    if more > 0 && !request.query().has_room_for(more) {
        return Err(Refusal::AmbiguousQuery);
    }
    Ok(Plan { selector, not_older_than, lock: None })
}

#[cfg(test)]
mod tests;

//! Refuses writes to objects that the pod's owner does not own.
//!
//! A write is judged by its path alone: by the namespace, or for an object of cluster scope by its name. A request that
//! creates an object of cluster scope names it in the body, so it passes; the API server's own fence decides about it.

use std::fmt;

use ctrlmesh_common::policy::fence::{Access, NotOwned, VIRTUAL_GROUPS};
use ctrlmesh_common::policy::{LOCK_RESOURCES, Lock, Policy};
use ctrlmesh_common::slots::Slot;

use super::Refusal;
use crate::request::RequestInfo;

/// Subresources of the core group that connect to a pod, service or node. Nothing is written to the object.
pub(super) const CONNECTS: [&str; 4] = ["attach", "exec", "portforward", "proxy"];

/// The parameter and the field that make a dry run of a write.
pub const DRY_RUN: &str = "dryRun";

/// By API group and resource.
const EVENTS: [(&str, &str); 2] = [("", "events"), ("events.k8s.io", "events")];

/// What a request writes, as far as its path says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// A fenced object that is the pod's to write.
    Slot(Slot),
    /// Fenced objects whose slots the path does not tell.
    AnySlot,
    /// An object that no fence holds for.
    Unfenced,
}

/// A write that the fence refuses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FencedWrite {
    /// `None` where the path does not tell the slot.
    not_owned: Option<NotOwned>,
    pod_owner: Option<String>,
    epoch: u64,
    operator: String,
}

/// What `request` writes under `policy`; `None` where it writes nothing, or is refused.
pub fn written(policy: &Policy, request: &RequestInfo<'_>) -> Option<Written> {
    if !is_write(request) {
        return None;
    }
    match access(policy, request) {
        Access::Owned(slot) => Some(Written::Slot(slot)),
        Access::Unknown => Some(Written::AnySlot),
        Access::Unfenced => Some(Written::Unfenced),
        Access::Refused(_) if may_create_lock(policy, request) => Some(Written::AnySlot),
        Access::Refused(_) => None,
    }
}

/// Whether `request` may pass only while the manager confirms the policy: it writes what is fenced, and the policy
/// lapses. Otherwise the caller refuses it, whoever owns the object by the policy.
pub fn lapses(policy: &Policy, request: &RequestInfo<'_>) -> bool {
    let lapses = policy.fence().is_some_and(|fence| fence.lapses) && is_write(request);
    lapses && access(policy, request) != Access::Unfenced
}

/// Refuses a write by its path. Returns the refusal for a request that may pass only where its body holds the lock.
pub(super) fn check(policy: &Policy, request: &RequestInfo<'_>) -> Result<Option<Box<FencedWrite>>, Refusal> {
    if !is_write(request) {
        return Ok(None);
    }
    let refused = |not_owned| {
        let of_fence = policy.fence().map(|fence| (fence.owner.clone(), fence.operator.clone()));
        let (pod_owner, operator) = of_fence.unwrap_or_default();
        Box::new(FencedWrite { not_owned, pod_owner, epoch: policy.epoch, operator })
    };
    match access(policy, request) {
        Access::Owned(_) | Access::Unfenced => Ok(None),
        Access::Unknown if is_bounded(policy, request) => Ok(None),
        Access::Unknown => Err(Refusal::Fenced(refused(None))),
        Access::Refused(not_owned) => {
            let refused = refused(Some(not_owned));
            if may_create_lock(policy, request) { Ok(Some(refused)) } else { Err(Refusal::Fenced(refused)) }
        }
    }
}

/// Whether `request` is about events, which say what an operator does and are not what it does.
pub fn is_event(request: &RequestInfo<'_>) -> bool {
    EVENTS.contains(&(request.api_group(), request.resource()))
}

/// Whether `request` says itself that it is a dry run.
pub fn is_dry_run(request: &RequestInfo<'_>) -> bool {
    request.query().first(DRY_RUN).is_some_and(|value| !value.is_empty())
}

/// Whether `request` is for a service account's token. It stores nothing.
pub fn is_token(request: &RequestInfo<'_>) -> bool {
    (request.api_group(), request.resource(), request.subresource()) == ("", "serviceaccounts", "token")
}

/// Whether `request` may write an object. To connect to a pod, service or node is no write.
pub fn is_write(request: &RequestInfo<'_>) -> bool {
    request.is_resource_request()
        && matches!(request.verb(), "create" | "update" | "patch" | "delete" | "deletecollection")
        && !(request.api_group().is_empty() && CONNECTS.contains(&request.subresource()))
}

fn access(policy: &Policy, request: &RequestInfo<'_>) -> Access {
    if let Some(cluster) = request.cluster() {
        return access_in_member(policy, request, cluster);
    }
    let Some(fence) = policy.fence() else { return Access::Unfenced };
    let (kind, namespace, name) =
        ((request.api_group(), request.resource()), request.namespace(), request.name_in_path());
    let is_lock = |lock: &Lock| LOCK_RESOURCES.contains(&kind) && lock.namespace == namespace && lock.name == name;
    if policy.lock.as_ref().is_some_and(is_lock) || is_token(request) && !fence.names(kind.0, kind.1) {
        return Access::Unfenced;
    }
    fence.access(kind, namespace, name)
}

/// To another's member nothing is written, whether there is a fence or not.
fn access_in_member(policy: &Policy, request: &RequestInfo<'_>, cluster: &str) -> Access {
    let divided = policy.members().filter(|members| members.sees.is_some());
    let Some(members) = divided.filter(|_| !is_token(request) && !VIRTUAL_GROUPS.contains(&request.api_group())) else {
        return Access::Unfenced;
    };
    let (slot, fence) = (members.hash.slot(cluster), policy.fence());
    let (owner, pod_owner) =
        (fence.and_then(|fence| fence.slots.get(&slot)), fence.and_then(|fence| fence.owner.as_ref()));
    let is_own = fence.is_none() || owner.is_some() && owner == pod_owner;
    if is_own && members.sees(cluster) {
        return if fence.is_some() { Access::Owned(slot) } else { Access::Unfenced };
    }
    Access::Refused(NotOwned { slot, owner: owner.cloned(), pod_owner: pod_owner.cloned() })
}

/// Whether a write without a slot stays within the pod's share: the selector limits a collection, and of a new object
/// of cluster scope only the API server knows the name.
fn is_bounded(policy: &Policy, request: &RequestInfo<'_>) -> bool {
    let limited = || policy.selector_for(request.api_group(), request.resource()).is_some();
    let has_owner = policy.fence().is_some_and(|fence| fence.owner.is_some());
    has_owner && (request.verb() != "deletecollection" || limited())
}

/// Whether the request may create the lock. Only its body tells.
fn may_create_lock(policy: &Policy, request: &RequestInfo<'_>) -> bool {
    let may = |lock: &Lock| {
        LOCK_RESOURCES.contains(&(request.api_group(), request.resource())) && lock.namespace == request.namespace()
    };
    let is_new = request.verb() == "create" && request.name_in_path().is_empty();
    is_new && request.cluster().is_none() && policy.lock.as_ref().is_some_and(may)
}

impl fmt::Display for FencedWrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.not_owned {
            None => f.write_str("the objects are in slots that this pod does not own")?,
            Some(NotOwned { slot, owner: Some(owner), .. }) => write!(f, "slot {slot} belongs to {owner:?} here")?,
            Some(NotOwned { slot, owner: None, .. }) => write!(f, "slot {slot} belongs to nobody here for now")?,
        }
        match &self.pod_owner {
            Some(owner) => write!(f, ", and this pod writes for {owner:?}")?,
            None => f.write_str(", and this pod may write nothing for now")?,
        }
        write!(f, " (epoch {})", self.epoch)?;
        match self.operator.split_once('/') {
            Some((namespace, name)) => {
                write!(f, "; see `kubectl get shardingconfig -n {namespace} {name} -o jsonpath={{.status.ownership}}`")
            }
            None => Ok(()),
        }
    }
}

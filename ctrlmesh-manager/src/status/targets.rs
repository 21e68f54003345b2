//! The pods that a CircuitBreaker or FaultInjection selects, and what their proxies have of it.

use std::collections::BTreeMap;

use ctrlmesh_common::api::{BreakerTargetStatus, TargetStatus};
use ctrlmesh_common::wire;
use jiff::Timestamp;
use serde::Serialize;

use crate::cluster::plan::Plan;
use crate::labels::ObjectCounts;
use crate::push::policy_store::Receipt;
use crate::rules::compile::CompiledPolicy;
use crate::rules::pod::{Member, PodName};
use crate::rules::pod_selection::PodSelection;
use crate::rules::shared::each;
use crate::status::finding::{Finding, finding, listed};

/// Pods in one status.
pub(super) const MAX_PODS: usize = 200;

/// The newest receipt of each pod's proxy.
pub(super) type ReceiptsByPod = BTreeMap<PodName, Receipt>;

/// What a status depends on besides its object.
#[derive(Clone, Copy, Debug)]
pub(super) struct Observed<'a> {
    pub(super) plan: &'a Plan,
    pub(super) receipts: &'a ReceiptsByPod,
    /// How many objects there are of each kind.
    pub(super) objects: &'a ObjectCounts,
    /// Whether this replica became leader so recently that its watches may lag behind.
    pub(super) new_leader: bool,
    pub(super) now: Timestamp,
}

/// A selected pod.
pub(super) struct Target<'a, Before> {
    pub(super) member: &'a Member,
    pub(super) policy: Option<&'a CompiledPolicy>,
    pub(super) receipt: Option<&'a Receipt>,
    /// What the status said before.
    pub(super) before: Option<&'a Before>,
    /// Whether its proxy has the policy that the plan gives it.
    pub(super) acknowledged: bool,
}

/// What a status says of a pod.
pub(super) trait PodStatus {
    fn pod(&self) -> &TargetStatus;
}

impl PodStatus for TargetStatus {
    fn pod(&self) -> &TargetStatus {
        self
    }
}

impl PodStatus for BreakerTargetStatus {
    fn pod(&self) -> &TargetStatus {
        &self.target
    }
}

impl<'a> Observed<'a> {
    /// The selected pods, by name. The plan `is_planned` if it was made from this very state of the object: it may be
    /// older than what was written since.
    pub(super) fn targets<Before: PodStatus>(
        self,
        selection: &PodSelection,
        is_planned: bool,
        before: &'a [Before],
    ) -> Vec<Target<'a, Before>> {
        let is_there = |member: &&Member| member.enrolled() && !member.ended && selection.selects(member);
        let target = |member: &'a Member| {
            let policy = self.plan.sendable().get(&member.name).map(|policy| &**policy);
            // Another pod may have had the name.
            let is_its =
                |one: &&Before| one.pod().pod_name.as_ref() == Some(&member.name.name) && one.pod().pod_ip == member.ip;
            let before = before.iter().find(is_its);
            let acknowledged = is_planned && self.acknowledged(member);
            Target { member, policy, receipt: self.receipt(member), before, acknowledged }
        };
        each(&self.plan.snapshot.members).filter(is_there).map(target).collect()
    }

    fn receipt(&self, member: &Member) -> Option<&'a Receipt> {
        self.receipts.get(&member.name).filter(|receipt| receipt.uid == member.uid)
    }

    /// Whether the pod's proxy has the policy that the plan gives it.
    pub(super) fn acknowledged(&self, member: &Member) -> bool {
        let policy = self.plan.sendable().get(&member.name);
        policy.zip(self.receipt(member)).is_some_and(|(policy, receipt)| receipt.digest == policy.digest())
    }
}

impl<Before: PodStatus> Target<'_, Before> {
    /// Of the spec that its proxy has.
    pub(super) fn config_hash(&self, current: Option<&String>) -> Option<String> {
        if self.acknowledged {
            return current.cloned();
        }
        self.before.and_then(|before| before.pod().config_hash.clone())
    }

    pub(super) fn status(&self, current: Option<&String>) -> TargetStatus {
        let refused = self.receipt.and_then(|receipt| receipt.refused.as_ref());
        TargetStatus {
            pod_name: Some(self.member.name.name.clone()),
            pod_ip: self.member.ip.clone(),
            config_hash: self.config_hash(current),
            message: refused.map(|reason| format!("its proxy refuses its policy: {reason}")),
        }
    }
}

/// A hash of what the proxies are to have.
pub(super) fn hash(rules: &impl Serialize) -> String {
    // Strings and numbers always serialise.
    format!("{:016x}", wire::digest(&serde_json::to_vec(rules).unwrap_or_default()))
}

pub(super) fn accepted(selection: &PodSelection) -> Finding {
    match (&selection.selector, selection.errors.as_slice()) {
        (Some(_), _) => finding(true, "Valid", "it is valid and complete"),
        (None, []) => finding(true, "Disabled", "it is switched off, and does nothing"),
        (None, errors) => finding(false, "Invalid", listed(errors, "; ")),
    }
}

/// Why not every proxy can have it; `None` if nothing stands in the way.
pub(super) fn obstacle<Before>(
    selection: &PodSelection,
    targets: &[Target<'_, Before>],
    plan: &Plan,
) -> Option<Finding> {
    if selection.selector.is_none() {
        let (reason, message) = if selection.errors.is_empty() {
            ("Disabled", "it is switched off, and does nothing")
        } else {
            ("Invalid", "it does nothing until it is valid")
        };
        return Some(finding(false, reason, message));
    }
    let object = selection.object();
    if let Some(trouble) = plan.compiled.troubles.iter().find(|trouble| trouble.object == object) {
        return Some(finding(false, "NoRoom", &*trouble.message));
    }
    let refused = targets.iter().filter(|target| target.receipt.is_some_and(|receipt| receipt.refused.is_some()));
    let refused: Vec<String> = refused.map(|target| target.member.name.name.clone()).collect();
    let message = || format!("the proxy refuses its policy in pod {}", listed(&refused, ", "));
    (!refused.is_empty()).then(|| finding(false, "PolicyRefused", message()))
}

/// Whether every proxy has it, as far as nothing stands in the way.
pub(super) fn acknowledged<Before: PodStatus>(targets: &[Target<'_, Before>], hash: Option<&String>) -> Finding {
    let is_current = |target: &&Target<'_, Before>| hash.is_some() && target.config_hash(hash).as_ref() == hash;
    let (current, all) = (targets.iter().filter(is_current).count(), targets.len());
    match current {
        _ if all == 0 => finding(false, "NoPods", "its selector selects no enrolled pod of its namespace"),
        some if some == all => finding(true, "Acknowledged", format!("every proxy, {all} of {all}, enforces it")),
        some => finding(false, "Waiting", format!("{some} of {all} proxies enforce it")),
    }
}

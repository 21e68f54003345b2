//! Says whether a write of an object by a pod is refused: by the API server, and by the pod's proxy.
//!
//! Pure. The manager's own code says what the policy in the API server answers, and the proxy's own code what the proxy
//! does.

use std::collections::BTreeSet;

use ctrlmesh_common::api::{FenceMode, Root, ShardingConfig};
use ctrlmesh_common::policy::{Fence, Lock, Policy};
use ctrlmesh_manager::labels::named_resources;
use ctrlmesh_manager::ownership::fence_policy::{self, Evaluation, Exemption, PodWrite};
use ctrlmesh_manager::ownership::fence_table;
use ctrlmesh_manager::rules::fenced::{FENCED, lapses};
use ctrlmesh_manager::rules::object_name::full_name;
use ctrlmesh_manager::rules::pod::Member;
use ctrlmesh_manager::rules::shard::{Labelling, Versions};
use ctrlmesh_request::decide::{self, Decision};
use ctrlmesh_request::request::RequestInfo;
use ctrlmesh_request::rewrite::status::Status;
use serde::Serialize;

use super::target::{self, Written};

/// Who refuses writes of a root's pods.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Fencing {
    /// `Server`, `Proxy` or `Off`: what the root asks for.
    pub(super) mode: FenceMode,
    /// Whether every endpoint of the API server is known to enforce it.
    pub(super) proved: bool,
    /// Of condition `Fenced` of the root. Absent: it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) message: Option<String>,
}

/// What one side answers to a write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Answer {
    pub(super) outcome: Outcome,
    /// What a refusal says, or why the outcome is no clear one.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) enum Outcome {
    Allowed,
    Refused,
    /// Nobody looks at the write.
    NotFenced,
    /// It would be refused where the API server enforces the policy, and that is not proved.
    NotProved,
    NotKnown,
}

/// What becomes of a write by one pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PodAnswers {
    pub(super) pod: String,
    /// The owner that it writes for. Absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) writes_for: Option<String>,
    /// What its proxy answers by the newest epoch.
    pub(super) proxy: Answer,
    /// What the API server answers to the pod, also past its proxy.
    pub(super) api_server: Answer,
}

impl Fencing {
    pub(super) fn of(root: &ShardingConfig, rule: &Root) -> Self {
        let mut conditions = root.status.iter().flat_map(|status| &status.conditions);
        let condition = conditions.find(|condition| condition.type_ == FENCED);
        Self {
            mode: rule.fence_mode(),
            proved: condition.is_some_and(|condition| condition.status == "True"),
            reason: condition.map(|condition| condition.reason.clone()),
            message: condition.map(|condition| condition.message.clone()),
        }
    }

    /// In one sentence.
    pub(super) fn sentence(&self) -> String {
        let because = match (&self.reason, &self.message) {
            (Some(reason), Some(message)) => format!("{reason}: {message}"),
            _ => "it is not there yet".to_owned(),
        };
        match (self.mode, self.proved) {
            (FenceMode::Off, _) => "Nobody refuses writes: spec.root.fence is Off.".to_owned(),
            (FenceMode::Proxy, _) => "Only the proxies refuse writes: spec.root.fence is Proxy.".to_owned(),
            (FenceMode::Server, true) => {
                format!("The API server and the proxies refuse writes (condition Fenced, {because}).")
            }
            (FenceMode::Server, false) => {
                format!("The proxies refuse writes. The API server is not known to (condition Fenced, {because}).")
            }
        }
    }
}

/// What becomes of a write by each of these pods of the root's workload.
pub(super) fn answers(
    root: &ShardingConfig,
    written: &Written<'_>,
    pods: &[&Member],
    labelling: &Labelling,
) -> Vec<PodAnswers> {
    let Some(rule) = &root.spec.root else { return Vec::new() };
    let accounts: BTreeSet<String> = pods.iter().map(|pod| pod.account.clone()).collect();
    let table = root.status.as_ref().and_then(|status| status.ownership.as_ref());
    let of = |pod: &&Member| PodAnswers {
        pod: pod.name.name.clone(),
        writes_for: table.and_then(|table| table.pod_uids.get(&pod.uid).cloned()),
        proxy: by_proxy(root, rule, written, pod, labelling),
        api_server: by_api_server(root, rule, written, pod, (labelling, &accounts)),
    };
    pods.iter().map(of).collect()
}

/// What the API server answers to a write by `pod`, whose workload has these `accounts`.
pub(super) fn by_api_server(
    root: &ShardingConfig,
    rule: &Root,
    written: &Written<'_>,
    pod: &Member,
    (labelling, accounts): (&Labelling, &BTreeSet<String>),
) -> Answer {
    let fencing = Fencing::of(root, rule);
    if rule.disable == Some(true) {
        return Answer::not_fenced("the root is switched off");
    }
    if fencing.mode != FenceMode::Server {
        return Answer::not_fenced(&format!("spec.root.fence is {:?}", fencing.mode));
    }
    let Some(data) = fence_table::data(root) else { return Answer::not_fenced("the root has no ownership table yet") };
    // The namespace of the manager is in no expression that counts here.
    let fence = fence_policy::Fence::of(root, rule, accounts.clone(), &labelling.hash_key, "");
    let write = |slot| PodWrite {
        group: written.group,
        resource: written.resource,
        subresource: written.subresource,
        namespace: written.namespace.unwrap_or_default(),
        name: written.name,
        slot,
        pod: &pod.name.name,
        uid: &pod.uid,
        account: &pod.account,
    };
    let slot = written.labels.and_then(|labels| labels.get(&labelling.hash_key)).map(String::as_str);
    match fence.evaluate(&write(slot), &data) {
        Evaluation::Exempt(exemption) => Answer::not_fenced(why_exempt(exemption)),
        _ if written.labels.is_none() => Answer {
            outcome: Outcome::NotKnown,
            message: format!("it goes by the label {} of the namespace, which was not read", labelling.hash_key),
        },
        Evaluation::Allowed => Answer::allowed(),
        Evaluation::Refused(message) => fencing.refusal(message),
        Evaluation::Failed => {
            fencing.refusal(format!("the label {} has no slot, so the policy cannot be evaluated", labelling.hash_key))
        }
    }
}

fn why_exempt(exemption: Exemption) -> &'static str {
    match exemption {
        Exemption::Kind => "the root does not fence this kind",
        Exemption::Lock => "it is the leader-election lock, which every pod writes",
        Exemption::Pod => "the pod is none of the root's workload, by its name and service account",
    }
}

/// What the proxy of `pod` answers to a patch, by the newest table.
fn by_proxy(root: &ShardingConfig, rule: &Root, written: &Written<'_>, pod: &Member, labelling: &Labelling) -> Answer {
    if rule.disable == Some(true) {
        return Answer::not_fenced("the root is switched off");
    }
    if rule.fence_mode() == FenceMode::Off {
        return Answer::not_fenced("spec.root.fence is Off");
    }
    if is_shadow(root, rule, pod) {
        return Answer::not_fenced("the pod is a shadow: its proxy sends the write as a dry run");
    }
    let Some(policy) = fencing_policy(root, rule, pod, labelling) else {
        return Answer::not_fenced("the root has no ownership table yet");
    };
    let fence = policy.fence.as_ref();
    if !fence.is_some_and(|fence| fence.covers(written.group, written.resource)) {
        return Answer::not_fenced("the root does not fence this kind");
    }
    let target = target::of_object(written);
    let Ok(info) = RequestInfo::parse("PATCH", &target) else {
        return Answer { outcome: Outcome::NotKnown, message: "the name cannot stand in a path".to_owned() };
    };
    match decide::decide(&policy, &info) {
        Decision::Refuse(refusal) => Answer { outcome: Outcome::Refused, message: Status::from(&refusal).message },
        Decision::Pass | Decision::Rewrite(_) => Answer::allowed(),
    }
}

/// Whether the pod is of a version that is tried without owning anything.
fn is_shadow(root: &ShardingConfig, rule: &Root, pod: &Member) -> bool {
    let versions = Versions::of(root);
    let is_on_trial = versions.is_second(pod.revision_of(rule)) != versions.promoted_is_second();
    is_on_trial && versions.trial().is_some_and(|trial| trial.shadow)
}

/// The part of the policy of `pod` that decides about writes.
fn fencing_policy(root: &ShardingConfig, rule: &Root, pod: &Member, labelling: &Labelling) -> Option<Policy> {
    let status = root.status.as_ref()?;
    let fence = Fence::of(status.ownership.as_ref()?, &pod.uid, labelling.hash, named_resources(rule));
    let shard = fence.owner.clone().unwrap_or_default();
    let lock = root.spec.controller.as_ref().map(|controller| Lock {
        namespace: root.metadata.namespace.clone().unwrap_or_default(),
        name: controller.leader_election_name.clone(),
        shard,
    });
    let epoch = status.epoch.and_then(|epoch| u64::try_from(epoch).ok()).unwrap_or_default();
    let fence = Fence { operator: full_name(&root.metadata), lapses: lapses(root), ..fence };
    Some(Policy { epoch, lock, fence: Some(fence), ..Policy::default() })
}

impl Fencing {
    fn refusal(&self, message: String) -> Answer {
        Answer { outcome: if self.proved { Outcome::Refused } else { Outcome::NotProved }, message }
    }
}

impl Answer {
    fn allowed() -> Self {
        Self { outcome: Outcome::Allowed, message: String::new() }
    }

    fn not_fenced(why: &str) -> Self {
        Self { outcome: Outcome::NotFenced, message: why.to_owned() }
    }
}

impl Outcome {
    /// For a table.
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Refused => "refused",
            Self::NotFenced => "not fenced",
            Self::NotProved => "refused where it is enforced",
            Self::NotKnown => "not known",
        }
    }
}

#[cfg(test)]
mod tests;

//! Builds the `ValidatingAdmissionPolicy` by which the API server refuses an operator's writes to what a pod does not
//! own.
//!
//! Pure. The policy's parameter is the ownership table, as [`fence_table`] writes it. Match conditions drop everybody
//! else before the table is read. The policy also refuses each dry run that sets [`annotation::FENCE_PROBE`] on the
//! root, and says its revision, and the root's UID and the epoch in the table: so every API server shows what it
//! enforces, and nobody has to impersonate a pod.
//!
//! Where the table is missing, everybody passes. If everybody were refused, a table that is removed by hand would stop
//! the whole cluster. Nothing is lost by that, because the probe passes, too, and so proves nothing.

use std::collections::BTreeSet;

use ctrlmesh_common::api::{RelatedResources, Root, ShardingConfig};
use ctrlmesh_common::names::{self, GROUP, annotation};
use ctrlmesh_common::slots::{self, COUNT};
use k8s_openapi::api::admissionregistration::v1::{
    MatchCondition, ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding, ValidatingAdmissionPolicySpec,
    Validation,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::admission_policy;
use super::fence_names::{labels, object_name};
use super::fence_table::{self, EPOCH, PODS, REVOKED, SLOTS, UID};

mod pod_names;
mod resources;
mod evaluate;

pub use evaluate::{Evaluation, Exemption, PodWrite};
use pod_names::pattern;

/// What a refused probe says before the revision.
pub(super) const SAYS: &str = "fence";

/// Key of the pod's name in a user's extra values (`pkg/serviceaccount` of Kubernetes).
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";

/// Key of the pod's UID there.
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";

/// The ownership table.
const TABLE: &str = "params.data";

/// What a refusal says between slot, owner, pod, the pod's owner, and epoch.
const REFUSAL: [&str; 5] = ["slot ", " belongs to ", ", and pod ", " writes for ", ", by epoch "];

/// What stands for an owner that there is not.
const NOBODY: &str = "nobody";

/// What stands for the slot of an object that has none.
const NO_SLOT: &str = "none";

/// Fields of a request that may be missing.
const NAMESPACE: &str = "request.?namespace.orValue('')";

const NAME: &str = "request.?name.orValue('')";

/// What a fence is built from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fence {
    /// The manager's namespace, which has the table.
    pub home: String,
    /// Of the root and of the operator.
    pub namespace: String,
    /// The root's name.
    pub root: String,
    /// The root's UID.
    pub uid: String,
    pub workload: Workload,
    /// Service accounts of the workload's pods.
    pub accounts: BTreeSet<String>,
    /// The limited kinds; none means every kind.
    pub limited: Vec<RelatedResources>,
    /// Name of the leader election's lock.
    pub lock: Option<String>,
    /// Key of the label with the slot.
    pub hash_key: String,
}

/// What makes the operator's pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Workload {
    StatefulSet(String),
    Deployment(String),
}

/// The objects of one fence.
#[derive(Clone, Debug, PartialEq)]
pub struct FenceObjects {
    /// Hash of the policy's spec, and the UID of the root. Each probe says it.
    pub revision: String,
    pub policy: ValidatingAdmissionPolicy,
    pub binding: ValidatingAdmissionPolicyBinding,
}

impl Fence {
    /// That of `root`, whose rule is `rule`; the manager is in namespace `home`.
    pub fn of(root: &ShardingConfig, rule: &Root, accounts: BTreeSet<String>, hash_key: &str, home: &str) -> Self {
        let name = |text: &Option<String>| text.clone().unwrap_or_default();
        let workload = match &rule.target_stateful_set {
            Some(set) => Workload::StatefulSet(set.clone()),
            None => Workload::Deployment(name(&rule.target_deployment)),
        };
        let every = rule.resource_selector.iter().any(|one| one.relate_resources.is_empty());
        let limited = rule.resource_selector.iter().flat_map(|one| one.relate_resources.iter().cloned());
        Self {
            home: home.to_owned(),
            namespace: name(&root.metadata.namespace),
            root: name(&root.metadata.name),
            uid: name(&root.metadata.uid),
            workload,
            accounts,
            limited: limited.filter(|_| !every).collect(),
            lock: root.spec.controller.as_ref().map(|one| one.leader_election_name.clone()),
            hash_key: hash_key.to_owned(),
        }
    }

    pub fn objects(&self) -> FenceObjects {
        let name = object_name(&self.namespace, &self.root);
        // Strings, lists and maps always serialise.
        let text = serde_json::to_string(&self.spec("")).unwrap_or_default();
        let revision = format!("{:016x}", slots::fnv1a(text.as_bytes()));
        let spec = self.spec(&revision);
        let binding = admission_policy::binding_spec(&name, &self.home);
        let metadata = metadata(name, &self.namespace, &self.root);
        FenceObjects {
            revision: format!("{revision}.{}", self.uid),
            policy: ValidatingAdmissionPolicy { metadata: metadata.clone(), spec: Some(spec), status: None },
            binding: ValidatingAdmissionPolicyBinding { metadata, spec: binding },
        }
    }

    fn spec(&self, revision: &str) -> ValidatingAdmissionPolicySpec {
        let (rules, excluded) = resources::rules(&self.limited, &self.root);
        ValidatingAdmissionPolicySpec {
            failure_policy: Some("Fail".to_owned()),
            param_kind: Some(admission_policy::param_kind()),
            match_constraints: Some(admission_policy::matching(rules, excluded)),
            match_conditions: Some(vec![MatchCondition {
                name: "is-the-operator-or-a-probe".to_owned(),
                expression: format!("({}) || ({})", self.is_operator(), self.is_probe()),
            }]),
            validations: Some(vec![Validation {
                // What sends the probe is no pod of the operator.
                expression: self.is_owner(),
                message_expression: Some(self.message(revision)),
                message: None,
                reason: Some("Forbidden".to_owned()),
            }]),
            // They would cost more than they save.
            variables: None,
            audit_annotations: None,
        }
    }

    /// Whether the caller is a pod of the operator, and writes an object that not every pod may write. A dry run writes
    /// nothing: those of a version on trial may be of what others own.
    fn is_operator(&self) -> String {
        let accounts = self.accounts.iter();
        let accounts = accounts.map(|one| quoted(&format!("system:serviceaccount:{}:{one}", self.namespace)));
        let accounts: Vec<String> = accounts.collect();
        let is_account = match &accounts[..] {
            [] => return "false".to_owned(),
            [one] => format!("request.userInfo.username == {one}"),
            all => format!("request.userInfo.username in [{}]", all.join(", ")),
        };
        let pattern = quoted(&pattern(&self.workload));
        let is_stored = "!request.?dryRun.orValue(false)".to_owned();
        let mut all = vec![is_account, is_stored, format!("{}.matches({pattern})", of_caller(POD_NAME))];
        if !resources::covers(&self.limited, GROUP, resources::ROOTS) {
            all.push(format!("request.resource.resource != '{}'", resources::ROOTS));
        }
        let kinds = resources::LOCKS.iter().filter(|(group, plural)| resources::covers(&self.limited, group, plural));
        let kinds: Vec<String> = kinds.map(|(_, plural)| quoted(plural)).collect();
        if let Some(lock) = self.lock.as_ref().filter(|_| !kinds.is_empty()) {
            all.push(format!(
                "!(request.resource.resource in [{}] && {} == {} && ({NAME} == {} || {NAME}.startsWith({})))",
                kinds.join(", "),
                NAMESPACE,
                quoted(&self.namespace),
                quoted(lock),
                quoted(&names::lock(lock, "")),
            ));
        }
        all.join(" && ")
    }

    fn is_probe(&self) -> String {
        let key = quoted(annotation::FENCE_PROBE);
        [
            format!("request.resource.resource == '{}'", resources::ROOTS),
            format!("request.resource.group == '{GROUP}'"),
            "request.operation == 'UPDATE'".to_owned(),
            "request.?dryRun.orValue(false)".to_owned(),
            "request.?subResource.orValue('') == ''".to_owned(),
            format!("{NAME} == {}", quoted(&self.root)),
            format!("{NAMESPACE} == {}", quoted(&self.namespace)),
            format!("object.metadata.?annotations[?{key}].hasValue()"),
        ]
        .join(" && ")
    }

    /// The namespace by which the object may be pinned.
    fn namespace(&self) -> String {
        if resources::covers(&self.limited, "", "namespaces") {
            // A Namespace belongs to where its objects do. It has its own name for a namespace, unless it is created.
            return format!("({NAMESPACE} == '' && request.resource.resource == 'namespaces' ? {NAME} : {NAMESPACE})");
        }
        NAMESPACE.to_owned()
    }

    /// The object's slot, or what stands for none in the list of owners.
    fn slot(&self) -> String {
        let slot = format!("metadata.?labels[?{}].orValue('{COUNT}')", quoted(&self.hash_key));
        format!("(namespaceObject != null ? namespaceObject.{slot} : (oldObject != null ? oldObject : object).{slot})")
    }

    /// The object's owner; empty where it is nobody's.
    fn owner(&self) -> String {
        let (namespace, slot, pinned) = (self.namespace(), self.slot(), fence_table::NAMESPACE);
        format!(
            "('{REVOKED}' + {namespace} in {TABLE} ? '' : \
             {TABLE}[?'{pinned}' + {namespace}].orValue({TABLE}.{SLOTS}.split(',')[int({slot})]))"
        )
    }

    /// Whether the caller's pod writes for the object's owner. It is evaluated for every write, and has no variable.
    fn is_owner(&self) -> String {
        format!("{TABLE}[?'{PODS}' + {}].orValue('').contains({})", self.owner(), caller_between_spaces())
    }

    /// What a refusal says. It is evaluated for a write that passes, too: that comes first.
    fn message(&self, revision: &str) -> String {
        let owner = self.owner();
        let [slot, belongs, pod, writes, epoch] = REFUSAL;
        format!(
            "{} ? '' : {} ? '{SAYS} {revision}.' + {TABLE}.{UID} + ' epoch ' + {TABLE}.{EPOCH} : {} + '{slot}' + {} \
             + '{belongs}' + {} + '{pod}' + {} + '{writes}' + {} + '{epoch}' + {TABLE}.{EPOCH}",
            self.is_owner(),
            self.is_probe(),
            format_args!("({NAMESPACE} == '' ? '' : 'namespace ' + {NAMESPACE} + ' in ')"),
            format_args!("({0} == '{COUNT}' ? '{NO_SLOT}' : {0})", self.slot()),
            format_args!("({owner} == '' ? '{NOBODY}' : {owner})"),
            of_caller(POD_NAME),
            writers(),
        )
    }
}

fn of_caller(key: &str) -> String {
    format!("request.userInfo.?extra[?'{key}'][?0].orValue('')")
}

/// The pod's UID as the lists of pods have it.
fn caller_between_spaces() -> String {
    format!("' ' + {} + ' '", of_caller(POD_UID))
}

/// The owner that the caller's pod writes for.
fn writers() -> String {
    let is_its = format!("key.startsWith('{PODS}') && {TABLE}[key].contains({})", caller_between_spaces());
    let length = PODS.len();
    format!(
        "({TABLE}.exists(key, {is_its}) ? {TABLE}.map(key, {is_its}, key.substring({length})).join(', ') : '{NOBODY}')"
    )
}

fn metadata(name: String, namespace: &str, root: &str) -> ObjectMeta {
    ObjectMeta { name: Some(name), labels: Some(labels(namespace, root)), ..ObjectMeta::default() }
}

/// A string of CEL.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'"))
}

#[cfg(test)]
mod tests;

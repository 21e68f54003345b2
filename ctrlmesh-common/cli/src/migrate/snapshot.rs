//! What a migration goes by: the predecessor's objects, and ours.
//!
//! Pure; `read` fills it.

use std::collections::BTreeSet;
use std::fmt;

use ctrlmesh_common::names::{KRIDGE_GROUP, OWNERSHIP_FINALIZER, annotation, label};
use http::Uri;
use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::object::{DEPLOYMENT, ObjectRef, Resource, STATEFUL_SET};

/// Trigger of Kridge, on pods.
pub(super) const KRIDGE_ENABLE_PROXY: &str = "kridge.kusionstack.io/enable-proxy";

/// On a pod template: what makes it another one, so that its pods are replaced. `true` while it is enrolled.
pub(super) const MIGRATED: &str = "ctrlmesh.kusionstack.io/migrated";

/// Value of [`MIGRATED`] where the enrolment was taken back, and with it the label that enrols.
pub(super) const UNDONE: &str = "undone";

/// Where the predecessor's manager is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Predecessor {
    pub(super) namespace: String,
    /// `None`: the user says that it is gone already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) deployment: Option<String>,
}

impl Default for Predecessor {
    fn default() -> Self {
        Self { namespace: "ctrlmesh".to_owned(), deployment: Some("ctrlmesh".to_owned()) }
    }
}

impl fmt::Display for Predecessor {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.namespace, self.deployment.as_deref().unwrap_or("none"))
    }
}

#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    pub(super) predecessor: Predecessor,
    /// Where our managers are.
    pub(super) system: String,
    /// The predecessor's manager.
    pub(super) manager: Option<DynamicObject>,
    /// Our managers' Deployment.
    pub(super) our_manager: Option<DynamicObject>,
    /// All webhook configurations, of both kinds.
    pub(super) webhooks: Vec<DynamicObject>,
    /// Services of the predecessor's namespace.
    pub(super) services: Vec<DynamicObject>,
    /// ShardingConfigs, CircuitBreakers and FaultInjections in our group.
    pub(super) rules: Vec<DynamicObject>,
    /// The same kinds in Kridge's group.
    pub(super) kridge: Vec<DynamicObject>,
    pub(super) manager_state: Option<DynamicObject>,
    /// With their labels.
    pub(super) namespaces: Vec<DynamicObject>,
    /// Targets of roots.
    pub(super) workloads: Vec<DynamicObject>,
    /// Pods with a label that enrols them, of the predecessor's or ours.
    pub(super) pods: Vec<DynamicObject>,
    /// Each `ConfigMap` that the predecessor made in operators' namespaces.
    pub(super) fake_kubeconfigs: Vec<DynamicObject>,
    /// Which kinds the predecessor labels, and whether our managers have such a list.
    pub(super) kinds: Option<DynamicObject>,
    pub(super) has_own_kinds: bool,
    /// Objects of the guard that are there.
    pub(super) guard: BTreeSet<ObjectRef>,
}

impl Snapshot {
    /// Whether a webhook configuration calls the predecessor.
    pub(super) fn is_predecessors(&self, webhook: &DynamicObject) -> bool {
        self.called_nearby(webhook).any(|service| self.is_managers(&service))
    }

    /// Whether managers of ours are to run.
    pub(super) fn has_own_managers(&self) -> bool {
        self.our_manager.as_ref().is_some_and(|manager| replicas(manager) > 0)
    }

    /// Services of the predecessor's namespace that a webhook configuration calls.
    pub(super) fn called_nearby(&self, webhook: &DynamicObject) -> impl Iterator<Item = String> {
        let hooks = webhook.data.get("webhooks").and_then(Value::as_array);
        let called: Vec<_> = hooks.into_iter().flatten().filter_map(called).collect();
        called.into_iter().filter(|(_, namespace)| *namespace == self.predecessor.namespace).map(|(name, _)| name)
    }

    /// Whether a Service of the predecessor's namespace leads to its manager. What nobody serves does, too, and
    /// everything does where the manager is gone already.
    fn is_managers(&self, service: &str) -> bool {
        let service = self.services.iter().find(|one| one.name_any() == service);
        let (Some(service), Some(manager)) = (service, &self.manager) else { return true };
        let selector = service.data.pointer("/spec/selector").and_then(Value::as_object);
        let labels = manager.data.pointer("/spec/template/metadata/labels");
        selector.is_some_and(|selector| {
            !selector.is_empty()
                && selector.iter().all(|(key, value)| labels.and_then(|labels| labels.get(key)) == Some(value))
        })
    }

    /// The workload that a root divides.
    pub(super) fn target(&self, root: &DynamicObject) -> Option<(Resource, &DynamicObject)> {
        let target = targets(root).next()?;
        let kind = if target.kind == DEPLOYMENT.kind { DEPLOYMENT } else { STATEFUL_SET };
        Some((kind, self.workloads.iter().find(|one| target.is(one))?))
    }

    pub(super) fn roots(&self) -> impl Iterator<Item = &DynamicObject> {
        self.rules.iter().filter(|one| rule(one).is_some())
    }

    /// Pods that the predecessor has injected, and that run: the trigger, and nothing of ours.
    pub(super) fn predecessors_pods(&self) -> impl Iterator<Item = &DynamicObject> {
        let is_ours =
            |pod: &DynamicObject| pod.annotations().get(annotation::INJECTED).is_some_and(|value| value == "true");
        self.pods.iter().filter(move |pod| !is_ours(pod) && !is_finished(pod))
    }
}

/// The name and the namespace of the Service that a webhook calls, by reference or by URL.
fn called(hook: &Value) -> Option<(String, String)> {
    let text = |path: &str| hook.pointer(path).and_then(Value::as_str);
    if let Some(name) = text("/clientConfig/service/name") {
        return Some((name.to_owned(), text("/clientConfig/service/namespace")?.to_owned()));
    }
    let url: Uri = text("/clientConfig/url")?.parse().ok()?;
    let host = url.host()?.to_ascii_lowercase();
    // The domain of the cluster may follow.
    let mut labels = host.split('.');
    let (name, namespace) = (labels.next()?, labels.next()?);
    (labels.next()? == "svc").then(|| (name.to_owned(), namespace.to_owned()))
}

/// The rule of a root; `None` for anything else.
pub(super) fn rule(object: &DynamicObject) -> Option<&Value> {
    object.data.pointer("/spec/root").filter(|root| root.is_object())
}

/// The workloads that a root names; one of both fields is allowed.
pub(super) fn targets(root: &DynamicObject) -> impl Iterator<Item = ObjectRef> {
    let fields = [("targetStatefulSet", STATEFUL_SET), ("targetDeployment", DEPLOYMENT)];
    fields.into_iter().filter_map(|(field, kind)| {
        let name = rule(root)?.get(field)?.as_str()?;
        Some(kind.named(root.metadata.namespace.as_deref(), name))
    })
}

/// Whether a root is switched off: its shards stand by themselves.
pub(super) fn is_disabled(root: &DynamicObject) -> bool {
    rule(root).and_then(|rule| rule.get("disable")) == Some(&Value::Bool(true))
}

/// Whether a root is kept by its fence.
pub(super) fn is_fenced(root: &DynamicObject) -> bool {
    root.finalizers().iter().any(|one| one == OWNERSHIP_FINALIZER)
}

/// Whether our managers keep a root by its fence once they have looked at it.
pub(super) fn is_to_be_fenced(root: &DynamicObject) -> bool {
    !has_fence_off(root) && !is_disabled(root) && root.metadata.deletion_timestamp.is_none()
}

pub(super) fn has_fence_off(root: &DynamicObject) -> bool {
    rule(root).and_then(|rule| rule.get("fence")) == Some(&json!("Off"))
}

/// Whether a pod has ended, and is only still shown.
pub(super) fn is_finished(pod: &DynamicObject) -> bool {
    let phase = pod.data.pointer("/status/phase").and_then(Value::as_str);
    phase.is_some_and(|phase| ["Succeeded", "Failed"].contains(&phase))
}

/// How many pods a workload is to have.
pub(super) fn replicas(workload: &DynamicObject) -> i64 {
    workload.data.pointer("/spec/replicas").and_then(Value::as_i64).unwrap_or(1)
}

/// How many pods of a StatefulSet its partition keeps at the template that they have.
pub(super) fn kept_by_partition(workload: &DynamicObject) -> i64 {
    let number = |path: &str| workload.data.pointer(path).and_then(Value::as_i64).unwrap_or_default();
    let partition = number("/spec/updateStrategy/rollingUpdate/partition");
    (partition - number("/spec/ordinals/start")).clamp(0, replicas(workload).max(0))
}

/// Whether pods of a template with this metadata are to be enrolled: it has the label, in the predecessor's spelling or
/// in ours, or an undo took the label out.
pub(super) fn is_to_be_enrolled(metadata: &Value) -> bool {
    let has =
        |field: &str, key: &str, value: &str| metadata.get(field).and_then(|all| all.get(key)) == Some(&json!(value));
    [label::ENABLE_PROXY, KRIDGE_ENABLE_PROXY].into_iter().any(|key| has("labels", key, "true"))
        || has("annotations", MIGRATED, UNDONE)
}

/// Keys of labels and annotations that the predecessor has in either group.
pub(super) fn in_both_groups(key: &str) -> [String; 2] {
    [format!("{}/{key}", ctrlmesh_common::names::GROUP), format!("{KRIDGE_GROUP}/{key}")]
}

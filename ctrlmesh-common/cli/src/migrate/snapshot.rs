//! What a migration goes by: the predecessor's objects, and ours.
//!
//! Pure; `read` fills it.

use std::collections::BTreeSet;

use ctrlmesh_common::names::{KRIDGE_GROUP, OWNERSHIP_FINALIZER, annotation, label};
use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde_json::Value;

use super::object::{DEPLOYMENT, ObjectRef, Resource, STATEFUL_SET};

/// Trigger of Kridge, on pods.
pub(super) const KRIDGE_ENABLE_PROXY: &str = "kridge.kusionstack.io/enable-proxy";

/// Where the predecessor's manager is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Predecessor {
    pub(super) namespace: String,
    /// `None`: the user says that it is gone already.
    pub(super) deployment: Option<String>,
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
        let hooks = webhook.data.get("webhooks").and_then(Value::as_array);
        let service = |hook: &Value| hook.pointer("/clientConfig/service/namespace") == Some(&self.namespace());
        hooks.into_iter().flatten().any(service)
    }

    fn namespace(&self) -> Value {
        Value::String(self.predecessor.namespace.clone())
    }

    /// The workload that a root divides.
    pub(super) fn target(&self, root: &DynamicObject) -> Option<(Resource, &DynamicObject)> {
        let target = targets(root).next()?;
        let kind = if target.kind == DEPLOYMENT.kind { DEPLOYMENT } else { STATEFUL_SET };
        let is = |one: &&DynamicObject| kind.is(one) && kind.of_object(one) == target;
        Some((kind, self.workloads.iter().find(is)?))
    }

    pub(super) fn roots(&self) -> impl Iterator<Item = &DynamicObject> {
        self.rules.iter().filter(|one| rule(one).is_some())
    }

    /// Pods that the predecessor has injected: the trigger, and nothing of ours.
    pub(super) fn predecessors_pods(&self) -> impl Iterator<Item = &DynamicObject> {
        self.pods.iter().filter(|pod| pod.annotations().get(annotation::INJECTED).is_none_or(|value| value != "true"))
    }
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

/// How many pods a workload is to have.
pub(super) fn replicas(workload: &DynamicObject) -> i64 {
    workload.data.pointer("/spec/replicas").and_then(Value::as_i64).unwrap_or(1)
}

/// Whether a label of `labels` enrols a pod, in the predecessor's spelling or in ours.
pub(super) fn is_enrolled(labels: Option<&Value>) -> bool {
    let is = |key: &str| labels.and_then(|labels| labels.get(key)).is_some_and(|value| value == "true");
    [label::ENABLE_PROXY, KRIDGE_ENABLE_PROXY].into_iter().any(is)
}

/// Keys of labels and annotations that the predecessor has in either group.
pub(super) fn in_both_groups(key: &str) -> [String; 2] {
    [format!("{}/{key}", ctrlmesh_common::names::GROUP), format!("{KRIDGE_GROUP}/{key}")]
}

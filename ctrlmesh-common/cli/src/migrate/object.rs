//! Names one object of the API server, of whatever kind.
//!
//! Pure.

use std::fmt;

use kube::api::{ApiResource, DynamicObject, TypeMeta};
use kube::core::GroupVersionKind;
use kube::{Api, Client, ResourceExt as _};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A kind of objects that a migration reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Resource {
    pub(super) group: &'static str,
    pub(super) version: &'static str,
    pub(super) kind: &'static str,
    pub(super) plural: &'static str,
}

/// Where an object stands in the API.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ObjectRef {
    pub(super) group: String,
    pub(super) version: String,
    pub(super) kind: String,
    pub(super) plural: String,
    /// `None`: of cluster scope.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) namespace: Option<String>,
    pub(super) name: String,
}

const ADMISSION: &str = "admissionregistration.k8s.io";

pub(super) const DEPLOYMENT: Resource = Resource::of("apps", "v1", "Deployment", "deployments");
pub(super) const STATEFUL_SET: Resource = Resource::of("apps", "v1", "StatefulSet", "statefulsets");
pub(super) const CONFIG_MAP: Resource = Resource::of("", "v1", "ConfigMap", "configmaps");
pub(super) const POD: Resource = Resource::of("", "v1", "Pod", "pods");
pub(super) const SERVICE: Resource = Resource::of("", "v1", "Service", "services");
pub(super) const NAMESPACE: Resource = Resource::of("", "v1", "Namespace", "namespaces");
pub(super) const MUTATING: Resource =
    Resource::of(ADMISSION, "v1", "MutatingWebhookConfiguration", "mutatingwebhookconfigurations");
pub(super) const VALIDATING: Resource =
    Resource::of(ADMISSION, "v1", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations");
pub(super) const WEBHOOKS: [Resource; 2] = [MUTATING, VALIDATING];
pub(super) const POLICY: Resource =
    Resource::of(ADMISSION, "v1", "ValidatingAdmissionPolicy", "validatingadmissionpolicies");
pub(super) const BINDING: Resource =
    Resource::of(ADMISSION, "v1", "ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings");

/// The three kinds that users write, in a group of the predecessor's or in ours.
pub(super) const fn rules(group: &'static str) -> [Resource; 3] {
    [
        Resource::of(group, "v1alpha1", "ShardingConfig", "shardingconfigs"),
        Resource::of(group, "v1alpha1", "CircuitBreaker", "circuitbreakers"),
        Resource::of(group, "v1alpha1", "FaultInjection", "faultinjections"),
    ]
}

pub(super) const SHARDING_CONFIG: Resource = rules(ctrlmesh_common::names::GROUP)[0];
pub(super) const MANAGER_STATE: Resource =
    Resource::of(ctrlmesh_common::names::GROUP, "v1alpha1", "ManagerState", "managerstates");

impl Resource {
    const fn of(group: &'static str, version: &'static str, kind: &'static str, plural: &'static str) -> Self {
        Self { group, version, kind, plural }
    }

    pub(super) fn api_resource(self) -> ApiResource {
        let kind = GroupVersionKind::gvk(self.group, self.version, self.kind);
        ApiResource::from_gvk_with_plural(&kind, self.plural)
    }

    /// The object of this kind and name; `namespace` is `None` in cluster scope.
    pub(super) fn named(self, namespace: Option<&str>, name: &str) -> ObjectRef {
        ObjectRef {
            group: self.group.to_owned(),
            version: self.version.to_owned(),
            kind: self.kind.to_owned(),
            plural: self.plural.to_owned(),
            namespace: namespace.map(str::to_owned),
            name: name.to_owned(),
        }
    }

    /// Where this object of the kind stands.
    pub(super) fn of_object(self, object: &DynamicObject) -> ObjectRef {
        self.named(object.metadata.namespace.as_deref(), &object.name_any())
    }

    /// Whether the object says that it is of this kind.
    pub(super) fn is(self, object: &DynamicObject) -> bool {
        object.types.as_ref() == Some(&self.types())
    }

    pub(super) fn types(self) -> TypeMeta {
        TypeMeta { api_version: self.api_version(), kind: self.kind.to_owned() }
    }

    pub(super) fn api_version(self) -> String {
        if self.group.is_empty() { self.version.to_owned() } else { format!("{}/{}", self.group, self.version) }
    }
}

impl ObjectRef {
    /// Where an object of one of these kinds stands.
    pub(super) fn among(object: &DynamicObject, kinds: &[Resource]) -> Option<Self> {
        kinds.iter().find(|kind| kind.is(object)).map(|kind| kind.of_object(object))
    }

    /// Whether `object` stands here.
    pub(super) fn is(&self, object: &DynamicObject) -> bool {
        object.types.as_ref() == Some(&self.types())
            && object.metadata.name.as_ref() == Some(&self.name)
            && object.metadata.namespace == self.namespace
    }

    fn kind(&self) -> GroupVersionKind {
        GroupVersionKind::gvk(&self.group, &self.version, &self.kind)
    }

    pub(super) fn types(&self) -> TypeMeta {
        let kind = self.kind();
        TypeMeta { api_version: kind.api_version(), kind: kind.kind }
    }

    pub(super) fn api(&self, client: &Client) -> Api<DynamicObject> {
        let resource = ApiResource::from_gvk_with_plural(&self.kind(), &self.plural);
        match &self.namespace {
            Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
            None => Api::all_with(client.clone(), &resource),
        }
    }
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} ", self.kind)?;
        if let Some(namespace) = &self.namespace {
            write!(out, "{namespace}/")?;
        }
        write!(out, "{}", self.name)?;
        // Two groups of the predecessor's have the same kinds.
        if self.group == ctrlmesh_common::names::KRIDGE_GROUP { write!(out, " of {}", self.group) } else { Ok(()) }
    }
}

/// The object without what the API server fills in, so that it can be created again.
pub(super) fn portable(object: &DynamicObject) -> Option<Value> {
    const FILLED_IN: [&str; 7] = [
        "uid",
        "resourceVersion",
        "creationTimestamp",
        "generation",
        "managedFields",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
    ];
    let mut value = serde_json::to_value(object).ok()?;
    if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        for field in FILLED_IN {
            metadata.remove(field);
        }
    }
    value.as_object_mut()?.remove("status");
    Some(value)
}

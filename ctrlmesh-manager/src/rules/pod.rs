//! What does the manager know of a pod?
//!
//! Little, so that it can be kept for many: who it is, its labels, and who made it.

use std::fmt;
use std::str::FromStr;

use ctrlmesh_common::api::Root;
use ctrlmesh_common::names::{annotation, label, root_ca, sidecar};
use ctrlmesh_common::policy::Redirect;
use ctrlmesh_common::selector::Labels;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The kind of what makes the pods of a StatefulSet.
const STATEFUL_SET: &str = "StatefulSet";

/// The kind of what makes the pods of a Deployment.
const REPLICA_SET: &str = "ReplicaSet";

/// Where nothing is served: a cluster has to be able to start without us.
pub const KUBE_SYSTEM: &str = "kube-system";

/// A pod's namespace and name, printed as `NAMESPACE/NAME`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodName {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
}

/// A text that names no pod.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not NAMESPACE/NAME")]
pub struct PodNameError {
    /// What was given.
    pub text: String,
}

/// A pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Member {
    /// Who it is. While it is being admitted, the name of a Deployment's pod is not known yet, and empty.
    pub name: PodName,
    /// Its UID, which no later pod of the same name has; empty while it is being admitted.
    pub uid: String,
    /// The node that it was given to.
    pub node: Option<String>,
    /// Its labels.
    pub labels: Labels,
    /// As what it was admitted.
    pub admitted: Admitted,
    /// What makes and replaces it.
    pub owner: Option<Owner>,
    /// When it was made, in seconds since 1970; none while it is being admitted.
    pub born: Option<i64>,
    /// Whether it is on its way out, or has ended: it stands in nobody's way.
    pub leaving: bool,
    /// When it was told to go, in seconds since 1970, by the clock that says when pods are made.
    pub deleted_since: Option<i64>,
    /// Whether all its containers have ended for good: it does nothing any more, but may stay there for long.
    pub ended: bool,
    /// Where its connections are sent.
    pub redirect: Redirect,
    /// Whether they pass while nobody takes them.
    pub fail_open: bool,
    /// The container of the proxy inside it, once it was started.
    pub container: Option<String>,
}

/// As what a pod was admitted, which stays so whatever its labels say later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Admitted {
    /// With what it needs to be served, or it will be.
    #[default]
    Injected,
    /// Without: it is not served.
    Bypassed,
}

/// What makes pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// `StatefulSet`, `ReplicaSet` or another.
    pub kind: String,
    /// Its name.
    pub name: String,
}

// === impl PodName ===

impl fmt::Display for PodName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.namespace, self.name)
    }
}

impl FromStr for PodName {
    type Err = PodNameError;

    fn from_str(text: &str) -> Result<Self, PodNameError> {
        let parts = text.split_once('/').filter(|(_, name)| !name.contains('/'));
        let parts = parts.filter(|(namespace, name)| !namespace.is_empty() && !name.is_empty());
        let (namespace, name) = parts.ok_or_else(|| PodNameError { text: text.to_owned() })?;
        Ok(Self { namespace: namespace.to_owned(), name: name.to_owned() })
    }
}

impl Serialize for PodName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PodName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

// === impl Member ===

impl Member {
    /// Whether it is served: it was admitted as one that asks for it.
    pub fn enrolled(&self) -> bool {
        self.asks() && self.admitted == Admitted::Injected
    }

    /// Whether it asks to be served.
    pub fn asks(&self) -> bool {
        self.label(label::ENABLE_PROXY) == Some("true")
    }

    /// The shard that it was admitted under.
    pub fn recorded(&self) -> Option<&str> {
        self.label(label::SHARDING_CONFIG_INJECTED).filter(|name| !name.is_empty())
    }

    /// Its ordinal, where it is a pod of the StatefulSet called `name`.
    pub fn ordinal_in(&self, name: &str) -> Option<u32> {
        let ours = self.made_by(STATEFUL_SET, name)
            || self.owner.is_none()
                && self.label(label::STATEFULSET_POD_NAME) == Some(&self.name.name);
        let digits = self.name.name.strip_prefix(name)?.strip_prefix('-')?;
        let ordinal: u32 = digits.parse().ok()?;
        (ours && ordinal.to_string() == digits).then_some(ordinal)
    }

    /// Its revision, where it is a pod of the Deployment called `name`.
    pub fn revision_in(&self, name: &str) -> Option<&str> {
        let revision = self.label(label::POD_TEMPLATE_HASH)?;
        self.made_by(REPLICA_SET, &format!("{name}-{revision}")).then_some(revision)
    }

    /// A pod of a Deployment that is being admitted, by the `ReplicaSet` that makes it.
    pub fn of_replica_set(namespace: String, labels: Labels, replica_set: String) -> Self {
        let name = PodName { namespace, name: String::new() };
        let owner = Some(Owner { kind: REPLICA_SET.to_owned(), name: replica_set });
        Self { name, labels, owner, ..Self::default() }
    }

    /// The same, where its metadata says that it is one.
    pub fn of_deployment(namespace: &str, meta: &ObjectMeta) -> Option<Self> {
        let owner = owner(meta).filter(|owner| owner.kind == REPLICA_SET)?;
        let labels = meta.labels.clone().unwrap_or_default();
        Some(Self::of_replica_set(namespace.to_owned(), labels, owner.name))
    }

    /// Whether it is of the workload that a root with this `rule` divides.
    pub fn is_of_target(&self, rule: &Root) -> bool {
        let set = rule.target_stateful_set.as_deref();
        let deployment = rule.target_deployment.as_deref();
        set.is_some_and(|set| self.ordinal_in(set).is_some())
            || deployment.is_some_and(|name| self.revision_in(name).is_some())
    }

    fn made_by(&self, kind: &str, name: &str) -> bool {
        self.owner.as_ref().is_some_and(|owner| owner.kind == kind && owner.name == name)
    }

    fn label(&self, key: &str) -> Option<&str> {
        self.labels.get(key).map(String::as_str)
    }
}

impl From<&v1::Pod> for Member {
    fn from(pod: &v1::Pod) -> Self {
        let meta = &pod.metadata;
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        let ended = matches!(phase, Some("Succeeded" | "Failed"));
        // What stands there is when it has to be gone.
        let deadline = meta.deletion_timestamp.as_ref().map(|time| time.0.as_second());
        let grace = meta.deletion_grace_period_seconds.unwrap_or_default();
        Self {
            name: PodName {
                namespace: meta.namespace.clone().unwrap_or_default(),
                name: meta.name.clone().unwrap_or_default(),
            },
            born: meta.creation_timestamp.as_ref().map(|time| time.0.as_second()),
            deleted_since: deadline.map(|deadline| deadline.saturating_sub(grace)),
            ended,
            uid: meta.uid.clone().unwrap_or_default(),
            node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
            labels: meta.labels.clone().unwrap_or_default(),
            admitted: admitted(pod),
            owner: owner(meta),
            leaving: meta.deletion_timestamp.is_some() || ended,
            redirect: pod.spec.as_ref().map(redirect).unwrap_or_default(),
            container: pod.status.as_ref().and_then(container),
            fail_open: fails_open(pod),
        }
    }
}

/// What makes and replaces it.
fn owner(meta: &ObjectMeta) -> Option<Owner> {
    let mut owners = meta.owner_references.iter().flatten();
    let owner = owners.find(|owner| owner.controller == Some(true))?;
    Some(Owner { kind: owner.kind.clone(), name: owner.name.clone() })
}

/// As what the pod was admitted. One that was not admitted yet will be given what it needs.
///
/// That it was given that is written into its annotations, which anybody can write later; so its volumes count too, which nobody can.
fn admitted(pod: &v1::Pod) -> Admitted {
    let empty = v1::PodSpec::default();
    let (meta, spec) = (&pod.metadata, pod.spec.as_ref().unwrap_or(&empty));
    if spec.host_network == Some(true) || meta.namespace.as_deref() == Some(KUBE_SYSTEM) {
        return Admitted::Bypassed;
    }
    let annotations = meta.annotations.as_ref();
    let said = annotations.and_then(|all| all.get(annotation::INJECTED));
    let injected = said.is_some_and(|said| said == "true") || holds(spec, root_ca::MESH);
    if meta.uid.is_some() && (!injected || holds(spec, root_ca::CLUSTER)) {
        return Admitted::Bypassed;
    }
    Admitted::Injected
}

/// Whether connections of the pod pass while nobody takes them: what it was admitted with counts, not what it says since.
/// One that was not admitted yet will be given what it asks for.
fn fails_open(pod: &v1::Pod) -> bool {
    let annotations = pod.metadata.annotations.as_ref();
    let asked = annotations.and_then(|all| all.get(annotation::FAIL_OPEN));
    match &pod.metadata.uid {
        Some(_) => pod.spec.as_ref().is_some_and(trusts_both_cas),
        None => asked.is_some_and(|value| value == "true"),
    }
}

/// Whether something of the pod's own holds the mesh's CA and the API server's together, as it is given to pods that may
/// fail open, and to no other.
pub fn trusts_both_cas(spec: &v1::PodSpec) -> bool {
    let init = spec.init_containers.iter().flatten();
    let init = init.filter(|container| container.name != sidecar::CONTAINER);
    let variables = init.chain(&spec.containers).flat_map(|one| one.env.iter().flatten());
    let mut sources =
        variables.filter_map(|one| one.value_from.as_ref()?.config_map_key_ref.as_ref());
    let is_both = |name: &str, key: &str| name == root_ca::MESH && key == root_ca::FAIL_OPEN_KEY;
    sources.any(|source| is_both(&source.name, &source.key))
        || maps(spec).any(|(name, items)| items.iter().any(|item| is_both(name, &item.key)))
}

/// Whether a volume of the pod's own holds something of the ConfigMap.
fn holds(spec: &v1::PodSpec, name: &str) -> bool {
    maps(spec).any(|(map, _)| map == name)
}

/// The `ConfigMaps` in the pod's own volumes, not in the proxy's in it, and what is picked of each.
fn maps(spec: &v1::PodSpec) -> impl Iterator<Item = (&str, &[v1::KeyToPath])> {
    let own = spec.volumes.iter().flatten().filter(|volume| volume.name != sidecar::VOLUME);
    own.flat_map(|volume| {
        let projected = volume.projected.iter();
        let sources = projected.flat_map(|projected| projected.sources.iter().flatten());
        let maps = sources.filter_map(|source| source.config_map.as_ref());
        let maps = maps.map(|map| (&map.name, &map.items));
        let whole = volume.config_map.iter().map(|map| (&map.name, &map.items));
        whole.chain(maps).map(|(name, items)| (name.as_str(), items.as_deref().unwrap_or_default()))
    })
}

/// Where the connections of a pod are sent: what it was admitted with counts, not what it says since.
fn redirect(spec: &v1::PodSpec) -> Redirect {
    let mut init = spec.init_containers.iter().flatten();
    match init.find(|container| container.name == sidecar::CONTAINER) {
        None => Redirect::Node,
        Some(proxy) => {
            let mut arguments = proxy.args.iter().flatten();
            let redirected = arguments.any(|argument| argument.starts_with(sidecar::REDIRECTED));
            if redirected { Redirect::Sidecar } else { Redirect::Nowhere }
        }
    }
}

/// The container of the proxy inside the pod, without the runtime's name before it.
fn container(status: &v1::PodStatus) -> Option<String> {
    let mut statuses = status.init_container_statuses.iter().flatten();
    let proxy = statuses.find(|container| container.name == sidecar::CONTAINER)?;
    let (_, id) = proxy.container_id.as_deref()?.split_once("://")?;
    Some(id.to_owned())
}

/// Which pods are looked at, by labels and by fields: those that ask to be served, and none of namespace `own`, the managers'.
pub fn watched(own: &str) -> (String, String) {
    let elsewhere = [KUBE_SYSTEM, own].map(|name| format!("metadata.namespace!={name}"));
    (format!("{}=true", label::ENABLE_PROXY), elsewhere.join(","))
}

/// The name of a StatefulSet, as `NAMESPACE/NAME`, and the ordinal of its first pod.
pub fn first_ordinal(set: &StatefulSet) -> (String, u32) {
    let (namespace, name) = (set.metadata.namespace.as_deref(), set.metadata.name.as_deref());
    let ordinals = set.spec.as_ref().and_then(|spec| spec.ordinals.as_ref());
    let start = ordinals.and_then(|ordinals| ordinals.start);
    let start = start.and_then(|start| u32::try_from(start).ok());
    let name = format!("{}/{}", namespace.unwrap_or_default(), name.unwrap_or_default());
    (name, start.unwrap_or_default())
}

#[cfg(test)]
mod tests;

//! What the manager keeps of a pod: identity, labels, owner and how it was admitted.

use ctrlmesh_common::api::Root;
use ctrlmesh_common::names::{PROMOTED, annotation, label, root_ca, sidecar};
use ctrlmesh_common::policy::Redirect;
use ctrlmesh_common::selector::Labels;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::rules::object_name::full_name;

mod containers;

use containers::{container_ids, has_stopped, restarts, sidecar_id};

pub use ctrlmesh_common::pod_name::PodName;

const STATEFUL_SET: &str = "StatefulSet";

const REPLICA_SET: &str = "ReplicaSet";

/// Pods in this namespace get no proxy: a cluster must be able to start without us.
pub const KUBE_SYSTEM: &str = "kube-system";

/// The service account of pods that name none.
const DEFAULT_ACCOUNT: &str = "default";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own about a pod")]
pub struct Member {
    /// The name is empty while a Deployment's pod is being admitted.
    pub name: PodName,
    /// Empty while the pod is being admitted.
    pub uid: String,
    pub node: Option<String>,
    /// Its address, once it has one.
    pub ip: Option<String>,
    /// Its service account; empty while a Deployment's pod is being admitted.
    pub account: String,
    pub labels: Labels,
    pub admitted: Admitted,
    /// The controller that creates and replaces the pod.
    pub owner: Option<Owner>,
    /// Creation, in seconds since 1970; `None` while the pod is being admitted.
    pub created_at: Option<i64>,
    /// Whether the pod is being deleted or has ended.
    pub terminating: bool,
    /// When its deletion was requested, in seconds since 1970, by the API server's clock.
    pub deleted_at: Option<i64>,
    /// Whether its phase is `Succeeded` or `Failed`. Such a pod may stay for long.
    pub ended: bool,
    /// Whether none of its containers runs, and none will be started again.
    pub stopped: bool,
    /// Whether its condition `Ready` holds. Of a pod that waits to be promoted, whether its containers are ready.
    pub ready: bool,
    /// Its readiness gate, where it has the one of rollouts.
    pub gate: Option<Gate>,
    /// How often its containers were restarted.
    pub restarts: u32,
    /// What its Deployment is told of deleting it.
    pub deletion_cost: DeletionCost,
    pub redirect: Redirect,
    /// Whether connections pass while no proxy takes them.
    pub fail_open: bool,
    /// Whether it has a forward proxy.
    pub forward_proxy: bool,
    /// ID of the sidecar's container, once it was started.
    pub container: Option<String>,
    /// IDs of its other containers, those to initialize it and for debugging left out, as the kubelet has said last.
    pub containers: Vec<String>,
}

/// The annotation by which a Deployment chooses the pods that it deletes first.
pub const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";

/// The cost of deleting a pod that owns nothing any more. That of other pods is 0.
pub const DELETED_FIRST: i32 = -1000;

/// What the annotation [`DELETION_COST`] of a pod says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeletionCost {
    #[default]
    None,
    /// [`DELETED_FIRST`].
    DeletedFirst,
    /// What somebody else wrote.
    Other,
}

/// The condition of a pod that its readiness gate waits for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gate {
    /// Whether it holds; `None` while it is not there.
    pub holds: Option<bool>,
    pub message: String,
}

/// How the pod was admitted. Later changes of its labels do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Admitted {
    /// With a proxy, or it will get one.
    #[default]
    Injected,
    /// Without a proxy.
    Bypassed,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// `StatefulSet`, `ReplicaSet` or another.
    pub kind: String,
    pub name: String,
}

impl Member {
    /// Whether the pod asks for a proxy and was admitted with one.
    pub fn enrolled(&self) -> bool {
        self.wants_proxy() && self.admitted == Admitted::Injected
    }

    /// Whether its label asks for a proxy.
    pub fn wants_proxy(&self) -> bool {
        self.label(label::ENABLE_PROXY) == Some("true")
    }

    /// The shard in its label.
    pub fn labelled_shard(&self) -> Option<&str> {
        self.label(label::SHARDING_CONFIG_INJECTED).filter(|name| !name.is_empty())
    }

    /// Its ordinal, if it is a pod of the StatefulSet `name`.
    pub fn ordinal_in(&self, name: &str) -> Option<u32> {
        let ours = self.made_by(STATEFUL_SET, name)
            || self.owner.is_none() && self.label(label::STATEFULSET_POD_NAME) == Some(&self.name.name);
        let digits = self.name.name.strip_prefix(name)?.strip_prefix('-')?;
        let ordinal: u32 = digits.parse().ok()?;
        (ours && ordinal.to_string() == digits).then_some(ordinal)
    }

    /// Its revision, if it is a pod of the Deployment `name`.
    pub fn revision_in(&self, name: &str) -> Option<&str> {
        let revision = self.label(label::POD_TEMPLATE_HASH)?;
        self.made_by(REPLICA_SET, &format!("{name}-{revision}")).then_some(revision)
    }

    /// Its revision, if it is a pod of the workload that a root with this `rule` divides.
    pub fn revision_of(&self, rule: &Root) -> Option<&str> {
        if let Some(deployment) = rule.target_deployment.as_deref() {
            return self.revision_in(deployment);
        }
        self.ordinal_in(rule.target_stateful_set.as_deref()?)?;
        self.label(label::CONTROLLER_REVISION_HASH)
    }

    /// A pod of a Deployment that is being admitted.
    pub fn of_replica_set(namespace: String, labels: Labels, replica_set: String) -> Self {
        let name = PodName { namespace, name: String::new() };
        let owner = Some(Owner { kind: REPLICA_SET.to_owned(), name: replica_set });
        Self { name, labels, owner, ..Self::default() }
    }

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

    /// Whether it is there to work: enrolled, ready, and not being deleted.
    pub fn serves(&self) -> bool {
        self.enrolled() && self.ready && !self.terminating
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
        // The timestamp is the deadline; the request came `grace` earlier.
        let deadline = meta.deletion_timestamp.as_ref().map(|time| time.0.as_second());
        let grace = meta.deletion_grace_period_seconds.unwrap_or_default();
        let gate = gate(pod);
        Self {
            name: PodName {
                namespace: meta.namespace.clone().unwrap_or_default(),
                name: meta.name.clone().unwrap_or_default(),
            },
            created_at: meta.creation_timestamp.as_ref().map(|time| time.0.as_second()),
            deleted_at: deadline.map(|deadline| deadline.saturating_sub(grace)),
            ended,
            stopped: pod.status.as_ref().is_some_and(|status| has_stopped(status, meta.deletion_timestamp.is_some())),
            ready: is_ready(pod),
            restarts: pod.status.as_ref().map(restarts).unwrap_or_default(),
            deletion_cost: deletion_cost(meta),
            gate,
            uid: meta.uid.clone().unwrap_or_default(),
            node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
            account: pod.spec.as_ref().map(account).unwrap_or_default(),
            labels: meta.labels.clone().unwrap_or_default(),
            admitted: admitted(pod),
            owner: owner(meta),
            terminating: meta.deletion_timestamp.is_some() || ended,
            redirect: pod.spec.as_ref().map(redirect).unwrap_or_default(),
            ip: pod.status.as_ref().and_then(|status| status.pod_ip.clone()),
            container: pod.status.as_ref().and_then(sidecar_id),
            containers: pod.status.as_ref().map(container_ids).unwrap_or_default(),
            fail_open: fails_open(pod),
            forward_proxy: annotation_is_true(meta, annotation::FORWARD_PROXY),
        }
    }
}

fn owner(meta: &ObjectMeta) -> Option<Owner> {
    let mut owners = meta.owner_references.iter().flatten();
    let owner = owners.find(|owner| owner.controller == Some(true))?;
    Some(Owner { kind: owner.kind.clone(), name: owner.name.clone() })
}

/// A pod without a UID is being admitted, and will get a proxy.
///
/// The annotation of an admitted pod can be changed by anybody. Its volumes cannot, so they count too.
fn admitted(pod: &v1::Pod) -> Admitted {
    let empty = v1::PodSpec::default();
    let (meta, spec) = (&pod.metadata, pod.spec.as_ref().unwrap_or(&empty));
    if spec.host_network == Some(true) || meta.namespace.as_deref() == Some(KUBE_SYSTEM) {
        return Admitted::Bypassed;
    }
    let injected = annotation_is_true(meta, annotation::INJECTED) || mounts_config_map(spec, root_ca::MESH);
    if meta.uid.is_some() && (!injected || mounts_config_map(spec, root_ca::CLUSTER)) {
        return Admitted::Bypassed;
    }
    Admitted::Injected
}

/// For an admitted pod its volumes count, which cannot change. Before admission its annotation counts.
fn fails_open(pod: &v1::Pod) -> bool {
    match &pod.metadata.uid {
        Some(_) => pod.spec.as_ref().is_some_and(trusts_both_cas),
        None => annotation_is_true(&pod.metadata, annotation::FAIL_OPEN),
    }
}

fn annotation_is_true(meta: &ObjectMeta, key: &str) -> bool {
    annotation_value(meta, key).is_some_and(|value| value == "true")
}

fn annotation_value<'a>(meta: &'a ObjectMeta, key: &str) -> Option<&'a String> {
    meta.annotations.as_ref().and_then(|all| all.get(key))
}

/// Whether the pod mounts the CAs of mesh and API server together. Only pods that may fail open get both.
pub fn trusts_both_cas(spec: &v1::PodSpec) -> bool {
    let init = spec.init_containers.iter().flatten();
    let init = init.filter(|container| container.name != sidecar::CONTAINER);
    let variables = init.chain(&spec.containers).flat_map(|one| one.env.iter().flatten());
    let mut sources = variables.filter_map(|one| one.value_from.as_ref()?.config_map_key_ref.as_ref());
    let is_both = |name: &str, key: &str| name == root_ca::MESH && key == root_ca::FAIL_OPEN_KEY;
    sources.any(|source| is_both(&source.name, &source.key))
        || config_maps(spec).any(|(name, items)| items.iter().any(|item| is_both(name, &item.key)))
}

/// Whether one of the pod's own volumes has the ConfigMap.
fn mounts_config_map(spec: &v1::PodSpec, name: &str) -> bool {
    config_maps(spec).any(|(map, _)| map == name)
}

/// `ConfigMaps` in the pod's own volumes with their items; the proxy's volumes are left out.
fn config_maps(spec: &v1::PodSpec) -> impl Iterator<Item = (&str, &[v1::KeyToPath])> {
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

/// From the injected container, which cannot change.
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

/// A pod with the gate of rollouts is not `Ready` before it is promoted: there all else that it waits for counts.
fn is_ready(pod: &v1::Pod) -> bool {
    let holds = |kind: &str| {
        let mut conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
        conditions.any(|condition| condition.type_ == kind && condition.status == "True")
    };
    let gates = || pod.spec.iter().flat_map(|spec| spec.readiness_gates.iter().flatten());
    if !gates().any(|gate| gate.condition_type == PROMOTED) {
        return holds("Ready");
    }
    let mut others = gates().filter(|gate| gate.condition_type != PROMOTED);
    holds("ContainersReady") && others.all(|gate| holds(&gate.condition_type))
}

fn deletion_cost(meta: &ObjectMeta) -> DeletionCost {
    match annotation_value(meta, DELETION_COST) {
        None => DeletionCost::None,
        Some(cost) if *cost == DELETED_FIRST.to_string() => DeletionCost::DeletedFirst,
        Some(_) => DeletionCost::Other,
    }
}

fn gate(pod: &v1::Pod) -> Option<Gate> {
    let mut gates = pod.spec.as_ref()?.readiness_gates.iter().flatten();
    gates.find(|gate| gate.condition_type == PROMOTED)?;
    let mut conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let condition = conditions.find(|condition| condition.type_ == PROMOTED);
    Some(Gate {
        holds: condition.map(|condition| condition.status == "True"),
        message: condition.and_then(|condition| condition.message.clone()).unwrap_or_default(),
    })
}

/// Label and field selectors of the watch: pods that ask for a proxy, outside `kube-system` and namespace
/// `own`.
pub fn watch_selectors(own: &str) -> (String, String) {
    let elsewhere = [KUBE_SYSTEM, own].map(|name| format!("metadata.namespace!={name}"));
    (format!("{}=true", label::ENABLE_PROXY), elsewhere.join(","))
}

/// Of a template, that of its pods. Without a template it is the default, too.
pub fn template_account(template: Option<&v1::PodTemplateSpec>) -> String {
    let spec = template.and_then(|template| template.spec.as_ref());
    spec.map_or_else(|| DEFAULT_ACCOUNT.to_owned(), account)
}

/// The API server sets it at admission, where none is named.
fn account(spec: &v1::PodSpec) -> String {
    let named = spec.service_account_name.as_ref().filter(|name| !name.is_empty());
    named.cloned().unwrap_or_else(|| DEFAULT_ACCOUNT.to_owned())
}

/// Label selector of the watch of pods that do not ask for a proxy.
pub fn unenrolled_selector() -> String {
    format!("{}!=true", label::ENABLE_PROXY)
}

/// `NAMESPACE/NAME` of the StatefulSet, and the ordinal of its first pod.
pub fn first_ordinal(set: &StatefulSet) -> (String, u32) {
    let ordinals = set.spec.as_ref().and_then(|spec| spec.ordinals.as_ref());
    let start = ordinals.and_then(|ordinals| ordinals.start);
    let start = start.and_then(|start| u32::try_from(start).ok());
    (full_name(&set.metadata), start.unwrap_or_default())
}

#[cfg(test)]
mod tests;

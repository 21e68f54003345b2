//! What does the manager know of a pod?
//!
//! Little, so that it can be kept for many: who it is, its labels, and who made it.

use std::fmt;
use std::str::FromStr;

use ctrlmesh_common::names::{annotation, label, root_ca, sidecar};
use ctrlmesh_common::policy::Redirect;
use ctrlmesh_common::selector::Labels;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1;
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
    pub maker: Option<Maker>,
    /// When it was made, in seconds since 1970; none while it is being admitted.
    pub born: Option<i64>,
    /// Whether it is on its way out, or has ended: it stands in nobody's way.
    pub leaving: bool,
    /// When it was told to go, in seconds since 1970, by the clock that says when pods are made.
    pub leaving_since: Option<i64>,
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
    PastUs,
}

/// What makes pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Maker {
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
            || self.maker.is_none()
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

    fn made_by(&self, kind: &str, name: &str) -> bool {
        self.maker.as_ref().is_some_and(|maker| maker.kind == kind && maker.name == name)
    }

    fn label(&self, key: &str) -> Option<&str> {
        self.labels.get(key).map(String::as_str)
    }
}

impl From<&v1::Pod> for Member {
    fn from(pod: &v1::Pod) -> Self {
        let meta = &pod.metadata;
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        let annotated = |key: &str| meta.annotations.as_ref()?.get(key);
        let owners = meta.owner_references.iter().flatten();
        let maker = owners
            .filter(|owner| owner.controller == Some(true))
            .map(|owner| Maker { kind: owner.kind.clone(), name: owner.name.clone() })
            .next();
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
            leaving_since: deadline.map(|deadline| deadline.saturating_sub(grace)),
            ended,
            uid: meta.uid.clone().unwrap_or_default(),
            node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
            labels: meta.labels.clone().unwrap_or_default(),
            admitted: admitted(pod),
            maker,
            leaving: meta.deletion_timestamp.is_some() || ended,
            redirect: pod.spec.as_ref().map(redirect).unwrap_or_default(),
            container: pod.status.as_ref().and_then(container),
            fail_open: annotated(annotation::FAIL_OPEN).is_some_and(|value| value == "true"),
        }
    }
}

/// As what the pod was admitted. One that was not admitted yet will be given what it needs.
///
/// That it was given that is written into its annotations, which anybody can write later; so its volumes count too, which nobody can.
fn admitted(pod: &v1::Pod) -> Admitted {
    let empty = v1::PodSpec::default();
    let (meta, spec) = (&pod.metadata, pod.spec.as_ref().unwrap_or(&empty));
    if spec.host_network == Some(true) || meta.namespace.as_deref() == Some(KUBE_SYSTEM) {
        return Admitted::PastUs;
    }
    let annotations = meta.annotations.as_ref();
    let said = annotations.and_then(|all| all.get(annotation::INJECTED));
    let injected = said.is_some_and(|said| said == "true") || holds(spec, root_ca::MESH);
    if meta.uid.is_some() && (!injected || holds(spec, root_ca::CLUSTER)) {
        return Admitted::PastUs;
    }
    Admitted::Injected
}

/// Whether a volume of the pod's own, not of the proxy's in it, holds something of the ConfigMap.
fn holds(spec: &v1::PodSpec, name: &str) -> bool {
    let own = spec.volumes.iter().flatten().filter(|volume| volume.name != sidecar::VOLUME);
    own.into_iter().any(|volume| {
        let projected = volume.projected.iter();
        let mut sources = projected.flat_map(|projected| projected.sources.iter().flatten());
        volume.config_map.as_ref().is_some_and(|map| map.name == name)
            || sources.any(|source| source.config_map.as_ref().is_some_and(|map| map.name == name))
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
mod tests {
    use super::*;

    fn member(name: &str, maker: Option<(&str, &str)>, labels: &[(&str, &str)]) -> Member {
        Member {
            name: PodName { namespace: "ns".to_owned(), name: name.to_owned() },
            labels: labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            maker: maker.map(|(kind, name)| Maker { kind: kind.to_owned(), name: name.to_owned() }),
            ..Member::default()
        }
    }

    #[test]
    fn the_ordinal_is_that_of_the_named_statefulset_only() {
        let op = |name| member(name, Some((STATEFUL_SET, "op")), &[]);
        assert_eq!(op("op-0").ordinal_in("op"), Some(0));
        assert_eq!(op("op-12").ordinal_in("op"), Some(12));
        for other in ["op", "op-", "op-01", "op-a", "op-1-2", "opx-1", "op--1", "op-+1"] {
            assert_eq!(op(other).ordinal_in("op"), None, "{other}");
        }
        assert_eq!(op("op-1-2").ordinal_in("op-1"), None, "of another StatefulSet");
        assert_eq!(member("op-3", None, &[]).ordinal_in("op"), None, "of nobody");
        let label = [(label::STATEFULSET_POD_NAME, "op-3")];
        assert_eq!(member("op-3", None, &label).ordinal_in("op"), Some(3), "as it says itself");
        let set = Some((REPLICA_SET, "op"));
        assert_eq!(member("op-3", set, &label).ordinal_in("op"), None, "whoever made it decides");
    }

    #[test]
    fn the_revision_is_that_of_the_named_deployment_only() {
        let hash = [(label::POD_TEMPLATE_HASH, "5c9")];
        let pod = member("op-5c9-x", Some((REPLICA_SET, "op-5c9")), &hash);
        assert_eq!(pod.revision_in("op"), Some("5c9"));
        assert_eq!(pod.revision_in("op-5c9"), None);
        assert_eq!(member("op-5c9-x", None, &hash).revision_in("op"), None);
    }

    #[test]
    fn a_pod_that_was_labelled_after_it_was_admitted_is_not_enrolled() {
        let volume = |map: &str| {
            let sources = serde_json::json!([{"configMap": {"name": map, "items": [{"key": "ca.crt", "path": "ca.crt"}]}}]);
            serde_json::json!([{"name": "kube-api-access-x", "projected": {"sources": sources}}])
        };
        let read = |uid: Option<&str>, injected: bool, volumes: serde_json::Value| {
            let annotations = injected.then(|| serde_json::json!({annotation::INJECTED: "true"}));
            let pod = serde_json::json!({
                "metadata": {"name": "p", "namespace": "ops", "uid": uid, "labels": {label::ENABLE_PROXY: "true"}, "annotations": annotations},
                "spec": {"containers": [], "volumes": volumes},
            });
            serde_json::from_value::<v1::Pod>(pod).unwrap()
        };
        let is = |pod: &v1::Pod| Member::from(pod).enrolled();
        let none = serde_json::Value::Null;
        assert!(!is(&read(Some("u"), false, volume(root_ca::CLUSTER))), "labelled afterwards");
        assert!(!is(&read(Some("u"), false, none.clone())), "labelled afterwards, without a token");
        assert!(!is(&read(Some("u"), true, volume(root_ca::CLUSTER))), "annotated afterwards, too");
        assert!(is(&read(Some("u"), true, volume(root_ca::MESH))), "admitted");
        assert!(is(&read(Some("u"), false, volume(root_ca::MESH))), "somebody took the annotation");
        assert!(is(&read(Some("u"), true, none.clone())), "admitted, without a token");
        assert!(is(&read(None, false, volume(root_ca::CLUSTER))), "will be admitted");
        let mut host = read(Some("u"), true, none.clone());
        host.spec.as_mut().unwrap().host_network = Some(true);
        assert!(!is(&host), "its node's network");
        let mut system = read(Some("u"), true, none);
        system.metadata.namespace = Some(KUBE_SYSTEM.to_owned());
        assert!(!is(&system));
    }

    #[test]
    fn where_the_connections_go_follows_from_the_proxy_that_was_injected() {
        let read = |containers: &str| {
            let pod = format!(
                r#"{{"metadata": {{"name": "p", "annotations": {{"{}": "env"}}}}, "spec": {{"containers": [], "initContainers": [{containers}]}}}}"#,
                annotation::INTERCEPTION
            );
            Member::from(&serde_json::from_str::<v1::Pod>(&pod).unwrap()).redirect
        };
        assert_eq!(read(""), Redirect::Node, "an annotation alone puts no proxy into a pod");
        assert_eq!(read(r#"{"name": "ctrlmesh-proxy", "args": ["sidecar"]}"#), Redirect::Nowhere);
        let redirected = r#"{"name": "ctrlmesh-proxy", "args": ["sidecar", "--redirected=15001"]}"#;
        assert_eq!(read(redirected), Redirect::Sidecar);
    }

    #[test]
    fn a_pod_was_told_to_go_its_grace_before_it_has_to_be_gone() {
        let text = serde_json::json!({
            "metadata": {"name": "p", "creationTimestamp": "2026-01-01T00:00:10Z",
                "deletionTimestamp": "2026-01-01T00:01:00Z", "deletionGracePeriodSeconds": 30},
            "status": {"phase": "Running"},
        });
        let pod = Member::from(&serde_json::from_value::<v1::Pod>(text).unwrap());
        assert_eq!(pod.leaving_since.unwrap() - pod.born.unwrap(), 20);
        assert!(pod.leaving && !pod.ended);
        let failed = serde_json::json!({"metadata": {"name": "p"}, "status": {"phase": "Failed"}});
        let failed = Member::from(&serde_json::from_value::<v1::Pod>(failed).unwrap());
        assert!(failed.leaving && failed.ended && failed.leaving_since.is_none());
    }

    #[test]
    fn the_proxys_container_is_known_once_it_was_started() {
        let read = |statuses: &str| {
            let pod = format!(
                r#"{{"metadata": {{}}, "status": {{"initContainerStatuses": [{statuses}]}}}}"#
            );
            Member::from(&serde_json::from_str::<v1::Pod>(&pod).unwrap()).container
        };
        let other = r#"{"name": "migrate", "containerID": "containerd://a", "image": "", "imageID": "", "ready": true, "restartCount": 0}"#;
        let waiting = other.replace("migrate", "ctrlmesh-proxy").replace("containerd://a", "");
        let started = waiting.replace(r#""containerID": """#, r#""containerID": "containerd://b""#);
        assert_eq!(read(other), None);
        assert_eq!(read(&waiting), None);
        assert_eq!(read(&format!("{other}, {started}")).as_deref(), Some("b"));
    }

    #[test]
    fn a_pods_name_is_read_as_it_is_printed() {
        let name = PodName { namespace: "ns".to_owned(), name: "a".to_owned() };
        assert_eq!(name.to_string().parse(), Ok(name));
        for wrong in ["", "a", "/a", "ns/", "a/b/c"] {
            assert!(wrong.parse::<PodName>().is_err(), "{wrong}");
        }
    }
}

//! Names what is not carried over, and what is there in its place.
//!
//! Pure.

use std::collections::BTreeSet;

use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde::Serialize;
use serde_json::Value;

use super::members;
use super::snapshot::{Snapshot, in_both_groups};

/// A label or an annotation of pods, without its group, and what becomes of it.
const ON_PODS: [(&str, &str); 9] = [
    ("enable-iptables", "not needed: the kernel program of the node's proxy takes the connections, without iptables"),
    (
        "kubeconfig-volume",
        "not needed with interception ebpf, which takes connections whatever kubeconfig names; with interception kubeconfig, name the file yourself",
    ),
    (
        "env-sync",
        "not needed: the node's proxy reads no variables of containers; variables of their own come by env-inject",
    ),
    ("log-path", "the proxy logs to standard output: `kubectl logs`"),
    ("watching", "not needed: nothing of ours reads it"),
    ("env-inject", "works as before"),
    ("proxy-resource", "works as before where the pod has a sidecar; the node's proxy has its own"),
    (
        "disable-fake-kubeconfig-arg",
        "works as before with interception kubeconfig; elsewhere nothing is added to arguments",
    ),
    ("disable-fake-kubeconfig-env", "works as before with interception kubeconfig; elsewhere KUBECONFIG is left alone"),
];

/// Labels and annotations that the enrolment takes out of pod templates, since nothing of ours reads them.
pub(super) const DROPPED_LABELS: [&str; 3] = ["enable-iptables", "kubeconfig-volume", "watching"];
pub(super) const DROPPED_ANNOTATIONS: [&str; 2] = ["env-sync", "log-path"];

/// Something of the predecessor's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Leftover {
    pub(super) what: String,
    /// Objects that have it.
    pub(super) of: Vec<String>,
    pub(super) instead: &'static str,
}

pub(super) fn leftovers(snapshot: &Snapshot) -> Vec<Leftover> {
    let on_pods = ON_PODS.into_iter().map(|(key, instead)| {
        let templates = snapshot.workloads.iter().filter(|one| has(one.data.pointer("/spec/template/metadata"), key));
        let pods = snapshot.pods.iter().filter(|pod| {
            in_both_groups(key).iter().any(|key| pod.labels().contains_key(key) || pod.annotations().contains_key(key))
        });
        Leftover { what: key.to_owned(), of: names(templates.chain(pods)), instead }
    });
    let ignored = snapshot
        .rules
        .iter()
        .chain(&snapshot.kridge)
        .filter(|one| in_both_groups("ignore-validate").iter().any(|key| one.labels().contains_key(key)));
    let workloads = snapshot.workloads.iter().filter(|one| members::variable(snapshot, one).is_some());
    let with_members = workloads.chain(snapshot.pods.iter().filter(|pod| members::of_own(pod).is_some()));
    let others = [
        Leftover {
            what: members::VARIABLE.to_owned(),
            of: names(with_members),
            instead: "spec.root.clusters, with unit: Cluster: step enrol says which path",
        },
        Leftover {
            what: "ignore-validate".to_owned(),
            of: names(ignored),
            instead: "works as before; what is wrong then stands in condition Accepted",
        },
        Leftover {
            what: "ConfigMap fake-kubeconfig".to_owned(),
            of: names(snapshot.fake_kubeconfigs.iter()),
            instead: "not needed: pods keep their own configuration; step finish deletes it where it has the label watching",
        },
        Leftover {
            what: "ConfigMap ctrlmesh-sharding-resource".to_owned(),
            of: names(snapshot.kinds.iter()),
            instead: "copied into the namespace of our managers, unless one is there; roots name their kinds themselves",
        },
    ];
    on_pods.chain(others).filter(|one| !one.of.is_empty()).collect()
}

fn has(metadata: Option<&Value>, key: &str) -> bool {
    let keys = in_both_groups(key);
    ["labels", "annotations"].into_iter().any(|field| {
        let map = metadata.and_then(|metadata| metadata.get(field)).and_then(Value::as_object);
        map.is_some_and(|map| keys.iter().any(|key| map.contains_key(key)))
    })
}

fn names<'a>(objects: impl Iterator<Item = &'a DynamicObject>) -> Vec<String> {
    let name = |one: &DynamicObject| {
        let kind = one.types.as_ref().map_or("Pod", |types| types.kind.as_str());
        format!("{kind} {}/{}", one.namespace().unwrap_or_default(), one.name_any())
    };
    objects.map(name).collect::<BTreeSet<_>>().into_iter().collect()
}

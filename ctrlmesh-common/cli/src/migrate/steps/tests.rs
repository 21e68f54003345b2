//! What steps decide, on the state that the predecessor leaves.

use std::collections::BTreeSet;

use kube::api::DynamicObject;

use super::*;
use crate::migrate::snapshot::Predecessor;

const GROUP_VERSION: &str = "ctrlmesh.kusionstack.io/v1alpha1";

fn object(content: Value) -> DynamicObject {
    serde_json::from_value(content).unwrap()
}

fn rule_of(kind: &str, name: &str, spec: Value) -> DynamicObject {
    object(json!({"apiVersion": GROUP_VERSION, "kind": kind,
        "metadata": {"name": name, "namespace": "ops", "uid": format!("uid-{name}"), "finalizers": [FINALIZER]},
        "spec": spec}))
}

fn root() -> DynamicObject {
    let resources = json!([{"relateResources": [{"apiGroups": [""], "resources": ["configmaps"]}]}]);
    rule_of(
        "ShardingConfig",
        "op-root",
        json!({"controller": {"leaderElectionName": "op"}, "root": {"prefix": "op",
        "targetStatefulSet": "op", "canary": {"replicas": 1, "inNamespaces": ["ns-a"]},
        "auto": {"shardingSize": 1, "everyShardReplicas": 2}, "resourceSelector": resources}}),
    )
}

fn child(name: &str, pods: &[&str]) -> DynamicObject {
    let mut child = rule_of(
        "ShardingConfig",
        name,
        json!({
        "selector": {"matchExpressions": [{"key": "statefulset.kubernetes.io/pod-name", "operator": "In", "values": pods}]},
        "limits": [{"selector": {"matchLabels": {"ctrlmesh.kusionstack.io/shard-hash": "1"}}}]}),
    );
    child.metadata.finalizers = None;
    child
}

fn workload(labels: Value, annotations: Value) -> DynamicObject {
    object(json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "op", "namespace": "ops"},
        "spec": {"template": {"metadata": {"labels": labels, "annotations": annotations}}}}))
}

fn deployment(namespace: &str, name: &str, args: Value) -> DynamicObject {
    object(json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "namespace": namespace},
        "spec": {"replicas": 3, "template": {"spec": {"containers": [{"name": "manager", "args": args}]}}}}))
}

fn snapshot() -> Snapshot {
    let hook = |service: &str| json!([{"clientConfig": {"service": {"namespace": service, "name": "x"}}}]);
    let webhook = |name: &str, service: &str| {
        object(json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
            "metadata": {"name": name, "uid": "1", "resourceVersion": "7"}, "webhooks": hook(service)}))
    };
    Snapshot {
        predecessor: Predecessor { namespace: "ctrlmesh".to_owned(), deployment: Some("ctrlmesh".to_owned()) },
        system: "ctrlmesh-system".to_owned(),
        manager: Some(deployment("ctrlmesh", "ctrlmesh", json!([]))),
        our_manager: None,
        webhooks: vec![webhook("theirs", "ctrlmesh"), webhook("ctrlmesh", "ctrlmesh-system"), webhook("other", "x")],
        rules: vec![
            root(),
            child("op-0-canary", &["op-0"]),
            child("op-1-normal", &["op-1", "op-2"]),
            child("op-by-hand", &["op-9"]),
            rule_of("CircuitBreaker", "slow", json!({})),
        ],
        kridge: Vec::new(),
        manager_state: None,
        namespaces: vec![
            object(json!({"metadata": {"name": "ns-a", "labels": {"ctrlmesh.kusionstack.io/shard-hash": "15"}}})),
            object(json!({"metadata": {"name": "kube-system"}})),
        ],
        workloads: vec![workload(json!({label::ENABLE_PROXY: "true"}), json!({}))],
        pods: Vec::new(),
        fake_kubeconfigs: Vec::new(),
        kinds: None,
        has_own_kinds: false,
        guard: BTreeSet::new(),
    }
}

fn said(planned: &Planned) -> Vec<String> {
    planned.changes.iter().map(|one| one.change.to_string()).collect()
}

#[test]
fn only_the_predecessors_webhooks_are_deleted() {
    let planned = plan(Step::Webhooks, &snapshot());
    assert_eq!(said(&planned), ["delete MutatingWebhookConfiguration theirs"]);
    let Some(Change { action: Action::Create(before), .. }) = &planned.changes[0].inverse else {
        panic!("{planned:?}")
    };
    assert_eq!(before["metadata"], json!({"name": "theirs"}));
    assert_eq!(before["webhooks"][0]["clientConfig"]["service"]["namespace"], "ctrlmesh");
}

#[test]
fn a_manager_that_is_not_found_stops_the_migration() {
    let mut snapshot = snapshot();
    assert_eq!(plan(Step::Stop, &snapshot).changes.len(), 1);
    snapshot.manager = None;
    assert!(plan(Step::Stop, &snapshot).problems[0].contains("--predecessor"));
    snapshot.predecessor.deployment = None;
    assert_eq!(plan(Step::Stop, &snapshot), Planned::default());
}

#[test]
fn two_running_managers_are_a_problem() {
    let mut snapshot = snapshot();
    assert!(plan(Step::Guard, &snapshot).problems.is_empty());
    let mut ours = deployment("ctrlmesh-system", "ctrlmesh-manager", json!([]));
    snapshot.our_manager = Some(ours.clone());
    assert!(plan(Step::Guard, &snapshot).problems[0].contains("ctrlmesh-system/ctrlmesh-manager to 0"));
    ours.data["spec"]["replicas"] = json!(0);
    snapshot.our_manager = Some(ours);
    assert!(plan(Step::Guard, &snapshot).problems.is_empty());
}

#[test]
fn finalizers_are_dropped_where_they_are() {
    let mut snapshot = snapshot();
    snapshot.rules[4].metadata.deletion_timestamp =
        Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
    let planned = plan(Step::Finalizers, &snapshot);
    let [root, breaker] = &said(&planned)[..] else { panic!("{planned:?}") };
    assert!(root.ends_with("from ShardingConfig ops/op-root") && breaker.ends_with("from CircuitBreaker ops/slow"));
    assert!(planned.notes[0].contains("is being deleted"), "{:?}", planned.notes);
}

#[test]
fn children_are_replaced_by_ones_that_the_root_owns() {
    let planned = plan(Step::Adopt, &snapshot());
    assert!(planned.problems.is_empty(), "{:?}", planned.problems);
    assert_eq!(
        said(&planned),
        [
            "delete ShardingConfig ops/op-0-canary",
            "delete ShardingConfig ops/op-1-normal",
            "create ShardingConfig ops/op-0-canary",
            "create ShardingConfig ops/op-1-normal",
        ]
    );
    let Action::Create(made) = &planned.changes[3].change.action else { panic!("{planned:?}") };
    assert_eq!(made["metadata"]["ownerReferences"][0]["uid"], "uid-op-root");
    let limits = made["spec"]["limits"].to_string();
    assert!(limits.contains("ctrlmesh.kusionstack.io/shard-hash"), "the labels of the predecessor: {limits}");
}

#[test]
fn an_adoption_that_was_cut_goes_on() {
    let mut snapshot = snapshot();
    let all = plan(Step::Adopt, &snapshot);
    // The first child was replaced; the second one was deleted, and not made again.
    let Action::Create(made) = &all.changes[2].change.action else { panic!("{all:?}") };
    snapshot.rules.remove(2);
    snapshot.rules[1] = object(made.clone());
    assert_eq!(said(&plan(Step::Adopt, &snapshot)), ["create ShardingConfig ops/op-1-normal"]);
}

#[test]
fn a_root_that_cannot_be_divided_is_named() {
    let mut snapshot = snapshot();
    snapshot.rules[0].data["spec"]["root"]["auto"]["shardingSize"] = json!(40);
    let planned = plan(Step::Adopt, &snapshot);
    assert!(planned.problems[0].contains("ops/op-root") && planned.changes.is_empty(), "{planned:?}");
    assert_eq!(plan(Step::Guard, &snapshot).problems, planned.problems, "before anything is changed");
}

#[test]
fn a_disabled_root_keeps_its_children() {
    let mut snapshot = snapshot();
    snapshot.rules[0].data["spec"]["root"]["disable"] = json!(true);
    let planned = plan(Step::Adopt, &snapshot);
    assert!(planned.changes.is_empty() && planned.notes[0].contains("disabled"), "{planned:?}");
}

#[test]
fn labels_are_in_force_before_our_managers_start() {
    let mut snapshot = snapshot();
    let planned = plan(Step::Labels, &snapshot);
    assert_eq!(planned.changes.len(), 2, "{planned:?}");
    let Action::MergeStatus(status) = &planned.changes[1].change.action else { panic!("{planned:?}") };
    assert_eq!(status["status"]["labels"]["inForce"]["hash"], "kusionstack");
    snapshot.manager_state = Some(object(status.clone()));
    assert_eq!(plan(Step::Labels, &snapshot), Planned::default());
}

#[test]
fn another_hash_under_the_predecessors_key_is_a_problem() {
    let mut snapshot = snapshot();
    let mut labels = json!({"shardingHash": "ctrlmesh.kusionstack.io/shard-hash", "hash": "fnv1a"});
    snapshot.manager_state = Some(object(json!({"status": {"labels": {"inForce": labels}}})));
    assert!(plan(Step::Labels, &snapshot).problems[0].contains("--sharding-hash=kusionstack"));
    labels["shardingHash"] = json!("ctrlmesh.kusionstack.io/sharding-hash");
    snapshot.manager_state = Some(object(json!({"status": {"labels": {"inForce": labels}}})));
    let planned = plan(Step::Labels, &snapshot);
    assert!(planned.problems.is_empty() && planned.notes[0].contains("stay on the objects"), "{planned:?}");
}

#[test]
fn managers_that_would_relabel_are_refused() {
    let mut snapshot = snapshot();
    snapshot.our_manager = Some(deployment("ctrlmesh-system", "ctrlmesh-manager", json!(["run"])));
    assert!(plan(Step::Managers, &snapshot).problems[0].contains("--label-sharding-hash=ctrlmesh"));
    let key = "ctrlmesh.kusionstack.io/shard-hash";
    let args = json!(["run", "--sharding-hash=kusionstack", "--label-sharding-hash", key]);
    snapshot.our_manager = Some(deployment("ctrlmesh-system", "ctrlmesh-manager", args));
    assert_eq!(plan(Step::Managers, &snapshot).problems, Vec::<String>::new());
}

#[test]
fn enrolling_takes_the_template_and_leaves_it_reversible() {
    let mut snapshot = snapshot();
    let (iptables, sync) = ("ctrlmesh.kusionstack.io/enable-iptables", "ctrlmesh.kusionstack.io/env-sync");
    snapshot.workloads = vec![workload(json!({label::ENABLE_PROXY: "true", iptables: "true"}), json!({sync: "A=1"}))];
    let planned = plan(Step::Enrol, &snapshot);
    let metadata = |change: &Change| match &change.action {
        Action::Merge(patch) => patch["spec"]["template"]["metadata"].clone(),
        other => panic!("{other:?}"),
    };
    let taken = metadata(&planned.changes[0].change);
    assert_eq!(taken["labels"], json!({label::ENABLE_PROXY: "true", iptables: null}));
    assert_eq!(taken["annotations"][sync], Value::Null);
    let left = metadata(planned.changes[0].inverse.as_ref().unwrap());
    assert_eq!(left["labels"], json!({label::ENABLE_PROXY: null}), "without a proxy, until the predecessor is back");
    let restored = metadata(&planned.undone_last[0]);
    assert_eq!(restored["labels"], json!({label::ENABLE_PROXY: "true", iptables: "true"}));
    assert_eq!(restored["annotations"][sync], "A=1");
}

#[test]
fn a_workload_without_the_label_stays_as_it_is() {
    let mut snapshot = snapshot();
    snapshot.workloads = vec![workload(json!({"app": "op"}), json!({}))];
    let planned = plan(Step::Enrol, &snapshot);
    assert!(planned.changes.is_empty() && planned.notes[0].contains("stays as it is"), "{planned:?}");
}

#[test]
fn kridges_roots_are_copied_and_their_children_are_not() {
    let mut snapshot = snapshot();
    let kridge = |object: DynamicObject| {
        let text = serde_json::to_string(&object).unwrap().replace("ctrlmesh.kusionstack", "kridge.kusionstack");
        serde_json::from_str(&text).unwrap()
    };
    snapshot.kridge = snapshot.rules.drain(..).map(kridge).collect();
    let planned = plan(Step::Convert, &snapshot);
    assert!(planned.problems.is_empty(), "{:?}", planned.problems);
    let mut made = said(&planned);
    made.sort();
    assert_eq!(
        made,
        ["create CircuitBreaker ops/slow", "create ShardingConfig ops/op-by-hand", "create ShardingConfig ops/op-root"]
    );
}

#[test]
fn a_copy_that_would_be_refused_is_named_first() {
    let mut snapshot = snapshot();
    let mut root = root();
    root.data["spec"]["root"]["auto"]["shardingSize"] = json!(40);
    let text = serde_json::to_string(&root).unwrap().replace("ctrlmesh.kusionstack", "kridge.kusionstack");
    (snapshot.rules, snapshot.kridge) = (Vec::new(), vec![serde_json::from_str(&text).unwrap()]);
    let planned = plan(Step::Guard, &snapshot);
    assert!(planned.problems[0].contains("ops/op-root") && planned.problems[0].contains("shardingSize"), "{planned:?}");
}

#[test]
fn nothing_is_finished_while_pods_of_the_predecessor_run() {
    let mut snapshot = snapshot();
    let map =
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "fake-kubeconfig", "namespace": "ops"}});
    snapshot.fake_kubeconfigs = vec![object(map)];
    let pod = |annotations: Value| {
        object(json!({"metadata": {"name": "op-0", "namespace": "ops", "annotations": annotations}}))
    };
    snapshot.pods = vec![pod(json!({}))];
    assert!(plan(Step::Finish, &snapshot).problems[0].contains("1 pods in namespace ops"));
    snapshot.pods = vec![pod(json!({"ctrlmesh.kusionstack.io/injected": "true"}))];
    let planned = plan(Step::Finish, &snapshot);
    assert!(planned.problems.is_empty() && planned.changes.iter().all(|one| one.inverse.is_none()));
    assert_eq!(said(&planned), ["delete ConfigMap ops/fake-kubeconfig", "delete Deployment ctrlmesh/ctrlmesh"]);
}

#[test]
fn what_is_not_carried_over_is_named_with_its_replacement() {
    let mut snapshot = snapshot();
    let on_pods = [
        "env-sync",
        "kubeconfig-volume",
        "log-path",
        "env-inject",
        "proxy-resource",
        "disable-fake-kubeconfig-arg",
        "disable-fake-kubeconfig-env",
    ];
    let annotations: Value =
        on_pods.into_iter().map(|key| (format!("ctrlmesh.kusionstack.io/{key}"), json!("x"))).collect();
    snapshot.workloads = vec![workload(json!({label::ENABLE_PROXY: "true"}), annotations)];
    let named = crate::migrate::leftovers::leftovers(&snapshot);
    let named: BTreeSet<String> = named.into_iter().filter(|one| !one.instead.is_empty()).map(|one| one.what).collect();
    assert_eq!(named, on_pods.map(str::to_owned).into());
}

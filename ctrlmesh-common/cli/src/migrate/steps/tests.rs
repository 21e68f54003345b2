//! What steps decide, on the state that the predecessor leaves.

mod webhooks;
mod children;
mod enrolment;

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
    child.metadata.labels = Some([(label::AUTO_SHARDING_ROOT.to_owned(), "op-root".to_owned())].into());
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
        services: Vec::new(),
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
fn only_the_predecessors_finalizers_are_stripped() {
    let mut snapshot = snapshot();
    let kridges = json!({"apiVersion": "kridge.kusionstack.io/v1alpha1", "kind": "CircuitBreaker",
        "metadata": {"name": "slow", "namespace": "ops",
            "finalizers": [FINALIZER, "finalizer.kridge.kusionstack.io/protected", "of.another/one"]}});
    snapshot.kridge = vec![object(kridges)];
    let planned = said(&plan(Step::Finish, &snapshot));
    let stripped: Vec<&String> = planned.iter().filter(|one| one.contains("take the finalizer")).collect();
    assert_eq!(stripped.len(), 2, "{planned:?}");
    assert!(!planned.iter().any(|one| one.contains("of.another/one")), "{planned:?}");
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
fn kridges_trigger_is_refused_until_the_end() {
    let mut snapshot = snapshot();
    snapshot.guard = guard::all().map(|(object, _)| object).collect();
    let named = |step: Step| {
        let policies = plan(step, &snapshot)
            .changes
            .into_iter()
            .filter(|one| one.change.object.kind == "ValidatingAdmissionPolicy");
        policies.map(|one| one.change.to_string()).collect::<Vec<_>>()
    };
    let [create, delete] =
        ["create", "delete"].map(|verb| format!("{verb} ValidatingAdmissionPolicy ctrlmesh-migration"));
    assert_eq!(named(Step::Guard), [create.clone(), format!("{create}-kridge")]);
    assert_eq!(named(Step::Managers), std::slice::from_ref(&delete));
    assert_eq!(named(Step::Finish), [format!("{delete}-kridge")]);
}

#[test]
fn nothing_is_finished_while_pods_of_the_predecessor_run() {
    let mut snapshot = snapshot();
    let map = |namespace: &str, labels: Value| {
        let metadata = json!({"name": "fake-kubeconfig", "namespace": namespace, "labels": labels});
        object(json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}))
    };
    snapshot.fake_kubeconfigs =
        vec![map("ops", json!({"ctrlmesh.kusionstack.io/watching": "true"})), map("dev", json!({}))];
    let pod = |annotations: Value| {
        object(json!({"metadata": {"name": "op-0", "namespace": "ops", "annotations": annotations}}))
    };
    snapshot.pods = vec![pod(json!({}))];
    assert!(plan(Step::Finish, &snapshot).problems[0].contains("1 pods in namespace ops"));
    for phase in ["Succeeded", "Failed"] {
        snapshot.pods[0].data = json!({"status": {"phase": phase}});
        assert_eq!(plan(Step::Finish, &snapshot).problems, Vec::<String>::new(), "it runs no more");
    }
    snapshot.pods = vec![pod(json!({"ctrlmesh.kusionstack.io/injected": "true"}))];
    let planned = plan(Step::Finish, &snapshot);
    assert!(planned.problems.is_empty() && planned.changes.iter().all(|one| one.inverse.is_none()));
    assert_eq!(said(&planned), ["delete ConfigMap ops/fake-kubeconfig", "delete Deployment ctrlmesh/ctrlmesh"]);
    assert!(planned.notes[0].contains("ConfigMap dev/fake-kubeconfig stays"), "{:?}", planned.notes);
}

#[test]
fn a_record_that_is_too_large_is_said_before_the_first_step() {
    let mut snapshot = snapshot();
    snapshot.rules[1].metadata.annotations = Some([("a".to_owned(), "x".repeat(RECORD_BYTES / 2))].into());
    assert_eq!(plan(Step::Guard, &snapshot).problems, Vec::<String>::new());
    snapshot.rules[2].metadata.annotations = Some([("a".to_owned(), "x".repeat(RECORD_BYTES / 2))].into());
    let problems = plan(Step::Guard, &snapshot).problems;
    let [problem] = &problems[..] else { panic!("{} problems", problems.len()) };
    for named in ["at most 900 KiB", "ops/op-0-canary (451 KiB)", "last-applied-configuration"] {
        assert!(problem.contains(named), "{named}: {problem}");
    }
}

#[test]
fn a_plan_knows_what_earlier_steps_leave_to_later_ones() {
    let mut snapshot = snapshot();
    let kridge = |object: DynamicObject| {
        let text = serde_json::to_string(&object).unwrap().replace("ctrlmesh.kusionstack", "kridge.kusionstack");
        serde_json::from_str(&text).unwrap()
    };
    snapshot.kridge = snapshot.rules.drain(..).map(kridge).collect();
    let labels = json!({"app": "op"});
    snapshot.workloads[0].data["spec"]["selector"] = json!({"matchLabels": labels});
    snapshot.pods = vec![object(json!({"metadata": {"name": "op-0", "namespace": "ops", "labels": labels}}))];
    let planned = crate::migrate::planned(&snapshot, &State::default(), Step::Finish);
    let of = |step: Step| &planned.iter().find(|one| one.step == step).unwrap().planned;
    let made = said(of(Step::Adopt));
    assert_eq!(made, ["create ShardingConfig ops/op-0-canary", "create ShardingConfig ops/op-1-normal"]);
    assert!(said(of(Step::Managers)).contains(&"delete ValidatingAdmissionPolicy ctrlmesh-migration".to_owned()));
    assert_eq!(said(of(Step::Enrol)).len(), 1, "the workload of a root that is still to be copied");
    let finish = of(Step::Finish);
    assert_eq!(finish.problems, Vec::<String>::new(), "its pods are replaced by then");
    assert!(said(finish).contains(&"delete ValidatingAdmissionPolicy ctrlmesh-migration-kridge".to_owned()));
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

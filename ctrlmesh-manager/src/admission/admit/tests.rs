use std::time::Duration;

use ctrlmesh_common::names::annotation;
use serde_json::{Value, json};

use super::*;

mod ephemeral;
mod resources;
mod rollout;

const SHARD: &str = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: a, namespace: ops}\n\
    spec: {controller: {leaderElectionName: op}, selector: {matchLabels: {app: op}}, limits: [{selector: {matchLabels: {team: a}}}]}\n---\n";

const ROOT: &str = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: root, namespace: ops}\n\
    spec: {root: {prefix: r, targetStatefulSet: op, auto: {shardingSize: 2, everyShardReplicas: 1}}}\n---\n";

fn snapshot(text: &str) -> Snapshot {
    let served = std::sync::Arc::new([("", "pods", "Pod"), ("apps", "deployments", "Deployment")].into());
    Snapshot { served, ..Snapshot::of_manifests(text) }
}

fn asked(operation: &str, object: Value, old: Option<Value>) -> Review {
    let gvk = json!({"group": "ctrlmesh.kusionstack.io", "version": "v1alpha1", "kind": object["kind"]});
    let review = json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "1", "kind": gvk, "resource": {"group": "", "version": "v1", "resource": "x"},
            "operation": operation, "namespace": "ops", "name": "x", "userInfo": {"username": "me"},
            "object": object, "oldObject": old, "dryRun": false, "options": null,
        },
    });
    let review: kube::core::admission::AdmissionReview<DynamicObject> = serde_json::from_value(review).unwrap();
    review.try_into().unwrap()
}

fn config(name: &str, team: &str, app: &str) -> Value {
    json!({
        "apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
        "metadata": {"name": name, "namespace": "ops"},
        "spec": {"controller": {"leaderElectionName": "op"}, "selector": {"matchLabels": {"app": app}},
            "limits": [{"selector": {"matchLabels": {"team": team}}}]},
    })
}

fn pod(name: &str, set: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "labels": {key::ENABLE_PROXY: "true"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": set, "uid": "a", "controller": true}]},
        "spec": {"containers": [{"name": "operator", "image": "op"}]},
    })
}

fn validated(asked: &Review, known: Option<&Snapshot>) -> AdmissionResponse {
    validate(asked, known, &Labelling::default())
}

fn message(response: &AdmissionResponse) -> &str {
    &response.result.message
}

#[test]
fn two_shards_that_could_own_one_object_are_refused() {
    let known = snapshot(SHARD);
    let same = validated(&asked("CREATE", config("b", "a", "other"), None), Some(&known));
    assert!(!same.allowed && message(&same).contains("ShardingConfig \"a\""), "{same:?}");
    assert!(validated(&asked("CREATE", config("b", "b", "other"), None), Some(&known)).allowed);
    assert!(validated(&asked("UPDATE", config("a", "c", "op"), Some(config("a", "a", "op"))), Some(&known)).allowed);
}

#[test]
fn a_root_with_pods_of_a_manual_shard_is_refused() {
    let mut there = pod("op-0", "op");
    there["metadata"]["namespace"] = json!("ops");
    there["metadata"]["labels"]["app"] = json!("op");
    let known = snapshot(&format!("{SHARD}{there}"));
    let by_root: Value = serde_saphyr::from_str(ROOT.trim_end_matches("---\n")).unwrap();
    let refused = validated(&asked("CREATE", by_root.clone(), None), Some(&known));
    let expected = "spec.root.targetStatefulSet: has pod \"op-0\", which ShardingConfig \"a\" selects too; a pod can be in one shard only";
    assert!(!refused.allowed && message(&refused) == expected, "{refused:?}");
    let mut elsewhere = by_root.clone();
    elsewhere["spec"]["root"]["targetStatefulSet"] = json!("more");
    assert!(validated(&asked("CREATE", elsewhere.clone(), None), Some(&known)).allowed);
    let changed = validated(&asked("UPDATE", by_root, Some(elsewhere)), Some(&known));
    assert_eq!(message(&changed), expected, "also where it becomes one");
}

#[test]
fn unowned_hashes_are_reported_by_current_and_next_labels() {
    let mut object = config("b", "b", "b");
    object["spec"]["limits"][0]["selector"] = json!({"matchLabels": {"example.com/slot": "3"}});
    let said = |scheme: Scheme| {
        let known = Snapshot { scheme: std::sync::Arc::new(scheme), ..snapshot("") };
        let response = validated(&asked("CREATE", object.clone(), None), Some(&known));
        assert!(response.allowed, "{}", message(&response));
        let warnings = response.warnings.unwrap_or_default();
        warnings.iter().any(|one| one.contains("belong to nobody"))
    };
    let slot = Labelling { hash_key: "example.com/slot".to_owned(), ..Labelling::default() };
    assert!(!said(Scheme::default()));
    assert!(said(Scheme::settled(slot.clone())));
    assert!(said(Scheme { next: Some(slot), ..Scheme::default() }));
}

#[test]
fn immutable_fields_are_refused_and_odd_configs_get_a_warning() {
    let known = snapshot(SHARD);
    let changed = asked("UPDATE", config("a", "a", "changed"), Some(config("a", "a", "op")));
    let changed = validated(&changed, Some(&known));
    assert!(!changed.allowed && message(&changed).contains("spec.selector: is immutable"));
    let nobody = validated(&asked("CREATE", config("b", "b", "nobody"), None), Some(&known));
    assert!(nobody.allowed);
    assert!(nobody.warnings.unwrap()[0].contains("selects no pod"));
    let alone = validated(&asked("CREATE", config("b", "a", "other"), None), None);
    assert!(alone.allowed, "nothing is known of others");
}

#[test]
fn ignored_and_deleted_objects_are_not_validated() {
    let mut wrong = config("b", "a", "other");
    wrong["spec"]["limits"] = json!([]);
    assert!(!validated(&asked("CREATE", wrong.clone(), None), None).allowed);
    assert!(validated(&asked("DELETE", wrong.clone(), None), None).allowed);
    let mut going = wrong.clone();
    going["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    assert!(validated(&asked("UPDATE", going, None), None).allowed);
    wrong["metadata"]["labels"] = json!({key::IGNORE_VALIDATE: "true"});
    assert!(validated(&asked("CREATE", wrong, None), None).allowed);
}

#[test]
fn every_kind_is_validated_by_its_own_rules() {
    let breaker = json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "CircuitBreaker",
        "metadata": {"name": "a"}, "spec": {"selector": {"matchLabels": {"app": "a"}},
        "trafficInterceptRules": [{"name": "a", "interceptType": "Whitelist", "contentType": "Regexp", "contents": ["a(b"], "methods": ["GET"]}]}});
    let refused = validated(&asked("CREATE", breaker, None), None);
    assert!(message(&refused).contains("no regular expression"), "{refused:?}");
    let state = json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ManagerState", "metadata": {"name": "x"}, "spec": {}});
    assert!(!validated(&asked("CREATE", state, None), None).allowed);
    let unreadable = json!({"kind": "FaultInjection", "metadata": {"name": "a"}, "spec": {"httpFault": 5}});
    let unreadable = validated(&asked("CREATE", unreadable, None), None);
    assert!(message(&unreadable).starts_with("cannot be read"), "{unreadable:?}");
}

fn settings() -> SidecarSettings {
    let (image, pull_policy) = ("p".to_owned(), "Always".to_owned());
    SidecarSettings { image, pull_policy, manager: "m:1".to_owned(), traces: None }
}

fn injected(pod: Value, known: Option<&Snapshot>) -> AdmissionResponse {
    let (settings, asked) = (settings(), asked("CREATE", pod, None));
    let recent = &mut RecentPods::default();
    inject(&asked, known, &settings, None, recent, Instant::now())
}

#[test]
fn pods_made_together_get_different_shards() {
    let root = ROOT.replace("targetStatefulSet", "targetDeployment");
    let settings = settings();
    let (mut recent, start) = (RecentPods::default(), Instant::now());
    let pod = |name: &str, shard: Option<&str>, ending: &str| {
        let mut labels = json!({key::ENABLE_PROXY: "true", "pod-template-hash": "x"});
        if let Some(shard) = shard {
            labels[key::SHARDING_CONFIG_INJECTED] = json!(shard);
        }
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "ops", "labels": labels,
            "annotations": {annotation::INJECTED: "true"}, "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet",
            "name": "op-x", "uid": "u", "controller": true}]}, "spec": {"containers": [{"name": "c", "image": "i"}]}, "status": {"phase": ending}})
    };
    let mut ask = |pod: Value, known: &Snapshot, after: Duration| {
        let asked = asked("CREATE", pod, None);
        let now = start + after;
        let response = inject(&asked, Some(known), &settings, None, &mut recent, now);
        assert!(response.allowed, "{}", message(&response));
        let patch = patch(&response).to_string();
        let of = |shard: &&str| patch.contains(&format!("\"{shard}\""));
        ["r-1-normal", "r-2-normal"].into_iter().find(of)
    };
    let none = snapshot(&root);
    let soon = Duration::from_millis(100);
    let first = ask(pod("", None, "Pending"), &none, Duration::ZERO);
    let second = ask(pod("", None, "Pending"), &none, soon);
    assert!(first.is_some() && second.is_some() && first != second, "{first:?} {second:?}");
    // One that is asked about again keeps the shard that it has, and takes no second place.
    assert_eq!(ask(pod("", second, "Pending"), &none, soon), None);
    // The first is seen: it counts once. A third stands by, and the fourth for the other shard.
    let seen = serde_json::to_string(&pod("op-x-a", first, "Running")).unwrap();
    let known = snapshot(&format!("{root}{seen}"));
    let (third, fourth) = (ask(pod("", None, "Pending"), &known, soon), ask(pod("", None, "Pending"), &known, soon));
    assert_ne!(third, fourth);
    // What was never seen is forgotten: the shard of the one that is there is not the one that lacks.
    assert_ne!(ask(pod("", None, "Pending"), &known, Duration::from_mins(1)), first);
    // One that was admitted before the root was known has no label yet, and will have the first shard.
    let unlabelled = serde_json::to_string(&pod("op-x-a", None, "Running")).unwrap();
    let known = snapshot(&format!("{root}{unlabelled}"));
    assert_eq!(ask(pod("", None, "Pending"), &known, Duration::from_mins(2)), Some("r-2-normal"));
}

/// A pod of the Deployment `op`, which has no name yet.
fn of_deployment(labels: Value) -> Value {
    let mut pod = pod("", "op-x");
    pod["metadata"]["labels"] = labels;
    pod["metadata"]["ownerReferences"][0]["kind"] = json!("ReplicaSet");
    pod
}

#[test]
fn a_shard_from_the_leader_is_taken_and_counts_here() {
    let known = snapshot(&ROOT.replace("targetStatefulSet", "targetDeployment"));
    let (settings, mut recent, now) = (settings(), RecentPods::default(), Instant::now());
    let fresh = json!({key::ENABLE_PROXY: "true", "pod-template-hash": "x"});
    let asked = asked("CREATE", of_deployment(fresh), None);
    let mut ask = |given: Option<&str>| {
        let given = given.map(str::to_owned);
        patch(&inject(&asked, Some(&known), &settings, given, &mut recent, now)).to_string()
    };
    assert!(ask(Some("r-1-normal")).contains("\"r-1-normal\""));
    assert!(ask(None).contains("\"r-2-normal\""), "the other one is not given twice");
    // One that is not known here yet.
    assert!(ask(Some("r-3-normal")).contains("\"r-3-normal\""));
}

#[test]
fn the_leader_assigns_shards_to_new_pods_of_deployments() {
    let known = snapshot(&ROOT.replace("targetStatefulSet", "targetDeployment"));
    let asks =
        |operation: &str, pod: Value, known: &Snapshot| shared_pod(&asked(operation, pod, None), known).is_some();
    let fresh = json!({key::ENABLE_PROXY: "true", "pod-template-hash": "x"});
    assert!(asks("CREATE", of_deployment(fresh.clone()), &known));
    assert!(!asks("UPDATE", of_deployment(fresh.clone()), &known));
    assert!(!asks("CREATE", of_deployment(fresh.clone()), &snapshot(ROOT)), "by ordinal");
    assert!(!asks("CREATE", pod("op-0", "op"), &known), "of a StatefulSet");
    for (label, value) in
        [(key::ENABLE_PROXY, "false"), (key::SHARDING_CONFIG_INJECTED, "r-1-normal"), ("pod-template-hash", "y")]
    {
        let mut labels = fresh.clone();
        labels[label] = json!(value);
        assert!(!asks("CREATE", of_deployment(labels), &known), "{label}");
    }
    let mut elsewhere = known;
    elsewhere.configs[0].metadata.namespace = Some("other".to_owned());
    assert!(!asks("CREATE", of_deployment(fresh), &elsewhere));
}

/// The operations of the patch, but for those that every pod gets, which are tested with `inject`.
fn patch(response: &AdmissionResponse) -> Value {
    let Some(patch) = &response.patch else { return Value::Null };
    let mut operations: Vec<Value> = serde_json::from_slice(patch).unwrap();
    let is_everybodys = |path: &str| path == "/spec/affinity" || path.ends_with("/securityContext");
    operations.retain(|one| !is_everybodys(one["path"].as_str().unwrap()));
    Value::Array(operations)
}

#[test]
fn a_pod_of_a_roots_statefulset_is_given_its_shard_by_ordinal() {
    let known = snapshot(ROOT);
    for (name, shard) in [("op-0", "r-1-normal"), ("op-1", "r-2-normal")] {
        let response = injected(pod(name, "op"), Some(&known));
        assert!(response.allowed);
        let path = "/metadata/labels/ctrlmesh.kusionstack.io~1sharding-config-injected";
        let injected = json!({"op": "add", "path": "/metadata/annotations", "value": {annotation::INJECTED: "true"}});
        let label = json!({"op": "add", "path": path, "value": shard});
        assert_eq!(patch(&response), json!([injected, label]));
    }
}

/// A shard that the root has made, and that still stands.
fn child(name: &str) -> String {
    format!(
        "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {{name: {name}, namespace: ops, labels: {{{}: root}}}}\n\
         spec: {{selector: {{matchLabels: {{{}: {name}}}}}, limits: [{{selector: {{matchLabels: {{team: {name}}}}}}}]}}\n---\n",
        key::AUTO_SHARDING_ROOT,
        key::SHARDING_CONFIG_INJECTED
    )
}

#[test]
fn a_recreated_pod_keeps_its_shard_while_its_root_is_off() {
    let off = ROOT.replace("prefix: r", "prefix: r, disable: true");
    let known = snapshot(&(off.clone() + &child("r-1-normal") + &child("r-2-normal")));
    for (name, shard) in [("op-0", "r-1-normal"), ("op-1", "r-2-normal")] {
        let response = injected(pod(name, "op"), Some(&known));
        assert_eq!(patch(&response)[1]["value"], shard, "{response:?}");
    }
    let mut of_deployment = pod("", "op-1");
    of_deployment["metadata"]["labels"][key::POD_TEMPLATE_HASH] = json!("1");
    of_deployment["metadata"]["ownerReferences"][0]["kind"] = json!("ReplicaSet");
    let off = off.replace("targetStatefulSet", "targetDeployment");
    let known = snapshot(&(off + &child("r-1-normal")));
    assert_eq!(patch(&injected(of_deployment, Some(&known)))[1]["value"], "r-1-normal");
}

#[test]
fn an_unselected_pod_is_enrolled_with_a_warning() {
    let known = snapshot(ROOT);
    let response = injected(pod("x-0", "x"), Some(&known));
    assert!(response.allowed);
    let injected_only =
        json!([{"op": "add", "path": "/metadata/annotations", "value": {annotation::INJECTED: "true"}}]);
    assert_eq!(patch(&response), injected_only);
    assert!(response.warnings.unwrap()[0].contains("no ShardingConfig"));
    let mut stranger = pod("op-0", "op");
    stranger["metadata"]["labels"] = json!({});
    let response = injected(stranger, Some(&known));
    assert!(response.allowed && response.patch.is_none() && response.warnings.is_none());
    let mut skipped = pod("op-0", "op");
    skipped["metadata"]["labels"][key::IGNORE_VALIDATE] = json!("true");
    assert!(injected(skipped, Some(&known)).patch.is_none());
    let mut mirror = pod("op-0", "op");
    mirror["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "5f"});
    mirror["spec"]["hostNetwork"] = json!(true);
    let mirror = injected(mirror, Some(&known));
    assert!(mirror.allowed && mirror.patch.is_none(), "the kubelet runs it anyway");
}

#[test]
fn a_pod_that_cannot_be_placed_is_not_admitted() {
    assert!(!injected(pod("op-0", "op"), None).allowed, "nothing is known yet");
    let mut host = pod("op-0", "op");
    host["spec"]["hostNetwork"] = json!(true);
    let refused = injected(host, Some(&snapshot(ROOT)));
    assert!(message(&refused).starts_with("spec.hostNetwork"), "{refused:?}");
    let mut twice = pod("op-0", "op");
    twice["metadata"]["labels"]["app"] = json!("op");
    let refused = injected(twice, Some(&snapshot(&(SHARD.to_owned() + ROOT))));
    assert!(message(&refused).contains("one shard only"), "{refused:?}");
}

#[test]
fn an_undividable_root_without_shards_admits_no_pod() {
    let undividable = ROOT.replace("shardingSize: 2", "shardingSize: 40");
    let refused = injected(pod("op-0", "op"), Some(&snapshot(&undividable)));
    assert!(!refused.allowed, "unsharded, it would see everything");
    let said = message(&refused);
    assert!(said.contains("may be of ShardingConfig \"ops/root\", which is invalid"), "{said}");
    assert!(said.contains("spec.root.auto.shardingSize: 40 shards cannot be made"), "{said}");
    let other = injected(pod("x-0", "x"), Some(&snapshot(&undividable)));
    assert!(other.allowed, "no pod of the root's: {}", message(&other));
    let known = snapshot(&(undividable + &child("r-1-normal")));
    assert_eq!(patch(&injected(pod("op-0", "op"), Some(&known)))[1]["value"], "r-1-normal");
}

#[test]
fn a_second_root_of_a_workload_takes_no_pods() {
    let later = ROOT.replace("name: root", "name: z").replace("prefix: r", "prefix: z");
    let known = snapshot(&(ROOT.to_owned() + &later));
    assert_eq!(patch(&injected(pod("op-0", "op"), Some(&known)))[1]["value"], "r-1-normal");
}

#[test]
fn a_root_that_cannot_be_divided_is_refused() {
    let root = |more: Value| {
        let mut root =
            json!({"prefix": "r", "targetStatefulSet": "op", "auto": {"shardingSize": 2, "everyShardReplicas": 1}});
        for (key, value) in more.as_object().unwrap() {
            root[key] = value.clone();
        }
        json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
            "metadata": {"name": "root", "namespace": "ops"}, "spec": {"root": root}})
    };
    let known = snapshot("");
    assert!(validated(&asked("CREATE", root(json!({})), None), Some(&known)).allowed);
    let one_hash = json!({"resourceSelector": [{"selector": {"matchLabels": {key::SHARDING_HASH: "3"}}}]});
    for known in [None, Some(&known)] {
        let refused = validated(&asked("CREATE", root(one_hash.clone()), None), known);
        let expected = "spec.root.resourceSelector[0].selector: excludes everything that shard";
        assert!(message(&refused).starts_with(expected), "{refused:?}");
    }
    let both = json!({"canary": {"replicas": 1, "inNamespaces": ["shop"], "inShardHash": ["4"]}});
    let mut many = snapshot("");
    assert!(validated(&asked("CREATE", root(both.clone()), None), Some(&many)).allowed);
    many.namespaces = (0..200_000).map(|number| format!("ns-{number}")).collect();
    let refused = validated(&asked("CREATE", root(both), None), Some(&many));
    assert!(message(&refused).starts_with("spec.root.canary: "), "{refused:?}");
}

#[test]
fn only_missing_labels_are_added_at_admission() {
    let scheme = Scheme::default();
    let slot = scheme.in_force.hash.slot("ops").to_string();
    let mut map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}});
    let ops = patch(&label(&asked("CREATE", map.clone(), None), &scheme));
    assert_eq!(ops.as_array().unwrap().len(), 4, "{ops}");
    let hash = json!({"op": "add", "path": "/metadata/labels/ctrlmesh.kusionstack.io~1sharding-hash", "value": slot});
    assert!(ops.as_array().unwrap().contains(&hash), "{ops}");
    map["metadata"]["labels"] = json!({key::SHARDING_HASH: slot, key::NAMESPACE: "ops", key::CONTROL: "true"});
    assert!(label(&asked("UPDATE", map.clone(), None), &scheme).patch.is_none(), "invoked again");
    map["metadata"]["labels"] = json!({key::SHARDING_HASH: "99", "mine": "stays"});
    let ops = patch(&label(&asked("UPDATE", map.clone(), None), &scheme));
    assert!(ops.as_array().unwrap().iter().all(|op| op["path"] != "/metadata/labels"), "{ops}");
    map["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    assert!(label(&asked("UPDATE", map, None), &scheme).patch.is_none());
}

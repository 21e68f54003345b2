use serde_json::{Value, json};

use super::*;

const THEN: &str = "2026-01-01T00:00:00Z";

/// What programs get of a root in trouble, and of a shard by hand.
fn documents() -> (Value, Value) {
    let object = |kind: &str, name: &str, spec: Value, status: Value| {
        json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": kind,
            "metadata": {"namespace": "ops", "name": name, "labels": {"team": "a"}}, "spec": spec, "status": status})
    };
    let pods = json!([{"name": "web-a", "node": "n1", "epoch": 7, "lastContact": THEN}, {"name": "web-b"}]);
    let condition = json!({"type": "Degraded", "status": "True", "reason": "ProxyAway", "message": "away",
        "lastTransitionTime": THEN});
    let trial = json!({"revision": "new", "phase": "Analysing", "step": 1, "stepStartedAt": THEN,
        "passed": 0, "failed": 0, "message": ""});
    let status = json!({"epoch": 7, "conditions": [condition], "rollout": {"promoted": "old", "trial": trial},
        "ownership": {"epoch": 7, "slots": {"0": "web-1-normal", "1": "web-1-normal"},
            "namespaces": {"shop": "web-1-normal"}, "revoked": {"epoch": 7, "namespaces": {"late": "web-1-normal"}}}});
    let rule = json!({"root": {"prefix": "web", "targetDeployment": "web", "rollout": {}}});
    let limits = json!({"limits": [{"relateResources": [{"apiGroups": ["", "apps"], "resources": ["*"]}],
        "selector": {"matchLabels": {"team": "a"}}}]});
    let mut shard = object("ShardingConfig", "web-1-normal", limits.clone(), json!({"pods": pods}));
    shard["metadata"]["labels"] = json!({"ctrlmesh.kusionstack.io/auto-sharding-root": "web"});
    let configs = json!([
        object("ShardingConfig", "web", rule, status),
        shard,
        object("ShardingConfig", "by-hand", limits, json!({"epoch": 2}))
    ]);
    let configs: Vec<ShardingConfig> = serde_json::from_value(configs).unwrap();
    let target = json!({"podName": "web-a", "limitingSnapshots": [{"name": "writes", "state": "Opened"}]});
    let breaker = object("CircuitBreaker", "calm", json!({"selector": {}}), json!({"targetStatus": [target]}));
    let breaker: CircuitBreaker = serde_json::from_value(breaker).unwrap();
    let all = overview::overviews(&configs, &[breaker]);
    let read = |named| serde_json::from_str(&printed(Format::Json, named, &all).unwrap()).unwrap();
    (read(Some(&all[0])), read(None))
}

#[test]
fn a_root_is_printed_with_all_documented_fields() {
    let unowned: Vec<String> = (2..32).map(|slot| slot.to_string()).collect();
    let expected = json!({
        "apiVersion": "cli.ctrlmesh.kusionstack.io/v1alpha1", "kind": "Status",
        "namespace": "ops", "name": "web", "isRoot": true, "workload": "Deployment web", "epoch": 7,
        "disabled": false, "unownedSlots": unowned, "unownedNamespaces": ["late"],
        "shards": [{"name": "web-1-normal", "slots": ["0", "1"], "namespaces": ["shop"], "pods": [
            {"name": "web-a", "node": "n1", "epoch": 7, "current": true, "lastContact": THEN},
            {"name": "web-b", "current": false},
        ]}],
        "problems": [{"of": "web", "condition": "Degraded", "reason": "ProxyAway", "message": "away", "since": THEN}],
        "trial": {"revision": "new", "phase": "Analysing", "step": 1, "steps": 3},
        "openBreakers": [{"breaker": "calm", "limit": "writes", "pod": "web-a"}],
    });
    assert_eq!(documents().0, expected);
}

#[test]
fn all_are_printed_as_one_list() {
    let (root, list) = documents();
    let by_hand = json!({
        "apiVersion": "cli.ctrlmesh.kusionstack.io/v1alpha1", "kind": "Status",
        "namespace": "ops", "name": "by-hand", "isRoot": false, "epoch": 2, "disabled": false,
        "unownedSlots": [], "unownedNamespaces": [], "problems": [], "openBreakers": [],
        "shards": [{"name": "by-hand", "slots": [], "namespaces": [], "pods": [],
            "limits": [{"resources": ["*", "*.apps"], "selector": "team=a"}]}],
    });
    let expected = json!({"apiVersion": "cli.ctrlmesh.kusionstack.io/v1alpha1", "kind": "StatusList",
        "items": [root, by_hand]});
    assert_eq!(list, expected);
}

#[test]
fn the_docs_list_every_field() {
    let docs = include_str!("../../../../docs/inspect.md");
    let (_, list) = documents();
    let mut values = vec![&list];
    while let Some(value) = values.pop() {
        for (key, value) in value.as_object().into_iter().flatten() {
            assert!(docs.contains(&format!("`{key}`")) || docs.contains(&format!(".{key}`")), "{key}");
            values.push(value);
        }
        values.extend(value.as_array().into_iter().flatten());
    }
}

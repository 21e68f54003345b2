//! Pods of a root with `rollout` are not Ready before their version is promoted.

use super::*;

/// The readiness gates that the patch adds, or null.
fn gates(pod: Value, known: &Snapshot) -> Value {
    let response = injected(pod, Some(known));
    assert!(response.allowed, "{}", message(&response));
    let operations = patch(&response);
    let mut operations = operations.as_array().unwrap().iter();
    let gates = operations.find(|one| one["path"].as_str().unwrap().starts_with("/spec/readinessGates"));
    gates.map_or(Value::Null, |one| one["value"].clone())
}

fn with_rollout() -> String {
    ROOT.replace("prefix: r", "prefix: r, rollout: {}")
}

fn ours() -> Value {
    json!([{"conditionType": "ctrlmesh.kusionstack.io/promoted"}])
}

#[test]
fn a_pod_of_a_root_with_a_rollout_gets_a_readiness_gate() {
    let known = snapshot(&with_rollout());
    assert_eq!(gates(pod("op-0", "op"), &known), ours());
    let mut again = pod("op-0", "op");
    again["spec"]["readinessGates"] = ours();
    assert_eq!(gates(again, &known), Value::Null, "it has it");
    let known = snapshot(&with_rollout().replace("targetStatefulSet", "targetDeployment"));
    let labels = json!({key::ENABLE_PROXY: "true", "pod-template-hash": "x"});
    assert_eq!(gates(of_deployment(labels), &known), ours());
}

#[test]
fn a_pod_of_another_root_gets_no_readiness_gate() {
    assert_eq!(gates(pod("op-0", "op"), &snapshot(ROOT)), Value::Null);
    let known = snapshot(&with_rollout());
    assert_eq!(gates(pod("x-0", "x"), &known), Value::Null, "of no root");
    let off =
        with_rollout().replace("prefix: r", "prefix: r, disable: true") + &child("r-1-normal") + &child("r-2-normal");
    assert_eq!(gates(pod("op-0", "op"), &snapshot(&off)), Value::Null, "its root is off");
    let mut going = known.clone();
    going.configs[0].metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    assert_eq!(gates(pod("op-0", "op"), &going), Value::Null, "nobody would promote it");
}

#[test]
fn another_root_of_the_workload_decides_about_its_own_shards() {
    let later = with_rollout().replace("name: root", "name: z").replace("prefix: r", "prefix: z");
    let known = snapshot(&(ROOT.to_owned() + &later));
    assert_eq!(gates(pod("op-0", "op"), &known), Value::Null, "the shard is of the first root");
}

use ctrlmesh_common::api::{CircuitBreaker, ShardingConfig};
use ctrlmesh_common::names::label::AUTO_SHARDING_ROOT;
use serde_json::{Value, json};

use super::*;
use crate::status::overview::overviews;

const THEN: &str = "2026-01-01T00:00:00Z";

fn config(name: &str, spec: &Value, status: &Value) -> ShardingConfig {
    let config = json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
        "metadata": {"namespace": "ops", "name": name}, "spec": spec, "status": status});
    serde_json::from_value(config).unwrap()
}

/// A shard that root `web` has made, and that would see teams a and b without its root.
fn made(name: &str, status: &Value) -> ShardingConfig {
    let mut shard = config(name, &teams(), status);
    shard.metadata.labels = Some([(AUTO_SHARDING_ROOT.to_owned(), "web".to_owned())].into());
    shard
}

fn teams() -> Value {
    let websites = json!({"apiGroups": ["example.com"], "resources": ["websites"]});
    let teams = json!({"matchExpressions": [{"key": "team", "operator": "In", "values": ["a", "b"]}]});
    json!({"limits": [{"relateResources": [websites], "selector": teams}]})
}

fn condition(kind: &str, status: &str, reason: &str) -> Value {
    json!({"type": kind, "status": status, "reason": reason, "message": "so\nit is", "lastTransitionTime": THEN})
}

/// Root `web` in two shards, in epoch 7, without these slots, and with these conditions.
fn root(unowned: &[u8], conditions: &Value) -> Vec<ShardingConfig> {
    let rule =
        json!({"prefix": "web", "targetDeployment": "web", "auto": {"shardingSize": 2, "everyShardReplicas": 1}});
    let owner = |slot: u8| if slot < 16 { "web-1-normal" } else { "web-2-normal" };
    let slots = (0..COUNT).filter(|slot| !unowned.contains(slot)).map(|slot| (slot.to_string(), json!(owner(slot))));
    let slots: serde_json::Map<String, Value> = slots.collect();
    let status = json!({"epoch": 7, "conditions": conditions,
        "ownership": {"epoch": 7, "slots": slots, "namespaces": {"shop": "web-2-normal"}}});
    let pod =
        |name: &str, epoch: i64| json!({"pods": [{"name": name, "node": "n1", "epoch": epoch, "lastContact": THEN}]});
    vec![
        config("web", &json!({"root": rule}), &status),
        made("web-1-normal", &pod("web-a", 7)),
        made("web-2-normal", &pod("web-b", 6)),
    ]
}

fn breaker(state: &str) -> CircuitBreaker {
    let limit = json!({"name": "writes", "state": state});
    let target = |pod: &str| json!({"podName": pod, "limitingSnapshots": [limit]});
    let breaker = json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "CircuitBreaker",
        "metadata": {"namespace": "ops", "name": "calm"}, "spec": {"selector": {}},
        "status": {"targetStatus": [target("web-b"), target("another")]}});
    serde_json::from_value(breaker).unwrap()
}

fn now() -> Timestamp {
    "2026-01-01T00:01:05Z".parse().unwrap()
}

#[test]
fn a_root_that_is_well_is_said_to_be() {
    let well = [condition("Accepted", "True", "Valid"), condition("Degraded", "False", "AllWell")];
    let roots = overviews(&root(&[], &json!(well)), &[breaker("Closed")]);
    let expected = "\
NAME   WORKLOAD         SHARDS   PODS   OWNED   EPOCH   TRIAL   STATE
web    Deployment web   2        1/2    32/32   7       -       all is well
";
    assert_eq!(list(&roots, false), expected);
    assert!(list(&roots, true).starts_with("NAMESPACE   NAME "));
    let expected = "\
Root:  ops/web, Deployment web
Epoch: 7
Owned: 32 of 32 slots
State: all is well

SHARD          PODS   SLOTS   NAMESPACES
web-1-normal   1/1    0-15    -
web-2-normal   0/1    16-31   shop
";
    assert_eq!(screen(&roots[0], false, now()), expected);
}

#[test]
fn what_is_wrong_is_named() {
    let bad = [condition("Degraded", "True", "NoPods"), condition("Settled", "False", "Moving")];
    let mut configs = root(&[3, 4, 9], &json!(bad));
    let rollout = json!({"promoted": "old", "trial": {"revision": "new", "phase": "Analysing", "step": 1,
        "stepStartedAt": THEN, "passed": 0, "failed": 0, "message": ""}});
    let status = configs[0].status.as_mut().unwrap();
    status.rollout = serde_json::from_value(rollout).unwrap();
    configs[0].spec.root.as_mut().unwrap().rollout = Some(serde_json::from_value(json!({})).unwrap());
    let roots = overviews(&configs, &[breaker("Opened")]);
    assert!(list(&roots, false).ends_with("Degraded: NoPods, Settled: Moving, open breakers: 1\n"));
    let expected = "\
Root:  ops/web, Deployment web
Epoch: 7
Owned: 29 of 32 slots; 3-4,9 belong to nobody
Trial: revision new: Analysing, step 1 of 3
State: Degraded: NoPods, Settled: Moving, open breakers: 1

SHARD          POD     NODE   EPOCH   CONTACT    SLOTS           NAMESPACES
web-1-normal   web-a   n1     7       1m5s ago   0-2,5-8,10-15   -
web-2-normal   web-b   n1     6       1m5s ago   16-31           shop

Problems:
  OF    CONDITION   REASON   FOR    MESSAGE
  web   Degraded    NoPods   1m5s   so it is
  web   Settled     Moving   1m5s   so it is

Open breakers:
  CIRCUITBREAKER   LIMIT    POD
  calm             writes   web-b
";
    assert_eq!(screen(&roots[0], true, now()), expected);
}

#[test]
fn idle_shards_are_no_problem_and_owners_without_one_are_shown() {
    let mut configs = root(&[], &json!([]));
    let status = configs[0].status.as_mut().unwrap();
    status.ownership.as_mut().unwrap().slots.insert("3".parse().unwrap(), "unsharded".to_owned());
    let idle = json!({"conditions": [condition("Programmed", "False", "NoPods")]});
    configs.push(made("web-1-second", &idle));
    let roots = overviews(&configs, &[]);
    let text = screen(&roots[0], false, now());
    assert!(text.contains("State: all is well") && !text.contains("web-1-second"), "{text}");
    assert!(text.contains("unsharded      0/0    3 "), "{text}");

    configs[0].metadata.generation = Some(2);
    let text = screen(&overviews(&configs, &[])[0], false, now());
    assert!(text.contains("Accepted    NotSeen"), "{text}");
}

#[test]
fn a_root_that_is_switched_off_shows_no_table() {
    let off = [
        condition("Accepted", "True", "Disabled"),
        condition("Programmed", "False", "Pending"),
        condition("WebhookRouted", "False", "Disabled"),
    ];
    let mut configs = root(&[3], &json!(off));
    configs[0].spec.root.as_mut().unwrap().disable = Some(true);
    configs[1].status.as_mut().unwrap().epoch = Some(7);
    let expected = "\
NAME   WORKLOAD         SHARDS   PODS   OWNED   EPOCH   TRIAL   STATE
web    Deployment web   2        1/2    -       -       -       switched off
";
    assert_eq!(list(&overviews(&configs, &[]), false), expected);
    let expected = "\
Root:  ops/web, Deployment web
Owned: nothing by slot: the root is switched off, and each shard goes by its limits
State: switched off

SHARD          PODS
web-1-normal   1/1
web-2-normal   0/1

Limits:
  SHARD          RESOURCES              SELECTOR
  web-1-normal   websites.example.com   team in (a,b)
  web-2-normal   websites.example.com   team in (a,b)
";
    assert_eq!(screen(&overviews(&configs, &[])[0], false, now()), expected);
    let status = configs[2].status.as_mut().unwrap();
    status.conditions = vec![serde_json::from_value(condition("Degraded", "True", "ProxyAway")).unwrap()];
    assert!(list(&overviews(&configs, &[]), false).ends_with("switched off, Degraded: ProxyAway\n"));
}

#[test]
fn shards_by_hand_have_rows_and_screens_of_their_own() {
    let mut configs = root(&[], &json!([]));
    let pod = json!({"epoch": 2, "pods": [{"name": "pod-a", "node": "n1", "epoch": 2, "lastContact": THEN}],
        "conditions": [condition("Accepted", "False", "Invalid")]});
    configs.push(config("by-hand", &teams(), &pod));
    let all = overviews(&configs, &[]);
    let expected = "\
NAME      WORKLOAD         SHARDS   PODS   OWNED   EPOCH   TRIAL   STATE
web       Deployment web   2        1/2    32/32   7       -       all is well
by-hand   -                -        1/1    -       2       -       Accepted: Invalid
";
    assert_eq!(list(&all, false), expected);
    let expected = "\
Shard: ops/by-hand, by hand
Epoch: 2
State: Accepted: Invalid

SHARD     POD     NODE   EPOCH   CONTACT
by-hand   pod-a   n1     2       1m5s ago

Limits:
  SHARD     RESOURCES              SELECTOR
  by-hand   websites.example.com   team in (a,b)

Problems:
  OF        CONDITION   REASON    FOR    MESSAGE
  by-hand   Accepted    Invalid   1m5s   so it is
";
    assert_eq!(screen(&all[1], true, now()), expected);
}

#[test]
fn namespaces_that_move_are_said_to_belong_to_nobody() {
    let mut configs = root(&[], &json!([]));
    let table = configs[0].status.as_mut().unwrap().ownership.as_mut().unwrap();
    let revoked = json!({"epoch": 7, "namespaces": {"late": "web-1-normal"}});
    table.revoked = serde_json::from_value(revoked).unwrap();
    assert!(list(&overviews(&configs, &[]), false).ends_with("namespaces late belong to nobody\n"));
}

#[test]
fn a_root_without_a_status_owns_nothing_yet() {
    let rule = json!({"root": {"prefix": "web", "targetStatefulSet": "web"}});
    let roots = overviews(&[config("web", &rule, &Value::Null)], &[]);
    let line = list(&roots, false);
    assert!(
        line.ends_with(
            "web    StatefulSet web   0        0/0    0/32    -       -       slots 0-31 belong to nobody\n"
        )
    );
}

//! What is waited for.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::migrate::fake_server;

fn object(content: &Value) -> DynamicObject {
    let mut all = json!({"metadata": {"name": "op", "generation": 2}});
    all.as_object_mut().unwrap().extend(content.as_object().unwrap().clone());
    serde_json::from_value(all).unwrap()
}

#[test]
fn a_deployment_knows_its_pods_by_labels_and_expressions() {
    let of = |selector: Value| pod_selector(&object(&json!({"spec": {"selector": selector}})));
    let both = json!({"matchLabels": {"app": "op"}, "matchExpressions": [{"key": "tier", "operator": "Exists"}]});
    assert_eq!(of(both).unwrap().to_string(), "app=op,tier");
    let expressions = json!({"matchExpressions": [{"key": "app", "operator": "In", "values": ["op", "manager"]}]});
    assert_eq!(of(expressions).unwrap().to_string(), "app in (manager,op)");
    assert!(of(json!({"matchExpressions": [{"key": "app", "operator": "Near"}]})).is_err());
}

#[test]
fn a_rollout_ends_with_the_last_ready_pod() {
    let status = |observed: i64, updated: i64, ready: i64| {
        object(&json!({"spec": {"replicas": 3}, "status": {"observedGeneration": observed, "replicas": 3,
            "updatedReplicas": updated, "readyReplicas": ready}}))
    };
    assert_eq!(unfinished(&status(2, 3, 3)), None);
    assert!(unfinished(&status(1, 3, 3)).unwrap().contains("not seen"));
    assert_eq!(unfinished(&status(2, 2, 3)).unwrap(), "updatedReplicas is 2 of 3");
    assert_eq!(unfinished(&status(2, 3, 2)).unwrap(), "readyReplicas is 2 of 3");
}

#[test]
fn pods_below_a_partition_are_not_waited_for() {
    let set = |partition: i64, start: i64, updated: i64| {
        object(&json!({"spec": {"replicas": 3, "ordinals": {"start": start},
                "updateStrategy": {"rollingUpdate": {"partition": partition}}},
            "status": {"observedGeneration": 2, "replicas": 3, "readyReplicas": 3, "updatedReplicas": updated}}))
    };
    assert_eq!(unfinished(&set(2, 0, 1)), None);
    assert_eq!(unfinished(&set(2, 0, 0)).unwrap(), "updatedReplicas is 0 of 1");
    assert_eq!(unfinished(&set(9, 0, 0)), None, "it keeps all of them");
    assert_eq!(unfinished(&set(2, 2, 2)).unwrap(), "updatedReplicas is 2 of 3");
}

#[test]
fn a_webhook_without_a_bundle_is_not_trusted() {
    let hooks = |hooks: Value| object(&json!({ "webhooks": hooks }));
    assert!(untrusted(None).unwrap().contains("apply deploy/"));
    let (without, with) = (json!({"clientConfig": {}}), json!({"clientConfig": {"caBundle": "QQ=="}}));
    for wrong in [json!([]), json!([without]), json!([with, without]), json!([{"clientConfig": {"caBundle": ""}}])] {
        assert!(untrusted(Some(&hooks(wrong.clone()))).unwrap().contains("caBundle"), "{wrong}");
    }
    assert_eq!(untrusted(Some(&hooks(json!([with, with])))), None);
}

#[test]
fn a_root_is_handed_back_when_pods_without_a_proxy_own_all() {
    let table = |table: Value| object(&json!({"spec": {"root": {}}, "status": {"ownership": table}}));
    assert_eq!(sharded(&table(json!({"slots": {"0": UNSHARDED}, "namespaces": {"a": UNSHARDED}}))), None);
    assert_eq!(sharded(&object(&json!({}))), None, "it never had a table");
    let pinned = json!({"slots": {"0": UNSHARDED}, "namespaces": {"a": "op-0-canary"}});
    assert_eq!(sharded(&table(pinned)).as_deref(), Some("a belongs to op-0-canary"));
    let moving = json!({"slots": {"0": UNSHARDED}, "revoked": {"epoch": 3}});
    assert!(sharded(&table(moving)).unwrap().contains("on its way"));
}

#[test]
fn a_condition_of_an_older_generation_does_not_count() {
    let root = |generation: i64, status: &str| {
        object(&json!({"status": {"conditions": [{"type": "Settled", "status": status, "message": "why",
            "observedGeneration": generation}]}}))
    };
    assert_eq!(missing(&root(2, "True"), "Settled"), None);
    assert_eq!(missing(&root(1, "True"), "Settled").as_deref(), Some("why"));
    assert_eq!(missing(&root(2, "False"), "Settled").as_deref(), Some("why"));
    assert!(missing(&root(2, "True"), "Labelled").is_some());
}

/// A waiter whose requests are answered by `answer`, by how many there were before.
fn waiter(timeout: Duration, answer: impl Fn(usize) -> (u16, Value) + Clone + Send + Sync + 'static) -> Waiter {
    let count = Arc::new(AtomicUsize::new(0));
    Waiter::new(fake_server::client(move |_, _| answer(count.fetch_add(1, Ordering::Relaxed))), timeout)
}

fn refused(message: &str) -> (u16, Value) {
    (403, json!({"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403, "message": message}))
}

#[tokio::test]
async fn a_policy_is_waited_for_until_it_refuses_a_pod() {
    let by =
        |policy: &str| refused(&format!("ValidatingAdmissionPolicy '{policy}' with binding '{policy}' denied request"));
    let enforced = waiter(Duration::from_mins(1), move |before| match before {
        0..4 => (201, json!({"metadata": {"name": "pod"}})),
        _ => by("ctrlmesh-migration"),
    });
    enforced.enforced("ctrlmesh-migration", "ctrlmesh-system").await.unwrap();
    for (answer, reason) in [
        ((201, json!({"metadata": {"name": "pod"}})), "would be let in"),
        (by("ctrlmesh-migration-kridge"), "kridge"),
        (refused("a webhook of somebody else's"), "somebody else's"),
    ] {
        let never = waiter(Duration::ZERO, move |_| answer.clone());
        let error = never.enforced("ctrlmesh-migration", "ctrlmesh-system").await.unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
    }
}

#[tokio::test]
async fn a_leader_is_known_whatever_its_clock_says() {
    let lease = |holder: &str, second: usize| {
        let spec = json!({"holderIdentity": holder, "leaseDurationSeconds": 1,
            "renewTime": format!("1999-01-01T00:00:{:02}.000000Z", second % 60)});
        (200, json!({"metadata": {"name": "ctrlmesh-manager"}, "spec": spec}))
    };
    let renewed = waiter(Duration::from_mins(1), move |before| lease("a", before));
    assert!(renewed.leads("ctrlmesh-system").await.unwrap());
    renewed.leading("ctrlmesh-system", true).await.unwrap();
    let stale = waiter(Duration::from_mins(1), move |_| lease("a", 0));
    assert!(!stale.leads("ctrlmesh-system").await.unwrap());
    stale.leading("ctrlmesh-system", false).await.unwrap();
}

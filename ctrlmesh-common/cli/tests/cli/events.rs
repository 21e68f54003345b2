//! `ctrlmesh events` before a scripted API server.

use std::process::Output;

use http::StatusCode;
use serde_json::{Value, json};

use crate::harness::run::{Bed, stderr, stdout};

const OURS: &str = "ctrlmesh.kusionstack.io/v1alpha1";

fn event(name: &str, regarding: &Value, reporter: &str, second: u8) -> Value {
    json!({"metadata": {"namespace": "ops", "name": name}, "type": "Normal", "reason": "Granted",
        "note": format!("note of {name}"), "reportingController": reporter, "regarding": regarding,
        "eventTime": format!("2026-01-01T00:00:0{second}.000000Z")})
}

fn list(api: &str, kind: &str, items: &Value) -> Value {
    json!({"apiVersion": api, "kind": kind, "metadata": {}, "items": items})
}

/// An API server with root `web` and its shard in namespace `ops`, and events of which one is foreign.
fn answer(target: &str) -> (StatusCode, Value) {
    let config = |name: &str| json!({"apiVersion": OURS, "kind": "ShardingConfig", "name": name});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "name": "p"});
    let events = json!([
        event("second", &config("web-1-normal"), "ctrlmesh-manager", 2),
        event("foreign", &pod, "kubelet", 3),
        event("first", &config("other"), "ctrlmesh-manager", 1),
    ]);
    let object = |name: &str, labels: Value, spec: Value| {
        json!({"apiVersion": OURS, "kind": "ShardingConfig", "spec": spec,
            "metadata": {"namespace": "ops", "name": name, "labels": labels}})
    };
    let root = json!({"root": {"prefix": "web", "targetDeployment": "web"}});
    let made = json!({"ctrlmesh.kusionstack.io/auto-sharding-root": "web"});
    let configs = json!([object("web", json!({}), root), object("web-1-normal", made, json!({}))]);
    let answer = match target.split('?').next().unwrap_or_default() {
        "/apis/events.k8s.io/v1/namespaces/ops/events" | "/apis/events.k8s.io/v1/events" => {
            list("events.k8s.io/v1", "EventList", &events)
        }
        "/apis/ctrlmesh.kusionstack.io/v1alpha1/namespaces/ops/shardingconfigs" => {
            list(OURS, "ShardingConfigList", &configs)
        }
        _ => {
            let refused = json!({"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403,
                "message": "not for you"});
            return (StatusCode::FORBIDDEN, refused);
        }
    };
    (StatusCode::OK, answer)
}

async fn events(bed: &Bed, arguments: &[&str]) -> Output {
    bed.ctrlmesh(&[&["events"], arguments].concat()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_ours_are_listed_the_newest_last() {
    let bed = Bed::answering(|seen| answer(&seen.target)).await;
    let listed = stdout(&events(&bed, &[]).await);
    let lines: Vec<&str> = listed.lines().collect();
    assert_eq!(lines.len(), 3, "{listed}");
    assert!(lines[0].starts_with("LAST SEEN") && lines[1].ends_with("note of first"), "{listed}");
    assert!(lines[2].contains("ShardingConfig/web-1-normal   note of second"), "{listed}");
    let all = stdout(&events(&bed, &["-A"]).await);
    assert!(all.starts_with("NAMESPACE   LAST SEEN"), "{all}");
    let root: Value = serde_json::from_str(&stdout(&events(&bed, &["web", "-o", "json"]).await)).unwrap();
    assert_eq!((&root["kind"], root["items"].as_array().map(Vec::len)), (&json!("EventList"), Some(1)));
    assert_eq!(root["items"][0]["name"], "second", "of its shard");
}

#[tokio::test(flavor = "multi_thread")]
async fn events_that_cannot_be_shown_say_what_to_do() {
    let bed = Bed::answering(|seen| answer(&seen.target)).await;
    for (arguments, says) in [
        (&["nobody"][..], "there is no ShardingConfig \"nobody\" in namespace \"ops\""),
        (&["-n", "secret"], "does `kubectl get events.events.k8s.io` work there?"),
        (&["web", "-A"], "cannot be used with"),
        (&["-o", "xml"], "[possible values: table, json, yaml]"),
    ] {
        let refused = events(&bed, arguments).await;
        let error = stderr(&refused);
        assert!(!refused.status.success() && error.contains(says), "{arguments:?}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn long_lists_come_in_pages() {
    let bed = Bed::answering(|seen| {
        assert!(seen.target.contains("limit=500"), "{}", seen.target);
        let (status, mut all) = answer(&seen.target);
        let items = all["items"].as_array_mut().unwrap();
        // The second page has the last item only.
        if seen.target.contains("continue=more") {
            items.drain(..items.len() - 1);
        } else {
            items.pop();
            all["metadata"]["continue"] = json!("more");
        }
        (status, all)
    });
    let bed = bed.await;
    let listed = stdout(&events(&bed, &["web"]).await);
    assert!(listed.lines().count() == 2 && listed.ends_with("note of second"), "{listed}");
    assert_eq!(bed.upstream.seen.lock().unwrap().len(), 4, "two pages of ShardingConfigs, and two of events");
    let all = stdout(&events(&bed, &[]).await);
    assert!(all.contains("note of first") && all.contains("note of second"), "{all}");
}

//! `ctrlmesh events --watch` before a scripted API server.

use std::io;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body_util::channel::Sender;
use serde_json::{Value, json};
use tokio::sync::Mutex;
use tokio::task;

use crate::harness::run::{Bed, Running, stderr};
use crate::harness::soon;
use crate::harness::upstream::{Body, ReceivedRequest, streamed, whole};

const OURS: &str = "ctrlmesh.kusionstack.io/v1alpha1";

/// An event of the manager about a ShardingConfig. `version` is its resourceVersion.
fn event(name: &str, config: &str, count: i32, version: u32) -> Value {
    json!({"apiVersion": "events.k8s.io/v1", "kind": "Event", "type": "Normal", "reason": "Granted",
        "metadata": {"namespace": "ops", "name": name, "resourceVersion": version.to_string()},
        "note": format!("note of {name}"), "reportingController": "ctrlmesh-manager", "deprecatedCount": count,
        "eventTime": format!("2026-01-01T00:00:{version:02}.000000Z"),
        "regarding": {"apiVersion": OURS, "kind": "ShardingConfig", "name": config}})
}

fn list(kind: &str, version: u32, items: &[Value]) -> Value {
    json!({"apiVersion": "v1", "kind": kind, "metadata": {"resourceVersion": version.to_string()}, "items": items})
}

fn failure(code: u16, reason: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "reason": reason,
        "message": format!("{reason} it is")})
}

/// What becomes of one watch: changes, and then the connection ends or stays.
struct Watch {
    changes: Vec<Value>,
    stays: bool,
}

/// What an API server answers to lists and watches, each the next one.
struct Script {
    lists: Vec<Value>,
    watches: Vec<Result<Watch, Value>>,
    configs: Vec<Value>,
}

/// How many lists and watches came, and the connections that stay.
#[derive(Default)]
struct Progress {
    lists: AtomicUsize,
    watches: AtomicUsize,
    configs: AtomicUsize,
    open: Mutex<Vec<Sender<Bytes, io::Error>>>,
}

fn answer(body: &Value) -> Response<Body> {
    let code = body["code"].as_u64().and_then(|code| u16::try_from(code).ok());
    let status = code.map_or(StatusCode::OK, |code| StatusCode::from_u16(code).unwrap());
    whole(status, body.to_string())
}

async fn watched(watch: &Watch, progress: &Progress) -> Response<Body> {
    let (mut body, response) = streamed();
    for change in &watch.changes {
        body.send_data(Bytes::from(format!("{change}\n"))).await.unwrap();
    }
    if watch.stays {
        progress.open.lock().await.push(body);
    }
    response
}

async fn bed(script: Script) -> (Bed, Arc<Progress>) {
    let (script, progress) = (Arc::new(script), Arc::<Progress>::default());
    let shared = progress.clone();
    let bed = Bed::speaking(move |seen: ReceivedRequest| {
        let (script, progress) = (script.clone(), shared.clone());
        async move {
            let next = |count: &AtomicUsize| count.fetch_add(1, Ordering::SeqCst);
            if seen.target.contains("shardingconfigs") {
                let at = next(&progress.configs).min(script.configs.len() - 1);
                return answer(&script.configs[at]);
            }
            if !seen.target.contains("watch=true") {
                return answer(&script.lists[next(&progress.lists)]);
            }
            match &script.watches[next(&progress.watches)] {
                Ok(watch) => watched(watch, &progress).await,
                Err(refused) => answer(refused),
            }
        }
    });
    (bed.await, progress)
}

fn start(bed: &Bed, arguments: &[&str]) -> Running {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ctrlmesh"));
    command.args(["events", "--watch"]).args(arguments).env("KUBECONFIG", bed.file());
    Running::start(command)
}

/// So many lines, without the columns before the object.
async fn lines(mut running: Running, number: usize) -> (Running, Vec<String>) {
    let read = task::spawn_blocking(move || {
        let lines = (0..number).map(|_| running.line()).collect::<Vec<_>>();
        (running, lines)
    });
    let (running, lines) = soon("the lines", read).await.unwrap();
    let object = |line: String| line.split_once("ShardingConfig/").map_or(line.clone(), |(_, rest)| rest.to_owned());
    (running, lines.into_iter().map(object).collect())
}

/// The resourceVersions that watches began at.
fn versions(bed: &Bed) -> Vec<String> {
    let seen: Vec<String> = bed.upstream.seen.lock().unwrap().iter().map(|one| one.target.clone()).collect();
    let watches = seen.iter().filter(|target| target.contains("watch=true"));
    let version = |target: &String| {
        let (_, rest) = target.split_once("resourceVersion=").unwrap();
        rest.split('&').next().unwrap().to_owned()
    };
    watches.map(version).collect()
}

fn added(event: Value) -> Value {
    json!({"type": "ADDED", "object": event})
}

#[tokio::test(flavor = "multi_thread")]
async fn each_event_is_shown_once_whatever_becomes_of_the_watch() {
    let gone = json!({"type": "ERROR", "object": failure(410, "Expired")});
    let again = json!({"type": "MODIFIED", "object": event("b", "web", 2, 12)});
    let script = Script {
        lists: vec![
            list("EventList", 10, &[event("a", "web", 1, 9)]),
            list("EventList", 20, &[event("a", "web", 1, 9), event("b", "web", 2, 12), event("c", "web", 1, 19)]),
            list("EventList", 30, &[event("c", "web", 1, 19), event("d", "web", 1, 29)]),
        ],
        watches: vec![
            Ok(Watch { changes: vec![added(event("b", "web", 1, 11)), again], stays: false }),
            Ok(Watch { changes: vec![gone], stays: false }),
            Err(failure(410, "Expired")),
            Ok(Watch { changes: vec![added(event("e", "web", 1, 31))], stays: true }),
        ],
        configs: vec![failure(403, "Forbidden")],
    };
    let (bed, progress) = bed(script).await;
    let (running, shown) = lines(start(&bed, &[]), 7).await;
    let notes = shown.iter().map(|line| line.rsplit(' ').next().unwrap());
    assert_eq!(notes.collect::<Vec<_>>(), ["MESSAGE", "a", "b", "b", "c", "d", "e"], "{shown:?}");
    running.kill();
    let (_, rest, error) = running.ended().await;
    assert_eq!((rest.as_str(), error.as_str()), ("", ""));
    assert_eq!(versions(&bed), ["10", "12", "20", "30"]);
    assert_eq!(progress.lists.load(Ordering::SeqCst), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_a_shard_that_is_new_are_shown() {
    let config = |name: &str, labels: Value, spec: Value| {
        json!({"apiVersion": OURS, "kind": "ShardingConfig", "spec": spec,
            "metadata": {"namespace": "ops", "name": name, "labels": labels}})
    };
    let root = config("web", json!({}), json!({"root": {"prefix": "web", "targetDeployment": "web"}}));
    let made = json!({"ctrlmesh.kusionstack.io/auto-sharding-root": "web"});
    let (shard, other) = (config("web-1", made, json!({})), config("other", json!({}), json!({})));
    let foreign = || added(event("foreign", "other", 1, 11));
    let script = Script {
        lists: vec![list("EventList", 10, &[event("a", "web", 1, 9)])],
        watches: vec![Ok(Watch {
            changes: vec![foreign(), added(event("b", "web-1", 1, 12)), foreign(), added(event("c", "web", 1, 13))],
            stays: true,
        })],
        configs: vec![
            list("ShardingConfigList", 10, &[root.clone(), other.clone()]),
            list("ShardingConfigList", 12, &[root, other, shard]),
        ],
    };
    let (bed, progress) = bed(script).await;
    let (running, shown) = lines(start(&bed, &["web"]), 4).await;
    running.kill();
    let notes = ["a", "b", "c"].map(|name| format!("note of {name}"));
    assert!(shown[1..].iter().zip(&notes).all(|(line, note)| line.ends_with(note)), "{shown:?}");
    assert_eq!(progress.configs.load(Ordering::SeqCst), 2);
    drop(running.ended().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_right_to_watch_the_right_is_named() {
    let script = Script {
        lists: vec![list("EventList", 10, &[]), list("EventList", 10, &[])],
        watches: vec![Err(failure(403, "Forbidden"))],
        configs: vec![list("ShardingConfigList", 10, &[])],
    };
    let (bed, _progress) = bed(script).await;
    let refused = bed.ctrlmesh(&["events", "--watch"]).await;
    let error = stderr(&refused);
    assert_eq!(refused.status.code(), Some(1), "{error}");
    assert!(error.contains("need the right to `watch`") && error.ends_with(": Forbidden it is"), "{error}");
    let unknown = bed.ctrlmesh(&["events", "nobody", "--watch"]).await;
    assert!(stderr(&unknown).contains("there is no ShardingConfig \"nobody\""), "{}", stderr(&unknown));
}

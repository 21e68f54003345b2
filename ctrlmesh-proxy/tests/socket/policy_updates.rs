//! Open watches when the policy changes.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use crate::harness::client::{Client, get, tls};
use crate::harness::upstream::streamed;
use crate::harness::watches::{Bed, LEASES, PODS, WATCH, answer, event, json_content, leases, list, pods, sees};
use crate::harness::{soon, until};
use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, Version};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};

const BOTH: [Version; 2] = [Version::HTTP_11, Version::HTTP_2];

#[tokio::test]
async fn an_open_watch_is_spliced_at_its_clients_version() {
    for version in BOTH {
        let mut bed = Bed::new(&pods(1, "team=a")).await;
        let (mut watching, seen) = bed.watch(version, WATCH, &[]).await;
        assert!(seen.target.contains("labelSelector=team%3Da&"), "{}", seen.target);
        watching.send.send_data(event("MODIFIED", "x", 6)).await.unwrap();
        assert_eq!(watching.sees().await, sees("MODIFIED", "x"));
        bed.change(&pods(2, "team=b")).await;
        assert_eq!(watching.sees().await, sees("ADDED", "team in (b)"));
        assert_eq!(watching.sees().await, sees("DELETED", "team in (a)"));
        let bookmark = watching.next().await.unwrap();
        assert_eq!(
            (&bookmark["type"], &bookmark["object"]["metadata"]["resourceVersion"]),
            (&json!("BOOKMARK"), &json!("6"))
        );
        let (seen, mut send) = soon("the new watch", bed.watches.recv()).await.unwrap();
        assert!(
            seen.target.contains("labelSelector=team%3Db&") && seen.target.ends_with("resourceVersion=6"),
            "{}",
            seen.target
        );
        send.send_data(event("ADDED", "y", 7)).await.unwrap();
        assert_eq!(watching.sees().await, sees("ADDED", "y"));
    }
}

#[tokio::test]
async fn a_change_cuts_in_the_middle_of_no_event() {
    let mut bed = Bed::new(&pods(1, "team=a")).await;
    let (mut watching, _) = bed.watch(Version::HTTP_2, WATCH, &[]).await;
    let whole = event("MODIFIED", "x", 6);
    watching.send.send_data(whole.slice(..20)).await.unwrap();
    let first = soon("the piece", watching.body.frame()).await.unwrap().unwrap();
    watching.read.extend(first.into_data().unwrap());
    bed.change(&pods(2, "team=b")).await;
    assert!(bed.listed().is_empty());
    let cut = event("MODIFIED", "cut", 8);
    let rest = [whole.slice(20..), event("MODIFIED", "y", 7), cut.slice(..30)].concat();
    watching.send.send_data(rest.into()).await.unwrap();
    assert_eq!(watching.sees().await, sees("MODIFIED", "x"));
    assert_eq!(watching.sees().await, sees("MODIFIED", "y"));
    assert_eq!(watching.sees().await.0, "ADDED");
    assert!(bed.listed()[0].contains("resourceVersion=7&"), "{:?}", bed.listed());
}

/// How many pages are read at once.
const AT_ONCE: usize = 16;

#[tokio::test]
async fn watches_go_over_some_at_a_time_and_all_of_them() {
    let mut bed = Bed::new(&pods(1, "team=a")).await;
    let mut watches = Vec::new();
    for number in 0..40 {
        let (watching, _) = bed.watch(BOTH[number % 2], WATCH, &[]).await;
        watches.push(watching);
    }
    let asked = Arc::<Mutex<VecDeque<_>>>::default();
    let lists = asked.clone();
    bed.answer_lists(move |target| {
        let (send, mut response) = streamed();
        json_content(&mut response);
        lists.lock().unwrap().push_back((target.to_owned(), send));
        response
    });
    bed.change(&pods(2, "team=b")).await;
    let open = || asked.lock().unwrap().len();
    until("as many lists as are read at once", || async { open() >= AT_ONCE }).await;
    for _ in 0..80 {
        until("a list", || async { open() > 0 }).await;
        assert!(open() <= AT_ONCE, "{} lists are read at once", open());
        let (target, mut send) = asked.lock().unwrap().pop_front().unwrap();
        let page = list(&target).into_body().collect().await.unwrap().to_bytes();
        send.send_data(page).await.unwrap();
    }
    for watching in &mut watches {
        assert_eq!(watching.sees().await, sees("ADDED", "team in (b)"));
        assert_eq!(watching.sees().await, sees("DELETED", "team in (a)"));
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_keeps_no_other_from_going_over() {
    let mut bed = Bed::new(&pods(1, "team=a")).await;
    // It reads some bytes of each of its watches, and nothing of their splices.
    let stream = tls(&bed.pki, bed.proxy.address, "h2").await;
    let mut builder = h2::client::Builder::new();
    let handshake = builder.initial_window_size(16).handshake::<_, Bytes>(stream).await;
    let (mut send, connection) = handshake.unwrap();
    tokio::spawn(async move { drop(connection.await) });
    let mut unread = Vec::new();
    for _ in 0..2 * AT_ONCE {
        let request = Request::get(format!("https://k{WATCH}")).body(()).unwrap();
        send = send.ready().await.unwrap();
        let (response, _) = send.send_request(request, true).unwrap();
        let (_, upstream) = soon("a watch", bed.watches.recv()).await.unwrap();
        unread.push((soon("its head", response).await.unwrap(), upstream));
    }
    let (mut watching, _) = bed.watch(Version::HTTP_2, WATCH, &[]).await;
    bed.change(&pods(2, "team=b")).await;
    let read = || bed.listed().len() >= unread.len();
    until("as many lists as there are watches", || async { read() }).await;
    assert_eq!(watching.sees().await, sees("ADDED", "team in (b)"));
    assert_eq!(watching.sees().await, sees("DELETED", "team in (a)"));
}

#[tokio::test]
async fn what_the_change_does_not_concern_is_not_disturbed() {
    let mut bed = Bed::new(&pods(1, "team=a")).await;
    let mut open = Vec::new();
    for target in ["/api/v1/services?watch=1&resourceVersion=5", WATCH] {
        open.push(bed.watch(Version::HTTP_2, target, &[]).await);
    }
    let (mut pods_too, _) = open.pop().unwrap();
    let (mut services, _) = open.pop().unwrap();
    // The new limit does not change the pods' selector.
    let mut other = pods(2, "team=a");
    let limit = json!({"relateResources": [{"apiGroups": [""], "resources": ["configmaps"]}], "selector": "x=y"});
    other["limits"].as_array_mut().unwrap().push(limit);
    bed.change(&other).await;
    bed.change(&pods(3, "team=b")).await;
    assert_eq!(pods_too.sees().await.0, "ADDED");
    services.send.send_data(event("ADDED", "s", 6)).await.unwrap();
    assert_eq!(services.sees().await, sees("ADDED", "s"));
    until("the splice", || async { bed.proxy.metric("ctrlmesh_proxy_watches_spliced_total").await == 1.0 }).await;
    assert!(bed.listed().iter().all(|target| target.starts_with(PODS)), "{:?}", bed.listed());
}

#[tokio::test]
async fn a_watch_that_cannot_go_over_expires_at_the_end_of_an_event() {
    let refuse = |status: u16, reason: &'static str| {
        move |_: &str| answer(status, &json!({"kind": "Status", "code": status, "reason": reason}))
    };
    for version in BOTH {
        // A Table, which holds rows and no objects.
        let mut bed = Bed::new(&pods(1, "team=a")).await;
        let table = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
        let (mut watching, _) = bed.watch(version, WATCH, &[("accept", table)]).await;
        bed.change(&pods(2, "team=b")).await;
        watching.expires().await;
        // The version is compacted; the server does not know Exact.
        for (status, reason) in [(410, "Expired"), (400, "BadRequest"), (403, "Forbidden")] {
            let mut bed = Bed::new(&pods(1, "team=a")).await;
            bed.answer_lists(refuse(status, reason));
            let (mut watching, _) = bed.watch(version, WATCH, &[]).await;
            bed.change(&pods(2, "team=b")).await;
            watching.expires().await;
        }
        // Another version than was asked for.
        let mut bed = Bed::new(&pods(1, "team=a")).await;
        bed.answer_lists(|target| list(&target.replace("Exact", "NotOlderThan")));
        let (mut watching, _) = bed.watch(version, WATCH, &[]).await;
        bed.change(&pods(2, "team=b")).await;
        watching.expires().await;
    }
}

#[tokio::test]
async fn a_watch_among_its_initial_events_expires() {
    for initial in [
        "/api/v1/pods?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true",
        "/api/v1/pods?watch=1",
        "/api/v1/pods?watch=1&resourceVersion=0",
    ] {
        let mut bed = Bed::new(&pods(1, "team=a")).await;
        let (mut watching, _) = bed.watch(Version::HTTP_2, initial, &[]).await;
        watching.send.send_data(event("ADDED", "x", 6)).await.unwrap();
        assert_eq!(watching.sees().await, sees("ADDED", "x"));
        bed.change(&pods(2, "team=b")).await;
        watching.expires().await;
        assert!(bed.listed().iter().all(|target| !target.contains("Exact")), "{:?}", bed.listed());
    }
}

#[tokio::test]
async fn after_its_initial_events_a_watch_list_goes_over() {
    let mut bed = Bed::new(&pods(1, "team=a")).await;
    let target =
        "/api/v1/pods?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
    let (mut watching, _) = bed.watch(Version::HTTP_2, target, &[]).await;
    watching.send.send_data(event("ADDED", "x", 3)).await.unwrap();
    let end = json!({"type": "BOOKMARK", "object": {"kind": "Pod", "apiVersion": "v1", "metadata":
        {"resourceVersion": "6", "annotations": {"k8s.io/initial-events-end": "true"}}}});
    watching.send.send_data(format!("{end}\n").into()).await.unwrap();
    assert_eq!(watching.sees().await, sees("ADDED", "x"));
    assert_eq!(watching.sees().await.0, "BOOKMARK");
    bed.change(&pods(2, "team=b")).await;
    assert_eq!(watching.sees().await, sees("ADDED", "team in (b)"));
    assert!(bed.listed()[0].contains("resourceVersion=6&resourceVersionMatch=Exact"));
}

#[tokio::test]
async fn a_compressed_watch_ends_at_a_change() {
    let mut bed = Bed::new(&pods(1, "team=a")).await;
    let (mut watching, _) = bed.watch(Version::HTTP_2, WATCH, &[("x-gzip", "1")]).await;
    watching.send.send_data(Bytes::from_static(b"\x1f\x8bopaque")).await.unwrap();
    let piece = soon("a piece", watching.body.frame()).await.unwrap().unwrap();
    assert_eq!(piece.into_data().unwrap(), &b"\x1f\x8bopaque"[..]);
    bed.change(&pods(2, "team=b")).await;
    assert!(soon("the end", watching.body.collect()).await.unwrap().to_bytes().is_empty());
    let mut late = get(WATCH);
    late.headers_mut().insert("x-gzip", HeaderValue::from_static("1"));
    assert!(bed.client().await.ask(late).await.is_expired_watch());
    // It lists again, and watches from there.
    drop(soon("the watch that was given up", bed.watches.recv()).await);
    let newer = "/api/v1/pods?watch=1&resourceVersion=10";
    bed.watch(Version::HTTP_2, newer, &[("x-gzip", "1")]).await;
}

#[tokio::test]
async fn a_version_from_before_the_change_gets_410() {
    let mut changed = pods(1, "team=a");
    changed["limits"][0]["changedAt"] = json!(100);
    let bed = Bed::new(&changed).await;
    // A current list is from after the change.
    bed.answer_lists(|_| {
        let metadata = json!({"resourceVersion": "120"});
        answer(200, &json!({"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": []}))
    });
    // {"v":"meta.k8s.io/v1","rv":99,"start":"a\u0000"} and the same with 100.
    let (old, new) = (token(99), token(100));
    for version in BOTH {
        for (target, expected) in [
            (format!("{PODS}?limit=5&continue={old}"), StatusCode::GONE),
            (format!("{PODS}?limit=5&continue={new}"), StatusCode::OK),
            (format!("{PODS}?limit=5&continue=unreadable"), StatusCode::GONE),
        ] {
            let mut client = Client::connect(&bed.pki, bed.proxy.address, version).await;
            let answer = client.get(&target).await;
            assert_eq!(answer.status, expected, "{target}");
            if expected == StatusCode::GONE {
                let status: Value = serde_json::from_slice(&answer.body).unwrap();
                assert_eq!((&status["kind"], &status["code"]), (&json!("Status"), &json!(410)));
            }
        }
        let mut client = Client::connect(&bed.pki, bed.proxy.address, version).await;
        assert!(client.get(&format!("{PODS}?watch=1&resourceVersion=99")).await.is_expired_watch());
    }
}

/// A continue token as the API server makes them.
fn token(version: u64) -> String {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let text = json!({"v": "meta.k8s.io/v1", "rv": version, "start": "a\0"}).to_string();
    let mut token = String::new();
    for three in text.as_bytes().chunks(3) {
        let bits = three.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
        for digit in 0..=three.len() {
            token.push(char::from(DIGITS[(bits >> (18 - 6 * digit) & 63) as usize]));
        }
    }
    token
}

#[tokio::test]
async fn a_spliced_watch_keeps_the_clients_name_of_the_lock() {
    let mut bed = Bed::new(&leases(1, "team=a")).await;
    bed.answer_lists(|target| {
        let version = if target.contains("Exact") { "5" } else { "9" };
        let named = |name: &str| json!({"metadata": {"name": name, "namespace": "ops", "resourceVersion": "3"}});
        let items = if target.contains("labelSelector=team%20in%20%28b%29") {
            vec![named("lead---s1"), named("lead---s2"), named("lead"), named("another")]
        } else {
            vec![named("gone")]
        };
        answer(200, &json!({"kind": "LeaseList", "apiVersion": "coordination.k8s.io/v1", "metadata": {"resourceVersion": version}, "items": items}))
    });
    let target = format!("{LEASES}?watch=1&resourceVersion=5");
    let (mut watching, _) = bed.watch(Version::HTTP_2, &target, &[]).await;
    bed.change(&leases(2, "team=b")).await;
    assert_eq!(watching.sees().await, sees("ADDED", "lead"));
    assert_eq!(watching.sees().await, sees("ADDED", "another"));
    assert_eq!(watching.sees().await, sees("DELETED", "gone"));
    let (_, mut send) = soon("the new watch", bed.watches.recv()).await.unwrap();
    for (name, version) in [("lead---s2", "6"), ("lead---s1", "7")] {
        let object = json!({"metadata": {"name": name, "namespace": "ops", "resourceVersion": version}});
        let event = json!({"type": "MODIFIED", "object": object});
        send.send_data(format!("{event}\n").into()).await.unwrap();
    }
    assert_eq!(watching.sees().await, sees("MODIFIED", "lead"));
}

#[tokio::test]
async fn a_watch_of_a_lock_that_gets_another_name_expires() {
    let mut bed = Bed::new(&leases(1, "team=a")).await;
    let target = format!("{LEASES}?watch=1&resourceVersion=5");
    let (mut watching, _) = bed.watch(Version::HTTP_2, &target, &[]).await;
    let mut other = leases(2, "team=a");
    other["lock"]["shard"] = json!("s2");
    bed.change(&other).await;
    watching.expires().await;
}

/// The last events of a splice are older than what the client had seen, and no bookmark tells it.
#[tokio::test]
async fn without_bookmarks_no_client_goes_back_to_an_older_version() {
    const PLAIN: &str = "/api/v1/pods?watch=1&resourceVersion=5";
    for version in BOTH {
        for (target, newer, expires) in [(PLAIN, false, true), (PLAIN, true, false), (WATCH, false, false)] {
            let mut bed = Bed::new(&pods(1, "team=a")).await;
            let (mut watching, _) = bed.watch(version, target, &[]).await;
            bed.change(&pods(2, "team=b")).await;
            assert_eq!(watching.sees().await, sees("ADDED", "team in (b)"));
            assert_eq!(watching.sees().await, sees("DELETED", "team in (a)"));
            if target == WATCH {
                assert_eq!(watching.sees().await.0, "BOOKMARK");
            }
            let (_, mut send) = soon("the new watch", bed.watches.recv()).await.unwrap();
            if newer {
                send.send_data(event("ADDED", "y", 7)).await.unwrap();
                assert_eq!(watching.sees().await, sees("ADDED", "y"));
            }
            // The API server ends the watch, as it does after some minutes.
            drop(send);
            if expires {
                watching.expires().await;
            } else {
                assert_eq!(watching.next().await, None, "{target}");
            }
        }
    }
}

#[tokio::test]
async fn without_bookmarks_a_shutdown_after_a_change_means_a_new_list() {
    let mut bed = Bed::new(&pods(1, "team=a")).await;
    let plain = "/api/v1/pods?watch=1&resourceVersion=5";
    let (mut watching, _) = bed.watch(Version::HTTP_2, plain, &[]).await;
    bed.change(&pods(2, "team=b")).await;
    assert_eq!(watching.sees().await, sees("ADDED", "team in (b)"));
    assert_eq!(watching.sees().await, sees("DELETED", "team in (a)"));
    let _open = soon("the new watch", bed.watches.recv()).await.unwrap();
    until("the watch to go on", || async { bed.proxy.metric("ctrlmesh_proxy_watches_spliced_total").await == 1.0 })
        .await;
    bed.proxy.terminate();
    watching.expires().await;
}

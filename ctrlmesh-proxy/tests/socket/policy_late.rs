//! Watches and pages that begin after a policy change and continue from before it.

use std::sync::atomic::Ordering;

use crate::harness::client::Answer;
use crate::harness::watches::{Bed, PODS, WATCH, answer, event, list, pods, sees};
use crate::harness::{soon, until};
use http::{StatusCode, Version};
use serde_json::{Value, json};

const BOTH: [Version; 2] = [Version::HTTP_11, Version::HTTP_2];

/// The client listed before the change and watches after it: nothing was open that could have gone over.
#[tokio::test]
async fn a_watch_that_begins_after_the_change_is_spliced() {
    for version in BOTH {
        let mut bed = Bed::new(&pods(1, "team=a")).await;
        bed.client().await.get(PODS).await;
        bed.change(&pods(2, "team=b")).await;
        let (mut watching, seen) = bed.watch(version, WATCH, &[]).await;
        assert!(seen.target.contains("labelSelector=team%3Db&"), "{}", seen.target);
        assert_eq!(watching.sees().await, sees("ADDED", "team in (b)"));
        assert_eq!(watching.sees().await, sees("DELETED", "team in (a)"));
        assert_eq!(watching.sees().await.0, "BOOKMARK");
        watching.send.send_data(event("ADDED", "y", 7)).await.unwrap();
        assert_eq!(watching.sees().await, sees("ADDED", "y"));
    }
}

#[tokio::test]
async fn a_list_answered_after_the_change_is_spliced() {
    let mut bed = Bed::new(&pods(1, "team=a")).await;
    bed.client().await.get(PODS).await;
    bed.slow.store(true, Ordering::SeqCst);
    let mut client = bed.client().await;
    let listing = tokio::spawn(async move { client.get(PODS).await });
    soon("the list", bed.arrived.notified()).await;
    bed.change(&pods(2, "team=b")).await;
    // Another client goes over meanwhile: what is read under the old policy may still be newer than the version now.
    bed.slow.store(false, Ordering::SeqCst);
    let (mut other, _) = bed.watch(Version::HTTP_2, WATCH, &[]).await;
    assert_eq!(other.sees().await.0, "ADDED");
    until("the other to be through", || async {
        bed.proxy.metric("ctrlmesh_proxy_watches_spliced_total").await == 1.0
    })
    .await;
    bed.release.notify_one();
    assert_eq!(listing.await.unwrap().status, StatusCode::OK);
    let later = "/api/v1/pods?watch=1&resourceVersion=20";
    let (mut watching, _) = bed.watch(Version::HTTP_2, later, &[]).await;
    assert_eq!(watching.sees().await, sees("ADDED", "team in (b)"));
    assert_eq!(watching.sees().await, sees("DELETED", "team in (a)"));
}

#[tokio::test]
async fn a_watch_newer_than_the_change_is_not_spliced() {
    let mut bed = Bed::new(&pods(1, "team=a")).await;
    let (open, _) = bed.watch(Version::HTTP_2, WATCH, &[]).await;
    bed.change(&pods(2, "team=b")).await;
    let (_, _send) = soon("the new watch", bed.watches.recv()).await.unwrap();
    // The API server is asked for the version that it has now, 9, when nobody reads under the old policy any more.
    // Until the proxy has recorded the answer, new watches are spliced.
    until("the version", || async { bed.kept().contains("\"version\":9") }).await;
    assert!(bed.listed().iter().any(|list| list.ends_with("limit=1")));
    drop(open);
    let before = bed.listed().len();
    let newer = "/api/v1/pods?watch=1&resourceVersion=10";
    let (mut watching, _) = bed.watch(Version::HTTP_2, newer, &[]).await;
    watching.send.send_data(event("ADDED", "y", 11)).await.unwrap();
    assert_eq!(watching.sees().await, sees("ADDED", "y"));
    assert_eq!(bed.listed().len(), before);
    // At 9 it may have read under either.
    let same = "/api/v1/pods?watch=1&resourceVersion=9";
    let (mut watching, _) = bed.watch(Version::HTTP_2, same, &[]).await;
    assert_eq!(watching.sees().await, sees("ADDED", "team in (b)"));
}

#[tokio::test]
async fn a_watch_from_before_several_changes_is_spliced_from_each() {
    let mut bed = Bed::new(&pods(1, "team=a")).await;
    bed.client().await.get(PODS).await;
    bed.change(&pods(2, "team=b")).await;
    bed.client().await.get(PODS).await;
    bed.change(&pods(3, "team=c")).await;
    let (mut watching, _) = bed.watch(Version::HTTP_2, "/api/v1/pods?watch=1&resourceVersion=5", &[]).await;
    for (kind, name) in
        [("ADDED", "team in (c)"), ("DELETED", "team in (a)"), ("ADDED", "team in (c)"), ("DELETED", "team in (b)")]
    {
        assert_eq!(watching.sees().await, sees(kind, name));
    }
    watching.send.send_data(event("ADDED", "y", 7)).await.unwrap();
    assert_eq!(watching.sees().await, sees("ADDED", "y"));
}

/// More changes than are remembered, of pods alone.
#[tokio::test]
async fn many_changes_disturb_only_what_they_change() {
    let mut bed = Bed::new(&pods(0, "team=t0")).await;
    let mut client = bed.client().await;
    for epoch in 1..=40 {
        client.get(PODS).await;
        bed.change(&pods(epoch, &format!("team=t{epoch}"))).await;
    }
    bed.watch(Version::HTTP_2, "/api/v1/services?watch=1&resourceVersion=5", &[]).await;
    assert!(client.get(WATCH).await.is_expired_watch());
    // It lists again, and that list is newer than the version, 9, that was found meanwhile.
    let newer = "/api/v1/pods?watch=1&resourceVersion=10";
    let (mut watching, _) = bed.watch(Version::HTTP_2, newer, &[]).await;
    watching.send.send_data(event("ADDED", "y", 11)).await.unwrap();
    assert_eq!(watching.sees().await, sees("ADDED", "y"));
}

#[tokio::test]
async fn a_watch_with_a_body_is_spliced_by_requests_without_one() {
    let mut bed = Bed::new(&pods(1, "team=a")).await;
    let headers = [("content-length", "0"), ("content-type", "application/json")];
    let (mut watching, _) = bed.watch(Version::HTTP_11, WATCH, &headers).await;
    bed.change(&pods(2, "team=b")).await;
    assert_eq!(watching.sees().await, sees("ADDED", "team in (b)"));
    let seen = bed.upstream.seen.lock().unwrap().clone();
    let ours: Vec<_> = seen.iter().skip(1).collect();
    assert!(!ours.is_empty());
    for name in ["content-length", "content-type", "expect"] {
        assert!(ours.iter().all(|seen| !seen.headers.contains_key(name)), "{name}");
    }
}

/// Nobody was answered under the first policy: what the client goes on from, it read under the second.
#[tokio::test]
async fn a_policy_under_which_nobody_read_disturbs_no_watch() {
    let mut bed = Bed::new(&pods(1, "team=a")).await;
    bed.answer_lists(|_| answer(403, &json!({"kind": "Status", "code": 403})));
    bed.client().await.get(PODS).await;
    bed.change(&pods(2, "team=b")).await;
    let before = bed.listed().len();
    let (mut watching, _) = bed.watch(Version::HTTP_2, WATCH, &[]).await;
    watching.send.send_data(event("ADDED", "y", 7)).await.unwrap();
    assert_eq!(watching.sees().await, sees("ADDED", "y"));
    assert_eq!(bed.listed().len(), before);
}

/// The policy changes while no proxy runs, or after the next one has begun with the old one.
#[tokio::test]
async fn a_watch_from_before_a_restart_is_spliced() {
    for policy in ["team=b", "team=a"] {
        let mut bed = Bed::new(&pods(1, "team=a")).await;
        bed.client().await.get(PODS).await;
        bed.restart(&pods(2, policy), true);
        if policy == "team=a" {
            bed.change(&pods(3, "team=b")).await;
        }
        let (mut watching, _) = bed.watch(Version::HTTP_2, WATCH, &[]).await;
        assert_eq!(watching.sees().await, sees("ADDED", "team in (b)"));
        assert_eq!(watching.sees().await, sees("DELETED", "team in (a)"));
    }
}

#[tokio::test]
async fn a_restart_under_the_same_policy_disturbs_nobody() {
    let mut bed = Bed::new(&pods(1, "team=a")).await;
    bed.client().await.get(PODS).await;
    bed.restart(&pods(1, "team=a"), true);
    let (mut watching, _) = bed.watch(Version::HTTP_2, WATCH, &[]).await;
    watching.send.send_data(event("ADDED", "y", 7)).await.unwrap();
    assert_eq!(watching.sees().await, sees("ADDED", "y"));
    assert_eq!(bed.listed(), ["/api/v1/pods?labelSelector=team%3Da"]);
}

/// Without a stored history, the proxy cannot tell what the client holds.
#[tokio::test]
async fn after_a_restart_without_memory_clients_list_once() {
    let mut bed = Bed::new(&pods(1, "team=a")).await;
    let mut client = bed.client().await;
    client.get(PODS).await;
    bed.restart(&pods(1, "team=a"), false);
    let mut client = bed.client().await;
    let services = "/api/v1/services?watch=1&resourceVersion=5";
    for watch in [WATCH, services] {
        assert!(client.get(watch).await.is_expired_watch(), "{watch}");
    }
    let gone = client.get(&paged(5)).await;
    assert_eq!((gone.status, reason(&gone)), (StatusCode::GONE, json!("Expired")));
    // The current list is newer than the version, 9, that was found meanwhile.
    for version in [Version::HTTP_2, Version::HTTP_11] {
        for watch in [WATCH, services] {
            bed.watch(version, &watch.replace("=5", "=10"), &[]).await;
        }
    }
    assert_eq!(client.get(&paged(10)).await.status, StatusCode::OK);
}

/// A watch by a path that names its object cannot be spliced, and that path has no list.
#[tokio::test]
async fn a_watch_of_one_name_expires_once() {
    let mut bed = Bed::new(&pods(1, "team=a")).await;
    bed.answer_lists(|target| {
        let is_object = target.split('?').next().unwrap().ends_with("/p");
        if is_object { answer(406, &json!({"kind": "Status", "code": 406})) } else { list(target) }
    });
    bed.client().await.get(PODS).await;
    bed.change(&pods(2, "team=b")).await;
    let named = |version| format!("/api/v1/watch/namespaces/x/pods/p?watch=1&resourceVersion={version}");
    let (mut watching, _) = bed.watch(Version::HTTP_2, &named(5), &[]).await;
    watching.expires().await;
    // The current list is newer than the version, 9, that was found meanwhile.
    let (mut watching, _) = bed.watch(Version::HTTP_2, &named(10), &[]).await;
    watching.send.send_data(event("ADDED", "p", 11)).await.unwrap();
    assert_eq!(watching.sees().await, sees("ADDED", "p"));
}

fn reason(answer: &Answer) -> Value {
    serde_json::from_slice::<Value>(&answer.body).unwrap()["reason"].take()
}

/// A further page of the pods, as the API server names it.
fn paged(version: u64) -> String {
    let token = json!({"v": "meta.k8s.io/v1", "rv": version, "start": "ns/x\u{0}"}).to_string();
    let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    for three in token.as_bytes().chunks(3) {
        let byte = |at: usize| u32::from(three.get(at).copied().unwrap_or_default());
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for at in 0..=three.len() {
            text.push(char::from(digits[(bits >> (18 - 6 * at) & 63) as usize]));
        }
    }
    format!("{PODS}?limit=1&continue={text}")
}

#[tokio::test]
async fn the_pages_of_a_list_are_of_one_share() {
    let bed = Bed::new(&pods(1, "team=a")).await;
    let mut client = bed.client().await;
    client.get(&format!("{PODS}?limit=1")).await;
    assert_eq!(client.get(&paged(9)).await.status, StatusCode::OK);
    bed.change(&pods(2, "team=b")).await;
    let gone = client.get(&paged(9)).await;
    assert_eq!((gone.status, reason(&gone)), (StatusCode::GONE, json!("Expired")));
    // A token that does not say its version may be of an old page as long as it is not known how far was read.
    let opaque = format!("{PODS}?limit=1&continue=x");
    assert_eq!(client.get(&opaque).await.status, StatusCode::OK);
    // Pages that are begun now are newer than the version, 9, that was found meanwhile.
    assert_eq!(client.get(&paged(10)).await.status, StatusCode::OK);
    bed.change(&pods(3, "team=c")).await;
    assert_eq!(client.get(&opaque).await.status, StatusCode::GONE);
}

#[tokio::test]
async fn a_first_page_is_newer_than_earlier_reads() {
    let bed = Bed::new(&pods(1, "team=a")).await;
    let mut client = bed.client().await;
    client.get(PODS).await;
    bed.change(&pods(2, "team=b")).await;
    client.get(&format!("{PODS}?limit=1&resourceVersion=0")).await;
    assert!(!bed.listed().iter().any(|list| list.ends_with("&limit=1")), "{:?}", bed.listed());
    client.get(&format!("{PODS}?limit=2")).await;
    assert!(bed.listed().iter().any(|list| list.ends_with("&limit=1")), "{:?}", bed.listed());
    assert_eq!(client.get(&paged(10)).await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_page_reaches_the_client_before_the_next_is_read() {
    for version in BOTH {
        let mut bed = Bed::new(&pods(1, "team=a")).await;
        let (mut watching, _) = bed.watch(version, WATCH, &[]).await;
        let slow = bed.slow.clone();
        bed.answer_lists(move |target| {
            let second = target.contains("continue=");
            slow.store(second, Ordering::SeqCst);
            let (name, more) = if second { ("q", "") } else { ("p", "t") };
            answer(
                200,
                &json!({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "5", "continue": more},
                        "items": [{"metadata": {"name": name, "resourceVersion": "3"}}]}),
            )
        });
        bed.change(&pods(2, "team=b")).await;
        assert_eq!(watching.sees().await, sees("ADDED", "p"), "{version:?}");
        soon("the second page", bed.arrived.notified()).await;
        bed.release.notify_one();
        assert_eq!(watching.sees().await, sees("ADDED", "q"), "{version:?}");
        assert_eq!(watching.sees().await, sees("DELETED", "p"), "{version:?}");
    }
}

//! Resources whose versions do not compare with the policy's.

use crate::harness::watches::{Bed, PODS, WATCH, answer, event, pods, sees};
use http::{StatusCode, Version};
use serde_json::{Value, json};

const BOTH: [Version; 2] = [Version::HTTP_11, Version::HTTP_2];

/// The target by which the proxy asks for the newest version.
const NEWEST: &str = "/api/v1/pods?labelSelector=team%3Da&limit=1";

/// The same policy, since a version.
fn since(epoch: u64, changed_at: u64) -> Value {
    let mut policy = pods(epoch, "team=a");
    policy["limits"][0]["changedAt"] = json!(changed_at);
    policy
}

fn asked(bed: &Bed, target: &str) -> usize {
    bed.listed().iter().filter(|listed| *listed == target).count()
}

/// The API server's newest pod is of version 9, and stays so.
#[tokio::test]
async fn versions_before_the_change_do_not_compare() {
    let mut bed = Bed::new(&since(1, 100)).await;
    for version in BOTH {
        let (mut watching, seen) = bed.watch(version, WATCH, &[]).await;
        assert!(seen.target.contains("resourceVersion=5&"), "{}", seen.target);
        watching.send.send_data(event("ADDED", "x", 6)).await.unwrap();
        assert_eq!(watching.sees().await, sees("ADDED", "x"));
    }
    let mut client = bed.client().await;
    for (query, sent) in [
        ("resourceVersion=0", "labelSelector=team%3Da&resourceVersion=0"),
        ("limit=5&continue=opaque", "labelSelector=team%3Da&limit=5&continue=opaque"),
    ] {
        assert_eq!(client.get(&format!("{PODS}?{query}")).await.status, StatusCode::OK);
        assert_eq!(bed.upstream.last().target, format!("{PODS}?{sent}"));
    }
    assert_eq!(asked(&bed, NEWEST), 1);
}

#[tokio::test]
async fn comparable_versions_are_asked_for_once_a_change() {
    let bed = Bed::new(&since(1, 100)).await;
    bed.answer_lists(|_| list_at("120"));
    let mut client = bed.client().await;
    for _ in 0..3 {
        assert!(client.get(WATCH).await.is_expired_watch());
        client.get(&format!("{PODS}?resourceVersion=0")).await;
        let last = bed.upstream.last().target;
        assert!(last.contains("resourceVersion=100"), "{last}");
    }
    assert_eq!(asked(&bed, NEWEST), 1);
    bed.change(&since(2, 110)).await;
    assert!(client.get(WATCH).await.is_expired_watch());
    assert_eq!(asked(&bed, NEWEST), 2);
}

#[tokio::test]
async fn without_a_version_the_change_counts_and_is_asked_again() {
    let bed = Bed::new(&since(1, 100)).await;
    bed.answer_lists(|_| answer(503, &json!({"kind": "Status", "metadata": {}, "code": 503})));
    let mut client = bed.client().await;
    assert!(client.get(WATCH).await.is_expired_watch());
    bed.answer_lists(|_| list_at("120"));
    assert!(client.get(WATCH).await.is_expired_watch());
    assert_eq!(asked(&bed, NEWEST), 2);
}

fn list_at(version: &str) -> http::Response<crate::harness::upstream::Body> {
    let metadata = json!({"resourceVersion": version});
    answer(200, &json!({"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": []}))
}

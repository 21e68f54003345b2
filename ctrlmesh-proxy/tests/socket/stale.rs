//! Lists that are answered from an older state on purpose.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use http::{StatusCode, Version};
use serde_json::json;
use tokio::time;

use crate::faults::{self, api_fault, injected, policy, without_faults};
use crate::harness::client::{Client, get};
use crate::harness::soon;
use crate::harness::watches::{Bed, PODS, answer};

const BOTH: [Version; 2] = [Version::HTTP_11, Version::HTTP_2];

/// An API server whose pods are at another version in each list, and which refuses lists of one state if it `refuses`.
async fn stale_bed(refuses: bool) -> Bed {
    let stale = json!({"stale": {"ageNanoseconds": 1_000_000_000}});
    let bed = Bed::new(&policy(1, &api_fault(&stale))).await;
    let newest = Arc::new(AtomicU64::new(10));
    bed.answer_lists(move |target| {
        if refuses && target.contains("Exact") {
            return answer(410, &json!({"kind": "Status", "code": 410, "reason": "Expired"}));
        }
        let version = newest.fetch_add(1, Ordering::SeqCst).to_string();
        let metadata = json!({"resourceVersion": version});
        answer(200, &json!({"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": []}))
    });
    bed
}

/// The versions of the lists of one state that arrived, in order.
fn exact_lists(bed: &Bed) -> Vec<u64> {
    let version = |target: String| {
        let rest = target.strip_prefix(&format!("{PODS}?resourceVersion="))?;
        rest.strip_suffix("&resourceVersionMatch=Exact&labelSelector=team%3Da")?.parse().ok()
    };
    bed.listed().into_iter().filter_map(version).collect()
}

/// Lists until it `is_done`.
async fn list_until(client: &mut Client, target: &str, is_done: impl Fn() -> bool) {
    let listing = async {
        while !is_done() {
            assert_eq!(client.get(target).await.status, StatusCode::OK, "{target}");
            time::sleep(Duration::from_millis(20)).await;
        }
    };
    soon("the list", listing).await;
}

#[tokio::test]
async fn a_stale_list_asks_for_the_state_some_time_ago() {
    for version in BOTH {
        let bed = stale_bed(false).await;
        let mut client = faults::client(&bed, version).await;
        let begun = Instant::now();
        assert_eq!(client.get(PODS).await.status, StatusCode::OK);
        assert_eq!(exact_lists(&bed), [0_u64; 0], "nothing is known yet");
        for target in [PODS, "/api/v1/pods?resourceVersion=0"] {
            let before = exact_lists(&bed).len();
            list_until(&mut client, target, || exact_lists(&bed).len() > before).await;
        }
        assert!(begun.elapsed() >= Duration::from_secs(1));
        assert!(injected(&bed, "stale").await >= 2.0);
        // Those that may not be answered from an older state.
        let count = exact_lists(&bed).len();
        for query in ["resourceVersion=1000000", "resourceVersion=5&limit=5", "limit=5&continue=abc"] {
            client.get(&format!("{PODS}?{query}")).await;
        }
        assert_eq!(exact_lists(&bed).len(), count);
        bed.change(&without_faults(2)).await;
        client.get(PODS).await;
        assert_eq!(exact_lists(&bed).len(), count);
    }
}

#[tokio::test]
async fn a_list_whose_old_state_is_gone_is_answered_all_the_same() {
    let bed = stale_bed(true).await;
    let mut client = faults::client(&bed, Version::HTTP_2).await;
    list_until(&mut client, PODS, || exact_lists(&bed).len() > 2).await;
    assert_eq!(injected(&bed, "stale").await, 0.0);
}

/// A watch from there would be refused, and the client would list again for ever.
#[tokio::test]
async fn no_state_is_older_than_the_policy_in_force() {
    let bed = stale_bed(false).await;
    let mut client = faults::client(&bed, Version::HTTP_2).await;
    list_until(&mut client, PODS, || !exact_lists(&bed).is_empty()).await;
    let stale = json!({"stale": {"ageNanoseconds": 1_000_000_000}});
    let mut other = policy(2, &api_fault(&stale));
    other["limits"][0]["selector"] = json!("team=b");
    bed.change(&other).await;
    let before = bed.listed().len();
    let is_of_other = |target: &&String| target.contains("Exact") && target.contains("team%3Db");
    list_until(&mut client, PODS, || bed.listed()[before..].iter().any(|target| is_of_other(&target))).await;
    let listed = bed.listed();
    let version = |target: &String| -> u64 {
        let rest = target.split_once("resourceVersion=").unwrap().1;
        rest.split('&').next().unwrap().parse().unwrap()
    };
    let first = listed[before..].iter().find(is_of_other).map(version).unwrap();
    // Each list before the change had a version of its own, from 10 on.
    let lists_before = listed[..before].iter().filter(|target| !target.contains("Exact")).count();
    assert!(first >= 10 + u64::try_from(lists_before).unwrap(), "{first}: {listed:?}");
    let watch = format!("{PODS}?watch=1&resourceVersion={first}");
    assert_ne!(client.send(get(&watch)).await.unwrap().status(), StatusCode::GONE);
}

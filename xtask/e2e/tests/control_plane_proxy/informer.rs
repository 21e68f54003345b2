//! A policy change under a real client-go informer.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::json;

use crate::bed::{ALWAYS, Bed, changes, create_objects, selector_after, write, write_policy};
use crate::go::{self, Running};
use crate::harness::proxy::Proxy;
use crate::harness::{soon, until};

/// The watched client-go informer of `xtask/control-plane/informer`, once it has synced.
fn informer(bed: &Bed, proxy: &Proxy, more: &[&str]) -> Running {
    let mut command = Command::new(go::program("informer"));
    command.args(["-server", &format!("https://{}", proxy.address), "-namespace", &bed.namespace]);
    command.args(["-token", &bed.token, "-closely", ALWAYS, "-ca"]).arg(bed.pki.path("mesh.crt")).args(more);
    let mut informer = Running::start(&mut command);
    assert_eq!(informer.json()["synced"], true);
    informer
}

async fn changes_reach_a_real_informer(more: &[&str]) {
    let bed = Bed::new().await;
    create_objects(&bed).await;
    let proxy = bed.proxy("policy", "slot in (5,6,9)");
    let mut informer = informer(&bed, &proxy, more);
    let mut selector = String::new();
    let mut written = Vec::new();
    for change in 0..changes() {
        selector = selector_after(change);
        write_policy(&bed.pki, "policy", &selector);
        #[expect(clippy::cast_precision_loss, reason = "a small count")]
        let wanted = (change + 1) as f64;
        let spliced = async {
            while proxy.metric("ctrlmesh_proxy_watches_spliced_total").await < wanted {
                assert!(proxy.metric("ctrlmesh_proxy_watches_expired_total").await == 0.0);
                written.push(write(&bed, written.len()).await);
            }
        };
        soon("the watch to go over to the new policy", spliced).await;
    }
    let truth = json!(bed.truth(&selector).await);
    let informer = std::cell::RefCell::new(&mut informer);
    until("the store to equal the API server", || async { informer.borrow_mut().state()["store"] == truth }).await;
    let state = informer.borrow_mut().state();
    assert_eq!((&state["lists"], &state["watches"], &state["wrong"]), (&json!(1), &json!(1), &json!([])));
    let seen: BTreeSet<u64> = serde_json::from_value(state["closely"].clone()).unwrap();
    written.retain(|version| !seen.contains(version));
    assert!(written.is_empty(), "versions that were never seen: {written:?}");
}

#[tokio::test]
async fn an_informer_follows_policies_in_protobuf_over_http2() {
    changes_reach_a_real_informer(&[]).await;
}

#[tokio::test]
async fn an_informer_follows_policies_in_json_over_http1() {
    changes_reach_a_real_informer(&["-content-type", "application/json", "-http1"]).await;
}

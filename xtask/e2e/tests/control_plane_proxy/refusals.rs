//! A real client-go client waits as long as a guard's refusal says, and no longer.

use std::process::Command;

use serde_json::{Value, json};

use crate::bed::{Bed, write_policy_with};
use crate::go::{self, Running};
use crate::harness::until;

const SELECTOR: &str = "slot in (5,6,9)";

/// How many objects are made. The bucket holds one, so all but the first are refused once.
const CREATES: u32 = 4;

/// A bucket of one request, which is full again two seconds later.
fn guard(trigger: &str) -> Value {
    let requests = json!([{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["create"], "namespaces": ["*"]}]);
    let bucket = json!({"burst": 1, "limit": 1, "intervalNanoseconds": 2_000_000_000_u64});
    json!({"breaker": "ops/wild", "rule": "creates", "bucket": bucket, "trigger": trigger, "requests": requests})
}

/// What the client says at the end, and how often it was refused.
async fn creates(trigger: &str, more: &[&str]) -> (Value, f64) {
    let bed = Bed::new().await;
    let proxy = bed.proxy("policy", SELECTOR);
    write_policy_with(&bed.pki, "policy", SELECTOR, &json!({"epoch": 1, "guards": [guard(trigger)]}));
    until("the policy", || async { proxy.metric("ctrlmesh_proxy_policy_epoch{pod=\"\"}").await >= 1.0 }).await;
    let mut command = Command::new(go::program("patient"));
    command.args(["-server", &format!("https://{}", proxy.address), "-namespace", &bed.namespace]);
    command
        .args(["-token", &bed.token, "-count", &CREATES.to_string(), "-ca"])
        .arg(bed.pki.path("mesh.crt"))
        .args(more);
    let said = Running::start(&mut command).json();
    let refused = "ctrlmesh_proxy_guard_requests_total{rule=\"ops/wild/creates\",outcome=\"refused\"}";
    (said, proxy.metric(refused).await)
}

async fn client_go_waits(more: &[&str]) {
    let (said, refused) = creates("limiterOnly", more).await;
    assert_eq!(said, json!({"created": CREATES, "error": ""}));
    // Each wait was long enough: nothing was refused a second time.
    assert_eq!(refused.to_bits(), f64::from(CREATES - 1).to_bits());
}

#[tokio::test]
async fn client_go_waits_as_long_as_it_is_told_in_protobuf_over_http2() {
    client_go_waits(&[]).await;
}

#[tokio::test]
async fn client_go_waits_as_long_as_it_is_told_in_json_over_http1() {
    client_go_waits(&["-content-type", "application/json", "-http1"]).await;
}

#[tokio::test]
async fn client_go_returns_the_error_of_a_breaker_that_a_user_closes() {
    let (said, refused) = creates("normal", &[]).await;
    assert_eq!(said["created"], 1);
    let error = said["error"].as_str().unwrap();
    assert!(
        error.starts_with("ctrlmesh: rule \"creates\" of CircuitBreaker ops/wild is open until it is reset"),
        "{error}"
    );
    assert_eq!(refused.to_bits(), 1.0_f64.to_bits(), "it does not ask again");
}

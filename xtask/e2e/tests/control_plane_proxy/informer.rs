//! Policy changes and faults under a real client-go informer.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::process::Command;

use http::Version;
use serde_json::{Value, json};
use tokio::sync::Mutex;

use crate::bed::{ALWAYS, Bed, changes, create_objects, names, selector_after, write, write_faulty, write_policy};
use crate::go::{self, Running};
use crate::harness::client::{Client, plain_get};
use crate::harness::proxy::Proxy;
use crate::harness::{soon, until};

/// A fault hits every request.
const ALL: u32 = 1_000_000_000;

/// The watched client-go informer of `xtask/control-plane/informer`, once it has synced.
fn informer(bed: &Bed, proxy: &Proxy, more: &[&str]) -> Running {
    let mut informer = started(bed, proxy, more);
    assert_eq!(informer.json()["synced"], true);
    informer
}

fn started(bed: &Bed, proxy: &Proxy, more: &[&str]) -> Running {
    let mut command = Command::new(go::program("informer"));
    command.args(["-server", &format!("https://{}", proxy.address), "-namespace", &bed.namespace]);
    command.args(["-token", &bed.token, "-closely", ALWAYS, "-ca"]).arg(bed.pki.path("mesh.crt")).args(more);
    Running::start(&mut command)
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
    let informer = RefCell::new(&mut informer);
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

/// A fault that only an API server makes, which hits every request with this verb.
fn fault(verb: &str, kind: &Value) -> Value {
    let requests = json!([{"apiGroups": [""], "resources": ["configmaps"], "verbs": [verb], "namespaces": ["*"]}]);
    json!({
        "injection": "ops/storm", "fault": verb, "requests": requests,
        "apiFault": {"kind": kind, "share": ALL},
    })
}

/// Starts an informer whose requests meet one fault after the other, writes objects meanwhile, lifts the fault, and
/// compares.
async fn an_informer_survives(faults: &[(&str, Value)], more: &[&str]) {
    const SELECTOR: &str = "slot in (5,6,9)";
    let bed = Bed::new().await;
    create_objects(&bed).await;
    let proxy = bed.proxy("policy", SELECTOR);
    let injected = async || {
        let page = plain_get(proxy.admin, "/metrics").await.1;
        let counts = page.lines().filter(|line| line.starts_with("ctrlmesh_proxy_faults_injected_total{"));
        counts.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum::<f64>()
    };
    let (mut epoch, steps) = (1, Cell::new(0));
    for (verb, kind) in faults {
        let mut change = async |faults: &Value| {
            epoch += 1;
            write_faulty(&bed.pki, "policy", SELECTOR, epoch, faults);
            let metric = "ctrlmesh_proxy_policy_epoch{pod=\"\"}";
            #[expect(clippy::cast_precision_loss, reason = "a small count")]
            until("the policy", || async { proxy.metric(metric).await == epoch as f64 }).await;
        };
        change(&json!([fault(verb, kind)])).await;
        let before = injected().await;
        let mut informer = started(&bed, &proxy, more);
        until("the fault to be met", || async {
            steps.set(steps.get() + 1);
            write(&bed, steps.get()).await;
            injected().await > before
        })
        .await;
        write(&bed, steps.get() + 1).await;
        change(&json!([])).await;
        assert_eq!(informer.json()["synced"], true);
        write(&bed, steps.get() + 2).await;
        let truth = json!(bed.truth(SELECTOR).await);
        let informer = RefCell::new(&mut informer);
        until("the store to equal the API server", || async { informer.borrow_mut().state()["store"] == truth }).await;
        let state = informer.borrow_mut().state();
        let wrong = state["wrong"].as_array().unwrap();
        // Watches that break or expire; not objects that go back, come twice or vanish.
        let is_broken_watch = |text: &Value| text.as_str().unwrap().starts_with("ERROR");
        assert!(wrong.iter().all(is_broken_watch), "{kind}: {wrong:?}");
    }
}

/// Those of the API server that a client which lists and watches meets.
fn faults() -> Vec<(&'static str, Value)> {
    vec![
        ("watch", json!("expireWatch")),
        ("watch", json!({"cutWatch": {"afterNanoseconds": 0}})),
        ("watch", json!({"delayEvents": {"nanoseconds": 300_000_000}})),
        ("watch", json!({"slowBody": {"bytesPerSecond": 5_000}})),
        ("list", json!("answerLost")),
        ("list", json!({"tooManyRequests": {"retryAfterSeconds": 1}})),
        ("list", json!({"slowBody": {"bytesPerSecond": 20_000}})),
        ("list", json!("goAway")),
    ]
}

#[tokio::test]
async fn an_informer_survives_what_api_servers_do_in_protobuf_over_http2() {
    an_informer_survives(&faults(), &[]).await;
}

#[tokio::test]
async fn an_informer_survives_what_api_servers_do_in_json_over_http1() {
    an_informer_survives(&faults(), &["-content-type", "application/json", "-http1"]).await;
}

/// It lists what was there before objects came and went, and watches from there.
async fn an_informer_catches_up_from_an_older_state(more: &[&str]) {
    const SELECTOR: &str = "slot in (5,6,9)";
    // Built before there is a state to be older than: the API server's watch cache keeps events of 75 s only
    // (`eventFreshDuration`) once other tests have filled it.
    go::program("informer");
    let bed = Bed::new().await;
    create_objects(&bed).await;
    let proxy = bed.proxy("policy", SELECTOR);
    let old_lists = fault("list", &json!({"stale": {"ageNanoseconds": 8_000_000_000_u64}}));
    write_faulty(&bed.pki, "policy", SELECTOR, 2, &json!([old_lists]));
    let injected = async || {
        let page = plain_get(proxy.admin, "/metrics").await.1;
        let count = page.lines().find(|line| line.contains("faults_injected_total{") && line.contains("\"stale\""));
        count.map_or(0.0, |line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
    };
    bed.create("leaves", 5).await;
    // Versions are recorded as long as the connection is open.
    let operator = Mutex::new(Client::connect(&bed.pki, proxy.address, Version::HTTP_2).await);
    let list = async || -> Value {
        let answer = operator.lock().await.ask(bed.get(&bed.config_maps(), "application/json")).await;
        serde_json::from_slice(&answer.body).unwrap()
    };
    until("the older state to be known", || async {
        list().await;
        injected().await > 0.0
    })
    .await;
    until("the object to be in it", || async { names(&list().await).contains("leaves") }).await;
    bed.admin("DELETE", &format!("{}/leaves", bed.config_maps()), &Value::Null).await.unwrap();
    bed.create("joins", 5).await;
    let old = names(&list().await);
    assert!(old.contains("leaves") && !old.contains("joins"), "{old:?}");
    let before = injected().await;
    let mut informer = informer(&bed, &proxy, more);
    assert!(injected().await > before, "its list");
    let truth = json!(bed.truth(SELECTOR).await);
    let informer = RefCell::new(&mut informer);
    until("the store to equal the API server", || async { informer.borrow_mut().state()["store"] == truth }).await;
    let state = informer.borrow_mut().state();
    assert_eq!((&state["lists"], &state["watches"], &state["wrong"]), (&json!(1), &json!(1), &json!([])));
}

#[tokio::test]
async fn an_informer_survives_an_older_state_in_protobuf_over_http2() {
    an_informer_catches_up_from_an_older_state(&[]).await;
}

#[tokio::test]
async fn an_informer_survives_an_older_state_in_json_over_http1() {
    an_informer_catches_up_from_an_older_state(&["-content-type", "application/json", "-http1"]).await;
}

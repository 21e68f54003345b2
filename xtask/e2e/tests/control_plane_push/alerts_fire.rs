//! Alerts of `deploy/observability/` fire in a real Prometheus when what they are for happens to real programs.

use std::process::Command;

use ctrlmesh_common::api::CircuitBreaker;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use nix::sys::signal::Signal;
use serde_json::json;

use crate::bed::eventually;
use crate::follow::operator_config;
use crate::full::{OPERATOR, TEAMS, Teams, divide_fenced, parted, proxies, seen};
use crate::observability::{at_once, job, until_fires};
use crate::owned::{Bed, bed_with, watch};
use crate::process::Replica;
use crate::prometheus::Prometheus;

/// Authorities that expire within the 60 days of the alert.
const SHORT_LIFE: [&str; 2] = ["--ca-validity", "720h"];

pub(crate) const BREAKER: &str = "closed-to-all";

/// Makes an attempt, again and again, until the alert fires.
pub(crate) async fn fires_by<T>(prometheus: &Prometheus, alert: &str, mut attempt: impl AsyncFnMut() -> T) {
    eventually(alert, async || {
        attempt().await;
        prometheus.fires(alert).then_some(())
    })
    .await;
}

/// Changes the object of a namespace through a proxy. Returns whether it was let.
async fn touch(client: &Client, namespace: &str) -> bool {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let touched = Patch::Merge(json!({"metadata": {"annotations": {"touched": "yes"}}}));
    maps.patch("object", &PatchParams::default(), &touched).await.is_ok()
}

pub(crate) async fn open_breaker(client: &Client) {
    let requests = json!({"apiGroups": [""], "resources": ["secrets"], "verbs": ["delete"], "namespaces": ["*"]});
    let bucket = json!({"burst": 1, "interval": "1h", "limit": 1});
    let rule =
        json!({"name": "deletes", "bucket": bucket, "triggerPolicy": "ForceOpened", "resourceRules": [requests]});
    let every_pod = json!([{"key": "ctrlmesh.kusionstack.io/enable-proxy", "operator": "Exists"}]);
    let breaker = json!({
        "apiVersion": "ctrlmesh.kusionstack.io/v1alpha1",
        "kind": "CircuitBreaker",
        "metadata": {"name": BREAKER},
        "spec": {"selector": {"matchExpressions": every_pod}, "rateLimitings": [rule]},
    });
    let breakers: Api<CircuitBreaker> = Api::namespaced(client.clone(), OPERATOR);
    breakers.create(&PostParams::default(), &serde_json::from_value(breaker).unwrap()).await.unwrap();
}

pub(crate) async fn close_breaker(client: &Client) {
    let breakers: Api<CircuitBreaker> = Api::namespaced(client.clone(), OPERATOR);
    breakers.delete(BREAKER, &DeleteParams::default()).await.unwrap();
}

/// Asks the manager's webhook something that is no review.
fn ask_nonsense(replica: &Replica) {
    let mut command = Command::new("curl");
    command.args(["--silent", "--show-error", "--insecure", "--header", "content-type: application/json"]);
    command.args(["--data", "{}", "--output", "/dev/null", &format!("https://{}/validate", replica.webhooks)]);
    assert!(command.status().unwrap().success());
}

/// What a user does to a root, and what breaks by it; each is undone.
async fn of_roots(prometheus: &Prometheus, client: &Client, clients: &[Client; 2], [own, other]: &[Teams; 2]) {
    let foreign = other.first().unwrap();
    fires_by(prometheus, "CtrlmeshWritesRefused", async || touch(&clients[0], foreign).await).await;
    assert!(touch(&clients[0], own.first().unwrap()).await);

    open_breaker(client).await;
    until_fires(prometheus, "CtrlmeshBreakerOpen", true).await;
    close_breaker(client).await;
    until_fires(prometheus, "CtrlmeshBreakerOpen", false).await;

    // The third shard has no pod. So what it is to get stays where it is.
    divide_fenced(client, "Proxy", 3, None).await;
    for alert in ["CtrlmeshMoveStuck", "CtrlmeshShardingConfigDegraded"] {
        until_fires(prometheus, alert, true).await;
    }
    // The only API server of this bed is no endpoint that could be asked what it fences.
    divide_fenced(client, "Server", 2, None).await;
    until_fires(prometheus, "CtrlmeshNotFenced", true).await;
    divide_fenced(client, "Proxy", 2, None).await;
    for alert in ["CtrlmeshMoveStuck", "CtrlmeshShardingConfigDegraded", "CtrlmeshNotFenced"] {
        until_fires(prometheus, alert, false).await;
    }
}

#[tokio::test]
async fn alerts_fire_for_what_they_are_for() {
    let bed = bed_with("Proxy", 2, None, &SHORT_LIFE).await;
    let Bed { mut cluster, mut replica, client, settings, pods, .. } = bed;
    let ([one, two], clients) = proxies(&client, &settings, &pods).await;
    let parts = parted(&clients, |_, _| true).await;
    let _watches = clients.each_ref().map(watch::<ConfigMap>);
    let sidecars = [one.admin.to_string(), two.admin.to_string()];
    let jobs = [job("manager", &[replica.metrics.to_string()]), job("sidecars", &sidecars)];
    let prometheus = Prometheus::start(&jobs, &at_once()).await;

    until_fires(&prometheus, "CtrlmeshCaNearEnd", true).await;
    fires_by(&prometheus, "CtrlmeshReviewsFailing", async || ask_nonsense(&replica)).await;
    of_roots(&prometheus, &client, &clients, &parts).await;

    // Without a fence all moves at once, also from a proxy that does not hear of it.
    let canary = |team: &str| Some(json!({"replicas": 1, "inNamespaces": [team]}));
    divide_fenced(&client, "Off", 1, canary(TEAMS[3])).await;
    parted(&clients, |one, _| one.len() == 1).await;
    one.send(Signal::SIGSTOP);
    divide_fenced(&client, "Off", 1, canary(TEAMS[4])).await;
    until_fires(&prometheus, "CtrlmeshObjectsOwnedTwice", true).await;
    one.send(Signal::SIGCONT);
    until_fires(&prometheus, "CtrlmeshObjectsOwnedTwice", false).await;

    divide_fenced(&client, "Proxy", 2, None).await;
    let [own, other] = parted(&clients, |_, _| true).await;
    let foreign = other.first().unwrap();
    eventually("the proxies to fence again", async || (!touch(&clients[0], foreign).await).then_some(())).await;
    replica.program().kill();
    let own = own.first().unwrap();
    // A client that does not try again by itself.
    let mut config = operator_config(&client, &settings, &pods[0], &one).await;
    config.default_retry = false;
    let through = Client::try_from(config).unwrap();
    fires_by(&prometheus, "CtrlmeshWritesUnconfirmed", async || touch(&through, own).await).await;
    cluster.stop_apiserver_of(0).unwrap();
    fires_by(&prometheus, "CtrlmeshUpstreamErrors", async || seen(&through).await).await;
}

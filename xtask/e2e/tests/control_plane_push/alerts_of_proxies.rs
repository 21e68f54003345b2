//! Alerts of what proxies refuse fire in a real Prometheus until the proxies refuse no more.

use ctrlmesh_common::policy::{Lock, Policy};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Client;

use crate::alerts_fire::fires_by;
use crate::bed::{AUDIENCE, Bed, eventually, inside, policy, soon, until};
use crate::follow::operator_config;
use crate::full::seen;
use crate::observability::{job, until_fires, with_short_windows};
use crate::owned::{self, bed, watch};
use crate::process::Sidecar;
use crate::prometheus::Prometheus;

/// As many connections as the operator's first client needs.
const MOST: (&str, &str) = ("MAX_CONNECTIONS", "1");

async fn watched(sidecar: &Sidecar) -> Prometheus {
    Prometheus::start(&[job("sidecars", &[sidecar.admin.to_string()])], &with_short_windows()).await
}

/// A policy that a proxy refuses, as an older one refuses what it does not know. The rules of a real manager make none.
fn unfit(epoch: u64) -> Policy {
    let lock = Lock { namespace: "ns".into(), name: "NOT A NAME".into(), shard: "s".into() };
    Policy { lock: Some(lock), ..inside(policy(epoch, "slot=1")) }
}

#[tokio::test]
async fn an_alert_fires_for_a_policy_that_a_proxy_refuses() {
    let bed = Bed::new().await;
    let pod = bed.pod("op-0", "node-a").await;
    bed.publish(&[(&pod, "node-a", inside(policy(1, "slot=0")))]);
    let token = pod.token(&bed.client, AUDIENCE).await;
    let sidecar = Sidecar::start(&bed.settings(), &pod, &token).await;
    let prometheus = watched(&sidecar).await;
    let scraped = async || (!prometheus.query("ctrlmesh_proxy_policies_refused_total").is_empty()).then_some(());
    eventually("the proxy to be scraped", scraped).await;
    assert!(!prometheus.fires("CtrlmeshPolicyRefused"));
    bed.publish(&[(&pod, "node-a", unfit(2))]);
    until_fires(&prometheus, "CtrlmeshPolicyRefused", true).await;
    bed.publish(&[(&pod, "node-a", inside(policy(3, "slot=1")))]);
    until("the next policy", || bed.receipt(&pod).is_some_and(|one| one.epoch == 3)).await;
    until_fires(&prometheus, "CtrlmeshPolicyRefused", false).await;
}

#[tokio::test]
async fn an_alert_fires_for_connections_that_a_proxy_refuses() {
    let owned::Bed { client, settings, pods: [pod, _], .. } = &bed("Proxy", 1, None).await;
    let token = pod.token(client, AUDIENCE).await;
    let begun = Sidecar::begin_with(settings, pod, &token, &[MOST]);
    let sidecar = soon("a proxy to serve", begun.ready()).await;
    // Clients that do not try again by themselves.
    let config = operator_config(client, settings, pod, &sidecar);
    let mut config = config.await;
    config.default_retry = false;
    let [first, second] = [config.clone(), config].map(|config| Client::try_from(config).unwrap());
    eventually("the first to be served", async || seen(&first).await).await;
    let informer = watch::<ConfigMap>(&first);
    let prometheus = watched(&sidecar).await;

    let refused = async || assert_eq!(seen(&second).await, None);
    fires_by(&prometheus, "CtrlmeshClientsRefused", refused).await;
    drop((informer, first));
    eventually("the second to be served", async || seen(&second).await).await;
    until_fires(&prometheus, "CtrlmeshClientsRefused", false).await;
}

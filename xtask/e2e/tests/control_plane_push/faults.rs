//! FaultInjections are applied, changed and switched off, and an operator's requests meet them.

use std::time::{Duration, Instant};

use ctrlmesh_common::api::FaultInjection;
use ctrlmesh_testbed::ControlPlane;
use ctrlmesh_testbed::audit_log::AuditEvent;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::bed::{AUDIENCE, eventually};
use crate::follow::operator_config;
use crate::full::OPERATOR;
use crate::guards::Bed;
use crate::process::Sidecar;

const INJECTION: &str = "storm";

/// What the names of the objects begin with that the operator makes.
const PREFIX: &str = "faulty-";

async fn apply(client: &Client, labels: &Value, faults: &Value) {
    let injections: Api<FaultInjection> = Api::namespaced(client.clone(), OPERATOR);
    let every_pod = json!([{"key": "ctrlmesh.kusionstack.io/enable-proxy", "operator": "Exists"}]);
    let injection = json!({
        "apiVersion": "ctrlmesh.kusionstack.io/v1alpha1",
        "kind": "FaultInjection",
        "metadata": {"name": INJECTION, "labels": labels},
        "spec": {"selector": {"matchExpressions": every_pod}, "httpFault": faults},
    });
    let force = PatchParams::apply("test").force();
    injections.patch(INJECTION, &force, &Patch::Apply(&injection)).await.unwrap();
}

/// Waits until the status says this of each condition, by its type and reason.
async fn until_status(client: &Client, expected: [(&str, &str); 2]) {
    let injections: Api<FaultInjection> = Api::namespaced(client.clone(), OPERATOR);
    eventually("the status", async || {
        let status = injections.get(INJECTION).await.ok()?.status?;
        let conditions = status.conditions.iter().map(|one| (one.type_.as_str(), one.reason.as_str()));
        conditions.eq(expected).then_some(())
    })
    .await;
}

fn map(number: usize) -> ConfigMap {
    serde_json::from_value(json!({"metadata": {"name": format!("{PREFIX}{number}")}})).unwrap()
}

/// The status with which a create is answered; 200 where it is made, 0 where the answer is lost.
async fn created(maps: &Api<ConfigMap>, number: usize) -> u16 {
    match maps.create(&PostParams::default(), &map(number)).await {
        Ok(_) => 200,
        Err(kube::Error::Api(status)) => {
            assert!(status.code == 409 || status.message.contains(&format!("{OPERATOR}/{INJECTION}")), "{status:?}");
            status.code
        }
        Err(kube::Error::Service(_)) => 0,
        Err(error) => panic!("{error:?}"),
    }
}

/// How often the API server was asked to make an object.
fn audited(cluster: &ControlPlane, number: usize) -> usize {
    let events = AuditEvent::read(&cluster.audit_log(), "configmaps").unwrap();
    let name = format!("{PREFIX}{number}");
    let made = events.iter().filter(|event| event.verb == "create" && event.object.name == name);
    made.filter(|event| event.stage == "ResponseComplete").count()
}

#[tokio::test]
async fn an_operator_meets_the_faults_that_are_injected() {
    let bed = Bed::new().await;
    let (client, team) = (&bed.client, bed.team.as_str());
    let sidecar = Sidecar::start(&bed.settings, &bed.pod, &bed.pod.token(client, AUDIENCE).await).await;
    let mut config = operator_config(client, &bed.settings, &bed.pod, &sidecar).await;
    config.default_retry = false;
    let operator = Client::try_from(config).unwrap();
    let maps: Api<ConfigMap> = Api::namespaced(operator.clone(), team);
    let secrets: Api<Secret> = Api::namespaced(operator, team);

    let creates = json!({"resources": [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["create"]}]});
    let aborts = json!([{"name": "down", "abort": {"httpStatus": 503}, "match": creates}]);
    apply(client, &json!({}), &aborts).await;
    eventually("the fault", async || (created(&maps, 0).await == 503).then_some(())).await;
    // No proxy serves the other pod.
    until_status(client, [("Accepted", "Valid"), ("Programmed", "Waiting")]).await;
    assert_eq!(created(&maps, 1).await, 503);
    secrets.list(&ListParams::default()).await.expect("another resource is not hit");
    let hits = format!("faults_injected_total{{fault=\"{OPERATOR}/{INJECTION}/down\",effect=\"abort\"}}");
    assert!(sidecar.metric(&format!("ctrlmesh_proxy_{hits}")).await >= 2.0);

    // Off with one command, and on again.
    let off = json!({"faultinjection.ctrlmesh.kusionstack.io/disable": "true"});
    let switched = Instant::now();
    apply(client, &off, &aborts).await;
    eventually("no fault", async || (created(&maps, 1).await == 200).then_some(())).await;
    println!("switched off after {:?}", switched.elapsed());
    until_status(client, [("Accepted", "Disabled"), ("Programmed", "Disabled")]).await;
    assert_eq!(audited(&bed.cluster, 1), 1, "what is aborted never arrives");

    // Carried out, and the answer is lost.
    let lost = json!([{"apiFault": {"type": "AnswerLost"}, "match": creates}]);
    apply(client, &json!({}), &lost).await;
    let mut number = 2;
    eventually("a lost answer", async || {
        number += 1;
        (created(&maps, number).await == 0).then_some(())
    })
    .await;
    maps.get(&format!("{PREFIX}{number}")).await.expect("it was made all the same");

    // A delay, and none for others.
    let slow = json!([{"delay": {"fixedDelay": "2s"}, "match": creates}]);
    apply(client, &json!({}), &slow).await;
    eventually("the delay", async || {
        number += 1;
        let begun = Instant::now();
        let answered = created(&maps, number).await == 200;
        (answered && begun.elapsed() >= Duration::from_secs(2)).then_some(())
    })
    .await;
}

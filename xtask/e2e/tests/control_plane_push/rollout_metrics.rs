//! A manager asks a real Prometheus server, and a trial goes by what that says.

use ctrlmesh_common::api::{CheckVerdict, RolloutStatus, TrialPhase};
use ctrlmesh_testbed::{ControlPlane, Options};
use kube::Client;
use serde_json::{Value, json};

use crate::full::{SYSTEM, divide_with, world};
use crate::process::Replica;
use crate::prometheus::Prometheus;
use crate::rollout_commands::{NEW, OLD, begin_trial, until};

fn metric(prometheus: &Prometheus, name: &str, query: &str, range: &Value) -> Value {
    let provider = json!({"address": format!("http://{}", prometheus.address), "query": query});
    json!({"name": name, "provider": {"prometheus": provider}, "thresholdRange": range})
}

/// A root whose next version shadows a slot, so that nothing has to move before a check.
async fn apply(client: &Client, metrics: &[Value]) {
    let steps = json!([{"slots": 1, "pause": "Manual", "shadow": true}]);
    let analysis = json!({"interval": "10s", "failureLimit": 0, "metrics": metrics});
    let rule = json!({"steps": steps, "analysis": analysis, "onFailure": "Hold"});
    divide_with(client, "Proxy", 2, Some(("rollout", rule))).await;
}

fn last_check(status: &RolloutStatus) -> Option<(CheckVerdict, &str)> {
    status.checks.first().map(|check| (check.verdict, check.message.as_str()))
}

#[tokio::test]
async fn a_trial_goes_by_what_prometheus_says() {
    let prometheus = Prometheus::start(&[], &json!([])).await;
    let cluster = ControlPlane::start(&Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    world(&client).await;
    let replica = Replica::start(&cluster, SYSTEM, &[]).await;
    replica.until_ready().await;
    let at_least_one = json!({"min": "1"});
    let metric_of = |name, query| metric(&prometheus, name, query, &at_least_one);
    let metrics = [
        metric_of("up", r#"sum(up{job!="{{namespace}}"})"#),
        metric_of("revision", r#"vector(1) unless on() up{job="{{revision}}"}"#),
        metric_of("scalar", "scalar(sum(up)) + 1"),
        metric_of("nothing", "sum(there_is_no_such_metric)"),
        metric_of("many", "prometheus_http_requests_total"),
        metric_of("wrong", "sum("),
    ];
    apply(&client, &metrics).await;
    begin_trial(&client).await;
    let status = until(&client, "a check", |status| last_check(status).is_some()).await;
    let (verdict, message) = last_check(&status).unwrap();
    assert_eq!(verdict, CheckVerdict::Inconclusive, "{message}");
    for says in [
        "metric up is 1",
        "metric revision is 1",
        "metric scalar is 2",
        "metric nothing has no value: the query gives no data",
        "metric many has no value: the query gives ",
        "metric wrong has no value: Prometheus refuses the query: invalid parameter \"query\": ",
    ] {
        assert!(message.contains(says), "{says}: {message}");
    }

    apply(&client, &[metric(&prometheus, "up", "sum(up)", &json!({"max": "0.5"}))]).await;
    let status = until(&client, "it to fail", |status| {
        let trial = status.trial.as_ref();
        trial.is_some_and(|trial| trial.revision == NEW && trial.phase == TrialPhase::Held)
    })
    .await;
    let (verdict, message) = last_check(&status).unwrap();
    assert!(verdict == CheckVerdict::Failed && message.contains("metric up is 1, and has to be"), "{message}");
    assert_eq!((status.promoted.as_str(), status.rejected.len()), (OLD, 1));
}

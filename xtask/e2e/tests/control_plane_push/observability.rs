//! Rules and dashboards of `deploy/observability/` work in a real Prometheus.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use ctrlmesh_testbed::{ControlPlane, Options};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ApiResource, DynamicObject, ListParams, Patch, PatchParams, PostParams, ValidationDirective};
use kube::core::GroupVersionKind;
use kube::{Api, Client};
use serde_json::{Value, json};
use tempfile::TempDir;
use xtask::tools;

use crate::bed::eventually;
use crate::full::{SYSTEM, proxies};
use crate::owned::{bed, count, until_said, watch};
use crate::process::get;
use crate::prometheus::{Prometheus, promtool};

const RULES: &str = include_str!("../../../../deploy/observability/rules.yaml");

/// A window for counters, of many scrapes.
const SHORT: &str = "[20s]";

/// Between two writes.
const PAUSE: Duration = Duration::from_millis(200);

const ALERTS: &str = include_str!("../../../../docs/alerts.md");

const MONITORS: &str = include_str!("../../../../deploy/observability/monitors.yaml");

const DASHBOARDS: [&str; 3] = [
    include_str!("../../../../deploy/observability/dashboards/ctrlmesh-operators.json"),
    include_str!("../../../../deploy/observability/dashboards/ctrlmesh-proxies.json"),
    include_str!("../../../../deploy/observability/dashboards/ctrlmesh-managers.json"),
];

/// An alert, a series by which it fires, and one by which it does not: `NAME VALUES`, one value a minute.
const CASES: [(&str, &str, &str); 23] = [
    (
        "CtrlmeshObjectsUnowned",
        r#"ctrlmesh_manager_unowned_objects{root="a/b",reason="unwatched"} 7x120"#,
        r#"ctrlmesh_manager_unowned_objects{root="a/b",reason="moving"} 7x120"#,
    ),
    (
        "CtrlmeshObjectsOwnedTwice",
        r#"ctrlmesh_manager_double_owned_objects{root="a/b"} 1x120"#,
        r#"ctrlmesh_manager_double_owned_objects{root="a/b"} 0x120"#,
    ),
    (
        "CtrlmeshMoveStuck",
        r#"ctrlmesh_manager_problem_conditions{condition="Settled",reason="Moving"} 1x120"#,
        r#"ctrlmesh_manager_problem_conditions{condition="Settled",reason="Moving"} _x115 1 1 1 1 1 1"#,
    ),
    ("CtrlmeshNotFenced", "ctrlmesh_manager_fences_unproved 1x120", "ctrlmesh_manager_fences_unproved 0x120"),
    (
        "CtrlmeshWritesRefused",
        "ctrlmesh_proxy_writes_refused_total 0+3x120",
        "ctrlmesh_proxy_writes_refused_total 0+3x100 300x20",
    ),
    (
        "CtrlmeshShardingConfigDegraded",
        r#"ctrlmesh_manager_problem_conditions{condition="Degraded",reason="PolicyRefused"} 1x120"#,
        r#"ctrlmesh_manager_problem_conditions{condition="Degraded",reason="Labelling"} 1x120"#,
    ),
    (
        "CtrlmeshLabelsUnfinished",
        "ctrlmesh_manager_label_kinds_unfinished 2x120",
        "ctrlmesh_manager_label_kinds_unfinished 0x90 2x30",
    ),
    ("CtrlmeshNoLeader", r#"ctrlmesh_manager_leader{instance="a"} 0x120"#, "ctrlmesh_manager_leader 1x120"),
    (
        "CtrlmeshReviewsFailing",
        r#"ctrlmesh_manager_webhook_reviews_total{path="/inject",outcome="failed"} 0x115 1 1 2 2 3"#,
        r#"ctrlmesh_manager_webhook_reviews_total{path="/inject",outcome="denied"} 0+1x120"#,
    ),
    (
        "CtrlmeshCaNearEnd",
        r#"ctrlmesh_manager_ca_expiry_timestamp_seconds{authority="mesh"} 5184000x120"#,
        r#"ctrlmesh_manager_ca_expiry_timestamp_seconds{authority="mesh"} 7862400x120"#,
    ),
    (
        "CtrlmeshCaNotWritten",
        "ctrlmesh_manager_ca_write_failures_total 0x115 1 2 3 3 3",
        "ctrlmesh_manager_ca_write_failures_total 3x120",
    ),
    (
        "CtrlmeshRolloutFailed",
        r#"ctrlmesh_manager_rollout_versions_total{root="a/b",outcome="failed"} 0x90 1x30"#,
        r#"ctrlmesh_manager_rollout_versions_total{root="a/b",outcome="promoted"} 0x90 1x30"#,
    ),
    (
        "CtrlmeshRolloutWaits",
        r#"ctrlmesh_manager_rollout_phase{root="a/b",phase="held"} 1x120"#,
        r#"ctrlmesh_manager_rollout_phase{root="a/b",phase="analysing"} 1x120"#,
    ),
    (
        "CtrlmeshProxyDown",
        r#"up{job="ctrlmesh-system/ctrlmesh-node",instance="a"} 0x120"#,
        r#"up{job="another",instance="a"} 0x120"#,
    ),
    ("CtrlmeshProxyAway", "ctrlmesh_proxy_manager_connected 0x120", "ctrlmesh_proxy_manager_connected 1x120"),
    ("CtrlmeshPodsWaiting", "ctrlmesh_proxy_pods_waiting 1x120", "ctrlmesh_proxy_pods_waiting 0x118 1 1 1"),
    (
        "CtrlmeshPolicyRefused",
        "ctrlmesh_proxy_policies_refused_total 0x115 1x5",
        "ctrlmesh_proxy_policies_refused_total 1x120",
    ),
    (
        "CtrlmeshWritesUnconfirmed",
        "ctrlmesh_proxy_writes_unconfirmed_total 0+1x120",
        "ctrlmesh_proxy_writes_unconfirmed_total 0+1x60 60x60",
    ),
    (
        "CtrlmeshBreakerOpen",
        r#"ctrlmesh_proxy_guard_open{rule="a/b/c"} 2x120"#,
        r#"ctrlmesh_proxy_guard_open{rule="a/b/c"} 0x120"#,
    ),
    (
        "CtrlmeshOperatorWebhookFailing",
        r#"ctrlmesh_proxy_webhook_requests_total{route="refused",result="error"} 0+1x120"#,
        r#"ctrlmesh_proxy_webhook_requests_total{route="local",result="ok"} 0+1x120"#,
    ),
    (
        "CtrlmeshUpstreamErrors",
        r#"ctrlmesh_proxy_upstream_errors_total{reason="tls"} 0+60x120"#,
        r#"ctrlmesh_proxy_upstream_errors_total{reason="tls"} 0+1x120"#,
    ),
    (
        "CtrlmeshClientsRefused",
        r#"ctrlmesh_proxy_client_errors_total{reason="unread"} 0+1x120"#,
        r#"ctrlmesh_proxy_client_errors_total{reason="slow"} 0+1x120"#,
    ),
    (
        "CtrlmeshProxyBypassed",
        r#"ctrlmesh_proxy_pod_bypass_packets_total{namespace="a",pod="b"} _x118 3x2"#,
        r#"ctrlmesh_proxy_pod_bypass_packets_total{namespace="a",pod="b"} 0+3x60 180x60"#,
    ),
];

/// The groups of the rules, as Prometheus takes them.
fn groups() -> Value {
    let rule: Value = serde_saphyr::from_str(RULES).unwrap();
    rule["spec"]["groups"].clone()
}

/// The same, where each alert fires as soon as what it is for is seen.
pub(crate) fn at_once() -> Value {
    let mut groups = groups();
    rules(&mut groups).for_each(|rule| drop(rule.as_object_mut().unwrap().remove("for")));
    groups
}

/// The same, where counters are compared over seconds instead of minutes: so an alert ends soon after its cause.
pub(crate) fn with_short_windows() -> Value {
    let mut groups = at_once();
    for rule in rules(&mut groups) {
        let query = rule["expr"].as_str().unwrap();
        let query =
            ["[5m]", "[10m]", "[1h]"].into_iter().fold(query.to_owned(), |query, window| query.replace(window, SHORT));
        rule["expr"] = json!(query);
    }
    groups
}

fn rules(groups: &mut Value) -> impl Iterator<Item = &mut Value> {
    groups.as_array_mut().unwrap().iter_mut().flat_map(|group| group["rules"].as_array_mut().unwrap())
}

/// What is to be seen of an alert after two hours of a series.
fn case(alert: &str, series: &str, fires: bool) -> Value {
    let (name, values) = series.split_once(' ').unwrap();
    // Without it `CtrlmeshNoLeader` fires, which says nothing of others.
    let sample = json!({"labels": "{}", "value": u8::from(fires)});
    json!({
        "name": format!("{alert}, {fires}"),
        "interval": "1m",
        "input_series": [{"series": name, "values": values}],
        "promql_expr_test": [{
            "expr": format!("count(ALERTS{{alertname=\"{alert}\",alertstate=\"firing\"}}) or vector(0)"),
            "eval_time": "2h",
            "exp_samples": [sample],
        }],
    })
}

/// The name of an alert, which `docs/alerts.md` describes as it is.
fn documented(rule: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or("at once").to_owned();
    let (name, query, severity) = (text(&rule["alert"]), text(&rule["expr"]), text(&rule["labels"]["severity"]));
    let anchor = name.to_lowercase();
    assert_eq!(text(&rule["annotations"]["runbook"]), format!("docs/alerts.md#{anchor}"));
    let row = format!("| [{name}](#{anchor}) | {} | {severity} |\n", text(&rule["for"]));
    assert!(ALERTS.contains(&row), "{row}");
    assert!(ALERTS.contains(&format!("### {name}\n\n```promql\n{query}\n```\n")), "{name}: {query}");
    name
}

#[test]
fn each_alert_fires_when_it_should_and_only_then() {
    let mut groups = groups();
    let names: BTreeSet<&str> = CASES.iter().map(|(alert, ..)| *alert).collect();
    let written: Vec<String> = rules(&mut groups).map(|rule| documented(rule)).collect();
    assert_eq!(written.iter().map(String::as_str).collect::<BTreeSet<_>>(), names);
    let folder = TempDir::new().unwrap();
    let [file, tests] = ["rules.yml", "tests.yml"].map(|name| folder.path().join(name));
    fs::write(&file, json!({ "groups": groups }).to_string()).unwrap();
    promtool(&["check", "rules", "--lint-fatal", file.to_str().unwrap()], "").unwrap();
    let cases: Vec<Value> = CASES
        .iter()
        .flat_map(|(alert, fires, is_quiet)| [case(alert, fires, true), case(alert, is_quiet, false)])
        .collect();
    let unit = json!({"rule_files": [file], "evaluation_interval": "1m", "tests": cases});
    fs::write(&tests, unit.to_string()).unwrap();
    promtool(&["test", "rules", tests.to_str().unwrap()], "").unwrap();
}

/// The queries of the panels, with what Grafana puts into them.
fn panel_queries() -> Vec<String> {
    let mut queries = Vec::new();
    for dashboard in DASHBOARDS {
        let dashboard: Value = serde_json::from_str(dashboard).unwrap();
        for target in
            dashboard["panels"].as_array().unwrap().iter().flat_map(|panel| panel["targets"].as_array().unwrap())
        {
            let query = target["expr"].as_str().unwrap().replace("$__rate_interval", "10s");
            queries.push(
                ["$namespace", "$shard", "$instance"].iter().fold(query, |query, name| query.replace(name, ".*")),
            );
        }
    }
    assert!(queries.len() > 40 && !queries.iter().any(|query| query.contains('$')), "{queries:?}");
    queries
}

/// The kinds of the Prometheus operator that we have objects of.
async fn define_kinds(client: &Client) {
    let bundle = fs::read_to_string(tools::prometheus_operator().with_file_name("bundle.yaml")).unwrap();
    let documents: Vec<Value> = serde_saphyr::from_multiple(&bundle).unwrap();
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    for name in ["podmonitors.monitoring.coreos.com", "prometheusrules.monitoring.coreos.com"] {
        let definition = documents.iter().find(|one| one["metadata"]["name"] == name).unwrap();
        definitions.create(&PostParams::default(), &serde_json::from_value(definition.clone()).unwrap()).await.unwrap();
    }
}

#[tokio::test]
async fn the_api_server_takes_monitors_and_rules() {
    let cluster = ControlPlane::start(&Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    define_kinds(&client).await;
    let namespace = serde_json::from_value(json!({"metadata": {"name": SYSTEM}})).unwrap();
    Api::<Namespace>::all(client.clone()).create(&PostParams::default(), &namespace).await.unwrap();
    let strict = PatchParams {
        field_validation: Some(ValidationDirective::Strict),
        ..PatchParams::apply("observability").force()
    };
    let objects: Vec<Value> = [RULES, MONITORS].into_iter().flat_map(documents).collect();
    assert_eq!(objects.len(), 4);
    for object in objects {
        let kind = GroupVersionKind::gvk("monitoring.coreos.com", "v1", object["kind"].as_str().unwrap());
        let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), SYSTEM, &ApiResource::from_gvk(&kind));
        let name = object["metadata"]["name"].as_str().unwrap();
        eventually(name, async || api.patch(name, &strict, &Patch::Apply(&object)).await.ok()).await;
    }
}

fn documents(text: &str) -> Vec<Value> {
    serde_saphyr::from_multiple(text).unwrap()
}

pub(crate) fn job(name: &str, targets: &[String]) -> Value {
    json!({
        "job_name": format!("ctrlmesh-system/ctrlmesh-{name}"),
        "honor_labels": true,
        "static_configs": [{"targets": targets}],
    })
}

/// A page of `OpenMetrics`, as promtool reads it: there the family of a counter is called as its samples are.
fn as_text_format(page: &str) -> String {
    let counter = |line: &str| Some(line.strip_prefix("# TYPE ")?.strip_suffix(" counter")?.to_owned());
    let counters: BTreeSet<String> = page.lines().filter_map(counter).collect();
    let renamed = page.lines().map(|line| match line.splitn(4, ' ').collect::<Vec<_>>()[..] {
        ["#", about @ ("HELP" | "TYPE"), name, text] if counters.contains(name) => {
            format!("# {about} {name}_total {text}")
        }
        _ => line.to_owned(),
    });
    renamed.flat_map(|line| [line, "\n".to_owned()]).collect()
}

/// Writes an object that the client is shown, again and again.
async fn write(client: Client) {
    let shown = Api::<ConfigMap>::all(client.clone()).list(&ListParams::default()).await.unwrap().items;
    let object = &shown.first().unwrap().metadata;
    let (namespace, name) = (object.namespace.as_deref().unwrap(), object.name.as_deref().unwrap());
    let maps: Api<ConfigMap> = Api::namespaced(client, namespace);
    for count in 0.. {
        let patch = json!({"data": {"count": count.to_string()}});
        maps.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
        tokio::time::sleep(PAUSE).await;
    }
}

pub(crate) async fn until_fires(prometheus: &Prometheus, alert: &str, fires: bool) {
    let what = format!("{alert}: {fires}");
    eventually(&what, async || (prometheus.fires(alert) == fires).then_some(())).await;
}

#[tokio::test]
async fn prometheus_sees_what_breaks() {
    let mut bed = bed("Proxy", 2, None).await;
    let ([one, mut two], clients) = proxies(&bed.client, &bed.settings, &bed.pods).await;
    let all = count::<ConfigMap>(&bed.client).await;
    let (_first, second) = (watch::<ConfigMap>(&clients[0]), watch::<ConfigMap>(&clients[1]));
    until_said(&bed.replica, "configmaps", 0, None, all).await;
    for page in [bed.replica.metrics, one.admin, two.admin] {
        let page = get(page, "/metrics").await.unwrap();
        let (_head, page) = page.split_once("\r\n\r\n").unwrap();
        promtool(&["check", "metrics"], &as_text_format(page)).unwrap();
    }

    let sidecars = [one.admin.to_string(), two.admin.to_string()];
    let jobs = [job("manager", &[bed.replica.metrics.to_string()]), job("sidecars", &sidecars)];
    let prometheus = Prometheus::start(&jobs, &at_once()).await;
    let writes = tokio::spawn(write(clients[0].clone()));
    for query in panel_queries() {
        let what = format!("data for {query}");
        eventually(&what, async || (!prometheus.query(&query).is_empty()).then_some(())).await;
    }
    writes.abort();
    for alert in ["CtrlmeshObjectsUnowned", "CtrlmeshNoLeader", "CtrlmeshProxyDown", "CtrlmeshProxyAway"] {
        until_fires(&prometheus, alert, false).await;
    }

    // An operator ends its watch, and begins another one.
    drop(second);
    until_fires(&prometheus, "CtrlmeshObjectsUnowned", true).await;
    let _second = watch::<ConfigMap>(&clients[1]);
    until_fires(&prometheus, "CtrlmeshObjectsUnowned", false).await;

    two.kill();
    until_fires(&prometheus, "CtrlmeshProxyDown", true).await;
    bed.replica.program().kill();
    for alert in ["CtrlmeshNoLeader", "CtrlmeshProxyAway"] {
        until_fires(&prometheus, alert, true).await;
    }
}

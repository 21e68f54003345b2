//! Short names, explanations and printed columns of our resources.

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_testbed::{ControlPlane, retry};
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

use super::{MANAGER_STATE, api_of, installed, resource_of};

#[tokio::test]
async fn every_field_is_explained() -> Result<()> {
    let client = installed().await?;
    let document = retry(|| async {
        let request = http::Request::get("/openapi/v3/apis/ctrlmesh.kusionstack.io/v1alpha1").body(Vec::new())?;
        let document: Value = client.request(request).await?;
        // Each definition is published in its own time.
        let kinds = ["ShardingConfig", "CircuitBreaker", "FaultInjection", "ManagerState"];
        let name = |kind: &str| format!("io.kusionstack.ctrlmesh.v1alpha1.{kind}");
        let schemas = &document["components"]["schemas"];
        let published = |kind: &&str| schemas[name(kind)]["properties"]["status"].is_object();
        ensure!(kinds.iter().all(published), "not all kinds are published yet");
        anyhow::Ok(document)
    })
    .await?;
    let mut unexplained = Vec::new();
    for (kind, schema) in document["components"]["schemas"].as_object().context("schemas")? {
        if kind.starts_with("io.kusionstack.ctrlmesh") && !kind.ends_with("List") {
            let properties = &schema["properties"];
            for part in ["spec", "status"] {
                unexplained_fields(&format!("{kind}.{part}"), &properties[part], &mut unexplained);
            }
        }
    }
    assert_eq!(unexplained, Vec::<String>::new());
    Ok(())
}

/// Adds the fields that say nothing, those that may be left out and do not say what that means, and those that do not
/// say how much is allowed.
fn unexplained_fields(path: &str, schema: &Value, found: &mut Vec<String>) {
    let required = schema["required"].as_array();
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        let description = property["description"].as_str().unwrap_or_default().to_lowercase();
        let is_required = required.is_some_and(|names| names.iter().any(|one| one == name));
        let words = ["default", "absent", "empty"];
        if description.is_empty() {
            found.push(format!("{path} has no description"));
        } else if !is_required && !words.iter().any(|word| description.contains(word)) {
            found.push(format!("{path} does not say what it means where it is absent"));
        }
        for bound in ["maxItems", "maximum"].iter().filter_map(|bound| property[bound].as_u64()) {
            // What a field of 32 bits holds is nothing that we allow or refuse.
            let is_said = bound >= u64::from(u32::MAX) || description.contains(&bound.to_string());
            if !is_said {
                found.push(format!("{path} does not say that {bound} is the most"));
            }
        }
        // The conditions are Kubernetes' own.
        if name != "conditions" {
            unexplained_fields(&path, property, found);
            unexplained_fields(&path, &property["items"], found);
        }
    }
}

/// Each resource: its plural, its kind, whether it is in a namespace, and how it is called for short.
const SERVED: [(&str, &str, bool, &[&str]); 4] = [
    ("circuitbreakers", "CircuitBreaker", true, &["cbk"]),
    ("faultinjections", "FaultInjection", true, &["fj"]),
    ("managerstates", "ManagerState", false, &[]),
    ("shardingconfigs", "ShardingConfig", true, &["shard"]),
];

#[tokio::test]
async fn every_kind_is_served_with_its_status_and_its_short_name() -> Result<()> {
    let client = installed().await?;
    let group = "ctrlmesh.kusionstack.io/v1alpha1";
    // Each definition is found in its own time.
    let served = retry(|| async {
        let served = client.list_api_group_resources(group).await?.resources;
        ensure!(served.len() >= 2 * SERVED.len(), "not all is served yet: {served:?}");
        anyhow::Ok(served)
    })
    .await?;
    let mut found: Vec<_> = served
        .into_iter()
        .map(|one| (one.name, one.kind, one.namespaced, one.short_names.unwrap_or_default()))
        .collect();
    found.sort();
    let expected = SERVED.iter().flat_map(|(plural, kind, namespaced, short)| {
        let short: Vec<String> = short.iter().map(ToString::to_string).collect();
        // A subresource is written by its path, and so called nothing else.
        let named = [((*plural).to_owned(), short), (format!("{plural}/status"), Vec::new())];
        named.map(|(name, short)| (name, (*kind).to_owned(), *namespaced, short))
    });
    assert_eq!(found, expected.collect::<Vec<_>>());
    Ok(())
}

/// A resource, and its row in what `kubectl get` prints: each cell with its column, without name and age.
struct Row {
    kind: &'static str,
    manifest: Value,
    status: Value,
    cells: Value,
}

fn rows() -> [Row; 4] {
    let selector = json!({"matchLabels": {"app": "a", "tier": "b"}});
    let condition = |kind: &str, status: &str| json!({"type": kind, "status": status, "reason": "A", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"});
    [
        Row {
            kind: "ManagerState",
            manifest: json!({"metadata": {"name": "ctrlmesh-manager"}}),
            status: json!({"namespace": "ctrlmesh", "updateTimestamp": "2026-01-01T00:00:00Z", "endpoints": [
                {"name": "m-0", "podIP": "10.0.0.1", "leader": false}, {"name": "m-1", "podIP": "10.0.0.2", "leader": true}]}),
            cells: json!([["Namespace", "ctrlmesh"], ["Leader", "m-1"]]),
        },
        Row {
            kind: "CircuitBreaker",
            manifest: json!({"metadata": {"name": "a"}, "spec": {"selector": selector}}),
            status: json!({"conditions": [condition("Open", "True"), condition("Programmed", "False")]}),
            cells: json!([["Selector", r#"{"app":"a","tier":"b"}"#], ["Programmed", "False"], ["Open", "True"]]),
        },
        Row {
            kind: "FaultInjection",
            manifest: json!({"metadata": {"name": "a"}, "spec": {"selector": selector, "disabled": true}}),
            status: json!({"conditions": [condition("Programmed", "True")]}),
            cells: json!([["Disabled", true], ["Selector", r#"{"app":"a","tier":"b"}"#], ["Programmed", "True"]]),
        },
        Row {
            kind: "ShardingConfig",
            manifest: json!({"metadata": {"name": "a"}, "spec": {"root": {
                "prefix": "a", "targetStatefulSet": "a", "auto": {"shardingSize": 2, "everyShardReplicas": 1}}}}),
            status: json!({"isRoot": true, "epoch": 7, "root": {"childShardingConfigs": ["a-1-normal", "a-2-normal"]},
                "conditions": [condition("Degraded", "Unknown"), condition("Accepted", "True"), condition("Programmed", "False"), condition("Settled", "True"), condition("WebhookRouted", "False")]}),
            cells: json!([
                ["Root", true],
                ["Shards", r#"["a-1-normal","a-2-normal"]"#],
                ["Epoch", 7],
                ["Accepted", "True"],
                ["Programmed", "False"],
                ["Settled", "True"],
                ["Degraded", "Unknown"],
                ["Webhook", "False"]
            ]),
        },
    ]
}

#[tokio::test]
async fn what_kubectl_get_shows_is_not_the_first_of_many() -> Result<()> {
    let _alone = MANAGER_STATE.lock().await;
    let client = installed().await?;
    let namespace = ControlPlane::shared().namespace("table").await?;
    for Row { kind, mut manifest, status, cells } in rows() {
        manifest["apiVersion"] = json!("ctrlmesh.kusionstack.io/v1alpha1");
        manifest["kind"] = json!(kind);
        let object: DynamicObject = serde_json::from_value(manifest)?;
        let api = api_of(&client, &namespace, &resource_of(&object)?);
        let made = api.create(&PostParams::default(), &object).await?.name_any();
        let patch = Patch::Merge(json!({"status": status}));
        api.patch_status(&made, &PatchParams::default(), &patch).await?;
        assert_eq!(shown(&client, &api, &made).await?, cells, "{kind}");
        api.delete(&made, &DeleteParams::default()).await?;
    }
    Ok(())
}

/// The row of the object called `name`, each cell with its column, without the first, its name, and the last, its age.
async fn shown(client: &Client, api: &Api<DynamicObject>, name: &str) -> Result<Value> {
    let request = http::Request::get(format!("{}/{name}", api.resource_url()))
        .header("accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
        .body(Vec::new())?;
    let table: Value = client.request(request).await?;
    let columns = table["columnDefinitions"].as_array().context("columns")?;
    let columns = columns.iter().map(|column| column["name"].as_str().unwrap_or_default());
    let cells = table["rows"][0]["cells"].as_array().context("cells")?;
    let row: Vec<_> = columns.zip(cells).collect();
    let [("Name", _), row @ .., ("Age", _)] = row.as_slice() else { anyhow::bail!("{table}") };
    Ok(json!(row))
}

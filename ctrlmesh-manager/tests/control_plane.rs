//! Our resources, judged by a real API server.
#![expect(clippy::large_futures, reason = "one per test, and never moved")]

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::api::{self, ShardingConfig};
use ctrlmesh_manager::validate;
use ctrlmesh_testbed::{ControlPlane, retry};
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, ResourceExt as _};
use serde_json::json;
use tokio::sync::{Mutex, OnceCell};

mod harness;

const ACCEPTED: &str = include_str!("manifests/accepted.yaml");

const REFUSED: &str = include_str!("manifests/refused.yaml");

/// Held by who creates the one `ManagerState` that may be.
static MANAGER_STATE: Mutex<()> = Mutex::const_new(());

/// Installs our definitions, once, and waits until they are served.
async fn installed() -> Result<Client> {
    static INSTALLED: OnceCell<()> = OnceCell::const_new();
    let client = ControlPlane::shared().client().await?;
    INSTALLED.get_or_try_init(|| harness::install(&client)).await?;
    Ok(client)
}

/// The documents of a file, each with the first comment line above it.
fn documents(text: &'static str) -> impl Iterator<Item = (&'static str, DynamicObject)> {
    text.split("\n---\n").map(|document| {
        let comment = document.lines().rfind(|line| line.starts_with("# ")).unwrap_or("# ");
        (
            &comment[2..],
            serde_saphyr::from_str(document).unwrap_or_else(|error| panic!("{document}\n{error}")),
        )
    })
}

fn resource_of(object: &DynamicObject) -> Result<ApiResource> {
    let types = object.types.as_ref().context("apiVersion and kind")?;
    Ok(ApiResource::from_gvk(&GroupVersionKind::gvk(
        "ctrlmesh.kusionstack.io",
        "v1alpha1",
        &types.kind,
    )))
}

fn api_of(client: &Client, namespace: &str, resource: &ApiResource) -> Api<DynamicObject> {
    if resource.kind == "ManagerState" {
        Api::all_with(client.clone(), resource)
    } else {
        Api::namespaced_with(client.clone(), namespace, resource)
    }
}

async fn create(
    client: &Client,
    namespace: &str,
    object: &DynamicObject,
) -> Result<DynamicObject, kube::Error> {
    let resource = resource_of(object).map_err(|error| kube::Error::Service(error.into()))?;
    let api = api_of(client, namespace, &resource);
    // Strict: a field that the schema does not know is an error, and not silently lost.
    let request =
        http::Request::post(format!("{}?dryRun=All&fieldValidation=Strict", api.resource_url()))
            .header("content-type", "application/json")
            .body(serde_json::to_vec(object).map_err(kube::Error::SerdeError)?)
            .map_err(kube::Error::HttpError)?;
    client.request(request).await
}

#[tokio::test]
async fn what_users_of_the_predecessors_have_is_accepted_unchanged() -> Result<()> {
    let _alone = MANAGER_STATE.lock().await;
    let client = installed().await?;
    let namespace = ControlPlane::shared().namespace("accepted").await?;
    for (_, object) in documents(ACCEPTED) {
        let made = create(&client, &namespace, &object).await.with_context(|| object.name_any())?;
        let (given, kept) = (&object.data, &made.data);
        ensure!(
            contains(&kept["spec"], &given["spec"]),
            "{}: {kept} lost some of {given}",
            object.name_any()
        );
    }
    let configs = api::read_sharding_configs(ACCEPTED)?;
    for config in &configs {
        assert_eq!(
            validate::sharding_config(config, &configs, None).errors,
            [],
            "{}",
            config.name_any()
        );
    }
    for (_, object) in documents(ACCEPTED) {
        assert_eq!(admission(&object)?, Vec::<String>::new(), "{}", object.name_any());
    }
    Ok(())
}

/// Whether everything in `part` is in `whole`; defaults may have been added.
fn contains(whole: &serde_json::Value, part: &serde_json::Value) -> bool {
    match (whole, part) {
        (serde_json::Value::Object(whole), serde_json::Value::Object(part)) => part
            .iter()
            .all(|(key, value)| whole.get(key).is_some_and(|inner| contains(inner, value))),
        (serde_json::Value::Array(whole), serde_json::Value::Array(part)) => {
            whole.len() == part.len()
                && whole.iter().zip(part).all(|(whole, part)| contains(whole, part))
        }
        (whole, part) => whole == part || part.is_null(),
    }
}

#[tokio::test]
async fn what_must_not_be_is_refused_by_field_and_with_what_is_allowed() -> Result<()> {
    let client = installed().await?;
    let namespace = ControlPlane::shared().namespace("refused").await?;
    let mut wrong = Vec::new();
    for (comment, object) in documents(REFUSED) {
        let name = object.name_any();
        let (level, expected) = comment.split_once(": ").context("level")?;
        let created = create(&client, &namespace, &object).await;
        let admission = admission(&object)?;
        let message = match (level, created) {
            ("schema", Err(kube::Error::Api(status))) if status.code == 422 => status.message,
            ("admission", Ok(_)) => admission.join("\n"),
            (_, created) => format!("not refused by the {level}: {created:?}"),
        };
        if !expected.split('|').all(|part| message.contains(part)) {
            wrong.push(format!("{name}\n  expected: {expected}\n  message:  {message}"));
        }
        // A webhook must not trust the schema: it refuses all that the schema does.
        if admission.is_empty() {
            wrong.push(format!("{name}: the admission webhook would accept it"));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// What the admission webhook would say against `object`.
fn admission(object: &DynamicObject) -> Result<Vec<String>> {
    let file = ("file".to_owned(), vec![serde_json::to_value(object)?]);
    let verdicts = validate::manifests(&[file]).into_iter();
    let errors = verdicts.filter_map(|verdict| verdict.report).flat_map(|report| report.errors);
    Ok(errors.map(|problem| problem.to_string()).collect())
}

#[tokio::test]
async fn a_selector_cannot_be_changed_added_or_removed() -> Result<()> {
    let client = installed().await?;
    let namespace = ControlPlane::shared().namespace("immutable").await?;
    let configs: Api<ShardingConfig> = Api::namespaced(client, &namespace);
    let shard = made(&configs, SHARD).await?;
    let root = made(&configs, ROOT).await?;
    let changes = [
        (
            &shard,
            json!({"spec": {"selector": {"matchLabels": {"app": "b"}}}}),
            "spec.selector",
            "is immutable",
        ),
        (
            &root,
            json!({"spec": {"selector": {"matchLabels": {"app": "b"}}}}),
            "selector",
            "neither added nor removed",
        ),
        (
            &root,
            json!({"spec": {"root": null, "selector": {"matchLabels": {"app": "b"}}}}),
            "root",
            "neither added nor removed",
        ),
    ];
    for (config, change, field, allowed) in changes {
        let patched = configs
            .patch(&config.name_any(), &PatchParams::default(), &Patch::Merge(&change))
            .await;
        let Err(kube::Error::Api(status)) = patched else {
            anyhow::bail!("{change} was accepted: {patched:?}")
        };
        ensure!(
            status.message.contains(field) && status.message.contains(allowed),
            "{}",
            status.message
        );
        let after = merged(config, &change)?;
        ensure!(
            !validate::change(config, &after).errors.is_empty(),
            "the admission webhook would accept {change}"
        );
    }
    // What is not immutable can be changed.
    let change = json!({"spec": {"limits": [{"selector": {"matchLabels": {"team": "b"}}}]}});
    configs.patch("a", &PatchParams::default(), &Patch::Merge(&change)).await?;
    Ok(())
}

#[tokio::test]
async fn an_ownership_table_has_slots_only() -> Result<()> {
    let client = installed().await?;
    let namespace = ControlPlane::shared().namespace("slots").await?;
    let configs: Api<ShardingConfig> = Api::namespaced(client, &namespace);
    made(&configs, ROOT).await?;
    let write = async |slot: &str| {
        let status = json!({"status": {"ownership": {"epoch": 1, "slots": {slot: "a"}}}});
        configs.patch_status("root", &PatchParams::default(), &Patch::Merge(status)).await
    };
    for slot in ["0", "9", "10", "29", "31"] {
        let config = write(slot).await?;
        let table = config.status.and_then(|status| status.ownership).context("no table")?;
        ensure!(table.slots.contains_key(&slot.parse()?), "{table:?}");
    }
    for slot in ["32", "99", "-1", "07", "x", ""] {
        let Err(kube::Error::Api(status)) = write(slot).await else {
            anyhow::bail!("slot {slot:?} was accepted")
        };
        ensure!(status.message.contains("every key must be a slot"), "{}", status.message);
    }
    Ok(())
}

const SHARD: &str = r#"{"metadata": {"name": "a"}, "spec": {
    "selector": {"matchLabels": {"app": "a"}}, "limits": [{"selector": {"matchLabels": {"team": "a"}}}]}}"#;

const ROOT: &str = r#"{"metadata": {"name": "root"}, "spec": {"root": {
    "prefix": "a", "targetStatefulSet": "a", "auto": {"shardingSize": 2, "everyShardReplicas": 1}}}}"#;

async fn made(configs: &Api<ShardingConfig>, json: &str) -> Result<ShardingConfig> {
    Ok(configs.create(&PostParams::default(), &serde_json::from_str(json)?).await?)
}

fn merged(config: &ShardingConfig, change: &serde_json::Value) -> Result<ShardingConfig> {
    let mut value = serde_json::to_value(config)?;
    for (key, field) in change["spec"].as_object().context("spec")? {
        value["spec"][key] = field.clone();
    }
    Ok(serde_json::from_value(value)?)
}

#[tokio::test]
async fn every_field_is_explained() -> Result<()> {
    let client = installed().await?;
    let document = retry(|| async {
        let request = http::Request::get("/openapi/v3/apis/ctrlmesh.kusionstack.io/v1alpha1")
            .body(Vec::new())?;
        let document = client.request::<serde_json::Value>(request).await?;
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

/// Adds the fields that say nothing, those that may be left out and do not say what that means, and those that do not say
/// how much is allowed.
fn unexplained_fields(path: &str, schema: &serde_json::Value, found: &mut Vec<String>) {
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

#[tokio::test]
async fn what_kubectl_get_shows_is_not_the_first_of_many() -> Result<()> {
    let _alone = MANAGER_STATE.lock().await;
    let client = installed().await?;
    let namespace = ControlPlane::shared().namespace("table").await?;
    let status = json!({"namespace": "ctrlmesh", "updateTimestamp": "2026-01-01T00:00:00Z", "endpoints": [
        {"name": "m-0", "podIP": "10.0.0.1", "leader": false}, {"name": "m-1", "podIP": "10.0.0.2", "leader": true}]});
    let kinds = [
        (
            "ManagerState",
            json!({"metadata": {"name": "ctrlmesh-manager"}}),
            Some(status),
            vec!["ctrlmesh", "m-1"],
        ),
        (
            "CircuitBreaker",
            json!({"metadata": {"name": "a"}, "spec": {"selector": {"matchLabels": {"app": "a", "tier": "b"}},
                "rateLimitings": [{"name": "one", "bucket": {"burst": 1, "interval": "10s", "limit": 1},
                    "triggerPolicy": "Normal", "recoverPolicy": {"type": "SleepingWindow", "sleepingWindowSize": "10m"},
                    "resourceRules": [{"apiGroups": [""], "namespaces": ["*"], "resources": ["pods"], "verbs": ["delete"]}]}]}}),
            None,
            vec![r#"{"app":"a","tier":"b"}"#],
        ),
    ];
    for (kind, mut manifest, status, expected) in kinds {
        manifest["apiVersion"] = json!("ctrlmesh.kusionstack.io/v1alpha1");
        manifest["kind"] = json!(kind);
        let object: DynamicObject = serde_json::from_value(manifest)?;
        let api = api_of(&client, &namespace, &resource_of(&object)?);
        let made = api.create(&PostParams::default(), &object).await?;
        if let Some(status) = status {
            let patch = Patch::Merge(json!({"status": status}));
            api.patch_status(&made.name_any(), &PatchParams::default(), &patch).await?;
        }
        let url = format!("{}/{}", api.resource_url(), made.name_any());
        let request = http::Request::get(url)
            .header("accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
            .body(Vec::new())?;
        let table: serde_json::Value = client.request(request).await?;
        let cells = table["rows"][0]["cells"].as_array().context("cells")?;
        let shown: Vec<&str> = cells.iter().filter_map(|cell| cell.as_str()).collect();
        // Between the name and the age.
        assert_eq!(shown[1..shown.len() - 1], expected, "{table}");
        api.delete(&made.name_any(), &DeleteParams::default()).await?;
    }
    Ok(())
}

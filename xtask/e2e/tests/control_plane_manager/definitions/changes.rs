//! Which changes of an existing resource are allowed.

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_manager::rules::validate;
use ctrlmesh_testbed::ControlPlane;
use kube::ResourceExt as _;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use super::installed;

/// A change that must not be, and what is said of it.
struct Change {
    /// The spec before.
    of: Value,
    /// What is merged into it.
    by: Value,
    /// The field that the API server names, and all that the rule says there.
    rule: (&'static str, &'static str),
    /// What the admission webhook says.
    ours: &'static str,
}

fn shard() -> Value {
    json!({"selector": {"matchLabels": {"app": "a"}}, "limits": [{"selector": {"matchLabels": {"team": "a"}}}]})
}

fn root() -> Value {
    json!({"root": rule()})
}

/// A root that is a shard, too, once it is no root.
fn root_and_shard() -> Value {
    let mut spec = shard();
    spec["root"] = rule();
    spec
}

/// The rule of a root.
fn rule() -> Value {
    json!({"prefix": "a", "targetStatefulSet": "a", "auto": {"shardingSize": 2, "everyShardReplicas": 1}})
}

/// What is immutable by being there or not, of which the API server cannot name the field itself.
const SELECTOR_RULE: (&str, &str) = (
    "spec",
    "selector: is immutable; it can be neither added nor removed. Delete the ShardingConfig and create another",
);
const ROOT_RULE: (&str, &str) =
    ("spec", "root: can be neither added nor removed. Delete the ShardingConfig and create another");

const OUR_SELECTOR: &str = "spec.selector: is immutable. Delete the ShardingConfig and create another";
const OUR_ROOT: &str = "spec.root: can be neither added nor removed. Delete the ShardingConfig and create another";

/// Each breaks one rule, and no other.
fn changes() -> [Change; 5] {
    let other = json!({"matchLabels": {"app": "b"}});
    let changed = ("spec.selector", "is immutable. Delete the ShardingConfig and create another");
    let change = |of: Value, by: Value, rule, ours| Change { of, by, rule, ours };
    [
        change(shard(), json!({"selector": other}), changed, OUR_SELECTOR),
        change(root(), json!({"selector": other}), SELECTOR_RULE, OUR_SELECTOR),
        change(root_and_shard(), json!({"selector": null}), SELECTOR_RULE, OUR_SELECTOR),
        change(shard(), root(), ROOT_RULE, OUR_ROOT),
        change(root_and_shard(), json!({"root": null}), ROOT_RULE, OUR_ROOT),
    ]
}

#[tokio::test]
async fn neither_selector_nor_root_can_be_added_or_removed() -> Result<()> {
    let client = installed().await?;
    let namespace = ControlPlane::shared().namespace("immutable").await?;
    let configs: Api<ShardingConfig> = Api::namespaced(client, &namespace);
    for (at, Change { of, by, rule, ours }) in changes().into_iter().enumerate() {
        let config = made(&configs, &format!("number-{at}"), &of).await?;
        let patch = Patch::Merge(json!({"spec": by}));
        let answer = configs.patch(&config.name_any(), &PatchParams::default(), &patch).await;
        let Err(kube::Error::Api(status)) = answer else { anyhow::bail!("{by} was accepted: {answer:?}") };
        let causes = status.details.as_ref().context("no details")?.causes.iter();
        // Before what the rule says stands the value.
        let end = format!(": {}", rule.1);
        let said: Vec<_> = causes.map(|cause| (cause.field.as_str(), cause.message.ends_with(&end))).collect();
        assert_eq!(said, [(rule.0, true)], "{by}: {status:?}");
        let found = validate::change(&config, &merged(&config, &by)?).errors;
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(found, [ours], "{by}");
    }
    Ok(())
}

#[tokio::test]
async fn what_is_not_immutable_can_be_changed() -> Result<()> {
    let client = installed().await?;
    let namespace = ControlPlane::shared().namespace("mutable").await?;
    let configs: Api<ShardingConfig> = Api::namespaced(client, &namespace);
    let config = made(&configs, "a", &shard()).await?;
    let by =
        json!({"limits": [{"selector": {"matchLabels": {"team": "b"}}}], "webhook": {"certDir": "/certs", "port": 1}});
    let patch = Patch::Merge(json!({"spec": by}));
    let after = configs.patch("a", &PatchParams::default(), &patch).await?;
    ensure!(after.spec != config.spec, "{after:?}");
    assert_eq!(validate::change(&config, &after).errors, []);
    Ok(())
}

#[tokio::test]
async fn an_ownership_table_has_slots_only() -> Result<()> {
    let client = installed().await?;
    let namespace = ControlPlane::shared().namespace("slots").await?;
    let configs: Api<ShardingConfig> = Api::namespaced(client, &namespace);
    made(&configs, "root", &root()).await?;
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
        let Err(kube::Error::Api(status)) = write(slot).await else { anyhow::bail!("slot {slot:?} was accepted") };
        ensure!(status.message.contains("every key must be a slot"), "{}", status.message);
    }
    Ok(())
}

async fn made(configs: &Api<ShardingConfig>, name: &str, spec: &Value) -> Result<ShardingConfig> {
    let config = serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec}))?;
    Ok(configs.create(&PostParams::default(), &config).await?)
}

/// What the API server would make of `config` by merging `change` into its spec.
fn merged(config: &ShardingConfig, change: &Value) -> Result<ShardingConfig> {
    let mut value = serde_json::to_value(config)?;
    for (key, field) in change.as_object().context("a change of fields")? {
        value["spec"][key] = field.clone();
    }
    Ok(serde_json::from_value(value)?)
}

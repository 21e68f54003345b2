//! A cluster that had ctrlmesh before: our webhooks and our managers are there in the middle of a migration.

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::names::OWNERSHIP_FINALIZER;
use ctrlmesh_testbed::retry;
use serde_json::{Value, json};

use crate::bed::{ADMISSION, Bed, collection, items, post};
use crate::harness::NAMESPACE;
use crate::stand_ins::injected;

const GROUP: &str = "ctrlmesh.kusionstack.io";

/// How many webhook configurations of ours there are.
async fn our_webhooks(bed: &Bed) -> Result<usize> {
    let mut count = 0;
    for plural in ["mutatingwebhookconfigurations", "validatingwebhookconfigurations"] {
        count += items(&bed.client, &format!("{ADMISSION}/{plural}/ctrlmesh")).await?.len();
    }
    Ok(count)
}

async fn root(bed: &Bed) -> Result<Value> {
    let path = format!("{}/op-root", collection(GROUP, "shardingconfigs"));
    items(&bed.client, &path).await?.into_iter().next().context("no root")
}

#[tokio::test]
async fn our_webhooks_without_a_manager_do_not_hold_it_up() -> Result<()> {
    let Some(mut bed) = Bed::start("our_webhooks_without_a_manager_do_not_hold_it_up").await? else { return Ok(()) };
    bed.with_rules(GROUP).await?;
    post(&bed.client, "/api/v1/namespaces", json!({"metadata": {"name": NAMESPACE}})).await?;
    bed.install_ours(0).await?;
    bed.install_validation().await?;
    let first = bed.state().await?;
    bed.migrated(&["run", "--until", "labels"]).await?;
    ensure!(our_webhooks(&bed).await? == 0, "nobody answers there");
    bed.migrated(&["undo", "--until", "convert"]).await?;
    bed.migrated(&["run", "--until", "labels"]).await?;
    bed.scale_ours(1).await?;
    bed.migrated(&["run"]).await?;
    ensure!(our_webhooks(&bed).await? == 2, "they are there again");
    ensure!(injected(&bed.client).await? == (3, 3), "and answer");
    bed.migrated(&["undo"]).await?;
    ensure!(our_webhooks(&bed).await? == 0, "a later run makes them again");
    retry(|| async {
        let now = bed.state().await?;
        let differs = first.iter().find(|(name, value)| *name != "labels" && now.get(*name) != Some(*value));
        ensure!(differs.is_none(), "{differs:?}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn an_undo_before_our_managers_gives_fences_back() -> Result<()> {
    let Some(mut bed) = Bed::start("an_undo_before_our_managers_gives_fences_back").await? else { return Ok(()) };
    bed.with_rules(GROUP).await?;
    bed.migrated(&["run", "--until", "labels"]).await?;
    let before = root(&bed).await?["spec"].clone();
    // Our managers run, and step managers was never taken.
    bed.install_ours(1).await?;
    retry(|| async {
        let finalizers = root(&bed).await?["metadata"]["finalizers"].clone();
        let is_fenced = finalizers.as_array().is_some_and(|all| all.contains(&json!(OWNERSHIP_FINALIZER)));
        ensure!(is_fenced, "not fenced yet: {finalizers}");
        Ok(())
    })
    .await?;
    bed.migrated(&["undo", "--until", "labels"]).await?;
    let after = root(&bed).await?;
    ensure!(after["spec"] == before, "{after:#}\n\nbefore: {before:#}");
    ensure!(after["metadata"].get("finalizers").is_none(), "{after:#}");
    bed.migrated(&["undo"]).await?;
    ensure!(bed.migrated(&["undo"]).await?.contains("nothing to take back"), "no step is left behind");
    Ok(())
}

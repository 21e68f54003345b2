//! Shards follow when their root changes or is deleted.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::names::{OWNERSHIP_FINALIZER, label};
use ctrlmesh_testbed::retry;
use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::json;

use super::bed::*;

#[tokio::test]
async fn more_shards_than_pods_are_said_until_there_are_enough() -> Result<()> {
    let place = TestNamespace::new("few").await?;
    place.stateful_set(1).await?;
    place.root(auto(2, 1)).await?;
    let message = place.until_condition("op-root", "Degraded", "True ShardsWithoutPods").await?;
    ensure!(message.contains("op-2-normal"), "{message}");
    let sets: Api<StatefulSet> = Api::namespaced(place.client.clone(), &place.namespace);
    let before = place.status("op-root").await?;
    let more = Patch::Merge(json!({"spec": {"replicas": 2}}));
    sets.patch("op", &PatchParams::default(), &more).await?;
    place.until_condition("op-root", "Degraded", "False AsExpected").await?;
    let after = place.status("op-root").await?;
    ensure!(after.epoch == before.epoch, "no policy has changed");
    ensure!(after.ownership.context("no table")?.epoch > before.ownership.context("no table")?.epoch);
    Ok(())
}

#[tokio::test]
async fn a_root_that_is_deleted_takes_its_shards_with_it() -> Result<()> {
    let place = TestNamespace::new("deleted").await?;
    place.without_fence();
    place.stateful_set(2).await?;
    place.root(auto(2, 1)).await?;
    place.until_shards(&["op-1-normal", "op-2-normal"]).await?;
    retry(|| async {
        let root = place.configs().get("op-root").await?;
        ensure!(root.finalizers().contains(&OWNERSHIP_FINALIZER.to_owned()), "{:?}", root.finalizers());
        Ok(())
    })
    .await?;
    place.configs().delete("op-root", &DeleteParams::default()).await?;
    retry(|| async {
        let left = place.shards().await?;
        ensure!(left.is_empty(), "{:?}", left.keys());
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_root_that_is_switched_off_leaves_its_shards_to_others() -> Result<()> {
    let place = TestNamespace::new("off").await?;
    place.stateful_set(2).await?;
    place.root(auto(2, 1)).await?;
    place.until_shards(&["op-1-normal", "op-2-normal"]).await?;
    let mut rule = auto(3, 1);
    rule["disable"] = json!(true);
    place.root(rule).await?;
    place.until_condition("op-root", "Accepted", "True Disabled").await?;
    // Less than it has: with more it would stand in the way of the other, and nothing would be told.
    let one = json!({"key": label::SHARDING_HASH, "operator": "In", "values": ["0"]});
    let limits = json!([{"selector": {"matchExpressions": [one]}}]);
    let edit = Patch::Merge(json!({"spec": {"limits": limits}}));
    place.configs().patch("op-1-normal", &PatchParams::default(), &edit).await?;
    let epoch = place.status("op-root").await?.epoch;
    // The shard stands by itself now: its epoch goes on from the root's, because what it says is another thing.
    retry(|| async {
        let status = place.status("op-1-normal").await?;
        ensure!(status.epoch > epoch, "{:?}", status.epoch);
        Ok(())
    })
    .await?;
    let left = place.shards().await?;
    ensure!(left.len() == 2 && hashes(&left["op-1-normal"]) == ["0"], "somebody put it back");
    Ok(())
}

#[tokio::test]
async fn a_deployments_pods_have_a_shard_each_also_after_a_rollout() -> Result<()> {
    let place = TestNamespace::new("deployment").await?;
    let mut rule = auto(3, 1);
    rule["targetDeployment"] = json!("op");
    place.root(rule).await?;
    let deployment: Deployment = serde_json::from_value(json!({
        "metadata": {"name": "op"},
        "spec": {
            "replicas": 3, "selector": {"matchLabels": {"app": "op"}}, "template": template("1"),
            "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 3}},
        },
    }))?;
    let deployments: Api<Deployment> = Api::namespaced(place.client.clone(), &place.namespace);
    deployments.create(&PostParams::default(), &deployment).await?;
    let shards = |pods: &BTreeMap<String, String>| pods.values().cloned().collect::<BTreeSet<_>>();
    // Of two that are admitted at the same moment, the leader may have to move one.
    let first = retry(|| async {
        let first = place.until_labelled(3).await?;
        ensure!(shards(&first).len() == 3, "{first:?}");
        Ok(first)
    })
    .await?;
    let next = Patch::Merge(json!({"spec": {"template": template("2")}}));
    deployments.patch("op", &PatchParams::default(), &next).await?;
    retry(|| async {
        let second = place.until_labelled(3).await?;
        ensure!(second.keys().all(|pod| !first.contains_key(pod)), "not yet: {second:?}");
        ensure!(shards(&second) == shards(&first), "{second:?}");
        Ok(())
    })
    .await?;
    place.until_condition("op-root", "Degraded", "False AsExpected").await?;
    Ok(())
}

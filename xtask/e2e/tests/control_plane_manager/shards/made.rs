//! The shards that a root makes, and keeps.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::label;
use ctrlmesh_manager::rules::pod::PodName;
use ctrlmesh_manager::status::compute::Contact;
use ctrlmesh_runtime::sync::lock;
use ctrlmesh_testbed::retry;
use jiff::Timestamp;
use k8s_openapi::api::events::v1::Event;
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::json;

use super::bed::*;

#[tokio::test]
async fn a_root_makes_balanced_shards_and_says_who_owns_what() -> Result<()> {
    let place = TestNamespace::new("auto").await?;
    place.stateful_set(3).await?;
    let root = place.root(auto(3, 1)).await?;
    let shards = place.until_shards(&["op-1-normal", "op-2-normal", "op-3-normal"]).await?;
    let mut all = BTreeSet::new();
    for shard in shards.values() {
        let hashes = hashes(shard);
        ensure!((10..=11).contains(&hashes.len()), "{hashes:?}");
        all.extend(hashes);
        let owner = &shard.owner_references()[0];
        ensure!(Some(&owner.uid) == root.metadata.uid.as_ref() && owner.controller == Some(true));
        ensure!(shard.labels()[label::AUTO_SHARDING_ROOT] == "op-root");
    }
    ensure!(all.len() == 32, "{all:?}");
    let labelled = place.until_labelled(3).await?;
    let expected = [("op-0", "op-1-normal"), ("op-1", "op-2-normal"), ("op-2", "op-3-normal")];
    ensure!(labelled == expected.map(|(pod, shard)| (pod.to_owned(), shard.to_owned())).into());
    place.until_condition("op-root", "Accepted", "True Valid").await?;
    place.until_condition("op-root", "Degraded", "False AsExpected").await?;
    place.until_condition("op-root", "Programmed", "False Waiting").await?;
    let status = place.status("op-root").await?;
    let table = status.ownership.context("no table")?;
    ensure!(table.is_total() && table.pods == labelled, "{table:?}");
    ensure!(status.observed_generation == root.metadata.generation && status.is_root == Some(true));
    // What proxies say comes to stand in the status.
    let (epoch, at) = (u64::try_from(status.epoch.context("no epoch")?)?, Timestamp::now());
    let name = |pod: &String| PodName { namespace: place.namespace.clone(), name: pod.clone() };
    // It is written before the manager's watch shows it.
    let policies = retry(|| async {
        let plan = PLANS.get().context("no manager")?.borrow().clone().context("no plan")?;
        ensure!(labelled.keys().all(|pod| plan.sendable().contains_key(&name(pod))), "not yet");
        Ok(plan.sendable().clone())
    })
    .await?;
    let contacts = labelled.keys().map(|pod| {
        let digest = policies[&name(pod)].digest();
        (name(pod), Contact { epoch, digest, refused: None, connected: true, at, webhook: None })
    });
    lock(&CONTACTS).extend(contacts);
    let message = place.until_condition("op-root", "Programmed", "True Acknowledged").await?;
    ensure!(message.contains("3 of 3"), "{message}");
    place.until_condition("op-2-normal", "Programmed", "True Acknowledged").await?;
    let shard = place.status("op-2-normal").await?;
    ensure!(shard.pods.len() == 1 && shard.pods[0].epoch == status.epoch, "{:?}", shard.pods);
    ensure!(shard.epoch == status.epoch && shard.pods[0].last_contact.is_some());
    Ok(())
}

#[tokio::test]
async fn a_changed_root_changes_its_shards_in_place() -> Result<()> {
    let place = TestNamespace::new("change").await?;
    place.stateful_set(3).await?;
    // No pod is ever ready here, and a fenced share would wait for one.
    let mut rule = auto(2, 1);
    rule["fence"] = json!("Off");
    place.root(rule.clone()).await?;
    let two = place.until_shards(&["op-1-normal", "op-2-normal"]).await?;
    let before = place.status("op-root").await?;
    rule["canary"] = json!({"replicas": 1, "inShardHash": ["7"], "inNamespaces": ["shop"]});
    rule["resourceSelector"] = json!([{"relateResources": [{"apiGroups": [""], "resources": ["configmaps"]}]}]);
    place.root(rule).await?;
    let three = place.until_shards(&["op-0-canary", "op-1-normal", "op-2-normal"]).await?;
    for (name, uid) in uids(&two) {
        ensure!(uids(&three)[&name] == uid, "{name} was made anew");
    }
    let changed = retry(|| async {
        let shards = place.shards().await?;
        ensure!(shards.values().all(|shard| shard.spec.limits[0].resources().len() == 1));
        ensure!(!hashes(&shards["op-1-normal"]).contains(&"7".to_owned()));
        Ok(shards)
    })
    .await?;
    ensure!(hashes(&changed["op-0-canary"]).is_empty(), "it asks by namespace");
    // Those of before have labels, too.
    retry(|| async {
        let labelled = place.until_labelled(3).await?;
        ensure!(labelled["op-0"] == "op-0-canary" && labelled["op-2"] == "op-2-normal");
        Ok(())
    })
    .await?;
    retry(|| async {
        let after = place.status("op-root").await?;
        ensure!(after.epoch > before.epoch, "{:?} {:?}", after.epoch, before.epoch);
        let table = after.ownership.context("no table")?;
        ensure!(table.namespaces.get("shop").map(String::as_str) == Some("op-0-canary"), "{table:?}");
        Ok(())
    })
    .await?;
    place.root(auto(1, 3)).await?;
    place.until_shards(&["op-1-normal"]).await?;
    // None of the writes waits for another.
    retry(|| async {
        let one = &place.shards().await?["op-1-normal"];
        ensure!(one.uid() == two["op-1-normal"].uid());
        ensure!(hashes(one).len() == 32, "{:?}", hashes(one));
        Ok(())
    })
    .await
}

#[tokio::test]
async fn shards_by_hand_have_the_hashes_that_are_written() -> Result<()> {
    let place = TestNamespace::new("manual").await?;
    place.stateful_set(2).await?;
    let numbers = |range: std::ops::Range<u8>| range.map(|hash| hash.to_string()).collect::<Vec<_>>();
    let rule = json!({"manual": [{"id": 1, "hashes": numbers(0..5)}, {"id": 7, "hashes": numbers(5..32)}]});
    place.root(rule).await?;
    let shards = place.until_shards(&["op-1-normal", "op-7-normal"]).await?;
    ensure!(hashes(&shards["op-1-normal"]) == numbers(0..5));
    ensure!(hashes(&shards["op-7-normal"]).len() == 27);
    // Not valid for the manager, though the schema lets it pass: what is there stays.
    let pods = json!({"relateResources": [{"apiGroups": [""], "resources": ["pods"]}]});
    let mut rule = auto(2, 1);
    rule["resourceSelector"] = json!([pods, pods]);
    place.root(rule).await?;
    let message = place.until_condition("op-root", "Accepted", "False Invalid").await?;
    ensure!(message.contains("covers pods a second time"), "{message}");
    ensure!(uids(&place.shards().await?) == uids(&shards));
    let events: Api<Event> = Api::namespaced(place.client.clone(), &place.namespace);
    retry(|| async {
        let events = events.list(&ListParams::default()).await?;
        let told =
            |event: &Event| event.reason.as_deref() == Some("Invalid") && event.note.as_deref() == Some(&message);
        ensure!(events.iter().any(told), "no event");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn what_is_edited_by_hand_is_put_back() -> Result<()> {
    let place = TestNamespace::new("edited").await?;
    place.stateful_set(2).await?;
    place.root(auto(2, 1)).await?;
    let shards = place.until_shards(&["op-1-normal", "op-2-normal"]).await?;
    let edit = json!({
        "metadata": {"labels": {label::AUTO_SHARDING_ROOT: null, "mine": "stays"}},
        "spec": {
            "limits": [{"selector": {"matchLabels": {"team": "a"}}}],
            "webhook": {"certDir": "/tmp", "port": 1},
            "controller": {"leaderElectionName": "another"},
        },
    });
    place.configs().patch("op-1-normal", &PatchParams::default(), &Patch::Merge(edit)).await?;
    place.configs().delete("op-2-normal", &DeleteParams::default()).await?;
    let after = retry(|| async {
        let after = place.shards().await?;
        ensure!(after.len() == 2, "{:?}", after.keys());
        for (name, shard) in &after {
            ensure!(shard.spec == shards[name].spec, "{name}: {:?}", shard.spec);
            ensure!(shard.labels().get(label::AUTO_SHARDING_ROOT).is_some(), "{name}");
        }
        Ok(after)
    })
    .await?;
    ensure!(after["op-1-normal"].uid() == shards["op-1-normal"].uid());
    ensure!(after["op-1-normal"].labels()["mine"] == "stays", "what is not ours is left alone");
    Ok(())
}

#[tokio::test]
async fn a_shard_of_somebody_else_is_not_touched_and_said() -> Result<()> {
    let place = TestNamespace::new("foreign").await?;
    place.stateful_set(2).await?;
    let foreign: ShardingConfig = serde_json::from_value(json!({
        "metadata": {"name": "op-1-normal"},
        "spec": {"selector": {"matchLabels": {"a": "b"}}, "limits": [{"selector": {"matchLabels": {"team": "a"}}}]},
    }))?;
    let foreign = place.configs().create(&PostParams::default(), &foreign).await?;
    place.root(auto(2, 1)).await?;
    let message = place.until_condition("op-root", "Degraded", "True Conflict").await?;
    ensure!(message.contains("op-1-normal"), "{message}");
    let there = place.configs().get("op-1-normal").await?;
    ensure!(there.spec == foreign.spec && there.owner_references().is_empty());
    Ok(())
}

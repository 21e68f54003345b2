//! Relabels a cluster that was labelled with other keys and another hash.

use std::time::Duration;

use crate::harness::running::Manager;
use crate::harness::{self, NAMESPACE, create};
use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::api::{ManagerState, ShardingConfig};
use ctrlmesh_common::names::label;
use ctrlmesh_common::slots::NamespaceHash;
use ctrlmesh_testbed::{ControlPlane, Options, retry};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use k8s_openapi::api::events::v1::Event;
use kube::api::{Api, DeleteParams, ListParams};
use kube::{Client, ResourceExt as _};
use serde_json::json;

/// Namespaces, and objects in each.
const OBJECTS: (usize, usize) = (6, 20);

/// What the predecessors call the label of the slot.
const KEY: &str = "ctrlmesh.kusionstack.io/shard-hash";

fn space(number: usize) -> String {
    format!("moved-{number}")
}

async fn world(client: &Client) -> Result<()> {
    harness::prepare(client, "groupVersionKinds: {v1: [ConfigMap]}").await?;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    for number in 0..OBJECTS.0 {
        create(&namespaces, json!({"metadata": {"name": space(number)}})).await?;
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &space(number));
        for object in 0..OBJECTS.1 {
            create(&maps, json!({"metadata": {"name": format!("c-{object}")}})).await?;
        }
    }
    let configs: Api<ShardingConfig> = Api::namespaced(client.clone(), &space(0));
    let shard = json!({"metadata": {"name": "shard"}, "spec": {"selector": {"matchLabels": {"app": "op"}},
        "limits": [{"selector": {"matchLabels": {"team": "a"}}}]}});
    create(&configs, shard).await?;
    Ok(())
}

/// Kinds whose objects lack labels still.
const UNFINISHED: &str = "ctrlmesh_manager_label_kinds_unfinished ";

/// Whether objects are given other labels besides.
const LABELLING: &str = "ctrlmesh_manager_label_migration{stage=\"labelling\"}";

/// Waits until every object has under `key` what `hash` makes of its namespace.
async fn until_labelled(client: &Client, key: &str, hash: NamespaceHash) -> Result<Vec<ConfigMap>> {
    retry(|| async {
        let mut all = Vec::new();
        for number in 0..OBJECTS.0 {
            let (name, slot) = (space(number), hash.slot(&space(number)).to_string());
            let namespaces: Api<Namespace> = Api::all(client.clone());
            let namespace = namespaces.get(&name).await?;
            ensure!(namespace.labels().get(key) == Some(&slot), "{name}: {:?}", namespace.labels());
            let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &name);
            let list = maps.list(&ListParams::default()).await?;
            let wrong = list.iter().find(|map| map.labels().get(key) != Some(&slot));
            ensure!(wrong.is_none(), "{wrong:?}");
            all.extend(list);
        }
        Ok(all)
    })
    .await
}

/// Waits until the manager counts something under `gauge`.
async fn until_counted(manager: &Manager, gauge: &str) -> Result<()> {
    retry(|| async {
        ensure!(manager.counted(gauge).await? > 0, "{gauge}: 0\n{}", manager.log());
        Ok(())
    })
    .await
}

/// Waits until the manager says that it is done.
async fn until_nothing_is_left(manager: &Manager) -> Result<()> {
    retry(|| async {
        for gauge in [UNFINISHED, "ctrlmesh_manager_label_migration"] {
            let now = manager.counted(gauge).await?;
            ensure!(now == 0, "{gauge}: {now}");
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn new_keys_and_a_new_hash_take_over_with_progress_reported() -> Result<()> {
    let plane = &ControlPlane::start(&Options::default())?;
    let client = plane.client().await?;
    world(&client).await?;
    // As the predecessors have it.
    let older = ["--sharding-hash", "kusionstack", "--label-sharding-hash", KEY];
    let manager = Manager::start(plane, NAMESPACE, &[&older[..], &["--label-rate", "1000"]].concat())?;
    let before = until_labelled(&client, KEY, NamespaceHash::Kusionstack).await.with_context(|| manager.log())?;
    // Whoever comes after this one, and was told otherwise, knows what is there.
    let states: Api<ManagerState> = Api::all(client.clone());
    let written = states.get("ctrlmesh-manager").await?.status.and_then(|status| status.labels);
    ensure!(written.is_some_and(|labels| labels.in_force.sharding_hash == KEY), "not written");
    harness::until_degraded(&client, &space(0), "AsExpected", "").await?;
    manager.kill()?;
    // So slowly that one can look on.
    let manager = Manager::start(plane, NAMESPACE, &["--label-rate", "20"])?;
    let said = async {
        harness::until_degraded(&client, &space(0), "Relabelling", "beside those that shards go by")
            .await
            .with_context(|| manager.log())
    };
    // They come in no order, and none of them stays.
    tokio::try_join!(said, until_counted(&manager, UNFINISHED), until_counted(&manager, LABELLING))?;
    until_labelled(&client, label::SHARDING_HASH, NamespaceHash::default()).await?;
    // The label with the namespace is called as before, and says another slot of what is of cluster scope: twice.
    harness::until_degraded(&client, &space(0), "Relabelling", "").await?;
    // The second time is waited for: watches may be older than the labels.
    tokio::time::sleep(Duration::from_secs(90)).await;
    harness::until_degraded(&client, &space(0), "AsExpected", "").await?;
    until_nothing_is_left(&manager).await?;
    let after = until_labelled(&client, label::SHARDING_HASH, NamespaceHash::default()).await?;
    let repairs = "ctrlmesh_manager_label_repairs_total{kind=\"configmaps./v1\",outcome=\"done\"}";
    let all = u64::try_from(OBJECTS.0 * OBJECTS.1)?;
    ensure!(manager.counted(repairs).await? >= all, "{repairs}");
    // They are the same objects, and have no other labels of ours.
    let keys = [label::SHARDING_HASH, label::NAMESPACE, label::CONTROL];
    let same = |(old, new): (&ConfigMap, &ConfigMap)| {
        old.uid() == new.uid() && new.labels().keys().all(|key| keys.contains(&key.as_str()))
    };
    let wrong = before.iter().zip(&after).find(|pair| !same(*pair));
    ensure!(before.len() == after.len() && wrong.is_none(), "{wrong:?}");
    manager.kill()?;
    kept(plane, &client).await?;
    let events: Api<Event> = Api::namespaced(client, NAMESPACE);
    retry(|| async {
        let list = events.list(&ListParams::default()).await?;
        let labelled = list.iter().any(|event| event.reason.as_deref() == Some("Labelled"));
        ensure!(labelled, "no event");
        Ok(())
    })
    .await
}

/// Former labels stay where they are to be kept.
async fn kept(plane: &ControlPlane, client: &Client) -> Result<()> {
    let told = ["--label-sharding-hash", KEY, "--keep-former-labels", "--label-rate", "1000"];
    let manager = Manager::start(plane, NAMESPACE, &told)?;
    harness::until_degraded(client, &space(0), "Relabelling", "--keep-former-labels")
        .await
        .with_context(|| manager.log())?;
    until_counted(&manager, "ctrlmesh_manager_label_migration{stage=\"leaving\"}").await?;
    for key in [KEY, label::SHARDING_HASH] {
        until_labelled(client, key, NamespaceHash::default()).await?;
    }
    // Whoever removes what is in force takes nothing from the managers, who write it again.
    let managers: Api<ManagerState> = Api::all(client.clone());
    let labels = |state: ManagerState| state.status.and_then(|status| status.labels);
    let before = labels(managers.get("ctrlmesh-manager").await?);
    ensure!(before.as_ref().is_some_and(|labels| labels.former.is_some()), "{before:?}");
    managers.delete("ctrlmesh-manager", &DeleteParams::default()).await?;
    retry(|| async {
        let after = labels(managers.get("ctrlmesh-manager").await?);
        ensure!(after == before, "{after:?}");
        Ok(())
    })
    .await
}

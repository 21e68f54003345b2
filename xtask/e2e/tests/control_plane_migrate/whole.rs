//! The whole way over, each step back, and the whole way back.

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::names::FINALIZER;
use ctrlmesh_testbed::retry;
use serde_json::{Value, json};

use crate::bed::{ADMISSION, Bed, collection, items, merge, post, uids};
use crate::predecessor::{KEY, NAMESPACE, NEIGHBOUR, OPERATOR};
use crate::stand_ins::injected;

const GROUP: &str = "ctrlmesh.kusionstack.io";

/// Steps that need no manager of ours.
const BEFORE: [&str; 7] = ["guard", "webhooks", "stop", "convert", "finalizers", "adopt", "labels"];

async fn children(bed: &Bed) -> Result<Vec<Value>> {
    let all = items(&bed.client, &collection(GROUP, "shardingconfigs")).await?;
    Ok(all.into_iter().filter(|one| one.pointer("/spec/root").is_none()).collect())
}

/// Nothing has the predecessor's finalizer, and each child has one owner, which is there.
async fn nothing_is_left(bed: &Bed) -> Result<()> {
    let mut roots = Vec::new();
    for plural in ["shardingconfigs", "circuitbreakers", "faultinjections"] {
        for object in items(&bed.client, &collection(GROUP, plural)).await? {
            let finalizers = &object["metadata"]["finalizers"];
            ensure!(!finalizers.as_array().is_some_and(|all| all.contains(&json!(FINALIZER))), "{object}");
            if object.pointer("/spec/root").is_some() {
                roots.push(object["metadata"]["uid"].clone());
            }
        }
    }
    for child in children(bed).await? {
        let owners = child["metadata"]["ownerReferences"].as_array().context("no owner")?;
        ensure!(owners.len() == 1 && roots.contains(&owners[0]["uid"]), "{child}");
    }
    Ok(())
}

/// A pod in the operator's namespace, in a dry run.
pub(crate) async fn try_pod(bed: &Bed, label: &str) -> Result<()> {
    let pod = json!({"metadata": {"generateName": "late-", "labels": {label: "true"}},
        "spec": {"automountServiceAccountToken": false, "containers": [{"name": "c", "image": "none"}]}});
    post(&bed.client, &format!("/api/v1/namespaces/{OPERATOR}/pods?dryRun=All"), pod).await
}

/// No pod with the trigger is made while nobody would inject it, from the moment on that the command has returned.
async fn pods_are_refused(bed: &Bed) -> Result<()> {
    match try_pod(bed, "ctrlmesh.kusionstack.io/enable-proxy").await {
        Ok(()) => anyhow::bail!("it was let in"),
        Err(error) if format!("{error:#}").contains("a migration to ctrlmesh is under way") => {}
        Err(error) => return Err(error),
    }
    try_pod(bed, "other").await
}

async fn labels_in_force(bed: &Bed) -> Result<Value> {
    let states = items(&bed.client, "/apis/ctrlmesh.kusionstack.io/v1alpha1/managerstates").await?;
    Ok(states.first().context("no ManagerState")?["status"]["labels"].clone())
}

#[tokio::test]
async fn a_cluster_comes_over_step_by_step_and_goes_back() -> Result<()> {
    let Some(mut bed) = Bed::start("a_cluster_comes_over_step_by_step_and_goes_back").await? else { return Ok(()) };
    bed.with_rules(GROUP).await?;
    let first = bed.state().await?;
    let plan = bed.migrated(&["plan"]).await?;
    for named in ["env-sync", "log-path", "enable-iptables", "fake-kubeconfig", "delete ShardingConfig ops/op-1-normal"]
    {
        ensure!(plan.contains(named), "{named}: {plan}");
    }
    let document: Value = serde_json::from_str(&bed.migrated(&["plan", "-o", "json"]).await?)?;
    ensure!(document["kind"] == "MigrationPlan" && document["steps"].as_array().is_some_and(|all| all.len() == 10));
    bed.migrated(&["run", "--dry-run"]).await?;
    ensure!(bed.state().await? == first, "a plan changes nothing");
    for step in BEFORE {
        let before = bed.state().await?;
        bed.migrated(&["run", "--until", step]).await.with_context(|| step)?;
        let after = bed.state().await?;
        ensure!(step == "convert" || before != after, "{step} changes nothing");
        bed.migrated(&["undo", "--until", step]).await.with_context(|| format!("undo {step}"))?;
        let undone = bed.state().await?;
        ensure!(undone == before, "{step}: {undone:#?}\n\nbefore: {before:#?}");
        bed.migrated(&["run", "--until", step]).await.with_context(|| format!("{step} again"))?;
        ensure!(step == "convert" || bed.state().await? == after, "{step} again");
    }
    pods_are_refused(&bed).await?;
    nothing_is_left(&bed).await?;
    let neighbours = format!("{ADMISSION}/validatingwebhookconfigurations/{NEIGHBOUR}");
    ensure!(!items(&bed.client, &neighbours).await?.is_empty(), "a neighbour's webhooks stay");
    over(&mut bed).await?;
    back(&bed, &first).await
}

/// Our managers take over, and the operator's pods are enrolled.
async fn over(bed: &mut Bed) -> Result<()> {
    bed.install_ours(1).await?;
    let pods = uids(&bed.client).await?;
    for _ in 0..2 {
        bed.migrated(&["run", "--until", "managers"]).await?;
        bed.migrated(&["undo", "--until", "managers"]).await?;
        pods_are_refused(bed).await?;
    }
    ensure!(uids(&bed.client).await? == pods, "the operator's pods run on until they are enrolled");
    bed.migrated(&["run"]).await?;
    let now = uids(&bed.client).await?;
    ensure!(now.len() == 3 && now.values().all(|uid| !pods.values().any(|old| old == uid)), "{now:?}");
    ensure!(injected(&bed.client).await? == (3, 3), "our webhook lets all of them in");
    bed.migrated(&["undo", "--until", "enrol"]).await?;
    ensure!(injected(&bed.client).await? == (0, 3), "pods come without a proxy");
    bed.migrated(&["run"]).await?;
    ensure!(injected(&bed.client).await? == (3, 3), "a run that follows an undo enrols again");
    let labels = labels_in_force(bed).await?;
    ensure!(labels["inForce"]["shardingHash"] == KEY && labels["inForce"]["hash"] == "kusionstack", "{labels}");
    ensure!(labels.get("next").is_none(), "nothing is relabelled: {labels}");
    nothing_is_left(bed).await
}

/// Everything is taken back, then done again to the end.
async fn back(bed: &Bed, first: &std::collections::BTreeMap<String, Value>) -> Result<()> {
    bed.migrated(&["undo"]).await?;
    // The predecessor's stand-in holds its finalizers again.
    retry(|| async {
        let now = bed.state().await?;
        let of_rules = |(name, _): &(&String, &Value)| *name != "labels";
        let (now, first): (Vec<_>, Vec<_>) =
            (now.iter().filter(of_rules).collect(), first.iter().filter(of_rules).collect());
        ensure!(now == first, "{now:#?}\n\nfirst: {first:#?}");
        Ok(())
    })
    .await?;
    ensure!(bed.migrated(&["undo"]).await?.contains("nothing to take back"));
    bed.migrated(&["run"]).await?;
    bed.migrated(&["run", "--until", "finish"]).await?;
    nothing_is_left(bed).await?;
    let gone = [
        format!("/apis/apps/v1/namespaces/{NAMESPACE}/deployments/ctrlmesh"),
        format!("/api/v1/namespaces/{OPERATOR}/configmaps/fake-kubeconfig"),
    ];
    for path in gone {
        ensure!(items(&bed.client, &path).await?.is_empty(), "{path} is left");
    }
    let state = bed.state().await?;
    bed.migrated(&["run", "--until", "finish"]).await?;
    ensure!(bed.migrated(&["undo"]).await?.contains("nothing to take back"));
    ensure!(bed.state().await? == state, "what is finished neither begins anew nor goes back");
    // What nobody protects any more goes when it is told to.
    let root = format!("{}/op-root", collection(GROUP, "shardingconfigs"));
    merge(&bed.client, &root, &json!({"metadata": {"annotations": {"ctrlmesh.kusionstack.io/skip-handback": "true"}}}))
        .await?;
    let request = http::Request::delete(&root).body(Vec::new())?;
    bed.client.request::<Value>(request).await?;
    retry(|| async {
        ensure!(items(&bed.client, &root).await?.is_empty() && children(bed).await?.is_empty(), "the root is left");
        Ok(())
    })
    .await
}

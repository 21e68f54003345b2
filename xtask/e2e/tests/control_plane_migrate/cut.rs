//! A run that ends in the middle of a step.

use anyhow::{Result, ensure};
use http::Request;
use serde_json::{Value, json};

use crate::bed::{ADMISSION, Bed, collection, items, post};

const GROUP: &str = "ctrlmesh.kusionstack.io";

/// Refuses a child, so that the step that makes it ends between two changes.
async fn refuse_second_child(bed: &Bed) -> Result<()> {
    let rule =
        json!({"apiGroups": [GROUP], "apiVersions": ["*"], "operations": ["CREATE"], "resources": ["shardingconfigs"]});
    let policy = json!({"metadata": {"name": "cut"}, "spec": {"failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [rule]},
        "validations": [{"expression": "object.metadata.name != 'op-1-normal'", "message": "cut"}]}});
    post(&bed.client, &format!("{ADMISSION}/validatingadmissionpolicies"), policy).await?;
    let binding = json!({"metadata": {"name": "cut"}, "spec": {"policyName": "cut", "validationActions": ["Deny"]}});
    post(&bed.client, &format!("{ADMISSION}/validatingadmissionpolicybindings"), binding).await?;
    let probe = json!({"metadata": {"name": "op-1-normal"}, "spec": {"selector": {"matchLabels": {"a": "b"}},
        "limits": [{"selector": {"matchLabels": {"a": "b"}}}]},
        "apiVersion": format!("{GROUP}/v1alpha1"), "kind": "ShardingConfig"});
    let path = "/apis/ctrlmesh.kusionstack.io/v1alpha1/namespaces/default/shardingconfigs?dryRun=All";
    ctrlmesh_testbed::retry(|| async {
        match post(&bed.client, path, probe.clone()).await {
            Err(error) if format!("{error:#}").contains("cut") => Ok(()),
            other => Err(anyhow::anyhow!("{other:?}")),
        }
    })
    .await
}

async fn allow_second_child(bed: &Bed) -> Result<()> {
    for plural in ["validatingadmissionpolicybindings", "validatingadmissionpolicies"] {
        let request = Request::delete(format!("{ADMISSION}/{plural}/cut")).body(Vec::new())?;
        bed.client.request::<Value>(request).await?;
    }
    Ok(())
}

async fn names(bed: &Bed) -> Result<Vec<String>> {
    let all = items(&bed.client, &collection(GROUP, "shardingconfigs")).await?;
    Ok(all.iter().filter_map(|one| Some(one["metadata"]["name"].as_str()?.to_owned())).collect())
}

/// Runs until a child is refused.
async fn cut(bed: &Bed) -> Result<()> {
    refuse_second_child(bed).await?;
    let output = bed.migrate(&["run", "--until", "adopt"]).await?;
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success() && error.contains("run the same command again"), "{error}");
    ensure!(names(bed).await? == ["op-0-canary", "op-root"], "one of two children was made");
    allow_second_child(bed).await
}

/// Repeats a command until the policy that was deleted is not enforced any more.
async fn until_allowed(bed: &Bed, words: &[&str]) -> Result<String> {
    ctrlmesh_testbed::retry(|| async { bed.migrated(words).await }).await
}

#[tokio::test]
async fn a_run_that_was_cut_goes_on_and_can_be_undone() -> Result<()> {
    let Some(bed) = Bed::start("a_run_that_was_cut_goes_on_and_can_be_undone").await? else { return Ok(()) };
    bed.with_rules(GROUP).await?;
    bed.migrated(&["run", "--until", "finalizers"]).await?;
    let before = bed.state().await?;
    cut(&bed).await?;
    until_allowed(&bed, &["run", "--until", "adopt"]).await?;
    ensure!(names(&bed).await? == ["op-0-canary", "op-1-normal", "op-root"]);
    bed.migrated(&["undo", "--until", "adopt"]).await?;
    ensure!(bed.state().await? == before, "the predecessor's children are back");
    // The same, undone from the middle.
    cut(&bed).await?;
    until_allowed(&bed, &["undo", "--until", "adopt"]).await?;
    ensure!(bed.state().await? == before, "and from the middle of the step, too");
    Ok(())
}

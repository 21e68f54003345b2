//! New objects are labelled while existing ones still wait.

use crate::harness::running::Manager;
use crate::harness::{self, NAMESPACE, create};
use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::names::label;
use ctrlmesh_testbed::{ControlPlane, Options, retry};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::rbac::v1::ClusterRole;
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use serde_json::json;

/// How many there are of each kind before the manager begins.
const BEFORE: usize = 150;

/// Each which of the roles stays, when it is deleted, until somebody lets it go.
const EACH: usize = 10;

/// How often namespaces are told to go just before their turn.
const ROUNDS: usize = 6;

/// So slowly that the test is done long before the manager is.
const RATE: &str = "2";

async fn is_labelled<K>(api: &Api<K>, name: &str) -> Result<()>
where
    K: kube::Resource + serde::de::DeserializeOwned + Clone + std::fmt::Debug,
{
    let object = api.get_metadata(name).await?;
    ensure!(object.labels().contains_key(label::SHARDING_HASH), "{:?}", object.labels());
    Ok(())
}

#[tokio::test]
async fn what_is_new_is_labelled_before_what_was_there() -> Result<()> {
    let plane = &ControlPlane::start(&Options::default())?;
    let client = plane.client().await?;
    harness::prepare(&client, "groupVersionKinds: {rbac.authorization.k8s.io/v1: [ClusterRole]}").await?;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    // Of cluster scope: the API server cannot label them by itself.
    let roles: Api<ClusterRole> = Api::all(client.clone());
    for number in 0..BEFORE {
        let name = format!("old-{number:03}");
        create(&namespaces, json!({"metadata": {"name": name}})).await?;
        let waits: &[&str] = if number % EACH == 0 { &["example.com/wait"] } else { &[] };
        create(&roles, json!({"metadata": {"name": name, "finalizers": waits}})).await?;
    }
    let manager = Manager::start(plane, NAMESPACE, &["--label-rate", RATE])?;
    let begun = ListParams::default().labels(label::SHARDING_HASH).limit(1);
    retry(|| async {
        ensure!(!roles.list_metadata(&begun).await?.items.is_empty(), "no role is labelled");
        ensure!(!namespaces.list_metadata(&begun).await?.items.is_empty(), "no namespace is");
        Ok(())
    })
    .await
    .with_context(|| manager.log())?;
    // In the order of names they would come last.
    let new = json!({"metadata": {"name": "zz-new"}});
    create(&namespaces, new.clone()).await?;
    create(&roles, new).await?;
    retry(|| is_labelled(&namespaces, "zz-new")).await.with_context(|| manager.log())?;
    retry(|| is_labelled(&roles, "zz-new")).await.with_context(|| manager.log())?;
    what_leaves_while_it_waits_is_not_touched(&roles).await.with_context(|| manager.log())?;
    namespaces_that_leave_are_not_touched(&namespaces).await.with_context(|| manager.log())?;
    let last = format!("old-{:03}", BEFORE - 1);
    ensure!(is_labelled(&namespaces, &last).await.is_err(), "all namespaces were labelled before");
    ensure!(is_labelled(&roles, &last).await.is_err(), "all roles were labelled before");
    Ok(())
}

/// What was there when the list was read, and is on its way out when its turn comes.
async fn what_leaves_while_it_waits_is_not_touched(roles: &Api<ClusterRole>) -> Result<()> {
    let name = |number: usize| format!("old-{number:03}");
    let mut turn = 0;
    while is_labelled(roles, &name(turn)).await.is_ok() {
        turn += 1;
    }
    // Not so near that its turn comes first, unless the machine stands still for seconds.
    let mut leaving = (turn + EACH..BEFORE - 1).filter(|number| number % EACH == 0);
    let (leaves, next) = loop {
        let number = leaving.next().context("the turn of all has come already")?;
        let leaves = name(number);
        ensure!(roles.delete(&leaves, &DeleteParams::default()).await?.is_left(), "it is gone");
        if is_labelled(roles, &leaves).await.is_err() {
            break (leaves, name(number + 1));
        }
    };
    retry(|| is_labelled(roles, &next)).await?;
    ensure!(is_labelled(roles, &leaves).await.is_err(), "it was labelled on its way out");
    let let_go = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    roles.patch(&leaves, &PatchParams::default(), &let_go).await?;
    Ok(())
}

/// The same, of namespaces: all are looked at again each second, so those that are next are told to go, several times.
async fn namespaces_that_leave_are_not_touched(namespaces: &Api<Namespace>) -> Result<()> {
    let name = |number: usize| format!("old-{number:03}");
    let (mut turn, mut left) = (0, Vec::new());
    for _ in 0..ROUNDS {
        while is_labelled(namespaces, &name(turn)).await.is_ok() {
            turn += 1;
        }
        for number in [turn + 1, turn] {
            // Nobody here takes away what is in them, so they stay.
            let leaves = namespaces.delete(&name(number), &DeleteParams::default()).await?;
            let leaves = leaves.left().context("it is gone")?;
            if !leaves.labels().contains_key(label::SHARDING_HASH) {
                left.push(name(number));
            }
        }
        turn += 2;
        let next = name(turn);
        retry(|| is_labelled(namespaces, &next)).await?;
    }
    ensure!(left.len() >= ROUNDS, "the turn of most had come already");
    for name in left {
        let touched = is_labelled(namespaces, &name).await.is_ok();
        ensure!(!touched, "{name} was labelled on its way out");
    }
    Ok(())
}

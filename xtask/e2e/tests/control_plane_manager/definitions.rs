//! Our resources, validated by a real API server.

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_testbed::ControlPlane;
use kube::api::{Api, DynamicObject};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, ResourceExt as _};
use tokio::sync::{Mutex, OnceCell};

use crate::harness;

mod changes;
mod shown;
mod verdicts;

const ACCEPTED: &str = include_str!("../../../../ctrlmesh-manager/tests/manifests/accepted.yaml");

const REFUSED: &str = include_str!("../../../../ctrlmesh-manager/tests/manifests/refused.yaml");

/// Held by who creates the one `ManagerState` that may be.
static MANAGER_STATE: Mutex<()> = Mutex::const_new(());

/// Installs our definitions, once, and waits until they are served.
async fn installed() -> Result<Client> {
    static INSTALLED: OnceCell<()> = OnceCell::const_new();
    let client = ControlPlane::shared().client().await?;
    INSTALLED.get_or_try_init(|| harness::install(&client)).await?;
    Ok(client)
}

/// The documents of a file, each with its text.
fn documents(text: &'static str) -> impl Iterator<Item = (&'static str, DynamicObject)> {
    text.split("\n---\n").map(|document| {
        let object = serde_saphyr::from_str(document);
        (document, object.unwrap_or_else(|error| panic!("{document}\n{error}")))
    })
}

fn resource_of(object: &DynamicObject) -> Result<ApiResource> {
    let types = object.types.as_ref().context("apiVersion and kind")?;
    Ok(ApiResource::from_gvk(&GroupVersionKind::gvk("ctrlmesh.kusionstack.io", "v1alpha1", &types.kind)))
}

fn api_of(client: &Client, namespace: &str, resource: &ApiResource) -> Api<DynamicObject> {
    if resource.kind == "ManagerState" {
        Api::all_with(client.clone(), resource)
    } else {
        Api::namespaced_with(client.clone(), namespace, resource)
    }
}

async fn create(client: &Client, namespace: &str, object: &DynamicObject) -> Result<DynamicObject, kube::Error> {
    let resource = resource_of(object).map_err(|error| kube::Error::Service(error.into()))?;
    let api = api_of(client, namespace, &resource);
    // Strict: a field that the schema does not know is an error, and not silently lost.
    let request = http::Request::post(format!("{}?dryRun=All&fieldValidation=Strict", api.resource_url()))
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
        let name = object.name_any();
        let made = create(&client, &namespace, &object).await.with_context(|| name.clone())?;
        let (given, kept) = (&object.data, &made.data);
        ensure!(contains(&kept["spec"], &given["spec"]), "{name}: {kept} lost some of {given}");
        assert_eq!(made.labels(), object.labels(), "{name}");
        assert_eq!(made.finalizers(), object.finalizers(), "{name}");
    }
    Ok(())
}

/// Whether everything in `part` is in `whole`; defaults may have been added.
fn contains(whole: &serde_json::Value, part: &serde_json::Value) -> bool {
    match (whole, part) {
        (serde_json::Value::Object(whole), serde_json::Value::Object(part)) => {
            part.iter().all(|(key, value)| whole.get(key).is_some_and(|inner| contains(inner, value)))
        }
        (serde_json::Value::Array(whole), serde_json::Value::Array(part)) => {
            whole.len() == part.len() && whole.iter().zip(part).all(|(whole, part)| contains(whole, part))
        }
        (whole, part) => whole == part || part.is_null(),
    }
}

#[tokio::test]
async fn refusals_name_the_field_and_what_is_allowed() -> Result<()> {
    let client = installed().await?;
    let namespace = ControlPlane::shared().namespace("refused").await?;
    let mut wrong = Vec::new();
    for (text, object) in documents(REFUSED) {
        let expected = text.lines().find_map(|line| line.strip_prefix("# schema: "));
        let refused = match (expected, create(&client, &namespace, &object).await) {
            // 400 is for a field that is not known at all.
            (Some(expected), Err(kube::Error::Api(status))) if [400, 422].contains(&status.code) => {
                let said = expected.split('|').all(|part| status.message.contains(part));
                (!said).then(|| format!("expected: {expected}\n  message:  {}", status.message))
            }
            // The schema cannot see it; what the admission webhook says is tried in messages.rs.
            (None, Ok(_)) => None,
            (_, other) => Some(format!("expected: {expected:?}\n  answer:   {other:?}")),
        };
        wrong.extend(refused.map(|reason| format!("{}\n  {reason}", object.name_any())));
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

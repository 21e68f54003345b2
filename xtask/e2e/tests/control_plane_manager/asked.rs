//! Objects are labelled at once where the API server cannot do it by itself: it asks the manager.

use crate::harness::running::Manager;
use crate::harness::{self, NAMESPACE, create, has_labels, wanted_labels};
use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::{label, root_ca};
use ctrlmesh_common::slots::NamespaceHash;
use ctrlmesh_testbed::{ControlPlane, Options, retry};
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod, Secret, ServiceAccount};
use k8s_openapi::api::rbac::v1::ClusterRole;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

const LISTED: &str = "groupVersionKinds:\n  v1: [ConfigMap, Pod]\n  rbac.authorization.k8s.io/v1: [ClusterRole]\n";

const MORE: [&str; 4] = ["--webhook-host", "127.0.0.1", "--identity", "manager-0"];

/// What the API server would make of it; no watch ever sees that.
async fn tried<K>(api: &Api<K>, object: Value) -> Result<K>
where
    K: kube::Resource + serde::de::DeserializeOwned + serde::Serialize + Clone + std::fmt::Debug,
{
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    Ok(api.create(&dry_run, &serde_json::from_value(object)?).await?)
}

/// An API server as one before 1.36 is.
fn older() -> Result<ControlPlane> {
    let unserved = ["mutatingadmissionpolicies", "mutatingadmissionpolicybindings"];
    let unserved = unserved.map(|one| format!("admissionregistration.k8s.io/v1/{one}=false"));
    ControlPlane::start(&Options {
        feature_gates: vec!["MutatingAdmissionPolicy=false".to_owned()],
        runtime_config: unserved.into(),
        ..Options::default()
    })
}

/// Lists kinds, and starts a manager.
async fn managed(plane: &ControlPlane, client: &Client) -> Result<Manager> {
    harness::prepare(client, LISTED).await?;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let ca = std::fs::read_to_string(plane.ca())?;
    create(&maps, json!({"metadata": {"name": root_ca::CLUSTER}, "data": {root_ca::KEY: ca}})).await?;
    Manager::start(plane, NAMESPACE, &MORE)
}

/// How often `path` was asked.
async fn asked(manager: &Manager, path: &str) -> Result<u64> {
    let begin = format!("ctrlmesh_manager_webhook_reviews_total{{path=\"{path}\"");
    manager.counted(&begin).await
}

/// Has pods injected after they are labelled: the API server then asks for labels once more.
async fn inject_afterwards(manager: &Manager, client: &Client) -> Result<()> {
    let address = manager.address("webhooks").await?;
    let configuration = json!({
        "metadata": {"name": "zz-inject", "labels": {"app.kubernetes.io/part-of": "ctrlmesh"}},
        "webhooks": [{
            "name": "inject.ctrlmesh.kusionstack.io", "sideEffects": "None", "admissionReviewVersions": ["v1"],
            "failurePolicy": "Fail", "clientConfig": {"url": format!("https://{address}/inject")},
            "objectSelector": {"matchLabels": {label::ENABLE_PROXY: "true"}},
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}],
        }],
    });
    create::<MutatingWebhookConfiguration>(&Api::all(client.clone()), configuration).await?;
    Ok(())
}

#[tokio::test]
async fn where_no_policy_is_served_the_manager_registers_its_webhook() -> Result<()> {
    let plane = older()?;
    let client = plane.client().await?;
    let manager = managed(&plane, &client).await?;
    let webhooks: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
    let registered = retry(|| webhooks.get("ctrlmesh-labels")).await?;
    let hook = registered.webhooks.and_then(|mut hooks| hooks.pop()).context("no webhook")?;
    assert_eq!(hook.failure_policy.as_deref(), Some("Ignore"));
    assert_eq!(hook.reinvocation_policy.as_deref(), Some("IfNeeded"));
    everything_listed_is_labelled(&plane, &client).await?;
    an_injected_pod_is_labelled_once(&plane, &manager, &client).await?;
    // Whoever writes goes on without us, and the watches of the next manager label.
    manager.kill()?;
    let alone = plane.namespace("alone").await?;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &alone);
    let made = create(&maps, json!({"metadata": {"name": "a"}})).await?;
    ensure!(made.labels().is_empty(), "{:?}", made.labels());
    let manager = Manager::start(&plane, NAMESPACE, &MORE)?;
    retry(|| async { has_labels(&maps.get("a").await?, &wanted_labels(&alone)) })
        .await
        .with_context(|| manager.log())?;
    // It is at another port now.
    retry(|| async { has_labels(&tried(&maps, json!({"metadata": {"name": "b"}})).await?, &wanted_labels(&alone)) })
        .await?;
    // Nothing is listed any more.
    let own: Api<ConfigMap> = Api::namespaced(client, NAMESPACE);
    let none = json!({"data": {"resource-config": "groupVersionKinds: {}\n"}});
    own.patch("ctrlmesh-sharding-resource", &PatchParams::default(), &Patch::Merge(none)).await?;
    retry(|| async {
        ensure!(webhooks.get_opt("ctrlmesh-labels").await?.is_none(), "still there");
        anyhow::Ok(())
    })
    .await
}

async fn everything_listed_is_labelled(plane: &ControlPlane, client: &Client) -> Result<()> {
    let namespace = plane.namespace("asked").await?;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &namespace);
    let map = json!({"metadata": {"name": "a", "labels": {"mine": "stays"}}});
    retry(|| async { has_labels(&tried(&maps, map.clone()).await?, &wanted_labels(&namespace)) }).await?;
    let made = create(&maps, map).await?;
    ensure!(made.labels()["mine"] == "stays", "{:?}", made.labels());
    // A change that takes them away. A webhook that is slow is not waited for.
    retry(|| async {
        let mut made = maps.get("a").await?;
        made.metadata.labels = None;
        has_labels(&maps.replace("a", &PostParams::default(), &made).await?, &wanted_labels(&namespace))
    })
    .await?;
    // Of cluster scope: by its own name. And a namespace itself.
    let slot = NamespaceHash::default().slot("reader").to_string();
    let cluster = (label::NAMESPACE.to_owned(), format!("cluster.{slot}"));
    let of_cluster = [(label::SHARDING_HASH.to_owned(), slot), cluster].into();
    let roles: Api<ClusterRole> = Api::all(client.clone());
    let role = json!({"metadata": {"name": "reader"}});
    retry(|| async { has_labels(&tried(&roles, role.clone()).await?, &of_cluster) }).await?;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let fresh = json!({"metadata": {"name": "fresh"}});
    retry(|| async { has_labels(&tried(&namespaces, fresh.clone()).await?, &wanted_labels("fresh")) }).await?;
    // What is not listed is not asked about.
    let secrets: Api<Secret> = Api::namespaced(client.clone(), &namespace);
    let secret = tried(&secrets, json!({"metadata": {"name": "a"}})).await?;
    ensure!(secret.labels().is_empty(), "{:?}", secret.labels());
    Ok(())
}

async fn an_injected_pod_is_labelled_once(plane: &ControlPlane, manager: &Manager, client: &Client) -> Result<()> {
    let namespace = plane.namespace("injected").await?;
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), &namespace);
    create(&accounts, json!({"metadata": {"name": "default"}})).await?;
    let configs: Api<ShardingConfig> = Api::namespaced(client.clone(), &namespace);
    let shard = json!({"metadata": {"name": "shard"}, "spec": {"selector": {"matchLabels": {"app": "op"}},
        "limits": [{"selector": {"matchLabels": {"team": "a"}}}]}});
    create(&configs, shard).await?;
    inject_afterwards(manager, client).await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    let pod = json!({
        "metadata": {"name": "op", "labels": {label::ENABLE_PROXY: "true", "app": "op"}},
        "spec": {"containers": [{"name": "operator", "image": "none"}]},
    });
    retry(|| async {
        let made = tried(&pods, pod.clone()).await?;
        ensure!(made.labels().contains_key(label::SHARDING_CONFIG_INJECTED), "{:?}", made.labels());
        anyhow::Ok(())
    })
    .await?;
    // Asked again after the other had changed the pod, and said the same. The counts are of all
    // that is asked: somebody else's write may fall between them, but not each time.
    retry(|| async {
        let before = (asked(manager, "/label").await?, asked(manager, "/inject").await?);
        let made = tried(&pods, pod.clone()).await?;
        let after = (asked(manager, "/label").await?, asked(manager, "/inject").await?);
        has_labels(&made, &wanted_labels(&namespace))?;
        assert_eq!(made.labels()[label::SHARDING_CONFIG_INJECTED], "shard");
        let more = (after.0 - before.0, after.1 - before.1);
        ensure!(more == (2, 1), "the manager was asked {more:?} times");
        anyhow::Ok(())
    })
    .await
}

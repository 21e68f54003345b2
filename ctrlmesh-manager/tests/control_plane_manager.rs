//! The manager as a process, and a real API server that asks it: validating, injecting, labelling.
#![expect(clippy::large_futures, reason = "one per test, and never moved")]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::api::{CircuitBreaker, ManagerState, ShardingConfig};
use ctrlmesh_common::names::{annotation, label, root_ca};
use ctrlmesh_common::slots::NamespaceHash;
use ctrlmesh_testbed::{ControlPlane, retry};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use harness::manager::Manager;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod, Secret, ServiceAccount};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::rbac::v1::ClusterRole;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

mod harness;

const NAMESPACE: &str = "ctrlmesh-system";

/// What is listed from the start.
const LISTED: &str = "groupVersionKinds:\n  v1: [ConfigMap]\n  rbac.authorization.k8s.io/v1: [ClusterRole]\n  widgets.example.com/v1: ['*']\n";

static STARTED: OnceCell<Result<Manager, String>> = OnceCell::const_new();

/// One manager for all tests of this binary, with its webhooks registered; started once, also where that failed.
async fn managed() -> Result<Client> {
    let client = ControlPlane::shared().client().await?;
    let started = || async { start(&client).await.map_err(|error| format!("{error:#}")) };
    match STARTED.get_or_init(started).await {
        Ok(_) => Ok(client.clone()),
        Err(error) => anyhow::bail!("start the manager: {error}"),
    }
}

async fn start(client: &Client) -> Result<Manager> {
    harness::install(client).await?;
    let namespace = json!({"metadata": {"name": NAMESPACE}});
    create::<Namespace>(&Api::all(client.clone()), namespace).await?;
    let cluster = json!({"metadata": {"name": root_ca::CLUSTER}, "data": {root_ca::KEY: std::fs::read_to_string(ControlPlane::shared().ca())?}});
    create::<ConfigMap>(&Api::namespaced(client.clone(), NAMESPACE), cluster).await?;
    let list = json!({"metadata": {"name": "ctrlmesh-sharding-resource"}, "data": {"resource-config": LISTED}});
    create::<ConfigMap>(&Api::namespaced(client.clone(), NAMESPACE), list).await?;
    let early = json!({"metadata": {"name": "early"}});
    create::<ConfigMap>(&Api::namespaced(client.clone(), "default"), early).await?;
    let more = ["--label-rate", "1000", "--identity", "manager-0"];
    let manager = Manager::start(ControlPlane::shared(), NAMESPACE, &more)?;
    let webhooks = manager.address("webhooks").await?;
    let hook = |path: &str, rule: Value, policy: &str| {
        json!({
            "name": format!("{path}.ctrlmesh.kusionstack.io"), "sideEffects": "None", "admissionReviewVersions": ["v1"],
            "failurePolicy": policy, "clientConfig": {"url": format!("https://{webhooks}/{path}")}, "rules": [rule],
        })
    };
    let metadata = json!({"name": "ctrlmesh", "labels": {"app.kubernetes.io/part-of": "ctrlmesh"}});
    let ours = json!({"apiGroups": ["ctrlmesh.kusionstack.io"], "apiVersions": ["*"], "resources": ["*"], "operations": ["CREATE", "UPDATE"]});
    let validating = json!({"metadata": metadata, "webhooks": [hook("validate", ours, "Fail")]});
    create::<ValidatingWebhookConfiguration>(&Api::all(client.clone()), validating).await?;
    let pods = json!({"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]});
    // Secrets are not listed: only the webhook labels them, as it would all where the API server cannot.
    let secrets = json!({"apiGroups": [""], "apiVersions": ["v1"], "resources": ["secrets"], "operations": ["CREATE", "UPDATE"]});
    let hooks = [hook("inject", pods, "Fail"), hook("label", secrets, "Ignore")];
    let mutating = json!({"metadata": metadata, "webhooks": hooks});
    create::<MutatingWebhookConfiguration>(&Api::all(client.clone()), mutating).await?;
    // The webhooks are asked once the API server knows the CA, and answer once everything was seen.
    let probe: ShardingConfig = serde_json::from_value(shard("probe", "probe", "probe"))?;
    let configs: Api<ShardingConfig> = Api::namespaced(client.clone(), "default");
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    retry(|| async { configs.create(&dry_run, &probe).await.map_err(anyhow::Error::from) })
        .await
        .with_context(|| manager.log())?;
    Ok(manager)
}

async fn create_dynamic(api: &Api<DynamicObject>, object: Value) -> Result<()> {
    api.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
    Ok(())
}

async fn create<K>(api: &Api<K>, object: Value) -> Result<K>
where
    K: kube::Resource + serde::de::DeserializeOwned + serde::Serialize + Clone + std::fmt::Debug,
{
    Ok(api.create(&PostParams::default(), &serde_json::from_value(object)?).await?)
}

fn shard(name: &str, app: &str, team: &str) -> Value {
    json!({
        "metadata": {"name": name},
        "spec": {"controller": {"leaderElectionName": "op"}, "selector": {"matchLabels": {"app": app}},
            "limits": [{"selector": {"matchLabels": {"team": team}}}]},
    })
}

/// A pod as the controller of the StatefulSet `op` makes it.
fn pod(name: &str, annotations: Value) -> Value {
    json!({
        "metadata": {"name": name, "annotations": annotations, "labels": {label::ENABLE_PROXY: "true"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "op", "uid": "6d7a1f0e-0000-4000-8000-000000000000", "controller": true}]},
        "spec": {"containers": [{"name": "operator", "image": "none"}]},
    })
}

/// A namespace with a service account and a root that divides the StatefulSet `op` in two.
async fn operator(client: &Client, prefix: &str) -> Result<String> {
    let namespace = ControlPlane::shared().namespace(prefix).await?;
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), &namespace);
    create(&accounts, json!({"metadata": {"name": "default"}})).await?;
    let root = json!({"metadata": {"name": "root"}, "spec": {"root": {"prefix": "op", "targetStatefulSet": "op", "auto": {"shardingSize": 2, "everyShardReplicas": 1}}}});
    let configs: Api<ShardingConfig> = Api::namespaced(client.clone(), &namespace);
    create(&configs, root).await?;
    retry(|| async { configs.get("op-2-normal").await }).await?;
    Ok(namespace)
}

fn refusal<T: std::fmt::Debug>(result: Result<T>) -> Result<String> {
    match result {
        Err(error) => Ok(format!("{error:#}")),
        Ok(made) => anyhow::bail!("not refused: {made:?}"),
    }
}

#[tokio::test]
async fn what_the_schema_cannot_see_is_refused_by_the_webhook() -> Result<()> {
    let client = managed().await?;
    let namespace = ControlPlane::shared().namespace("validate").await?;
    let configs: Api<ShardingConfig> = Api::namespaced(client.clone(), &namespace);
    create(&configs, shard("a", "a", "red")).await?;
    // The manager has to have seen the first.
    let message = retry(|| async {
        let dry_run = PostParams { dry_run: true, ..PostParams::default() };
        let other = serde_json::from_value(shard("b", "b", "red"))?;
        refusal(configs.create(&dry_run, &other).await.map_err(anyhow::Error::from))
    })
    .await?;
    ensure!(message.contains("ShardingConfig \"a\""), "{message}");
    create(&configs, shard("b", "b", "blue")).await?;
    let breakers: Api<CircuitBreaker> = Api::namespaced(client, &namespace);
    let bad = json!({"metadata": {"name": "a"}, "spec": {"selector": {"matchLabels": {"app": "a"}},
        "trafficInterceptRules": [{"name": "a", "interceptType": "Whitelist", "contentType": "Regexp", "contents": ["a(b"], "methods": ["GET"]}]}});
    let message = refusal(create(&breakers, bad.clone()).await)?;
    ensure!(message.contains("is no regular expression"), "{message}");
    let mut skipped = bad;
    skipped["metadata"]["labels"] = json!({label::IGNORE_VALIDATE: "true"});
    create(&breakers, skipped).await?;
    Ok(())
}

#[tokio::test]
async fn the_shards_of_a_root_may_trade_their_hashes() -> Result<()> {
    let client = managed().await?;
    let namespace = ControlPlane::shared().namespace("trade").await?;
    let configs: Api<ShardingConfig> = Api::namespaced(client.clone(), &namespace);
    let hashes =
        |range: std::ops::Range<u8>| range.map(|hash| hash.to_string()).collect::<Vec<_>>();
    let spec = |first: u8, second: u8| {
        json!({"spec": {"controller": {"leaderElectionName": "op"}, "root": {"prefix": "op", "targetStatefulSet": "op", "manual": [
            {"id": first, "hashes": hashes(0..16)}, {"id": second, "hashes": hashes(16..32)}]}}})
    };
    let mut root = spec(1, 2);
    root["metadata"] = json!({"name": "root"});
    create(&configs, root).await?;
    let owns = |shard: &'static str, hash: &'static str| {
        let configs = configs.clone();
        async move {
            let limits = serde_json::to_string(&configs.get(shard).await?.spec.limits)?;
            ensure!(limits.contains(&format!("\"{hash}\"")), "{shard}: {limits}");
            anyhow::Ok(())
        }
    };
    retry(|| owns("op-1-normal", "0")).await?;
    retry(|| owns("op-2-normal", "31")).await?;
    configs.patch("root", &PatchParams::default(), &Patch::Merge(spec(2, 1))).await?;
    retry(|| owns("op-1-normal", "31")).await?;
    retry(|| owns("op-2-normal", "0")).await
}

#[tokio::test]
async fn a_pod_gets_its_shard_and_trusts_the_mesh_before_it_is_stored() -> Result<()> {
    let client = managed().await?;
    let namespace = operator(&client, "inject").await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    for (name, shard) in [("op-0", "op-1-normal"), ("op-1", "op-2-normal")] {
        let made = create(&pods, pod(name, json!({}))).await?;
        ensure!(
            made.labels().get(label::SHARDING_CONFIG_INJECTED).map(String::as_str) == Some(shard)
        );
        let text = serde_json::to_string(&made.spec)?;
        ensure!(text.contains(root_ca::MESH) && !text.contains(root_ca::CLUSTER), "{text}");
    }
    let maps: Api<ConfigMap> = Api::namespaced(client, &namespace);
    let trusted = maps.get(root_ca::MESH).await?.data.context("no data")?;
    ensure!(trusted[root_ca::KEY].contains("BEGIN CERTIFICATE"));
    let other = json!({"metadata": {"name": "other"}, "spec": {"containers": [{"name": "a", "image": "none"}]}});
    let other = create(&pods, other).await?;
    ensure!(serde_json::to_string(&other.spec)?.contains(root_ca::CLUSTER), "not enrolled");
    let mut skipped = pod("op-5", json!({}));
    skipped["metadata"]["labels"][label::IGNORE_VALIDATE] = json!("true");
    ensure!(!create(&pods, skipped).await?.labels().contains_key(label::SHARDING_CONFIG_INJECTED));
    Ok(())
}

#[tokio::test]
async fn every_mode_makes_a_pod_that_the_api_server_takes() -> Result<()> {
    let client = managed().await?;
    let namespace = operator(&client, "modes").await?;
    let pods: Api<Pod> = Api::namespaced(client, &namespace);
    let resources = json!({"limits": {"memory": "64Mi"}}).to_string();
    for (number, mode) in ["env", "kubeconfig"].into_iter().enumerate() {
        let annotations =
            json!({annotation::INTERCEPTION: mode, annotation::PROXY_RESOURCE: resources});
        let made = create(&pods, pod(&format!("op-{number}"), annotations)).await?;
        let spec = made.spec.context("no spec")?;
        let proxy = &spec.init_containers.context("no sidecar")?[0];
        ensure!(proxy.restart_policy.as_deref() == Some("Always"), "{proxy:?}");
        let security = proxy.security_context.clone().context("no security context")?;
        ensure!(
            security.read_only_root_filesystem == Some(true)
                && security.run_as_non_root == Some(true)
        );
        let variables = spec.containers[0].env.clone().unwrap_or_default();
        let expected = if mode == "env" { "KUBERNETES_SERVICE_HOST" } else { "KUBECONFIG" };
        ensure!(variables.iter().any(|variable| variable.name == expected), "{variables:?}");
    }
    let mut host = pod("op-7", json!({}));
    host["spec"]["hostNetwork"] = json!(true);
    let message = refusal(create(&pods, host).await)?;
    ensure!(message.contains("spec.hostNetwork"), "{message}");
    let message =
        refusal(create(&pods, pod("op-8", json!({annotation::INTERCEPTION: "x"}))).await)?;
    ensure!(message.contains("none of ebpf, env, kubeconfig"), "{message}");
    Ok(())
}

fn wanted(namespace: &str) -> BTreeMap<String, String> {
    let slot = NamespaceHash::default().slot(namespace).to_string();
    [
        (label::SHARDING_HASH, slot),
        (label::NAMESPACE, namespace.to_owned()),
        (label::CONTROL, "true".to_owned()),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into()
}

fn has(object: &impl kube::ResourceExt, wanted: &BTreeMap<String, String>) -> Result<()> {
    let there = object.labels();
    ensure!(wanted.iter().all(|(key, value)| there.get(key) == Some(value)), "{there:?}");
    Ok(())
}

#[tokio::test]
async fn what_was_there_before_is_labelled_and_labels_that_are_taken_away_are_put_back()
-> Result<()> {
    let client = managed().await?;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "default");
    retry(|| async { has(&maps.get("early").await?, &wanted("default")) }).await?;
    let take = json!({"metadata": {"labels": {label::SHARDING_HASH: null, label::NAMESPACE: "elsewhere", "mine": "stays"}}});
    maps.patch("early", &PatchParams::default(), &Patch::Merge(take)).await?;
    retry(|| async {
        let map = maps.get("early").await?;
        has(&map, &wanted("default"))?;
        ensure!(map.labels()["mine"] == "stays");
        Ok(())
    })
    .await?;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    retry(|| async { has(&namespaces.get("kube-system").await?, &wanted("kube-system")) }).await?;
    let take = json!({"metadata": {"labels": {label::SHARDING_HASH: null}}});
    namespaces.patch("kube-system", &PatchParams::default(), &Patch::Merge(take)).await?;
    retry(|| async { has(&namespaces.get("kube-system").await?, &wanted("kube-system")) }).await?;
    // Of cluster scope: by its own name.
    let slot = NamespaceHash::default().slot("view").to_string();
    let roles: Api<ClusterRole> = Api::all(client);
    let cluster = format!("cluster.{slot}");
    let of_cluster =
        [(label::SHARDING_HASH.to_owned(), slot), (label::NAMESPACE.to_owned(), cluster)].into();
    retry(|| async { has(&roles.get("view").await?, &of_cluster) }).await
}

#[tokio::test]
async fn the_api_server_itself_labels_what_is_created() -> Result<()> {
    let client = managed().await?;
    let namespace = ControlPlane::shared().namespace("labelled").await?;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    retry(|| async { has(&namespaces.get(&namespace).await?, &wanted(&namespace)) }).await?;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &namespace);
    // The answer to a dry run was never seen by a watch: it is the API server's own work.
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    let map = serde_json::from_value(json!({"metadata": {"name": "a"}}))?;
    retry(|| async { has(&maps.create(&dry_run, &map).await?, &wanted(&namespace)) }).await?;
    let pods: Api<Pod> = Api::namespaced(client, &namespace);
    let not_listed = json!({"metadata": {"name": "a"}, "spec": {"automountServiceAccountToken": false, "containers": [{"name": "a", "image": "none"}]}});
    let accounts: Api<ServiceAccount> = Api::namespaced(pods.clone().into_client(), &namespace);
    create(&accounts, json!({"metadata": {"name": "default"}})).await?;
    let pod = create(&pods, not_listed).await?;
    ensure!(pod.labels().is_empty(), "{:?}", pod.labels());
    Ok(())
}

#[tokio::test]
async fn the_webhook_labels_where_the_api_server_does_not() -> Result<()> {
    let client = managed().await?;
    let namespace = ControlPlane::shared().namespace("secrets").await?;
    let secrets: Api<Secret> = Api::namespaced(client, &namespace);
    let mut made = create(&secrets, json!({"metadata": {"name": "a"}})).await?;
    has(&made, &wanted(&namespace))?;
    made.labels_mut().clear();
    let after = secrets.replace("a", &PostParams::default(), &made).await?;
    has(&after, &wanted(&namespace))
}

#[tokio::test]
async fn the_managers_are_listed_for_those_who_knew_the_predecessors() -> Result<()> {
    let client = managed().await?;
    let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), NAMESPACE);
    let endpoint = |name: &str, address: &str| json!({"addresses": [address], "targetRef": {"kind": "Pod", "name": name}});
    let slice = json!({
        "metadata": {"name": "managers", "labels": {"kubernetes.io/service-name": "ctrlmesh-manager"}}, "addressType": "IPv4",
        "endpoints": [endpoint("manager-0", "10.0.0.1"), endpoint("manager-1", "10.0.0.2")],
    });
    create(&slices, slice).await?;
    let managers: Api<ManagerState> = Api::all(client);
    retry(|| async {
        let status = managers.get("ctrlmesh-manager").await?.status.unwrap_or_default();
        let leads: Vec<bool> = status.endpoints.iter().map(|one| one.leader).collect();
        ensure!(leads == [true, false], "{status:?}");
        Ok(())
    })
    .await
}

/// Makes objects of a kind of its own, which is not listed yet: everything is left to the watches.
async fn make_many(client: &Client, spaces: u32, each: u32) -> Result<Api<DynamicObject>> {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("many.example.com", "v1", "Thing"));
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let schema = json!({"openAPIV3Schema": {"type": "object"}});
    let definition = json!({
        "metadata": {"name": "things.many.example.com"},
        "spec": {"group": "many.example.com", "scope": "Namespaced", "names": {"plural": "things", "kind": "Thing"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": schema}]},
    });
    create(&definitions, definition).await?;
    let things: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    retry(|| async { things.list(&ListParams::default().limit(1)).await }).await?;
    let made = stream::iter(0..spaces).map(|number| {
        let (client, resource, namespaces) = (client.clone(), resource.clone(), namespaces.clone());
        async move {
            let name = format!("many-{number}");
            create(&namespaces, json!({"metadata": {"name": name}})).await?;
            let things: Api<DynamicObject> = Api::namespaced_with(client, &name, &resource);
            for thing in 0..each {
                let thing = json!({"apiVersion": "many.example.com/v1", "kind": "Thing", "metadata": {"name": format!("t-{thing}")}});
                create_dynamic(&things, thing).await?;
            }
            anyhow::Ok(())
        }
    });
    made.buffer_unordered(16).try_collect::<Vec<()>>().await?;
    Ok(things)
}

/// 100 namespaces and 1,000 objects; with `--full`, 5,000 and 50,000.
#[tokio::test]
async fn many_objects_are_labelled_and_the_memory_stays() -> Result<()> {
    let client = managed().await?;
    let full = std::env::var_os("CTRLMESH_TEST_FULL").is_some();
    let (spaces, each) = if full { (5000, 10) } else { (100, 10) };
    let manager = STARTED.get().and_then(|started| started.as_ref().ok()).context("no manager")?;
    let things = make_many(&client, spaces, each).await?;
    let before = manager.resident_kilobytes()?;
    let start = Instant::now();
    let listed = format!("{LISTED}  many.example.com/v1: [Thing]\n");
    let list = json!({"data": {"resource-config": listed}});
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    maps.patch("ctrlmesh-sharding-resource", &PatchParams::default(), &Patch::Merge(list)).await?;
    let mut most = before;
    let unlabelled = ListParams::default().labels(&format!("!{}", label::SHARDING_HASH)).limit(1);
    loop {
        most = most.max(manager.resident_kilobytes()?);
        if things.list_metadata(&unlabelled).await?.items.is_empty() {
            break;
        }
        ensure!(start.elapsed() < Duration::from_mins(20), "not done");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    eprintln!(
        "{} objects in {spaces} namespaces labelled in {:?}; resident {before} kB before, {most} kB at most",
        spaces * each,
        start.elapsed()
    );
    // A page of metadata is what may be held, not the objects.
    ensure!(most < before + 64 * 1024, "{before} kB, then {most} kB");
    Ok(())
}

#[tokio::test]
async fn a_terminating_object_is_not_touched() -> Result<()> {
    let client = managed().await?;
    let namespace = ControlPlane::shared().namespace("terminating").await?;
    let maps: Api<ConfigMap> = Api::namespaced(client, &namespace);
    create(&maps, json!({"metadata": {"name": "a", "finalizers": ["example.com/wait"]}})).await?;
    retry(|| async { has(&maps.get("a").await?, &wanted(&namespace)) }).await?;
    maps.delete("a", &DeleteParams::default()).await?;
    let take = json!({"metadata": {"labels": {label::SHARDING_HASH: null}}});
    maps.patch("a", &PatchParams::default(), &Patch::Merge(take)).await?;
    // One that comes after it in the same watch has been labelled: so it was passed over.
    create(&maps, json!({"metadata": {"name": "b"}})).await?;
    retry(|| async { has(&maps.get("b").await?, &wanted(&namespace)) }).await?;
    let left = maps.get("a").await?;
    ensure!(!left.labels().contains_key(label::SHARDING_HASH), "{:?}", left.labels());
    let let_go = json!({"metadata": {"finalizers": null}});
    maps.patch("a", &PatchParams::default(), &Patch::Merge(let_go)).await?;
    Ok(())
}

#[tokio::test]
async fn kinds_that_appear_and_vanish_are_followed() -> Result<()> {
    let client = managed().await?;
    let namespace = ControlPlane::shared().namespace("kinds").await?;
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let definition = json!({
        "metadata": {"name": "widgets.widgets.example.com"},
        "spec": {"group": "widgets.example.com", "scope": "Namespaced", "names": {"plural": "widgets", "kind": "Widget"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object"}}}]},
    });
    let widget =
        ApiResource::from_gvk(&GroupVersionKind::gvk("widgets.example.com", "v1", "Widget"));
    let widgets: Api<DynamicObject> = Api::namespaced_with(client.clone(), &namespace, &widget);
    for round in 0..2 {
        create(&definitions, definition.clone()).await?;
        let object: DynamicObject = serde_json::from_value(
            json!({"apiVersion": "widgets.example.com/v1", "kind": "Widget", "metadata": {"name": "a"}}),
        )?;
        retry(|| async { widgets.create(&PostParams::default(), &object).await }).await?;
        retry(|| async { has(&widgets.get("a").await?, &wanted(&namespace)) })
            .await
            .with_context(|| format!("round {round}"))?;
        definitions.delete("widgets.widgets.example.com", &DeleteParams::default()).await?;
        retry(|| async {
            ensure!(
                definitions.get_opt("widgets.widgets.example.com").await?.is_none(),
                "still there"
            );
            Ok(())
        })
        .await?;
    }
    // The others go on.
    let maps: Api<ConfigMap> = Api::namespaced(client, &namespace);
    create(&maps, json!({"metadata": {"name": "a"}})).await?;
    retry(|| async { has(&maps.get("a").await?, &wanted(&namespace)) }).await
}

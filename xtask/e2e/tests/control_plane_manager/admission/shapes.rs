//! Admission of unusual pods and of rarer kinds, by a real API server.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::api::{FaultInjection, ManagerState, ShardingConfig};
use ctrlmesh_common::names::{annotation, label, root_ca};
use ctrlmesh_testbed::retry;
use k8s_openapi::api::core::v1::{Container, Pod, ServiceAccount};
use kube::api::{Api, DeleteParams, ListParams};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

use super::bed::*;

/// What the API server makes of a pod of the StatefulSet `op` with this spec.
async fn made(client: &Client, prefix: &str, annotations: Value, spec: Value) -> Result<Pod> {
    let namespace = operator(client, prefix).await?;
    let mut pod = pod("op-0", annotations);
    pod["spec"] = spec;
    create(&Api::namespaced(client.clone(), &namespace), pod).await
}

fn variables(container: &Container) -> BTreeMap<&str, &str> {
    let all = container.env.iter().flatten();
    all.filter_map(|one| Some((one.name.as_str(), one.value.as_deref()?))).collect()
}

#[tokio::test]
async fn a_pod_that_mounts_no_token_is_given_none() -> Result<()> {
    let client = managed().await?;
    let spec = json!({"automountServiceAccountToken": false, "containers": [{"name": "operator", "image": "none"}]});
    let pod = made(&client, "no-token", json!({}), spec).await?;
    ensure!(pod.labels()[label::SHARDING_CONFIG_INJECTED] == "op-1-normal", "{pod:?}");
    ensure!(pod.annotations().contains_key(annotation::INJECTED), "{pod:?}");
    let spec = pod.spec.context("no spec")?;
    ensure!(spec.volumes.iter().flatten().count() == 0, "{:?}", spec.volumes);
    ensure!(spec.containers[0].volume_mounts.iter().flatten().count() == 0);
    Ok(())
}

#[tokio::test]
async fn every_container_dials_the_proxy_init_containers_too() -> Result<()> {
    let client = managed().await?;
    let elsewhere =
        json!([{"name": "KUBERNETES_SERVICE_HOST", "value": "elsewhere"}, {"name": "MINE", "value": "stays"}]);
    let spec = json!({
        "initContainers": [{"name": "migrate", "image": "none"}],
        "containers": [{"name": "operator", "image": "none", "env": elsewhere}, {"name": "second", "image": "none"}],
    });
    let env = json!({annotation::INTERCEPTION: "env"});
    let pod = made(&client, "containers", env, spec).await?;
    let spec = pod.spec.context("no spec")?;
    let first = spec.init_containers.clone().context("no containers")?;
    let [proxy, migrate] = &first[..] else { anyhow::bail!("{first:?}") };
    ensure!(proxy.restart_policy.as_deref() == Some("Always"), "{proxy:?}");
    ensure!(proxy.startup_probe.is_some(), "what comes next does not wait for it");
    ensure!(!variables(proxy).contains_key("KUBERNETES_SERVICE_HOST"), "{proxy:?}");
    for container in spec.containers.iter().chain([migrate]) {
        let host = variables(container).get("KUBERNETES_SERVICE_HOST").copied();
        ensure!(host == Some("127.0.0.1"), "{container:?}");
    }
    ensure!(variables(&spec.containers[0]).get("MINE") == Some(&"stays"));
    // What the operator believes is the mesh, what the proxy believes the API server.
    let volumes = spec.volumes.iter().flatten();
    let ca_of = |container: &Container| {
        let mounts: Vec<&str> = container.volume_mounts.iter().flatten().map(|mount| mount.name.as_str()).collect();
        let of_it = volumes.clone().filter(|volume| mounts.contains(&volume.name.as_str()));
        serde_json::to_string(&of_it.collect::<Vec<_>>())
    };
    ensure!(ca_of(&spec.containers[1])?.contains(root_ca::MESH));
    ensure!(!ca_of(&spec.containers[1])?.contains(root_ca::CLUSTER));
    ensure!(ca_of(proxy)?.contains(root_ca::CLUSTER));
    Ok(())
}

/// A pod as the controller of a revision of the Deployment `op` makes it.
fn pod_of(revision: &str) -> Value {
    let mut pod = pod("", json!({}));
    pod["metadata"]["generateName"] = json!(format!("op-{revision}-"));
    pod["metadata"]["labels"]["pod-template-hash"] = json!(revision);
    pod["metadata"]["ownerReferences"][0]["kind"] = json!("ReplicaSet");
    pod["metadata"]["ownerReferences"][0]["name"] = json!(format!("op-{revision}"));
    pod["metadata"].as_object_mut().map(|metadata| metadata.remove("name"));
    pod
}

fn shard_of(pod: &Pod) -> Option<String> {
    pod.labels().get(label::SHARDING_CONFIG_INJECTED).cloned()
}

/// How many pods each shard has.
async fn of_each_shard(pods: &Api<Pod>) -> Result<BTreeMap<String, usize>> {
    let mut shards = BTreeMap::new();
    for pod in pods.list(&ListParams::default()).await? {
        *shards.entry(shard_of(&pod).context("a pod without shard")?).or_default() += 1;
    }
    Ok(shards)
}

#[tokio::test]
async fn deployment_pods_get_shards_and_a_rollout_keeps_each_filled() -> Result<()> {
    let client = managed().await?;
    let namespace = PLANE.namespace("deployment").await?;
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), &namespace);
    create(&accounts, json!({"metadata": {"name": "default"}})).await?;
    let configs: Api<ShardingConfig> = Api::namespaced(client.clone(), &namespace);
    let root = json!({"metadata": {"name": "root"}, "spec": {"root": {"prefix": "op", "targetDeployment": "op",
        "auto": {"shardingSize": 2, "everyShardReplicas": 2}, "resourceSelector": config_maps()}}});
    create(&configs, root).await?;
    retry(|| async { configs.get("op-2-normal").await }).await?;
    let pods: Api<Pod> = Api::namespaced(client, &namespace);
    // All at once, as their controller makes them: the manager has not seen the others.
    let all = (0..4).map(|_| create(&pods, pod_of("5d")));
    futures::future::try_join_all(all).await?;
    let expected = BTreeMap::from(["op-1-normal", "op-2-normal"].map(|shard| (shard.to_owned(), 2)));
    let shards = of_each_shard(&pods).await?;
    ensure!(shards == expected, "{shards:?}");
    // Both of one shard go first. The manager may not have seen that they are gone when their successors come.
    let mut old = pods.list(&ListParams::default()).await?.items;
    old.sort_by_key(shard_of);
    let mut given = BTreeMap::new();
    for pod in old {
        pods.delete(&pod.name_any(), &DeleteParams::default().grace_period(0)).await?;
        let successor = create(&pods, pod_of("6e")).await?;
        given.insert(successor.name_any(), shard_of(&successor));
    }
    let kept = pods.list(&ListParams::default()).await?.items;
    let kept: BTreeMap<_, _> = kept.iter().map(|pod| (pod.name_any(), shard_of(pod))).collect();
    ensure!(kept == given, "moved: {kept:?}, given: {given:?}");
    let shards = of_each_shard(&pods).await?;
    ensure!(shards == expected, "{shards:?}");
    Ok(())
}

#[tokio::test]
async fn what_is_wrong_with_the_rarer_kinds_is_refused_by_field() -> Result<()> {
    let client = managed().await?;
    let namespace = PLANE.namespace("rarer").await?;
    let faults: Api<FaultInjection> = Api::namespaced(client.clone(), &namespace);
    let fault = |path: &str| {
        json!({"metadata": {"name": "fault"}, "spec": {"selector": {"matchLabels": {"app": "a"}}, "httpFault": [
            {"delay": {"fixedDelay": "1s", "percent": "100"}, "match": {"httpMatch": [{"method": "GET", "path": {"regex": path}}]}}]}})
    };
    let message = refusal(create(&faults, fault("a(b")).await)?;
    let field = "spec.httpFault[0].match.httpMatch[0].path.regex";
    ensure!(message.contains(field) && message.contains("is no regular expression"), "{message}");
    create(&faults, fault("a.*b")).await?;
    let states: Api<ManagerState> = Api::all(client);
    let message = refusal(create(&states, json!({"metadata": {"name": "other"}, "spec": {}})).await)?;
    ensure!(message.contains("there is one ManagerState"), "{message}");
    Ok(())
}

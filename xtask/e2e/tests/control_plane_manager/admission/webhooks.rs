//! The answers of the webhooks, and the pods that they change.

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::api::{CircuitBreaker, ManagerState, ShardingConfig};
use ctrlmesh_common::names::{annotation, label, root_ca};
use ctrlmesh_testbed::retry;

use http::{Request, header};
use k8s_openapi::api::admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding};
use k8s_openapi::api::core::v1::{ConfigMap, Pod, ServiceAccount};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::client::Body;
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

use super::bed::*;

#[tokio::test]
async fn what_the_schema_cannot_see_is_refused_by_the_webhook() -> Result<()> {
    let client = managed().await?;
    let namespace = PLANE.namespace("validate").await?;
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

/// What the API server warns of when `object` would be made at `path`.
async fn warnings(client: &Client, path: &str, object: &Value) -> Result<Vec<String>> {
    let request = Request::post(format!("{path}?dryRun=All"))
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from(serde_json::to_vec(object)?))?;
    let response = client.send(request).await?;
    ensure!(response.status().is_success(), "{response:?}");
    let warnings = response.headers().get_all(header::WARNING).into_iter();
    warnings.map(|one| Ok(one.to_str()?.to_owned())).collect()
}

#[tokio::test]
async fn what_is_limited_by_labels_that_nobody_gives_is_a_warning() -> Result<()> {
    let client = managed().await?;
    let namespace = PLANE.namespace("labelled").await?;
    let path = format!("/apis/ctrlmesh.kusionstack.io/v1alpha1/namespaces/{namespace}/shardingconfigs");
    let shard = json!({
        "apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig", "metadata": {"name": "shard"},
        "spec": {"selector": {"matchLabels": {"app": "op"}}, "limits": [{
            "relateResources": [{"apiGroups": [""], "resources": ["configmaps", "secrets"]}],
            "selector": {"matchLabels": {label::NAMESPACE: "shop"}}}]},
    });
    // The list of kinds is not waited for when the manager starts.
    retry(|| async {
        let warnings = warnings(&client, &path, &shard).await?;
        let about: Vec<_> = warnings.iter().filter(|one| one.contains("ctrlmesh-sharding-resource")).collect();
        let [one] = about[..] else { anyhow::bail!("{warnings:?}") };
        ensure!(one.contains("resources[1]"), "{one}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn the_shards_of_a_root_may_trade_their_hashes() -> Result<()> {
    let client = managed().await?;
    let namespace = PLANE.namespace("trade").await?;
    let configs: Api<ShardingConfig> = Api::namespaced(client.clone(), &namespace);
    let hashes = |range: std::ops::Range<u8>| range.map(|hash| hash.to_string()).collect::<Vec<_>>();
    let spec = |first: u8, second: u8| {
        json!({"spec": {"controller": {"leaderElectionName": "op"}, "root": {"prefix": "op", "targetStatefulSet": "op",
            "resourceSelector": config_maps(), "manual": [
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

/// Has the API server refuse a ConfigMap of that name in that namespace, until the binding is gone.
async fn refuse_map(client: &Client, namespace: &str, name: &str) -> Result<()> {
    let rule = json!({"apiGroups": [""], "apiVersions": ["v1"], "resources": ["configmaps"], "operations": ["CREATE", "UPDATE"]});
    let expression = format!("request.namespace != '{namespace}' || object.metadata.name != '{name}'");
    let policy = json!({
        "metadata": {"name": namespace},
        "spec": {"failurePolicy": "Fail", "matchConstraints": {"resourceRules": [rule]},
            "validations": [{"expression": expression, "message": "not in this test"}]},
    });
    create::<ValidatingAdmissionPolicy>(&Api::all(client.clone()), policy).await?;
    let spec = json!({"policyName": namespace, "validationActions": ["Deny"]});
    let binding = json!({"metadata": {"name": namespace}, "spec": spec});
    create::<ValidatingAdmissionPolicyBinding>(&Api::all(client.clone()), binding).await?;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let map: ConfigMap = serde_json::from_value(json!({"metadata": {"name": name}}))?;
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    retry(|| async {
        let refused = maps.create(&dry_run, &map).await.err().context("it may be made")?;
        ensure!(refused.to_string().contains("not in this test"), "{refused}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_pod_is_not_admitted_before_what_it_is_to_trust_is_there() -> Result<()> {
    let client = managed().await?;
    let namespace = operator(&client, "untold").await?;
    refuse_map(&client, &namespace, root_ca::MESH).await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    let refused = create(&pods, pod("op-0", json!({}))).await;
    let said = format!("{:#}", refused.err().context("it was admitted")?);
    ensure!(said.contains(root_ca::MESH) && said.contains("not in this test"), "{said}");
    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(client.clone());
    bindings.delete(&namespace, &DeleteParams::default()).await?;
    retry(|| create(&pods, pod("op-0", json!({})))).await?;
    let maps: Api<ConfigMap> = Api::namespaced(client, &namespace);
    maps.get(root_ca::MESH).await?;
    Ok(())
}

#[tokio::test]
async fn a_pod_gets_its_shard_and_trusts_the_mesh_before_it_is_stored() -> Result<()> {
    let client = managed().await?;
    let namespace = operator(&client, "inject").await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    for (name, shard) in [("op-0", "op-1-normal"), ("op-1", "op-2-normal")] {
        let made = create(&pods, pod(name, json!({}))).await?;
        ensure!(made.labels().get(label::SHARDING_CONFIG_INJECTED).map(String::as_str) == Some(shard));
        let text = serde_json::to_string(&made.spec)?;
        ensure!(text.contains(root_ca::MESH) && !text.contains(root_ca::CLUSTER), "{text}");
    }
    let maps: Api<ConfigMap> = Api::namespaced(client, &namespace);
    let trusted = maps.get(root_ca::MESH).await?.data.context("no data")?;
    ensure!(trusted[root_ca::KEY].contains("BEGIN CERTIFICATE"));
    // Whatever somebody does to it, it is put right again.
    maps.delete(root_ca::MESH, &DeleteParams::default()).await?;
    let right = || async {
        let data = maps.get(root_ca::MESH).await?.data.context("no data")?;
        ensure!(data == trusted, "{data:?}");
        Ok(())
    };
    retry(right).await?;
    let wrong = Patch::Merge(json!({"data": {root_ca::KEY: "none"}}));
    maps.patch(root_ca::MESH, &PatchParams::default(), &wrong).await?;
    retry(right).await?;
    let other = json!({"metadata": {"name": "other"}, "spec": {"containers": [{"name": "a", "image": "none"}]}});
    let other = create(&pods, other).await?;
    ensure!(serde_json::to_string(&other.spec)?.contains(root_ca::CLUSTER), "not enrolled");
    let mut skipped = pod("op-5", json!({}));
    skipped["metadata"]["labels"][label::IGNORE_VALIDATE] = json!("true");
    ensure!(!create(&pods, skipped).await?.labels().contains_key(label::SHARDING_CONFIG_INJECTED));
    Ok(())
}

#[tokio::test]
async fn exempt_objects_are_left_alone_whoever_asks() -> Result<()> {
    let client = managed().await?;
    // The test's own configuration asks about all namespaces.
    for namespace in ["kube-system", NAMESPACE] {
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
        let account = json!({"metadata": {"name": "default"}});
        if accounts.get_opt("default").await?.is_none() {
            create(&accounts, account).await?;
        }
        let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
        let made = create(&pods, pod("op-0", json!({}))).await?;
        pods.delete("op-0", &DeleteParams::default().grace_period(0)).await?;
        ensure!(!made.annotations().contains_key(annotation::INJECTED), "{made:?}");
    }
    let maps: Api<ConfigMap> = Api::namespaced(client, "kube-system");
    ensure!(maps.get_opt(root_ca::MESH).await?.is_none());
    Ok(())
}

#[tokio::test]
async fn every_mode_makes_a_pod_that_the_api_server_takes() -> Result<()> {
    let client = managed().await?;
    let namespace = operator(&client, "modes").await?;
    let pods: Api<Pod> = Api::namespaced(client, &namespace);
    let resources = json!({"limits": {"memory": "64Mi"}}).to_string();
    for (number, mode) in ["env", "kubeconfig"].into_iter().enumerate() {
        let annotations = json!({annotation::INTERCEPTION: mode, annotation::PROXY_RESOURCE: resources});
        let made = create(&pods, pod(&format!("op-{number}"), annotations)).await?;
        let spec = made.spec.clone().context("no spec")?;
        let proxy = &spec.init_containers.clone().context("no sidecar")?[0];
        ensure!(proxy.restart_policy.as_deref() == Some("Always"), "{proxy:?}");
        let security = proxy.security_context.clone().context("no security context")?;
        ensure!(security.read_only_root_filesystem == Some(true) && security.run_as_non_root == Some(true));
        let variables = spec.containers[0].env.clone().unwrap_or_default();
        let expected = if mode == "env" { "KUBERNETES_SERVICE_HOST" } else { "KUBECONFIG" };
        ensure!(variables.iter().any(|variable| variable.name == expected), "{variables:?}");
        // As somebody copies it: what the API server has made of ours is known again.
        let name = format!("op-{}", number + 2);
        let copy = json!({"metadata": {"name": name, "labels": made.metadata.labels, "annotations": made.metadata.annotations, "ownerReferences": made.metadata.owner_references}, "spec": spec});
        let copy = create(&pods, copy).await?.spec.context("no spec")?;
        ensure!(copy.init_containers == spec.init_containers && copy.volumes == spec.volumes);
    }
    let mut host = pod("op-7", json!({}));
    host["spec"]["hostNetwork"] = json!(true);
    let message = refusal(create(&pods, host).await)?;
    ensure!(message.contains("spec.hostNetwork"), "{message}");
    let message = refusal(create(&pods, pod("op-8", json!({annotation::INTERCEPTION: "x"}))).await)?;
    ensure!(message.contains("none of auto, ebpf, env, kubeconfig"), "{message}");
    Ok(())
}

#[tokio::test]
async fn an_ephemeral_container_may_not_mount_what_is_the_proxys() -> Result<()> {
    let client = managed().await?;
    let namespace = operator(&client, "debug").await?;
    let pods: Api<Pod> = Api::namespaced(client, &namespace);
    create(&pods, pod("op-0", json!({annotation::SIDECAR: "true"}))).await?;
    let debug = |more: Value| {
        let mut container = json!({"name": "debug", "image": "none"});
        more.as_object().into_iter().flatten().for_each(|(field, value)| container[field] = value.clone());
        Patch::Strategic(json!({"spec": {"ephemeralContainers": [container]}}))
    };
    let add = async |more: Value| -> Result<Pod> {
        Ok(pods.patch_ephemeral_containers("op-0", &PatchParams::default(), &debug(more)).await?)
    };
    let message = refusal(add(json!({"volumeMounts": [{"name": "ctrlmesh-proxy", "mountPath": "/x"}]})).await)?;
    ensure!(message.contains("volumeMounts"), "{message}");
    let message = refusal(add(json!({"targetContainerName": "ctrlmesh-proxy"})).await)?;
    ensure!(message.contains("targetContainerName"), "{message}");
    add(json!({"targetContainerName": "operator"})).await?;
    Ok(())
}

#[tokio::test]
async fn the_managers_are_listed_for_those_who_knew_the_predecessors() -> Result<()> {
    let client = managed().await?;
    let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), NAMESPACE);
    let endpoint =
        |name: &str, address: &str| json!({"addresses": [address], "targetRef": {"kind": "Pod", "name": name}});
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

//! The predecessor's objects, as its documents and its program make them.

use anyhow::Result;
use ctrlmesh_common::names::FINALIZER;
use ctrlmesh_common::slots::NamespaceHash;
use kube::Client;
use serde_json::{Value, json};

use crate::bed::post;

/// Where its manager is.
pub(crate) const NAMESPACE: &str = "ctrlmesh";

/// Where the operator is.
pub(crate) const OPERATOR: &str = "ops";

/// What its program calls the label of the slot.
pub(crate) const KEY: &str = "ctrlmesh.kusionstack.io/shard-hash";

/// Its Service for webhooks.
const SERVICE: &str = "ctrlmesh-webhook-service";

/// Somebody else's Service and webhook configuration in its namespace.
pub(crate) const NEIGHBOUR: &str = "neighbour";

const TEAMS: [&str; 3] = ["ns-a", "ns-b", "ns-c"];

/// Makes its manager, its webhooks, and what does not depend on the group of its kinds.
pub(crate) async fn install(client: &Client) -> Result<()> {
    for name in [NAMESPACE, OPERATOR] {
        post(client, "/api/v1/namespaces", json!({"metadata": {"name": name}})).await?;
    }
    for name in TEAMS {
        let slot = NamespaceHash::Kusionstack.slot(name).to_string();
        let labels =
            json!({KEY: slot, "ctrlmesh.kusionstack.io/namespace": name, "ctrlmesh.kusionstack.io/control": "true"});
        post(client, "/api/v1/namespaces", json!({"metadata": {"name": name, "labels": labels}})).await?;
        let maps = format!("/api/v1/namespaces/{name}/configmaps");
        post(client, &maps, json!({"metadata": {"name": "object", "labels": labels}})).await?;
    }
    let template = json!({"metadata": {"labels": {"control-plane": "ctrlmesh"}},
        "spec": {"automountServiceAccountToken": false, "containers": [{"name": "manager", "image": "none"}]}});
    let manager = json!({"metadata": {"name": "ctrlmesh"}, "spec": {"replicas": 2,
        "selector": {"matchLabels": {"control-plane": "ctrlmesh"}}, "template": template}});
    post(client, &format!("/apis/apps/v1/namespaces/{NAMESPACE}/deployments"), manager).await?;
    for (name, selected) in [(SERVICE, "ctrlmesh"), (NEIGHBOUR, "neighbour")] {
        let service = json!({"metadata": {"name": name}, "spec": {"clusterIP": "None", "ports": [{"port": 443}],
            "selector": {"control-plane": selected}}});
        post(client, &format!("/api/v1/namespaces/{NAMESPACE}/services"), service).await?;
    }
    let list = json!({"metadata": {"name": "ctrlmesh-sharding-resource"},
        "data": {"resource-config": "groupVersionKinds: {v1: [ConfigMap]}"}});
    post(client, &format!("/api/v1/namespaces/{NAMESPACE}/configmaps"), list).await?;
    let fake = json!({"metadata": {"name": "fake-kubeconfig", "labels": {"ctrlmesh.kusionstack.io/watching": "true"}}, "data": {"fake-kubeconfig.yaml": "server: http://127.0.0.1:5443"}});
    post(client, &format!("/api/v1/namespaces/{OPERATOR}/configmaps"), fake).await
}

/// Its webhooks, which call the Service in its namespace: one by URL, one by reference. Nothing answers there, and both
/// fail closed. A neighbour in its namespace has one, too.
pub(crate) async fn register_webhooks(client: &Client) -> Result<()> {
    let hook = |name: &str, group: &str, resource: &str| {
        json!({"name": name, "sideEffects": "None", "admissionReviewVersions": ["v1"], "failurePolicy": "Fail", "timeoutSeconds": 1,
            "clientConfig": {"service": {"namespace": NAMESPACE, "name": SERVICE, "path": "/mutate-pod"}},
            "objectSelector": {"matchLabels": {"ctrlmesh.kusionstack.io/enable-proxy": "true"}},
            "rules": [{"apiGroups": [group], "apiVersions": ["*"], "operations": ["CREATE"], "resources": [resource]}]})
    };
    let mut by_url = hook("pod.ctrlmesh.mutating.io", "", "pods");
    by_url["clientConfig"] = json!({"url": format!("https://{SERVICE}.{NAMESPACE}.svc:9443/mutate-pod")});
    let by_reference = hook("shard.ctrlmesh.validating.io", "ctrlmesh.kusionstack.io", "shardingconfigs");
    let mut neighbours = hook("neighbour.example.org", "example.org", "things");
    neighbours["clientConfig"]["service"]["name"] = json!(NEIGHBOUR);
    for (plural, name, hook) in [
        ("mutatingwebhookconfigurations", "ctrlmesh-webhook", by_url),
        ("validatingwebhookconfigurations", "ctrlmesh-webhook", by_reference),
        ("validatingwebhookconfigurations", NEIGHBOUR, neighbours),
    ] {
        let path = format!("/apis/admissionregistration.k8s.io/v1/{plural}");
        post(client, &path, json!({"metadata": {"name": name}, "webhooks": [hook]})).await?;
    }
    Ok(())
}

/// A root, its children without owner references, and the rules beside them, in this group.
pub(crate) fn rules(group: &str) -> Vec<(&'static str, Value)> {
    let resources = json!([{"relateResources": [{"apiGroups": [""], "resources": ["configmaps"]}]}]);
    let root = json!({"controller": {"leaderElectionName": "op-lock"}, "root": {"prefix": "op", "targetStatefulSet": "op",
        "canary": {"replicas": 1, "inNamespaces": ["ns-a"]}, "auto": {"shardingSize": 1, "everyShardReplicas": 2},
        "resourceSelector": resources}});
    let child = |name: &str, pods: &[&str], operator: &str| {
        let selector = json!({"matchExpressions": [{"key": format!("{group}/namespace"), "operator": operator, "values": ["ns-a"]}]});
        (
            "shardingconfigs",
            json!({"apiVersion": format!("{group}/v1alpha1"), "kind": "ShardingConfig",
                "metadata": {"name": name, "labels": {format!("{group}/auto-sharding-root"): "op-root"}},
                "spec": {"controller": {"leaderElectionName": "op-lock"},
                    "selector": {"matchExpressions": [{"key": "statefulset.kubernetes.io/pod-name", "operator": "In", "values": pods}]},
                    "limits": [{"relateResources": [{"apiGroups": [""], "resources": ["configmaps"]}], "selector": selector}]}}),
        )
    };
    let object = |plural, kind: &str, name: &str, spec: Value| {
        let metadata = json!({"name": name, "finalizers": [FINALIZER]});
        (plural, json!({"apiVersion": format!("{group}/v1alpha1"), "kind": kind, "metadata": metadata, "spec": spec}))
    };
    let breaker = json!({"selector": {"matchLabels": {"app": "op"}}, "rateLimitings": [{"name": "slow", "triggerPolicy": "Normal",
        "recoverPolicy": {"type": "SleepingWindow", "sleepingWindowSize": "10s"},
        "bucket": {"burst": 10, "interval": "1s", "limit": 10},
        "resourceRules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"], "namespaces": ["*"]}]}]});
    vec![
        object("shardingconfigs", "ShardingConfig", "op-root", root),
        child("op-0-canary", &["op-0"], "In"),
        child("op-1-normal", &["op-1", "op-2"], "NotIn"),
        object("circuitbreakers", "CircuitBreaker", "slow", breaker),
    ]
}

/// The operator's StatefulSet, whose pods are made at once.
pub(crate) fn operator(label: &str) -> Value {
    json!({"metadata": {"name": "op"}, "spec": {"serviceName": "op", "replicas": 3, "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": {"app": "op"}},
        "template": {"metadata": {"labels": {"app": "op", label: "true", "ctrlmesh.kusionstack.io/enable-iptables": "true"},
            "annotations": {"ctrlmesh.kusionstack.io/env-sync": "A=1", "ctrlmesh.kusionstack.io/log-path": "/logs"}},
            "spec": {"automountServiceAccountToken": false, "containers": [{"name": "operator", "image": "none"}]}}}})
}

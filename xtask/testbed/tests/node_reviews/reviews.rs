//! An admission review that one replica is called for is answered by the one that owns the object.

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_testbed::Space;
use k8s_openapi::ByteString;
use rcgen::{CertificateParams, KeyPair};
use serde_json::{Value, json};
use xtask::images::Image;
use xtask::user_cluster::MADE;

use crate::mesh::{self, until};

/// Where the operator serves its webhook.
const PORT: u16 = 9443;

/// The Service of the replica that the API server calls.
const SERVICE: &str = "hook";

/// The shards by hand, and the replica of each.
const REPLICAS: [&str; 2] = ["a", "b"];

/// What the label `share` of an object of this replica's says.
fn share(space: Space<'_>, replica: &str) -> String {
    format!("{}-{replica}", space.name())
}

fn shard(space: Space<'_>, replica: &str) -> Value {
    let config_maps = json!([{"apiGroups": [""], "resources": ["configmaps"]}]);
    json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig", "metadata": {"name": replica},
        "spec": {"selector": {"matchLabels": {"app": replica}},
            "controller": {"leaderElectionName": "reviewed"},
            "webhook": {"certDir": "/certs", "port": PORT},
            "limits": [{"relateResources": config_maps,
                "selector": {"matchLabels": {"share": share(space, replica)}}}]}})
}

/// A replica of an operator of which only the webhook matters.
fn replica(name: &str, annotations: &Value) -> Value {
    let labels = json!({"app": name, "ctrlmesh.kusionstack.io/enable-proxy": "true"});
    let container = json!({"name": "operator", "image": Image::Probe.name(), "args": ["review", format!(":{PORT}"), "/certs"],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "volumeMounts": [{"name": "certs", "mountPath": "/certs", "readOnly": true}]});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels, "annotations": annotations}, "spec": {
        "terminationGracePeriodSeconds": 1, "containers": [container],
        "volumes": [{"name": "certs", "secret": {"secretName": "certs"}}]}})
}

/// Has the API server ask the first replica about each ConfigMap with a share.
fn webhook(space: Space<'_>, certificate: &str) -> Value {
    let rules =
        json!([{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["configmaps"], "operations": ["CREATE"]}]);
    let service = json!({"namespace": space.name(), "name": SERVICE, "port": PORT, "path": "/review"});
    json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": space.name(), "labels": {MADE: "true"}},
        "webhooks": [{"name": "reviews.test.example.com", "sideEffects": "None", "admissionReviewVersions": ["v1"],
            "clientConfig": {"service": service, "caBundle": ByteString(certificate.as_bytes().to_vec())},
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": space.name()}},
            "objectSelector": {"matchExpressions": [{"key": "share", "operator": "Exists"}]}, "rules": rules}]})
}

/// Who refuses a new ConfigMap of this share.
fn refused_by(space: Space<'_>, share: &str) -> Result<String> {
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one", "labels": {"share": share}}});
    let said = space.apply(&map.to_string()).err().context("it is taken")?.to_string();
    let (_, by) = said.split_once("answered by ").with_context(|| said.clone())?;
    Ok(by.split_whitespace().next().unwrap_or_default().to_owned())
}

fn reviews_reach_their_owner(space: Space<'_>, annotations: &Value) -> Result<()> {
    let key = KeyPair::generate()?;
    let certificate = CertificateParams::new([format!("{SERVICE}.{}.svc", space.name())])?.self_signed(&key)?.pem();
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "certs"}, "type": "kubernetes.io/tls",
        "stringData": {"tls.crt": certificate, "tls.key": key.serialize_pem()}});
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": SERVICE},
        "spec": {"selector": {"app": REPLICAS[0]}, "ports": [{"port": PORT}]}});
    let shards = REPLICAS.map(|name| shard(space, name));
    let pods = REPLICAS.map(|name| replica(name, annotations));
    let items = [&[secret, service], &shards[..], &pods].concat();
    space.apply(&json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string())?;
    for pod in REPLICAS {
        space.kubectl(&["wait", &format!("pod/{pod}"), "--for=condition=Ready", "--timeout=120s"])?;
    }
    for shard in REPLICAS {
        space.kubectl(&[
            "wait",
            &format!("shardingconfig/{shard}"),
            "--for=condition=WebhookRouted",
            "--timeout=60s",
        ])?;
    }
    space.apply(&webhook(space, &certificate).to_string())?;
    let [own, others] = REPLICAS.map(|name| share(space, name));
    until("the other replica to answer for what is its own", || {
        Ok(refused_by(space, &others).ok().filter(|by| by == REPLICAS[1]))
    })?;
    ensure!(refused_by(space, &own)? == REPLICAS[0]);
    ensure!(refused_by(space, &others)? == REPLICAS[1]);
    // Nobody's.
    ensure!(refused_by(space, "nobodys")? == REPLICAS[0]);
    // The owner goes, and the one that is called stands in for it. It comes back.
    space.kubectl(&["delete", "pod", REPLICAS[1]])?;
    until("the owner to be stood in for", || Ok(refused_by(space, &others).ok().filter(|by| by == REPLICAS[0])))?;
    space.apply(&replica(REPLICAS[1], annotations).to_string())?;
    until("the owner to answer again", || Ok(refused_by(space, &others).ok().filter(|by| by == REPLICAS[1])))?;
    space.kubectl(&["delete", "validatingwebhookconfiguration", space.name()]).map(drop)
}

#[test]
fn a_review_is_answered_by_the_owner_of_its_object() -> Result<()> {
    mesh::shared().case("reviews", |space| reviews_reach_their_owner(space, &json!({})))
}

#[test]
fn so_is_one_where_a_sidecar_takes_the_owners_connections() -> Result<()> {
    let sidecar = json!({"ctrlmesh.kusionstack.io/sidecar": "true"});
    mesh::shared().case("reviews-sidecar", |space| reviews_reach_their_owner(space, &sidecar))
}

//! Installs ECK as its chart does, and enrols it.

use std::fs;

use anyhow::{Context as _, Result};
use ctrlmesh_testbed::Cluster;
use k8s_openapi::ByteString;
use rcgen::{CertificateParams, KeyPair};
use serde_json::{Value, json};
use xtask::images::{self, Image};
use xtask::tools;

use crate::mesh::{checkout, kubectl, until};
use crate::samples;

/// The operator's namespace.
pub(crate) const NAMESPACE: &str = "elastic-system";

/// Its StatefulSet and service account, and the root that divides it.
pub(crate) const OPERATOR: &str = "elastic-operator";

/// Its webhook: the Service, the Secret of its certificate, and where the chart mounts that.
const SERVICE: &str = "elastic-webhook-server";
const CERTIFICATE: &str = "elastic-webhook-server-cert";
const CERTIFICATE_FOLDER: &str = "/tmp/k8s-webhook-server/serving-certs";
const PORT: u16 = 9443;

/// What the API server says where it cannot ask a webhook.
pub(crate) const UNREACHED: &str = "failed calling webhook";

/// Its lock, a constant in its code.
const LOCK: &str = "elastic-operator-leader";

/// Installs one replica that is not enrolled, and waits until it leads. Gives the certificate of its webhook.
pub(crate) fn operator(cluster: &Cluster) -> Result<String> {
    let node = cluster.node().context("a node of our own")?;
    for archive in images::build(&[Image::ElasticOperator], true)? {
        node.load(&archive)?;
    }
    cluster.make(NAMESPACE)?;
    let definitions = tools::elastic_operator().with_file_name("crds.yaml").display().to_string();
    // By the server: the definitions are too long for what kubectl would write into an annotation.
    kubectl(cluster, &["apply", "--server-side", "--filename", &definitions])?;
    // It fails where a definition has no conditions yet.
    let wait = ["wait", "crd", "--all", "--for=condition=Established", "--timeout=60s"];
    until("the definitions to be served", || Ok(kubectl(cluster, &wait).ok()))?;
    let key = KeyPair::generate()?;
    let certificate = CertificateParams::new([format!("{SERVICE}.{NAMESPACE}.svc")])?.self_signed(&key)?.pem();
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": CERTIFICATE}, "type": "kubernetes.io/tls",
        "stringData": {"tls.crt": certificate, "tls.key": key.serialize_pem()}});
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": SERVICE},
        "spec": {"selector": {"app": OPERATOR}, "ports": [{"port": 443, "targetPort": PORT}]}});
    apply(cluster, &[&[secret, service, workload(1, false)], &rights()[..]].concat())?;
    rolled_out(cluster)?;
    until("the operator to lead", || {
        let holder = "jsonpath={.spec.holderIdentity}";
        let holder = own(cluster, &["get", "lease", LOCK, "--ignore-not-found", "--output", holder])?;
        Ok((!holder.is_empty()).then_some(()))
    })?;
    Ok(certificate)
}

/// Has the API server ask its webhooks, and waits until they answer.
pub(crate) fn webhooks(cluster: &Cluster, certificate: &str, sample: &Value) -> Result<()> {
    apply(cluster, &[configuration(cluster, certificate)?])?;
    // For a moment the Service has no address yet.
    until("the operator's webhook to answer", || {
        let create = ["--namespace", NAMESPACE, "create", "--dry-run=server", "--filename", "-"];
        let asked = cluster.ask(&create, &sample.to_string());
        let reached = asked.map_or_else(|error| !format!("{error:#}").contains(UNREACHED), |_| true);
        Ok(reached.then_some(()))
    })
}

/// Divides it into three shards, and has it enrolled by a rolling update.
pub(crate) fn enrol(cluster: &Cluster) -> Result<()> {
    let root = root(cluster)?;
    apply(cluster, &[labelling(&root)?, root])?;
    let root = format!("shardingconfig/{OPERATOR}");
    own(cluster, &["wait", &root, "--for=condition=Labelled", "--timeout=300s"])?;
    apply(cluster, &[workload(3, true)])?;
    rolled_out(cluster)?;
    own(cluster, &["wait", &root, "--for=condition=Settled", "--timeout=300s"]).map(drop)
}

/// All rights, instead of those of the chart: these name the one lock, and each shard has a lock of its own.
fn rights() -> [Value; 2] {
    let subject = json!([{"kind": "ServiceAccount", "name": OPERATOR, "namespace": NAMESPACE}]);
    let role = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"});
    [
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": OPERATOR}}),
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": OPERATOR},
            "roleRef": role, "subjects": subject}),
    ]
}

/// The chart's StatefulSet, with its configuration as flags and with a probe, so that the webhook is there when it is
/// ready.
fn workload(replicas: u32, enrolled: bool) -> Value {
    let mut labels = json!({"app": OPERATOR});
    if enrolled {
        labels["ctrlmesh.kusionstack.io/enable-proxy"] = json!("true");
    }
    let webhook_port = format!("--webhook-port={PORT}");
    let certificates = format!("--webhook-cert-dir={CERTIFICATE_FOLDER}");
    let namespace = format!("--operator-namespace={NAMESPACE}");
    let field = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let container = json!({
        "name": "manager",
        "image": Image::ElasticOperator.name(),
        "args": ["manager", namespace, "--enable-webhook", "--manage-webhook-certs=false", certificates, webhook_port,
            "--disable-telemetry"],
        "env": [field("POD_IP", "status.podIP")],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "securityContext": {"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "cert", "mountPath": CERTIFICATE_FOLDER, "readOnly": true}]});
    let pod = json!({"serviceAccountName": OPERATOR, "terminationGracePeriodSeconds": 10,
        "securityContext": {"runAsNonRoot": true, "runAsUser": 1000}, "containers": [container],
        "volumes": [{"name": "cert", "secret": {"secretName": CERTIFICATE}}]});
    json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": OPERATOR}, "spec": {
        "replicas": replicas, "serviceName": OPERATOR, "selector": {"matchLabels": {"app": OPERATOR}},
        "template": {"metadata": {"labels": labels}, "spec": pod}}})
}

/// Its own configuration of its webhooks. A review that nobody answers is refused, so that none passes unasked.
fn configuration(cluster: &Cluster, certificate: &str) -> Result<Value> {
    let file = tools::elastic_operator().with_file_name("webhook.yaml");
    let mut manifests = samples::read(cluster, &file)?;
    let mut webhooks = manifests.pop().context("webhooks")?;
    webhooks["metadata"]["name"] = json!("elastic-webhook.k8s.elastic.co");
    for webhook in webhooks["webhooks"].as_array_mut().context("webhooks")? {
        webhook["failurePolicy"] = json!("Fail");
        let client = &mut webhook["clientConfig"];
        client["caBundle"] = json!(ByteString(certificate.as_bytes().to_vec()));
        client["service"]["name"] = json!(SERVICE);
        client["service"]["namespace"] = json!(NAMESPACE);
    }
    Ok(webhooks)
}

/// The example of the documentation.
fn root(cluster: &Cluster) -> Result<Value> {
    let docs = fs::read_to_string(checkout("docs/operators.md"))?;
    let (_, example) = docs.split_once("## Elastic Cloud on Kubernetes").context("the part about ECK")?;
    let (_, example) = example.split_once("```yaml\n").context("an example")?;
    let (example, _) = example.split_once("```").context("its end")?;
    samples::manifests(cluster, example)?.pop().context("a root")
}

/// Lets the manager label what the root divides.
fn labelling(root: &Value) -> Result<Value> {
    let kinds = root["spec"]["root"]["resourceSelector"][0]["relateResources"].as_array().context("kinds")?;
    let mut rules = kinds.clone();
    for rule in &mut rules {
        rule["verbs"] = json!(["list", "watch", "patch"]);
    }
    Ok(json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": {"name": "ctrlmesh-labels-elastic",
            "labels": {"ctrlmesh.kusionstack.io/aggregate-to-labels": "true"}},
        "rules": rules}))
}

fn apply(cluster: &Cluster, items: &[Value]) -> Result<()> {
    cluster.space(NAMESPACE).apply(&json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string())
}

/// What kubectl answers in the operator's namespace.
fn own(cluster: &Cluster, arguments: &[&str]) -> Result<String> {
    cluster.space(NAMESPACE).kubectl(arguments)
}

fn rolled_out(cluster: &Cluster) -> Result<()> {
    own(cluster, &["rollout", "status", &format!("statefulset/{OPERATOR}"), "--timeout=300s"]).map(drop)
}

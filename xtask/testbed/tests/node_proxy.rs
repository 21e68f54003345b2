//! The proxy of a node where users have it: in a DaemonSet on a real node, serving an operator in a pod that knows
//! nothing of us.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_testbed::audit_log::AuditEvent;
use ctrlmesh_testbed::{Cluster, Node, Options, Space, until};
use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};
use serde_json::{Value, json};
use xtask::images::{self, Image};

mod mesh;

/// What the proxy cannot do without; it runs as root with these, and not privileged.
const CAPABILITIES: [&str; 4] = ["BPF", "NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE"];

/// Where the proxy finds the pods of its node, on the node.
const FOLDER: &str = "/var/lib/ctrlmesh";

/// Where the operator's manifests are.
fn config() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/example-operator/config")
}

/// A node with the images, and with what of the operator belongs to no namespace.
fn start() -> Result<Cluster> {
    let node = Node::start(&Options { audit: true, ..Options::default() })?;
    for archive in images::build(&[Image::Proxy, Image::ExampleOperator], true)? {
        node.load(&archive)?;
    }
    let cluster = Cluster::of(node);
    for file in ["crd/web.example.com_websites.yaml", "rbac/role.yaml"] {
        let status = cluster.kubectl().args(["apply", "--filename"]).arg(config().join(file)).status()?;
        ensure!(status.success(), "apply {file}");
    }
    Ok(cluster)
}

/// The account of the operator, what it trusts, and itself: only the mesh's CA, so that it cannot pass the proxy by.
fn operator(space: Space<'_>, ca: &str) -> Value {
    let namespace = space.name();
    let labels = json!({"app": "operator"});
    let subject = json!([{"kind": "ServiceAccount", "name": "operator", "namespace": namespace}]);
    let account = json!({"projected": {"sources": [
        {"serviceAccountToken": {"path": "token"}},
        {"configMap": {"name": "mesh"}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
    ]}});
    let pod = json!({
        "serviceAccountName": "operator",
        "automountServiceAccountToken": false,
        "containers": [{
            "name": "manager",
            "image": Image::ExampleOperator.name(),
            "args": ["--leader-elect"],
            "volumeMounts": [{"name": "account", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}],
        }],
        "volumes": [merge(json!({"name": "account"}), account)],
    });
    list(&[
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "operator"}}),
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mesh"}, "data": {"ca.crt": ca}}),
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": namespace},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "example-operator"}, "subjects": subject}),
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "leader"}, "rules": [
            {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]}]}),
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": "leader"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "leader"}, "subjects": subject}),
        json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "operator"}, "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod}}}),
    ])
}

/// The proxy of every node.
fn proxy(ca: &str, key: &str) -> Value {
    let labels = json!({"app": "proxy"});
    let host = |name: &str, path: &str, kind: &str| json!({"name": name, "hostPath": {"path": path, "type": kind}});
    let pod = json!({
        "hostNetwork": true,
        "hostPID": true,
        "containers": [{
            "name": "proxy",
            "image": Image::Proxy.name(),
            "args": ["node", "--pods=/pods/list", "--mesh-ca=/mesh/ca.crt,/mesh/ca.key", "--upstream-ca=/real/ca.crt"],
            "readinessProbe": {"httpGet": {"path": "/readyz", "port": 5441}, "periodSeconds": 1},
            "securityContext": {
                "runAsUser": 0,
                "readOnlyRootFilesystem": true,
                "allowPrivilegeEscalation": false,
                "seccompProfile": {"type": "RuntimeDefault"},
                "capabilities": {"drop": ["ALL"], "add": CAPABILITIES},
            },
            "volumeMounts": [
                {"name": "pods", "mountPath": "/pods"},
                {"name": "mesh", "mountPath": "/mesh"},
                {"name": "real", "mountPath": "/real"},
                {"name": "cgroup", "mountPath": "/sys/fs/cgroup"},
                {"name": "bpf", "mountPath": "/sys/fs/bpf"},
            ],
        }],
        "volumes": [
            host("pods", FOLDER, "DirectoryOrCreate"),
            host("cgroup", "/sys/fs/cgroup", "Directory"),
            host("bpf", "/sys/fs/bpf", "Directory"),
            {"name": "mesh", "secret": {"secretName": "mesh"}},
            {"name": "real", "configMap": {"name": "kube-root-ca.crt"}},
        ],
    });
    list(&[
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "mesh"}, "stringData": {"ca.crt": ca, "ca.key": key}}),
        json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "proxy"}, "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod}}}),
    ])
}

fn list(items: &[Value]) -> Value {
    json!({"apiVersion": "v1", "kind": "List", "items": items})
}

/// The fields of two objects in one.
fn merge(mut one: Value, other: Value) -> Value {
    if let (Some(one), Value::Object(other)) = (one.as_object_mut(), other) {
        one.extend(other);
    }
    one
}

/// A CA for the mesh: certificate and key.
fn authority() -> Result<(String, String)> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate()?;
    Ok((params.self_signed(&key)?.pem(), key.serialize_pem()))
}

/// Tells the proxy which pods it serves, through the folder of the node.
fn serve(node: &Node, files: &[(&str, &Value)]) -> Result<()> {
    let folder = node.folder().join(FOLDER.replacen("/var/lib", "lib", 1));
    fs::create_dir_all(&folder)?;
    for (name, content) in files {
        fs::write(folder.join("next"), content.to_string())?;
        fs::rename(folder.join("next"), folder.join(name))?;
    }
    Ok(())
}

/// What the list says of the operator's pod.
fn enrolled(space: Space<'_>, node: &Node) -> Result<Value> {
    let pods = space.kubectl(&["get", "pods", "-l", "app=operator", "-o", "json"])?;
    let pod = &serde_json::from_str::<Value>(&pods)?["items"][0];
    let text = |value: &Value| value.as_str().map(str::to_owned).context("not there yet");
    let container = text(&pod["status"]["containerStatuses"][0]["containerID"])?;
    let container = container.trim_start_matches("containerd://").to_owned();
    let tasks = node.command("ctr")?.args(["--namespace", "k8s.io", "tasks", "list"]).output()?;
    let tasks = String::from_utf8(tasks.stdout)?;
    let task = tasks.lines().find(|line| line.starts_with(&container)).context("no task yet")?;
    let pid: u32 = task.split_whitespace().nth(1).context("a task without process")?.parse()?;
    let name = format!("{}/{}", space.name(), text(&pod["metadata"]["name"])?);
    Ok(json!({"pod": name, "uid": text(&pod["metadata"]["uid"])?, "pid": pid, "policy": "policy"}))
}

fn website(name: &str, shard: &str) -> String {
    let (version, labels) = ("web.example.com/v1alpha1", json!({"shard": shard}));
    let spec = json!({"title": "Hello", "pages": 2});
    json!({"apiVersion": version, "kind": "Website", "metadata": {"name": name, "labels": labels}, "spec": spec})
        .to_string()
}

/// Where the operator's requests came from that the API server took, each address once.
fn sources(space: Space<'_>, node: &Node) -> Result<Vec<String>> {
    let user = format!("system:serviceaccount:{}:operator", space.name());
    let events = AuditEvent::read(&node.control_plane().audit_log(), &user)?.into_iter();
    let mut found: Vec<String> = events
        .filter(|event| event.user.username == user)
        .filter_map(|event| event.sources.into_iter().next())
        .collect();
    found.sort();
    found.dedup();
    Ok(found)
}

#[test]
fn an_operator_gets_its_share_also_while_the_proxy_restarts() -> Result<()> {
    let cluster = start()?;
    let node = cluster.node().context("a node")?;
    cluster.case("served", |space| {
        let limits = json!([{
            "relateResources": [{"apiGroups": ["web.example.com"], "resources": ["websites"]}],
            "selector": "shard=mine",
        }]);
        let policy = json!({"mode": "enforce", "limits": limits});
        serve(node, &[("policy", &policy), ("list", &json!({"pods": []}))])?;
        let (ca, key) = authority()?;
        space.apply(&operator(space, &ca).to_string())?;
        space.apply(&proxy(&ca, &key).to_string())?;
        space.kubectl(&["rollout", "status", "daemonset/proxy", "--timeout=300s"])?;
        space.apply(&website("mine", "mine"))?;
        space.apply(&website("foreign", "other"))?;
        let pod = until("the operator's process", || Ok(enrolled(space, node).ok()))?;
        serve(node, &[("list", &json!({"pods": [pod]}))])?;
        space.wait("website/mine", "condition=Published")?;

        space.kubectl(&["delete", "pod", "-l", "app=proxy"])?;
        space.kubectl(&["rollout", "status", "daemonset/proxy", "--timeout=300s"])?;
        space.apply(&website("later", "mine"))?;
        space.wait("website/later", "condition=Published")?;

        let pages = space.kubectl(&["get", "configmaps", "-l", "web.example.com/site", "-o", "name"])?;
        let pages: Vec<&str> = pages.lines().collect();
        let mine = ["later-page-0", "later-page-1", "mine-page-0", "mine-page-1"];
        assert_eq!(pages, mine.map(|page| format!("configmap/{page}")));
        let address = node.control_plane().url().trim_start_matches("https://");
        let address = address.split(':').next().context("an address")?;
        assert_eq!(sources(space, node)?, [address], "only the node's address: never the pod's");
        mesh::operator::restarted_for_the_lock_only(space)
    })
}

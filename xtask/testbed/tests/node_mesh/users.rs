//! What users do with what they are given: a registry of their own, and the token of an account.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use xtask::images::Image;

use crate::mesh::operator::{self, PLAIN};
use crate::mesh::{self, NAMESPACE, in_ours, until};

/// The example that begins with this line, up to its end.
fn example(docs: &str, first: &str) -> Result<String> {
    let (_, rest) = docs.split_once(&format!("```yaml\n{first}")).context("an example")?;
    let (rest, _) = rest.split_once("```").context("its end")?;
    Ok(format!("{first}{rest}"))
}

#[test]
fn with_a_registry_of_the_users_every_image_comes_from_there() -> Result<()> {
    let docs = fs::read_to_string(mesh::checkout("docs/getting-started.md"))?;
    let text = example(&docs, "resources: [../deploy]")?;
    // Only what is beside it can be named.
    let beside = mesh::checkout("target");
    fs::create_dir_all(&beside)?;
    let folder = tempfile::tempdir_in(beside)?;
    fs::write(folder.path().join("kustomization.yaml"), text.replace("../deploy", "../../deploy"))?;
    let ours = |folder: &str| mesh::kubectl(mesh::shared(), &["kustomize", folder]);
    let images = |text: &str| {
        let lines =
            text.lines().map(str::trim_start).filter(|line| line.contains("/proxy:") || line.starts_with("image:"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let plain = images(&ours(&mesh::checkout("deploy").display().to_string())?);
    ensure!(plain.iter().any(|image| image.contains("ctrlmesh.dev/")), "{plain:?}");
    let theirs = images(&ours(&folder.path().display().to_string())?);
    let from_theirs = |image: &String| image.contains(" registry.example.com/ctrlmesh/");
    // Of the manager, of the node's proxy, and of proxies inside pods.
    ensure!(theirs.len() == 3 && theirs.iter().all(from_theirs), "{theirs:?}");
    Ok(())
}

#[test]
fn by_the_token_of_a_nodes_proxy_no_secret_is_to_be_had() -> Result<()> {
    let cluster = mesh::shared();
    let account = "ctrlmesh-node";
    let token = in_ours(cluster, &["create", "token", account])?;
    let mut config = mesh::json(cluster, &["config", "view", "--raw", "--minify", "--flatten"])?;
    config["users"][0]["user"] = json!({"token": token.trim()});
    let file = tempfile::NamedTempFile::new()?;
    fs::write(file.path(), config.to_string())?;
    let as_it = |arguments: &[&str]| -> Result<(bool, String)> {
        let output = cluster.kubectl().arg("--kubeconfig").arg(file.path()).args(arguments).output()?;
        Ok((output.status.success(), String::from_utf8(output.stderr)?))
    };
    let user = format!("system:serviceaccount:{NAMESPACE}:{account}");
    for ask in [&["get", "secrets", "--all-namespaces"][..], &["get", "secret", "ctrlmesh-ca", "-n", NAMESPACE]] {
        let (may, said) = as_it(ask)?;
        ensure!(!may && said.contains("(Forbidden)") && said.contains(&user), "{ask:?}: {said}");
    }
    let (may, said) = as_it(&["get", "daemonset", account, "-n", NAMESPACE])?;
    ensure!(may, "{said}");
    Ok(())
}

#[test]
fn a_pod_that_pretends_to_be_its_node_is_told_of_nobody() -> Result<()> {
    let cluster = mesh::shared();
    let address = ["get", "service", "ctrlmesh-manager", "--output=jsonpath={.spec.clusterIP}"];
    let address = in_ours(cluster, &address)?;
    let ca = ["get", "configmap", "ctrlmesh-root-ca", r"--output=jsonpath={.data.manager-ca\.crt}"];
    let ca = in_ours(cluster, &ca)?;
    cluster.case("pretends", |space| {
        // What a proxy inside a pod is given, in the hands of one who says that it is the node's.
        let arguments = [
            "node",
            "--node=$(NODE)",
            "--manager=ctrlmesh-manager.ctrlmesh-system.svc:8071",
            &format!("--manager-address={address}"),
            "--manager-ca=/given/manager-ca.crt",
            "--token=/given/token",
            "--state-dir=/state",
        ];
        let node = json!({"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}});
        let mounts =
            json!([{"name": "given", "mountPath": "/given"}, {"name": "state", "mountPath": "/state"}]);
        let given = json!([
            {"serviceAccountToken": {"path": "token", "audience": "ctrlmesh"}},
            {"configMap": {"name": "manager-ca"}}]);
        let mut metadata = operator::metadata(PLAIN);
        metadata["name"] = json!("pretender");
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "proxy", "image": Image::Proxy.name(), "args": arguments, "env": [node], "volumeMounts": mounts}],
            "volumes": [{"name": "given", "projected": {"sources": given}}, {"name": "state", "emptyDir": {}}]}});
        // Of the mesh's own map an enrolled pod is given the API server's CA, whatever it picks.
        let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "manager-ca"}, "data": {"manager-ca.crt": ca}});
        let items = json!({"apiVersion": "v1", "kind": "List", "items": [map, pod]});
        space.apply(&items.to_string())?;
        until("it to be refused", || {
            let said = space.kubectl(&["logs", "pretender"]).unwrap_or_default();
            ensure!(!said.contains("the manager is there"), "{said}");
            let refused = "its service account is not that of node proxies (PermissionDenied)";
            Ok(said.contains(refused).then_some(()))
        })
    })
}

//! An enrolled pod that makes requests to other pods.

use anyhow::Result;
use ctrlmesh_testbed::Space;
use serde_json::{Value, json};
use xtask::images::Image;

use super::operator::{self, NAME, OperatorSpec};

/// The pod with kubectl.
pub(crate) const CLIENT: &str = "client";

/// An enrolled pod with kubectl, beside one that is looked into; with the operator's account, which may do so here.
pub(crate) fn deploy(space: Space<'_>) -> Result<()> {
    deploy_annotated(space, &json!({}))
}

/// The same with these annotations.
pub(crate) fn deploy_annotated(space: Space<'_>, annotations: &Value) -> Result<()> {
    let labels = json!({"app": "operator", "ctrlmesh.kusionstack.io/enable-proxy": "true"});
    let container =
        |name: &str, image: Image, arguments: &[&str]| json!({"name": name, "image": image.name(), "args": arguments});
    let serve = container("probe", Image::Probe, &["serve"]);
    // It asks for nothing until it is asked.
    let kubectl = container("kubectl", Image::Kubectl, &["proxy", "--port=8001"]);
    let role = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "looks-into-pods"});
    let items = [
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "looks-into-pods"}, "rules": [
            {"apiGroups": [""], "resources": ["pods", "pods/log"], "verbs": ["get", "list", "watch"]},
            {"apiGroups": [""], "resources": ["pods/exec", "pods/portforward", "pods/attach"], "verbs": ["get", "create"]}]}),
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": "looks-into-pods"},
            "roleRef": role, "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": space.name()}]}),
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web", "labels": {"app": "web"}}, "spec": {
            "terminationGracePeriodSeconds": 1, "containers": [serve]}}),
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": CLIENT, "labels": labels, "annotations": annotations}, "spec": {
            "serviceAccountName": NAME, "terminationGracePeriodSeconds": 1, "containers": [kubectl, serve]}}),
    ];
    space.apply(&json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string())?;
    for pod in ["pod/web", "pod/client"] {
        space.kubectl(&["wait", pod, "--for=condition=Ready", "--timeout=120s"])?;
    }
    Ok(())
}

/// An enrolled pod with kubectl, with the operator's account, which takes the API server to be at an address of its
/// own.
pub(crate) fn dials(space: Space<'_>, wanted: OperatorSpec<'_>, host: &str, port: u64) -> Result<()> {
    let mut metadata = operator::metadata(wanted);
    metadata["name"] = json!(CLIENT);
    let env = json!([{"name": "KUBERNETES_SERVICE_HOST", "value": host},
        {"name": "KUBERNETES_SERVICE_PORT", "value": port.to_string()}]);
    let kubectl =
        json!({"name": "kubectl", "image": Image::Kubectl.name(), "env": env, "args": ["proxy", "--port=8001"]});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {
        "serviceAccountName": NAME, "terminationGracePeriodSeconds": 1, "containers": [kubectl]}});
    space.apply(&pod.to_string())?;
    space.kubectl(&["wait", "pod/client", "--for=condition=Ready", "--timeout=120s"]).map(drop)
}

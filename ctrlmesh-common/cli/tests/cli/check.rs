//! `ctrlmesh check` and `ctrlmesh version` before a scripted API server.

use std::process::{Command, Output};
use std::sync::LazyLock;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::harness::run::{Bed, output, stderr, stdout};
use crate::harness::upstream::ReceivedRequest;

const OURS: &str = "/apis/ctrlmesh.kusionstack.io/v1alpha1";
const OWN: &str = "/namespaces/ctrlmesh-system";
const OWN_VERSION: &str = env!("CARGO_PKG_VERSION");

/// What is wrong with a cluster.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cluster {
    Healthy,
    /// An old API server and kernel, no manager, and a node proxy that ends.
    Broken,
    /// The user may ask for the version only.
    Forbidden,
    /// Nothing of ours is there.
    Empty,
}

async fn bed(cluster: Cluster) -> Bed {
    Bed::answering(move |seen| answer(cluster, seen)).await
}

async fn check(cluster: Cluster, arguments: &[&str]) -> Output {
    bed(cluster).await.ctrlmesh(&[&["check"], arguments].concat()).await
}

fn answer(cluster: Cluster, seen: &ReceivedRequest) -> (StatusCode, Value) {
    let path = seen.target.split('?').next().unwrap_or_default();
    let broken = cluster == Cluster::Broken;
    match (cluster, path) {
        (_, "/version") => {
            let version = if broken { "v1.29.0" } else { "v1.36.1" };
            let empty =
                ["buildDate", "compiler", "gitCommit", "gitTreeState", "goVersion", "major", "minor", "platform"];
            let mut info: Value = empty.iter().map(|field| ((*field).to_owned(), json!(""))).collect();
            info["gitVersion"] = json!(version);
            (StatusCode::OK, info)
        }
        (Cluster::Forbidden, _) => failure(StatusCode::FORBIDDEN, "Forbidden", "is forbidden: User \"jo\" cannot"),
        _ if seen.method == Method::POST => created(cluster, path, seen),
        _ => read(cluster, path),
    }
}

fn failure(status: StatusCode, reason: &str, message: &str) -> (StatusCode, Value) {
    let code = status.as_u16();
    (status, json!({"kind": "Status", "status": "Failure", "reason": reason, "code": code, "message": message}))
}

/// Reviews of rights, and dry runs.
fn created(cluster: Cluster, path: &str, seen: &ReceivedRequest) -> (StatusCode, Value) {
    let mut object: Value = serde_json::from_slice(&seen.body).unwrap();
    if path.ends_with("/selfsubjectaccessreviews") {
        object["status"] = json!({"allowed": true});
        return (StatusCode::CREATED, object);
    }
    assert!(seen.target.contains("dryRun=All"), "{}", seen.target);
    if cluster == Cluster::Broken {
        let message = "Internal error occurred: failed calling webhook \"validate.ctrlmesh.kusionstack.io\": timeout";
        return failure(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", message);
    }
    if object["spec"]["trafficInterceptRules"][0].is_object() {
        let message = "admission webhook \"validate.ctrlmesh.kusionstack.io\" denied the request: spec: no";
        return failure(StatusCode::BAD_REQUEST, "BadRequest", message);
    }
    object["metadata"]["name"] = json!("ctrlmesh-check-x");
    object["metadata"]["annotations"] = json!({"ctrlmesh.kusionstack.io/injected": "true"});
    (StatusCode::CREATED, object)
}

fn read(cluster: Cluster, path: &str) -> (StatusCode, Value) {
    let list = |items: Value| (StatusCode::OK, json!({"metadata": {}, "items": items}));
    let now = || http_time();
    if path == "/apis/admissionregistration.k8s.io/v1" {
        let names = ["validatingadmissionpolicies", "mutatingadmissionpolicies"];
        let resource =
            |name: &str| json!({"name": name, "singularName": "", "namespaced": false, "kind": "P", "verbs": []});
        let all: Vec<Value> = names.iter().map(|name| resource(name)).collect();
        return (StatusCode::OK, json!({"groupVersion": "admissionregistration.k8s.io/v1", "resources": all}));
    }
    match path {
        "/api/v1/nodes" => return list(json!([node(cluster)])),
        "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases" => {
            return list(json!([{"metadata": {"name": "node-1"}, "spec": {"renewTime": now()}}]));
        }
        _ => {}
    }
    if path.ends_with("/nodes/node-1/proxy/metrics") {
        // The scripted server answers in JSON only; so it says nothing of cgroups.
        return (StatusCode::OK, json!("kubelet_active_pods 3"));
    }
    let found = match cluster {
        Cluster::Empty => None,
        _ => installed(cluster, path),
    };
    match found {
        Some(object) => (StatusCode::OK, object),
        None if path.ends_with('s') || path.ends_with("endpointslices") => list(json!([])),
        None => failure(StatusCode::NOT_FOUND, "NotFound", "not found"),
    }
}

fn node(cluster: Cluster) -> Value {
    let kernel = if cluster == Cluster::Broken { "5.10.0-8-amd64" } else { "6.12.1" };
    json!({"metadata": {"name": "node-1", "labels": {"kubernetes.io/os": "linux"}}, "status": {
        "conditions": [{"type": "Ready", "status": "True"}],
        "nodeInfo": {"architecture": "amd64", "bootID": "", "containerRuntimeVersion": "containerd://2.1.0",
            "kernelVersion": kernel, "kubeProxyVersion": "", "kubeletVersion": "v1.36.0", "machineID": "",
            "operatingSystem": "linux", "osImage": "", "systemUUID": ""}}})
}

/// What an installation has at this path.
fn installed(cluster: Cluster, path: &str) -> Option<Value> {
    let name = path.rsplit('/').next().unwrap_or_default();
    if path.contains("/customresourcedefinitions/") {
        let all = ctrlmesh_common::api::definitions().map(|one| serde_json::to_value(one).unwrap());
        let mut found = all.into_iter().find(|one| one["metadata"]["name"] == name)?;
        found["status"] = json!({"conditions": [{"type": "Established", "status": "True"}]});
        return Some(found);
    }
    if path.contains("serviceaccounts/") || path.contains("/rbac.authorization.k8s.io/") {
        return right(path, name);
    }
    if path.contains("webhookconfigurations/") {
        let hook = json!({"name": "hook", "admissionReviewVersions": ["v1"], "sideEffects": "None",
            "clientConfig": {"caBundle": BASE64_STANDARD.encode(authority())}});
        return Some(json!({"metadata": {"name": name}, "webhooks": [hook]}));
    }
    parts(cluster, path)
}

/// Managers, node proxies and what they write.
fn parts(cluster: Cluster, path: &str) -> Option<Value> {
    let broken = cluster == Cluster::Broken;
    let apps = format!("/apis/apps/v1{OWN}");
    let items = |items: Value| Some(json!({"metadata": {}, "items": items}));
    match path {
        _ if path == format!("{apps}/deployments/ctrlmesh-manager") => Some(json!({"metadata": {},
            "spec": {"replicas": 2, "selector": {}, "template": {}},
            "status": {"availableReplicas": if broken { 0 } else { 2 }}})),
        _ if path == format!("{apps}/daemonsets/ctrlmesh-node") => Some(json!({"metadata": {},
            "spec": {"selector": {}, "template": {}}, "status": {"currentNumberScheduled": 1,
            "desiredNumberScheduled": 1, "numberMisscheduled": 0, "numberReady": 1}})),
        _ if path == format!("/api/v1{OWN}/pods") => items(pods(broken)),
        _ if path == format!("/apis/coordination.k8s.io/v1{OWN}/leases/ctrlmesh-manager") => {
            Some(json!({"metadata": {},
            "spec": {"holderIdentity": "manager-a_00ff", "leaseDurationSeconds": 8,
                "renewTime": if broken { "2020-01-01T00:00:00.000000Z".to_owned() } else { http_time() }}}))
        }
        _ if path == format!("{OURS}/managerstates/ctrlmesh-manager") => {
            Some(json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ManagerState",
                "metadata": {"name": "ctrlmesh-manager"},
                "status": {"endpoints": [{"name": "manager-a", "podIP": "10.0.0.1", "leader": true}]}}))
        }
        _ if path == format!("/apis/discovery.k8s.io/v1{OWN}/endpointslices") && !broken => items(json!([
            {"metadata": {}, "addressType": "IPv4", "endpoints": [{"addresses": ["10.0.0.1"]}]}])),
        _ if path == format!("/api/v1{OWN}/configmaps/ctrlmesh-root-ca") => {
            let pem = authority();
            Some(json!({"metadata": {}, "data": {"ca.crt": pem, "manager-ca.crt": pem}}))
        }
        _ => None,
    }
}

/// One pod of each part, of this version. The containers have both names, so that either list may have them.
fn pods(broken: bool) -> Value {
    let image = format!("i:{OWN_VERSION}");
    let containers = ["manager", "proxy"].map(|name| json!({"name": name, "image": image}));
    let mut status = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
    if broken {
        status = json!({"phase": "Running", "containerStatuses": [{"name": "proxy", "image": "", "imageID": "",
            "ready": false, "restartCount": 4, "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"exitCode": 1, "message": "the kernel (5.10.0) is too old\n"}}}]});
    }
    json!([{"metadata": {"namespace": "ctrlmesh-system", "name": "manager-a"},
        "spec": {"nodeName": "node-1", "containers": containers}, "status": status}])
}

/// An account, a role or a binding, as this version has it.
fn right(path: &str, name: &str) -> Option<Value> {
    let text = ctrlmesh_manager::install::rbac::yaml() + "---\n" + include_str!("../../../../deploy/node/account.yaml");
    ctrlmesh_common::api::documents(&text).find_map(|document| {
        let object: Value = serde_saphyr::from_str(&document).unwrap();
        let kind = object["kind"].as_str()?.to_lowercase();
        let is_there = match object["metadata"]["namespace"].as_str() {
            Some(namespace) => path.ends_with(&format!("/namespaces/{namespace}/{kind}s/{name}")),
            None => path.ends_with(&format!("/v1/{kind}s/{name}")),
        };
        (is_there && object["metadata"]["name"] == name).then_some(object)
    })
}

/// The only authority.
fn authority() -> &'static str {
    static PEM: LazyLock<String> =
        LazyLock::new(|| rcgen::generate_simple_self_signed(["ca".to_owned()]).unwrap().cert.pem());
    &PEM
}

fn http_time() -> String {
    jiff::Timestamp::now().to_string()
}

/// The states of a document's results, each with its check.
fn states(printed: &str) -> Vec<(String, String, String)> {
    let document: Value = serde_json::from_str(printed).unwrap();
    assert_eq!(document["kind"], "Check");
    let text = |one: &Value, field: &str| one[field].as_str().unwrap().to_owned();
    let checks = document["checks"].as_array().unwrap().iter();
    checks.map(|one| (text(one, "state"), text(one, "check"), text(one, "message"))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_healthy_cluster_passes_every_check() {
    let checked = check(Cluster::Healthy, &[]).await;
    let (screen, error) = (stdout(&checked), stderr(&checked));
    assert_eq!(checked.status.code(), Some(0), "{screen}\n{error}");
    assert!(screen.starts_with("Kubernetes API:\n  ok   version              https://127.0.0.1:"), "{screen}");
    assert!(screen.ends_with("0 warning, 0 failed, 0 skipped"), "{screen}");
    let printed = check(Cluster::Healthy, &["-o", "json"]).await;
    assert!(states(&stdout(&printed)).iter().all(|(state, ..)| state == "Ok"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_cluster_says_what_to_do_and_exits_with_2() {
    let checked = check(Cluster::Broken, &["--output", "json"]).await;
    assert_eq!(checked.status.code(), Some(2), "{}", stderr(&checked));
    let found = states(&stdout(&checked));
    for (name, says) in [
        ("version", "is Kubernetes v1.29.0"),
        ("kernel", "older than Linux 6.1: node-1 has 5.10.0-8-amd64"),
        ("node proxy", "CrashLoopBackOff; it ended before: the kernel (5.10.0) is too old"),
        ("managers", "0 of 2 available"),
        ("leader", "manager-a led, and renewed its Lease last"),
        ("service", "has no ready endpoint"),
        ("validation answers", "failed calling webhook"),
    ] {
        let is_said = |(state, check, message): &(String, String, String)| {
            state == "Failed" && check == name && message.contains(says)
        };
        assert!(found.iter().any(is_said), "{name}: {found:#?}");
    }
    let screen = stdout(&check(Cluster::Broken, &[]).await);
    assert!(screen.contains("to do: upgrade the cluster to Kubernetes 1.30 or newer: docs/operate.md"), "{screen}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_rights_checks_are_skipped_and_the_right_is_named() {
    let checked = check(Cluster::Forbidden, &["-o", "json"]).await;
    assert_eq!(checked.status.code(), Some(0), "{}", stdout(&checked));
    let found = states(&stdout(&checked));
    let others = found.iter().filter(|(state, ..)| state != "Skipped").map(|(_, check, _)| check.as_str());
    assert_eq!(others.collect::<Vec<_>>(), ["version", "this machine"], "{found:#?}");
    for right in ["list nodes in all namespaces", "get /apis/admissionregistration.k8s.io/v1"] {
        let says = format!("you may not {right}");
        assert!(found.iter().any(|(.., message)| *message == says), "{right}: {found:#?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_without_ctrlmesh_is_checked_before_it() {
    let checked = check(Cluster::Empty, &["--pre"]).await;
    let screen = stdout(&checked);
    assert_eq!(checked.status.code(), Some(0), "{screen}");
    assert!(
        screen.contains("you have 17 of 17 rights that are needed") && !screen.contains("Installation"),
        "{screen}"
    );
    assert!(screen.contains("skipped   cgroups") && screen.contains("ok        architecture"), "{screen}");
    let after = check(Cluster::Empty, &[]).await;
    let screen = stdout(&after);
    assert_eq!(after.status.code(), Some(2), "{screen}");
    assert!(screen.contains("it is not installed"), "{screen}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_api_server_nothing_is_checked() {
    let bed = bed(Cluster::Healthy).await;
    bed.kubeconfig(json!({"server": "https://127.0.0.1:1"}), json!({}));
    for arguments in [&["check"][..], &["check", "--pre"]] {
        let refused = bed.ctrlmesh(arguments).await;
        let error = stderr(&refused);
        assert_eq!((refused.status.code(), stdout(&refused).as_str()), (Some(1), ""), "{error}");
        assert!(error.contains("ask the API server https://127.0.0.1:1/ for its version"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_of_program_and_cluster_are_shown() {
    let bed = bed(Cluster::Healthy).await;
    let shown = stdout(&bed.ctrlmesh(&["version"]).await);
    let expected = format!(
        "Client:       {OWN_VERSION}\nManagers:     {OWN_VERSION} (1 pod)\nNode proxies: {OWN_VERSION} (1 pod)\nSidecars:     none"
    );
    assert_eq!(shown, expected);
    let mut alone = Command::new(env!("CARGO_BIN_EXE_ctrlmesh"));
    alone.args(["version", "--client", "-o", "json"]).env("KUBECONFIG", "/nowhere");
    let document: Value = serde_json::from_str(&stdout(&output(alone).await)).unwrap();
    assert_eq!((&document["kind"], &document["client"]), (&json!("Version"), &json!(OWN_VERSION)));
    bed.kubeconfig(json!({"server": "https://127.0.0.1:1"}), json!({}));
    let away = bed.ctrlmesh(&["version"]).await;
    assert_eq!((away.status.code(), stdout(&away)), (Some(1), format!("Client: {OWN_VERSION}")));
    assert!(stderr(&away).contains("--client asks no API server"), "{}", stderr(&away));
}

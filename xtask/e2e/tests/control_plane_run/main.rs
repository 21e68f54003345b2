//! Real clients, through `ctrlmesh run`, to a real API server.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on panics")]
#![allow(clippy::disallowed_methods, clippy::large_futures, reason = "tests are not drained")]

use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

use ctrlmesh_testbed::{ControlPlane, Options};
use http::Request;
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;

#[path = "../harness/go.rs"]
mod go;
mod operator;

use go::Running;

/// How many objects there are; each has its number as a label.
const OBJECTS: usize = 12;

/// How long a store may take to be what it should be.
const PATIENCE: Duration = Duration::from_mins(2);

/// What all tests here ask; who asked for what stands in its log.
static PLANE: LazyLock<ControlPlane> = LazyLock::new(|| {
    let options = Options { audit: true, ..Options::default() };
    ControlPlane::start(&options).unwrap_or_else(|error| panic!("{error:?}"))
});

struct Bed {
    plane: &'static ControlPlane,
    /// Its administrator's.
    client: kube::Client,
    namespace: String,
    folder: TempDir,
}

impl Bed {
    async fn new() -> Self {
        let plane = &*PLANE;
        let namespace = plane.namespace("run").await.unwrap();
        let client = plane.client().await.unwrap();
        Self { plane, client, namespace, folder: TempDir::new().unwrap() }
    }

    /// One with objects.
    async fn with_objects() -> Self {
        let bed = Self::new().await;
        for number in 0..OBJECTS {
            bed.create(number).await;
        }
        bed
    }

    async fn create(&self, number: usize) {
        let body = json!({"metadata": {
            "name": format!("c{number}"), "labels": {"number": number.to_string()},
        }});
        self.admin("POST", &self.config_maps(), &body).await;
    }

    async fn admin(&self, method: &str, target: &str, body: &Value) -> Value {
        let kind = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let request = Request::builder().method(method).uri(target);
        let request = request.header("content-type", kind).body(body).unwrap();
        self.client.request(request).await.unwrap()
    }

    fn config_maps(&self) -> String {
        format!("/api/v1/namespaces/{}/configmaps", self.namespace)
    }

    /// Name and version of what the API server has.
    async fn truth(&self) -> BTreeMap<String, String> {
        let list = self.admin("GET", &self.config_maps(), &Value::Null).await;
        let text = |item: &Value, field: &str| item["metadata"][field].as_str().unwrap().to_owned();
        let items = list["items"].as_array().unwrap();
        items.iter().map(|item| (text(item, "name"), text(item, "resourceVersion"))).collect()
    }

    /// A kubeconfig whose user asks a program for a token; the program is named as from the folder of the kubeconfig.
    async fn plugin(&self) -> PathBuf {
        let token = self.administrator().await;
        let credential = json!({
            "apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": token},
        });
        let program = self.folder.path().join("plugin");
        fs::write(&program, format!("#!/bin/sh\necho '{credential}'\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
        self.kubeconfig(json!({"exec": {
            "apiVersion": "client.authentication.k8s.io/v1", "command": "./plugin", "interactiveMode": "Never",
        }}))
    }

    /// A kubeconfig whose user has only a token.
    async fn token(&self) -> PathBuf {
        let token = self.administrator().await;
        self.kubeconfig(json!({"token": token}))
    }

    fn kubeconfig(&self, user: Value) -> PathBuf {
        let config = json!({
            "current-context": "t",
            "contexts": [{"name": "t", "context": {
                "cluster": "t", "user": "t", "namespace": self.namespace,
            }}],
            "clusters": [{"name": "t", "cluster": {
                "server": self.plane.url(), "certificate-authority": self.plane.ca(),
            }}],
            "users": [{"name": "t", "user": user}],
        });
        let file = self.folder.path().join("kubeconfig");
        fs::write(&file, config.to_string()).unwrap();
        file
    }

    /// The token of a service account that may do everything.
    async fn administrator(&self) -> String {
        let audience = "https://kubernetes.default.svc";
        let token = self.plane.pod_token(&self.namespace, "operator-0", &[audience]).await.unwrap();
        let binding = json!({
            "metadata": {"name": self.namespace},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{"kind": "ServiceAccount", "name": "operator-0", "namespace": self.namespace}],
        });
        self.admin("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", &binding).await;
        token.token
    }

    /// The watched client-go informer, run with this selector.
    fn informer(&self, kubeconfig: &Path, selector: &str) -> Informer {
        // What ignores SIGINT when `run` starts goes on ignoring it: also tests that run in the background.
        let mut command = Command::new("env");
        command
            .args(["--default-signal=INT", env!("CARGO_BIN_EXE_e2e-ctrlmesh")])
            .args(["run", "--interception", "kubeconfig", "--limit", "configmaps"])
            .args(["--selector", selector, "--run-dir"])
            .arg(self.folder.path().join("runs"))
            .arg("--")
            .arg(go::program("informer"))
            .args(["-namespace", &self.namespace])
            .env("KUBECONFIG", kubeconfig)
            .stderr(Stdio::piped());
        let mut informer = Informer(Running::start(&mut command));
        assert_eq!(informer.0.json()["synced"], true);
        informer
    }
}

struct Informer(Running);

impl Informer {
    fn store(&mut self) -> BTreeMap<String, String> {
        let state = self.0.state();
        assert_eq!((&state["lists"], &state["wrong"]), (&json!(1), &json!([])));
        serde_json::from_value(state["store"].clone()).unwrap()
    }

    /// Ends it as a terminal would; what `run` says at the end.
    fn interrupted(mut self) -> (Option<i32>, String) {
        let pid = Pid::from_raw(i32::try_from(self.0.child.id()).unwrap());
        signal::kill(pid, Signal::SIGINT).unwrap();
        let mut text = String::new();
        self.0.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        (self.0.child.wait().unwrap().code(), text)
    }
}

async fn two_informers_share_all_objects(bed: &Bed, kubeconfig: &Path) {
    let mut one = bed.informer(kubeconfig, "number in (0,1,2,3,4)");
    let mut two = bed.informer(kubeconfig, "number notin (0,1,2,3,4)");
    // What comes later comes to one of them, too.
    bed.admin("DELETE", &format!("{}/c7", bed.config_maps()), &Value::Null).await;
    bed.create(OBJECTS).await;
    let truth = bed.truth().await;
    let waiting = async {
        loop {
            let (first, second) = (one.store(), two.store());
            assert!(first.keys().all(|name| !second.contains_key(name)), "{first:?} {second:?}");
            assert_eq!(first.len(), 5);
            if first.into_iter().chain(second).collect::<BTreeMap<_, _>>() == truth {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.expect("the stores together are all there is");
    for informer in [one, two] {
        let (code, text) = informer.interrupted();
        assert_eq!(code, Some(130), "{text}");
        assert!(text.contains("ctrlmesh: 2 requests, 2 injected, 0 refused"), "{text}");
    }
    assert_eq!(fs::read_dir(bed.folder.path().join("runs")).unwrap().count(), 0);
}

#[tokio::test]
async fn two_shards_with_a_client_certificate_are_disjoint() {
    let bed = Bed::with_objects().await;
    two_informers_share_all_objects(&bed, &bed.plane.kubeconfig()).await;
}

#[tokio::test]
async fn with_a_token_two_shards_are_disjoint_and_complete() {
    let bed = Bed::with_objects().await;
    let kubeconfig = bed.token().await;
    two_informers_share_all_objects(&bed, &kubeconfig).await;
}

#[tokio::test]
async fn with_an_exec_plugin_two_shards_are_disjoint_and_complete() {
    let bed = Bed::with_objects().await;
    let kubeconfig = bed.plugin().await;
    two_informers_share_all_objects(&bed, &kubeconfig).await;
}

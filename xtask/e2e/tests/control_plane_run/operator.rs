//! An operator that knows nothing of us, from a terminal, once for each of two shards.
//!
//! Needs root, or user namespaces for everybody: outside a cluster controller-runtime finds the namespace of its lock
//! in the files of a service account only, which the interception `env` shows it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ctrlmesh_testbed::audit_log::AuditEvent;
use ctrlmesh_testbed::retry;
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::{Bed, PATIENCE};

/// What the operator calls its lock.
const LOCK: &str = "websites.web.example.com";

/// The label of pages with their site's name. The sites here carry it too, and are called as their namespaces.
const SITE: &str = "web.example.com/site";

const DEFINITION: &str = include_str!("../../../../deploy/example-operator/config/crd/web.example.com_websites.yaml");

/// One operator behind its own proxy.
struct Shard {
    /// What the shard is called, and the program, which tells the API server.
    name: &'static str,
    /// Whose sites are its own.
    namespaces: [String; 2],
    run: Child,
}

impl Shard {
    async fn start(bed: &Bed, kubeconfig: &Path, name: &'static str) -> Self {
        let folder = bed.folder.path();
        let mut namespaces = [String::new(), String::new()];
        for namespace in &mut namespaces {
            *namespace = bed.plane.namespace(name).await.unwrap();
        }
        fs::hard_link(folder.join("operator"), folder.join(name)).unwrap();
        let selector = format!("{SITE} in ({})", namespaces.join(","));
        let run = Command::new(env!("CARGO_BIN_EXE_e2e-ctrlmesh"))
            .args(["run", "--interception", "env", "--lock", LOCK, "--shard", name])
            .args(["--limit", "websites.web.example.com,configmaps", "--selector", &selector])
            .arg("--run-dir")
            .arg(folder.join("runs"))
            .arg("--")
            .arg(folder.join(name))
            .args(["--leader-elect", "--metrics-bind-address=0", "--health-probe-bind-address=0"])
            .env("KUBECONFIG", kubeconfig)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(folder.join(format!("{name}.log"))).unwrap())
            .spawn()
            .unwrap();
        Self { name, namespaces, run }
    }

    /// What it said, the operator and the proxy.
    fn said(&self, bed: &Bed) -> String {
        fs::read_to_string(bed.folder.path().join(format!("{}.log", self.name))).unwrap()
    }

    /// Ends it as a supervisor would.
    fn terminated(&mut self, bed: &Bed) {
        let pid = Pid::from_raw(i32::try_from(self.run.id()).unwrap());
        signal::kill(pid, Signal::SIGTERM).unwrap();
        assert_eq!(self.run.wait().unwrap().code(), Some(0), "{}", self.said(bed));
    }

    /// Namespaces of the sites and pages that it changed, as the API server's log says.
    fn changed(&self, bed: &Bed) -> BTreeSet<String> {
        let asked = self.asked(bed).into_iter();
        let changes = asked.filter(|event| !is_read(event));
        changes.map(|event| event.object.namespace).collect()
    }

    /// What it lists and watches of sites and pages is its own share.
    fn reads_only_its_share(&self, bed: &Bed) {
        let mut kinds = BTreeSet::new();
        let lists = |event: &AuditEvent| event.verb != "get" && is_read(event);
        for AuditEvent { uri, object, .. } in self.asked(bed).into_iter().filter(lists) {
            let selects = self.namespaces.iter().all(|namespace| uri.contains(namespace));
            assert!(selects && uri.contains("labelSelector="), "{uri}");
            kinds.insert(object.resource);
        }
        assert_eq!(kinds, ["configmaps", "websites"].map(str::to_owned).into());
    }

    /// Its requests for sites and pages, as the API server's log has them.
    fn asked(&self, bed: &Bed) -> Vec<AuditEvent> {
        let agent = format!("{}/", self.name);
        let events = AuditEvent::read(&bed.plane.audit_log(), &agent).unwrap().into_iter();
        let its_own = events.filter(|event| event.user_agent.starts_with(&agent));
        its_own.filter(|event| ["websites", "configmaps"].contains(&event.object.resource.as_str())).collect()
    }
}

impl Drop for Shard {
    fn drop(&mut self) {
        let _gone = self.run.kill();
        let _reaped = self.run.wait();
    }
}

fn is_read(event: &AuditEvent) -> bool {
    ["get", "list", "watch"].contains(&event.verb.as_str())
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn sites(namespace: &str) -> String {
    format!("/apis/web.example.com/v1alpha1/namespaces/{namespace}/websites")
}

impl Bed {
    /// Builds the operator as its image does, so that Go has the packages already where the image was built.
    fn build_operator(&self) {
        let module = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/example-operator");
        let mut go = Command::new("go");
        go.args(["build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w -buildid=", "-o"]);
        go.arg(self.folder.path().join("operator")).arg("./cmd").env("CGO_ENABLED", "0");
        assert!(go.current_dir(module).status().unwrap().success());
    }

    /// Makes websites known.
    async fn define_websites(&self) {
        let definition: Value = serde_saphyr::from_str(DEFINITION).unwrap();
        let kind = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
        self.admin("POST", kind, &definition).await;
        let served = || {
            let request = http::Request::get(sites(&self.namespace)).body(Vec::new()).unwrap();
            self.client.request::<Value>(request)
        };
        retry(served).await.unwrap();
    }

    async fn publish(&self, namespace: &str) {
        let site = json!({
            "apiVersion": "web.example.com/v1alpha1", "kind": "Website",
            "metadata": {"name": namespace, "labels": {SITE: namespace}},
            "spec": {"title": "Hello", "pages": 2},
        });
        self.admin("POST", &sites(namespace), &site).await;
    }

    /// How many pages a namespace has.
    async fn pages(&self, namespace: &str) -> usize {
        let target = format!("/api/v1/namespaces/{namespace}/configmaps?labelSelector={SITE}");
        self.admin("GET", &target, &Value::Null).await["items"].as_array().unwrap().len()
    }

    /// Waits until a shard's sites have so many pages, and say so.
    async fn published(&self, shard: &Shard, pages: usize) {
        let done = async {
            for namespace in &shard.namespaces {
                let target = format!("{}/{namespace}", sites(namespace));
                while self.admin("GET", &target, &Value::Null).await["status"]["pages"] != pages
                    || self.pages(namespace).await != pages
                {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        };
        let waited = tokio::time::timeout(PATIENCE, done).await;
        assert!(waited.is_ok(), "{} does not work:\n{}", shard.name, shard.said(self));
    }

    /// The locks, and whether somebody holds them.
    async fn locks(&self) -> BTreeMap<String, bool> {
        let target = format!("/apis/coordination.k8s.io/v1/namespaces/{}/leases", self.namespace);
        let list = self.admin("GET", &target, &Value::Null).await;
        let held = |lease: &Value| !text(&lease["spec"]["holderIdentity"]).is_empty();
        let leases = list["items"].as_array().unwrap().iter();
        leases.map(|lease| (text(&lease["metadata"]["name"]), held(lease))).collect()
    }
}

#[tokio::test]
async fn an_operator_in_two_shards_works_on_each_half() {
    let bed = Bed::new().await;
    let kubeconfig = bed.token().await;
    bed.build_operator();
    bed.define_websites().await;
    let mut one = Shard::start(&bed, &kubeconfig, "shard-a").await;
    let mut two = Shard::start(&bed, &kubeconfig, "shard-b").await;
    for namespace in one.namespaces.iter().chain(&two.namespaces) {
        bed.publish(namespace).await;
    }
    for shard in [&one, &two] {
        bed.published(shard, 2).await;
        assert_eq!(shard.changed(&bed), shard.namespaces.clone().into());
        shard.reads_only_its_share(&bed);
    }
    let locks = |first| [(format!("{LOCK}---shard-a"), first), (format!("{LOCK}---shard-b"), true)];
    assert_eq!(bed.locks().await, locks(true).into());

    one.terminated(&bed);
    for namespace in one.namespaces.iter().chain(&two.namespaces) {
        let target = format!("{}/{namespace}", sites(namespace));
        bed.admin("PATCH", &target, &json!({"spec": {"pages": 3}})).await;
    }
    bed.published(&two, 3).await;
    for namespace in &one.namespaces {
        assert_eq!(bed.pages(namespace).await, 2, "{namespace} is nobody's now");
    }
    assert_eq!(two.changed(&bed), two.namespaces.clone().into());
    assert_eq!(bed.locks().await, locks(false).into(), "the first let go of its own");
    two.terminated(&bed);
    assert_eq!(fs::read_dir(bed.folder.path().join("runs")).unwrap().count(), 0);
}

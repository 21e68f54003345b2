//! Two API servers behind one etcd, two managers, and an operator whose pods come and go.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::slots::{NamespaceHash, Slot};
use ctrlmesh_testbed::witness::{self, OperatorUnderTest, Verdict, Witness};
use ctrlmesh_testbed::{ControlPlane, Entered, Network, Options, retry, skipped};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams};
use nix::unistd::getuid;
use serde_json::{Value, json};
use tokio::time::{self, Instant};

use crate::clock::Library;
use crate::harness;
use crate::load::Load;
use crate::manager::Manager;
use crate::operators;
use crate::pods::RunningPod;

/// Where the managers are, and the operator.
pub(crate) const SYSTEM: &str = "ctrlmesh-system";
pub(crate) const OPERATOR: &str = "ops";

/// The root ShardingConfig, and the account of the operator's pods.
pub(crate) const ROOT: &str = "op-root";
pub(crate) const ACCOUNT: &str = "operator";

/// The operator's leader-election lock.
pub(crate) const LOCK: &str = "websites.web.example.com";

/// How many namespaces have a website each.
const TEAMS: usize = 24;

/// How long something may take before a test fails: generous, because nothing waits for it in vain.
pub(crate) const PATIENCE: Duration = Duration::from_mins(3);

pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(50);

const DEFINITION: &str = include_str!("../../../../deploy/example-operator/config/crd/web.example.com_websites.yaml");

/// The kinds that are limited, as `plural.group`.
const LIMITED: [&str; 2] = ["configmaps", "websites.web.example.com"];

/// All of it.
pub(crate) struct Bed {
    // Dropped in this order.
    pub(crate) pods: BTreeMap<String, RunningPod>,
    pub(crate) managers: Vec<Manager>,
    pub(crate) plane: ControlPlane,
    pub(crate) client: Client,
    /// Of which each process has its wall clock.
    pub(crate) clocks: Library,
    /// On how many nodes the operator's pods are, by turns.
    pub(crate) nodes: u16,
    /// Whether the verdict was good; else what was said is kept.
    pub(crate) has_passed: bool,
    _entered: Entered,
    _network: Network,
}

impl Bed {
    /// Starts all but the pods; nothing where this may not have a network of its own, and says so of `test`.
    pub(crate) async fn start(test: &str) -> Result<Option<Self>> {
        let addresses = [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2)];
        if !getuid().is_root() {
            skipped(test, "needs root")?;
            return Ok(None);
        }
        operators::fetch_modules()?;
        let network = Network::make(&addresses)?;
        let entered = network.enter()?;
        let roots = ["shardingconfigs.ctrlmesh.kusionstack.io"];
        let plane = ControlPlane::start(&Options {
            audit: true,
            audit_bodies: LIMITED.iter().chain(&roots).map(ToString::to_string).collect(),
            addresses: addresses.to_vec(),
            ..Options::default()
        })?;
        let client = plane.client().await?;
        let clocks = Library::build(plane.folder())?;
        let mut bed = Self {
            pods: BTreeMap::new(),
            managers: Vec::new(),
            plane,
            client,
            clocks,
            nodes: 1,
            has_passed: false,
            _entered: entered,
            _network: network,
        };
        bed.until_servers_are_known(addresses.len()).await?;
        bed.build_operator()?;
        harness::install(&bed.client).await?;
        bed.world().await?;
        for number in 0..2 {
            bed.start_manager(number).await?;
        }
        Ok(Some(bed))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.plane.folder().join(name)
    }

    /// Waits until every API server is an endpoint. One that comes later gets the mesh a new authority, which operators
    /// that run do not believe.
    async fn until_servers_are_known(&self, servers: usize) -> Result<()> {
        let slices = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices";
        let slices = format!("{slices}?labelSelector=kubernetes.io%2Fservice-name%3Dkubernetes");
        self.until("all API servers to be endpoints", async || {
            let slices = self.list(&slices).await?;
            let endpoints = slices.iter().flat_map(|slice| slice["endpoints"].as_array().into_iter().flatten());
            let known = endpoints.filter(|endpoint| endpoint["addresses"].is_array()).count();
            ensure!(known >= servers, "{known} of {servers}");
            Ok(())
        })
        .await
    }

    /// The example operator, built as its image does, so that Go has the packages already.
    fn build_operator(&self) -> Result<()> {
        let module = Path::new(env!("CARGO_MANIFEST_DIR")).join(operators::EXAMPLE);
        let mut go = Command::new("go");
        go.args(["build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w -buildid=", "-o"]);
        go.arg(self.path("operator")).arg("./cmd").env("CGO_ENABLED", "0");
        ensure!(go.current_dir(module).status()?.success(), "go build");
        Ok(())
    }

    /// Namespaces, websites, and what the operator may do.
    async fn world(&self) -> Result<()> {
        let definition: Value = serde_saphyr::from_str(DEFINITION)?;
        self.apply("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", &definition).await?;
        for name in [SYSTEM, OPERATOR] {
            self.apply("/api/v1/namespaces", &object("v1", "Namespace", name)).await?;
        }
        let account = object("v1", "ServiceAccount", ACCOUNT);
        self.apply(&format!("/api/v1/namespaces/{OPERATOR}/serviceaccounts"), &account).await?;
        let rbac = "rbac.authorization.k8s.io";
        let mut binding = object(&format!("{rbac}/v1"), "ClusterRoleBinding", "operator");
        binding["roleRef"] = json!({"apiGroup": rbac, "kind": "ClusterRole", "name": "cluster-admin"});
        binding["subjects"] = json!([{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": OPERATOR}]);
        self.apply(&format!("/apis/{rbac}/v1/clusterrolebindings"), &binding).await?;
        let mut kinds = object("v1", "ConfigMap", "ctrlmesh-sharding-resource");
        kinds["data"] = json!({"resource-config":
            "groupVersionKinds: {v1: [ConfigMap], web.example.com/v1alpha1: [Website]}"});
        self.apply(&format!("/api/v1/namespaces/{SYSTEM}/configmaps"), &kinds).await?;
        for team in teams() {
            self.apply("/api/v1/namespaces", &object("v1", "Namespace", &team)).await?;
            let mut site = object("web.example.com/v1alpha1", "Website", "site");
            site["spec"] = json!({"title": "Hello", "pages": 1});
            retry(|| self.apply(sites(&team), &site)).await?;
        }
        Ok(())
    }

    /// Applies an object to a collection.
    pub(crate) async fn apply(&self, collection: impl AsRef<str>, object: &Value) -> Result<Value> {
        let name = object["metadata"]["name"].as_str().context("a name")?;
        let path = format!("{}/{name}?fieldManager=test&force=true", collection.as_ref());
        self.send("PATCH", &path, "application/apply-patch+yaml", object).await
    }

    pub(crate) async fn merge(&self, path: &str, change: &Value) -> Result<Value> {
        self.send("PATCH", path, "application/merge-patch+json", change).await
    }

    pub(crate) async fn send(&self, method: &str, path: &str, kind: &str, body: &Value) -> Result<Value> {
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let request = http::Request::builder().method(method).uri(path).header("content-type", kind).body(body)?;
        self.client.request(request).await.with_context(|| format!("{method} {path}"))
    }

    pub(crate) async fn list(&self, path: &str) -> Result<Vec<Value>> {
        let list = self.send("GET", path, "application/json", &Value::Null).await?;
        Ok(list["items"].as_array().cloned().unwrap_or_default())
    }

    /// Applies the root with this rule, beside its prefix and its target.
    pub(crate) async fn root(&self, rule: &Value) -> Result<()> {
        let lock = json!({"leaderElectionName": LOCK});
        self.apply_root(rule, json!({"controller": lock})).await
    }

    /// The same of an operator that elects nobody.
    pub(crate) async fn root_without_lock(&self, rule: &Value) -> Result<()> {
        self.apply_root(rule, json!({})).await
    }

    async fn apply_root(&self, rule: &Value, mut spec: Value) -> Result<()> {
        let resources = json!([{"apiGroups": [""], "resources": ["configmaps"]},
            {"apiGroups": ["web.example.com"], "resources": ["websites"]}]);
        let mut root = json!({"prefix": "op", "targetStatefulSet": "op",
            "resourceSelector": [{"relateResources": resources}]});
        for (key, value) in rule.as_object().context("a rule")? {
            root[key] = value.clone();
        }
        let mut config = object("ctrlmesh.kusionstack.io/v1alpha1", "ShardingConfig", ROOT);
        spec["root"] = root;
        config["spec"] = spec;
        let collection = format!("/apis/ctrlmesh.kusionstack.io/v1alpha1/namespaces/{OPERATOR}/shardingconfigs");
        self.apply(collection, &config).await.map(drop)
    }

    pub(crate) fn configs(&self) -> Api<ShardingConfig> {
        Api::namespaced(self.client.clone(), OPERATOR)
    }

    /// The table, once nothing moves, every object has an owner, all proxies know it, and it is as `wanted`.
    pub(crate) async fn settled(&self, wanted: impl Fn(&Ownership) -> bool) -> Result<Ownership> {
        self.until("ownership to settle", async || {
            let root = self.configs().get(ROOT).await?;
            let status = root.status.context("no status")?;
            let ownership = status.ownership.clone().context("no table")?;
            let programmed = status.conditions.iter().find(|one| one.type_ == "Programmed").context("no condition")?;
            ensure!(ownership.revoked.is_none() && ownership.is_total(), "it moves: {ownership:?}");
            ensure!(status.observed_generation == root.metadata.generation, "the root is not read");
            ensure!(programmed.status == "True", "{}", programmed.message);
            ensure!(wanted(&ownership), "{ownership:?}");
            Ok(ownership)
        })
        .await
    }

    /// Waits until `look` finds something; the error is the last one that it had.
    pub(crate) async fn until<T>(&self, what: &str, mut look: impl AsyncFnMut() -> Result<T>) -> Result<T> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match look().await {
                Ok(found) => return Ok(found),
                Err(error) if Instant::now() > deadline => {
                    return Err(error.context(format!("waited {PATIENCE:?} in vain for {what}")));
                }
                Err(_) => time::sleep(LOOK_EVERY).await,
            }
        }
    }

    /// Waits until each page of these namespaces was written so many times more.
    pub(crate) async fn until_written(&self, teams: &BTreeSet<String>, times: usize) -> Result<()> {
        let mut versions: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        self.until("pages to be written", async || {
            for page in self.list("/api/v1/configmaps?labelSelector=web.example.com%2Fsite").await? {
                let text = |field: &str| page["metadata"][field].as_str().unwrap_or_default().to_owned();
                versions.entry(text("namespace")).or_default().insert(text("resourceVersion"));
            }
            let late = teams.iter().filter(|team| versions.get(*team).is_none_or(|seen| seen.len() <= times));
            let late: Vec<_> = late.collect();
            ensure!(late.is_empty(), "{late:?}");
            Ok(())
        })
        .await
    }

    /// Waits until every website's status is of its newest spec.
    pub(crate) async fn until_none_missed(&self) -> Result<()> {
        self.until("every website to be worked on", async || {
            let missed = witness::missed(&self.list("/apis/web.example.com/v1alpha1/websites").await?);
            ensure!(missed.is_empty(), "missed: {missed:?}");
            Ok(())
        })
        .await
    }

    /// Ends the load, waits until all is worked on, ends all pods, and checks the writes; no slot may have been
    /// nobody's for longer than `bound`.
    pub(crate) async fn verdict(&mut self, load: Load, bound: Duration) -> Result<Verdict> {
        load.finish().await?;
        let all_done = self.until_none_missed().await;
        let verdict = self.check_writes()?;
        all_done?;
        verdict.ensure_clean(bound)?;
        self.has_passed = true;
        Ok(verdict)
    }

    /// Ends all pods, and checks the writes by what the API servers logged.
    pub(crate) fn check_writes(&mut self) -> Result<Verdict> {
        self.pods.clear();
        let mut witness = Witness::of(OperatorUnderTest {
            namespace: OPERATOR.to_owned(),
            account: ACCOUNT.to_owned(),
            root: ROOT.to_owned(),
            resources: LIMITED.iter().map(ToString::to_string).collect(),
            hash: NamespaceHash::default(),
        });
        self.plane.audit_logs().try_for_each(|log| witness.read(log))?;
        let verdict = witness.verdict();
        eprintln!("{verdict}");
        Ok(verdict)
    }

    /// What the proxies of the operator's namespace and the operator believe, once the managers say it.
    pub(crate) async fn authorities(&self) -> Result<()> {
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), OPERATOR);
        let data = self.until("the authorities", async || maps.get("ctrlmesh-root-ca").await?.data.context("no data"));
        let data = data.await?;
        let of = |key: &str| data.get(key).with_context(|| format!("no {key}"));
        for (file, key) in [("manager.crt", "manager-ca.crt"), ("mesh.crt", "ca.crt")] {
            // Whoever reads it meanwhile has one of the two whole.
            let new = self.path(&format!("{file}.new"));
            fs::write(&new, of(key)?)?;
            fs::rename(new, self.path(file))?;
        }
        Ok(())
    }

    /// Deletes the root; it may stay for a while.
    pub(crate) async fn delete_root(&self) -> Result<()> {
        self.configs().delete(ROOT, &DeleteParams::default()).await?;
        Ok(())
    }

    /// Waits until there is no root, and takes its shards away, as Kubernetes' garbage collector does.
    pub(crate) async fn until_no_root(&self) -> Result<()> {
        self.until("the root to go", async || {
            let root = self.configs().get_opt(ROOT).await?;
            ensure!(root.is_none(), "it is there: {:?}", root.map(|root| root.status));
            Ok(())
        })
        .await?;
        let shards = ListParams::default().labels(&format!("ctrlmesh.kusionstack.io/auto-sharding-root={ROOT}"));
        self.configs().delete_collection(&DeleteParams::default(), &shards).await?;
        Ok(())
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        if self.has_passed {
            return;
        }
        // What was said outlives the test that failed.
        let reports = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/reports/ownership");
        drop(fs::create_dir_all(&reports));
        let said = fs::read_dir(self.plane.folder()).into_iter().flatten().flatten().map(|entry| entry.path());
        for log in said.filter(|path| path.extension().is_some_and(|extension| extension == "log")) {
            drop(log.file_name().map(|name| fs::copy(&log, reports.join(name))));
        }
        eprintln!("what all said is in {}", reports.display());
    }
}

/// The namespaces with work.
pub(crate) fn teams() -> impl Iterator<Item = String> {
    (0..TEAMS).map(|number| format!("team-{number}"))
}

/// Those whose slots these are.
pub(crate) fn teams_of(slots: &BTreeSet<Slot>) -> BTreeSet<String> {
    teams().filter(|team| slots.contains(&NamespaceHash::default().slot(team))).collect()
}

/// The slots that a table gives an owner.
pub(crate) fn slots_of(table: &Ownership, owner: &str) -> BTreeSet<Slot> {
    table.slots_of(owner).collect()
}

/// The path of a namespace's websites.
pub(crate) fn sites(namespace: &str) -> String {
    format!("/apis/web.example.com/v1alpha1/namespaces/{namespace}/websites")
}

/// An object with no more than its name.
pub(crate) fn object(version: &str, kind: &str, name: &str) -> Value {
    json!({"apiVersion": version, "kind": kind, "metadata": {"name": name}})
}

//! Puts things into the cluster, as a user does, and takes processes away, as accidents do.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use ctrlmesh_common::names::{self, label, resource_list};
use ctrlmesh_testbed::Cluster;
use serde_json::{Value, json};
use xtask::images::Image;
use xtask::tools;

use crate::api::Api;
use crate::observer::Observer;
use crate::operator::Operator;
use crate::work::{Made, Work};

/// Our own namespace in the cluster.
pub const SYSTEM: &str = "ctrlmesh-system";

/// The label on the namespaces that we make.
pub const MADE: &str = "ctrlmesh.dev/demo";

/// How long a rollout, or the end of pods, may take.
pub const ROLLED_OUT_WITHIN: Duration = Duration::from_mins(4);

/// How often we look.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// A cluster with an operator that is watched.
#[derive(Debug)]
pub struct Scene {
    /// What the operator is given to do.
    pub work: Work,
    /// In how many namespaces, at first.
    pub namespaces: usize,
    /// What one replica alone has made of it, once that is known.
    pub reference: OnceLock<Made>,
    /// How many bytes it received to know everything, once that is known.
    pub alone: OnceLock<f64>,
    /// Watches the operator.
    pub observer: Observer,
    /// Asks the API server.
    pub api: Arc<Api>,
    /// The cluster.
    pub cluster: Cluster,
}

/// Changes one object of work after the other, so that there is something to do; until it is dropped.
#[derive(Debug)]
pub struct Load {
    shared: Arc<Changing>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Changing {
    over: AtomicBool,
    changed: AtomicU64,
}

/// Where a file of the checkout is.
pub fn checkout(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// Installs ctrlmesh, as its users do, and waits until it is ready.
///
/// # Errors
/// Where something does not become ready.
pub fn install(cluster: &Cluster) -> Result<()> {
    let folder = checkout("deploy");
    cluster.ask(&["apply", "--kustomize", &folder.display().to_string()], "")?;
    for one in ["deployment/ctrlmesh-manager", "daemonset/ctrlmesh-node"] {
        rolled_out(cluster, SYSTEM, one)?;
    }
    Ok(())
}

/// Installs the operator of `work`, as its own manifests say, and waits until it is ready.
///
/// # Errors
/// Where it does not become ready.
pub fn install_operator(cluster: &Cluster, work: Work) -> Result<()> {
    match work {
        Work::Websites => {
            let folder = checkout("deploy/example-operator/config/default");
            cluster.ask(&["apply", "--kustomize", &folder.display().to_string()], "")?;
        }
        Work::Prometheuses => {
            let bundle = tools::prometheus_operator().with_file_name("bundle.yaml");
            let text = fs::read_to_string(&bundle);
            let text = text
                .with_context(|| format!("read {}: run `cargo xtask setup`", bundle.display()))?;
            let theirs = format!(
                "quay.io/prometheus-operator/prometheus-operator:{}",
                tools::PROMETHEUS_OPERATOR
            );
            ensure!(text.contains(&theirs), "the manifests do not name {theirs}");
            let text = text.replace(&theirs, &Image::PrometheusOperator.name());
            // By the server: the definitions are too long for what kubectl would write into an annotation.
            cluster.ask(&["apply", "--server-side", "--filename", "-"], &text)?;
        }
    }
    let operator = work.operator();
    rolled_out(cluster, operator.namespace, &format!("deployment/{}", operator.name))
}

/// Takes everything out of a cluster that we put there: what we made first, so that nobody is needed any more who would
/// have to let it go.
///
/// # Errors
/// Where something cannot be deleted.
pub fn remove(cluster: &Cluster) -> Result<()> {
    let delete = ["delete", "--ignore-not-found", "--timeout=180s", "--request-timeout=0"];
    let ask = |what: &[&str]| cluster.ask(&[&delete[..], what].concat(), "");
    let selector = format!("{MADE}=true");
    // The sites' finalizers are the operator's to take away.
    let kind = ["websites.web.example.com", "--all", "--all-namespaces"];
    if cluster.ask(&["get", "crd", kind[0]], "").is_ok() {
        ask(&kind)?;
    }
    ask(&["namespace", "--selector", &selector])?;
    ask(&["clusterrole", "ctrlmesh-demo-labels"])?;
    let operator = checkout("deploy/example-operator/config/default");
    ask(&["--kustomize", &operator.display().to_string()])?;
    ask(&["--kustomize", &checkout("deploy").display().to_string()]).map(drop)
}

/// Waits until a workload is as its template says.
///
/// # Errors
/// Where it does not become so.
pub fn rolled_out(cluster: &Cluster, namespace: &str, workload: &str) -> Result<()> {
    let timeout = format!("--timeout={}s", ROLLED_OUT_WITHIN.as_secs());
    let arguments =
        ["--namespace", namespace, "--request-timeout=0", "rollout", "status", workload, &timeout];
    cluster.ask(&arguments, "").map(drop)
}

/// Says which kinds are labelled, and that the manager may.
///
/// # Errors
/// Where the API server refuses it.
pub fn label_kinds(api: &Api, work: Work) -> Result<()> {
    let mut listed = serde_json::Map::new();
    for kind in work.kinds() {
        let kinds = listed.entry(kind.api_version()).or_insert_with(|| json!([]));
        kinds.as_array_mut().context("a list")?.push(json!(kind.kind));
    }
    let text = json!({"groupVersionKinds": listed}).to_string();
    let list = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": resource_list::NAME},
        "data": {resource_list::KEY: text}});
    let path = format!("/api/v1/namespaces/{SYSTEM}/configmaps/{}", resource_list::NAME);
    api.apply(&path, &list)?;
    let rules = work.kinds().iter().map(|kind| {
        json!({"apiGroups": [kind.group], "resources": [kind.plural], "verbs": ["get", "list", "watch", "patch"]})
    });
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": {"name": "ctrlmesh-demo-labels", "labels": {"ctrlmesh.kusionstack.io/aggregate-to-labels": "true"}},
        "rules": rules.collect::<Vec<_>>()});
    api.apply("/apis/rbac.authorization.k8s.io/v1/clusterroles/ctrlmesh-demo-labels", &role)?;
    Ok(())
}

/// The name of the namespace of this number.
pub fn namespace(number: usize) -> String {
    format!("shop-{number:02}")
}

// === impl Scene ===

impl Scene {
    /// Watches the operator of `work` in `cluster`, whose API server writes its audit log to `log`.
    ///
    /// # Errors
    /// Where there is no client of the cluster.
    pub fn of(cluster: Cluster, log: PathBuf, work: Work, namespaces: usize) -> Result<Self> {
        let api = Arc::new(Api::of(&cluster)?);
        let observer = Observer::start(api.clone(), work.operator(), log);
        Ok(Self {
            work,
            namespaces,
            reference: OnceLock::new(),
            alone: OnceLock::new(),
            observer,
            api,
            cluster,
        })
    }

    fn operator(&self) -> &Operator {
        self.observer.operator()
    }

    /// The path of the operator's Deployment.
    fn deployment(&self) -> String {
        let Operator { namespace, name, .. } = self.operator();
        format!("/apis/apps/v1/namespaces/{namespace}/deployments/{name}")
    }

    /// Gives the operator so many replicas, and waits until they are there and no others.
    ///
    /// # Errors
    /// Where they do not become ready.
    pub fn scale(&self, replicas: usize) -> Result<()> {
        self.api.merge(&self.deployment(), &json!({"spec": {"replicas": replicas}}))?;
        rolled_out(
            &self.cluster,
            self.operator().namespace,
            &format!("deployment/{}", self.operator().name),
        )?;
        let what = format!("{replicas} replicas");
        self.until(&what, ROLLED_OUT_WITHIN, || {
            // Those that are on their way out too.
            let pods = self.pods()?;
            Ok((pods.len() == replicas).then_some(()))
        })?;
        self.observer.until(&what, ROLLED_OUT_WITHIN, |table| {
            table.replicas.len() == replicas && table.replicas.values().all(|one| one.ready)
        })?;
        Ok(())
    }

    /// The operator's pods, those that are ending too.
    fn pods(&self) -> Result<Vec<Value>> {
        let Operator { namespace, label, .. } = self.operator();
        let label = label.replace('/', "%2F").replace('=', "%3D");
        let list =
            self.api.get(&format!("/api/v1/namespaces/{namespace}/pods?labelSelector={label}"))?;
        Ok(list["items"].as_array().cloned().unwrap_or_default())
    }

    /// The addresses of the operator's pods: who connects to the API server past a proxy comes from there.
    ///
    /// # Errors
    /// Where the API server does not answer.
    pub fn addresses(&self) -> Result<BTreeSet<String>> {
        let pods = self.pods()?;
        let addresses =
            pods.iter().flat_map(|pod| pod["status"]["podIPs"].as_array().into_iter().flatten());
        Ok(addresses.filter_map(|one| Some(one["ip"].as_str()?.to_owned())).collect())
    }

    /// Enrols the operator's pods, from the next one that is made on.
    ///
    /// # Errors
    /// Where the API server refuses it.
    pub fn enrol(&self) -> Result<()> {
        let labels = json!({label::ENABLE_PROXY: "true"});
        let template = json!({"spec": {"template": {"metadata": {"labels": labels}}}});
        self.api.merge(&self.deployment(), &template).map(drop)
    }

    /// Writes the root ShardingConfig; `rule` is what its `spec.root` has beside prefix and target.
    ///
    /// # Errors
    /// Where the API server refuses it.
    pub fn shard(&self, rule: &Value) -> Result<()> {
        let Operator { namespace, name, lock, .. } = self.operator();
        let mut root = json!({"prefix": "share", "targetDeployment": name, "resourceSelector": self.work.resource_selector()});
        for (key, value) in rule.as_object().context("a rule")? {
            root[key] = value.clone();
        }
        let mut config = json!({
            "apiVersion": format!("{}/{}", names::GROUP, names::VERSION),
            "kind": "ShardingConfig",
            "metadata": {"name": name},
            "spec": {"root": root},
        });
        if let Some(lock) = lock {
            config["spec"]["controller"] = json!({"leaderElectionName": lock});
        }
        let path = format!(
            "/apis/{}/{}/namespaces/{namespace}/shardingconfigs/{name}",
            names::GROUP,
            names::VERSION
        );
        self.api.apply(&path, &config).map(drop)
    }

    /// Makes the namespace of this number, with what the operator is to do there.
    ///
    /// # Errors
    /// Where the API server refuses something.
    pub fn make(&self, number: usize) -> Result<()> {
        let (name, labels) = (namespace(number), json!({MADE: "true"}));
        let space = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}});
        self.api.apply(&format!("/api/v1/namespaces/{name}"), &space)?;
        for (kind, object) in self.work.objects() {
            let own = object["metadata"]["name"].as_str().context("a name")?;
            self.api.apply(&kind.path(&name, own), &object)?;
        }
        Ok(())
    }

    /// The paths of all objects of work.
    fn paths(&self) -> Vec<String> {
        let main = self.work.main();
        let work = self.observer.world().work;
        work.iter().map(|one| main.path(&one.namespace, &one.name)).collect()
    }

    /// Makes the change of this number to every object of work; gives how many there are.
    ///
    /// # Errors
    /// Where the API server refuses one.
    pub fn change_all(&self, number: u64) -> Result<usize> {
        let paths = self.paths();
        for path in &paths {
            self.api.merge(path, &self.work.change(number))?;
        }
        Ok(paths.len())
    }

    /// What the operator has made in the namespaces that there were at first.
    ///
    /// # Errors
    /// Where the API server does not answer.
    pub fn made(&self) -> Result<Made> {
        let first: BTreeSet<String> = (0..self.namespaces).map(namespace).collect();
        self.work.made(&self.api, |namespace| first.contains(namespace))
    }

    /// Kills the first process of a pod's only container with SIGKILL, where the node is ours; elsewhere the pod is
    /// deleted without grace. Gives the process.
    ///
    /// # Errors
    /// Where it does not run.
    pub fn kill(&self, namespace: &str, pod: &str) -> Result<String> {
        let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}");
        let Some(node) = self.cluster.node() else {
            self.api.delete(&path, &json!({"gracePeriodSeconds": 0}))?;
            return Ok(pod.to_owned());
        };
        let found = self.api.get(&path)?;
        let container = found["status"]["containerStatuses"][0]["containerID"].as_str();
        let container = container.context("the container is not there")?;
        let container = container.trim_start_matches("containerd://");
        let tasks =
            node.command("ctr")?.args(["--namespace", "k8s.io", "tasks", "list"]).output()?;
        let tasks = String::from_utf8_lossy(&tasks.stdout).into_owned();
        let running = |line: &&str| line.starts_with(container) && line.ends_with("RUNNING");
        let task = tasks.lines().find(running).with_context(|| format!("{pod} does not run"))?;
        let process = task.split_whitespace().nth(1).context("a task without process")?;
        // A process of the node, where only its own can be named.
        let killed = node.command("kill")?.args(["-KILL", process]).output()?;
        ensure!(killed.status.success(), "{}", String::from_utf8_lossy(&killed.stderr));
        Ok(process.to_owned())
    }

    /// The names of the pods of ours that carry `app.kubernetes.io/name=NAME`.
    ///
    /// # Errors
    /// Where the API server does not answer.
    pub fn ours(&self, name: &str) -> Result<Vec<String>> {
        let path = format!(
            "/api/v1/namespaces/{SYSTEM}/pods?labelSelector=app.kubernetes.io%2Fname%3D{name}"
        );
        let list = self.api.get(&path)?;
        let items = list["items"].as_array().into_iter().flatten();
        Ok(items.filter_map(|pod| Some(pod["metadata"]["name"].as_str()?.to_owned())).collect())
    }

    /// Waits for something to be there.
    ///
    /// # Errors
    /// Where it does not come in time, or cannot be looked for.
    pub fn until<T>(
        &self,
        what: &str,
        within: Duration,
        mut look: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let deadline = Instant::now() + within;
        loop {
            if let Some(found) = look()? {
                return Ok(found);
            }
            if Instant::now() > deadline {
                bail!("waited {within:?} in vain for {what}");
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Begins to change objects of work, one every `pause`, each in another way than before.
    pub fn load(&self, pause: Duration) -> Load {
        let shared = Arc::new(Changing::default());
        let (api, work, paths) = (self.api.clone(), self.work, self.paths());
        let thread = thread::spawn({
            let shared = shared.clone();
            move || {
                for (number, path) in (1..).zip(paths.iter().cycle()) {
                    if shared.over.load(Ordering::Relaxed) {
                        break;
                    }
                    if api.merge(path, &work.change(number)).is_ok() {
                        shared.changed.fetch_add(1, Ordering::Relaxed);
                    }
                    thread::sleep(pause);
                }
            }
        });
        Load { shared, thread: Some(thread) }
    }
}

// === impl Load ===

impl Load {
    /// How many objects it has changed.
    pub fn changed(&self) -> u64 {
        self.shared.changed.load(Ordering::Relaxed)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It panicked where there is an error, and has said so.
            drop(thread.join());
        }
    }
}

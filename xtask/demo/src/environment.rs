//! Makes and changes the objects of work, changes the operator and its shards, and kills processes.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use ctrlmesh_common::names::{self, port};
use ctrlmesh_runtime::sync::lock;
use ctrlmesh_testbed::Cluster;
use jiff::Timestamp;
use serde_json::{Value, json};
use xtask::user_cluster::{MADE, SYSTEM};

use crate::api::Api;
use crate::install::{ROLLED_OUT_WITHIN, namespace, rolled_out};
use crate::observer::Observer;
use crate::operator::{Operator, metric};
use crate::rules::Rules;
use crate::view::Answers;
use crate::work::{OperatorObjects, Work};

mod load;
mod membership;

pub use load::Load;

/// How often we look.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(200);

/// How long a replica may take to say what it counts.
const SAID_WITHIN: Duration = Duration::from_mins(1);

/// A cluster with an operator that is watched.
#[derive(Debug)]
pub struct Environment {
    /// What the operator is given to do.
    pub work: Work,
    /// In how many namespaces, at first.
    pub namespaces: usize,
    /// What one replica alone has made of it, once that is known.
    pub reference: OnceLock<OperatorObjects>,
    /// How many bytes it received to follow a change of all, once that is known.
    pub alone: OnceLock<f64>,
    /// Whether the API server sees its requests come from its pods' own addresses, once that is known.
    pub is_seen: OnceLock<bool>,
    /// Since when each replica is to see its share only.
    pub sharded: OnceLock<Timestamp>,
    /// The rules that the root was given.
    rules: Mutex<Rules>,
    /// Watches the operator.
    pub observer: Observer,
    /// Asks the API server.
    pub api: Arc<Api>,
    /// The cluster.
    pub cluster: Cluster,
}

impl Environment {
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
            is_seen: OnceLock::new(),
            sharded: OnceLock::new(),
            rules: Mutex::default(),
            observer,
            api,
            cluster,
        })
    }

    /// Reads or changes the rules that the root ShardingConfig was given.
    pub(crate) fn rules<T>(&self, ask: impl FnOnce(&mut Rules) -> T) -> T {
        ask(&mut lock(&self.rules))
    }

    fn operator(&self) -> &Operator {
        self.observer.operator()
    }

    /// The path of the operator's Deployment.
    pub(crate) fn deployment(&self) -> String {
        let Operator { namespace, name, .. } = self.operator();
        format!("/apis/apps/v1/namespaces/{namespace}/deployments/{name}")
    }

    /// Gives the operator so many replicas, and waits until they are there and no others.
    ///
    /// # Errors
    /// Where they do not become ready.
    pub fn scale(&self, replicas: usize) -> Result<()> {
        self.api.merge(&self.deployment(), &json!({"spec": {"replicas": replicas}}))?;
        rolled_out(&self.cluster, self.operator().namespace, &format!("deployment/{}", self.operator().name))?;
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
        let list = self.api.get(&format!("/api/v1/namespaces/{namespace}/pods?labelSelector={label}"))?;
        Ok(list["items"].as_array().cloned().unwrap_or_default())
    }

    /// The addresses that our node's proxies connect from: those of the node. None known where the node is not ours:
    /// who knows what stands between its nodes and its API server.
    ///
    /// # Errors
    /// Where the API server does not answer.
    pub fn proxies(&self) -> Result<Option<BTreeSet<String>>> {
        if self.cluster.node().is_none() {
            return Ok(None);
        }
        let list = self.api.get("/api/v1/nodes")?;
        let nodes = list["items"].as_array().into_iter().flatten();
        let addresses = nodes.flat_map(|node| node["status"]["addresses"].as_array().into_iter().flatten());
        let internal = addresses.filter(|one| one["type"] == "InternalIP");
        Ok(Some(internal.filter_map(|one| Some(one["address"].as_str()?.to_owned())).collect()))
    }

    /// How often the client of each replica that is ready got which answer, as soon as all say so.
    ///
    /// # Errors
    /// Where one does not say so in time.
    pub fn answers(&self) -> Result<BTreeMap<String, Answers>> {
        self.observer.settle()?;
        self.until("each replica to say what answers it got", SAID_WITHIN, || {
            let pods = self.observer.world().pods;
            let all = pods.into_iter().map(|(name, pod)| (name, pod.answers));
            let all: BTreeMap<_, _> = all.collect();
            let known = !all.is_empty() && all.values().all(|answers| !answers.is_empty());
            Ok(known.then_some(all))
        })
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

    /// Deletes what the operator was to do in the namespace of this number; gives how much of it there was.
    ///
    /// # Errors
    /// Where the API server refuses something.
    pub fn unmake(&self, number: usize) -> Result<usize> {
        let (main, space) = (self.work.main(), namespace(number));
        let work = self.observer.world().work.into_iter().filter(|one| one.namespace == space);
        let paths: Vec<String> = work.map(|one| main.path(&space, &one.name)).collect();
        paths.iter().try_for_each(|path| self.api.delete(path, &json!({})).map(drop))?;
        Ok(paths.len())
    }

    /// The paths of the objects of work, in the namespaces that are meant.
    fn paths(&self, is_meant: impl Fn(&str) -> bool) -> Vec<String> {
        let main = self.work.main();
        let work = self.observer.world().work.into_iter().filter(|one| is_meant(&one.namespace));
        work.map(|one| main.path(&one.namespace, &one.name)).collect()
    }

    /// Makes the change of this number to every object of work in the namespaces that are meant; gives how many there
    /// are.
    ///
    /// # Errors
    /// Where the API server refuses one.
    pub fn change(&self, number: u64, is_meant: impl Fn(&str) -> bool) -> Result<usize> {
        let paths = self.paths(is_meant);
        for path in &paths {
            self.api.merge(path, &self.work.change(number))?;
        }
        Ok(paths.len())
    }

    /// What the operator has made in the namespaces of these numbers.
    ///
    /// # Errors
    /// Where the API server does not answer.
    pub fn made(&self, numbers: Range<usize>) -> Result<OperatorObjects> {
        let spaces: BTreeSet<String> = numbers.map(namespace).collect();
        self.work.made(&self.api, |namespace| spaces.contains(namespace))
    }

    /// What [`Self::kill`] does.
    pub fn killed(&self) -> &'static str {
        if self.cluster.node().is_some() { "killed with SIGKILL" } else { "deleted without grace" }
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
        let tasks = node.command("ctr")?.args(["--namespace", "k8s.io", "tasks", "list"]).output()?;
        let tasks = String::from_utf8_lossy(&tasks.stdout).into_owned();
        let running = |line: &&str| line.starts_with(container) && line.ends_with("RUNNING");
        let task = tasks.lines().find(running).with_context(|| format!("{pod} does not run"))?;
        let process = task.split_whitespace().nth(1).context("a task without process")?;
        // A process of the node, where only its own can be named.
        let killed = node.command("kill")?.args(["-KILL", process]).output()?;
        ensure!(killed.status.success(), "{}", String::from_utf8_lossy(&killed.stderr));
        Ok(process.to_owned())
    }

    /// The pods of ours that carry `app.kubernetes.io/name=NAME`, and the container that runs in each; empty where none
    /// does.
    ///
    /// # Errors
    /// Where the API server does not answer.
    pub fn ours(&self, name: &str) -> Result<BTreeMap<String, String>> {
        let path = format!("/api/v1/namespaces/{SYSTEM}/pods?labelSelector=app.kubernetes.io%2Fname%3D{name}");
        let list = self.api.get(&path)?;
        let items = list["items"].as_array().into_iter().flatten();
        let one = |pod: &Value| {
            let container = &pod["status"]["containerStatuses"][0]["containerID"];
            let name = pod["metadata"]["name"].as_str()?.to_owned();
            Some((name, container.as_str().unwrap_or_default().to_owned()))
        };
        Ok(items.filter_map(one).collect())
    }

    /// Kills them all as [`Self::kill`] does; gives what there was.
    ///
    /// # Errors
    /// Where there are none, or one does not run.
    pub fn kill_ours(&self, name: &str) -> Result<BTreeMap<String, String>> {
        let all = self.ours(name)?;
        ensure!(!all.is_empty(), "there is no pod of {name} to kill");
        all.keys().try_for_each(|pod| self.kill(SYSTEM, pod).map(drop))?;
        Ok(all)
    }

    /// How many watches the node's proxies that run now have made begin anew; nothing where the API server of
    /// somebody's cluster does not reach them.
    ///
    /// # Errors
    /// Where there is no proxy, or it does not say that.
    pub fn expired(&self) -> Result<Option<f64>> {
        let proxies = self.ours("ctrlmesh-node")?;
        ensure!(!proxies.is_empty(), "there is no proxy to ask");
        let mut expired = 0.0;
        for pod in proxies.keys() {
            let port = port::PROXY_ADMIN;
            let path = format!("/api/v1/namespaces/{SYSTEM}/pods/{pod}:{port}/proxy/metrics");
            let page = match self.api.text(&path, SAID_WITHIN) {
                Err(_unreached) if self.cluster.node().is_none() => return Ok(None),
                page => page.with_context(|| format!("ask {pod} what it counts"))?,
            };
            let count = metric(&page, "ctrlmesh_proxy_watches_expired_total");
            expired += count.with_context(|| format!("{pod} does not say what it counts"))?;
        }
        Ok(Some(expired))
    }

    /// Waits for something to be there.
    ///
    /// # Errors
    /// Where it does not come in time, or cannot be looked for.
    pub fn until<T>(&self, what: &str, within: Duration, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
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
        Load::begin(self.api.clone(), self.work, self.paths(|_| true), pause)
    }
}

/// The path of the ShardingConfigs of a namespace.
pub(crate) fn configs(namespace: &str) -> String {
    format!("/apis/{}/{}/namespaces/{namespace}/shardingconfigs", names::GROUP, names::VERSION)
}

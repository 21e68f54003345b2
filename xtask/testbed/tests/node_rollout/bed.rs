//! The example operator in three shards, as a Deployment or a StatefulSet, whose root tries each new version.
//!
//! A version is the same image with other arguments. The websites are in one namespace for each slot, so that the slots
//! of each step have something to compare, whatever other tests have put into the cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Write as _, stderr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use ctrlmesh_common::api::{RolloutStatus, ShardingConfig};
use ctrlmesh_common::names::{self, annotation};
use ctrlmesh_common::slots::{NamespaceHash, Slot, SlotSet};
use ctrlmesh_testbed::witness::{OperatorUnderTest, Witness};
use ctrlmesh_testbed::{Cluster, Space, is_full, until_within};
use serde_json::{Value, json};
use xtask::user_cluster::MADE;

use crate::mesh::operator::{self, LOCK, NAME, OperatorSpec, PLAIN};
use crate::mesh::{self, checkout, kubectl, until};

/// The root, and what the names of its shards begin with.
pub(crate) const ROOT: &str = "websites";

/// The kind of roots, as the audit log is asked for it.
const ROOTS: &str = "shardingconfigs.ctrlmesh.kusionstack.io";

/// What the root divides.
pub(crate) const DIVIDED: [&str; 2] = ["websites.web.example.com", "configmaps"];

/// How many pods there are, each of a shard of its own.
pub(crate) const REPLICAS: usize = 3;

/// The argument of the version that is promoted first. It writes the status of each website at this interval.
pub(crate) const GOOD: &str = "--resync=2s";

/// The same for an operator that writes only after changes.
pub(crate) const QUIET: &str = "--resync=0s";

/// An argument that changes nothing that anybody could notice: another good version.
pub(crate) const NEXT: &str = "--resync=1900ms";

/// How long a step lasts where the test does not say so.
pub(crate) const PAUSE: &str = "10s";

/// The same where the version is to fail in it, which takes some restarts of one that crashes.
pub(crate) const LONG_PAUSE: &str = "120s";

/// Between two changes of a website.
const CHANGE_INTERVAL: Duration = Duration::from_secs(5);

/// Limit for a trial: three steps, and the pods' starts and ends.
const TRIAL_WITHIN: Duration = Duration::from_mins(10);

/// Limit for a slot without an owner: a pod that ends holds its slots until the node says that it is gone.
const UNOWNED_WITHIN: Duration = Duration::from_mins(2);

/// Written by the test that kills managers, read by all others.
pub(crate) static MANAGERS: RwLock<()> = RwLock::new(());

/// What the operator's pods belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Deployment,
    StatefulSet,
}

/// The operator of one test.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operator<'a> {
    pub(crate) space: Space<'a>,
    pub(crate) kind: Kind,
    /// The argument of the version that is promoted first.
    pub(crate) good: &'static str,
    /// Whether shares follow the pods. Else each pod has one of its own.
    pub(crate) is_elastic: bool,
}

/// The cluster of this binary. Its audit log has what the witness needs.
pub(crate) fn cluster() -> &'static Cluster {
    static CLUSTER: LazyLock<Result<Cluster>> = LazyLock::new(start_cluster);
    CLUSTER.as_ref().unwrap_or_else(|error| panic!("{error:?}"))
}

/// A cluster like that, of a test's own.
pub(crate) fn start_cluster() -> Result<Cluster> {
    let cluster = mesh::alone_with_bodies(&[&DIVIDED[..], &[ROOTS]].concat())?;
    let labels = checkout("deploy/example-sharded/labels.yaml").display().to_string();
    kubectl(&cluster, &["apply", "--filename", &labels])?;
    Ok(cluster)
}

/// Whether a test runs that only full runs have; if not, this says so.
pub(crate) fn runs_in_full(test: &str) -> Result<bool> {
    if !is_full() {
        writeln!(stderr(), "{test}: only in full runs")?;
    }
    Ok(is_full())
}

/// Runs a test with an operator of its own, which is tried in three steps that last so long each, and removes it.
pub(crate) fn case(name: &str, kind: Kind, pause: &str, test: impl FnOnce(Operator<'_>) -> Result<()>) -> Result<()> {
    let steps =
        json!([{"slots": 1, "pause": pause}, {"percent": 25, "pause": pause}, {"percent": 100, "pause": pause}]);
    case_with(name, kind, GOOD, &steps, test)
}

/// The same with another first version and other steps.
pub(crate) fn case_with(
    name: &str,
    kind: Kind,
    good: &'static str,
    steps: &Value,
    test: impl FnOnce(Operator<'_>) -> Result<()>,
) -> Result<()> {
    cluster().case(name, |space| {
        let operator = Operator { space, kind, good, is_elastic: false };
        operator.deploy(steps)?;
        test(operator)?;
        operator.remove()
    })
}

impl Operator<'_> {
    /// Deploys it in its first version, over namespaces with their websites. Without steps no version is tried.
    pub(crate) fn deploy(self, steps: &Value) -> Result<()> {
        let websites = list(&self.websites("Hello"));
        // For some seconds after the kind was made known, the API server's own admission does not know it.
        until("the websites to be taken", || {
            Ok(self.space.cluster().ask(&["apply", "--filename", "-"], &websites).ok())
        })?;
        self.space.apply(&self.root(steps).to_string())?;
        // Pods that come before the manager knows the root have no readiness gate.
        until("the root to be known", || Ok(self.config()?.status.filter(|status| !status.conditions.is_empty())))?;
        let items = [&operator::account(self.space)[..], &[self.workload()]].concat();
        self.space.apply(&list(&items))?;
        self.rolled_out()?;
        if !steps.is_null() {
            self.until_rollout("the first version to be promoted", |status| status.trial.is_none())?;
        }
        self.owned_by(false)?;
        let ours = self.selector();
        let published = ["wait", "websites", "--all-namespaces", &ours, "--for=condition=Published", "--timeout=300s"];
        kubectl(self.space.cluster(), &published).map(drop)
    }

    /// Removes the operator and its websites.
    pub(crate) fn remove(self) -> Result<()> {
        let (cluster, ours) = (self.space.cluster(), self.selector());
        kubectl(cluster, &["delete", "websites", "--all-namespaces", &ours])?;
        self.space.kubectl(&["scale", &self.target(), "--replicas=0"])?;
        self.space.kubectl(&["wait", "pod", "--selector=app=operator", "--for=delete", "--timeout=300s"])?;
        kubectl(cluster, &["delete", "namespace", "--wait=false", &ours]).map(drop)
    }

    /// The workload, as kubectl names it.
    pub(crate) fn target(self) -> String {
        let kind = match self.kind {
            Kind::Deployment => "deployment",
            Kind::StatefulSet => "statefulset",
        };
        format!("{kind}/{NAME}")
    }

    /// Waits until the workload's own rollout has ended well.
    pub(crate) fn rolled_out(self) -> Result<()> {
        self.space.kubectl(&["rollout", "status", &self.target(), "--timeout=300s"]).map(drop)
    }

    /// Changes the arguments of the template: a new version.
    pub(crate) fn change(self, arguments: &[&str]) -> Result<()> {
        let field = "/spec/template/spec/containers/0/args";
        let patch = json!([{"op": "replace", "path": field, "value": all_arguments(arguments)}]).to_string();
        self.space.kubectl(&["patch", &self.target(), "--type=json", "--patch", &patch]).map(drop)
    }

    /// Whether the template has exactly these arguments.
    pub(crate) fn has_arguments(self, arguments: &[&str]) -> Result<bool> {
        Ok(*arguments_of(&self.read(&self.target())?) == json!(all_arguments(arguments)))
    }

    /// The revision of the template, as its pods are labelled with it.
    pub(crate) fn revision(self) -> Result<String> {
        until("the workload's controller to know the template", || {
            let workload = self.read(&self.target())?;
            if self.kind == Kind::StatefulSet {
                let is_seen = workload["status"]["observedGeneration"] == workload["metadata"]["generation"];
                return Ok(workload["status"]["updateRevision"].as_str().filter(|_| is_seen).map(str::to_owned));
            }
            let sets = self.read("replicasets")?;
            let sets = sets["items"].as_array().context("ReplicaSets")?;
            let its = sets.iter().find(|set| arguments_of(set) == arguments_of(&workload));
            let hash = its.and_then(|set| set["metadata"]["labels"]["pod-template-hash"].as_str());
            Ok(hash.map(str::to_owned))
        })
    }

    /// The label of pods with their revision.
    pub(crate) fn revision_label(self) -> &'static str {
        match self.kind {
            Kind::Deployment => "pod-template-hash",
            Kind::StatefulSet => "controller-revision-hash",
        }
    }

    /// The root.
    pub(crate) fn config(self) -> Result<ShardingConfig> {
        Ok(serde_json::from_value(self.read(&format!("shardingconfig/{ROOT}"))?)?)
    }

    /// Waits until the status of the rollout is so; where it does not become so, the error shows the last one.
    pub(crate) fn until_rollout(self, what: &str, is: impl Fn(&RolloutStatus) -> bool) -> Result<RolloutStatus> {
        let mut last = None;
        let found = until_within(TRIAL_WITHIN, what, || {
            last = self.config()?.status.and_then(|status| status.rollout);
            Ok(last.clone().filter(&is))
        });
        found.with_context(|| format!("the last status: {last:?}"))
    }

    /// Has the manager do something with a revision.
    pub(crate) fn command(self, command: &str) -> Result<()> {
        let value = format!("{}={command}", annotation::ROLLOUT);
        self.space.kubectl(&["annotate", &format!("shardingconfig/{ROOT}"), "--overwrite", &value]).map(drop)
    }

    /// The UIDs of the pages of its websites, by namespace and name.
    pub(crate) fn pages(self) -> Result<BTreeMap<String, String>> {
        let all = kubectl(self.space.cluster(), &["get", "configmaps", "--all-namespaces", "--output=json"])?;
        let all: Value = serde_json::from_str(&all)?;
        let prefix = format!("{}-", self.space.name());
        let page = |page: &Value| {
            let [namespace, name, uid] = ["namespace", "name", "uid"].map(|field| page["metadata"][field].as_str());
            let (namespace, name) = (namespace.filter(|one| one.starts_with(&prefix))?, name?);
            name.starts_with("site").then(|| Some((format!("{namespace}/{name}"), uid?.to_owned())))?
        };
        Ok(all["items"].as_array().into_iter().flatten().filter_map(page).collect())
    }

    /// Waits until the table is total, and its owners are exactly the shards with the first names or with the second
    /// ones.
    pub(crate) fn owned_by(self, second: bool) -> Result<()> {
        let shard = |id| if second { names::second_shard(ROOT, id) } else { names::shard(ROOT, id) };
        let expected: BTreeSet<String> = (1..=REPLICAS).map(shard).collect::<Result<_, _>>()?;
        let mut last = None;
        let found = until("the owners", || {
            last = self.config()?.status.and_then(|status| status.ownership);
            let good = last.as_ref().filter(|table| {
                let owners: BTreeSet<String> = table.slots.values().cloned().collect();
                let pods: BTreeSet<String> = table.pods.values().cloned().collect();
                table.is_total() && table.revoked.is_none() && owners == expected && pods == expected
            });
            Ok(good.map(drop))
        });
        found.with_context(|| format!("expected {expected:?}, the last table: {last:?}"))
    }

    /// Requires by the audit log that nobody wrote what was not its own.
    pub(crate) fn witnessed(self) -> Result<()> {
        let mut witness = Witness::of(OperatorUnderTest {
            namespace: self.space.name().to_owned(),
            account: NAME.to_owned(),
            root: ROOT.to_owned(),
            resources: DIVIDED.map(str::to_owned).into(),
            hash: NamespaceHash::default(),
        });
        let node = self.space.cluster().node().context("a node of our own")?;
        node.control_plane().audit_logs().try_for_each(|log| witness.read(log))?;
        let verdict = witness.verdict();
        writeln!(stderr(), "{}: {verdict}", self.space.name())?;
        verdict.ensure_clean(UNOWNED_WITHIN)
    }

    /// What kubectl says of something in the test's namespace.
    fn read(self, what: &str) -> Result<Value> {
        Ok(serde_json::from_str(&self.space.kubectl(&["get", what, "--output=json"])?)?)
    }

    fn selector(self) -> String {
        format!("--selector=websites-of={}", self.space.name())
    }

    /// Changes all its websites every 5 s, until that is `over`.
    pub(crate) fn change_websites(self, over: &AtomicBool) -> Result<()> {
        for number in 0.. {
            if over.load(Ordering::Relaxed) {
                break;
            }
            let next = Instant::now() + CHANGE_INTERVAL;
            self.space.cluster().ask(&["apply", "--filename", "-"], &list(&self.websites(&number.to_string())))?;
            thread::sleep(next.saturating_duration_since(Instant::now()));
        }
        Ok(())
    }

    /// A namespace for each slot, with a website of one page or two.
    pub(crate) fn websites(self, title: &str) -> Vec<Value> {
        let labels = json!({"websites-of": self.space.name()});
        let items = |(slot, name): (Slot, String)| {
            let namespace = json!({"apiVersion": "v1", "kind": "Namespace",
                "metadata": {"name": name, "labels": {MADE: "true", "websites-of": self.space.name()}}});
            let website = json!({"apiVersion": "web.example.com/v1alpha1", "kind": "Website",
                "metadata": {"namespace": name, "name": "site", "labels": labels},
                "spec": {"title": title, "pages": 1 + slot.number() % 2}});
            [namespace, website]
        };
        self.namespaces().into_iter().flat_map(items).collect()
    }

    /// The slots, each with a namespace of it.
    pub(crate) fn namespaces(self) -> Vec<(Slot, String)> {
        let names = || (0..).map(|number| format!("{}-{number}", self.space.name()));
        let of = |slot| names().find(|name| NamespaceHash::default().slot(name) == slot);
        SlotSet::ALL.iter().filter_map(|slot| Some((slot, of(slot)?))).collect()
    }

    fn root(self, steps: &Value) -> Value {
        let websites = json!([{"apiGroups": ["web.example.com"], "resources": ["websites"]}]);
        let pages = json!([{"apiGroups": [""], "resources": ["configmaps"]}]);
        let auto = if self.is_elastic {
            // More shards than there are ever pods of a version.
            json!({"shardingSize": 8})
        } else {
            json!({"shardingSize": REPLICAS, "everyShardReplicas": 1})
        };
        let mut root = json!({"prefix": ROOT, "auto": auto,
            // The operator gives its pages no label of ours.
            "resourceSelector": [{"relateResources": pages}, {"relateResources": websites,
                "selector": {"matchLabels": {"websites-of": self.space.name()}}}]});
        if !steps.is_null() {
            root["rollout"] =
                json!({"analysis": {"interval": "10s", "failureLimit": 1}, "onFailure": "Rollback", "steps": steps});
        }
        let target = match self.kind {
            Kind::Deployment => "targetDeployment",
            Kind::StatefulSet => "targetStatefulSet",
        };
        root[target] = json!(NAME);
        json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig", "metadata": {"name": ROOT},
            "spec": {"controller": {"leaderElectionName": LOCK}, "root": root}})
    }

    pub(crate) fn workload(self) -> Value {
        let mut workload = operator::workload(OperatorSpec { replicas: REPLICAS, ..PLAIN });
        workload["spec"]["template"]["spec"]["containers"][0]["args"] = json!(all_arguments(&[self.good]));
        match self.kind {
            Kind::Deployment => {
                let limits = json!({"maxSurge": 1, "maxUnavailable": 0});
                workload["spec"]["strategy"] = json!({"type": "RollingUpdate", "rollingUpdate": limits});
            }
            Kind::StatefulSet => {
                workload["kind"] = json!("StatefulSet");
                workload["spec"]["serviceName"] = json!(NAME);
                workload["spec"].as_object_mut().map(|spec| spec.remove("progressDeadlineSeconds"));
            }
        }
        workload
    }
}

/// With those that every version has.
fn all_arguments<'a>(arguments: &[&'a str]) -> Vec<&'a str> {
    [&["--leader-elect", "--health-probe-bind-address=:8081"], arguments].concat()
}

/// Of the template of a workload or a `ReplicaSet`.
fn arguments_of(workload: &Value) -> &Value {
    &workload["spec"]["template"]["spec"]["containers"][0]["args"]
}

pub(crate) fn list(items: &[Value]) -> String {
    json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string()
}

//! A namespace with an operator, and one manager for all.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, Mutex, OnceLock};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::api::{ShardingConfig, ShardingConfigStatus};
use ctrlmesh_common::names::{annotation, label};
use ctrlmesh_manager::cluster::cache::Cache;
use ctrlmesh_manager::cluster::event_recorder::EventRecorder;
use ctrlmesh_manager::cluster::plan::{self, Plans};
use ctrlmesh_manager::drain::Drain;
use ctrlmesh_manager::ownership::fence_state::{FenceState, States, Unfenced};
use ctrlmesh_manager::rules::label_coverage::LabelCoverages;
use ctrlmesh_manager::rules::pod::PodName;
use ctrlmesh_manager::rules::shard::Labelling;
use ctrlmesh_manager::rules::shared::Shared;
use ctrlmesh_manager::status::cluster_writer::ClusterWriter;
use ctrlmesh_manager::status::compute::Contact;
use ctrlmesh_runtime::sync::lock;
use ctrlmesh_testbed::{ControlPlane, Options, retry};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::sync::{OnceCell, watch};

use crate::harness;

/// What proxies have said, to the manager under test.
pub(crate) type Contacts = Arc<Mutex<BTreeMap<PodName, Contact>>>;

pub(crate) static BED: LazyLock<ControlPlane> = LazyLock::new(|| {
    let options = Options { controller_manager: true, ..Options::default() };
    ControlPlane::start(&options).unwrap_or_else(|error| panic!("{error:?}"))
});

/// A runtime that outlives the tests: the manager runs in it.
static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Runtime::new().unwrap_or_else(|error| panic!("start a runtime: {error}")));

/// What the manager under test plans.
pub(crate) static PLANS: OnceLock<Plans> = OnceLock::new();

pub(crate) static CONTACTS: LazyLock<Contacts> = LazyLock::new(Contacts::default);

/// What the manager under test knows of fences. Nobody probes.
static FENCES: LazyLock<watch::Sender<Arc<States>>> = LazyLock::new(|| watch::channel(Arc::default()).0);

/// One manager for all tests of this binary.
pub(crate) async fn managed() -> Result<Client> {
    static STARTED: OnceCell<()> = OnceCell::const_new();
    let client = BED.client().await?;
    STARTED
        .get_or_try_init(|| async {
            harness::install(&client).await?;
            RUNTIME.spawn(manage()).await?
        })
        .await?;
    Ok(client)
}

async fn manage() -> Result<()> {
    let client = BED.client().await?;
    let drain = Drain::default();
    let cache = Cache::start(&client, "ctrlmesh-system", Labelling::default(), &drain);
    let plans = plan::start(cache, watch::channel(Some(Arc::default())).1, &drain);
    let control = ClusterWriter {
        client: client.clone(),
        recorder: EventRecorder::new(client, "ctrlmesh-manager".into()),
        labels: |_: &[Shared<ShardingConfig>]| (None, LabelCoverages::default()),
        fences: FENCES.subscribe(),
        rollouts: watch::Sender::default().subscribe(),
        ownerships: watch::Sender::default().subscribe(),
        contacts: || Arc::new(lock(&CONTACTS).clone()),
        may_write: || true,
    };
    drain.spawn(control.run(plans.clone()));
    PLANS.set(plans).ok().context("there is one manager")
}

/// A namespace, and what is in it.
pub(crate) struct TestNamespace {
    pub(crate) client: Client,
    pub(crate) namespace: String,
}

impl TestNamespace {
    pub(crate) async fn new(prefix: &str) -> Result<Self> {
        Ok(Self { client: managed().await?, namespace: BED.namespace(prefix).await? })
    }

    pub(crate) fn configs(&self) -> Api<ShardingConfig> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// The manager takes the API server for one that cannot fence the root `op-root`.
    pub(crate) fn without_fence(&self) {
        let root = format!("{}/op-root", self.namespace);
        let unsupported = FenceState::Open(Unfenced::Unsupported);
        FENCES.send_modify(|states| drop(Arc::make_mut(states).insert(root, unsupported)));
    }

    /// Makes the root `op-root`, or changes it to this rule.
    pub(crate) async fn root(&self, rule: Value) -> Result<ShardingConfig> {
        let mut root = json!({"prefix": "op", "targetStatefulSet": "op"});
        if rule.get("targetDeployment").is_some() {
            root = json!({"prefix": "op"});
        }
        for (key, value) in rule.as_object().context("a rule")? {
            root[key] = value.clone();
        }
        let config = json!({
            "apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
            "metadata": {"name": "op-root"},
            "spec": {"controller": {"leaderElectionName": "op-lock"}, "root": root},
        });
        let params = PatchParams::apply("test").force();
        Ok(self.configs().patch("op-root", &params, &Patch::Apply(config)).await?)
    }

    /// A real StatefulSet, whose pods Kubernetes makes.
    pub(crate) async fn stateful_set(&self, replicas: i32) -> Result<()> {
        let set: StatefulSet = serde_json::from_value(json!({
            "metadata": {"name": "op"},
            "spec": {
                "serviceName": "op", "replicas": replicas, "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": {"app": "op"}}, "template": template("1"),
            },
        }))?;
        Api::namespaced(self.client.clone(), &self.namespace).create(&PostParams::default(), &set).await?;
        Ok(())
    }

    /// The shards of the root, by name.
    pub(crate) async fn shards(&self) -> Result<BTreeMap<String, ShardingConfig>> {
        let list = self.configs().list(&ListParams::default()).await?;
        let shards = list.into_iter().filter(|config| config.spec.root.is_none());
        Ok(shards.map(|config| (config.name_any(), config)).collect())
    }

    /// The shards, once there are exactly these and the status of the root says the same.
    pub(crate) async fn until_shards(&self, names: &[&str]) -> Result<BTreeMap<String, ShardingConfig>> {
        retry(|| async {
            let shards = self.shards().await?;
            ensure!(shards.keys().eq(names.iter()), "{:?}", shards.keys());
            let said = self.status("op-root").await?.root.unwrap_or_default();
            ensure!(said.child_sharding_configs == names, "{said:?}");
            Ok(shards)
        })
        .await
    }

    pub(crate) async fn status(&self, name: &str) -> Result<ShardingConfigStatus> {
        self.configs().get_status(name).await?.status.context("no status yet")
    }

    /// Waits until the condition `kind` of `name` is `STATUS REASON`; returns its message.
    pub(crate) async fn until_condition(&self, name: &str, kind: &str, says: &str) -> Result<String> {
        retry(|| async {
            let conditions = self.status(name).await?.conditions;
            let condition = conditions.iter().find(|one| one.type_ == kind).context("none")?;
            let said = format!("{} {}", condition.status, condition.reason);
            ensure!(said == says, "{said}: {}", condition.message);
            Ok(condition.message.clone())
        })
        .await
    }

    /// By pod, the shard that its label names, once as many as `count` have one and nobody is leaving.
    pub(crate) async fn until_labelled(&self, count: usize) -> Result<BTreeMap<String, String>> {
        retry(|| async {
            let pods = self.pods().list(&ListParams::default()).await?.items;
            let leaving = pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_some());
            ensure!(leaving.count() == 0, "some are leaving");
            let shard = |pod: &Pod| pod.labels().get(label::SHARDING_CONFIG_INJECTED).cloned();
            let labelled: BTreeMap<String, String> =
                pods.iter().filter_map(|pod| Some((pod.name_any(), shard(pod)?))).collect();
            ensure!(labelled.len() == count && pods.len() == count, "{labelled:?}");
            Ok(labelled)
        })
        .await
    }
}

pub(crate) fn template(version: &str) -> Value {
    json!({
        "metadata": {"labels": {"app": "op", "version": version, label::ENABLE_PROXY: "true"}, "annotations": {annotation::INJECTED: "true"}},
        "spec": {"automountServiceAccountToken": false, "containers": [{"name": "operator", "image": "none"}]},
    })
}

pub(crate) fn auto(size: i32, replicas: i32) -> Value {
    json!({"auto": {"shardingSize": size, "everyShardReplicas": replicas}})
}

/// The hashes in the first limit of a shard.
pub(crate) fn hashes(shard: &ShardingConfig) -> Vec<String> {
    let selector = shard.spec.limits.first().and_then(|limit| limit.objects());
    let expressions = selector.map_or(&[][..], |selector| &selector.match_expressions);
    let hashes = expressions.iter().find(|one| one.key == label::SHARDING_HASH);
    hashes.map(|hashes| hashes.values.clone()).unwrap_or_default()
}

pub(crate) fn uids(shards: &BTreeMap<String, ShardingConfig>) -> BTreeMap<String, Option<String>> {
    shards.iter().map(|(name, shard)| (name.clone(), shard.uid())).collect()
}

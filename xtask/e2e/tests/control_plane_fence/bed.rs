//! A keeper of fences, and operators whose tables the tests write.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_manager::app::api_client;
use ctrlmesh_manager::cluster::cache::Cache;
use ctrlmesh_manager::cluster::plan;
use ctrlmesh_manager::drain::Drain;
use ctrlmesh_manager::ownership::fence_policy::{Evaluation, Fence, PodWrite};
use ctrlmesh_manager::ownership::fence_state::{FenceState, FenceStates};
use ctrlmesh_manager::ownership::{FenceKeeper, fence_table};
use ctrlmesh_manager::rules::shard::Labelling;
use ctrlmesh_testbed::ControlPlane;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{Namespace, Pod, ServiceAccount};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config, Resource, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::sync::{OnceCell, watch};
use tokio::time;

use crate::harness;

/// Longer than anything may take.
const PATIENCE: Duration = Duration::from_mins(2);

/// The service account of the operator's pods.
pub(crate) const ACCOUNT: &str = "robot";

/// The manager's namespace.
const SYSTEM: &str = "ctrlmesh-system";

/// A runtime that outlives the tests: the keeper runs in it.
static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Runtime::new().unwrap_or_else(|error| panic!("start a runtime: {error}")));

/// Makes a client of the API server at this address.
type Dial = Box<dyn Fn(SocketAddr) -> Option<Client> + Send + Sync>;

/// One keeper for all tests that need no API server of their own.
pub(crate) async fn shared() -> Result<Bed> {
    static STATES: OnceCell<FenceStates> = OnceCell::const_new();
    let plane = ControlPlane::shared();
    let start = || async { RUNTIME.spawn(keep_alone(plane)).await? };
    let states = STATES.get_or_try_init(start).await?.clone();
    Bed::new(plane, states).await
}

/// A keeper for a lone API server of one's own.
pub(crate) async fn own(plane: &ControlPlane) -> Result<Bed> {
    Bed::new(plane, keep_alone(plane).await?).await
}

/// A keeper for several API servers, which it dials as the manager does.
pub(crate) async fn of_several(plane: &ControlPlane) -> Result<Bed> {
    let kubeconfig = Kubeconfig::read_from(plane.kubeconfig())?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    let dial = Box::new(move |address| api_client::at(&config, address).ok());
    Bed::new(plane, keep(plane, dial).await?).await
}

/// No address of loopback may be an endpoint, so the server has one of those for documentation.
async fn keep_alone(plane: &ControlPlane) -> Result<FenceStates> {
    let client = plane.client().await?;
    let slice = json!({
        "metadata": {"name": "kubernetes", "labels": {"kubernetes.io/service-name": "kubernetes"}},
        "addressType": "IPv4", "ports": [{"name": "https", "port": 6443}],
        "endpoints": [{"addresses": ["192.0.2.1"]}],
    });
    create::<EndpointSlice>(&Api::namespaced(client.clone(), "default"), slice).await?;
    keep(plane, Box::new(move |_address| Some(client.clone()))).await
}

async fn keep(plane: &ControlPlane, dial: Dial) -> Result<FenceStates> {
    let client = plane.client().await?;
    harness::install(&client).await?;
    let namespace = SYSTEM.to_owned();
    create::<Namespace>(&Api::all(client.clone()), json!({"metadata": {"name": namespace}})).await?;
    let drain = Drain::default();
    let cache = Cache::start(&client, SYSTEM, Labelling::default(), &drain);
    let compiled = plan::start(Arc::clone(&cache), watch::channel(Some(Arc::default())).1, &drain);
    let (states, known) = watch::channel(Arc::default());
    let keeper = FenceKeeper { client, namespace, cache, plans: compiled, dial, may_write: || true, states };
    // It goes on until its runtime ends.
    drain.spawn_until_started(async move { keeper.lead().await });
    std::mem::forget(drain);
    Ok(known)
}

pub(crate) async fn create<K>(api: &Api<K>, object: Value) -> Result<K>
where
    K: Resource + DeserializeOwned + Serialize + Clone + std::fmt::Debug,
{
    let params = PostParams::default();
    let sent: K = serde_json::from_value(object)?;
    api.create(&params, &sent).await.with_context(|| format!("create {sent:?}"))
}

/// A keeper, and its API server.
pub(crate) struct Bed {
    url: String,
    ca: PathBuf,
    /// May do everything.
    pub(crate) client: Client,
    pub(crate) states: FenceStates,
}

/// An operator with a fence.
pub(crate) struct Operator {
    /// Its namespace.
    pub(crate) namespace: String,
    /// Of the namespaces that it works on, which the tests know by shorter names.
    pub(crate) random: String,
    pub(crate) uids: BTreeMap<String, String>,
}

impl Bed {
    async fn new(plane: &ControlPlane, states: FenceStates) -> Result<Self> {
        let (url, ca) = (plane.url().to_owned(), plane.ca().to_owned());
        Ok(Self { url, ca, client: plane.client().await?, states })
    }

    /// An operator of two pods, `op-0` of shard `op-1-normal` and `op-1` of shard `op-2-normal`. The first owns slot 7
    /// and the other owns slot 8; there is a namespace in either, and one that has no slot yet.
    pub(crate) async fn operator(&self) -> Result<Operator> {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let namespace = create(&namespaces, json!({"metadata": {"generateName": "ops-"}})).await?.name_any();
        let random = namespace.trim_start_matches("ops-").to_owned();
        let mut operator = Operator { namespace, random, uids: BTreeMap::new() };
        self.grant(&operator.namespace).await?;
        for (short, labels) in [("seven", slot("7")), ("eight", slot("8")), ("unlabelled", json!({}))] {
            let name = operator.place(short);
            create(&namespaces, json!({"metadata": {"name": name, "labels": labels}})).await?;
        }
        let template = json!({"metadata": {"labels": {"app": "op"}},
            "spec": {"serviceAccountName": ACCOUNT, "containers": [{"name": "operator", "image": "none"}]}});
        let set = json!({"metadata": {"name": "op"},
            "spec": {"serviceName": "op", "selector": {"matchLabels": {"app": "op"}}, "template": template}});
        create::<StatefulSet>(&Api::namespaced(self.client.clone(), &operator.namespace), set).await?;
        for pod in ["op-0", "op-1"] {
            self.add_pod(&mut operator, pod).await?;
        }
        let kinds = json!([
            {"apiGroups": [""], "resources": ["configmaps"]},
            {"apiGroups": ["apps"], "resources": ["deployments"]},
            {"apiGroups": ["scheduling.k8s.io"], "resources": ["priorityclasses"]},
        ]);
        let root = json!({
            "metadata": {"name": "op"},
            "spec": {"controller": {"leaderElectionName": "lock"}, "root": {
                "prefix": "op", "targetStatefulSet": "op", "fence": "Server",
                "auto": {"shardingSize": 2, "everyShardReplicas": 1}, "resourceSelector": [{"relateResources": kinds}],
            }},
        });
        create(&self.roots(&operator), root).await?;
        let shards = ["op-1-normal", "op-2-normal"];
        let owners: BTreeMap<String, &str> = operator.uids.values().cloned().zip(shards).collect();
        self.write_table(&operator, 1, json!({"slots": {"7": shards[0], "8": shards[1]}, "podUids": owners})).await?;
        self.enforced(&operator, 1).await?;
        Ok(operator)
    }

    /// Lets every account of the namespace do everything.
    async fn grant(&self, namespace: &str) -> Result<()> {
        let binding = json!({
            "metadata": {"name": namespace},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group",
                "name": format!("system:serviceaccounts:{namespace}")}],
        });
        create::<ClusterRoleBinding>(&Api::all(self.client.clone()), binding).await?;
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), namespace);
        create(&accounts, json!({"metadata": {"name": ACCOUNT}})).await?;
        Ok(())
    }

    pub(crate) async fn add_pod(&self, operator: &mut Operator, name: &str) -> Result<()> {
        let owner =
            json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "op", "uid": "1", "controller": true});
        let pod = json!({
            "metadata": {"name": name, "ownerReferences": [owner]},
            "spec": {"serviceAccountName": ACCOUNT, "automountServiceAccountToken": false,
                "containers": [{"name": "operator", "image": "none"}]},
        });
        let made: Pod = create(&Api::namespaced(self.client.clone(), &operator.namespace), pod).await?;
        operator.uids.insert(name.to_owned(), made.uid().context("no UID")?);
        Ok(())
    }

    /// A client with a token that is bound to the pod.
    pub(crate) async fn pod(&self, operator: &Operator, pod: &str) -> Result<Client> {
        let uid = operator.uids.get(pod).context("no such pod")?;
        let bound = json!({"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid});
        self.token(operator, json!({"boundObjectRef": bound})).await
    }

    /// A client with a token of the operator's account.
    pub(crate) async fn token(&self, operator: &Operator, spec: Value) -> Result<Client> {
        let mut spec = spec;
        spec["audiences"] = json!(["https://kubernetes.default.svc"]);
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), &operator.namespace);
        let request: TokenRequest = serde_json::from_value(json!({"metadata": {}, "spec": spec}))?;
        let made = accounts.create_token_request(ACCOUNT, &PostParams::default(), &request).await?;
        let token = made.status.context("no status")?.token.context("no token")?;
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": self.url, "certificate-authority": self.ca}}],
            "users": [{"name": "u", "user": {"token": token}}],
        });
        let kubeconfig = Kubeconfig::from_yaml(&kubeconfig.to_string())?;
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        Ok(Client::try_from(config)?)
    }

    pub(crate) fn roots(&self, operator: &Operator) -> Api<ShardingConfig> {
        Api::namespaced(self.client.clone(), &operator.namespace)
    }

    /// Writes these fields of the table.
    pub(crate) async fn write_table(&self, operator: &Operator, epoch: u64, mut table: Value) -> Result<()> {
        table["epoch"] = json!(epoch);
        let status = Patch::Merge(json!({"status": {"ownership": table}}));
        self.roots(operator).patch_status("op", &PatchParams::default(), &status).await?;
        Ok(())
    }

    /// Waits until every endpoint has shown that it enforces this epoch.
    pub(crate) async fn enforced(&self, operator: &Operator, epoch: u64) -> Result<()> {
        let is_shown =
            |state: Option<&FenceState>| matches!(state, Some(FenceState::Enforced(proof)) if proof.epoch == epoch);
        self.state(operator, is_shown).await?;
        Ok(())
    }

    /// The revision of the policy that every endpoint enforces, once there is one.
    pub(crate) async fn revision(&self, operator: &Operator) -> Result<String> {
        self.another_revision(operator, "").await
    }

    /// The same, once it is another than `before`.
    pub(crate) async fn another_revision(&self, operator: &Operator, before: &str) -> Result<String> {
        let is_other = |state: Option<&FenceState>| revision(state).is_some_and(|now| now != before);
        let state = self.state(operator, is_other).await?;
        revision(state.as_ref()).map(str::to_owned).context("no revision")
    }

    /// What the manager takes the API server to answer, where this pod writes a ConfigMap in this namespace.
    pub(crate) async fn evaluated(&self, operator: &Operator, pod: &str, namespace: &str) -> Result<Evaluation> {
        let root = self.roots(operator).get("op").await?;
        let rule = root.spec.root.as_ref().context("no root")?;
        let key = Labelling::default().hash_key;
        let fence = Fence::of(&root, rule, [ACCOUNT.to_owned()].into(), &key, SYSTEM);
        let place = Api::<Namespace>::all(self.client.clone()).get(namespace).await?;
        let write = PodWrite {
            group: "",
            resource: "configmaps",
            subresource: "",
            namespace,
            name: "a",
            slot: place.labels().get(&key).map(String::as_str),
            pod,
            uid: operator.uids.get(pod).context("no such pod")?,
            account: ACCOUNT,
        };
        Ok(fence.evaluate(&write, &fence_table::data(&root).context("no table")?))
    }

    /// Waits until this is known of the operator's fence.
    pub(crate) async fn state(
        &self,
        operator: &Operator,
        is: impl Fn(Option<&FenceState>) -> bool,
    ) -> Result<Option<FenceState>> {
        let key = format!("{}/op", operator.namespace);
        let mut states = self.states.clone();
        let known = states.wait_for(|states| is(states.get(&key)));
        let Ok(known) = time::timeout(PATIENCE, known).await else {
            bail!("it is {:?}", self.states.borrow().get(&key));
        };
        Ok(known?.get(&key).cloned())
    }
}

impl Operator {
    /// The name of a namespace that it works on.
    pub(crate) fn place(&self, short: &str) -> String {
        format!("{short}-{}", self.random)
    }
}

fn revision(state: Option<&FenceState>) -> Option<&str> {
    match state {
        Some(FenceState::Enforced(proof)) => Some(&proof.revision),
        _ => None,
    }
}

/// The label of a slot.
pub(crate) fn slot(slot: &str) -> Value {
    json!({"ctrlmesh.kusionstack.io/sharding-hash": slot})
}

/// What a refusal says.
pub(crate) fn refusal<T: std::fmt::Debug>(answer: kube::Result<T>) -> Result<String> {
    match answer {
        Err(kube::Error::Api(status)) if status.code == 403 && status.reason == "Forbidden" => {
            let said = status.message.rsplit("denied request: ").next();
            Ok(said.unwrap_or_default().to_owned())
        }
        other => bail!("it is not refused: {other:?}"),
    }
}

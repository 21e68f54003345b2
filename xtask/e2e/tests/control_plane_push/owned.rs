//! What the manager's audit says is the truth, whatever breaks.

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::label;
use ctrlmesh_testbed::{ControlPlane, Options};
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{Config, watcher};
use kube::{Api, Client, Resource};
use nix::sys::signal::Signal;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;

use crate::bed::{AUDIENCE, eventually};
use crate::follow::operator;
use crate::full::{OPERATOR, ROOT, SYSTEM, divide_fenced, enrolled, proxies, world};
use crate::process::{ProxySettings, Replica, Sidecar};
use crate::token::{self, TestPod};

const REASONS: [&str; 8] =
    ["unlabelled", "moving", "no_shard", "no_pod", "no_policy", "unwatched", "never_watched", "proxy_away"];

/// Lists and watches until it is dropped.
pub(crate) struct Informer(JoinHandle<()>);

impl Drop for Informer {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Lists and watches every object of a kind that it is shown, as informers do.
pub(crate) fn watch<K>(client: &Client) -> Informer
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + DeserializeOwned + Send + 'static,
{
    let events = watcher(Api::<K>::all(client.clone()), Config::default()).default_backoff();
    Informer(tokio::spawn(events.for_each(async |_event| {})))
}

pub(crate) async fn count<K>(client: &Client) -> usize
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + DeserializeOwned,
{
    Api::<K>::all(client.clone()).list(&ListParams::default()).await.unwrap().items.len()
}

/// What the audit says of a kind: owned, owned twice, and how many have which gap.
async fn said(replica: &Replica, resource: &str) -> Option<(usize, usize, Vec<(&'static str, usize)>)> {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small count")]
    let get = async |name: &str, reason: &str| {
        let reason = if reason.is_empty() { String::new() } else { format!(",reason=\"{reason}\"") };
        let labels = format!("root=\"{OPERATOR}/{ROOT}\",group=\"\",resource=\"{resource}\"{reason}");
        replica.metric(&format!("ctrlmesh_manager_{name}_objects{{{labels}}}")).await.map(|value| value as usize)
    };
    let mut gaps = Vec::new();
    for reason in REASONS {
        gaps.push((reason, get("unowned", reason).await?));
    }
    gaps.retain(|(_, count)| *count > 0);
    Some((get("owned", "").await?, get("double_owned", "").await?, gaps))
}

/// Waits until the audit says that of the kind.
pub(crate) async fn until_said(
    replica: &Replica,
    resource: &str,
    twice: usize,
    gap: Option<(&'static str, usize)>,
    all: usize,
) {
    let gaps: Vec<_> = gap.into_iter().filter(|(_, count)| *count > 0).collect();
    let missing: usize = gaps.iter().map(|(_, count)| count).sum();
    let expected = (all - twice - missing, twice, gaps);
    let what = format!("{expected:?} of {resource}");
    eventually(&what, async || said(replica, resource).await.filter(|now| *now == expected)).await;
}

/// What the root divides.
async fn divide_kinds(client: &Client, resources: &[&str]) {
    let roots: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    let resources = json!([{"relateResources": [{"apiGroups": [""], "resources": resources}]}]);
    let patch = Patch::Merge(json!({"spec": {"root": {"resourceSelector": resources}}}));
    roots.patch(ROOT, &PatchParams::default(), &patch).await.unwrap();
}

async fn create<K>(api: &Api<K>, object: Value)
where
    K: Resource + Clone + std::fmt::Debug + DeserializeOwned + serde::Serialize,
{
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
}

async fn patch(maps: &Api<ConfigMap>, metadata: Value) {
    maps.patch("object", &PatchParams::default(), &Patch::Merge(json!({"metadata": metadata}))).await.unwrap();
}

/// Waits until condition `Owned` of the root has that status and reason, and says that.
async fn until_owned(client: &Client, expected: (&str, &str), text: &str) {
    let roots: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    eventually(&format!("{expected:?} of the root"), async || {
        let conditions = roots.get(ROOT).await.ok()?.status?.conditions;
        let owned = conditions.iter().find(|one| one.type_ == "Owned")?;
        let is_it = (owned.status.as_str(), owned.reason.as_str()) == expected && owned.message.contains(text);
        is_it.then_some(())
    })
    .await;
}

/// How many objects of the kind are in a namespace.
async fn count_in(client: &Client, namespace: &str) -> usize {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    maps.list(&ListParams::default()).await.unwrap().items.len()
}

/// The canary owns that namespace.
fn canary(namespace: &str) -> Value {
    json!({"replicas": 1, "inNamespaces": [namespace]})
}

/// A label is taken away. The manager gives it back, but not to an object that is being deleted: what has a finalizer
/// of the operator would stay for ever.
async fn label_taken_away(client: &Client, replica: &Replica, all: usize) {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "team-0");
    let slot = maps.get("object").await.unwrap().metadata.labels.unwrap()[label::SHARDING_HASH].clone();
    patch(&maps, json!({"finalizers": ["example.com/held"]})).await;
    maps.delete("object", &DeleteParams::default()).await.unwrap();
    patch(&maps, json!({"labels": {label::SHARDING_HASH: null}})).await;
    until_said(replica, "configmaps", 0, Some(("unlabelled", 1)), all).await;
    patch(&maps, json!({"labels": {label::SHARDING_HASH: slot}})).await;
    until_said(replica, "configmaps", 0, None, all).await;
}

/// The root divides secrets, too.
async fn kind_that_nobody_asks_for(client: &Client, replica: &Replica, clients: &[Client; 2]) -> [Informer; 2] {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), "team-1");
    create(&secrets, json!({"metadata": {"name": "one"}})).await;
    let all_secrets = count::<Secret>(client).await;
    divide_kinds(client, &["configmaps", "secrets"]).await;
    until_said(replica, "secrets", 0, Some(("never_watched", all_secrets)), all_secrets).await;
    let informers = [watch::<Secret>(&clients[0]), watch::<Secret>(&clients[1])];
    until_said(replica, "secrets", 0, None, all_secrets).await;
    informers
}

/// An operator of two pods that were enrolled, and the manager.
pub(crate) struct Bed {
    pub(crate) client: Client,
    pub(crate) settings: ProxySettings,
    pub(crate) pods: [TestPod; 2],
    // Dropped in this order.
    pub(crate) replica: Replica,
    _folder: TempDir,
    pub(crate) cluster: ControlPlane,
}

pub(crate) async fn bed(fence: &str, shards: u32, canary: Option<Value>) -> Bed {
    bed_with(fence, shards, canary, &[]).await
}

/// The same, with these flags of the manager besides.
pub(crate) async fn bed_with(fence: &str, shards: u32, canary: Option<Value>, flags: &[&str]) -> Bed {
    let cluster = ControlPlane::start(&Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    let folder = TempDir::new().unwrap();
    world(&client).await;
    let replica = Replica::start(&cluster, SYSTEM, flags).await;
    replica.until_ready().await;
    divide_fenced(&client, fence, shards, canary).await;
    let (settings, pods) = enrolled(&cluster, &client, &replica, &folder).await;
    Bed { client, settings, pods, replica, _folder: folder, cluster }
}

#[tokio::test]
async fn the_audit_tells_the_truth_whatever_breaks() {
    let Bed { client, replica, settings, pods, .. } = &bed("Proxy", 2, None).await;
    let ([_one, mut two], clients) = proxies(client, settings, pods).await;
    let all = count::<ConfigMap>(client).await;

    // Nobody has ever watched anything.
    until_said(replica, "configmaps", 0, Some(("never_watched", all)), all).await;
    let first = watch::<ConfigMap>(&clients[0]);
    let second = watch::<ConfigMap>(&clients[1]);
    until_said(replica, "configmaps", 0, None, all).await;
    let of_second = count::<ConfigMap>(&clients[1]).await;
    assert!(of_second > 0 && of_second < all);

    // An operator ends its watch.
    drop(second);
    until_said(replica, "configmaps", 0, Some(("unwatched", of_second)), all).await;
    let second = watch::<ConfigMap>(&clients[1]);
    until_said(replica, "configmaps", 0, None, all).await;

    label_taken_away(client, replica, all).await;
    let _secrets = kind_that_nobody_asks_for(client, replica, &clients).await;
    until_said(replica, "configmaps", 0, None, all).await;

    // A proxy ends, and its pod after it; another pod comes, whose proxy begins later.
    two.kill();
    drop((second, clients));
    until_said(replica, "configmaps", 0, Some(("proxy_away", of_second)), all).await;
    let all_pods: Api<Pod> = Api::namespaced(client.clone(), OPERATOR);
    all_pods.delete("op-1", &DeleteParams::default().grace_period(0)).await.unwrap();
    until_said(replica, "configmaps", 0, Some(("no_pod", of_second)), all).await;
    let pod = token::pod_with_proxy(client, OPERATOR, "op-1").await;
    until_said(replica, "configmaps", 0, Some(("no_policy", of_second)), all).await;
    let two = Sidecar::start(settings, &pod, &pod.token(client, AUDIENCE).await).await;
    let through = operator(client, settings, &pod, &two).await;
    until_said(replica, "configmaps", 0, Some(("never_watched", of_second)), all).await;
    let _second = watch::<ConfigMap>(&through);
    until_said(replica, "configmaps", 0, None, all).await;

    // What lasts is a condition.
    let every = "every object that is divided has one owner, which watches it";
    until_owned(client, ("True", "EveryObject"), every).await;
    drop(first);
    until_owned(client, ("False", "Unowned"), "no pod of op-1-normal watches them any more").await;
}

#[tokio::test]
async fn what_a_frozen_proxy_still_sees_is_owned_twice() {
    let Bed { client, replica, settings, pods, .. } = &bed("Off", 1, Some(canary("team-3"))).await;
    let ([one, _two], clients) = proxies(client, settings, pods).await;
    let all = count::<ConfigMap>(client).await;
    let _watches = [watch::<ConfigMap>(&clients[0]), watch::<ConfigMap>(&clients[1])];
    until_said(replica, "configmaps", 0, None, all).await;

    // What moves without a fence moves at once, and this proxy does not hear of it.
    one.send(Signal::SIGSTOP);
    divide_fenced(client, "Off", 1, Some(canary("team-4"))).await;
    let (twice, nobodys) = (count_in(client, "team-3").await, count_in(client, "team-4").await);
    until_said(replica, "configmaps", twice, Some(("no_policy", nobodys)), all).await;
    one.send(Signal::SIGCONT);
    until_said(replica, "configmaps", 0, None, all).await;
}

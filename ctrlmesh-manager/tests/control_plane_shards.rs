//! The shards of roots, written into a real API server, with the controllers of Kubernetes beside us.
#![expect(clippy::large_futures, reason = "one per test, and never moved")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::api::{ShardingConfig, ShardingConfigStatus};
use ctrlmesh_common::names::label;
use ctrlmesh_common::wire;
use ctrlmesh_manager::cache::Cache;
use ctrlmesh_manager::control::Control;
use ctrlmesh_manager::drain::Drain;
use ctrlmesh_manager::plan;
use ctrlmesh_manager::plan::Plans;
use ctrlmesh_manager::pod::PodName;
use ctrlmesh_manager::shard::Labelling;
use ctrlmesh_manager::status::Contact;
use ctrlmesh_testbed::{ControlPlane, Options, retry};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::events::v1::Event;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::events::Recorder;
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::sync::OnceCell;

mod harness;

/// What proxies have said, to the manager under test.
type Contacts = Arc<Mutex<BTreeMap<PodName, Contact>>>;

static BED: LazyLock<ControlPlane> = LazyLock::new(|| {
    let options = Options { controller_manager: true, ..Options::default() };
    ControlPlane::start(&options).unwrap_or_else(|error| panic!("{error:?}"))
});

/// A runtime that outlives the tests: the manager runs in it.
static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Runtime::new().unwrap_or_else(|error| panic!("start a runtime: {error}")));

static PLANS: OnceLock<Plans> = OnceLock::new();

static CONTACTS: LazyLock<Contacts> = LazyLock::new(Contacts::default);

/// One manager for all tests of this binary.
async fn managed() -> Result<Client> {
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
    let labelling = Arc::new(Labelling::default());
    let cache = Cache::start(&client, &drain);
    let plans = plan::start(cache, Arc::clone(&labelling), &drain);
    let control = Control {
        client: client.clone(),
        labelling,
        recorder: Recorder::new(client, "ctrlmesh-manager".into()),
        contacts: || CONTACTS.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        may_write: || true,
    };
    drain.spawn(control.run(plans.clone()));
    PLANS.set(plans).ok().context("there is one manager")
}

/// A namespace, and what is in it.
struct Place {
    client: Client,
    namespace: String,
}

impl Place {
    async fn new(prefix: &str) -> Result<Self> {
        Ok(Self { client: managed().await?, namespace: BED.namespace(prefix).await? })
    }

    fn configs(&self) -> Api<ShardingConfig> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Makes the root `op-root`, or changes it to this rule.
    async fn root(&self, rule: Value) -> Result<ShardingConfig> {
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
    async fn stateful_set(&self, replicas: i32) -> Result<()> {
        let set: StatefulSet = serde_json::from_value(json!({
            "metadata": {"name": "op"},
            "spec": {
                "serviceName": "op", "replicas": replicas, "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": {"app": "op"}}, "template": template("1"),
            },
        }))?;
        Api::namespaced(self.client.clone(), &self.namespace)
            .create(&PostParams::default(), &set)
            .await?;
        Ok(())
    }

    /// The shards of the root, by name.
    async fn shards(&self) -> Result<BTreeMap<String, ShardingConfig>> {
        let list = self.configs().list(&ListParams::default()).await?;
        let shards = list.into_iter().filter(|config| config.spec.root.is_none());
        Ok(shards.map(|config| (config.name_any(), config)).collect())
    }

    /// The shards, once there are exactly these and the status of the root says the same.
    async fn until_shards(&self, names: &[&str]) -> Result<BTreeMap<String, ShardingConfig>> {
        retry(|| async {
            let shards = self.shards().await?;
            ensure!(shards.keys().eq(names.iter()), "{:?}", shards.keys());
            let said = self.status("op-root").await?.root.unwrap_or_default();
            ensure!(said.child_sharding_configs == names, "{said:?}");
            Ok(shards)
        })
        .await
    }

    async fn status(&self, name: &str) -> Result<ShardingConfigStatus> {
        self.configs().get_status(name).await?.status.context("no status yet")
    }

    /// Waits until the condition `kind` of `name` is `STATUS REASON`; returns its message.
    async fn until_condition(&self, name: &str, kind: &str, says: &str) -> Result<String> {
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
    async fn until_labelled(&self, count: usize) -> Result<BTreeMap<String, String>> {
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

fn template(version: &str) -> Value {
    json!({
        "metadata": {"labels": {"app": "op", "version": version, label::ENABLE_PROXY: "true"}},
        "spec": {"containers": [{"name": "operator", "image": "none"}]},
    })
}

fn auto(size: i32, replicas: i32) -> Value {
    json!({"auto": {"shardingSize": size, "everyShardReplicas": replicas}})
}

/// The hashes in the first limit of a shard.
fn hashes(shard: &ShardingConfig) -> Vec<String> {
    let selector = shard.spec.limits.first().and_then(|limit| limit.objects());
    let expressions = selector.map_or(&[][..], |selector| &selector.match_expressions);
    let hashes = expressions.iter().find(|one| one.key == label::SHARDING_HASH);
    hashes.map(|hashes| hashes.values.clone()).unwrap_or_default()
}

fn uids(shards: &BTreeMap<String, ShardingConfig>) -> BTreeMap<String, Option<String>> {
    shards.iter().map(|(name, shard)| (name.clone(), shard.uid())).collect()
}

#[tokio::test]
async fn a_root_makes_balanced_shards_and_says_who_owns_what() -> Result<()> {
    let place = Place::new("auto").await?;
    place.stateful_set(3).await?;
    let root = place.root(auto(3, 1)).await?;
    let shards = place.until_shards(&["op-1-normal", "op-2-normal", "op-3-normal"]).await?;
    let mut all = BTreeSet::new();
    for shard in shards.values() {
        let hashes = hashes(shard);
        ensure!((10..=11).contains(&hashes.len()), "{hashes:?}");
        all.extend(hashes);
        let owner = &shard.owner_references()[0];
        ensure!(Some(&owner.uid) == root.metadata.uid.as_ref() && owner.controller == Some(true));
        ensure!(shard.labels()[label::AUTO_SHARDING_ROOT] == "op-root");
    }
    ensure!(all.len() == 32, "{all:?}");
    let labelled = place.until_labelled(3).await?;
    let expected = [("op-0", "op-1-normal"), ("op-1", "op-2-normal"), ("op-2", "op-3-normal")];
    ensure!(labelled == expected.map(|(pod, shard)| (pod.to_owned(), shard.to_owned())).into());
    place.until_condition("op-root", "Accepted", "True Valid").await?;
    place.until_condition("op-root", "Degraded", "False AsExpected").await?;
    place.until_condition("op-root", "Programmed", "False Waiting").await?;
    let status = place.status("op-root").await?;
    let table = status.ownership.context("no table")?;
    ensure!(table.is_total() && table.pods == labelled, "{table:?}");
    ensure!(status.observed_generation == root.metadata.generation && status.is_root == Some(true));
    // What proxies say comes to stand in the status.
    let (epoch, at) = (u64::try_from(status.epoch.context("no epoch")?)?, Timestamp::now());
    let name = |pod: &String| PodName { namespace: place.namespace.clone(), name: pod.clone() };
    let told = PLANS.get().context("no manager")?.borrow().clone().context("no plan")?.told.clone();
    let said = labelled.keys().map(|pod| {
        let digest = wire::digest(&told[&name(pod)].text());
        (name(pod), Contact { epoch, digest, refused: None, connected: true, at })
    });
    CONTACTS.lock().unwrap_or_else(PoisonError::into_inner).extend(said);
    let message = place.until_condition("op-root", "Programmed", "True Acknowledged").await?;
    ensure!(message.contains("3 of 3"), "{message}");
    place.until_condition("op-2-normal", "Programmed", "True Acknowledged").await?;
    let shard = place.status("op-2-normal").await?;
    ensure!(shard.pods.len() == 1 && shard.pods[0].epoch == status.epoch, "{:?}", shard.pods);
    ensure!(shard.epoch == status.epoch && shard.pods[0].last_contact.is_some());
    Ok(())
}

#[tokio::test]
async fn a_changed_root_changes_its_shards_in_place() -> Result<()> {
    let place = Place::new("change").await?;
    place.stateful_set(3).await?;
    place.root(auto(2, 1)).await?;
    let two = place.until_shards(&["op-1-normal", "op-2-normal"]).await?;
    let before = place.status("op-root").await?;
    let mut rule = auto(2, 1);
    rule["canary"] = json!({"replicas": 1, "inShardHash": ["7"], "inNamespaces": ["shop"]});
    rule["resourceSelector"] =
        json!([{"relateResources": [{"apiGroups": [""], "resources": ["configmaps"]}]}]);
    place.root(rule).await?;
    let three = place.until_shards(&["op-0-canary", "op-1-normal", "op-2-normal"]).await?;
    for (name, uid) in uids(&two) {
        ensure!(uids(&three)[&name] == uid, "{name} was made anew");
    }
    let changed = retry(|| async {
        let shards = place.shards().await?;
        ensure!(shards.values().all(|shard| shard.spec.limits[0].resources().len() == 1));
        ensure!(!hashes(&shards["op-1-normal"]).contains(&"7".to_owned()));
        Ok(shards)
    })
    .await?;
    ensure!(hashes(&changed["op-0-canary"]).is_empty(), "it asks by namespace");
    let labelled = place.until_labelled(3).await?;
    ensure!(labelled["op-0"] == "op-0-canary" && labelled["op-2"] == "op-2-normal");
    let after = place.status("op-root").await?;
    ensure!(after.epoch > before.epoch, "{:?} {:?}", after.epoch, before.epoch);
    let table = after.ownership.context("no table")?;
    ensure!(table.namespaces.get("shop").map(String::as_str) == Some("op-0-canary"));
    place.root(auto(1, 3)).await?;
    let one = place.until_shards(&["op-1-normal"]).await?;
    ensure!(
        one["op-1-normal"].uid() == two["op-1-normal"].uid()
            && hashes(&one["op-1-normal"]).len() == 32
    );
    Ok(())
}

#[tokio::test]
async fn shards_by_hand_have_the_hashes_that_are_written() -> Result<()> {
    let place = Place::new("manual").await?;
    place.stateful_set(2).await?;
    let numbers =
        |range: std::ops::Range<u8>| range.map(|hash| hash.to_string()).collect::<Vec<_>>();
    let rule = json!({"manual": [{"id": 1, "hashes": numbers(0..5)}, {"id": 7, "hashes": numbers(5..32)}]});
    place.root(rule).await?;
    let shards = place.until_shards(&["op-1-normal", "op-7-normal"]).await?;
    ensure!(hashes(&shards["op-1-normal"]) == numbers(0..5));
    ensure!(hashes(&shards["op-7-normal"]).len() == 27);
    // Not valid for the manager, though the schema lets it pass: what is there stays.
    let pods = json!({"relateResources": [{"apiGroups": [""], "resources": ["pods"]}]});
    let mut rule = auto(2, 1);
    rule["resourceSelector"] = json!([pods, pods]);
    place.root(rule).await?;
    let message = place.until_condition("op-root", "Accepted", "False Invalid").await?;
    ensure!(message.contains("covers pods a second time"), "{message}");
    ensure!(uids(&place.shards().await?) == uids(&shards));
    let events: Api<Event> = Api::namespaced(place.client.clone(), &place.namespace);
    retry(|| async {
        let events = events.list(&ListParams::default()).await?;
        let told = |event: &Event| {
            event.reason.as_deref() == Some("Invalid") && event.note.as_deref() == Some(&message)
        };
        ensure!(events.iter().any(told), "no event");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn what_is_edited_by_hand_is_put_back() -> Result<()> {
    let place = Place::new("edited").await?;
    place.stateful_set(2).await?;
    place.root(auto(2, 1)).await?;
    let shards = place.until_shards(&["op-1-normal", "op-2-normal"]).await?;
    let edit = json!({
        "metadata": {"labels": {label::AUTO_SHARDING_ROOT: null, "mine": "stays"}},
        "spec": {
            "limits": [{"selector": {"matchLabels": {"team": "a"}}}],
            "webhook": {"certDir": "/tmp", "port": 1},
            "controller": {"leaderElectionName": "another"},
        },
    });
    place.configs().patch("op-1-normal", &PatchParams::default(), &Patch::Merge(edit)).await?;
    place.configs().delete("op-2-normal", &DeleteParams::default()).await?;
    let after = retry(|| async {
        let after = place.shards().await?;
        ensure!(after.len() == 2, "{:?}", after.keys());
        for (name, shard) in &after {
            ensure!(shard.spec == shards[name].spec, "{name}: {:?}", shard.spec);
            ensure!(shard.labels().get(label::AUTO_SHARDING_ROOT).is_some(), "{name}");
        }
        Ok(after)
    })
    .await?;
    ensure!(after["op-1-normal"].uid() == shards["op-1-normal"].uid());
    ensure!(after["op-1-normal"].labels()["mine"] == "stays", "what is not ours is left alone");
    Ok(())
}

#[tokio::test]
async fn a_shard_of_somebody_else_is_not_touched_and_said() -> Result<()> {
    let place = Place::new("foreign").await?;
    place.stateful_set(2).await?;
    let foreign: ShardingConfig = serde_json::from_value(json!({
        "metadata": {"name": "op-1-normal"},
        "spec": {"selector": {"matchLabels": {"a": "b"}}, "limits": [{"selector": {"matchLabels": {"team": "a"}}}]},
    }))?;
    let foreign = place.configs().create(&PostParams::default(), &foreign).await?;
    place.root(auto(2, 1)).await?;
    let message = place.until_condition("op-root", "Degraded", "True Conflict").await?;
    ensure!(message.contains("op-1-normal"), "{message}");
    let there = place.configs().get("op-1-normal").await?;
    ensure!(there.spec == foreign.spec && there.owner_references().is_empty());
    Ok(())
}

#[tokio::test]
async fn more_shards_than_pods_are_said_until_there_are_enough() -> Result<()> {
    let place = Place::new("few").await?;
    place.stateful_set(1).await?;
    place.root(auto(2, 1)).await?;
    let message = place.until_condition("op-root", "Degraded", "True ShardsWithoutPods").await?;
    ensure!(message.contains("op-2-normal"), "{message}");
    let sets: Api<StatefulSet> = Api::namespaced(place.client.clone(), &place.namespace);
    let before = place.status("op-root").await?;
    let more = Patch::Merge(json!({"spec": {"replicas": 2}}));
    sets.patch("op", &PatchParams::default(), &more).await?;
    place.until_condition("op-root", "Degraded", "False AsExpected").await?;
    let after = place.status("op-root").await?;
    ensure!(after.epoch == before.epoch, "no policy has changed");
    ensure!(
        after.ownership.context("no table")?.epoch > before.ownership.context("no table")?.epoch
    );
    Ok(())
}

#[tokio::test]
async fn a_root_that_is_deleted_takes_its_shards_with_it() -> Result<()> {
    let place = Place::new("deleted").await?;
    place.stateful_set(2).await?;
    place.root(auto(2, 1)).await?;
    place.until_shards(&["op-1-normal", "op-2-normal"]).await?;
    place.configs().delete("op-root", &DeleteParams::default()).await?;
    retry(|| async {
        let left = place.shards().await?;
        ensure!(left.is_empty(), "{:?}", left.keys());
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_root_that_is_switched_off_leaves_its_shards_to_others() -> Result<()> {
    let place = Place::new("off").await?;
    place.stateful_set(2).await?;
    place.root(auto(2, 1)).await?;
    place.until_shards(&["op-1-normal", "op-2-normal"]).await?;
    let mut rule = auto(3, 1);
    rule["disable"] = json!(true);
    place.root(rule).await?;
    place.until_condition("op-root", "Accepted", "True Disabled").await?;
    let edit =
        Patch::Merge(json!({"spec": {"limits": [{"selector": {"matchLabels": {"team": "a"}}}]}}));
    place.configs().patch("op-1-normal", &PatchParams::default(), &edit).await?;
    let epoch = place.status("op-root").await?.epoch;
    // The shard stands by itself now: its epoch goes on from the root's, because what it says is another thing.
    retry(|| async {
        let status = place.status("op-1-normal").await?;
        ensure!(status.epoch > epoch, "{:?}", status.epoch);
        Ok(())
    })
    .await?;
    let left = place.shards().await?;
    ensure!(left.len() == 2 && hashes(&left["op-1-normal"]).is_empty(), "nobody put it back");
    Ok(())
}

#[tokio::test]
async fn a_deployments_pods_have_a_shard_each_before_and_after_a_rollout() -> Result<()> {
    let place = Place::new("deployment").await?;
    let mut rule = auto(3, 1);
    rule["targetDeployment"] = json!("op");
    place.root(rule).await?;
    let deployment: Deployment = serde_json::from_value(json!({
        "metadata": {"name": "op"},
        "spec": {
            "replicas": 3, "selector": {"matchLabels": {"app": "op"}}, "template": template("1"),
            "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 3}},
        },
    }))?;
    let deployments: Api<Deployment> = Api::namespaced(place.client.clone(), &place.namespace);
    deployments.create(&PostParams::default(), &deployment).await?;
    let shards = |pods: &BTreeMap<String, String>| pods.values().cloned().collect::<BTreeSet<_>>();
    let first = place.until_labelled(3).await?;
    ensure!(shards(&first).len() == 3, "{first:?}");
    let next = Patch::Merge(json!({"spec": {"template": template("2")}}));
    deployments.patch("op", &PatchParams::default(), &next).await?;
    let second = retry(|| async {
        let second = place.until_labelled(3).await?;
        ensure!(second.keys().all(|pod| !first.contains_key(pod)), "not yet: {second:?}");
        Ok(second)
    })
    .await?;
    ensure!(shards(&second) == shards(&first), "{second:?}");
    place.until_condition("op-root", "Degraded", "False AsExpected").await?;
    Ok(())
}

//! Objects get other labels while operators watch them through proxies, and no operator notices.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ctrlmesh_common::api::{LabelsStatus, ManagerState, ShardingConfig};
use ctrlmesh_common::names::label;
use ctrlmesh_testbed::{ControlPlane, Options};
use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use k8s_openapi::api::events::v1::Event;
use kube::api::{ListParams, PostParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;
use tempfile::TempDir;

use crate::bed::eventually;
use crate::full::{OPERATOR, ROOT, SYSTEM, TEAMS, divide, enrolled, proxies, world};
use crate::process::{Replica, Sidecar};

/// Objects in each namespace of a team.
const EACH: usize = 40;

/// What the names of the objects begin with that count.
const PREFIX: &str = "counted-";

const KEY: &str = "example.com/slot";

const SPACE: &str = "example.com/space";

/// The flags of managers that label by these keys.
const LABEL_FLAGS: [&str; 4] = ["--label-sharding-hash", KEY, "--label-namespace", SPACE];

type Name = (String, String);

/// What two operators hold, each by its own watch.
#[derive(Clone, Default)]
struct WatchedObjects(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    held: [BTreeSet<Name>; 2],
    /// What no operator may ever see while labels only change their keys.
    wrong: Vec<String>,
}

impl WatchedObjects {
    /// Follows what `client` is shown, as the operator number `at`.
    fn follow(&self, at: usize, client: &Client) {
        let (this, maps) = (self.clone(), Api::<ConfigMap>::all(client.clone()));
        let mut events = watcher(maps, watcher::Config::default()).default_backoff().boxed();
        tokio::spawn(async move {
            let mut listed = BTreeSet::new();
            while let Some(event) = events.next().await {
                match event {
                    Ok(watcher::Event::Init) => listed.clear(),
                    Ok(watcher::Event::InitApply(map)) => listed.extend(counted(&map)),
                    Ok(watcher::Event::InitDone) => {
                        let held = this.0.lock().unwrap().held[at].clone();
                        for name in held.difference(&listed) {
                            this.gone(at, name);
                        }
                        for name in &listed {
                            this.seen(at, name);
                        }
                    }
                    Ok(watcher::Event::Apply(map)) => {
                        if let Some(name) = counted(&map) {
                            this.seen(at, &name);
                        }
                    }
                    Ok(watcher::Event::Delete(map)) => {
                        if let Some(name) = counted(&map) {
                            this.gone(at, &name);
                        }
                    }
                    // Its proxy or the API server is away; the next list tells.
                    Err(_) => {}
                }
            }
        });
    }

    fn seen(&self, at: usize, name: &Name) {
        let mut state = self.0.lock().unwrap();
        if state.held[1 - at].contains(name) {
            state.wrong.push(format!("{name:?} is shown to {at} and held by the other"));
        }
        state.held[at].insert(name.clone());
    }

    fn gone(&self, at: usize, name: &Name) {
        self.0.lock().unwrap().held[at].remove(name);
        self.0.lock().unwrap().wrong.push(format!("{name:?} is taken from {at}"));
    }

    /// Whether each of `count` objects is held by one.
    fn is_parted(&self, count: usize) -> Option<()> {
        let [one, two] = self.0.lock().unwrap().held.clone();
        (one.is_disjoint(&two) && one.len() + two.len() == count).then_some(())
    }

    /// Whether so many are held by each, and none by both.
    fn are_held(&self, counts: [usize; 2]) -> Option<()> {
        let [one, two] = self.0.lock().unwrap().held.clone();
        (one.is_disjoint(&two) && [one.len(), two.len()] == counts).then_some(())
    }

    /// What went wrong, and forgets it.
    fn wrong(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().wrong)
    }
}

fn counted(map: &ConfigMap) -> Option<Name> {
    let is_counted = map.name_any().starts_with(PREFIX);
    is_counted.then(|| (map.namespace().unwrap(), map.name_any()))
}

async fn create(client: &Client, team: &str, number: usize) {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), team);
    let map = json!({"metadata": {"name": format!("{PREFIX}{number}")}});
    maps.create(&PostParams::default(), &serde_json::from_value(map).unwrap()).await.unwrap();
}

/// How many objects that count have a label with that key.
async fn labelled(client: &Client, key: &str) -> Option<usize> {
    let maps: Api<ConfigMap> = Api::all(client.clone());
    let list = maps.list(&ListParams::default().labels(key)).await.ok()?;
    Some(list.iter().filter_map(counted).count())
}

async fn labels(client: &Client) -> Option<LabelsStatus> {
    let states: Api<ManagerState> = Api::all(client.clone());
    states.get("ctrlmesh-manager").await.ok()?.status?.labels
}

/// Waits until shards go by this key alone.
async fn until_settled(client: &Client, key: &str, hash: &str) {
    eventually(&format!("{key} by {hash}"), async || {
        let labels = labels(client).await?;
        let alone = labels.next.is_none() && labels.former.is_none() && labels.leftover.is_empty();
        let it_is = labels.in_force.sharding_hash == key && labels.in_force.hash == hash;
        (alone && it_is).then_some(())
    })
    .await;
}

async fn epoch(client: &Client) -> i64 {
    let roots: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    roots.get(ROOT).await.unwrap().status.unwrap().epoch.unwrap()
}

/// Two operators in shards of their own, who watch many objects through real proxies.
struct Bed {
    cluster: ControlPlane,
    client: Client,
    held: WatchedObjects,
    grpc: String,
    _folder: TempDir,
    _sidecars: [Sidecar; 2],
}

impl Bed {
    async fn new() -> (Self, Replica) {
        let cluster = ControlPlane::start(&Options::default()).unwrap();
        let client = cluster.client().await.unwrap();
        let folder = TempDir::new().unwrap();
        world(&client).await;
        let objects = TEAMS.iter().flat_map(|team| (0..EACH).map(move |number| (*team, number)));
        let made = stream::iter(objects).map(|(team, number)| create(&client, team, number));
        made.buffer_unordered(8).collect::<Vec<()>>().await;
        let replica = Replica::start(&cluster, SYSTEM, &["--label-rate", "1000"]).await;
        replica.until_ready().await;
        divide(&client, 2, None).await;
        let (settings, pods) = enrolled(&cluster, &client, &replica, &folder).await;
        let (sidecars, clients) = proxies(&client, &settings, &pods).await;
        let held = WatchedObjects::default();
        clients.iter().enumerate().for_each(|(at, client)| held.follow(at, client));
        let all = TEAMS.len() * EACH;
        eventually("each object to be held by one", async || held.is_parted(all)).await;
        until_settled(&client, label::SHARDING_HASH, "fnv1a").await;
        let grpc = replica.grpc.to_string();
        held.wrong();
        (Self { cluster, client, held, grpc, _folder: folder, _sidecars: sidecars }, replica)
    }

    /// A manager that is told this, where the one before it was.
    async fn manager(&self, told: &[&str]) -> Replica {
        let more = [&["--listen-grpc", &self.grpc][..], told].concat();
        let replica = Replica::start(&self.cluster, SYSTEM, &more).await;
        replica.until_ready().await;
        replica
    }
}

#[tokio::test]
async fn new_keys_replace_old_ones_and_no_object_leaves_its_shard() {
    let (bed, mut before) = Bed::new().await;
    let (client, all) = (&bed.client, TEAMS.len() * EACH);
    let first = epoch(client).await;
    before.program().kill();
    // So slowly that one can look on.
    let mut slow = bed.manager(&[&LABEL_FLAGS[..], &["--label-rate", "40"]].concat()).await;
    eventually("some to have both", async || (labelled(client, KEY).await? > EACH).then_some(())).await;
    // What comes while the manager is away has both all the same, and nobody is asked for the next ones yet.
    slow.program().kill();
    let begun = labels(client).await.unwrap();
    assert_eq!(begun.in_force.sharding_hash, label::SHARDING_HASH);
    assert_eq!(begun.next.map(|next| next.sharding_hash).as_deref(), Some(KEY));
    assert!(labelled(client, KEY).await.unwrap() < all, "it is not done");
    for team in TEAMS {
        create(client, team, EACH).await;
    }
    let all = all + TEAMS.len();
    eventually("the new ones to be held", async || bed.held.is_parted(all)).await;
    assert_eq!(epoch(client).await, first);

    let after = bed.manager(&[&LABEL_FLAGS[..], &["--label-rate", "400"]].concat()).await;
    until_settled(client, KEY, "fnv1a").await;
    assert_eq!(labelled(client, KEY).await, Some(all));
    for key in [label::SHARDING_HASH, label::NAMESPACE] {
        assert_eq!(labelled(client, key).await, Some(0), "{key} is left over");
        let namespaces: Api<Namespace> = Api::all(client.clone());
        let list = namespaces.list(&ListParams::default().labels(key)).await.unwrap();
        assert_eq!(list.items.len(), 0, "{key} is left over");
    }
    assert_eq!(labelled(client, label::CONTROL).await, Some(all));
    // What is created from now on, and watched by new shares.
    create(client, TEAMS[0], EACH + 1).await;
    eventually("the last one to be held", async || bed.held.is_parted(all + 1)).await;
    assert_eq!(bed.held.wrong(), Vec::<String>::new());
    assert_eq!(epoch(client).await, first + 1, "all shares change once");
    said_so(client).await;
    drop(after);
}

/// Whether events and a condition tell of it.
async fn said_so(client: &Client) {
    let events: Api<Event> = Api::namespaced(client.clone(), SYSTEM);
    for reason in ["Relabelling", "Relabelled", "FormerLabelsLeft", "FormerLabelsRemoved"] {
        eventually(&format!("an event {reason}"), async || {
            let list = events.list(&ListParams::default()).await.ok()?;
            list.iter().any(|event| event.reason.as_deref() == Some(reason)).then_some(())
        })
        .await;
    }
    let managers: Api<ManagerState> = Api::all(client.clone());
    let status = managers.get("ctrlmesh-manager").await.unwrap().status.unwrap();
    let said: BTreeMap<_, _> = status.conditions.iter().map(|one| (one.type_.as_str(), one.status.as_str())).collect();
    assert_eq!(said, [("Relabelled", "True")].into());
}

#[tokio::test]
async fn another_hash_under_the_same_key_takes_over_in_one_epoch() {
    let (bed, mut before) = Bed::new().await;
    let (client, all) = (&bed.client, TEAMS.len() * EACH);
    let first = epoch(client).await;
    before.program().kill();
    let told = ["--sharding-hash", "kusionstack", "--label-rate", "80"];
    let _after = bed.manager(&told).await;
    let in_force = |labels: LabelsStatus| (labels.in_force.sharding_hash, labels.in_force.hash);
    let old = (label::SHARDING_HASH.to_owned(), "fnv1a".to_owned());
    let spare = format!("{}sharding-hash", label::SPARE);
    eventually("some to have both", async || (labelled(client, &spare).await? > 0).then_some(())).await;
    assert_eq!(in_force(labels(client).await.unwrap()), old);
    assert_eq!(bed.held.wrong(), Vec::<String>::new(), "before any share changes");
    eventually("shares by the spare keys, which every proxy has", async || {
        let labels = labels(client).await?;
        (labels.in_force.sharding_hash == spare && labels.next.is_some()).then_some(())
    })
    .await;
    // The hash moves some: by it, all of these namespaces are the first shard's.
    eventually("the first to hold all", async || bed.held.are_held([all, 0])).await;
    bed.held.wrong();
    // So long that every watch has heard of a version after the last of the former values.
    tokio::time::sleep(Duration::from_secs(90)).await;
    until_settled(client, label::SHARDING_HASH, "kusionstack").await;
    assert_eq!(bed.held.wrong(), Vec::<String>::new(), "the second change moves nothing");
    assert_eq!(bed.held.is_parted(all), Some(()));
    for key in ["sharding-hash", "namespace"] {
        assert_eq!(labelled(client, &format!("{}{key}", label::SPARE)).await, Some(0));
    }
    // To the spare keys, and back: only the first moves anything.
    assert_eq!(epoch(client).await, first + 2);
}

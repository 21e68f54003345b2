//! From a root ShardingConfig to each proxy's part of the objects, also without the manager.

use std::collections::BTreeSet;
use std::fs;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_testbed::{ControlPlane, Options};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::bed::{AUDIENCE, eventually};
use crate::commands::{printed, printed_in};
use crate::follow::operator;
use crate::process::{ProxySettings, Replica, Sidecar};
use crate::token::{self, TestPod};

/// Where the manager is.
pub(crate) const SYSTEM: &str = "ctrlmesh-system";

/// Where the operator is.
pub(crate) const OPERATOR: &str = "ops";

/// Namespaces with an object each.
pub(crate) const TEAMS: [&str; 8] = ["team-0", "team-1", "team-2", "team-3", "team-4", "team-5", "team-6", "team-7"];

/// What the root divides.
pub(crate) const ROOT: &str = "op-root";

pub(crate) type Teams = BTreeSet<String>;

pub(crate) async fn world(client: &Client) {
    let names = [SYSTEM, OPERATOR].into_iter().chain(TEAMS);
    let namespaces: Api<Namespace> = Api::all(client.clone());
    for name in names {
        let one = serde_json::from_value(json!({"metadata": {"name": name}})).unwrap();
        namespaces.create(&PostParams::default(), &one).await.unwrap();
    }
    let list = json!({
        "metadata": {"name": "ctrlmesh-sharding-resource"},
        "data": {"resource-config": "groupVersionKinds: {v1: [ConfigMap]}"},
    });
    create(client, SYSTEM, list).await;
    for team in TEAMS {
        create(client, team, json!({"metadata": {"name": "object"}})).await;
    }
    let bindings: Api<ClusterRoleBinding> = Api::all(client.clone());
    let binding = json!({
        "metadata": {"name": "operator"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": "operator", "namespace": OPERATOR}],
    });
    let binding = serde_json::from_value(binding).unwrap();
    bindings.create(&PostParams::default(), &binding).await.unwrap();
}

async fn create(client: &Client, namespace: &str, map: Value) {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    maps.create(&PostParams::default(), &serde_json::from_value(map).unwrap()).await.unwrap();
}

/// Applies the root: `shards` of one pod each beside the canary, if there is one. A lone API server of the bed is no
/// endpoint that could be asked what it fences.
pub(crate) async fn divide(client: &Client, shards: u32, canary: Option<Value>) {
    divide_fenced(client, "Proxy", shards, canary).await;
}

/// The same, where this one fences.
pub(crate) async fn divide_fenced(client: &Client, fence: &str, shards: u32, canary: Option<Value>) {
    divide_with(client, fence, shards, canary.map(|canary| ("canary", canary))).await;
}

/// The same, with another field of the root, if one is given.
pub(crate) async fn divide_with(client: &Client, fence: &str, shards: u32, field: Option<(&str, Value)>) {
    let roots: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    let config = root_with_field(fence, shards, field);
    let force = PatchParams::apply("test").force();
    roots.patch(ROOT, &force, &Patch::Apply(&config)).await.unwrap();
}

/// The root, with that canary.
fn root_with(fence: &str, shards: u32, canary: Option<Value>) -> Value {
    root_with_field(fence, shards, canary.map(|canary| ("canary", canary)))
}

fn root_with_field(fence: &str, shards: u32, field: Option<(&str, Value)>) -> Value {
    let resources = json!([{"apiGroups": [""], "resources": ["configmaps"]}]);
    let mut root = json!({
        "prefix": "op",
        "fence": fence,
        "targetStatefulSet": "op",
        "auto": {"shardingSize": shards, "everyShardReplicas": 1},
        "resourceSelector": [{"relateResources": resources}],
    });
    if let Some((name, value)) = field {
        root[name] = value;
    }
    json!({
        "apiVersion": "ctrlmesh.kusionstack.io/v1alpha1",
        "kind": "ShardingConfig",
        "metadata": {"name": ROOT},
        "spec": {"controller": {"leaderElectionName": "op"}, "root": root},
    })
}

/// The namespaces whose object it sees.
pub(crate) async fn seen(client: &Client) -> Option<Teams> {
    let maps: Api<ConfigMap> = Api::all(client.clone());
    let objects = ListParams::default().fields("metadata.name=object");
    let list = maps.list(&objects).await.ok()?;
    Some(list.items.into_iter().filter_map(|map| map.metadata.namespace).collect())
}

/// What both see, as soon as each object is seen by exactly one of them, and each sees some, as `is` says.
pub(crate) async fn parted(clients: &[Client; 2], is: impl Fn(&Teams, &Teams) -> bool) -> [Teams; 2] {
    eventually("each object to be seen by one", async || {
        let [one, two] = [seen(&clients[0]).await?, seen(&clients[1]).await?];
        let whole = one.union(&two).count() == TEAMS.len() && one.is_disjoint(&two);
        (whole && !one.is_empty() && !two.is_empty() && is(&one, &two)).then_some([one, two])
    })
    .await
}

/// Whether status says that every proxy has acknowledged what its root says now.
async fn programmed(client: &Client) -> Option<()> {
    let roots: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    let root = roots.get(ROOT).await.ok()?;
    let status = root.status?;
    let programmed = status.conditions.iter().find(|condition| condition.type_ == "Programmed")?;
    let newest = programmed.observed_generation == root.metadata.generation;
    let said = format!("every proxy, 2 of 2, has acknowledged epoch {}", status.epoch?);
    (newest && programmed.status == "True" && programmed.message == said).then_some(())
}

pub(crate) async fn believed(client: &Client, settings: &ProxySettings) {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), OPERATOR);
    let data = eventually("the authorities", async || maps.get_opt("ctrlmesh-root-ca").await.unwrap()?.data).await;
    fs::write(settings.folder.join("manager.crt"), &data["manager-ca.crt"]).unwrap();
    fs::write(settings.folder.join("mesh.crt"), &data["ca.crt"]).unwrap();
}

/// The pods of two operators, and where their proxies are, who believe the manager.
pub(crate) async fn enrolled(
    cluster: &ControlPlane,
    client: &Client,
    replica: &Replica,
    folder: &TempDir,
) -> (ProxySettings, [TestPod; 2]) {
    let pods =
        [token::pod_with_proxy(client, OPERATOR, "op-0").await, token::pod_with_proxy(client, OPERATOR, "op-1").await];
    let settings = ProxySettings {
        url: cluster.url().to_owned(),
        ca: cluster.ca().to_owned(),
        manager: replica.grpc,
        folder: folder.path().to_owned(),
    };
    believed(client, &settings).await;
    (settings, pods)
}

/// A proxy for each pod, and a client through it.
pub(crate) async fn proxies(
    client: &Client,
    settings: &ProxySettings,
    pods: &[TestPod; 2],
) -> ([Sidecar; 2], [Client; 2]) {
    let start = async |pod: &TestPod| {
        let sidecar = Sidecar::start(settings, pod, &pod.token(client, AUDIENCE).await).await;
        let through = operator(client, settings, pod, &sidecar).await;
        (sidecar, through)
    };
    let (one, two) = (start(&pods[0]).await, start(&pods[1]).await);
    ([one.0, two.0], [one.1, two.1])
}

async fn until_connected(sidecars: &[Sidecar]) {
    for sidecar in sidecars {
        eventually("the proxy to be back", async || {
            (sidecar.metric("ctrlmesh_proxy_manager_connected").await > 0.0).then_some(())
        })
        .await;
    }
}

/// Requires that the commands show what the root, whose canary owns `team-3`, has come to.
async fn shown_by_commands(cluster: &ControlPlane) {
    let list = eventually("a root that is well", async || {
        Some(printed(cluster, &["status"])).filter(|list| list.contains("all is well"))
    });
    let list = list.await;
    let row: Vec<&str> = list.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(row[..6], [ROOT, "StatefulSet", "op", "2", "2/2", "32/32"], "{list}");
    let screen = printed(cluster, &["status", ROOT, "--output", "wide"]);
    assert!(screen.contains("op-0-canary") && screen.contains("team-3"), "{screen}");
    for team in TEAMS {
        let owner = ["owner", "cm", "object", "--output", "json"];
        let owner: Value = serde_json::from_str(&printed_in(cluster, team, &owner)).unwrap();
        let root = &owner["roots"][0];
        let (rule, pod) = if team == "team-3" { ("Namespace", "op-0") } else { ("Slot", "op-1") };
        assert_eq!((&root["rule"], &root["pods"][0]["name"]), (&json!(rule), &json!(pod)), "{owner}");
        assert_eq!(owner["missingLabels"], json!([]), "{owner}");
    }
}

/// Requires that `explain` says what becomes of a write of each object by each pod, and which selector is added to a
/// list: a request with that selector lists what the pod's proxy lets the pod see.
async fn explained_truly(cluster: &ControlPlane, client: &Client, clients: &[Client; 2]) {
    let json = |team: &str, arguments: &[&str]| -> Value {
        let arguments = [&["explain", "cm"], arguments, &["--output", "json"]].concat();
        serde_json::from_str(&printed_in(cluster, team, &arguments)).unwrap()
    };
    for team in TEAMS {
        let said = json(team, &["object"]);
        for (pod, through) in ["op-0", "op-1"].into_iter().zip(clients) {
            let answers = said["roots"][0]["answers"].as_array().unwrap();
            let answer = &answers.iter().find(|one| one["pod"] == pod).unwrap()["proxy"];
            let request = ["object", "--as-pod", pod, "--as-namespace", OPERATOR, "--verb", "patch"];
            let request = json(team, &request);
            assert_eq!(said["roots"][0]["fencing"]["mode"], "Proxy", "{said}");
            let maps: Api<ConfigMap> = Api::namespaced(through.clone(), team);
            let touched = Patch::Merge(json!({"metadata": {"annotations": {"touched": pod}}}));
            match maps.patch("object", &PatchParams::default(), &touched).await {
                Ok(_) => {
                    assert_eq!(
                        (&answer["outcome"], &request["outcome"]),
                        (&json!("Allowed"), &json!("Passes")),
                        "{team} {pod}"
                    );
                }
                Err(kube::Error::Api(status)) if status.code == 403 => {
                    assert_eq!(
                        (&answer["outcome"], &request["outcome"]),
                        (&json!("Refused"), &json!("Refused")),
                        "{team} {pod}"
                    );
                    assert_eq!(answer["message"], status.message.as_str(), "{team} {pod}");
                    assert_eq!(request["answer"]["message"], status.message.as_str(), "{team} {pod}");
                }
                Err(error) => panic!("{team} {pod}: {error}"),
            }
        }
    }
    for (pod, through) in ["op-0", "op-1"].into_iter().zip(clients) {
        let list = json(OPERATOR, &["--as-pod", pod, "--verb", "list", "-l", "!absent"]);
        let selector = list["selector"].as_str().unwrap();
        let maps = |client: &Client| Api::<ConfigMap>::all(client.clone());
        let names = |maps: Vec<ConfigMap>| -> BTreeSet<(String, String)> {
            maps.iter().map(|map| (map.namespace().unwrap_or_default(), map.name_any())).collect()
        };
        let by_hand = maps(client).list(&ListParams::default().labels(selector)).await.unwrap();
        let by_proxy = maps(through).list(&ListParams::default()).await.unwrap();
        assert_eq!(names(by_hand.items), names(by_proxy.items), "{pod}: {list}");
    }
}

/// What `plan` says of the root.
fn planned(cluster: &ControlPlane, folder: &TempDir, root: &Value) -> Value {
    let file = folder.path().join("root.json");
    fs::write(&file, root.to_string()).unwrap();
    let plan = ["plan", "--filename", file.to_str().unwrap(), "--output", "json"];
    serde_json::from_str(&printed_in(cluster, OPERATOR, &plan)).unwrap()
}

/// Requires that the root owns what the plan said, and each shard as many objects.
async fn came_true(client: &Client, clients: &[Client; 2], plan: &Value) {
    let roots: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    let table = eventually("a root that is settled", async || {
        let status = roots.get(ROOT).await.ok()?.status?;
        let is_settled = status.conditions.iter().any(|one| one.type_ == "Settled" && one.status == "True");
        is_settled.then_some(status.ownership?)
    });
    let table = table.await;
    let planned = &plan["roots"][0];
    let owned = |side: &str| -> Vec<(&Value, &Value, u64)> {
        let shards = planned["shards"].as_array().unwrap().iter();
        let of = |shard: &'_ Value| shard[side]["objects"].as_u64().unwrap();
        shards.map(|shard| (&shard["name"], shard, of(shard))).collect()
    };
    for (name, shard, _) in owned("after") {
        let name = name.as_str().unwrap();
        let slots = table.slots.iter().filter(|(_, owner)| *owner == name).map(|(slot, _)| slot.to_string());
        let namespaces = table.namespaces.iter().filter(|(_, owner)| *owner == name).map(|(name, _)| name);
        assert_eq!(shard["after"]["slots"], json!(slots.collect::<Vec<_>>()), "{name}: {plan}");
        assert_eq!(shard["after"]["namespaces"], json!(namespaces.collect::<Vec<_>>()), "{name}: {plan}");
    }
    let mut seen = Vec::new();
    for client in clients {
        let maps: Api<ConfigMap> = Api::all(client.clone());
        seen.push(maps.list(&ListParams::default()).await.unwrap().items.len() as u64);
    }
    let mut counted: Vec<u64> =
        owned("after").into_iter().map(|(_, _, objects)| objects).filter(|objects| *objects > 0).collect();
    seen.sort_unstable();
    counted.sort_unstable();
    assert_eq!(counted, seen, "{plan}");
    assert_eq!(planned["restartedPods"], json!([]), "{plan}");
    let moves = planned["moves"].as_array().unwrap();
    assert!(moves.iter().any(|one| one["namespaces"] == json!(["team-3"])), "{plan}");
}

#[tokio::test]
async fn a_root_is_applied_changed_and_holds_without_the_manager() {
    let cluster = ControlPlane::start(&Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    let folder = TempDir::new().unwrap();
    world(&client).await;
    let mut replica = Replica::start(&cluster, SYSTEM, &[]).await;
    replica.until_ready().await;
    divide(&client, 2, None).await;
    let (settings, pods) = enrolled(&cluster, &client, &replica, &folder).await;
    let (mut sidecars, clients) = proxies(&client, &settings, &pods).await;
    parted(&clients, |_, _| true).await;

    let with_canary = Some(json!({"replicas": 1, "inNamespaces": ["team-3"]}));
    let plan = planned(&cluster, &folder, &root_with("Proxy", 1, with_canary.clone()));
    divide(&client, 1, with_canary).await;
    let canary: Teams = ["team-3".to_owned()].into();
    parted(&clients, |one, _| *one == canary).await;
    eventually("status to say so", async || programmed(&client).await).await;
    came_true(&client, &clients, &plan).await;
    shown_by_commands(&cluster).await;
    explained_truly(&cluster, &client, &clients).await;

    replica.program().kill();
    parted(&clients, |one, _| *one == canary).await;
    for sidecar in &mut sidecars {
        sidecar.kill();
    }
    let (sidecars, clients) = proxies(&client, &settings, &pods).await;
    parted(&clients, |one, _| *one == canary).await;

    let address = replica.grpc.to_string();
    let mut again = Replica::start(&cluster, SYSTEM, &["--listen-grpc", &address]).await;
    again.until_ready().await;
    until_connected(&sidecars).await;
    parted(&clients, |one, _| *one == canary).await;
    // While nobody looks, each shard comes to stand by itself: what the proxies were told by says no more of them.
    again.program().kill();
    let roots: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    let off = Patch::Merge(json!({"spec": {"root": {"disable": true}}}));
    roots.patch(ROOT, &PatchParams::default(), &off).await.unwrap();
    let last = Replica::start(&cluster, SYSTEM, &["--listen-grpc", &address]).await;
    last.until_ready().await;
    until_connected(&sidecars).await;
    parted(&clients, |one, _| *one == canary).await;
}

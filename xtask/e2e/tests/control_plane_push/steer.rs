//! `ctrlmesh move`, `drain` and `rebalance` before a real manager and real proxies.

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::slots::NamespaceHash;
use ctrlmesh_testbed::ControlPlane;
use kube::{Api, Client};
use serde_json::Value;

use crate::bed::eventually;
use crate::commands::{output, printed};
use crate::full::{OPERATOR, ROOT, TEAMS, Teams, parted, proxies, seen};
use crate::owned::{Bed, bed};

const FIRST: &str = "op-1-normal";

const SECOND: &str = "op-2-normal";

fn report(cluster: &ControlPlane, arguments: &[&str]) -> Value {
    let report: Value = serde_json::from_str(&printed(cluster, &[arguments, &["--output", "json"]].concat())).unwrap();
    assert_eq!(report["kind"], "ShareChange", "{report}");
    report["roots"][0].clone()
}

async fn root(client: &Client) -> ShardingConfig {
    Api::namespaced(client.clone(), OPERATOR).get(ROOT).await.unwrap()
}

/// The root without its status, which the manager writes all the time, and without what follows from that.
fn but_for_status(mut root: ShardingConfig) -> ShardingConfig {
    root.status = None;
    root.metadata.resource_version = None;
    root.metadata.managed_fields.iter_mut().for_each(|all| all.retain(|one| one.subresource.is_none()));
    root
}

/// Numbers of slots of both shards, by the table that is in force.
async fn slots(client: &Client) -> [usize; 2] {
    let table = root(client).await.status.unwrap().ownership.unwrap();
    [FIRST, SECOND].map(|shard| table.slots.values().filter(|owner| *owner == shard).count())
}

/// Requires that a refusal names what is wrong.
fn refused(cluster: &ControlPlane, arguments: &[&str], why: &str) {
    let output = output(cluster, arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains(why), "{arguments:?}: {error}");
}

/// Moves a namespace to the shard that has it not, and requires that all of its slot goes there, and nothing else.
async fn a_namespace_moves(cluster: &ControlPlane, client: &Client, clients: &[Client; 2]) {
    let [one, two] = parted(clients, |_, _| true).await;
    let team = TEAMS[3];
    let (to, at) = if one.contains(team) { (SECOND, 1) } else { (FIRST, 0) };
    let hash = NamespaceHash::default();
    let with_it: Teams = TEAMS.map(str::to_owned).into_iter().filter(|one| hash.slot(one) == hash.slot(team)).collect();
    let before = but_for_status(root(client).await);
    let tried = report(cluster, &["move", team, "--to", to, "--dry-run"]);
    assert_eq!((&tried["written"], tried["moves"].as_array().unwrap().len()), (&Value::Bool(false), 1), "{tried}");
    assert!(tried["patch"]["spec"]["root"]["manual"].is_array() && tried["otherWriters"][0] == "test", "{tried}");
    assert_eq!(but_for_status(root(client).await), before, "a dry run writes nothing");

    let moved = report(cluster, &["move", team, "--to", to, "--wait"]);
    assert_eq!((&moved["written"], &moved["settled"]), (&Value::Bool(true), &Value::Bool(true)), "{moved}");
    let mut expected = [one, two];
    expected[1 - at].retain(|team| !with_it.contains(team));
    expected[at].extend(with_it);
    let see = async |client: &Client| seen(client).await.unwrap();
    assert_eq!([see(&clients[0]).await, see(&clients[1]).await], expected, "once it has settled, both see their own");

    let again = printed(cluster, &["move", team, "--to", to]);
    assert!(again.contains("Nothing is to be written."), "{again}");
}

/// Whether the status of each shard has its pod with an epoch: whoever drains one goes by these, and they are written
/// some time after that of the root.
async fn have_pods(client: &Client) -> bool {
    let shards: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    let has_pod = |shard: ShardingConfig| {
        shard
            .status
            .is_some_and(|status| status.pods.iter().any(|pod| pod.epoch.is_some() && pod.last_contact.is_some()))
    };
    [shards.get(FIRST).await, shards.get(SECOND).await].into_iter().all(|shard| shard.is_ok_and(has_pod))
}

#[tokio::test]
async fn slots_are_moved_drained_and_balanced_by_hand() {
    let Bed { client, cluster, settings, pods, .. } = &bed("Proxy", 2, None).await;
    let (_sidecars, clients) = proxies(client, settings, pods).await;

    a_namespace_moves(cluster, client, &clients).await;
    refused(cluster, &["move", "32", "--to", FIRST], "slots are 0 to 31");
    refused(cluster, &["move", "team-9", "--to", FIRST], "there is no namespace \"team-9\"");
    refused(cluster, &["move", "0", "--to", "op-7-normal"], "there are: op-1-normal, op-2-normal");

    eventually("both shards to have their pods in touch", async || have_pods(client).await.then_some(())).await;
    let drained = printed(cluster, &["drain", "op-1", "--wait"]);
    assert!(drained.contains("has settled"), "{drained}");
    assert_eq!(slots(client).await, [32, 0]);
    let all: Teams = TEAMS.map(str::to_owned).into();
    assert_eq!(seen(&clients[0]).await, Some(all));
    assert_eq!(seen(&clients[1]).await, Some(Teams::new()));
    let other = printed(cluster, &["drain", "op-0", "--dry-run"]);
    assert!(other.contains("would be accepted"), "the shard without slots has a pod: {other}");

    let balanced = report(cluster, &["rebalance", ROOT, "--by", "slots", "--wait"]);
    assert_eq!(balanced["settled"], true, "{balanced}");
    eventually("an even table", async || (slots(client).await == [16, 16]).then_some(())).await;
    report(cluster, &["rebalance", ROOT, "--wait"]);
    let [one, two] = parted(&clients, |_, _| true).await;
    assert_eq!([one.len(), two.len()], [4, 4], "as many objects for each");
}

//! What is done, and what has to hold while it is: the steps of the demo, with the example operator.
//!
//! Each step does something, waits until the table is whole again, and then asks the audit log whether anything happened
//! that must not. It gives what it saw, or says what did not hold.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::slots::SlotSet;
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::checks::{
    WHOLE_WITHIN, count, landed, none, of_shard, only_by_proxy, only_own, same_replicas, seconds,
    shards, steady, touched, worst,
};
use crate::observer::since;
use crate::scene::{self, Scene};
use crate::view::Table;
use crate::websites;

/// How many namespaces there are at the beginning, and how many come later.
pub const NAMESPACES: usize = 60;
const ADDED: usize = 12;

/// For how long nothing may happen that must not, where we only look.
const LOOKED_FOR: Duration = Duration::from_secs(5);

/// A step.
#[derive(Clone, Copy)]
pub struct Step {
    /// What is done.
    pub title: &'static str,
    /// What has to hold.
    pub promise: &'static str,
    /// Does it and looks; gives what was seen.
    pub run: fn(&Scene) -> Result<Vec<String>>,
}

/// All steps, in order.
pub const STEPS: [Step; 8] = [
    Step {
        title: "three replicas of an ordinary operator, without us",
        promise: "one of them does all the work, the others stand by",
        run: unsharded,
    },
    Step {
        title: "a root ShardingConfig and one label: shards appear",
        promise: "each replica works on its own third; nothing is unowned, nothing owned twice, and nothing gets past the proxy",
        run: sharded,
    },
    Step {
        title: "a canary slice moves to replica 0",
        promise: "no restart; no object missed; none changed by its old owner once the new one has",
        run: canary,
    },
    Step {
        title: "the node proxy is killed and comes back",
        promise: "no replica restarts, and none reaches the API server past the proxy",
        run: proxy_killed,
    },
    Step {
        title: "the manager is killed and stays away",
        promise: "every replica goes on with its share",
        run: manager_killed,
    },
    Step {
        title: "a replica is killed",
        promise: "the standby of its shard takes over; the other shards do not notice",
        run: replica_killed,
    },
    Step {
        title: "namespaces are added",
        promise: "each lands with the replica whose slots it falls into, and with no other",
        run: added,
    },
    Step {
        title: "everything is changed once more",
        promise: "the end state is what one replica alone would have made",
        run: end_state,
    },
];

/// The slots of the canary at first, a third; and those that it is given later.
fn third() -> Vec<String> {
    hashes(SlotSet::ALL.divide(3).first().copied().unwrap_or_default())
}

fn hashes(slots: SlotSet) -> Vec<String> {
    slots.iter().map(|slot| slot.to_string()).collect()
}

/// Three shards, each of one replica: the canary has `slots`, the others share the rest.
fn rule(slots: &[String]) -> Value {
    json!({"canary": {"replicas": 1, "inShardHash": slots}, "auto": {"shardingSize": 2, "everyShardReplicas": 1}})
}

fn unsharded(scene: &Scene) -> Result<Vec<String>> {
    scene.scale(3)?;
    for number in 0..NAMESPACES {
        scene.make(&websites::namespace(number), &websites::sites())?;
    }
    let objects = NAMESPACES * websites::SITES;
    let took = scene.observer.until("one replica to do all the work", WHOLE_WITHIN, |table| {
        table.is_whole() && table.objects == objects
    })?;
    let table = scene.observer.table();
    let working: Vec<_> = table.replicas.iter().filter(|(_, one)| one.works).collect();
    ensure!(working.len() == 1, "{} replicas work: {table:#?}", working.len());
    let pages = websites::check(&scene.api)?;
    let watching = table.replicas.values().filter(|one| one.objects == objects).count();
    Ok(vec![
        format!(
            "{objects} objects in {NAMESPACES} namespaces, {pages} pages written in {}",
            seconds(took)
        ),
        format!("1 of 3 replicas works; {watching} of 3 receive and cache all {objects} objects"),
    ])
}

fn sharded(scene: &Scene) -> Result<Vec<String>> {
    scene.shard(&rule(&third()), &websites::resources())?;
    // Started anew all at once: while some are enrolled and some are not, there would be two owners.
    scene.scale(0)?;
    scene.enrol()?;
    let start = Timestamp::now();
    scene.scale(3)?;
    let objects = NAMESPACES * websites::SITES;
    let took = scene.observer.until("three shards", WHOLE_WITHIN, |table| {
        table.is_whole()
            && table.is_acknowledged()
            && table.objects == objects
            && shards(table).len() == 3
    })?;
    let table = scene.observer.table();
    ensure!(table.replicas.values().all(|one| one.works), "each works on its share: {table:#?}");
    landed(scene, &third())?;
    let seen = touched(scene, "sharded")?;
    let parts: Vec<String> =
        table.replicas.values().map(|one| one.namespaces.to_string()).collect();
    Ok(vec![
        format!(
            "{} namespaces divided as {} after {}",
            table.namespaces,
            parts.join(" + "),
            seconds(took)
        ),
        seen,
        steady(scene, start)?,
        only_by_proxy(scene, start)?,
        only_own(scene, start)?,
    ])
}

fn canary(scene: &Scene) -> Result<Vec<String>> {
    let before = scene.observer.table();
    let (first, _) = of_shard(&before, "share-0-canary")?;
    let load = scene
        .load(Duration::from_millis(100), |number| websites::change(&format!("load {number}")));
    let start = Timestamp::now();
    let mut slots: Vec<String> = third();
    slots.extend(hashes(SlotSet::ALL).into_iter().skip(slots.len()).take(7));
    scene.shard(&rule(&slots), &websites::resources())?;
    let epoch = before.epoch;
    let clock = Instant::now();
    scene.observer.until("the new epoch", WHOLE_WITHIN, |table| {
        table.epoch > epoch && table.is_acknowledged()
    })?;
    let acknowledged = clock.elapsed();
    scene.observer.until("the canary's slice", WHOLE_WITHIN, |table| {
        let replica = table.replicas.get(&first);
        table.is_whole()
            && replica.is_some_and(|one| one.namespaces > before.replicas[&first].namespaces)
    })?;
    // What is still on its way to the old owner has to end well, too.
    thread::sleep(LOOKED_FOR);
    drop(load);
    scene.observer.settle()?;
    scene.observer.until("everything to be done", WHOLE_WITHIN, Table::is_whole)?;
    landed(scene, &slots)?;
    let after = scene.observer.table();
    same_replicas(&before, &after)?;
    let span = since(start);
    none(
        "changed by its old owner after its new one",
        &scene.observer.ledger(|one| one.returned(&span)),
    )?;
    let moved = after.replicas[&first].namespaces - before.replicas[&first].namespaces;
    let turns = scene.observer.ledger(|ledger| ledger.shared(&span).len());
    Ok(vec![
        format!(
            "{moved} namespaces moved to {first}: {} -> {}; acknowledged by all in {}, 0 restarts",
            before.replicas[&first].namespaces,
            after.replicas[&first].namespaces,
            seconds(acknowledged)
        ),
        format!(
            "{turns} objects were changed by their old owner and then by their new one, none by the old one again"
        ),
        worst(&scene.observer.sampled(&span), "while it moved"),
        websites::check(&scene.api)
            .map(|pages| format!("all {pages} pages are as they should be"))?,
    ])
}

fn proxy_killed(scene: &Scene) -> Result<Vec<String>> {
    let before = scene.observer.table();
    let start = Timestamp::now();
    let load = scene
        .load(Duration::from_millis(250), |number| websites::change(&format!("proxy {number}")));
    let proxies = scene.ours("ctrlmesh-node")?;
    for proxy in &proxies {
        scene.kill(scene::SYSTEM, proxy)?;
    }
    let clock = Instant::now();
    thread::sleep(LOOKED_FOR);
    drop(load);
    let seen = touched(scene, "without proxy")?;
    let took = clock.elapsed().saturating_sub(LOOKED_FOR);
    scene::rolled_out(&scene.cluster, scene::SYSTEM, "daemonset/ctrlmesh-node")?;
    scene.observer.until("all to be as before", WHOLE_WITHIN, |table| {
        table.is_whole() && table.is_acknowledged()
    })?;
    same_replicas(&before, &scene.observer.table())?;
    Ok(vec![
        format!(
            "{} killed with SIGKILL; everything was done again {} later",
            count(proxies.len(), "node proxy", "node proxies"),
            seconds(took)
        ),
        seen,
        steady(scene, start)?,
        only_by_proxy(scene, start)?,
    ])
}

fn manager_killed(scene: &Scene) -> Result<Vec<String>> {
    let before = scene.observer.table();
    let start = Timestamp::now();
    let path = format!("/apis/apps/v1/namespaces/{}/deployments/ctrlmesh-manager", scene::SYSTEM);
    let replicas = scene.api.get(&path)?["spec"]["replicas"].clone();
    let managers = scene.ours("ctrlmesh-manager")?;
    for manager in &managers {
        scene.kill(scene::SYSTEM, manager)?;
    }
    scene.api.merge(&path, &json!({"spec": {"replicas": 0}}))?;
    scene.until("the manager to be gone", scene::ROLLED_OUT_WITHIN, || {
        Ok(scene.ours("ctrlmesh-manager")?.is_empty().then_some(()))
    })?;
    let seen = touched(scene, "without manager")?;
    let away = steady(scene, start)?;
    same_replicas(&before, &scene.observer.table())?;
    scene.api.merge(&path, &json!({"spec": {"replicas": replicas}}))?;
    scene::rolled_out(&scene.cluster, scene::SYSTEM, "deployment/ctrlmesh-manager")?;
    let took = scene.observer.until("the manager to know all", WHOLE_WITHIN, |table| {
        table.is_whole() && table.is_acknowledged()
    })?;
    let after = scene.observer.table();
    ensure!(
        after.epoch == before.epoch,
        "the epoch changed: {:?} -> {:?}",
        before.epoch,
        after.epoch
    );
    Ok(vec![
        format!("{} killed, then none for a while", count(managers.len(), "manager", "managers")),
        format!("without: {seen}; {away}"),
        format!("back: the same epoch, acknowledged by all in {}", seconds(took)),
    ])
}

fn replica_killed(scene: &Scene) -> Result<Vec<String>> {
    scene.scale(4)?;
    scene.observer.until("a standby", WHOLE_WITHIN, |table| {
        table.is_whole()
            && table.is_acknowledged()
            && table.replicas.values().all(|one| one.shard.is_some())
    })?;
    let before = scene.observer.table();
    let standby = before.replicas.iter().find(|(_, one)| !one.works);
    let (standby, shard) = standby.context("nobody stands by")?;
    let shard = shard.shard.clone().unwrap_or_default();
    let working =
        before.replicas.iter().find(|(_, one)| one.works && one.shard.as_ref() == Some(&shard));
    let (killed, _) = working.with_context(|| format!("nobody works for {shard}"))?;
    let start = Timestamp::now();
    let clock = Instant::now();
    kill_twice(scene, killed)?;
    scene.observer.until("the standby to work", WHOLE_WITHIN, |table| {
        table.replicas.get(standby).is_some_and(|one| one.works)
    })?;
    let took = clock.elapsed();
    let seen = touched(scene, "taken over")?;
    scene.observer.until("all to be whole", WHOLE_WITHIN, |table| {
        table.is_whole() && table.replicas.values().all(|one| one.ready)
    })?;
    let span = since(start);
    none(
        "changed again by the replica that was killed",
        &scene.observer.ledger(|one| one.returned(&span)),
    )?;
    let after = scene.observer.table();
    for (name, one) in before.replicas.iter().filter(|(name, _)| *name != killed) {
        ensure!(
            after.replicas.get(name).is_some_and(|now| now.restarts == one.restarts),
            "{name} restarted"
        );
    }
    Ok(vec![
        format!(
            "{killed} killed with SIGKILL; {standby} works for {shard} {} later (its lock runs for 15 s)",
            seconds(took)
        ),
        seen,
        worst(&scene.observer.sampled(&span), "meanwhile"),
        "the replicas of the other shards did not restart".to_owned(),
    ])
}

fn added(scene: &Scene) -> Result<Vec<String>> {
    let start = Timestamp::now();
    let clock = Instant::now();
    for number in NAMESPACES..NAMESPACES + ADDED {
        scene.make(&websites::namespace(number), &websites::sites())?;
    }
    let objects = (NAMESPACES + ADDED) * websites::SITES;
    scene.observer.until("the new namespaces", WHOLE_WITHIN, |table| {
        table.is_whole() && table.is_acknowledged() && table.objects == objects
    })?;
    let took = clock.elapsed();
    let shares = scene.observer.both(|world, ledger| {
        let mut shares: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
        let new: BTreeSet<String> =
            (NAMESPACES..NAMESPACES + ADDED).map(websites::namespace).collect();
        for work in world.work.iter().filter(|work| new.contains(&work.namespace)) {
            for owner in world.owners(work, ledger) {
                let shard = world.pods[owner].shard.clone().unwrap_or_default();
                shares.entry(shard).or_default().insert(&work.namespace);
            }
        }
        shares
            .into_iter()
            .map(|(shard, spaces)| format!("{} to {shard}", spaces.len()))
            .collect::<Vec<_>>()
    });
    let mut slots = third();
    slots.extend(hashes(SlotSet::ALL).into_iter().skip(slots.len()).take(7));
    landed(scene, &slots)?;
    Ok(vec![
        format!(
            "{ADDED} namespaces with {} objects: {}, all done {} after the first",
            ADDED * websites::SITES,
            shares.join(", "),
            seconds(took)
        ),
        steady(scene, start)?,
    ])
}

fn end_state(scene: &Scene) -> Result<Vec<String>> {
    let start = Timestamp::now();
    let seen = touched(scene, "the end")?;
    let pages = websites::check(&scene.api)?;
    Ok(vec![
        seen,
        format!("all {pages} pages are what the sites ask for"),
        steady(scene, start)?,
        only_by_proxy(scene, start)?,
    ])
}

/// Kills a replica, and again when it has been started again: then kubelet waits before it starts it once more, so that it
/// is not there to take its lock back.
fn kill_twice(scene: &Scene, pod: &str) -> Result<()> {
    let namespace = scene.observer.operator().namespace;
    let first = scene.kill(namespace, pod)?;
    if scene.cluster.node().is_some() {
        scene.until("the replica to be started again", WHOLE_WITHIN, || {
            // Until it is there again, there is nothing to kill.
            let again = scene.kill(namespace, pod).ok();
            Ok(again.filter(|process| *process != first))
        })?;
    }
    Ok(())
}

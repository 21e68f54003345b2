//! What dies, and comes back or does not.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use jiff::Timestamp;
use serde_json::json;
use xtask::guest::SYSTEM;

use super::later;
use crate::checks::{
    WHOLE_WITHIN, all_replaced, count, one_owner, only_by_proxy, only_retried, same_replicas,
    seconds, steady, still, touched, worst, written,
};
use crate::install;
use crate::ledger::Span;
use crate::observer::since;
use crate::rules::shard_of;
use crate::scene::Scene;
use crate::writers::{Shards, Writers, none, shards_of};

/// For how long the work goes on while something is away.
const LOOKED_FOR: Duration = Duration::from_secs(5);

pub(super) fn proxy_killed(scene: &Scene) -> Result<Vec<String>> {
    let before = scene.observer.table();
    let start = Timestamp::now();
    let load = scene.load(Duration::from_millis(250));
    let proxies = scene.kill_ours("ctrlmesh-node")?;
    let clock = Instant::now();
    thread::sleep(LOOKED_FOR);
    load.finish()?;
    let seen = touched(scene)?;
    let took = clock.elapsed().saturating_sub(LOOKED_FOR);
    install::rolled_out(&scene.cluster, SYSTEM, "daemonset/ctrlmesh-node")?;
    scene.observer.until("all to be as before", WHOLE_WITHIN, |table| {
        table.is_whole() && table.is_acknowledged()
    })?;
    same_replicas(&before, &scene.observer.table())?;
    all_replaced(&proxies, &scene.ours("ctrlmesh-node")?)?;
    Ok(vec![
        format!(
            "{} {}; everything was done again {} later",
            count(proxies.len(), "node proxy", "node proxies"),
            scene.killed(),
            seconds(took)
        ),
        seen,
        one_owner(&scene.observer.sampled(&since(start)), "meanwhile")?,
        steady(scene, start)?,
        only_by_proxy(scene, start)?,
    ])
}

pub(super) fn manager_killed(scene: &Scene) -> Result<Vec<String>> {
    let before = scene.observer.table();
    let start = Timestamp::now();
    let path = format!("/apis/apps/v1/namespaces/{SYSTEM}/deployments/ctrlmesh-manager");
    let replicas = scene.api.get(&path)?["spec"]["replicas"].clone();
    let managers = scene.kill_ours("ctrlmesh-manager")?;
    scene.api.merge(&path, &json!({"spec": {"replicas": 0}}))?;
    scene.until("the manager to be gone", install::ROLLED_OUT_WITHIN, || {
        Ok(scene.ours("ctrlmesh-manager")?.is_empty().then_some(()))
    })?;
    let seen = touched(scene)?;
    let away = steady(scene, start)?;
    same_replicas(&before, &scene.observer.table())?;
    scene.api.merge(&path, &json!({"spec": {"replicas": replicas}}))?;
    install::rolled_out(&scene.cluster, SYSTEM, "deployment/ctrlmesh-manager")?;
    scene.observer.until("the manager to know all", WHOLE_WITHIN, |table| {
        table.is_whole() && table.is_acknowledged()
    })?;
    all_replaced(&managers, &scene.ours("ctrlmesh-manager")?)?;
    let after = scene.observer.table();
    ensure!(
        after.epoch == before.epoch,
        "the epoch changed: {:?} -> {:?}",
        before.epoch,
        after.epoch
    );
    Ok(vec![
        format!(
            "{} {}, then none for a while",
            count(managers.len(), "manager", "managers"),
            scene.killed()
        ),
        format!("without: {seen}; {away}"),
        one_owner(&scene.observer.sampled(&since(start)), "meanwhile")?,
        "back: it tells the same, in the same epoch".to_owned(),
    ])
}

pub(super) fn replica_killed(scene: &Scene) -> Result<Vec<String>> {
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
    let until_then = still(scene)?;
    let start = Timestamp::now();
    let clock = Instant::now();
    kill_twice(scene, killed)?;
    scene.observer.until("the standby to work", WHOLE_WITHIN, |table| {
        table.replicas.get(standby).is_some_and(|one| one.works)
    })?;
    let took = clock.elapsed();
    let seen = touched(scene)?;
    scene.observer.until("all to be whole", WHOLE_WITHIN, |table| {
        table.is_whole() && table.replicas.values().all(|one| one.ready)
    })?;
    let span = since(start);
    let replicas = shards_of(&before);
    let writes = written(scene, start, |writers, span| {
        taken_over(writers, span, &replicas, |space| shard_of(space, later(scene)))
    })?;
    scene.rules(|rules| rules.stand(span.end))?;
    let after = scene.observer.table();
    for (name, one) in before.replicas.iter().filter(|(name, _)| *name != killed) {
        ensure!(
            after.replicas.get(name).is_some_and(|now| now.restarts == one.restarts),
            "{name} restarted"
        );
    }
    Ok(vec![
        format!(
            "{killed} {}; {standby} works for {shard} {} later (its lock runs for 15 s)",
            scene.killed(),
            seconds(took)
        ),
        seen,
        worst(&scene.observer.sampled(&span), "meanwhile"),
        writes,
        "the replicas of the other shards did not restart".to_owned(),
        format!("until then: {until_then}"),
    ])
}

/// That of each shard only its own replicas have changed anything, which are two only where one of them was killed, and
/// that the one that was killed changed nothing after the one that took over did.
fn taken_over(
    writers: &Writers<'_>,
    span: &Span,
    replicas: &Shards,
    shard: impl Fn(&str) -> String,
) -> Result<String> {
    writers.own(span, replicas, |space| vec![shard(space)])?;
    let again = writers.clashes(|ledger| ledger.returned(span));
    none("changed again by the replica that was killed", &again)?;
    let count = writers.writes(span).count();
    ensure!(count > 0, "nothing was changed");
    Ok(format!("audit log: {count} changes, each by a replica of its shard"))
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

pub(super) fn rolled(scene: &Scene) -> Result<Vec<String>> {
    let before = scene.observer.table();
    let start = Timestamp::now();
    let answers = scene.answers()?;
    let clock = Instant::now();
    let load = scene.load(Duration::from_millis(100));
    for (kind, name) in [("daemonset", "ctrlmesh-node"), ("deployment", "ctrlmesh-manager")] {
        let (old, one) = (scene.ours(name)?, format!("{kind}/{name}"));
        scene.cluster.ask(&["--namespace", SYSTEM, "rollout", "restart", &one], "")?;
        install::rolled_out(&scene.cluster, SYSTEM, &one)?;
        let gone = || Ok(scene.ours(name)?.keys().all(|pod| !old.contains_key(pod)).then_some(()));
        scene.until("the old ones to be gone", install::ROLLED_OUT_WITHIN, gone)?;
        all_replaced(&old, &scene.ours(name)?)?;
    }
    let took = seconds(clock.elapsed());
    let changed = load.finish()?;
    let seen = touched(scene)?;
    scene.observer.until("all to be as before", WHOLE_WITHIN, |table| {
        table.is_whole() && table.is_acknowledged()
    })?;
    same_replicas(&before, &scene.observer.table())?;
    Ok(vec![
        format!(
            "both restarted in {took}, while {changed} objects were changed; 0 restarts of the operator"
        ),
        seen,
        one_owner(&scene.observer.sampled(&since(start)), "meanwhile")?,
        steady(scene, start)?,
        only_by_proxy(scene, start)?,
        only_retried(&answers, &scene.answers()?)?,
        none_expired(scene)?,
    ])
}

/// That the proxies which serve now have told no watch to begin anew, which the operator's client hides in a list.
fn none_expired(scene: &Scene) -> Result<String> {
    let Some(expired) = scene.expired()? else {
        return Ok(
            "whether a watch began anew cannot be told: the proxies are not reached".to_owned()
        );
    };
    ensure!(expired == 0.0, "the new proxies made {expired} watches begin anew");
    Ok("the new proxies' own count: 0 watches had to begin anew".to_owned())
}

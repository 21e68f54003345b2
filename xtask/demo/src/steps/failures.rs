//! Steps in which a proxy, a manager or a replica is killed or restarted.

use std::collections::BTreeSet;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use jiff::Timestamp;
use serde_json::json;
use xtask::user_cluster::SYSTEM;

use super::later;
use crate::checks::{
    WHOLE_WITHIN, all_replaced, count, one_owner, only_by_proxy, only_retried, same_replicas, seconds, steady, still,
    touched, worst, written,
};
use crate::environment::Environment;
use crate::history::Span;
use crate::install;
use crate::observer::since;
use crate::rules::shard_of;
use crate::write_check::{Shards, WriteCheck, none, shards_of};

/// For how long the work goes on while something is away.
const LOOKED_FOR: Duration = Duration::from_secs(5);

pub(super) fn proxy_killed(environment: &Environment) -> Result<Vec<String>> {
    let before = environment.observer.table();
    let start = Timestamp::now();
    let load = environment.load(Duration::from_millis(250));
    let proxies = environment.kill_ours("ctrlmesh-node")?;
    let clock = Instant::now();
    thread::sleep(LOOKED_FOR);
    load.finish()?;
    let seen = touched(environment)?;
    let took = clock.elapsed().saturating_sub(LOOKED_FOR);
    install::rolled_out(&environment.cluster, SYSTEM, "daemonset/ctrlmesh-node")?;
    environment
        .observer
        .until("all to be as before", WHOLE_WITHIN, |table| table.is_whole() && table.is_acknowledged())?;
    same_replicas(&before, &environment.observer.table())?;
    all_replaced(&proxies, &environment.ours("ctrlmesh-node")?)?;
    Ok(vec![
        format!(
            "{} {}; everything was done again {} later",
            count(proxies.len(), "node proxy", "node proxies"),
            environment.killed(),
            seconds(took)
        ),
        seen,
        one_owner(&environment.observer.sampled(&since(start)), "meanwhile")?,
        steady(environment, start)?,
        only_by_proxy(environment, start, &BTreeSet::new())?,
    ])
}

pub(super) fn manager_killed(environment: &Environment) -> Result<Vec<String>> {
    let before = environment.observer.table();
    let start = Timestamp::now();
    let path = format!("/apis/apps/v1/namespaces/{SYSTEM}/deployments/ctrlmesh-manager");
    let replicas = environment.api.get(&path)?["spec"]["replicas"].clone();
    let managers = environment.kill_ours("ctrlmesh-manager")?;
    environment.api.merge(&path, &json!({"spec": {"replicas": 0}}))?;
    environment.until("the manager to be gone", install::ROLLED_OUT_WITHIN, || {
        Ok(environment.ours("ctrlmesh-manager")?.is_empty().then_some(()))
    })?;
    let seen = touched(environment)?;
    let away = steady(environment, start)?;
    same_replicas(&before, &environment.observer.table())?;
    environment.api.merge(&path, &json!({"spec": {"replicas": replicas}}))?;
    install::rolled_out(&environment.cluster, SYSTEM, "deployment/ctrlmesh-manager")?;
    environment
        .observer
        .until("the manager to know all", WHOLE_WITHIN, |table| table.is_whole() && table.is_acknowledged())?;
    all_replaced(&managers, &environment.ours("ctrlmesh-manager")?)?;
    let after = environment.observer.table();
    ensure!(after.epoch == before.epoch, "the epoch changed: {:?} -> {:?}", before.epoch, after.epoch);
    Ok(vec![
        format!("{} {}, then none for a while", count(managers.len(), "manager", "managers"), environment.killed()),
        format!("without: {seen}; {away}"),
        one_owner(&environment.observer.sampled(&since(start)), "meanwhile")?,
        "back: it tells the same, in the same epoch".to_owned(),
    ])
}

pub(super) fn replica_killed(environment: &Environment) -> Result<Vec<String>> {
    environment.scale(4)?;
    environment.observer.until("a standby", WHOLE_WITHIN, |table| {
        table.is_whole() && table.is_acknowledged() && table.replicas.values().all(|one| one.shard.is_some())
    })?;
    let before = environment.observer.table();
    let standby = before.replicas.iter().find(|(_, one)| !one.works);
    let (standby, shard) = standby.context("nobody stands by")?;
    let shard = shard.shard.clone().unwrap_or_default();
    let working = before.replicas.iter().find(|(_, one)| one.works && one.shard.as_ref() == Some(&shard));
    let (killed, _) = working.with_context(|| format!("nobody works for {shard}"))?;
    let until_then = still(environment)?;
    let start = Timestamp::now();
    let clock = Instant::now();
    kill_thrice(environment, killed)?;
    environment
        .observer
        .until("the standby to work", WHOLE_WITHIN, |table| table.replicas.get(standby).is_some_and(|one| one.works))?;
    let took = clock.elapsed();
    let seen = touched(environment)?;
    environment.observer.until("all to be whole", WHOLE_WITHIN, |table| {
        table.is_whole() && table.replicas.values().all(|one| one.ready)
    })?;
    let span = since(start);
    let replicas = shards_of(&before);
    let writes = written(environment, start, |write_check, span| {
        taken_over(write_check, span, &replicas, |space| shard_of(space, later(environment)))
    })?;
    environment.rules(|rules| rules.stand(span.end))?;
    let after = environment.observer.table();
    for (name, one) in before.replicas.iter().filter(|(name, _)| *name != killed) {
        ensure!(after.replicas.get(name).is_some_and(|now| now.restarts == one.restarts), "{name} restarted");
    }
    Ok(vec![
        format!(
            "{killed} {}; {standby} works for {shard} {} later (its lock runs for 15 s)",
            environment.killed(),
            seconds(took)
        ),
        seen,
        worst(&environment.observer.sampled(&span), "meanwhile"),
        writes,
        "the replicas of the other shards did not restart".to_owned(),
        format!("until then: {until_then}"),
    ])
}

/// That of each shard only its own replicas have changed anything, which are two only where one of them was killed, and
/// that the one that was killed changed nothing after the one that took over did.
fn taken_over(
    write_check: &WriteCheck<'_>,
    span: &Span,
    replicas: &Shards,
    shard: impl Fn(&str) -> String,
) -> Result<String> {
    write_check.own(span, replicas, |space| vec![shard(space)])?;
    let again = write_check.conflicts(|history| history.returned(span));
    none("changed again by the replica that was killed", &again)?;
    let count = write_check.writes(span).count();
    ensure!(count > 0, "nothing was changed");
    Ok(format!("audit log: {count} changes, each by a replica of its shard"))
}

/// Kills a replica, and twice again when it has been started again: then kubelet waits for 20 s before it starts it
/// once more. A replica that is there again takes its own lock back at once.
fn kill_thrice(environment: &Environment, pod: &str) -> Result<()> {
    let namespace = environment.observer.operator().namespace;
    let mut last = environment.kill(namespace, pod)?;
    if environment.cluster.node().is_some() {
        for _ in 0..2 {
            last = environment.until("the replica to be started again", WHOLE_WITHIN, || {
                // Until it is there again, there is nothing to kill.
                let again = environment.kill(namespace, pod).ok();
                Ok(again.filter(|process| *process != last))
            })?;
        }
    }
    Ok(())
}

pub(super) fn rolled(environment: &Environment) -> Result<Vec<String>> {
    let before = environment.observer.table();
    let start = Timestamp::now();
    let answers = environment.answers()?;
    let clock = Instant::now();
    let load = environment.load(Duration::from_millis(100));
    for (kind, name) in [("daemonset", "ctrlmesh-node"), ("deployment", "ctrlmesh-manager")] {
        let (old, one) = (environment.ours(name)?, format!("{kind}/{name}"));
        environment.cluster.ask(&["--namespace", SYSTEM, "rollout", "restart", &one], "")?;
        install::rolled_out(&environment.cluster, SYSTEM, &one)?;
        let gone = || Ok(environment.ours(name)?.keys().all(|pod| !old.contains_key(pod)).then_some(()));
        environment.until("the old ones to be gone", install::ROLLED_OUT_WITHIN, gone)?;
        all_replaced(&old, &environment.ours(name)?)?;
    }
    let took = seconds(clock.elapsed());
    let changed = load.finish()?;
    let seen = touched(environment)?;
    environment
        .observer
        .until("all to be as before", WHOLE_WITHIN, |table| table.is_whole() && table.is_acknowledged())?;
    same_replicas(&before, &environment.observer.table())?;
    Ok(vec![
        format!("both restarted in {took}, while {changed} objects were changed; 0 restarts of the operator"),
        seen,
        one_owner(&environment.observer.sampled(&since(start)), "meanwhile")?,
        steady(environment, start)?,
        only_by_proxy(environment, start, &BTreeSet::new())?,
        only_retried(&answers, &environment.answers()?)?,
        none_expired(environment)?,
    ])
}

/// That the proxies which serve now have told no watch to begin anew, which the operator's client hides in a list.
fn none_expired(environment: &Environment) -> Result<String> {
    let Some(expired) = environment.expired()? else {
        return Ok("whether a watch began anew cannot be told: the proxies are not reached".to_owned());
    };
    ensure!(expired == 0.0, "the new proxies made {expired} watches begin anew");
    Ok("the new proxies' own count: 0 watches had to begin anew".to_owned())
}

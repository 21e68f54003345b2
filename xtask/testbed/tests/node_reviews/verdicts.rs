//! Three replicas answer reviews from their caches as one replica would that sees everything, while slots move and one
//! of the replicas is killed.

use std::collections::BTreeMap;
use std::io::{Write as _, stderr};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::slots::NamespaceHash;
use ctrlmesh_runtime::sync::read;
use ctrlmesh_testbed::{Space, is_full};
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::admission::{self, Authority, CANARY, Clients, Made, REVIEWED_WITHIN, SERVICE, Verdict, expected};
use crate::mesh::operator::{self, EVERYBODYS};
use crate::mesh::{self, until};

/// A replica that was killed, and when its part was taken over.
struct Killed {
    shard: String,
    /// Who owned what.
    table: Value,
    at: Instant,
    /// The Service sends nobody there any more.
    unlisted: Instant,
    /// A replica of the same shard is in its place.
    replaced: Instant,
}

/// How many websites are made at least: 1,000 of them, or a tenth.
fn wanted() -> usize {
    if is_full() { 1000 } else { 100 }
}

#[test]
fn replicas_judge_as_one_while_slots_move_and_one_is_killed() -> Result<()> {
    let _others = read(&EVERYBODYS);
    mesh::shared().case("verdicts", |space| {
        let runtime = Runtime::new()?;
        admission::deploy(space, &Authority::new(space)?, &runtime)?;
        ensure!(admission::answered(space, "owner")? > 0, "no review was answered by another replica");
        judged_in_moves(space, &runtime)?;
        runtime.block_on(admission::all_right_at_rest(space))?;
        admission::remove(space)
    })
}

/// Makes websites while slots move; in the middle a replica is killed.
fn judged_in_moves(space: Space<'_>, runtime: &Runtime) -> Result<()> {
    let clients = runtime.block_on(Clients::start(space))?;
    let reviewed = |more: usize| {
        let enough = clients.made() + more;
        until("reviews", || Ok((clients.made() >= enough).then_some(())))
    };
    let moves = wanted() / 25;
    let mut killed = None;
    for number in 1..=moves {
        admission::move_slots(space, &admission::third(space, number % 2)?)?;
        // Each owner is asked of what it was given.
        reviewed(12)?;
        if number == moves / 2 {
            killed = Some(kill(space)?);
            reviewed(12)?;
        }
    }
    until("all reviews", || Ok((clients.made() >= wanted()).then_some(())))?;
    let killed = killed.context("the replica to be killed")?;
    let all = runtime.block_on(clients.end())?;
    report(&all, moves, &killed)?;
    let wrong: Vec<String> = all.iter().filter_map(|made| wrong(made, &killed).transpose()).collect::<Result<_>>()?;
    ensure!(wrong.is_empty(), "{} of {} are wrong:\n{}", wrong.len(), all.len(), wrong.join("\n"));
    Ok(())
}

/// Ends a replica within a second, not the canary's, and waits until another one is in its place.
fn kill(space: Space<'_>) -> Result<Killed> {
    let pods = operator::pods(space)?;
    let shard = |pod: &Value| {
        pod["metadata"]["labels"]["ctrlmesh.kusionstack.io/sharding-config-injected"].as_str().map(str::to_owned)
    };
    let pod = pods.iter().find(|pod| shard(pod).is_some_and(|shard| shard != CANARY)).context("a replica to kill")?;
    let (name, shard) = (pod["metadata"]["name"].as_str().context("a name")?, shard(pod).context("a shard")?);
    let (table, at) = (admission::ownership(space)?, Instant::now());
    // Not by force: a pod that is gone before its containers have ended is called unread.
    space.kubectl(&["delete", "pod", name, "--grace-period=1", "--wait=false"])?;
    let unlisted = until("the Service to let go of it", || {
        Ok(endpoints(space)?.iter().all(|one| one["targetRef"]["name"] != name).then(Instant::now))
    })?;
    let replaced = until("a replica in its place", || {
        let ready = endpoints(space)?.iter().filter(|one| one["conditions"]["ready"] == true).count();
        Ok((ready == pods.len()).then(Instant::now))
    })?;
    Ok(Killed { shard, table, at, unlisted, replaced })
}

fn endpoints(space: Space<'_>) -> Result<Vec<Value>> {
    let ours = format!("--selector=kubernetes.io/service-name={SERVICE}");
    let slices: Value = serde_json::from_str(&space.kubectl(&["get", "endpointslices", &ours, "--output=json"])?)?;
    let slices = slices["items"].as_array().context("slices")?;
    Ok(slices.iter().flat_map(|slice| slice["endpoints"].as_array().into_iter().flatten()).cloned().collect())
}

/// Why what came of making a website is not what it should be. Only what is called while a replica that is gone may be
/// called may fail.
fn wrong(made: &Made, killed: &Killed) -> Result<Option<String>> {
    if made.verdict == expected(&made.namespace)? {
        return Ok(None);
    }
    let (before, after) = (killed.at.checked_duration_since(made.begun), made.begun.checked_duration_since(killed.at));
    let said = format!("{made}, begun {before:?} before or {after:?} after the kill of {}", killed.shard);
    if !matches!(made.verdict, Verdict::Failed(_)) {
        return Ok(Some(said));
    }
    // Only the killed replica's successor can answer for what is its own.
    let slot = NamespaceHash::default().slot(&made.namespace).to_string();
    let is_its_own = killed.table["slots"][slot] == killed.shard.as_str();
    let until = if is_its_own { killed.replaced } else { killed.unlisted } + REVIEWED_WITHIN;
    let is_of_the_kill = made.ended >= killed.at && made.ended <= until;
    Ok((!is_of_the_kill).then_some(said))
}

/// For people.
fn report(all: &[Made], moves: usize, killed: &Killed) -> Result<()> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for made in all {
        let kind = match &made.verdict {
            Verdict::Allowed(_) => "allowed",
            Verdict::Refused(_) => "refused",
            Verdict::Failed(_) => "failed",
        };
        *counts.entry(kind).or_default() += 1;
    }
    let slowest = all.iter().map(|made| made.ended - made.begun).max().unwrap_or_default();
    let since = |moment: Instant| -> Duration { moment - killed.at };
    let (unlisted, replaced) = (since(killed.unlisted), since(killed.replaced));
    writeln!(
        stderr(),
        "{counts:?} in {moves} moves, slowest {slowest:?}; unlisted {unlisted:?}, replaced {replaced:?} after the kill"
    )?;
    Ok(())
}

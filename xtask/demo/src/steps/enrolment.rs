//! Steps in which a running operator is enrolled by a rolling update, and leaves by one.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::ownership::UNSHARDED;
use jiff::Timestamp;

use super::share::same_in_the_end;
use super::{later, rule, third};
use crate::checks::{
    WHOLE_WITHIN, changed, followed, landed, only_by_proxy, only_own, seconds, shards, still, touched, worst, written,
};
use crate::environment::Environment;
use crate::rules::shard_of;
use crate::shares;
use crate::view::Table;
use crate::write_check::{Shards, shards_of};

/// How often an object is changed while the operator is rolled.
const CHANGED_EVERY: Duration = Duration::from_millis(50);

pub(super) fn sharded(environment: &Environment) -> Result<Vec<String>> {
    let handover = Handover::begin(environment)?;
    let load = environment.load(CHANGED_EVERY);
    let (moves, clock) = (Timestamp::now(), Instant::now());
    environment.shard(third(), &rule(third()))?;
    environment.enrol()?;
    environment.scale(3)?;
    let objects = environment.namespaces * environment.work.each();
    environment.observer.until("three shards", WHOLE_WITHIN, |table| {
        let complete = table.objects == objects && shards(table).len() == 3;
        table.is_divided() && table.is_acknowledged() && complete
    })?;
    let took = clock.elapsed();
    let settled = settled(environment, load.finish()?)?;
    environment.sharded.set(settled.end).ok().context("it is sharded already")?;
    environment.rules(|rules| rules.stand(settled.end))?;
    let table = environment.observer.table();
    ensure!(table.replicas.values().all(|one| one.works), "each works on its share: {table:#?}");
    landed(environment, third())?;
    let divided = shares::divided(environment)?;
    let (seen, bytes) = less_each(environment)?;
    let handed_over = handover.report("from the unsharded leader to their shard's replica", |space| {
        [UNSHARDED.to_owned(), shard_of(space, third())]
    })?;
    let parts: Vec<String> = table.replicas.values().map(|one| one.namespaces.to_string()).collect();
    let Handover { start, replicas: unsharded, .. } = handover;
    let unsharded: BTreeSet<String> = unsharded.into_keys().collect();
    Ok(vec![
        format!(
            "{} namespaces divided as {} by a rolling update under load, {} after the root was written",
            table.namespaces,
            parts.join(" + "),
            seconds(took)
        ),
        settled.report,
        handed_over,
        worst(&environment.observer.sampled(&(moves..settled.end)), "while it moved"),
        bytes,
        divided,
        seen,
        still(environment)?,
        only_by_proxy(environment, start, &unsharded)?,
        only_own(environment, start, &unsharded)?,
    ])
}

pub(super) fn left(environment: &Environment) -> Result<Vec<String>> {
    let reference = environment.reference.get().context("there is no reference")?;
    let handover = Handover::begin(environment)?;
    let before_it = still(environment)?;
    let load = environment.load(CHANGED_EVERY);
    let (moves, clock) = (Timestamp::now(), Instant::now());
    if environment.observer.operator().lock.is_none() {
        environment.scale(environment.observer.operator().replicas_alone())?;
    }
    environment.leave()?;
    environment.unshard()?;
    let took = clock.elapsed();
    environment
        .observer
        .until("one replica to have all", WHOLE_WITHIN, |table| table.is_divided() && shards(table).is_empty())?;
    let settled = settled(environment, load.finish()?)?;
    let working = environment.observer.table().replicas.values().filter(|one| one.works).count();
    ensure!(working == 1, "{working} replicas work");
    let whole = shares::whole(environment)?;
    let seen = changed(environment, 0)?;
    let handed_over = handover.report("from their shard's replica to the unsharded leader", |space| {
        [shard_of(space, later(environment)), UNSHARDED.to_owned()]
    })?;
    same_in_the_end(environment, reference)?;
    Ok(vec![
        format!("the label taken out by a rolling update under load, and the root gone, in {}", seconds(took)),
        settled.report,
        handed_over,
        worst(&environment.observer.sampled(&(moves..settled.end)), "while it moved"),
        whole,
        format!("{seen}; all is as one replica alone had made it"),
        format!("before: {before_it}"),
    ])
}

/// When all was done, after the load had made so many changes.
struct Settled {
    end: Timestamp,
    report: String,
}

fn settled(environment: &Environment, changes: u64) -> Result<Settled> {
    environment.observer.settle()?;
    let acknowledged = |table: &Table| table.epoch.is_none() || table.is_acknowledged();
    environment
        .observer
        .until("everything to be done", WHOLE_WITHIN, |table| table.is_whole() && acknowledged(table))?;
    let end = environment.observer.settle()?;
    Ok(Settled { end, report: format!("{changes} objects were changed meanwhile, and none was missed") })
}

/// What there was when a handover began.
struct Handover<'a> {
    environment: &'a Environment,
    start: Timestamp,
    /// The pods from before.
    replicas: Shards,
    /// How many requests the API server had refused to the operator.
    refused: u64,
}

impl<'a> Handover<'a> {
    /// Has each object changed by its owner.
    fn begin(environment: &'a Environment) -> Result<Self> {
        let start = Timestamp::now();
        touched(environment)?;
        let replicas = shards_of(&environment.observer.table());
        Ok(Self { environment, start, replicas, refused: refused(environment) })
    }

    /// That until now each object of the divided kinds was changed by its two owners only, and by the second one only
    /// after the first one's last change. `whose` says who they are.
    fn report(&self, whose: &str, owners: impl Fn(&str) -> [String; 2]) -> Result<String> {
        let environment = self.environment;
        let mut replicas = shards_of(&environment.observer.table());
        replicas.extend(self.replicas.clone());
        let kinds = || environment.work.kinds().iter().map(|kind| kind.resource());
        let (moved, unsharded) = written(environment, self.start, |write_check, span| {
            let write_check = write_check.clone().of_kinds(kinds());
            let is_unsharded = |pod: &str| replicas.get(pod).is_some_and(|owner| owner == UNSHARDED);
            let pods: BTreeSet<_> = write_check.writes(span).map(|write| &*write.pod).collect();
            let unsharded = pods.into_iter().filter(|pod| is_unsharded(pod)).count();
            Ok((write_check.moved(span, &replicas, owners)?, unsharded))
        })?;
        ensure!(moved.both > 0, "no object was changed by both its owners: in which order, nobody can tell");
        let turns = if unsharded > 1 { format!(" ({unsharded} leaders in turn)") } else { String::new() };
        Ok(format!(
            "audit log: {} changes of {} objects, none out of turn; {} changed hands once, {whose}{turns}; {} requests \
             refused by the API server",
            moved.changes,
            moved.objects,
            moved.both,
            refused(environment) - self.refused
        ))
    }
}

/// How many requests the API server has refused to the operator as forbidden.
fn refused(environment: &Environment) -> u64 {
    environment.observer.history(|history| history.pods().values().map(|activity| activity.refused).sum())
}

/// That each replica had to receive less than one alone has to, for the same: to follow a change of each object. Not by
/// how much: how often an operator writes an object until it has followed, and is told of it, is a matter of how busy
/// the machine is. How many objects each is shown, `shares` compares exactly.
fn less_each(environment: &Environment) -> Result<(String, String)> {
    let ((seen, each), alone) = (followed(environment)?, environment.alone.get().context("there is no reference")?);
    let shown: Vec<String> = each.iter().map(|bytes| format!("{:.0}", bytes / 1000.0)).collect();
    let shown = format!(
        "{} kB received while each followed a change of all its objects, alone {:.0} kB",
        shown.join(" + "),
        alone / 1000.0
    );
    ensure!(are_less(&each, *alone), "{shown}: not less");
    Ok((seen, shown))
}

/// Whether each is less than what one alone received.
fn are_less(each: &[f64], alone: f64) -> bool {
    !each.is_empty() && each.iter().all(|bytes| *bytes < alone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replica_that_receives_nearly_as_much_as_one_alone_is_found() {
        assert!(are_less(&[420.0, 380.0, 990.0], 1000.0));
        assert!(!are_less(&[420.0, 380.0, 1000.0], 1000.0));
        assert!(!are_less(&[], 1000.0), "nobody said anything");
    }
}

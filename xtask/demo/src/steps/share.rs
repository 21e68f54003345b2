//! Steps that change what there is, or who owns it: one replica alone, a canary, more namespaces, and the end.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use jiff::Timestamp;

use super::{MOVED, later, rule, third};
use crate::checks::{
    WHOLE_WITHIN, changed, followed, is_seen, landed, of_shard, only_by_proxy, only_own, same_replicas, seconds,
    steady, still, touched, worst,
};
use crate::environment::{Environment, LOOK_EVERY};
use crate::history::{AuditHistory, Span};
use crate::install;
use crate::observer::since;
use crate::rules::shard_of;
use crate::shares;
use crate::view::{Table, World};
use crate::work::{self, OperatorObjects};
use crate::write_check::{WriteCheck, shards_of};

/// How many namespaces come later.
pub(super) const ADDED: usize = 12;

/// How long what is still on its way to an old owner may take.
const ON_ITS_WAY: Duration = Duration::from_secs(5);

/// The shard that has the slice of the canary.
const CANARY: &str = "share-0-canary";

pub(super) fn unsharded(environment: &Environment) -> Result<Vec<String>> {
    let start = Timestamp::now();
    let replicas = environment.observer.operator().replicas_alone();
    environment.scale(replicas)?;
    for number in 0..environment.namespaces {
        environment.make(number)?;
    }
    let objects = environment.namespaces * environment.work.each();
    let took = environment
        .observer
        .until("one replica to do all the work", WHOLE_WITHIN, |table| table.is_whole() && table.objects == objects)?;
    let table = environment.observer.table();
    let working = table.replicas.values().filter(|one| one.works).count();
    ensure!(working == 1, "{working} replicas work: {table:#?}");
    let (seen, bytes) = followed(environment)?;
    let most = bytes.into_iter().fold(0.0, f64::max);
    environment.alone.set(most).ok().context("the reference is there already")?;
    changed(environment, 0)?;
    let made = environment.made(0..environment.namespaces)?;
    let (count, said) = work::count(&made);
    // Each has something of its own, and something is said of each.
    ensure!(count >= objects && said == objects, "{count} objects were made of {objects}, {said} statuses");
    environment.reference.set(made).ok().context("the reference is there already")?;
    let whole = shares::whole(environment)?;
    environment.is_seen.set(is_seen(environment, start)?).ok().context("the reference is there already")?;
    let watching = table.replicas.values().filter(|one| one.objects == objects).count();
    Ok(vec![
        format!(
            "{objects} objects in {} namespaces, {count} made of them after {}",
            environment.namespaces,
            seconds(took)
        ),
        format!("1 of {replicas} works; {watching} of {replicas} watch all {objects} objects"),
        seen,
        format!("it received {:.0} kB meanwhile", most / 1000.0),
        whole,
    ])
}

pub(super) fn canary(environment: &Environment) -> Result<Vec<String>> {
    let before = environment.observer.table();
    let (first, had) = of_shard(&before, CANARY)?;
    let spaces: Vec<String> = (0..environment.namespaces).map(install::namespace).collect();
    let (old, new) = (third(), later(environment));
    let joins = |one: &&String| shard_of(one, new) == CANARY && shard_of(one, old) != CANARY;
    let moving = spaces.iter().filter(joins).count();
    ensure!(moving >= MOVED, "the rule would move {moving} namespaces only, not {MOVED}");
    let start = Timestamp::now();
    let load = environment.load(Duration::from_millis(100));
    let before_it = steady_until_written(environment, start)?;
    // All has been changed by its old owner since then.
    let under_it = environment.rules(|rules| rules.still()).context("it moves")?.since;
    let (changed_at, clock) = (Timestamp::now(), Instant::now());
    environment.shard(new, &rule(new))?;
    let known = AcknowledgedEpoch::default();
    environment.observer.until("the canary's slice", WHOLE_WITHIN, |table| {
        let replica = table.replicas.get(&first);
        let has_it = replica.is_some_and(|one| one.namespaces == had + moving);
        known.look(table) > before.epoch && table.is_divided() && has_it
    })?;
    thread::sleep(ON_ITS_WAY);
    let changed = load.finish()?;
    environment.observer.settle()?;
    environment
        .observer
        .until("everything to be done", WHOLE_WITHIN, |table| known.look(table) == table.epoch && table.is_whole())?;
    let settled = Timestamp::now();
    let (acknowledged, took) = known.since(clock).context("no epoch was acknowledged")?;
    let seen = touched(environment)?;
    landed(environment, new)?;
    let after = environment.observer.table();
    same_replicas(&before, &after)?;
    let (_, has) = of_shard(&after, CANARY)?;
    ensure!(has == had + moving, "{had} -> {has} namespaces, not {moving} more");
    let span = changed_at..settled;
    let in_turn = in_turn(environment, &(under_it..environment.observer.settle()?), acknowledged)?;
    environment.rules(|rules| rules.stand(settled))?;
    Ok(vec![
        format!(
            "{moving} namespaces moved to {first}: {had} -> {has}; acknowledged by all in {}, 0 restarts",
            seconds(took)
        ),
        format!("{changed} objects were changed meanwhile, none missed; each by its old or its new replica only"),
        in_turn,
        worst(&environment.observer.sampled(&span), "while it moved"),
        seen,
        format!("before: {before_it}"),
        format!("afterwards: {}", steady(environment, settled)?),
    ])
}

/// That in `span`, in which it moved, each object of the divided kinds was changed by its old owner, and then by its
/// new one; and by the old one no more once the last epoch was acknowledged by all. Of other kinds, that no third one
/// did.
fn in_turn(environment: &Environment, span: &Span, acknowledged: Timestamp) -> Result<String> {
    let (old, new) = (third(), later(environment));
    let owners = |space: &str| [shard_of(space, old), shard_of(space, new)];
    let replicas = shards_of(&environment.observer.table());
    let kinds = environment.work.kinds().iter().map(|kind| kind.resource());
    let moved = environment.observer.both(|world, history| {
        let write_check = WriteCheck::of(world, history);
        write_check.own(span, &replicas, |space| owners(space).to_vec())?;
        let fenced = write_check.of_kinds(kinds);
        let late = acknowledged..span.end;
        fenced.own(&late, &replicas, |space| vec![shard_of(space, new)]).context("when all knew the last epoch")?;
        fenced.moved(span, &replicas, owners)
    })?;
    ensure!(moved.both > 0, "no object was changed by both its owners, so nobody can tell in which order they would");
    Ok(format!(
        "audit log: {} changes of {} objects, none out of turn; {} changed hands once, from the old owner to the new one; 0 \
         changes by the old one after that, or once all proxies had acknowledged the last epoch",
        moved.changes, moved.objects, moved.both
    ))
}

/// Since when every proxy has acknowledged the present epoch. One change of the rule may cause several epochs.
#[derive(Debug, Default)]
struct AcknowledgedEpoch(Cell<Option<(i64, Timestamp, Instant)>>);

impl AcknowledgedEpoch {
    /// Looks; gives the epoch that all know, if all know one.
    fn look(&self, table: &Table) -> Option<i64> {
        let epoch = table.epoch.filter(|_| table.is_acknowledged())?;
        if self.0.get().is_none_or(|(known, ..)| known != epoch) {
            self.0.set(Some((epoch, Timestamp::now(), Instant::now())));
        }
        Some(epoch)
    }

    /// When that was, and how long after `start`.
    fn since(&self, start: Instant) -> Option<(Timestamp, Duration)> {
        let (_, at, clock) = self.0.get()?;
        Some((at, clock.duration_since(start)))
    }
}

/// That no object is changed by two replicas under the old rule, once something was changed under it.
fn steady_until_written(environment: &Environment, start: Timestamp) -> Result<String> {
    let written =
        |world: &World, history: &AuditHistory| WriteCheck::of(world, history).writes(&since(start)).next().is_some();
    environment
        .until("the load to be followed", WHOLE_WITHIN, || Ok(environment.observer.both(written).then_some(())))?;
    still(environment)
}

pub(super) fn added(environment: &Environment) -> Result<Vec<String>> {
    let start = Timestamp::now();
    let clock = Instant::now();
    let numbers = environment.namespaces..environment.namespaces + ADDED;
    for number in numbers.clone() {
        environment.make(number)?;
    }
    let objects = numbers.end * environment.work.each();
    environment.observer.until("the new namespaces", WHOLE_WITHIN, |table| {
        table.is_whole() && table.is_acknowledged() && table.objects == objects
    })?;
    let took = seconds(clock.elapsed());
    landed(environment, later(environment))?;
    let new: BTreeSet<String> = numbers.map(install::namespace).collect();
    let shares = environment.observer.both(|world, history| {
        let mut shares: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
        for work in world.work.iter().filter(|work| new.contains(&work.namespace)) {
            for owner in world.owners(work, history) {
                let shard = world.pods[owner].shard.clone().unwrap_or_default();
                shares.entry(shard).or_default().insert(&work.namespace);
            }
        }
        let shares = shares.into_iter().map(|(shard, spaces)| format!("{} to {shard}", spaces.len()));
        shares.collect::<Vec<_>>().join(", ")
    });
    Ok(vec![
        format!("{ADDED} namespaces: {shares}; everything in them done {took} after the first was made"),
        steady(environment, start)?,
    ])
}

pub(super) fn end_state(environment: &Environment) -> Result<Vec<String>> {
    let start = Timestamp::now();
    let gone = deleted(environment)?;
    touched(environment)?;
    let seen = changed(environment, 0)?;
    let reference = environment.reference.get().context("there is no reference")?;
    same_in_the_end(environment, reference)?;
    let (objects, statuses) = work::count(reference);
    // Whatever started, restarted and was killed since.
    let sharded = *environment.sharded.get().context("it was never sharded")?;
    Ok(vec![
        gone,
        seen,
        format!("{objects} objects and {statuses} statuses are what one replica alone has made and said"),
        steady(environment, start)?,
        still(environment)?,
        only_by_proxy(environment, sharded, &BTreeSet::new())?,
        only_own(environment, sharded, &BTreeSet::new())?,
    ])
}

/// Deletes what was added, and waits until nothing of it is left: an operator that puts a finaliser on its work has to
/// take it away, which whoever does not see the object cannot.
fn deleted(environment: &Environment) -> Result<String> {
    let clock = Instant::now();
    let numbers = environment.namespaces..environment.namespaces + ADDED;
    let mut objects = 0;
    for number in numbers.clone() {
        objects += environment.unmake(number)?;
    }
    ensure!(objects == ADDED * environment.work.each(), "{objects} objects were added");
    environment.until("all of what was deleted to be gone", WHOLE_WITHIN, || {
        Ok(environment.made(numbers.clone())?.is_empty().then_some(()))
    })?;
    let left = environment.namespaces * environment.work.each();
    environment
        .observer
        .until("what was deleted to be gone", WHOLE_WITHIN, |table| table.is_whole() && table.objects == left)?;
    let took = seconds(clock.elapsed());
    Ok(format!("{objects} objects deleted, let go of, and gone with what was made of them, in {took}"))
}

/// That all is as one replica alone has left it. What an operator says of its work may come a moment after the work.
pub(super) fn same_in_the_end(environment: &Environment, reference: &OperatorObjects) -> Result<()> {
    let deadline = Instant::now() + ON_ITS_WAY;
    while let Some(difference) = work::difference(&environment.made(0..environment.namespaces)?, reference) {
        ensure!(Instant::now() < deadline, "{difference}");
        thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

//! A step in which the operator is scaled, and the shares follow.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ctrlmesh_common::slots::COUNT;
use jiff::Timestamp;
use serde_json::json;

use super::{later, rule};
use crate::checks::{WHOLE_WITHIN, seconds, shards, touched, worst, written};
use crate::environment::Environment;
use crate::observer::since;
use crate::view::Table;
use crate::write_check::none;

/// To how many replicas it is scaled, one after the other.
const REPLICAS: [usize; 3] = [3, 5, 2];

/// More than there are ever replicas.
const SHARDS: usize = 8;

/// How often an object is changed meanwhile.
const CHANGED_EVERY: Duration = Duration::from_millis(100);

pub(super) fn followed(environment: &Environment) -> Result<Vec<String>> {
    let start = Timestamp::now();
    let load = environment.load(CHANGED_EVERY);
    let is_enrolled = environment.observer.table().epoch.is_some();
    environment.divide(&json!({"auto": {"shardingSize": SHARDS}}))?;
    if !is_enrolled {
        environment.enrol()?;
    }
    let mut lines = Vec::new();
    for replicas in REPLICAS {
        lines.push(scaled(environment, replicas)?);
    }
    let changed = load.finish()?;
    let seen = touched(environment)?;
    lines.push(format!("{changed} objects were changed meanwhile, and none was missed; {seen}"));
    lines.push(worst(&environment.observer.sampled(&since(start)), "meanwhile"));
    // As it was before.
    environment.shard(later(environment), &rule(later(environment)))?;
    environment.scale(3)?;
    let objects = environment.observer.table().objects;
    environment.observer.until("the shards from before", WHOLE_WITHIN, |table| {
        let complete = table.objects == objects && shards(table).len() == 3;
        table.is_whole() && table.is_acknowledged() && complete
    })?;
    Ok(lines)
}

/// Scales it, and waits until all of its replicas have equal parts. Each object changes hands once at most meanwhile,
/// and no replica that stays is restarted.
fn scaled(environment: &Environment, replicas: usize) -> Result<String> {
    let before = environment.observer.table();
    let (start, clock) = (Timestamp::now(), Instant::now());
    environment.scale(replicas)?;
    let slots = environment.until("equal parts", WHOLE_WITHIN, || {
        let slots = environment.slots()?;
        let fewest = usize::from(COUNT) / replicas;
        let even = slots.len() == replicas && slots.values().all(|count| (fewest..=fewest + 1).contains(count));
        Ok(even.then_some(slots))
    })?;
    let took = clock.elapsed();
    // The observer may not have seen all the replicas yet, or not that some are gone.
    environment.observer.until("all to be done", WHOLE_WITHIN, |table| {
        table.is_whole() && table.is_acknowledged() && working(table).len() == replicas
    })?;
    let after = environment.observer.table();
    not_restarted(&before, &after)?;
    let changes = written(environment, start, |write_check, span| {
        let again = write_check.conflicts(|history| history.returned(span));
        none("changed again by a replica that had lost them", &again)?;
        Ok(write_check.writes(span).count())
    })?;
    let parts =
        |counts: &mut dyn Iterator<Item = usize>| counts.map(|count| count.to_string()).collect::<Vec<_>>().join(" + ");
    Ok(format!(
        "{replicas} replicas, {} after they were asked for: {} slots, {} namespaces; audit log: {changes} changes, none out \
         of turn; 0 restarts",
        seconds(took),
        parts(&mut slots.into_values()),
        parts(&mut working(&after).into_values()),
    ))
}

/// The namespaces that each replica that works has. With few namespaces, a replica may have none in its slots.
fn working(table: &Table) -> BTreeMap<&String, usize> {
    table.replicas.iter().filter(|(_, one)| one.works).map(|(name, one)| (name, one.namespaces)).collect()
}

fn not_restarted(before: &Table, after: &Table) -> Result<()> {
    for (name, one) in &before.replicas {
        let now = after.replicas.get(name).map(|now| now.restarts);
        ensure!(now.is_none_or(|now| now == one.restarts), "{name} was restarted");
    }
    Ok(())
}

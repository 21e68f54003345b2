//! Says for people how roots and shards by hand stand.
//!
//! Pure.

use ctrlmesh_common::slots::COUNT;
use jiff::Timestamp;

use super::overview::{Overview, Problem};
use super::shards::{PodOverview, ShardOverview};
use crate::text::{cut, dash, described, line, ranges, since, table};

/// Of a selector in a table, in characters. One may name thousands of namespaces.
const SELECTOR_WIDTH: usize = 100;

/// Columns of what shards own by the table of their root.
const OWNED: [&str; 2] = ["SLOTS", "NAMESPACES"];

/// A line for each.
pub(super) fn list(all: &[Overview], with_namespace: bool) -> String {
    let head = ["NAMESPACE", "NAME", "WORKLOAD", "SHARDS", "PODS", "OWNED", "EPOCH", "TRIAL", "STATE"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(all.iter().map(row));
    if !with_namespace {
        for row in &mut rows {
            row.remove(0);
        }
    }
    table(&rows, "")
}

/// One screen about a root, or about a shard by hand.
pub(super) fn screen(one: &Overview, is_wide: bool, now: Timestamp) -> String {
    let Overview { namespace, name, .. } = one;
    let mut fields = vec![match &one.workload {
        Some(workload) => ("Root", format!("{namespace}/{name}, {workload}")),
        None => ("Shard", format!("{namespace}/{name}, by hand")),
    }];
    if one.disabled {
        fields
            .push(("Owned", "nothing by slot: the root is switched off, and each shard goes by its limits".to_owned()));
    } else {
        fields.push(("Epoch", one.epoch.map_or_else(|| "none yet".to_owned(), |epoch| epoch.to_string())));
    }
    if one.divides() {
        fields.push(("Owned", owned(one)));
    }
    if !one.unowned_namespaces.is_empty() {
        fields.push(("Moving", format!("namespaces {}", one.unowned_namespaces.join(", "))));
    }
    if let Some(trial) = &one.trial {
        let what = format!("revision {}: {:?}, step {} of {}", trial.revision, trial.phase, trial.step, trial.steps);
        fields.push(("Trial", what));
    }
    fields.push(("State", state(one)));
    let shards = if is_wide { pods(one, now) } else { shards(one) };
    described(&fields) + &shards + &limits(one) + &problems(&one.problems, now) + &breakers(one)
}

fn row(one: &Overview) -> Vec<String> {
    let pods = one.shards.iter().flat_map(|shard| &shard.pods);
    let trial = one.trial.as_ref();
    let owned = || format!("{}/{COUNT}", usize::from(COUNT) - one.unowned_slots.len());
    vec![
        one.namespace.clone(),
        one.name.clone(),
        one.workload.clone().unwrap_or_else(dash),
        if one.is_root { one.busy_shards().count().to_string() } else { dash() },
        current(pods),
        if one.divides() { owned() } else { dash() },
        one.epoch.map_or_else(dash, |epoch| epoch.to_string()),
        trial.map_or_else(dash, |trial| format!("{:?} {}/{}", trial.phase, trial.step, trial.steps)),
        state(one),
    ]
}

/// In a few words.
fn state(one: &Overview) -> String {
    let mut words: Vec<String> = Vec::new();
    if one.disabled {
        words.push("switched off".to_owned());
    } else if one.is_well() {
        words.push("all is well".to_owned());
    }
    for problem in &one.problems {
        let word = format!("{}: {}", problem.condition, problem.reason);
        if !words.contains(&word) {
            words.push(word);
        }
    }
    if !one.open_breakers.is_empty() {
        words.push(format!("open breakers: {}", one.open_breakers.len()));
    }
    if words.is_empty() && !one.unowned_slots.is_empty() {
        words.push(format!("slots {} belong to nobody", ranges(&one.unowned_slots)));
    }
    if words.is_empty() {
        words.push(format!("namespaces {} belong to nobody", one.unowned_namespaces.join(",")));
    }
    words.join(", ")
}

fn owned(root: &Overview) -> String {
    let owned = format!("{} of {COUNT} slots", usize::from(COUNT) - root.unowned_slots.len());
    if root.unowned_slots.is_empty() {
        return owned;
    }
    format!("{owned}; {} belong to nobody", ranges(&root.unowned_slots))
}

/// A line for each shard.
fn shards(one: &Overview) -> String {
    let owned = if one.divides() { &OWNED[..] } else { &[] };
    let mut rows = vec![[&["SHARD", "PODS"][..], owned].concat().into_iter().map(str::to_owned).collect()];
    rows.extend(one.busy_shards().map(|shard| {
        let mut row = vec![shard.name.clone(), current(shard.pods.iter())];
        row.extend(owns(one, shard));
        row
    }));
    format!("\n{}", table(&rows, ""))
}

/// A line for each pod.
fn pods(one: &Overview, now: Timestamp) -> String {
    let owned = if one.divides() { &OWNED[..] } else { &[] };
    let head = [&["SHARD"][..], &PodOverview::HEAD, owned].concat();
    let mut rows = vec![head.into_iter().map(str::to_owned).collect()];
    for shard in one.busy_shards() {
        let (name, owns) = ([shard.name.clone()], owns(one, shard));
        let row = |pod: [String; 4]| [&name[..], &pod, &owns].concat();
        if shard.pods.is_empty() {
            rows.push(row([dash(), dash(), dash(), dash()]));
        }
        rows.extend(shard.pods.iter().map(|pod| row(pod.cells(now))));
    }
    format!("\n{}", table(&rows, ""))
}

/// By what shards that stand alone see objects.
fn limits(one: &Overview) -> String {
    let mut rows = vec![["SHARD", "RESOURCES", "SELECTOR"].map(str::to_owned).to_vec()];
    for shard in one.busy_shards() {
        rows.extend(
            shard
                .limits
                .iter()
                .map(|limit| vec![shard.name.clone(), limit.resources.join(","), cut(&limit.selector, SELECTOR_WIDTH)]),
        );
    }
    if rows.len() == 1 { String::new() } else { format!("\nLimits:\n{}", table(&rows, "  ")) }
}

/// How many pods have the newest epoch, of all.
fn current<'p>(pods: impl Iterator<Item = &'p PodOverview> + Clone) -> String {
    format!("{}/{}", pods.clone().filter(|pod| pod.current).count(), pods.count())
}

/// The cells below [`OWNED`], where there are these columns.
fn owns(one: &Overview, shard: &ShardOverview) -> Vec<String> {
    if !one.divides() {
        return Vec::new();
    }
    let or_dash = |text: String| if text.is_empty() { dash() } else { text };
    vec![or_dash(ranges(&shard.slots)), or_dash(shard.namespaces.join(","))]
}

fn problems(problems: &[Problem], now: Timestamp) -> String {
    if problems.is_empty() {
        return String::new();
    }
    let mut rows = vec![["OF", "CONDITION", "REASON", "FOR", "MESSAGE"].map(str::to_owned).to_vec()];
    rows.extend(problems.iter().map(|one| {
        let condition = [&one.of, &one.condition, &one.reason].map(Clone::clone).to_vec();
        [condition, vec![since(one.since, now), line(&one.message)]].concat()
    }));
    format!("\nProblems:\n{}", table(&rows, "  "))
}

fn breakers(root: &Overview) -> String {
    if root.open_breakers.is_empty() {
        return String::new();
    }
    let mut rows = vec![["CIRCUITBREAKER", "LIMIT", "POD"].map(str::to_owned).to_vec()];
    rows.extend(root.open_breakers.iter().map(|one| vec![one.breaker.clone(), one.limit.clone(), one.pod.clone()]));
    format!("\nOpen breakers:\n{}", table(&rows, "  "))
}

#[cfg(test)]
mod tests;

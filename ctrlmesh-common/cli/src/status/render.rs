//! Says for people how roots stand.
//!
//! Pure.

use ctrlmesh_common::slots::{COUNT, Slot};
use jiff::Timestamp;

use super::overview::{PodOverview, Problem, RootOverview, ShardOverview};
use crate::text::{dash, described, line, since, table};

/// A line for each root.
pub(super) fn list(roots: &[RootOverview], with_namespace: bool) -> String {
    let head = ["NAMESPACE", "NAME", "WORKLOAD", "SHARDS", "PODS", "OWNED", "EPOCH", "TRIAL", "STATE"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(roots.iter().map(row));
    if !with_namespace {
        for row in &mut rows {
            row.remove(0);
        }
    }
    table(&rows, "")
}

/// One screen about a root.
pub(super) fn screen(root: &RootOverview, is_wide: bool, now: Timestamp) -> String {
    let mut fields = vec![
        ("Root", format!("{}/{}, {}", root.namespace, root.name, root.workload)),
        ("Epoch", root.epoch.map_or_else(|| "none yet".to_owned(), |epoch| epoch.to_string())),
        ("Owned", owned(root)),
    ];
    if !root.unowned_namespaces.is_empty() {
        fields.push(("Moving", format!("namespaces {}", root.unowned_namespaces.join(", "))));
    }
    if let Some(trial) = &root.trial {
        let what = format!("revision {}: {:?}, step {} of {}", trial.revision, trial.phase, trial.step, trial.steps);
        fields.push(("Trial", what));
    }
    fields.push(("State", state(root)));
    let shards = if is_wide { pods(root, now) } else { shards(root) };
    described(&fields) + &shards + &problems(&root.problems, now) + &breakers(root)
}

fn row(root: &RootOverview) -> Vec<String> {
    let pods = root.shards.iter().flat_map(|shard| &shard.pods);
    let trial = root.trial.as_ref();
    vec![
        root.namespace.clone(),
        root.name.clone(),
        root.workload.clone(),
        root.busy_shards().count().to_string(),
        current(pods),
        format!("{}/{COUNT}", usize::from(COUNT) - root.unowned_slots.len()),
        root.epoch.map_or_else(dash, |epoch| epoch.to_string()),
        trial.map_or_else(dash, |trial| format!("{:?} {}/{}", trial.phase, trial.step, trial.steps)),
        state(root),
    ]
}

/// In a few words.
fn state(root: &RootOverview) -> String {
    if root.disabled {
        return "switched off".to_owned();
    }
    if root.is_well() {
        return "all is well".to_owned();
    }
    let mut words: Vec<String> = Vec::new();
    for problem in &root.problems {
        let word = format!("{}: {}", problem.condition, problem.reason);
        if !words.contains(&word) {
            words.push(word);
        }
    }
    if !root.open_breakers.is_empty() {
        words.push(format!("open breakers: {}", root.open_breakers.len()));
    }
    if words.is_empty() {
        words.push(format!("slots {} belong to nobody", ranges(&root.unowned_slots)));
    }
    words.join(", ")
}

fn owned(root: &RootOverview) -> String {
    let owned = format!("{} of {COUNT} slots", usize::from(COUNT) - root.unowned_slots.len());
    if root.unowned_slots.is_empty() {
        return owned;
    }
    format!("{owned}; {} belong to nobody", ranges(&root.unowned_slots))
}

/// A line for each shard.
fn shards(root: &RootOverview) -> String {
    let mut rows = vec![["SHARD", "PODS", "SLOTS", "NAMESPACES"].map(str::to_owned).to_vec()];
    rows.extend(root.busy_shards().map(|shard| {
        let [slots, namespaces] = owns(shard);
        vec![shard.name.clone(), current(shard.pods.iter()), slots, namespaces]
    }));
    format!("\n{}", table(&rows, ""))
}

/// A line for each pod.
fn pods(root: &RootOverview, now: Timestamp) -> String {
    let head = [&["SHARD"][..], &PodOverview::HEAD, &["SLOTS", "NAMESPACES"]].concat();
    let mut rows = vec![head.into_iter().map(str::to_owned).collect()];
    for shard in root.busy_shards() {
        let (name, owns) = ([shard.name.clone()], owns(shard));
        let row = |pod: [String; 4]| [&name[..], &pod, &owns].concat();
        if shard.pods.is_empty() {
            rows.push(row([dash(), dash(), dash(), dash()]));
        }
        rows.extend(shard.pods.iter().map(|pod| row(pod.cells(now))));
    }
    format!("\n{}", table(&rows, ""))
}

/// How many pods have the epoch of their root, of all.
fn current<'p>(pods: impl Iterator<Item = &'p PodOverview> + Clone) -> String {
    format!("{}/{}", pods.clone().filter(|pod| pod.current).count(), pods.count())
}

fn owns(shard: &ShardOverview) -> [String; 2] {
    let or_dash = |text: String| if text.is_empty() { dash() } else { text };
    [or_dash(ranges(&shard.slots)), or_dash(shard.namespaces.join(","))]
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

fn breakers(root: &RootOverview) -> String {
    if root.open_breakers.is_empty() {
        return String::new();
    }
    let mut rows = vec![["CIRCUITBREAKER", "LIMIT", "POD"].map(str::to_owned).to_vec()];
    rows.extend(root.open_breakers.iter().map(|one| vec![one.breaker.clone(), one.limit.clone(), one.pod.clone()]));
    format!("\nOpen breakers:\n{}", table(&rows, "  "))
}

/// Neighbours as one range: `0-3,7`.
fn ranges(slots: &[Slot]) -> String {
    let mut parts: Vec<(u8, u8)> = Vec::new();
    for slot in slots.iter().map(|slot| slot.number()) {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == slot => *last = slot,
            _ => parts.push((slot, slot)),
        }
    }
    let text = |(first, last): &(u8, u8)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    parts.iter().map(text).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests;

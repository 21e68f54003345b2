//! Prints a plan for people.
//!
//! Pure.

use std::fmt::Display;

use ctrlmesh_common::ownership::UNSHARDED;
use ctrlmesh_common::slots::Slot;

use super::Plan;
use super::change::{Move, Owned, RootPlan, ShardPlan};
use crate::text::{dash, described, ranges, table};

/// What a plan comes to, a paragraph a root.
pub(super) fn screen(plan: &Plan) -> String {
    let parts = plan.roots.iter().map(root).chain(not_counted(&plan.not_counted));
    parts.collect::<Vec<_>>().join("\n")
}

/// A paragraph on resources whose objects cannot be listed. `None`: there are none.
pub(crate) fn not_counted(reasons: &[String]) -> Option<String> {
    (!reasons.is_empty()).then(|| format!("Not counted:\n  {}\n", reasons.join("\n  ")))
}

/// What is planned for one root.
pub(crate) fn root(plan: &RootPlan) -> String {
    let state = match plan {
        RootPlan { is_off: true, .. } => "it is switched off: nothing moves, and its shards stay as they are",
        RootPlan { is_new: true, .. } => "it is new",
        one if one.moves_anything() => "it is there, and something moves",
        _ => "it is there, and nothing moves",
    };
    let ratio = |ratio: Option<f64>| ratio.map_or_else(dash, |ratio| format!("{ratio:.2}"));
    let mut fields =
        vec![("Root", format!("{}/{}, {}", plan.namespace, plan.name, plan.workload)), ("State", state.to_owned())];
    if !plan.is_off {
        let imbalance = format!("{} -> {}", ratio(plan.imbalance_before), ratio(plan.imbalance_after));
        fields.push(("Objects", plan.objects().to_string()));
        fields.push(("Imbalance", format!("{imbalance}: the most objects of a shard, to the mean")));
        if let (before, Some(after)) = (plan.load_imbalance_before, plan.load_imbalance_after) {
            let change = format!("{} -> {}", ratio(before), ratio(Some(after)));
            fields.push(("Load", format!("{change}: the most requests of a shard, to the mean")));
        }
        if !plan.selection.is_empty() {
            fields.push(("Selects", plan.selection.join(", ")));
        }
        fields.push(("Restarts", listed(&plan.restarted_pods, "no pod")));
        let reads = match plan.changed_pods.len() {
            0 => "none".to_owned(),
            pods => format!("three for each open watch of {pods} pod(s); nothing is listed anew"),
        };
        fields.push(("Reads", reads));
        fields.extend(plan.expected_seconds.map(|seconds| ("Time", time(seconds, &plan.late_pods))));
    }
    let mut parts = vec![described(&fields)];
    if !plan.shards.is_empty() {
        parts.push(shards(&plan.shards));
    }
    if plan.moves_anything() {
        parts.push(format!("Moves:\n{}", moves(&plan.moves)));
    }
    if !plan.pending.is_empty() {
        parts.push(format!("Slots {} are not with their shard yet, with or without this.\n", ranges(&plan.pending)));
    }
    if plan.is_elastic && !plan.is_off {
        let follow = "Of what its normal shards own here, those with a ready pod have equal parts, once there is one.";
        parts.push(format!("The root is elastic. {follow}\n"));
    }
    if !plan.without_pods.is_empty() {
        let names = plan.without_pods.join(", ");
        let stays = "With a fence, what they gain stays with its owner until one serves.";
        parts.push(format!("Without a pod: {names}. {stays}\n"));
    }
    parts.join("\n")
}

/// How long moving takes.
fn time(usual: f64, late: &[String]) -> String {
    let longest = RootPlan::longest_seconds();
    match late {
        [] => format!("about {usual} s; up to {longest} s where a proxy does not answer"),
        late => format!("up to {longest} s: the proxies of {} are not at the newest epoch", late.join(", ")),
    }
}

fn shards(shards: &[ShardPlan]) -> String {
    let has_load = shards.iter().any(|shard| shard.before.requests_per_second.is_some());
    let load = has_load.then(|| "REQUESTS/S".to_owned());
    let head = ["SHARD", "SLOTS", "NAMESPACES", "OBJECTS"].map(str::to_owned).into_iter().chain(load).collect();
    let row = |shard: &ShardPlan| {
        let (before, after) = (&shard.before, &shard.after);
        let requests = |owned: &Owned| owned.requests_per_second.map(|count| format!("{count:.1}"));
        let load = requests(before).zip(requests(after)).map(|(before, after)| changed(before, after));
        let cells = [
            owner(Some(&shard.name)),
            changed(slots(&before.slots), slots(&after.slots)),
            changed(listed(&before.namespaces, "-"), listed(&after.namespaces, "-")),
            changed(before.objects, after.objects),
        ];
        cells.into_iter().chain(load).collect()
    };
    table(&[head].into_iter().chain(shards.iter().map(row)).collect::<Vec<_>>(), "")
}

fn moves(moves: &[Move]) -> String {
    let head = ["FROM", "TO", "SLOTS", "NAMESPACES", "OBJECTS"].map(str::to_owned).to_vec();
    let row = |one: &Move| {
        let (from, to) = (owner(one.from.as_deref()), owner(one.to.as_deref()));
        vec![from, to, slots(&one.slots), listed(&one.namespaces, "-"), one.objects.to_string()]
    };
    table(&[head].into_iter().chain(moves.iter().map(row)).collect::<Vec<_>>(), "  ")
}

fn owner(owner: Option<&str>) -> String {
    match owner {
        None => "(nobody)".to_owned(),
        Some(UNSHARDED) => "(pods that are not enrolled)".to_owned(),
        Some(shard) => shard.to_owned(),
    }
}

/// Once, if both are the same.
fn changed(before: impl Display, after: impl Display) -> String {
    let (before, after) = (before.to_string(), after.to_string());
    if before == after { before } else { format!("{before} -> {after}") }
}

fn slots(slots: &[Slot]) -> String {
    if slots.is_empty() { dash() } else { ranges(slots) }
}

fn listed(names: &[String], none: &str) -> String {
    if names.is_empty() { none.to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests;

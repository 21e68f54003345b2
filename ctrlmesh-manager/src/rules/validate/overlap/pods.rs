//! Finds pods that would be in two shards.

use std::collections::{BTreeSet, HashSet};

use ctrlmesh_common::api::{Root, ShardingConfig};
use ctrlmesh_common::selector::{Condition, Selector};

use super::affiliation::{self, Affiliation};
use super::{Report, target_field};
use crate::rules::object_name::name;
use crate::rules::pod::Member;

/// Refuses a selector that means the same as another shard's, even if no pod exists. The operator does not
/// matter.
pub(in crate::rules::validate) fn of_selectors(
    config: &ShardingConfig,
    others: &[&ShardingConfig],
    report: &mut Report,
) {
    let Some(selector) = pod_selector(config) else {
        return;
    };
    let requirements = |selector: &Selector| -> HashSet<(String, Condition)> {
        let requirements = selector.requirements().iter();
        requirements.map(|one| (one.key().to_owned(), in_one_way(one.condition()))).collect()
    };
    let mine = requirements(&selector);
    let same = |other: &&&ShardingConfig| {
        other.spec.root.is_none() && pod_selector(other).is_some_and(|one| requirements(&one) == mine)
    };
    if let Some(other) = others.iter().find(same) {
        let name = name(&other.metadata);
        report.error(
            "spec.selector",
            format!("selects the same pods as ShardingConfig {name:?}; a pod can be in one shard only"),
        );
    }
}

/// The canonical form of a condition.
fn in_one_way(condition: &Condition) -> Condition {
    let only = |values: &BTreeSet<String>| values.first().filter(|_| values.len() == 1).cloned();
    match condition {
        Condition::In(values) => only(values).map(Condition::Equals),
        Condition::NotIn(values) => only(values).map(Condition::NotEquals),
        _ => None,
    }
    .unwrap_or_else(|| condition.clone())
}

/// Refuses pods that another shard selects too. The operator does not matter.
pub(in crate::rules::validate) fn of_pods(
    config: &ShardingConfig,
    others: &[&ShardingConfig],
    pods: &[&Member],
    report: &mut Report,
) {
    let Some(selector) = pod_selector(config) else {
        return;
    };
    let mine: Vec<_> = pods.iter().filter(|pod| selector.matches(&pod.labels)).collect();
    if mine.is_empty() {
        report.warning("spec.selector", "selects no pod of the namespace");
    }
    for other in others.iter().filter(|other| other.spec.root.is_none()) {
        let Some(selector) = pod_selector(other) else {
            continue;
        };
        let name = name(&other.metadata);
        if let Some(pod) = mine.iter().find(|pod| selector.matches(&pod.labels)) {
            report.error(
                "spec.selector",
                format!(
                    "selects pod {:?}, which ShardingConfig {name:?} selects too; a pod can be in one shard only",
                    pod.name.name
                ),
            );
        }
    }
}

/// Refuses pods that a root divides and a manual shard selects. All pods of the root's target count, with or
/// without a label. The operator does not matter.
pub(in crate::rules::validate) fn of_targets(
    config: &ShardingConfig,
    others: &[&ShardingConfig],
    pods: &[&Member],
    report: &mut Report,
) {
    // A config may always be switched off.
    if affiliation::is_off(config) {
        return;
    }
    let near: Vec<&ShardingConfig> = others.iter().copied().chain([config]).collect();
    let is_by_hand = |one: &ShardingConfig| Affiliation::of(one, &near).is_by_hand();
    if config.spec.root.is_some() {
        for other in others.iter().filter(|other| is_by_hand(other)) {
            if let Some(pod) = of_both(config, other, &near, pods) {
                let name = name(&other.metadata);
                report.error(
                    target_field(config),
                    format!(
                        "has pod {pod:?}, which ShardingConfig {name:?} selects too; a pod can be in one shard only"
                    ),
                );
            }
        }
    } else if is_by_hand(config) {
        for other in others {
            if let Some(pod) = of_both(other, config, &near, pods) {
                let name = name(&other.metadata);
                report.error(
                    "spec.selector",
                    format!("selects pod {pod:?}, which root {name:?} divides; a pod can be in one shard only"),
                );
            }
        }
    }
}

/// A pod of `root`'s target that `shard` selects or lists by name.
fn of_both<'a>(
    root: &ShardingConfig,
    shard: &'a ShardingConfig,
    near: &[&ShardingConfig],
    pods: &[&'a Member],
) -> Option<&'a str> {
    let rule = root.spec.root.as_ref().filter(|_| affiliation::places(root, near))?;
    let selector = pod_selector(shard)?;
    let mut there = pods.iter().filter(|pod| divides(rule, pod));
    let there = there.find(|pod| selector.matches(&pod.labels));
    there.map(|pod| pod.name.name.as_str()).or_else(|| {
        let named = affiliation::pod_names(shard.spec.selector.as_ref()?)?;
        let set = rule.target_stateful_set.as_deref()?;
        named.into_iter().find(|pod| affiliation::stateful_set(pod) == set)
    })
}

/// Whether a root with this `rule` assigns `pod`. Ended pods of a Deployment get no shard.
fn divides(rule: &Root, pod: &Member) -> bool {
    pod.is_of_target(rule) && !(pod.ended && rule.target_deployment.is_some())
}

fn pod_selector(config: &ShardingConfig) -> Option<Selector> {
    // An empty selector is invalid, and selects nothing.
    let selector = config.spec.selector.as_ref().filter(|selector| !selector.is_empty())?;
    Selector::try_from(selector).ok()
}

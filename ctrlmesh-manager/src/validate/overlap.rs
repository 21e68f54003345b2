//! Could two shards of one operator own the same object, or the same pod?

use std::collections::BTreeSet;

use ctrlmesh_common::api::{Limit, ShardingConfig};
use ctrlmesh_common::resource::ResourceMatch;
use ctrlmesh_common::selector::Selector;

use super::limits::is_wildcard;
use super::{PodLabels, Report};

/// Stands for all groups and resources that no limit names; no API server serves a group or resource of this name.
const UNNAMED: &str = "*any other*";

/// Compares the share of `config` with those of the other shards of its operator.
pub(super) fn with_others(
    config: &ShardingConfig,
    others: &[&ShardingConfig],
    report: &mut Report,
) {
    for other in others.iter().filter(|other| same_operator(config, other)) {
        if let Some((group, resource)) = common_object(&config.spec.limits, &other.spec.limits) {
            let what = match (group.as_str(), resource.as_str()) {
                (_, UNNAMED) => "objects of a resource that is not named".to_owned(),
                ("" | UNNAMED, resource) => format!("the same {resource}"),
                (group, resource) => format!("the same {resource}.{group}"),
            };
            let name = other.metadata.name.as_deref().unwrap_or_default();
            report.error("spec.limits", format!("could own {what} as ShardingConfig {name:?} of the same operator; their selectors must exclude each other"));
        }
    }
}

/// Compares the pods of `config` with those of the other shards, whatever their operator.
pub(super) fn of_pods(
    config: &ShardingConfig,
    others: &[&ShardingConfig],
    pods: &[PodLabels],
    report: &mut Report,
) {
    let Some(selector) = pod_selector(config) else {
        return;
    };
    let mine: Vec<&PodLabels> = pods.iter().filter(|pod| selector.matches(&pod.labels)).collect();
    if mine.is_empty() {
        report.warning("spec.selector", "selects no pod of the namespace");
    }
    for other in others.iter().filter(|other| other.spec.root.is_none()) {
        let Some(selector) = pod_selector(other) else {
            continue;
        };
        let name = other.metadata.name.as_deref().unwrap_or_default();
        if let Some(pod) = mine.iter().find(|pod| selector.matches(&pod.labels)) {
            report.error("spec.selector", format!("selects pod {:?}, which ShardingConfig {name:?} selects too; a pod can be in one shard only", pod.name));
        }
    }
}

/// Shards are of one operator where they divide the same lock.
fn same_operator(one: &ShardingConfig, other: &ShardingConfig) -> bool {
    let lock = |config: &ShardingConfig| {
        config.spec.controller.as_ref().map(|controller| controller.leader_election_name.clone())
    };
    other.spec.root.is_none()
        && one.metadata.namespace == other.metadata.namespace
        && lock(one) == lock(other)
        && lock(one).is_some()
}

/// A resource, of which some object could satisfy both; none where the shares exclude each other.
fn common_object(one: &[Limit], other: &[Limit]) -> Option<(String, String)> {
    let (mut groups, mut resources) = (BTreeSet::from([UNNAMED]), BTreeSet::from([UNNAMED]));
    for related in one.iter().chain(other).flat_map(Limit::resources) {
        groups.extend(
            related.api_groups.iter().map(String::as_str).filter(|name| !is_wildcard(name)),
        );
        resources
            .extend(related.resources.iter().map(String::as_str).filter(|name| !is_wildcard(name)));
    }
    let mut pairs =
        groups.iter().flat_map(|group| resources.iter().map(move |resource| (*group, *resource)));
    pairs
        .find(|(group, resource)| {
            match (share(one, group, resource), share(other, group, resource)) {
                (None, None) => false,
                (one, other) => one.unwrap_or_default().overlaps(&other.unwrap_or_default()),
            }
        })
        .map(|(group, resource)| (group.to_owned(), resource.to_owned()))
}

/// What the limits leave of a resource; none where they do not speak of it, and so all of it is seen.
fn share(limits: &[Limit], group: &str, resource: &str) -> Option<Selector> {
    let covers = |limit: &&Limit| {
        limit.resources().is_empty()
            || limit
                .resources()
                .iter()
                .any(|related| ResourceMatch::from(related).covers(group, resource))
    };
    let mut selectors = limits
        .iter()
        .filter(covers)
        .filter_map(|limit| Selector::try_from(limit.objects()?).ok())
        .peekable();
    selectors.peek()?;
    Some(selectors.fold(Selector::everything(), |all, selector| all.and(&selector)))
}

fn pod_selector(config: &ShardingConfig) -> Option<Selector> {
    Selector::try_from(config.spec.selector.as_ref()?).ok()
}

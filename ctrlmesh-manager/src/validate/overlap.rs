//! Could two shards of one operator own the same object, or the same pod?
//!
//! Which shards are of one operator: those of a namespace whose pods belong to the same `StatefulSet` or Deployment,
//! and those that name the same leader-election lock. Where neither tells whose a shard is, it could be of any operator,
//! and to own the same objects is suspicious, but no error. A root stands for all its shards, which are compared neither
//! with it nor with each other: that they share nothing follows from the root, and while they are being changed, one by
//! one, each stands beside old states of the others.

use std::collections::BTreeSet;

use ctrlmesh_common::api::{LabelSelector, RelatedResources, SelectorOperator, ShardingConfig};
use ctrlmesh_common::names::label;
use ctrlmesh_common::resource::ResourceMatch;
use ctrlmesh_common::selector::Selector;

use super::limits::is_wildcard;
use super::{PodLabels, Report};

/// Stands for all groups and resources that no limit names; no API server serves a group or resource of this name.
const UNNAMED: &str = "*any other*";

/// Why two shards are taken to be of one operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kinship {
    /// Their pods belong to the same `StatefulSet` or Deployment, or they name the same lock.
    Same,
    /// They are roots with the same target.
    Target,
    /// One of them names no lock, and nothing says that they are of different operators.
    Unknown,
}

/// A part of a share: of these resources (none: of all) what the selector matches.
struct Part<'a> {
    resources: &'a [RelatedResources],
    selector: Selector,
}

/// Compares the share of `config` with those of the other shards of its operator.
pub(super) fn with_others(
    config: &ShardingConfig,
    others: &[&ShardingConfig],
    report: &mut Report,
) {
    // Of those that are merely suspicious, one says enough.
    let mut suspected = false;
    for other in others {
        let Some(kinship) = kinship(config, other) else { continue };
        let name = other.metadata.name.as_deref().unwrap_or_default();
        if kinship == Kinship::Target {
            report.error(
                target_field(config),
                format!(
                    "is the target of root {name:?} too; one root divides all pods of its target"
                ),
            );
            continue;
        }
        if kinship == Kinship::Unknown && suspected {
            continue;
        }
        let Some((group, resource)) = common_object(&parts(config), &parts(other)) else {
            continue;
        };
        let field = if config.spec.root.is_some() { "spec.root" } else { "spec.limits" };
        let what = shown(&group, &resource);
        let told = format!("could own {what} as ShardingConfig {name:?}");
        if kinship == Kinship::Unknown {
            suspected = true;
            report.warning(field, format!("{told}, if both are of one operator; name the lock of each one's operator in spec.controller.leaderElectionName to have it checked"));
        } else {
            report.error(
                field,
                format!("{told}, of the same operator; their selectors must exclude each other"),
            );
        }
    }
}

fn shown(group: &str, resource: &str) -> String {
    match (group, resource) {
        (_, UNNAMED) => "objects of a resource that is not named".to_owned(),
        ("" | UNNAMED, resource) => format!("the same {resource}"),
        (group, resource) => format!("the same {resource}.{group}"),
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

/// Why the two are of one operator; none where they are not, or where one makes the other, or makes nothing.
fn kinship(one: &ShardingConfig, other: &ShardingConfig) -> Option<Kinship> {
    let off = |config: &ShardingConfig| {
        config.spec.root.as_ref().is_some_and(|root| root.disable == Some(true))
    };
    if off(one) || off(other) || makes(one, other) || makes(other, one) || siblings(one, other) {
        return None;
    }
    let roots = one.spec.root.is_some() && other.spec.root.is_some();
    let apart =
        workloads(one).zip(workloads(other)).map(|(mine, theirs)| mine.is_disjoint(&theirs));
    match (apart, lock(one), lock(other)) {
        (Some(false), ..) if roots => Some(Kinship::Target),
        // Whatever the locks are: the pods of one workload run one operator.
        (Some(false), ..) => Some(Kinship::Same),
        (_, Some(one), Some(other)) => (one == other).then_some(Kinship::Same),
        (Some(true), ..) => None,
        (None, ..) => Some(Kinship::Unknown),
    }
}

fn lock(config: &ShardingConfig) -> Option<&str> {
    config.spec.controller.as_ref().map(|controller| controller.leader_election_name.as_str())
}

/// Whether `shard` is one that `root` made.
fn makes(root: &ShardingConfig, shard: &ShardingConfig) -> bool {
    let labels = shard.metadata.labels.as_ref();
    let of = labels.and_then(|labels| labels.get(label::AUTO_SHARDING_ROOT));
    root.spec.root.is_some() && of.is_some() && of == root.metadata.name.as_ref()
}

/// Whether one root made both.
fn siblings(one: &ShardingConfig, other: &ShardingConfig) -> bool {
    let root = |config: &ShardingConfig| {
        config.metadata.labels.as_ref()?.get(label::AUTO_SHARDING_ROOT).cloned()
    };
    let owners = |config: &ShardingConfig| {
        let owners = config.metadata.owner_references.iter().flatten();
        owners.map(|owner| owner.uid.clone()).collect::<BTreeSet<_>>()
    };
    root(one).is_some() && root(one) == root(other) && owners(one) == owners(other)
}

/// The `StatefulSets` and Deployments that its pods belong to, as kind and name; none where it does not say.
fn workloads(config: &ShardingConfig) -> Option<BTreeSet<(&'static str, &str)>> {
    if let Some(root) = &config.spec.root {
        let targets = [
            ("StatefulSet", root.target_stateful_set.as_deref()),
            ("Deployment", root.target_deployment.as_deref()),
        ];
        return Some(targets.into_iter().filter_map(|(kind, name)| Some((kind, name?))).collect());
    }
    let of_pod = |pod: &str| pod.rsplit_once('-').map_or("", |(name, _)| name).len();
    let pods = pod_names(config.spec.selector.as_ref()?)?;
    Some(pods.into_iter().map(|pod| ("StatefulSet", &pod[..of_pod(pod)])).collect())
}

/// The pods that the selector names by themselves.
fn pod_names(selector: &LabelSelector) -> Option<Vec<&str>> {
    if let Some(name) = selector.match_labels.get(label::STATEFULSET_POD_NAME) {
        return Some(vec![name.as_str()]);
    }
    let mut named = selector.match_expressions.iter().filter(|one| {
        one.key == label::STATEFULSET_POD_NAME && one.operator == SelectorOperator::In
    });
    named.next().map(|one| one.values.iter().map(String::as_str).collect())
}

/// What a shard owns, or all shards of a root together.
fn parts(config: &ShardingConfig) -> Vec<Part<'_>> {
    let Some(root) = &config.spec.root else {
        let limits = config.spec.limits.iter();
        return limits
            .filter_map(|limit| {
                let selector = Selector::try_from(limit.objects()?).ok()?;
                Some(Part { resources: limit.resources(), selector })
            })
            .collect();
    };
    if root.resource_selector.is_empty() {
        return vec![Part { resources: &[], selector: Selector::everything() }];
    }
    let divided = root.resource_selector.iter().map(|one| Part {
        resources: &one.relate_resources,
        selector: one
            .selector
            .as_ref()
            .and_then(|selector| Selector::try_from(selector).ok())
            .unwrap_or_default(),
    });
    divided.collect()
}

/// A resource, of which some object could satisfy both; none where the shares exclude each other.
fn common_object(one: &[Part<'_>], other: &[Part<'_>]) -> Option<(String, String)> {
    let (mut groups, mut resources) = (BTreeSet::from([UNNAMED]), BTreeSet::from([UNNAMED]));
    for related in one.iter().chain(other).flat_map(|part| part.resources) {
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

/// What the parts leave of a resource; none where they do not speak of it, and so all of it is seen.
fn share(parts: &[Part<'_>], group: &str, resource: &str) -> Option<Selector> {
    let covers = |part: &&Part<'_>| {
        part.resources.is_empty()
            || part
                .resources
                .iter()
                .any(|related| ResourceMatch::from(related).covers(group, resource))
    };
    let mut covering = parts.iter().filter(covers).map(|part| &part.selector).peekable();
    covering.peek()?;
    Some(covering.fold(Selector::everything(), Selector::and))
}

fn target_field(config: &ShardingConfig) -> &'static str {
    match &config.spec.root {
        Some(root) if root.target_deployment.is_some() => "spec.root.targetDeployment",
        _ => "spec.root.targetStatefulSet",
    }
}

fn pod_selector(config: &ShardingConfig) -> Option<Selector> {
    Selector::try_from(config.spec.selector.as_ref()?).ok()
}

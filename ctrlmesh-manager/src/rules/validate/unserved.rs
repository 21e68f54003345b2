//! Warns of limited resources that are not served or not labelled.

use ctrlmesh_common::api::{Expression, LabelSelector, RelatedResources, SelectorOperator, ShardingConfigSpec};
use ctrlmesh_common::names::resource_list;
use ctrlmesh_common::resource::ResourceMatch;
use ctrlmesh_common::share;

use super::Report;

struct Limited<'a> {
    field: String,
    groups: &'a [String],
    resource: &'a str,
    /// `None` for a root: its shards add theirs.
    selector: Option<&'a LabelSelector>,
}

/// `serves` takes group and plural; `*` is any. A misspelled resource limits nothing.
pub(super) fn check(spec: &ShardingConfigSpec, serves: &dyn Fn(&str, &str) -> bool, report: &mut Report) {
    for Limited { field, groups, resource, .. } in limited(spec) {
        // The resource may be in any of the groups.
        if !groups.iter().any(|group| serves(group, resource)) {
            report.warning(
                field,
                format!("{resource:?} is served in none of apiGroups {groups:?}; it limits nothing until it is"),
            );
        }
    }
}

/// `labels` takes group and plural. A resource is checked if its selector uses one of the `keys`.
pub(super) fn check_labelled(
    spec: &ShardingConfigSpec,
    keys: &[&str],
    labels: &dyn Fn(&str, &str) -> bool,
    report: &mut Report,
) {
    let owned = |one: &Limited<'_>| one.selector.is_none_or(|selector| requires_any(selector, keys));
    for Limited { field, groups, resource, .. } in limited(spec).into_iter().filter(owned) {
        if let Some(group) = groups.iter().find(|group| !labels(group, resource)) {
            report.warning(
                field,
                format!(
                    "{resource:?} of apiGroup {group:?} is labelled by nobody, and belongs to no shard: no root names it, and ConfigMap `{}` does not list it, or it cannot be listed, watched and patched",
                    resource_list::NAME
                ),
            );
        }
    }
}

/// Resources that `*` limits, and whose objects are not labelled.
const NEVER_LABELLED: [(&str, &str); 3] =
    [("", "events"), ("events.k8s.io", "events"), ("coordination.k8s.io", "leases")];

/// Warns of a root that limits, by a wildcard, what nobody labels: no shard is shown any of it.
pub(super) fn check_wildcard(spec: &ShardingConfigSpec, report: &mut Report) {
    let Some(root) = &spec.root else { return };
    let named: Vec<ResourceMatch> =
        root.resource_selector.iter().flat_map(|one| &one.relate_resources).map(ResourceMatch::from).collect();
    let vanishes = |(group, resource): &&(&str, &str)| {
        let is_written_out = |one: &ResourceMatch| one.resources.iter().any(|name| name == resource);
        let mut covering = named.iter().filter(|one| one.covers(group, resource));
        share::divided(root, group, resource).is_some() && !covering.any(is_written_out)
    };
    let full = |(group, resource): &(&str, &str)| {
        if group.is_empty() { (*resource).to_owned() } else { format!("{resource}.{group}") }
    };
    let vanishing: Vec<String> = NEVER_LABELLED.iter().filter(vanishes).map(full).collect();
    if !vanishing.is_empty() {
        report.warning(
            "spec.root.resourceSelector",
            format!(
                "a wildcard also limits {}, whose objects are not labelled: lists and watches of all shards show none of them. Name the resources that the operator divides",
                vanishing.join(", ")
            ),
        );
    }
}

fn limited(spec: &ShardingConfigSpec) -> Vec<Limited<'_>> {
    let mut all = Vec::new();
    for (at, limit) in spec.limits.iter().enumerate() {
        let nested = if limit.object_selector.is_some() { ".objectSelector" } else { "" };
        add(&mut all, &format!("spec.limits[{at}]{nested}"), limit.resources(), limit.objects());
    }
    let divided = spec.root.iter().flat_map(|root| &root.resource_selector);
    for (at, selector) in divided.enumerate() {
        let field = format!("spec.root.resourceSelector[{at}]");
        add(&mut all, &field, &selector.relate_resources, None);
    }
    all
}

fn add<'a>(
    all: &mut Vec<Limited<'a>>,
    field: &str,
    entries: &'a [RelatedResources],
    selector: Option<&'a LabelSelector>,
) {
    for (at, entry) in entries.iter().enumerate() {
        all.extend(entry.resources.iter().enumerate().map(|(number, resource)| Limited {
            field: format!("{field}.relateResources[{at}].resources[{number}]"),
            groups: &entry.api_groups,
            resource,
            selector,
        }));
    }
}

/// Whether the selector matches only objects with one of the labels.
fn requires_any(selector: &LabelSelector, keys: &[&str]) -> bool {
    // Other operators match objects without the label.
    let is_required = |one: &&Expression| matches!(one.operator, SelectorOperator::In | SelectorOperator::Exists);
    let expressions = selector.match_expressions.iter().filter(is_required).map(|one| &one.key);
    selector.match_labels.keys().chain(expressions).any(|key| keys.contains(&key.as_str()))
}

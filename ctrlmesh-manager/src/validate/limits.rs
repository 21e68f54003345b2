//! Are the limits of a shard ones that can be enforced?

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::{LabelSelector, Limit, RelatedResources};
use ctrlmesh_common::resource::{ResourceMatch, WILDCARD};

use super::{Report, parsed, required_selector};

/// How many pairs of a group and a resource the limits of a shard may name.
const MAX_PAIRS: usize = 2048;

/// How many entries of resources the limits of a shard may have.
const MAX_ENTRIES: usize = 128;

/// Checks every limit by itself, and that no resource is limited twice.
pub(super) fn check(limits: &[Limit], report: &mut Report) {
    for (at, limit) in limits.iter().enumerate() {
        let field = format!("spec.limits[{at}]");
        if limit.selector.is_some() == limit.object_selector.is_some() {
            report.error(
                format!("{field}.selector"),
                "exactly one of selector and objectSelector is required",
            );
            continue;
        }
        if limit.object_selector.is_some() && !limit.relate_resources.is_empty() {
            report.error(
                format!("{field}.relateResources"),
                "must stand inside objectSelector where objectSelector is used",
            );
        }
        let inner =
            if limit.object_selector.is_some() { format!("{field}.objectSelector") } else { field };
        if let Some(selector) = limit.objects() {
            required_selector(&format!("{inner}.selector"), selector, report);
        }
        resources(&inner, limit.resources(), report);
    }
    limited_twice(limits, report);
    too_many(limits, report);
}

/// Comparing shards takes every named group with every named resource: what a person writes is far below this, and what
/// is far above would keep the webhook busy.
fn too_many(limits: &[Limit], report: &mut Report) {
    let related = || limits.iter().flat_map(Limit::resources);
    let groups: BTreeSet<&str> =
        related().flat_map(|related| &related.api_groups).map(String::as_str).collect();
    let resources: BTreeSet<&str> =
        related().flat_map(|related| &related.resources).map(String::as_str).collect();
    let pairs = groups.len() * resources.len();
    if pairs > MAX_PAIRS || related().count() > MAX_ENTRIES {
        report.error(
            "spec.limits",
            format!(
                "{} groups and {} resources in {} entries are too many; their product may be \
                 {MAX_PAIRS}, the entries {MAX_ENTRIES}",
                groups.len(),
                resources.len(),
                related().count()
            ),
        );
    }
}

/// Checks a list of resources.
pub(super) fn resources(field: &str, resources: &[RelatedResources], report: &mut Report) {
    for (at, related) in resources.iter().enumerate() {
        if let Err(error) = ResourceMatch::from(related).check() {
            report.error(format!("{field}.relateResources[{at}]"), error.to_string());
        }
    }
}

/// A resource that is named twice is most likely a mistake: both limits would have to match. A wildcard beside a name
/// is not: it adds to it.
fn limited_twice(limits: &[Limit], report: &mut Report) {
    let mut seen: BTreeMap<(&str, &str), String> = BTreeMap::new();
    for (at, limit) in limits.iter().enumerate() {
        for (inner, related) in limit.resources().iter().enumerate() {
            let nested = if limit.object_selector.is_some() { ".objectSelector" } else { "" };
            let field = format!("spec.limits[{at}]{nested}.relateResources[{inner}]");
            for (group, resource) in names(related) {
                if let Some(first) = seen.insert((group, resource), field.clone()) {
                    let named = if group.is_empty() {
                        resource.to_owned()
                    } else {
                        format!("{resource}.{group}")
                    };
                    report.error(&field, format!("limits {named} twice, first in {first}; one limit per resource is allowed"));
                }
            }
        }
    }
    let mut everything =
        limits.iter().enumerate().filter(|(_, limit)| limit.resources().is_empty());
    if let Some((second, _)) = everything.nth(1) {
        report.error(
            format!("spec.limits[{second}]"),
            "limits every resource twice; one limit without relateResources is allowed",
        );
    }
}

fn names(related: &RelatedResources) -> impl Iterator<Item = (&str, &str)> {
    related.api_groups.iter().flat_map(|group| {
        related.resources.iter().map(move |resource| (group.as_str(), resource.as_str()))
    })
}

/// Whether a name stands for everything.
pub(super) fn is_wildcard(name: &str) -> bool {
    name == WILDCARD
}

/// Checks an optional selector.
pub(super) fn optional_selector(
    field: &str,
    selector: Option<&LabelSelector>,
    report: &mut Report,
) {
    if let Some(selector) = selector {
        parsed(field, selector, report);
    }
}

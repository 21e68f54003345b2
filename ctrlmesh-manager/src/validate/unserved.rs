//! Is what is limited there at all?

use ctrlmesh_common::api::{RelatedResources, ShardingConfigSpec};

use super::Report;

/// Warns of resources that `serves` (a group and a plural; `*` is any) does not know: a misspelled one limits nothing.
pub(super) fn check(
    spec: &ShardingConfigSpec,
    serves: &dyn Fn(&str, &str) -> bool,
    report: &mut Report,
) {
    for (at, limit) in spec.limits.iter().enumerate() {
        let nested = if limit.object_selector.is_some() { ".objectSelector" } else { "" };
        of(&format!("spec.limits[{at}]{nested}"), limit.resources(), serves, report);
    }
    let divided = spec.root.iter().flat_map(|root| &root.resource_selector);
    for (at, selector) in divided.enumerate() {
        let field = format!("spec.root.resourceSelector[{at}]");
        of(&field, &selector.relate_resources, serves, report);
    }
}

fn of(
    field: &str,
    entries: &[RelatedResources],
    serves: &dyn Fn(&str, &str) -> bool,
    report: &mut Report,
) {
    for (at, entry) in entries.iter().enumerate() {
        for (number, resource) in entry.resources.iter().enumerate() {
            // It may be of any of the groups.
            if !entry.api_groups.iter().any(|group| serves(group, resource)) {
                report.warning(
                    format!("{field}.relateResources[{at}].resources[{number}]"),
                    format!(
                        "{resource:?} is served in none of apiGroups {:?}; it limits nothing until it is",
                        entry.api_groups
                    ),
                );
            }
        }
    }
}

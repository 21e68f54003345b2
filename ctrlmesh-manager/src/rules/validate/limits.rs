//! Validates the limits of a shard.

use std::collections::BTreeSet;

use ctrlmesh_common::api::{LabelSelector, Limit, RelatedResources};
use ctrlmesh_common::resource::{ResourceMatch, WILDCARD};

use super::{Report, parsed, required_selector};

/// Pairs of group and resource in all limits of a shard, or in all resource selectors of a root.
const MAX_PAIRS: usize = 2048;

/// Entries of resources in them.
const MAX_ENTRIES: usize = 128;

pub(super) fn check(limits: &[Limit], report: &mut Report) {
    for (at, limit) in limits.iter().enumerate() {
        let field = format!("spec.limits[{at}]");
        if limit.selector.is_some() == limit.object_selector.is_some() {
            report.error(format!("{field}.selector"), "exactly one of selector and objectSelector is required");
            continue;
        }
        if limit.object_selector.is_some() && !limit.relate_resources.is_empty() {
            report.error(
                format!("{field}.relateResources"),
                "must stand inside objectSelector where objectSelector is used",
            );
        }
        let inner = if limit.object_selector.is_some() { format!("{field}.objectSelector") } else { field };
        if let Some(selector) = limit.objects() {
            required_selector(&format!("{inner}.selector"), selector, report);
        }
        resources(&inner, limit.resources(), report);
    }
    let covered = limits.iter().enumerate().map(|(at, limit)| {
        let nested = if limit.object_selector.is_some() { ".objectSelector" } else { "" };
        (format!("spec.limits[{at}]{nested}"), limit.resources())
    });
    covered_twice("spec.limits", &covered.collect::<Vec<_>>(), report);
}

pub(super) fn resources(field: &str, resources: &[RelatedResources], report: &mut Report) {
    for (at, related) in resources.iter().enumerate() {
        if let Err(error) = ResourceMatch::from(related).check() {
            report.error(format!("{field}.relateResources[{at}]"), error.to_string());
        }
    }
}

/// Refuses a resource that two entries cover: a reader cannot know whether both hold, or the more specific
/// one. `entries` are fields of `list` and their resources.
pub(super) fn covered_twice(list: &str, entries: &[(String, &[RelatedResources])], report: &mut Report) {
    if too_many(list, entries, report) {
        return;
    }
    for (at, (field, resources)) in entries.iter().enumerate() {
        let earlier = entries[..at].iter();
        let duplicates = earlier.filter_map(|(first, others)| {
            let (mine, theirs, resource) = common(resources, others)?;
            Some((at_entry(field, mine), resource, at_entry(first, theirs)))
        });
        if let Some((field, resource, first)) = duplicates.into_iter().next() {
            report.error(
                field,
                format!(
                    "covers {resource} a second time, first in {first}; one entry per resource is allowed, with all requirements in its selector"
                ),
            );
        }
    }
}

/// Comparing takes groups times resources; far more than a person writes would keep the webhook busy.
fn too_many(list: &str, entries: &[(String, &[RelatedResources])], report: &mut Report) -> bool {
    let related = || entries.iter().flat_map(|(_, resources)| resources.iter());
    let groups: BTreeSet<&str> = related().flat_map(|related| &related.api_groups).map(String::as_str).collect();
    let resources: BTreeSet<&str> = related().flat_map(|related| &related.resources).map(String::as_str).collect();
    let pairs = groups.len() * resources.len();
    let too_many = pairs > MAX_PAIRS || related().count() > MAX_ENTRIES;
    if too_many {
        report.error(
            list,
            format!(
                "{} groups and {} resources in {} entries are too many; their product may be \
                 {MAX_PAIRS}, the entries {MAX_ENTRIES}",
                groups.len(),
                resources.len(),
                related().count()
            ),
        );
    }
    too_many
}

fn at_entry(field: &str, entry: Option<usize>) -> String {
    entry.map_or_else(|| field.to_owned(), |at| format!("{field}.relateResources[{at}]"))
}

/// Indices of two entries that cover the same resource (`None`: an empty list, which covers all), and the
/// resource.
type Common = (Option<usize>, Option<usize>, String);

fn common(one: &[RelatedResources], other: &[RelatedResources]) -> Option<Common> {
    let everything = || "every resource".to_owned();
    match (one.first(), other.first()) {
        (None, None) => return Some((None, None, everything())),
        (None, Some(theirs)) => return Some((None, Some(0), shared(theirs, theirs)?)),
        (Some(mine), None) => return Some((Some(0), None, shared(mine, mine)?)),
        (Some(_), Some(_)) => {}
    }
    let pairs = one.iter().enumerate();
    let mut pairs = pairs.flat_map(|mine| other.iter().enumerate().map(move |theirs| (mine, theirs)));
    pairs.find_map(|((mine, one), (theirs, other))| Some((Some(mine), Some(theirs), shared(one, other)?)))
}

fn shared(one: &RelatedResources, other: &RelatedResources) -> Option<String> {
    let group = in_both(&one.api_groups, &other.api_groups)?;
    let resource = in_both(&one.resources, &other.resources)?;
    Some(match (group, resource) {
        (WILDCARD, WILDCARD) => "every resource".to_owned(),
        ("", WILDCARD) => "every resource of the core group".to_owned(),
        (group, WILDCARD) => format!("every resource of {group}"),
        ("" | WILDCARD, resource) => resource.to_owned(),
        (group, resource) => format!("{resource}.{group}"),
    })
}

/// The first name in both lists; the wildcard if both have it.
fn in_both<'a>(one: &'a [String], other: &'a [String]) -> Option<&'a str> {
    let any = |names: &[String]| names.iter().any(|name| is_wildcard(name));
    let found = match (any(one), any(other)) {
        (true, _) => other.first(),
        (false, true) => one.first(),
        (false, false) => one.iter().find(|name| other.contains(name)),
    };
    found.map(String::as_str)
}

pub(super) fn is_wildcard(name: &str) -> bool {
    name == WILDCARD
}

pub(super) fn optional_selector(field: &str, selector: Option<&LabelSelector>, report: &mut Report) {
    if let Some(selector) = selector {
        parsed(field, selector, report);
    }
}

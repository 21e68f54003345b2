//! The kinds that a fence is asked about.

use ctrlmesh_common::api::RelatedResources;
use ctrlmesh_common::names::{GROUP, VERSION};
use k8s_openapi::api::admissionregistration::v1::NamedRuleWithOperations;

use crate::ownership::admission_policy::{ALL, rule};

/// The plural of the root's own kind.
pub(super) const ROOTS: &str = "shardingconfigs";

/// Kinds that leader election uses, by group and plural.
pub(super) const LOCKS: [(&str, &str); 3] = [("coordination.k8s.io", "leases"), ("", "configmaps"), ("", "endpoints")];

/// Verbs that write.
const WRITES: [&str; 3] = ["CREATE", "UPDATE", "DELETE"];

/// Not fenced unless a root names them: what every pod writes about itself, and what is asked and never stored.
const EXEMPT: [(&str, &str); 4] =
    [("coordination.k8s.io", "leases"), ("", "events"), ("events.k8s.io", "events"), ("", "serviceaccounts/token")];

/// Groups of which nothing is stored.
const VIRTUAL: [&str; 2] = ["authentication.k8s.io", "authorization.k8s.io"];

/// Whether these limited kinds have the resource.
pub(super) fn covers(limited: &[RelatedResources], group: &str, plural: &str) -> bool {
    if limited.is_empty() {
        return !is_exempt(group, plural);
    }
    let has = |all: &[String], one: &str| all.iter().any(|name| name == ALL || name == one);
    limited.iter().any(|one| {
        let literal = one.resources.iter().any(|name| name == plural);
        has(&one.api_groups, group) && (literal || has(&one.resources, plural) && !is_exempt(group, plural))
    })
}

/// Whether the rules of [`rules`] match a write of the resource, or of its subresource unless that is empty.
pub(super) fn are_matched(limited: &[RelatedResources], group: &str, plural: &str, subresource: &str) -> bool {
    let has = |all: &[String], one: &str| all.iter().any(|name| name == ALL || name == one);
    let is_of = |one: &RelatedResources| has(&one.api_groups, group) && has(&one.resources, plural);
    let has_wildcard = limited.iter().any(|one| one.resources.iter().any(|name| name == ALL));
    if !limited.is_empty() && !limited.iter().any(is_of) {
        return false;
    }
    let written = if subresource.is_empty() { plural.to_owned() } else { format!("{plural}/{subresource}") };
    let is_left_out = EXEMPT.contains(&(group, written.as_str())) && !covers(limited, group, &written);
    let leaves_out = limited.is_empty() || has_wildcard;
    !(leaves_out && (is_left_out || VIRTUAL.contains(&group)))
}

fn is_exempt(group: &str, plural: &str) -> bool {
    EXEMPT.contains(&(group, plural)) || VIRTUAL.contains(&group)
}

/// The rules that match and those that exclude. Updates of the root called `root` are matched, too: by these the fence
/// is probed.
pub(super) fn rules(
    limited: &[RelatedResources],
    root: &str,
) -> (Vec<NamedRuleWithOperations>, Vec<NamedRuleWithOperations>) {
    let every = [RelatedResources { api_groups: vec![ALL.to_owned()], resources: vec![ALL.to_owned()] }];
    let kinds = if limited.is_empty() { &every[..] } else { limited };
    let of_kinds = kinds.iter().map(|one| {
        let resources = one.resources.iter().flat_map(|plural| match plural.as_str() {
            // Every resource and every subresource.
            ALL => vec!["*/*".to_owned()],
            plural => vec![plural.to_owned(), format!("{plural}/*")],
        });
        rule(one.api_groups.clone(), resources.collect(), &WRITES)
    });
    let probe = NamedRuleWithOperations {
        api_versions: Some(vec![VERSION.to_owned()]),
        resource_names: Some(vec![root.to_owned()]),
        ..rule(vec![GROUP.to_owned()], vec![ROOTS.to_owned()], &["UPDATE"])
    };
    let rules = of_kinds.chain([probe]).collect();
    (
        rules,
        if kinds.iter().any(|one| one.resources.iter().any(|name| name == ALL)) { excluded(limited) } else { vec![] },
    )
}

fn excluded(limited: &[RelatedResources]) -> Vec<NamedRuleWithOperations> {
    let exempt = EXEMPT.iter().filter(|(group, plural)| !covers(limited, group, plural));
    let exempt = exempt.map(|(group, plural)| rule(vec![(*group).to_owned()], vec![(*plural).to_owned()], &WRITES));
    let of_nothing = VIRTUAL.map(str::to_owned).to_vec();
    exempt.chain([rule(of_nothing, vec!["*/*".to_owned()], &WRITES)]).collect()
}

//! Finds out which kinds roots name.
//!
//! Pure. A root names resources by group and plural, or all of them. `*` stands for every resource that is served and
//! can be labelled, but for those in [`UNNAMED`]. A resource that is written out is labelled whatever it is.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::{RelatedResources, Root};
use ctrlmesh_common::names::GROUP;
use ctrlmesh_common::resource::{ResourceMatch, WILDCARD};

use super::rights::kind_name;
use super::{Kind, Kinds, NAMESPACES, Scope};
use crate::cluster::served_resources::{ServedResource, ServedResources};
use crate::rules::label_coverage::{KindName, VERBS};

/// What `*` does not stand for, by group and resource:
///
/// - events: they are many and short-lived, and controllers only write them;
/// - heartbeats and locks, which are written all the time, and which shards have of their own;
/// - our own resources, which the manager writes itself.
///
/// Resources that cannot be listed, watched and patched, such as reviews, have no objects to label.
pub const UNNAMED: [(&str, &str); 4] =
    [("", "events"), ("events.k8s.io", "events"), ("coordination.k8s.io", WILDCARD), (GROUP, WILDCARD)];

/// What one root names. Empty: every resource.
pub type NamedResources = Vec<ResourceMatch>;

/// The kinds of a root, each with its name in RBAC rules. Namespaces need no rule.
pub(super) type RootKinds = BTreeMap<String, Option<KindName>>;

/// What a root names.
pub fn named_resources(root: &Root) -> NamedResources {
    let entries = root.resource_selector.iter().map(|one| &one.relate_resources);
    if entries.clone().any(Vec::is_empty) {
        return Vec::new();
    }
    let matches = |one: &RelatedResources| ResourceMatch::from(one);
    entries.flatten().map(matches).collect()
}

/// Whether the resource is labelled because somebody names it so.
pub fn is_named(named: &NamedResources, group: &str, resource: &str) -> bool {
    let unnamed = UNNAMED.iter().any(|(of, one)| *of == group && (*one == resource || *one == WILDCARD));
    if named.is_empty() {
        return !unnamed;
    }
    named.iter().filter(|one| one.covers(group, resource)).any(|one| {
        let is_written_out = one.resources.iter().any(|name| name == resource);
        is_written_out || !unnamed
    })
}

/// Adds to `kinds` those that `roots` name, and returns the kinds of each root. Namespaces are among them: what is in
/// one belongs to its slot.
pub(super) fn add(
    kinds: &mut Kinds,
    roots: &BTreeMap<String, NamedResources>,
    served: &ServedResources,
) -> BTreeMap<String, RootKinds> {
    // A kind may be listed in another version than the preferred one.
    let mut known: BTreeMap<(String, String), BTreeSet<String>> = BTreeMap::new();
    for (name, kind) in kinds.iter() {
        let key = (kind.resource.group.clone(), kind.resource.plural.clone());
        known.entry(key).or_default().insert(name.clone());
    }
    let mut of_roots = BTreeMap::new();
    for (root, named) in roots {
        let mut of_root = RootKinds::from([(NAMESPACES.to_owned(), None)]);
        for one in served.all().filter(|one| can_be_labelled(one)) {
            let (group, plural) = (&one.resource.group, &one.resource.plural);
            if !is_named(named, group, plural) {
                continue;
            }
            let names = known.entry((group.clone(), plural.clone())).or_insert_with(|| {
                let name = super::kinds::name(&one.resource);
                let scope = if one.namespaced { Scope::Namespaced } else { Scope::Cluster };
                kinds.insert(name.clone(), Kind { resource: one.resource.clone(), scope });
                [name].into()
            });
            of_root.extend(names.iter().map(|name| (name.clone(), Some(kind_name(&one.resource)))));
        }
        of_roots.insert(root.clone(), of_root);
    }
    of_roots
}

/// Namespaces are labelled apart.
fn can_be_labelled(one: &ServedResource) -> bool {
    let is_namespace = one.resource.group.is_empty() && one.resource.plural == NAMESPACES;
    !is_namespace && one.supports(&VERBS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served() -> ServedResources {
        ServedResources::from([
            ("", "configmaps", "ConfigMap"),
            ("", "namespaces", "Namespace"),
            ("", "events", "Event"),
            ("coordination.k8s.io", "leases", "Lease"),
            ("ctrlmesh.kusionstack.io", "shardingconfigs", "ShardingConfig"),
            ("web.example.com", "websites", "Website"),
        ])
    }

    fn named(selectors: &[&[(&str, &str)]]) -> NamedResources {
        let entry =
            |(group, resource): &(&str, &str)| serde_json::json!({"apiGroups": [group], "resources": [resource]});
        let selector =
            |all: &&[(&str, &str)]| serde_json::json!({"relateResources": all.iter().map(entry).collect::<Vec<_>>()});
        let selectors: Vec<_> = selectors.iter().map(selector).collect();
        let root = serde_json::json!({"prefix": "op", "resourceSelector": selectors});
        named_resources(&serde_json::from_value(root).unwrap())
    }

    fn kinds_of(named: NamedResources, kinds: &mut Kinds) -> Vec<String> {
        let roots = add(kinds, &[("ops/a".to_owned(), named)].into(), &served());
        roots["ops/a"].keys().cloned().collect()
    }

    #[test]
    fn a_root_without_a_selection_names_what_can_be_labelled() {
        let all = ["configmaps./v1", "namespaces", "websites.web.example.com/v1"];
        for every in [named(&[]), named(&[&[]]), named(&[&[("web.example.com", "websites")], &[]])] {
            assert_eq!(kinds_of(every, &mut Kinds::new()), all);
        }
        assert_eq!(kinds_of(named(&[&[("*", "*")]]), &mut Kinds::new()), all);
    }

    #[test]
    fn what_is_written_out_is_named_whatever_it_is() {
        let leases = named(&[&[("coordination.k8s.io", "leases")]]);
        assert_eq!(kinds_of(leases, &mut Kinds::new()), ["leases.coordination.k8s.io/v1", "namespaces"]);
        let events = named(&[&[("*", "events")]]);
        assert_eq!(kinds_of(events, &mut Kinds::new()), ["events./v1", "namespaces"]);
        assert_eq!(kinds_of(named(&[&[("coordination.k8s.io", "*")]]), &mut Kinds::new()), ["namespaces"]);
        assert_eq!(kinds_of(named(&[&[("", "nothings")]]), &mut Kinds::new()), ["namespaces"], "it is not served");
    }

    #[test]
    fn a_listed_kind_keeps_its_version_and_others_are_added() {
        let gvk = kube::core::GroupVersionKind::gvk("web.example.com", "v1alpha1", "Website");
        let resource = kube::core::ApiResource::from_gvk(&gvk);
        let listed = Kind { resource, scope: Scope::Namespaced };
        let mut kinds = Kinds::from([("websites.web.example.com/v1alpha1".to_owned(), listed)]);
        let of_root = kinds_of(named(&[&[("web.example.com", "websites"), ("", "configmaps")]]), &mut kinds);
        assert_eq!(of_root, ["configmaps./v1", "namespaces", "websites.web.example.com/v1alpha1"]);
        assert_eq!(kinds.keys().collect::<Vec<_>>(), ["configmaps./v1", "websites.web.example.com/v1alpha1"]);
    }
}

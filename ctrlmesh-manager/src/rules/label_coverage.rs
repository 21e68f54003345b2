//! Says how far the objects of the kinds that a root names are labelled.
//!
//! Pure. The labeller finds it out, the status reports it, and a fenced root grants nothing before it is complete.

use std::collections::BTreeMap;
use std::sync::Arc;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::label;

/// What labelling a kind needs.
pub const VERBS: [&str; 3] = ["list", "watch", "patch"];

/// Type of the condition of a root that says whether it may be granted.
pub const CONDITION: &str = "Labelled";

/// The API server refuses longer notes of events.
pub const NOTE_BYTES: usize = 1024;

/// How far the kinds of one root are labelled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelCoverage {
    /// Whether every object has had its labels once, since the root names these kinds.
    pub established: bool,
    /// Why some objects may lack labels now; none where all have them.
    pub gap: Option<LabelGap>,
    /// Rights that labelling these kinds needs, whether they are granted or not.
    pub needed: Vec<KindName>,
}

/// Why some objects of a root's kinds may lack labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LabelGap {
    /// They are being labelled.
    InProgress(String),
    /// Some cannot be labelled, and are tried again.
    Failed(String),
    /// The manager may not label these kinds.
    Forbidden(Vec<MissingRule>),
}

/// A kind as RBAC rules name it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KindName {
    pub group: String,
    /// Plural.
    pub resource: String,
}

/// A right that the manager lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingRule {
    pub kind: KindName,
    pub verbs: Vec<&'static str>,
}

/// The coverage of each root, by `NAMESPACE/NAME`. Clones share it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelCoverages(Arc<BTreeMap<String, LabelCoverage>>);

impl LabelCoverages {
    /// By the `NAMESPACE/NAME` of the root.
    pub fn by_root(&self) -> &BTreeMap<String, LabelCoverage> {
        &self.0
    }
}

/// Whether the status says that every object of this generation's kinds was labelled once. So a new leader need not go
/// through all of them before it grants.
pub fn was_established(root: &ShardingConfig) -> bool {
    let conditions = root.status.iter().flat_map(|status| &status.conditions);
    let generation = root.metadata.generation;
    { conditions }.any(|one| {
        one.type_ == CONDITION && one.status == "True" && one.observed_generation == generation && generation.is_some()
    })
}

/// The same for any generation of the root. It ends where a kind that is named later is not labelled yet.
pub fn is_established_of_any_generation(root: &ShardingConfig) -> bool {
    let mut conditions = root.status.iter().flat_map(|status| &status.conditions);
    conditions.any(|one| one.type_ == CONDITION && one.status == "True")
}

impl LabelCoverage {
    /// Whether slots of the root may be granted. Once every object was labelled, one that cannot be labelled later
    /// stops no grant: nobody owns that object, and the root is degraded.
    pub fn permits_grants(&self) -> bool {
        self.established || self.gap.is_none()
    }
}

impl LabelCoverages {
    /// None where nothing is known of the root yet.
    pub fn of(&self, root: &str) -> Option<&LabelCoverage> {
        self.0.get(root)
    }
}

impl FromIterator<(String, LabelCoverage)> for LabelCoverages {
    fn from_iter<T: IntoIterator<Item = (String, LabelCoverage)>>(all: T) -> Self {
        Self(Arc::new(all.into_iter().collect()))
    }
}

impl MissingRule {
    /// For a person.
    pub fn text(&self) -> String {
        let KindName { group, resource } = &self.kind;
        let group = if group.is_empty() { "the core group" } else { group };
        format!("{} {resource:?} of {group}", self.verbs.join(", "))
    }
}

/// The `ClusterRoles` that let the manager label `kinds`, as YAML to be applied: one, or several where one does not
/// fit into the note of an event. The names of all begin with `name`. Applied again for more kinds, they replace
/// themselves.
pub fn cluster_roles(name: &str, kinds: &[KindName]) -> Vec<String> {
    let by_group = |kinds: &[KindName]| {
        let mut groups: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for kind in kinds {
            groups.entry(kind.group.clone()).or_default().push(kind.resource.clone());
        }
        groups
    };
    if kinds.is_empty() {
        return Vec::new();
    }
    let whole = cluster_role(name, &by_group(kinds));
    if whole.len() <= NOTE_BYTES {
        return vec![whole];
    }
    let mut roles = Vec::new();
    for (group, resources) in by_group(kinds) {
        let suffix = if group.is_empty() { "core" } else { &group };
        let mut parts: Vec<Vec<String>> = vec![Vec::new()];
        for resource in resources {
            let mut longer = parts.last().cloned().unwrap_or_default();
            longer.push(resource.clone());
            let name = format!("{name}:{suffix}:{}", parts.len());
            if cluster_role(&name, &[(group.clone(), longer)].into()).len() > NOTE_BYTES {
                parts.push(vec![resource]);
            } else if let Some(last) = parts.last_mut() {
                last.push(resource);
            }
        }
        let parts = parts.into_iter().enumerate();
        roles.extend(parts.map(|(at, resources)| {
            let name = format!("{name}:{suffix}:{}", at + 1);
            cluster_role(&name, &[(group.clone(), resources)].into())
        }));
    }
    roles
}

fn cluster_role(name: &str, groups: &BTreeMap<String, Vec<String>>) -> String {
    let rules: String = groups.iter().map(|(group, resources)| rule(group, resources)).collect();
    format!(
        "apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRole\nmetadata:\n  name: {name}\n  labels:\n    {}: \"true\"\nrules:\n{rules}",
        label::AGGREGATE_TO_LABELS
    )
}

fn rule(group: &str, resources: &[String]) -> String {
    let (resources, verbs) = (resources.join(", "), VERBS.join(", "));
    format!("- apiGroups: [\"{group}\"]\n  resources: [{resources}]\n  verbs: [{verbs}]\n")
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn kind(group: &str, resource: &str) -> KindName {
        KindName { group: group.to_owned(), resource: resource.to_owned() }
    }

    #[test]
    fn a_gap_stops_grants_until_all_was_labelled_once() {
        let gap = Some(LabelGap::Failed("x".to_owned()));
        let permits = |established, gap: &Option<LabelGap>| {
            LabelCoverage { established, gap: gap.clone(), needed: Vec::new() }.permits_grants()
        };
        assert!(permits(false, &None) && permits(true, &gap));
        assert!(!permits(false, &gap));
    }

    #[test]
    fn a_role_names_all_kinds_and_is_aggregated() {
        let kinds = [kind("", "configmaps"), kind("apps", "deployments"), kind("", "secrets")];
        let roles = cluster_roles("ctrlmesh-labels:ops:a", &kinds);
        let [role] = &roles[..] else { panic!("{roles:?}") };
        let role: Value = serde_saphyr::from_str(role).unwrap();
        assert_eq!(role["metadata"]["labels"][label::AGGREGATE_TO_LABELS], "true");
        assert_eq!(role["rules"][0]["resources"], serde_json::json!(["configmaps", "secrets"]));
        assert_eq!(role["rules"][1]["apiGroups"], serde_json::json!(["apps"]));
        assert_eq!(role["rules"][1]["verbs"], serde_json::json!(VERBS));
    }

    #[test]
    fn each_role_fits_into_the_note_of_an_event() {
        let kinds = (0..200).map(|number| kind("big.example.com", &format!("quite-a-long-resource-{number}")));
        let mut kinds: Vec<KindName> = kinds.collect();
        kinds.push(kind("", "configmaps"));
        let roles = cluster_roles("ctrlmesh-labels:ops:a", &kinds);
        assert!(roles.iter().all(|role| role.len() <= NOTE_BYTES), "{roles:?}");
        let read = |role: &String| serde_saphyr::from_str::<Value>(role).unwrap();
        let roles: Vec<Value> = roles.iter().map(read).collect();
        let mut names: Vec<_> = roles.iter().map(|role| role["metadata"]["name"].to_string()).collect();
        names.dedup();
        assert_eq!(names.len(), roles.len());
        let resources = roles.iter().map(|role| role["rules"][0]["resources"].as_array().unwrap().len());
        assert_eq!(resources.sum::<usize>(), kinds.len());
    }
}

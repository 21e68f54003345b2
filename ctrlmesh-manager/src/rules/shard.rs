//! Divides a root into shards.
//!
//! Pure: takes the root and the known namespaces, gives the shards as ShardingConfigs.
//!
//! A limit is a conjunction of requirements, because the API server knows nothing else. A canary of hashes
//! *or* namespaces is a union, which is no conjunction. So such a canary selects by namespace only: the
//! pinned namespaces, the known ones of its hashes, and `cluster.<slot>` for objects of cluster scope (no
//! namespace has such a name). The other shards select their hashes without those namespaces. No shard ever
//! sees another's object: one in a namespace of the canary that the manager does not know yet is seen by no
//! shard until it does. The ownership table names the canary from the start.
//!
//! A shard selects its pods by the label with its own name: a selector is immutable. The manager decides
//! which pod has the label (see `assign`).

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::{
    Expression, LabelSelector, Limit, ResourceSelector, Root, SelectorOperator, ShardingConfig, ShardingConfigSpec,
};
use ctrlmesh_common::names::{self, label};
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::selector::Selector;
use ctrlmesh_common::slots::{NamespaceHash, Slot};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use crate::rules::validate::{self, Problem};

mod assign;
mod changes;
mod versions;
mod share;
mod owned;

pub use assign::{Moves, PodRecord, as_assigned, assign, by_ordinal, choose, unserved};
pub use changes::{Changes, Conflict, adopts, changes, is_of};
pub use owned::{owned, shadowed};
use share::{Former, ListedBy};
pub use share::{Share, existing_shares};
pub use versions::{Slice, Versions, has_second_name};

/// Of one expression, by the schema.
const MAX_VALUES: usize = 4096;

/// Of one selector, by the schema.
const MAX_EXPRESSIONS: usize = 64;

/// The labels by which objects are assigned to shards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labelling {
    /// Value: the slot.
    pub hash_key: String,
    /// Value: the namespace.
    pub namespace_key: String,
    /// Marks objects that are assigned to shards.
    pub control_key: String,
    /// Maps the name of a namespace to a slot.
    pub hash: NamespaceHash,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Shard {
    pub share: Share,
    pub config: ShardingConfig,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DivideError {
    #[error("the ShardingConfig is no root: spec.root is missing")]
    NoRoot,
    #[error("{}", problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("; "))]
    Refused { problems: Vec<Problem> },
    #[error(
        "spec.root.canary: {namespaces} namespaces are pinned or have one of its hashes; with both inNamespaces and inShardHash at most {MAX_VALUES} can, those of cluster scope included"
    )]
    TooManyNamespaces { namespaces: usize },
    /// The shard's own requirements would be too many.
    #[error(
        "spec.root.resourceSelector[{at}].selector: at most {} matchExpressions, because those of the shard are added",
        MAX_EXPRESSIONS - 2
    )]
    TooManyExpressions {
        /// Index of the resource selector.
        at: usize,
    },
    #[error("spec.root.resourceSelector[{at}].selector: excludes everything that shard {shard:?} could own")]
    Nothing {
        /// Index of the resource selector.
        at: usize,
        shard: String,
    },
}

/// The shards of `root`, the canary first; `None` if it is switched off.
///
/// `namespaces` are those of the cluster. They count only if the canary has hashes and namespaces. The ownership table
/// in the root's status counts: a slot stays where it is, unless it has to move. `made` are ShardingConfigs, of which
/// the root has made some: slots that pods without a proxy have stay meant for the shard that they were meant for.
///
/// # Errors
/// If admission would refuse the root or one of its shards.
pub fn divide(
    root: &ShardingConfig,
    labelling: &Labelling,
    namespaces: &BTreeSet<String>,
    made: &[&ShardingConfig],
) -> Result<Option<Vec<Shard>>, DivideError> {
    let rule = root.spec.root.as_ref().ok_or(DivideError::NoRoot)?;
    let problems = validate::sharding_config(root, &[], None).errors;
    if !problems.is_empty() {
        return Err(DivideError::Refused { problems });
    }
    if rule.disable == Some(true) {
        return Ok(None);
    }
    let table = root.status.as_ref().and_then(|status| status.ownership.as_ref());
    let made: Vec<&ShardingConfig> = made.iter().copied().filter(|one| is_made_by(root, one)).collect();
    let former = Former { table, made: &made, hash_key: &labelling.hash_key };
    let listed_by = share::of(rule, labelling.hash, &former, Versions::of(root)).into_iter().map(|share| {
        let listed_by = share.listed_by(labelling, namespaces);
        (share, listed_by)
    });
    let listed_by: Vec<(Share, ListedBy)> = listed_by.collect();
    let listed: BTreeSet<String> = listed_by.iter().flat_map(|(_, listed_by)| listed_by.listed()).collect();
    if listed.len() > MAX_VALUES {
        return Err(DivideError::TooManyNamespaces { namespaces: listed.len() });
    }
    let made = listed_by.into_iter().map(|(share, listed_by)| {
        let limits = match &listed_by {
            empty if empty.is_empty() => nothing(rule, &share.name, labelling),
            _ => limits(rule, &share.name, &expressions(listed_by, &listed, labelling)),
        }?;
        Ok(Shard { config: config(root, &share, limits), share })
    });
    made.collect::<Result<_, _>>().map(Some)
}

/// Why a `root` that is valid by itself cannot be divided.
pub fn undividable(root: &ShardingConfig, labelling: &Labelling, namespaces: &BTreeSet<String>) -> Option<Problem> {
    let error = divide(root, labelling, namespaces, &[]).err()?;
    let field = match &error {
        DivideError::NoRoot | DivideError::Refused { .. } => return None,
        DivideError::TooManyNamespaces { .. } => "spec.root.canary".to_owned(),
        DivideError::TooManyExpressions { at } | DivideError::Nothing { at, .. } => {
            format!("spec.root.resourceSelector[{at}].selector")
        }
    };
    let text = error.to_string();
    let message = text.strip_prefix(&format!("{field}: ")).unwrap_or(&text).to_owned();
    Some(Problem { field, message })
}

/// Whether `root` has made the shard `config`.
pub fn is_made_by(root: &ShardingConfig, config: &ShardingConfig) -> bool {
    config.spec.root.is_none() && root.metadata.namespace == config.metadata.namespace && is_of(root, config)
}

/// The ownership table of the shards and their pods, without an epoch.
pub fn table(shards: &[Shard], assignment: &BTreeMap<String, String>) -> Ownership {
    let mut table = Ownership { pods: assignment.clone(), ..Ownership::default() };
    for Share { name, slots, namespaces, .. } in shards.iter().map(|shard| &shard.share) {
        table.slots.extend(slots.iter().map(|slot| (slot, name.clone())));
        let pinned = namespaces.iter().map(|namespace| (namespace.clone(), name.clone()));
        table.namespaces.extend(pinned);
    }
    table
}

impl Labelling {
    /// Of slot, namespace and control label.
    pub fn keys(&self) -> [&str; 3] {
        [&self.hash_key, &self.namespace_key, &self.control_key]
    }

    /// Whether two keys are the same.
    pub fn is_ambiguous(&self) -> bool {
        let [hash, namespace, control] = self.keys();
        hash == namespace || namespace == control || control == hash
    }

    /// The value of the namespace label for objects of cluster scope. No namespace has a dot in its name.
    pub fn cluster_namespace(slot: Slot) -> String {
        format!("cluster.{slot}")
    }

    /// For the objects in `namespace`, and for the namespace itself.
    pub fn of_namespace(&self, namespace: &str) -> [(&str, String); 2] {
        let slot = self.hash.slot(namespace);
        [(&self.hash_key, slot.to_string()), (&self.namespace_key, namespace.to_owned())]
    }

    /// For an object of cluster scope that is no namespace.
    pub fn of_cluster_object(&self, name: &str) -> [(&str, String); 2] {
        let slot = self.hash.slot(name);
        [(&self.hash_key, slot.to_string()), (&self.namespace_key, Self::cluster_namespace(slot))]
    }
}

impl Default for Labelling {
    fn default() -> Self {
        Self {
            hash_key: label::SHARDING_HASH.to_owned(),
            namespace_key: label::NAMESPACE.to_owned(),
            control_key: label::CONTROL.to_owned(),
            hash: NamespaceHash::default(),
        }
    }
}

/// The root's resource selectors, each with the shard's `own` requirements.
fn limits(rule: &Root, shard: &str, own: &[Expression]) -> Result<Vec<Limit>, DivideError> {
    let everything = [ResourceSelector::default()];
    let resources = if rule.resource_selector.is_empty() { &everything[..] } else { &rule.resource_selector };
    let limits = resources.iter().enumerate().map(|(at, resources)| {
        let mut selector = resources.selector.clone().unwrap_or_default();
        selector.match_expressions.extend(own.iter().cloned());
        if selector.match_expressions.len() > MAX_EXPRESSIONS {
            return Err(DivideError::TooManyExpressions { at });
        }
        if !satisfiable(&selector) {
            return Err(DivideError::Nothing { at, shard: shard.to_owned() });
        }
        Ok(Limit {
            relate_resources: resources.relate_resources.clone(),
            selector: Some(selector),
            object_selector: None,
        })
    });
    limits.collect()
}

/// The limits of a shard that owns nothing: a label that no object has, whatever the root selects.
fn nothing(rule: &Root, shard: &str, labelling: &Labelling) -> Result<Vec<Limit>, DivideError> {
    let resources = rule.resource_selector.iter().map(|one| ResourceSelector { selector: None, ..one.clone() });
    let rule = Root { resource_selector: resources.collect(), ..Root::default() };
    let nowhere = ListedBy::Namespaces([share::NO_NAMESPACE.to_owned()].into());
    limits(&rule, shard, &expressions(nowhere, &BTreeSet::new(), labelling))
}

/// A shard of slots excludes the `listed` namespaces; a shard of namespaces has no other requirement.
fn expressions(listed_by: ListedBy, listed: &BTreeSet<String>, labelling: &Labelling) -> Vec<Expression> {
    let expression = |key: &str, operator, values: Vec<String>| Expression { key: key.to_owned(), operator, values };
    let slots = match listed_by {
        ListedBy::Slots(slots) => slots,
        ListedBy::Namespaces(names) => {
            let names = names.into_iter().collect();
            return vec![expression(&labelling.namespace_key, SelectorOperator::In, names)];
        }
    };
    let slots = slots.iter().map(|slot| slot.to_string()).collect();
    let mut own = vec![expression(&labelling.hash_key, SelectorOperator::In, slots)];
    if !listed.is_empty() {
        let names = listed.iter().cloned().collect();
        own.push(expression(&labelling.namespace_key, SelectorOperator::NotIn, names));
    }
    own
}

fn satisfiable(selector: &LabelSelector) -> bool {
    Selector::try_from(selector).is_ok_and(|selector| selector.overlaps(&Selector::everything()))
}

fn config(root: &ShardingConfig, share: &Share, limits: Vec<Limit>) -> ShardingConfig {
    let (root_name, rule) = (root.metadata.name.clone().unwrap_or_default(), root.spec.root.as_ref());
    let hashes = || share.slots.iter().map(|slot| slot.to_string()).collect();
    let injected = (label::SHARDING_CONFIG_INJECTED.to_owned(), share.name.clone());
    let spec = ShardingConfigSpec {
        selector: Some(LabelSelector { match_labels: [injected].into(), match_expressions: Vec::new() }),
        controller: root.spec.controller.clone(),
        webhook: root.spec.webhook.clone(),
        allow_proxy: root.spec.allow_proxy,
        clusters: rule.map(|rule| rule.clusters.clone()).unwrap_or_default(),
        cluster_hashes: rule.filter(|rule| rule.divides_clusters()).map(|_| hashes()),
        limits,
        root: None,
    };
    let mut config = ShardingConfig::new(&share.name, spec);
    config.metadata.namespace.clone_from(&root.metadata.namespace);
    config.metadata.labels = Some([(label::AUTO_SHARDING_ROOT.to_owned(), root_name.clone())].into());
    // A root from a file has no UID that could own anything.
    config.metadata.owner_references = root.metadata.uid.clone().map(|uid| {
        vec![OwnerReference {
            api_version: format!("{}/{}", names::GROUP, names::VERSION),
            kind: "ShardingConfig".to_owned(),
            name: root_name,
            uid,
            controller: Some(true),
            block_owner_deletion: Some(true),
        }]
    });
    config
}

#[cfg(test)]
mod tests;

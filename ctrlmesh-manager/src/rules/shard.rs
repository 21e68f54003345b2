//! Which shards does a root make, and what does each own?
//!
//! Pure: takes the root and the namespaces that are known, gives the shards as ShardingConfigs.
//!
//! A limit is one conjunction of requirements, and so is everything that a proxy can ask of the API server. A canary of
//! hashes *or* namespaces is a union, which no conjunction says where both count. So there the canary asks by namespace
//! only: the pinned ones, the known ones of its hashes, and, for objects of cluster scope, what their namespace label
//! says instead (`cluster.<slot>`, which no namespace can be called). The others ask for their own hashes, without those
//! namespaces. So no object is ever seen by the wrong shard: one in a namespace of the canary's hashes that the manager
//! has not seen yet is seen by nobody, until it has; the ownership table, which is by hash first, names the canary all
//! along.
//!
//! A shard selects its pods by the label that names it, which never changes, as the selector of a ShardingConfig must
//! not; which pod carries the label is the manager's to decide (see `assign`).

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::{
    Expression, LabelSelector, Limit, ResourceSelector, Root, SelectorOperator, ShardingConfig,
    ShardingConfigSpec,
};
use ctrlmesh_common::names::{self, label};
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::selector::Selector;
use ctrlmesh_common::slots::{NamespaceHash, Slot};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use crate::rules::validate::{self, Problem};

mod assign;
mod changes;
mod share;

pub use assign::{PodRecord, assign, by_ordinal, choose, unserved};
pub use changes::{Changes, Conflict, adopts, changes, is_of};
use share::ListedBy;
pub use share::{Share, existing_shares};

/// Most values that the schema allows in one expression.
const MAX_VALUES: usize = 4096;

/// Most expressions that the schema allows in one selector.
const MAX_EXPRESSIONS: usize = 64;

/// How objects are labelled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labelling {
    /// Key of the label with the slot.
    pub hash_key: String,
    /// Key of the label with the namespace.
    pub namespace_key: String,
    /// Key of the label that says that an object is given to shards.
    pub control_key: String,
    /// How a namespace's name becomes a slot.
    pub hash: NamespaceHash,
}

/// One shard of a root.
#[derive(Clone, Debug, PartialEq)]
pub struct Shard {
    /// What it owns, and how many pods it has.
    pub share: Share,
    /// The ShardingConfig that says so.
    pub config: ShardingConfig,
}

/// A root that makes no shards.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DivideError {
    /// It has no `spec.root`.
    #[error("the ShardingConfig is no root: spec.root is missing")]
    NoRoot,
    /// The admission would refuse it.
    #[error("{}", problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("; "))]
    Refused {
        /// Why.
        problems: Vec<Problem>,
    },
    /// More namespaces than one selector can name.
    #[error(
        "spec.root.canary: {namespaces} namespaces are pinned or have one of its hashes; with both inNamespaces and inShardHash at most {MAX_VALUES} can, those of cluster scope included"
    )]
    TooManyNamespaces {
        /// How many there are.
        namespaces: usize,
    },
    /// A resource selector that leaves no room for the shard's own requirements.
    #[error(
        "spec.root.resourceSelector[{at}].selector: at most {} matchExpressions, because those of the shard are added",
        MAX_EXPRESSIONS - 2
    )]
    TooManyExpressions {
        /// Which resource selector.
        at: usize,
    },
    /// A resource selector that excludes all that a shard owns.
    #[error(
        "spec.root.resourceSelector[{at}].selector: excludes everything that shard {shard:?} could own"
    )]
    Nothing {
        /// Which resource selector.
        at: usize,
        /// The shard that would own nothing.
        shard: String,
    },
}

/// The shards of `root`, the canary first; none where it is switched off, and what is there stays as it is.
///
/// `namespaces` are those of the cluster; they count only where the canary has hashes and namespaces.
///
/// # Errors
/// Where the root is one that the admission refuses, or its shards would be ones that it refuses.
pub fn divide(
    root: &ShardingConfig,
    labelling: &Labelling,
    namespaces: &BTreeSet<String>,
) -> Result<Option<Vec<Shard>>, DivideError> {
    let rule = root.spec.root.as_ref().ok_or(DivideError::NoRoot)?;
    let problems = validate::sharding_config(root, &[], None).errors;
    if !problems.is_empty() {
        return Err(DivideError::Refused { problems });
    }
    if rule.disable == Some(true) {
        return Ok(None);
    }
    let listed_by = share::of(rule, labelling.hash).into_iter().map(|share| {
        let listed_by = share.listed_by(labelling, namespaces);
        (share, listed_by)
    });
    let listed_by: Vec<(Share, ListedBy)> = listed_by.collect();
    let listed: BTreeSet<String> =
        listed_by.iter().flat_map(|(_, listed_by)| listed_by.listed()).collect();
    if listed.len() > MAX_VALUES {
        return Err(DivideError::TooManyNamespaces { namespaces: listed.len() });
    }
    let made = listed_by.into_iter().map(|(share, listed_by)| {
        let limits = limits(rule, &share.name, &expressions(listed_by, &listed, labelling))?;
        Ok(Shard { config: config(root, &share, limits), share })
    });
    made.collect::<Result<_, _>>().map(Some)
}

/// Why no shards can be made of a `root` in which nothing else is wrong; none where they can be.
pub fn undividable(
    root: &ShardingConfig,
    labelling: &Labelling,
    namespaces: &BTreeSet<String>,
) -> Option<Problem> {
    let error = divide(root, labelling, namespaces).err()?;
    let field = match &error {
        DivideError::NoRoot | DivideError::Refused { .. } => return None,
        DivideError::TooManyNamespaces { .. } => "spec.root.canary".to_owned(),
        DivideError::TooManyExpressions { at } | DivideError::Nothing { at, .. } => {
            format!("spec.root.resourceSelector[{at}].selector")
        }
    };
    let said = error.to_string();
    let message = said.strip_prefix(&format!("{field}: ")).unwrap_or(&said).to_owned();
    Some(Problem { field, message })
}

/// The ownership table, in no epoch yet, of these shards and of the pods that were given to them.
pub fn table(shards: &[Shard], assignment: &BTreeMap<String, String>) -> Ownership {
    let mut table = Ownership { pods: assignment.clone(), ..Ownership::default() };
    for Share { name, slots, namespaces, .. } in shards.iter().map(|shard| &shard.share) {
        table.slots.extend(slots.iter().map(|slot| (slot, name.clone())));
        let pinned = namespaces.iter().map(|namespace| (namespace.clone(), name.clone()));
        table.namespaces.extend(pinned);
    }
    table
}

// === impl Labelling ===

impl Labelling {
    /// The keys: of the slot, of the namespace, and of what says that an object is given to shards.
    pub fn keys(&self) -> [&str; 3] {
        [&self.hash_key, &self.namespace_key, &self.control_key]
    }

    /// Whether two of the keys are one, which can only say one thing.
    pub fn is_ambiguous(&self) -> bool {
        let [hash, namespace, control] = self.keys();
        hash == namespace || namespace == control || control == hash
    }

    /// What stands as the namespace of an object of cluster scope whose name is in `slot`. No namespace is called so:
    /// their names have no dots.
    pub fn cluster_namespace(slot: Slot) -> String {
        format!("cluster.{slot}")
    }

    /// The two labels of the objects in `namespace`, and of the namespace itself.
    pub fn of_namespace(&self, namespace: &str) -> [(&str, String); 2] {
        let slot = self.hash.slot(namespace);
        [(&self.hash_key, slot.to_string()), (&self.namespace_key, namespace.to_owned())]
    }

    /// The two labels of the object of cluster scope called `name`, which is no namespace.
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

/// What a shard may see: what any shard may see, where it is its own.
fn limits(rule: &Root, shard: &str, own: &[Expression]) -> Result<Vec<Limit>, DivideError> {
    let everything = [ResourceSelector::default()];
    let resources =
        if rule.resource_selector.is_empty() { &everything[..] } else { &rule.resource_selector };
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

/// A shard of slots leaves out the listed namespaces; a shard of namespaces asks for nothing else.
fn expressions(
    listed_by: ListedBy,
    listed: &BTreeSet<String>,
    labelling: &Labelling,
) -> Vec<Expression> {
    let expression = |key: &str, operator, values: Vec<String>| Expression {
        key: key.to_owned(),
        operator,
        values,
    };
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
    let root_name = root.metadata.name.clone().unwrap_or_default();
    let injected = (label::SHARDING_CONFIG_INJECTED.to_owned(), share.name.clone());
    let spec = ShardingConfigSpec {
        selector: Some(LabelSelector {
            match_labels: [injected].into(),
            match_expressions: Vec::new(),
        }),
        controller: root.spec.controller.clone(),
        webhook: root.spec.webhook.clone(),
        limits,
        root: None,
    };
    let mut config = ShardingConfig::new(&share.name, spec);
    config.metadata.namespace.clone_from(&root.metadata.namespace);
    config.metadata.labels =
        Some([(label::AUTO_SHARDING_ROOT.to_owned(), root_name.clone())].into());
    // A root that was read from a file has no identity that could own anything.
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

//! Compares the shards of a root with those in the cluster.

use std::collections::BTreeMap;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::label;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use super::Shard;
use crate::rules::object_name::name;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Changes {
    /// Missing or different shards, as wanted.
    pub apply: Vec<ShardingConfig>,
    /// Names of shards that the root does not have any more.
    pub remove: Vec<String>,
    /// Shards that cannot be written.
    pub conflicts: Vec<Conflict>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Conflict {
    #[error("ShardingConfig {name:?} is not of this root; rename or delete it, or change spec.root.prefix")]
    Foreign { name: String },
    #[error("ShardingConfig {name:?} selects its pods otherwise, and spec.selector is immutable; delete it")]
    Selector { name: String },
}

/// `existing` are the ShardingConfigs of the root's namespace.
pub fn changes(root: &ShardingConfig, wanted: &[Shard], existing: &[&ShardingConfig]) -> Changes {
    let by_name: BTreeMap<&str, &ShardingConfig> =
        existing.iter().map(|config| (name(&config.metadata), *config)).collect();
    let mut changes = Changes::default();
    for shard in wanted {
        match by_name.get(shard.share.name.as_str()) {
            Some(existing_config) if !is_of(root, existing_config) && !adopts(root, shard, existing_config) => {
                changes.conflicts.push(Conflict::Foreign { name: shard.share.name.clone() });
            }
            Some(existing_config) if existing_config.spec.selector != shard.config.spec.selector => {
                changes.conflicts.push(Conflict::Selector { name: shard.share.name.clone() });
            }
            Some(existing_config) if is_equal(existing_config, &shard.config) => {}
            _ => changes.apply.push(shard.config.clone()),
        }
    }
    let orphans = by_name
        .values()
        .filter(|config| is_of(root, config) && !wanted.iter().any(|shard| shard.share.name == name(&config.metadata)));
    changes.remove = orphans.map(|config| name(&config.metadata).to_owned()).collect();
    changes
}

/// Whether `root` owns `config`. The label counts only for a root from a file, which has no UID: users can
/// set labels.
pub fn is_of(root: &ShardingConfig, config: &ShardingConfig) -> bool {
    match &root.metadata.uid {
        Some(uid) => controller(config).is_some_and(|owner| owner.uid == *uid),
        None => root_label(&config.metadata) == Some(name(&root.metadata)),
    }
}

/// Whether `config` is `shard` of `root` and has only lost its owner reference: it has no owner, and the
/// label, name and selector of the shard. The root takes it back.
pub fn adopts(root: &ShardingConfig, shard: &Shard, config: &ShardingConfig) -> bool {
    controller(config).is_none()
        && root_label(&config.metadata) == Some(name(&root.metadata))
        && name(&config.metadata) == shard.share.name
        && config.spec.selector == shard.config.spec.selector
}

fn controller(config: &ShardingConfig) -> Option<&OwnerReference> {
    let owners = config.metadata.owner_references.iter().flatten();
    owners.into_iter().find(|owner| owner.controller == Some(true))
}

/// Whether all fields agree that the manager decides.
fn is_equal(existing_config: &ShardingConfig, wanted: &ShardingConfig) -> bool {
    let owners = |meta: &ObjectMeta| meta.owner_references.clone().unwrap_or_default();
    existing_config.spec == wanted.spec
        && root_label(&existing_config.metadata) == root_label(&wanted.metadata)
        && owners(&wanted.metadata).iter().all(|owner| owners(&existing_config.metadata).contains(owner))
}

fn root_label(meta: &ObjectMeta) -> Option<&str> {
    meta.labels.as_ref()?.get(label::AUTO_SHARDING_ROOT).map(String::as_str)
}

//! Where is it in the plan?

use std::collections::BTreeMap;

use ctrlmesh_common::api::ShardingConfig;

use crate::cluster::plan::Plan;
use crate::rules::compile::{Record, Told};
use crate::rules::pod::Member;
use crate::rules::shard;

/// What is looked for again and again in a plan.
#[derive(Debug, Default)]
pub struct PlanIndex<'a> {
    /// The pods of each shard, by the `NAMESPACE/NAME` of its operator and its own name: a shard by itself may be called
    /// as one of a root's.
    pods: BTreeMap<(&'a str, &'a str), Vec<(&'a Member, &'a Told)>>,
    /// The roots, by namespace.
    roots: BTreeMap<Option<&'a str>, Vec<&'a ShardingConfig>>,
}

// === impl PlanIndex ===

impl<'a> PlanIndex<'a> {
    /// In `plan`. Of pods that have ended nothing is said: evicted ones stay by the thousands, more than a status has room
    /// for.
    pub fn of(plan: &'a Plan) -> Self {
        let mut found = Self::default();
        for member in plan.snapshot.members.iter().filter(|member| !member.ended) {
            let Some(told) = plan.compiled.policies.get(&member.name) else { continue };
            let (Some(operator), Some(shard)) = (&told.operator, &told.shard) else { continue };
            found.pods.entry((operator, shard)).or_default().push((member, told));
        }
        for root in plan.snapshot.configs.iter().filter(|config| config.spec.root.is_some()) {
            found.roots.entry(root.metadata.namespace.as_deref()).or_default().push(root);
        }
        found
    }

    /// The `NAMESPACE/NAME` of the root that made `config`.
    pub(super) fn root(&self, config: &ShardingConfig) -> Option<String> {
        if config.spec.root.is_some() {
            return None;
        }
        let namespace = config.metadata.namespace.as_deref();
        let near = self.roots.get(&namespace).into_iter().flatten();
        let root = near.copied().find(|root| shard::is_of(root, config))?;
        let name = root.metadata.name.as_deref().unwrap_or_default();
        Some(format!("{}/{name}", namespace.unwrap_or_default()))
    }

    /// The pods of a ShardingConfig: of all shards of its record, or of the one that it is itself, perhaps of a root.
    pub(super) fn pods(
        &self,
        (full_name, name): (&str, &str),
        record: Option<&Record>,
        root: Option<&str>,
    ) -> Vec<(&'a Member, &'a Told)> {
        let shards: Vec<(&str, &str)> = match record {
            Some(record) if !record.shards.is_empty() => {
                record.shards.keys().map(|shard| (full_name, shard.as_str())).collect()
            }
            _ => [Some(full_name), root].into_iter().flatten().map(|one| (one, name)).collect(),
        };
        let pods = shards.iter().filter_map(|shard| self.pods.get(shard));
        pods.flatten().copied().collect()
    }
}

//! Indexes a plan by shard and by namespace of roots.

use std::collections::BTreeMap;

use ctrlmesh_common::api::ShardingConfig;

use crate::cluster::plan::{Changed, Plan};
use crate::rules::compile::{CompiledPolicy, Record};
use crate::rules::object_name::full_name;
use crate::rules::pod::Member;
use crate::rules::shard;

#[derive(Debug, Default)]
pub struct PlanIndex<'a> {
    /// Pods by `NAMESPACE/NAME` of the operator and name of the shard. The shard's name alone is not unique:
    /// a standalone config may have the name of a root's shard.
    pods: BTreeMap<(&'a str, &'a str), Vec<(&'a Member, &'a CompiledPolicy)>>,
    /// Roots by namespace.
    roots: BTreeMap<Option<&'a str>, Vec<&'a ShardingConfig>>,
}

impl<'a> PlanIndex<'a> {
    /// Of what is in these namespaces. Leaves out pods that have ended: evicted pods stay by the thousands, more than a
    /// status can hold.
    pub fn of(plan: &'a Plan, within: &Changed) -> Self {
        let mut index = Self::default();
        let members = plan.snapshot.members.iter().filter(|member| within.has(&member.name.namespace));
        for member in members.filter(|member| !member.ended) {
            let Some(policy) = plan.compiled.policies.get(&member.name) else { continue };
            let (Some(operator), Some(shard)) = (&policy.operator, &policy.shard) else { continue };
            index.pods.entry((operator, shard)).or_default().push((member, policy));
        }
        for root in plan.snapshot.roots_in(within) {
            index.roots.entry(root.metadata.namespace.as_deref()).or_default().push(root);
        }
        index
    }

    /// `NAMESPACE/NAME` of the root that made `config`.
    pub(super) fn root(&self, config: &ShardingConfig) -> Option<String> {
        self.root_of(config).map(|root| full_name(&root.metadata))
    }

    /// Whether the root that made `config` has shards that nobody needs now: for further replicas, or another version.
    pub(super) fn may_be_spare(&self, config: &ShardingConfig) -> bool {
        let rule = self.root_of(config).and_then(|root| root.spec.root.as_ref());
        rule.is_some_and(|rule| rule.is_elastic() || rule.rollout.is_some())
    }

    fn root_of(&self, config: &ShardingConfig) -> Option<&'a ShardingConfig> {
        if config.spec.root.is_some() {
            return None;
        }
        let roots = self.roots.get(&config.metadata.namespace.as_deref()).into_iter().flatten();
        roots.copied().find(|root| shard::is_of(root, config))
    }

    /// The pods of all shards of `record`, or of the shard `name` itself, perhaps of `root`.
    pub(super) fn pods(
        &self,
        full_name: &str,
        name: &str,
        record: Option<&Record>,
        root: Option<&str>,
    ) -> Vec<(&'a Member, &'a CompiledPolicy)> {
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

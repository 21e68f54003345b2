//! Which operators are there, which shards have they, and which pod is of which?

use std::collections::BTreeMap;

use ctrlmesh_common::api::{Root, ShardingConfig};
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::selector::Selector;

use super::{Trouble, World};
use crate::pod::Member;
use crate::shard::{self, Seat, Shard, Share};
use crate::validate;

/// Some shards: those of a root, or one that stands by itself.
#[derive(Clone, Debug)]
pub struct Operator<'a> {
    /// Whether its pods can be told anything new.
    pub valid: bool,
    /// The newest epoch that was written down for it.
    pub epoch: u64,
    config: &'a ShardingConfig,
    division: Division,
}

#[derive(Clone, Debug)]
enum Division {
    /// The shards of a root, and which pod is of which.
    Root { shards: Vec<Shard>, pods: BTreeMap<String, String> },
    /// The shards of a root that cannot be divided, which are known only by what their names begin with.
    Unknown { prefix: String },
    /// A shard by itself; without a selector it has no pods.
    Alone { selector: Option<Selector> },
}

/// The operators, by namespace and name, and what is wrong with their ShardingConfigs.
///
/// The shards of a root that is switched off, or cannot be divided, stand by themselves as they are.
pub fn operators(world: World<'_>) -> (Vec<Operator<'_>>, Vec<Trouble>) {
    let mut configs: Vec<&ShardingConfig> = world.configs.iter().collect();
    configs.sort_by_key(|config| (namespace(config), name(config)));
    let (mut operators, mut failed, mut troubles) = (Vec::new(), Vec::new(), Vec::new());
    for root in configs.iter().filter(|config| config.spec.root.is_some()) {
        match shard::divide(root, world.labelling, world.namespaces) {
            Ok(Some(shards)) => operators.push(divided(root, shards, world.members)),
            Ok(None) => {}
            Err(error) => {
                troubles.push(Trouble { object: object(root), message: error.to_string() });
                failed.push(undivided(root));
            }
        }
    }
    let roots = operators.len();
    for config in configs.iter().filter(|config| config.spec.root.is_none()) {
        if !operators[..roots].iter().any(|root| root.makes(config)) {
            let report = validate::sharding_config(config, &[], None);
            let invalid = |problem: &validate::Problem| Trouble {
                object: object(config),
                message: problem.to_string(),
            };
            troubles.extend(report.errors.iter().map(invalid));
            operators.push(alone(config, report.errors.is_empty()));
        }
    }
    operators.append(&mut failed);
    (operators, troubles)
}

/// `KIND NAMESPACE/NAME`.
pub(super) fn object(config: &ShardingConfig) -> String {
    format!("ShardingConfig {}/{}", namespace(config), name(config))
}

/// The name of a ShardingConfig.
pub(super) fn name(config: &ShardingConfig) -> &str {
    config.metadata.name.as_deref().unwrap_or_default()
}

// === impl Operator ===

impl Operator<'_> {
    /// The shard of `pod`; none where it is not of this operator.
    pub fn shard_of(&self, pod: &Member) -> Option<&ShardingConfig> {
        if namespace(self.config) != pod.name.namespace {
            return None;
        }
        match &self.division {
            Division::Root { shards, pods } => {
                let shard = pods.get(&pod.name.name)?;
                shards.iter().find(|one| one.share.name == *shard).map(|shard| &shard.config)
            }
            Division::Unknown { .. } => None,
            Division::Alone { selector } => {
                selector.as_ref()?.matches(&pod.labels).then_some(self.config)
            }
        }
    }

    /// The shard for `pod`, which is being admitted and has perhaps no name yet, beside those that are there.
    pub fn shard_for(&self, pod: &Member, members: &[Member]) -> Option<&ShardingConfig> {
        let Division::Root { shards, .. } = &self.division else { return self.shard_of(pod) };
        let rule = self.config.spec.root.as_ref()?;
        if namespace(self.config) != pod.name.namespace {
            return None;
        }
        let shares: Vec<Share> = shards.iter().map(|shard| shard.share.clone()).collect();
        let recorded = shares.iter().find(|share| pod.recorded() == Some(&share.name));
        let share = match (ordinal(rule, pod), revision(rule, pod)) {
            (Some(ordinal), _) => shard::by_ordinal(&shares, ordinal),
            (None, Some(_)) if recorded.is_some() => recorded,
            (None, Some(revision)) => {
                shard::choose(&shares, &seats(self.config, rule, members), revision)
            }
            (None, None) => None,
        };
        let name = &share?.name;
        shards.iter().find(|shard| shard.share.name == *name).map(|shard| &shard.config)
    }

    /// Whether `shard` of the pod's namespace is one of which nothing new can be said.
    pub(super) fn failed(&self, pod: &Member, shard: &str) -> bool {
        let named = match &self.division {
            Division::Unknown { prefix } => shard.starts_with(prefix),
            _ => name(self.config) == shard,
        };
        !self.valid && named && namespace(self.config) == pod.name.namespace
    }

    /// The namespace in which its pods are.
    pub(super) fn namespace(&self) -> &str {
        namespace(self.config)
    }

    /// The root, by `NAMESPACE/NAME`.
    pub(super) fn root(&self) -> Option<String> {
        let root = self.config.spec.root.as_ref();
        root.map(|_| format!("{}/{}", namespace(self.config), name(self.config)))
    }

    /// The ownership table of a root.
    pub(super) fn table(&self) -> Option<Ownership> {
        let Division::Root { shards, pods } = &self.division else { return None };
        Some(shard::table(shards, pods).after(&written(self.config).unwrap_or_default()))
    }

    /// The shards of a root that no pod is of.
    pub(super) fn unserved(&self) -> Vec<String> {
        let Division::Root { shards, pods } = &self.division else { return Vec::new() };
        shard::unserved(shards.iter().map(|shard| &shard.share), pods).map(str::to_owned).collect()
    }

    /// Whether `config` is what stands in the cluster for one of its shards, or for one that it no longer has.
    fn makes(&self, config: &ShardingConfig) -> bool {
        let Division::Root { shards, .. } = &self.division else { return false };
        namespace(self.config) == namespace(config)
            && (shard::is_of(self.config, config)
                || shards.iter().any(|shard| shard.share.name == name(config)))
    }
}

fn divided<'a>(root: &'a ShardingConfig, made: Vec<Shard>, members: &[Member]) -> Operator<'a> {
    let shares: Vec<Share> = made.iter().map(|shard| shard.share.clone()).collect();
    let pods = root.spec.root.as_ref().map_or_else(BTreeMap::new, |rule| {
        let mut pods = shard::assign(&shares, &seats(root, rule, members), false);
        let of_root = members.iter().filter(|pod| is_candidate(root, pod));
        pods.extend(of_root.filter_map(|pod| {
            let share = shard::by_ordinal(&shares, ordinal(rule, pod)?)?;
            Some((pod.name.name.clone(), share.name.clone()))
        }));
        pods
    });
    let table = written(root).map_or(0, |table| table.epoch);
    let division = Division::Root { shards: made, pods };
    Operator { valid: true, epoch: epoch(root).max(table), config: root, division }
}

fn undivided(root: &ShardingConfig) -> Operator<'_> {
    let prefix =
        root.spec.root.as_ref().map_or_else(String::new, |rule| format!("{}-", rule.prefix));
    let division = Division::Unknown { prefix };
    Operator { valid: false, epoch: epoch(root), config: root, division }
}

fn alone(config: &ShardingConfig, valid: bool) -> Operator<'_> {
    let selector = config.spec.selector.as_ref().filter(|selector| !selector.is_empty());
    let selector = selector.and_then(|selector| Selector::try_from(selector).ok());
    Operator { valid, epoch: epoch(config), config, division: Division::Alone { selector } }
}

/// The pods of the root's Deployment. What is written in the root's status counts before what a pod says of itself.
fn seats(root: &ShardingConfig, rule: &Root, members: &[Member]) -> Vec<Seat> {
    let written = written(root).unwrap_or_default();
    let of_root = members.iter().filter(|pod| is_candidate(root, pod));
    let seats = of_root.filter_map(|pod| {
        let shard = written.shard_of(&pod.name.name).or(pod.recorded());
        Some(Seat {
            pod: pod.name.name.clone(),
            revision: revision(rule, pod)?.to_owned(),
            shard: shard.map(str::to_owned),
            leaving: pod.leaving,
        })
    });
    seats.collect()
}

fn is_candidate(root: &ShardingConfig, pod: &Member) -> bool {
    pod.enrolled() && pod.name.namespace == namespace(root)
}

fn ordinal(rule: &Root, pod: &Member) -> Option<u32> {
    pod.ordinal_in(rule.target_stateful_set.as_deref()?)
}

fn revision<'a>(rule: &Root, pod: &'a Member) -> Option<&'a str> {
    pod.revision_in(rule.target_deployment.as_deref()?)
}

fn written(root: &ShardingConfig) -> Option<Ownership> {
    root.status.as_ref()?.ownership.clone()
}

fn epoch(config: &ShardingConfig) -> u64 {
    let epoch = config.status.as_ref().and_then(|status| status.epoch);
    epoch.and_then(|epoch| u64::try_from(epoch).ok()).unwrap_or_default()
}

fn namespace(config: &ShardingConfig) -> &str {
    config.metadata.namespace.as_deref().unwrap_or_default()
}

//! Which operators are there, which shards have they, and which pod is of which?

use std::collections::BTreeMap;
use std::sync::Arc;

use ctrlmesh_common::api::{Root, ShardingConfig, ShardingConfigStatus};
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::selector::Selector;
use ctrlmesh_common::share;

use super::placement::{Placement, namespace};
use super::{Told, Trouble, World};
use crate::rules::pod::Member;
use crate::rules::shard::{self, Shard};
use crate::rules::validate;

/// Some shards: those of a root, or one that stands by itself.
#[derive(Clone, Debug)]
pub struct Operator<'a> {
    /// Whether its pods can be told anything new.
    pub valid: bool,
    config: &'a ShardingConfig,
    division: Division<'a>,
}

#[derive(Clone, Debug)]
enum Division<'a> {
    /// The shards of a root, and which pod is of which.
    Root { shards: Vec<Shard>, placement: Placement<'a> },
    /// The shards of a root that cannot be divided, which are known only by what their names begin with.
    Unknown { prefix: String },
    /// A shard by itself; without a selector or a root, which makes it no more but still places its pods, it has none.
    Alone { selector: Option<Selector>, placement: Option<Arc<Placement<'a>>> },
}

/// The operators, by namespace and name, and what is wrong with their ShardingConfigs.
///
/// The shards of a root that is switched off, or cannot be divided, stand by themselves as they are; their pods are
/// placed by the root all the same, so that one that is made anew is not lost.
pub fn operators(world: World<'_>) -> (Vec<Operator<'_>>, Vec<Trouble>) {
    let mut configs: Vec<&ShardingConfig> = world.configs.iter().collect();
    configs.sort_by_key(|config| (namespace(config), name(config)));
    let (mut operators, mut failed, mut troubles) = (Vec::new(), Vec::new(), Vec::new());
    let mut members: BTreeMap<&str, Vec<&Member>> = BTreeMap::new();
    for pod in world.members.iter().filter(|pod| pod.enrolled()) {
        members.entry(&pod.name.namespace).or_default().push(pod);
    }
    let near =
        |config: &ShardingConfig| members.get(namespace(config)).map_or(&[][..], Vec::as_slice);
    let mut inactive = Vec::new();
    for root in &configs {
        let Some(rule) = &root.spec.root else { continue };
        match shard::divide(root, world.labelling, world.namespaces) {
            Ok(Some(shards)) => operators.push(divided(root, rule, shards, near(root), world)),
            Ok(None) => inactive.push((*root, rule)),
            Err(error) => {
                troubles.push(trouble(root, error.to_string()));
                failed.push(undivided(root, rule));
                inactive.push((*root, rule));
            }
        }
    }
    let inactive: Vec<(&ShardingConfig, Arc<Placement<'_>>)> = inactive
        .into_iter()
        .map(|(root, rule)| {
            let children = configs.iter().filter(|config| makes(root, config));
            let children: Vec<&ShardingConfig> = children.copied().collect();
            (root, Arc::new(Placement::of_inactive_root(root, rule, &children, near(root), world)))
        })
        .collect();
    let roots = operators.len();
    for config in configs.iter().filter(|config| config.spec.root.is_none()) {
        if !operators[..roots].iter().any(|root| root.is_shard(config)) {
            let report = validate::sharding_config(config, &[], None);
            troubles.extend(report.errors.iter().map(|error| trouble(config, error.to_string())));
            let placement = inactive.iter().find(|(root, _)| makes(root, config));
            let placement = placement.map(|(_, placement)| Arc::clone(placement));
            operators.push(alone(config, placement, report.errors.is_empty()));
        }
    }
    operators.append(&mut failed);
    (operators, troubles)
}

/// Whether `config` is a shard that `root` has made.
fn makes(root: &ShardingConfig, config: &ShardingConfig) -> bool {
    config.spec.root.is_none() && namespace(root) == namespace(config) && shard::is_of(root, config)
}

/// What is wrong with a ShardingConfig.
pub(super) fn trouble(config: &ShardingConfig, message: String) -> Trouble {
    let config = full_name(config);
    Trouble { object: format!("ShardingConfig {config}"), configs: vec![config], message }
}

fn full_name(config: &ShardingConfig) -> String {
    format!("{}/{}", namespace(config), name(config))
}

/// The name of a ShardingConfig.
pub(super) fn name(config: &ShardingConfig) -> &str {
    config.metadata.name.as_deref().unwrap_or_default()
}

// === impl Operator ===

impl Operator<'_> {
    /// The resourceVersion of its ShardingConfig: a number that grows, since Kubernetes 1.35 also by its contract.
    pub fn version(&self) -> u64 {
        let version = self.config.metadata.resource_version.as_deref();
        version.and_then(|version| version.parse().ok()).unwrap_or_default()
    }

    /// What a pod of the `shard` is told by this policy, which is not that pod's yet.
    pub(super) fn tells(&self, shard: &str, policy: &Policy) -> Told {
        let (shard, operator) = (Some(shard.to_owned()), Some(self.full_name()));
        Told::new(shard, operator, self.version(), policy.clone())
    }

    /// The shard of `pod`; none where it is not of this operator.
    pub fn shard_of(&self, pod: &Member) -> Option<&ShardingConfig> {
        if namespace(self.config) != pod.name.namespace {
            return None;
        }
        match &self.division {
            Division::Root { shards, placement } => {
                let shard = placement.pods().get(&pod.name.name)?;
                shards.iter().find(|one| one.share.name == *shard).map(|shard| &shard.config)
            }
            Division::Unknown { .. } => None,
            Division::Alone { placement, .. } => {
                let placed = placement.as_ref().and_then(|all| all.pods().get(&pod.name.name));
                self.has(pod, placed.map(String::as_str)).then_some(self.config)
            }
        }
    }

    /// The shard for `pod`, which is being admitted and has perhaps no name yet, beside those that are there.
    pub fn shard_for(&self, pod: &Member, members: &[Member]) -> Option<&ShardingConfig> {
        if namespace(self.config) != pod.name.namespace {
            return None;
        }
        match &self.division {
            Division::Root { shards, placement } => {
                let name = placement.shard_for(pod, members)?;
                shards.iter().find(|shard| shard.share.name == name).map(|shard| &shard.config)
            }
            Division::Unknown { .. } => None,
            Division::Alone { placement, .. } => {
                let placed = placement.as_ref().and_then(|all| all.shard_for(pod, members));
                self.has(pod, placed).then_some(self.config)
            }
        }
    }

    /// Whether `pod` is of this shard that stands by itself; where a root has `placed` the pod, that decides.
    fn has(&self, pod: &Member, placed: Option<&str>) -> bool {
        match (placed, &self.division) {
            (Some(placed), _) => placed == name(self.config),
            (None, Division::Alone { selector: Some(selector), .. }) => {
                selector.matches(&pod.labels)
            }
            (None, _) => false,
        }
    }

    /// The policies of its shards, in no epoch yet.
    ///
    /// # Errors
    /// The first ShardingConfig from which none follows.
    pub(super) fn policies(&self) -> Result<BTreeMap<String, Policy>, Trouble> {
        let of = |config: &ShardingConfig| {
            let policy = share::policy(config, self.namespace());
            let policy = policy.map_err(|error| trouble(config, error.to_string()))?;
            policy.check().map_err(|error| trouble(config, error.to_string()))?;
            Ok((name(config).to_owned(), policy))
        };
        match &self.division {
            Division::Root { shards, .. } => shards.iter().map(|shard| of(&shard.config)).collect(),
            Division::Unknown { .. } => Ok(BTreeMap::new()),
            Division::Alone { .. } => [of(self.config)].into_iter().collect(),
        }
    }

    /// Whether `pod`, which no shard selects, may be of this operator, of which nothing new can be said.
    pub fn may_have(&self, pod: &Member, last: Option<&Told>) -> bool {
        if self.valid || namespace(self.config) != pod.name.namespace {
            return false;
        }
        let told = last.and_then(|last| last.shard.as_deref());
        let mut shards = told.into_iter().chain(pod.recorded());
        match (&self.division, &self.config.spec.root) {
            (Division::Unknown { prefix }, Some(rule)) => {
                shards.any(|shard| shard.starts_with(prefix)) || pod.is_of_target(rule)
            }
            _ => shards.any(|shard| shard == name(self.config)),
        }
    }

    /// The root, or the ShardingConfig that stands by itself.
    pub(super) fn config(&self) -> &ShardingConfig {
        self.config
    }

    /// The namespace in which its pods are.
    pub(super) fn namespace(&self) -> &str {
        namespace(self.config)
    }

    /// The root, or the ShardingConfig that stands by itself, as `NAMESPACE/NAME`.
    pub fn full_name(&self) -> String {
        full_name(self.config)
    }

    /// Its status.
    pub(super) fn status(&self) -> Option<&ShardingConfigStatus> {
        self.config.status.as_ref()
    }

    /// Whether its shards are made by a root.
    pub(super) fn is_root(&self) -> bool {
        matches!(self.division, Division::Root { .. })
    }

    /// The ownership table of a root, in no epoch yet.
    pub(super) fn table(&self) -> Option<Ownership> {
        let Division::Root { shards, placement } = &self.division else { return None };
        Some(shard::table(shards, placement.pods()))
    }

    /// The shards of a root that no pod is of, but perhaps one that goes or has ended.
    pub(super) fn unserved(&self) -> Vec<String> {
        let Division::Root { placement, .. } = &self.division else { return Vec::new() };
        placement.unserved()
    }

    /// Whether it stands by itself because `root`, which has made it, makes nothing now.
    pub(super) fn is_made_by(&self, root: &ShardingConfig) -> bool {
        matches!(self.division, Division::Alone { .. })
            && root.spec.root.is_some()
            && makes(root, self.config)
    }

    /// Whether `config` is what stands in the cluster for one of its shards, or for one that it no longer has. That of
    /// somebody else which is called as one of its shards is not.
    pub(super) fn is_shard(&self, config: &ShardingConfig) -> bool {
        let Division::Root { shards, .. } = &self.division else { return false };
        namespace(self.config) == namespace(config)
            && (shard::is_of(self.config, config)
                || shards.iter().any(|shard| shard::adopts(self.config, shard, config)))
    }
}

/// A root with its shards; `near` are the enrolled pods of its namespace.
fn divided<'a>(
    root: &'a ShardingConfig,
    rule: &'a Root,
    shards: Vec<Shard>,
    near: &[&Member],
    world: World<'_>,
) -> Operator<'a> {
    let divided = shards.iter().map(|shard| shard.share.clone()).collect();
    let placement = Placement::of_active_root(root, rule, divided, near, world);
    Operator { valid: true, config: root, division: Division::Root { shards, placement } }
}

fn undivided<'a>(root: &'a ShardingConfig, rule: &Root) -> Operator<'a> {
    let division = Division::Unknown { prefix: format!("{}-", rule.prefix) };
    Operator { valid: false, config: root, division }
}

fn alone<'a>(
    config: &'a ShardingConfig,
    placement: Option<Arc<Placement<'a>>>,
    valid: bool,
) -> Operator<'a> {
    let selector = config.spec.selector.as_ref().filter(|selector| !selector.is_empty());
    let selector = selector.and_then(|selector| Selector::try_from(selector).ok());
    Operator { valid, config, division: Division::Alone { selector, placement } }
}

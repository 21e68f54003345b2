//! Which operators are there, which shards have they, and which pod is of which?

use std::collections::BTreeMap;

use ctrlmesh_common::api::{Root, ShardingConfig, ShardingConfigStatus};
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::selector::Selector;
use ctrlmesh_common::share;

use super::{Told, Trouble, World};
use crate::pod::Member;
use crate::shard::{self, Seat, Shard, Share};
use crate::validate;

/// Some shards: those of a root, or one that stands by itself.
#[derive(Clone, Debug)]
pub struct Operator<'a> {
    /// Whether its pods can be told anything new.
    pub valid: bool,
    config: &'a ShardingConfig,
    division: Division,
}

#[derive(Clone, Debug)]
enum Division {
    /// The shards of a root, and which pod is of which.
    Root { shards: Vec<Shard>, pods: BTreeMap<String, String>, first_ordinal: u32 },
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
    let mut members: BTreeMap<&str, Vec<&Member>> = BTreeMap::new();
    for pod in world.members.iter().filter(|pod| pod.enrolled()) {
        members.entry(&pod.name.namespace).or_default().push(pod);
    }
    for root in configs.iter().filter(|config| config.spec.root.is_some()) {
        match shard::divide(root, world.labelling, world.namespaces) {
            Ok(Some(shards)) => {
                let near = members.get(namespace(root)).map_or(&[][..], Vec::as_slice);
                operators.push(divided(root, shards, near, world.first_ordinals));
            }
            Ok(None) => {}
            Err(error) => {
                troubles.push(trouble(root, error.to_string()));
                failed.push(undivided(root));
            }
        }
    }
    let roots = operators.len();
    for config in configs.iter().filter(|config| config.spec.root.is_none()) {
        if !operators[..roots].iter().any(|root| root.is_shard(config)) {
            let report = validate::sharding_config(config, &[], None);
            troubles.extend(report.errors.iter().map(|error| trouble(config, error.to_string())));
            operators.push(alone(config, report.errors.is_empty()));
        }
    }
    operators.append(&mut failed);
    (operators, troubles)
}

fn trouble(config: &ShardingConfig, message: String) -> Trouble {
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

    /// The shard of `pod`; none where it is not of this operator.
    pub fn shard_of(&self, pod: &Member) -> Option<&ShardingConfig> {
        if namespace(self.config) != pod.name.namespace {
            return None;
        }
        match &self.division {
            Division::Root { shards, pods, .. } => {
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
        let Division::Root { shards, first_ordinal, .. } = &self.division else {
            return self.shard_of(pod);
        };
        let rule = self.config.spec.root.as_ref()?;
        if namespace(self.config) != pod.name.namespace {
            return None;
        }
        let shares: Vec<Share> = shards.iter().map(|shard| shard.share.clone()).collect();
        let by_ordinal = || seated(&shares, rule, *first_ordinal, pod, pod.recorded());
        let recorded = shares.iter().find(|share| pod.recorded() == Some(&share.name));
        let share = by_ordinal().or_else(|| {
            let revision = revision(rule, pod)?;
            let near = members.iter().filter(|pod| is_candidate(self.config, pod));
            let choose = || shard::choose(&shares, &seats(self.config, rule, near), revision);
            recorded.or_else(choose)
        });
        let name = &share?.name;
        shards.iter().find(|shard| shard.share.name == *name).map(|shard| &shard.config)
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
    pub(super) fn may_have(&self, pod: &Member, last: Option<&Told>) -> bool {
        if self.valid || namespace(self.config) != pod.name.namespace {
            return false;
        }
        let told = last.and_then(|last| last.shard.as_deref());
        let mut shards = told.into_iter().chain(pod.recorded());
        match (&self.division, &self.config.spec.root) {
            (Division::Unknown { prefix }, Some(rule)) => {
                shards.any(|shard| shard.starts_with(prefix))
                    || ordinal(rule, pod).is_some()
                    || revision(rule, pod).is_some()
            }
            _ => shards.any(|shard| shard == name(self.config)),
        }
    }

    /// The namespace in which its pods are.
    pub(super) fn namespace(&self) -> &str {
        namespace(self.config)
    }

    /// The root, or the ShardingConfig that stands by itself, as `NAMESPACE/NAME`.
    pub(super) fn full_name(&self) -> String {
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
        let Division::Root { shards, pods, .. } = &self.division else { return None };
        Some(shard::table(shards, pods))
    }

    /// The shards of a root that no pod is of.
    pub(super) fn unserved(&self) -> Vec<String> {
        let Division::Root { shards, pods, .. } = &self.division else { return Vec::new() };
        shard::unserved(shards.iter().map(|shard| &shard.share), pods).map(str::to_owned).collect()
    }

    /// Whether `config` is what stands in the cluster for one of its shards, or for one that it no longer has.
    pub(super) fn is_shard(&self, config: &ShardingConfig) -> bool {
        let Division::Root { shards, .. } = &self.division else { return false };
        namespace(self.config) == namespace(config)
            && (shard::is_of(self.config, config)
                || shards.iter().any(|shard| shard.share.name == name(config)))
    }
}

/// A root with its shards; `near` are the enrolled pods of its namespace.
fn divided<'a>(
    root: &'a ShardingConfig,
    made: Vec<Shard>,
    near: &[&Member],
    first_ordinals: &BTreeMap<String, u32>,
) -> Operator<'a> {
    let shares: Vec<Share> = made.iter().map(|shard| shard.share.clone()).collect();
    let rule = root.spec.root.clone().unwrap_or_default();
    let set = rule.target_stateful_set.as_deref().unwrap_or_default();
    let first = first_ordinals.get(&format!("{}/{set}", namespace(root)));
    let first_ordinal = first.copied().unwrap_or_default();
    let written = written(root);
    let seats = seats(root, &rule, near.iter().copied());
    let mut pods = shard::assign(&shares, &seats, is_settled(&seats));
    pods.extend(near.iter().filter_map(|pod| {
        let before = written.as_ref().and_then(|written| written.shard_of(&pod.name.name));
        let share = seated(&shares, &rule, first_ordinal, pod, before.or(pod.recorded()))?;
        Some((pod.name.name.clone(), share.name.clone()))
    }));
    let division = Division::Root { shards: made, pods, first_ordinal };
    Operator { valid: true, config: root, division }
}

/// The share of a pod of the root's StatefulSet. One whose ordinal lies below the first is about to go: it keeps the
/// shard that it had.
fn seated<'a>(
    shares: &'a [Share],
    rule: &Root,
    first_ordinal: u32,
    pod: &Member,
    before: Option<&str>,
) -> Option<&'a Share> {
    let ordinal = ordinal(rule, pod)?;
    match ordinal.checked_sub(first_ordinal) {
        Some(number) => shard::by_ordinal(shares, number),
        None => shares
            .iter()
            .find(|share| before == Some(&share.name))
            .or_else(|| shares.iter().find(|share| !share.canary)),
    }
}

fn undivided(root: &ShardingConfig) -> Operator<'_> {
    let prefix =
        root.spec.root.as_ref().map_or_else(String::new, |rule| format!("{}-", rule.prefix));
    let division = Division::Unknown { prefix };
    Operator { valid: false, config: root, division }
}

fn alone(config: &ShardingConfig, valid: bool) -> Operator<'_> {
    let selector = config.spec.selector.as_ref().filter(|selector| !selector.is_empty());
    let selector = selector.and_then(|selector| Selector::try_from(selector).ok());
    Operator { valid, config, division: Division::Alone { selector } }
}

/// The pods of the root's Deployment. What is written in the root's status counts before what a pod says of itself.
fn seats<'a>(
    root: &ShardingConfig,
    rule: &Root,
    near: impl Iterator<Item = &'a Member>,
) -> Vec<Seat> {
    let written = written(root).unwrap_or_default();
    let seats = near.filter_map(|pod| {
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

/// Whether no rollout is under way and no pod about to be replaced: then pods may move to shards that lack them.
fn is_settled(seats: &[Seat]) -> bool {
    seats.iter().all(|seat| !seat.leaving && seat.revision == seats[0].revision)
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

fn namespace(config: &ShardingConfig) -> &str {
    config.metadata.namespace.as_deref().unwrap_or_default()
}

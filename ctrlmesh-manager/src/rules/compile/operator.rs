//! Groups ShardingConfigs into operators, and finds the shard of each pod.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ctrlmesh_common::api::{FenceMode, Limit, OnLoss, Root, ShardingConfig, ShardingConfigStatus};
use ctrlmesh_common::ownership::{Ownership, STANDBY};
use ctrlmesh_common::policy::{Fence, Members, Policy};
use ctrlmesh_common::resource::ResourceMatch;
use ctrlmesh_common::selector::Selector;
use ctrlmesh_common::share;
use ctrlmesh_common::slots::NamespaceHash;

use super::handover::{self, Handover};
use super::members;
use super::near::{Namespace, Near};
use super::placement::Placement;
use super::policy;
use super::sees::{Sees, sees};
use super::{CompiledPolicy, Drafts, Trouble, World};
use crate::rules::fenced::{is_fenced, is_handing_back, lapses};
use crate::rules::object_name::{full_name, name, namespace, resource_version};
use crate::rules::pod::Member;
use crate::rules::shard::{self, DivideError, Shard};
use crate::rules::shared::{Shared, each};
use crate::rules::validate;

/// The shards of a root, or a standalone ShardingConfig.
#[derive(Clone, Debug)]
pub struct Operator<'a> {
    /// Whether its pods can get new policies.
    pub valid: bool,
    config: &'a ShardingConfig,
    hash: NamespaceHash,
    division: Division<'a>,
}

#[derive(Clone, Debug)]
enum Division<'a> {
    Root {
        shards: Vec<Shard>,
        placement: Box<Placement<'a>>,
        table: Table,
    },
    /// An invalid root. Its shards are known by the prefix of their names only.
    Unknown {
        prefix: String,
    },
    /// A standalone shard. It is without a selector if the config is invalid. `placement` is that of the
    /// inactive root which made it.
    Alone {
        selector: Option<Selector>,
        placement: Option<Arc<Placement<'a>>>,
    },
}

/// Where the ownership table of a root comes from.
#[derive(Clone, Debug)]
enum Table {
    /// From its division: what moves, moves at once.
    Divided(Ownership),
    /// From the protocol, with what each shard sees.
    Handover { handover: Box<Handover>, limits: Result<Vec<Sees>, DivideError> },
    /// It is not known yet which pods are not enrolled.
    Unknown,
}

/// The operators by namespace and name, and the problems of their ShardingConfigs.
///
/// The shards of an inactive root (switched off or invalid) are standalone. The root still assigns the pods,
/// so that a pod that is created anew gets a shard.
pub(super) fn of<'a>(world: World<'a>, near: &Near<'a>) -> (Vec<Operator<'a>>, Vec<Trouble>) {
    let mut configs: Vec<&ShardingConfig> = each(world.configs).collect();
    configs.sort_by_key(|config| (namespace(&config.metadata), name(&config.metadata)));
    let (mut operators, mut failed, mut troubles) = (Vec::new(), Vec::new(), Vec::new());
    let mut inactive: BTreeMap<&str, Vec<(&ShardingConfig, Arc<Placement<'_>>)>> = BTreeMap::new();
    for root in configs.iter().copied() {
        let Some(rule) = &root.spec.root else { continue };
        let near = near.to(root);
        match shard::divide(root, world.labelling, world.namespaces, &near.configs) {
            Ok(Some(shards)) => operators.push(divided(root, rule, shards, near, world)),
            // It only gives back.
            Ok(None) | Err(_) if is_handing_back(root) => {
                operators.push(divided(root, rule, Vec::new(), near, world));
            }
            outcome => {
                if let Err(error) = outcome {
                    troubles.push(trouble(root, error.to_string()));
                    failed.push(undivided(root, rule, world));
                }
                let children = near.configs.iter().copied().filter(|config| shard::is_made_by(root, config));
                let children: Vec<&ShardingConfig> = children.collect();
                let placement = Placement::of_inactive_root(root, rule, &children, &near.enrolled, world);
                inactive.entry(namespace(&root.metadata)).or_default().push((root, Arc::new(placement)));
            }
        }
    }
    let mut roots: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (at, operator) in operators.iter().enumerate() {
        roots.entry(namespace(&operator.config.metadata)).or_default().push(at);
    }
    for config in configs.into_iter().filter(|config| config.spec.root.is_none()) {
        let namespace = namespace(&config.metadata);
        let is_shard = |at: &usize| operators[*at].is_shard(config);
        if !roots.get(namespace).into_iter().flatten().any(is_shard) {
            let report = validate::sharding_config(config, &[], None);
            troubles.extend(report.errors.iter().map(|error| trouble(config, error.to_string())));
            let inactive = inactive.get(namespace).into_iter().flatten();
            let placement = { inactive }.find(|(root, _)| shard::is_made_by(root, config));
            let placement = placement.map(|(_, placement)| Arc::clone(placement));
            operators.push(alone(config, placement, report.errors.is_empty(), world));
        }
    }
    operators.append(&mut failed);
    (operators, troubles)
}

pub(super) fn trouble(config: &ShardingConfig, message: String) -> Trouble {
    let config = full_name(&config.metadata);
    Trouble { object: format!("ShardingConfig {config}"), configs: vec![config], message }
}

impl Operator<'_> {
    /// The resourceVersion of its ShardingConfig. It grows; since Kubernetes 1.35 that is part of the API's
    /// contract.
    pub fn version(&self) -> u64 {
        resource_version(&self.config.metadata)
    }

    pub(super) fn compiled(&self, shard: &str, policy: Policy) -> CompiledPolicy {
        CompiledPolicy::new(Some(shard.to_owned()), Some(self.full_name()), self.version(), policy)
    }

    /// `None` if the pod is of another operator.
    pub fn shard_of(&self, pod: &Member) -> Option<&ShardingConfig> {
        if namespace(&self.config.metadata) != pod.name.namespace {
            return None;
        }
        match &self.division {
            Division::Root { shards, placement, .. } => {
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

    /// The shard for a pod that is being admitted, and may have no name yet.
    pub fn shard_for(&self, pod: &Member, members: &[Shared<Member>]) -> Option<&ShardingConfig> {
        if namespace(&self.config.metadata) != pod.name.namespace {
            return None;
        }
        match &self.division {
            Division::Root { shards, placement, .. } => {
                let name = placement.shard_for(pod, members)?;
                shards.iter().find(|shard| shard.share.name == name).map(|shard| &shard.config)
            }
            Division::Unknown { .. } => None,
            Division::Alone { placement, .. } => {
                let placed = placement.as_ref().and_then(|all| all.shard_for(pod, members));
                self.has(pod, placed.as_deref()).then_some(self.config)
            }
        }
    }

    /// An assignment by a root has precedence over the selector.
    fn has(&self, pod: &Member, placed: Option<&str>) -> bool {
        match (placed, &self.division) {
            (Some(placed), _) => placed == name(&self.config.metadata),
            (None, Division::Alone { selector: Some(selector), .. }) => selector.matches(&pod.labels),
            (None, _) => false,
        }
    }

    /// The policies of its shards, without an epoch.
    ///
    /// # Errors
    /// The first ShardingConfig from which none follows.
    pub(super) fn drafts(&self) -> Result<Drafts, Trouble> {
        let restart_on_loss = self.config.spec.root.as_ref().is_some_and(|root| root.on_loss == Some(OnLoss::Restart));
        let reports = |root: &Root| root.rollout.is_some() || root.balances_by_load();
        let report_traffic = self.config.spec.root.as_ref().is_some_and(reports);
        let fence = self.fence();
        let policy_of = |config: &ShardingConfig| {
            let policy = share::policy(config, self.namespace());
            let policy = policy.map_err(|error| trouble(config, error.to_string()))?;
            let of_shard = |members| {
                let members = Members { hash: self.hash, ..members };
                members::of_shard(members, self.config, self.table(), config)
            };
            let policy = Policy { members: policy.members.map(of_shard), ..policy };
            let owned = |fence: &Fence| Fence { owner: Some(name(&config.metadata).to_owned()), ..fence.clone() };
            let policy = Policy { fence: fence.as_ref().map(owned), restart_on_loss, report_traffic, ..policy };
            policy.check().map_err(|error| trouble(config, error.to_string()))?;
            Ok(policy)
        };
        let draft = |config: &ShardingConfig, policy| {
            (name(&config.metadata).to_owned(), self.compiled(name(&config.metadata), policy))
        };
        let of = |config: &ShardingConfig| policy_of(config).map(|policy| draft(config, policy));
        let with = |shard: &Shard, limits: &Vec<Limit>| {
            let mut config = shard.config.clone();
            config.spec.limits.clone_from(limits);
            policy_of(&config)
        };
        match &self.division {
            Division::Root { shards, table: Table::Handover { limits, .. }, .. } => {
                let limits = limits.as_ref().map_err(|error| trouble(self.config, error.to_string()))?;
                let owned = shards.iter().zip(limits).map(|(shard, sees)| match sees {
                    Sees::Own(limits) => with(shard, limits).map(|policy| draft(&shard.config, policy)),
                    Sees::Shadowed { limits, slots } => {
                        let shadow = |policy| policy::shadow(policy, *slots);
                        with(shard, limits).map(|policy| draft(&shard.config, shadow(policy)))
                    }
                    Sees::Nothing => policy_of(&shard.config).map(|policy| draft(&shard.config, policy::blind(policy))),
                });
                owned.collect()
            }
            Division::Root { shards, .. } => shards.iter().map(|shard| of(&shard.config)).collect(),
            Division::Unknown { .. } => Ok(BTreeMap::new()),
            Division::Alone { .. } => [of(self.config)].into_iter().collect(),
        }
    }

    /// Whether an invalid operator may have selected `pod` before.
    pub fn may_have(&self, pod: &Member, last: Option<&CompiledPolicy>) -> bool {
        if self.valid || namespace(&self.config.metadata) != pod.name.namespace {
            return false;
        }
        let last_shard = last.and_then(|last| last.shard.as_deref());
        let mut shards = last_shard.into_iter().chain(pod.labelled_shard());
        match (&self.division, &self.config.spec.root) {
            (Division::Unknown { prefix }, Some(rule)) => {
                shards.any(|shard| shard.starts_with(prefix)) || pod.is_of_target(rule)
            }
            _ => shards.any(|shard| shard == name(&self.config.metadata)),
        }
    }

    /// The root, or the standalone ShardingConfig.
    pub(super) fn config(&self) -> &ShardingConfig {
        self.config
    }

    pub(super) fn namespace(&self) -> &str {
        namespace(&self.config.metadata)
    }

    /// `NAMESPACE/NAME` of the root or standalone ShardingConfig.
    pub fn full_name(&self) -> String {
        full_name(&self.config.metadata)
    }

    pub(super) fn status(&self) -> Option<&ShardingConfigStatus> {
        self.config.status.as_ref()
    }

    pub(super) fn is_root(&self) -> bool {
        matches!(self.division, Division::Root { .. })
    }

    /// Whether it is a standalone ShardingConfig.
    pub(super) fn is_alone(&self) -> bool {
        matches!(self.division, Division::Alone { .. })
    }

    /// The names of its shards, as far as they are known.
    pub(super) fn shard_names(&self) -> Vec<&str> {
        match &self.division {
            Division::Root { shards, .. } => shards.iter().map(|shard| shard.share.name.as_str()).collect(),
            Division::Unknown { .. } => Vec::new(),
            Division::Alone { .. } => vec![name(&self.config.metadata)],
        }
    }

    /// The ownership table of a root; without an epoch, unless it comes from a handover.
    pub(super) fn table(&self) -> Option<&Ownership> {
        match &self.division {
            Division::Root { table: Table::Handover { handover, .. }, .. } => Some(&handover.step.table),
            Division::Root { table: Table::Divided(table), .. } => Some(table),
            Division::Root { .. } | Division::Unknown { .. } | Division::Alone { .. } => None,
        }
    }

    /// The fence by the table of a root whose pods are fenced, without an owner.
    fn fence(&self) -> Option<Fence> {
        let rule = self.config.spec.root.as_ref().filter(|rule| rule.fence_mode() != FenceMode::Off)?;
        let divided = &rule.resource_selector;
        let everything = divided.iter().any(|one| one.relate_resources.is_empty());
        let resources = divided.iter().filter(|_| !everything).flat_map(|one| &one.relate_resources);
        let fence = Fence::of(self.table()?, "", self.hash, resources.map(ResourceMatch::from).collect());
        let (lapses, counts_slots) = (lapses(self.config), rule.balances_by_load());
        Some(Fence { operator: self.full_name(), lapses, counts_slots, ..fence })
    }

    /// Of a root that is fenced.
    pub(super) fn handover(&self) -> Option<&Handover> {
        match &self.division {
            Division::Root { table: Table::Handover { handover, .. }, .. } => Some(handover),
            _ => None,
        }
    }

    /// Whether enough is known to decide what its pods are told.
    pub(super) fn is_known(&self) -> bool {
        !matches!(self.division, Division::Root { table: Table::Unknown, .. })
    }

    /// Whether the pod may work for its `shard`: always, unless a handover has the pod's ownership on its way.
    pub(super) fn is_owner(&self, pod: &Member, shard: &str) -> bool {
        let Some(handover) = self.handover().filter(|_| !pod.uid.is_empty()) else { return true };
        handover.step.table.pod_uids.get(&pod.uid).is_some_and(|owner| owner == shard)
    }

    /// For whom each pod may write, by its UID; one that stands by, for nobody. A handover names the owner of a pod in
    /// the written table first: the pod is asked of that owner only whether a write may be under way.
    pub(super) fn owners(&self) -> BTreeMap<String, String> {
        let mut owners = self.table().map(|table| table.pod_uids.clone()).unwrap_or_default();
        owners.retain(|_, owner| owner != STANDBY);
        if self.handover().is_some() {
            let written = self.status().and_then(|status| status.ownership.as_ref()).map(|table| &table.pod_uids);
            owners.retain(|uid, owner| written.and_then(|written| written.get(uid)) == Some(owner));
        }
        owners
    }

    /// Shards of a root without a pod that stays, if they own anything.
    pub(super) fn unserved(&self) -> Vec<String> {
        let Division::Root { placement, .. } = &self.division else { return Vec::new() };
        let mut unserved = placement.unserved();
        if let Some(Handover { step, .. }) = self.handover() {
            let owners: BTreeSet<&String> = step.table.slots.values().chain(step.table.namespaces.values()).collect();
            unserved.retain(|shard| owners.contains(shard));
        }
        unserved
    }

    /// Whether it is a shard of `root`, which is inactive.
    pub(super) fn is_made_by(&self, root: &ShardingConfig) -> bool {
        matches!(self.division, Division::Alone { .. })
            && root.spec.root.is_some()
            && shard::is_made_by(root, self.config)
    }

    /// Whether `config` is one of its shards in the cluster, or a former one. A foreign config with the name
    /// of a shard is not.
    pub(super) fn is_shard(&self, config: &ShardingConfig) -> bool {
        let Division::Root { shards, .. } = &self.division else { return false };
        namespace(&self.config.metadata) == namespace(&config.metadata)
            && (shard::is_of(self.config, config)
                || shards.iter().any(|shard| shard::adopts(self.config, shard, config)))
    }
}

/// `near` is what is in the root's namespace.
fn divided<'a>(
    root: &'a ShardingConfig,
    rule: &'a Root,
    shards: Vec<Shard>,
    near: &Namespace<'_>,
    world: World<'_>,
) -> Operator<'a> {
    let divided = shards.iter().map(|shard| shard.share.clone()).collect();
    let placement = Box::new(Placement::of_active_root(root, rule, divided, &near.enrolled, world));
    let table = if is_fenced(rule) {
        let next = handover::next(root, rule, &shards, &placement, near, world);
        next.map_or(Table::Unknown, |handover| {
            let limits = sees(root, rule, (&shards, &placement), &handover.step.table, world);
            Table::Handover { handover: Box::new(handover), limits }
        })
    } else {
        let uid = |pod: &&Member| Some((pod.uid.clone(), placement.pods().get(&pod.name.name)?.clone()));
        let pod_uids = near.enrolled.iter().filter(|pod| !pod.uid.is_empty()).filter_map(uid).collect();
        Table::Divided(Ownership { pod_uids, ..shard::table(&shards, placement.pods()) })
    };
    let hash = world.labelling.hash;
    Operator { valid: true, config: root, hash, division: Division::Root { shards, placement, table } }
}

fn undivided<'a>(root: &'a ShardingConfig, rule: &Root, world: World<'_>) -> Operator<'a> {
    let division = Division::Unknown { prefix: format!("{}-", rule.prefix) };
    Operator { valid: false, config: root, hash: world.labelling.hash, division }
}

fn alone<'a>(
    config: &'a ShardingConfig,
    placement: Option<Arc<Placement<'a>>>,
    valid: bool,
    world: World<'_>,
) -> Operator<'a> {
    let selector = config.spec.selector.as_ref().filter(|selector| !selector.is_empty());
    let selector = selector.and_then(|selector| Selector::try_from(selector).ok());
    Operator { valid, config, hash: world.labelling.hash, division: Division::Alone { selector, placement } }
}

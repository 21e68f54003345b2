//! Says which operators are audited, which objects each of them divides, and who should own them.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::{Root, ShardingConfig};
use ctrlmesh_common::ownership::{Ownership, Revoked, UNSHARDED};
use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::resource::{ResourceMatch, WILDCARD};
use ctrlmesh_common::selector::{Labels, Selector};
use ctrlmesh_common::share;

use crate::cluster::plan::Plan;
use crate::cluster::served_resources::ServedResources;
use crate::labels::{AlikeObjects, NAMESPACES, NamedResources, is_named, named_resources};
use crate::rules::object_name::{full_name, name, namespace};
use crate::rules::shard;

/// A root, or the ShardingConfigs by hand of one operator.
#[derive(Debug)]
pub(super) struct Audited<'a> {
    /// `NAMESPACE/NAME` of the root, or of the first of the others.
    pub(super) name: String,
    /// Its ShardingConfigs whose conditions tell of it.
    pub(super) told: Vec<String>,
    /// By which of its ShardingConfigs policies may name their operator.
    pub(super) operators: Vec<String>,
    division: Division<'a>,
    /// Shards with a pod that may serve them.
    staffed: BTreeSet<&'a str>,
}

#[derive(Debug)]
enum Division<'a> {
    Root {
        rule: &'a Root,
        named: NamedResources,
        table: &'a Ownership,
        has_unenrolled: bool,
        served: &'a ServedResources,
    },
    /// Shard and policy.
    ByHand(Vec<(&'a str, Policy)>),
}

/// How an operator divides one kind.
#[derive(Debug)]
pub(super) enum KindDivision<'a> {
    Root {
        selector: Selector,
        table: &'a Ownership,
    },
    /// Shard, and what it is to see.
    ByHand(Vec<(&'a str, Selector)>),
}

/// Who should own objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IntendedOwner<'a> {
    /// No shard, now.
    Nobody {
        moves: bool,
    },
    /// Pods that are not enrolled: they see everything.
    Unsharded,
    Shard(&'a str),
}

/// The operators, by name. Roots that are switched off are audited by the shards that they leave behind.
pub(super) fn operators(plan: &Plan) -> Vec<Audited<'_>> {
    let mut near: BTreeMap<&str, Vec<&ShardingConfig>> = BTreeMap::new();
    for config in &plan.snapshot.configs {
        near.entry(namespace(&config.metadata)).or_default().push(config);
    }
    let mut all: Vec<Audited<'_>> = Vec::new();
    for configs in near.values() {
        all.extend(configs.iter().filter_map(|config| of_root(config, configs, plan)));
        all.extend(by_hand(configs, plan));
    }
    let mut by_name: BTreeMap<String, usize> = BTreeMap::new();
    for (at, audited) in all.iter().enumerate() {
        by_name.extend(audited.operators.iter().map(|name| (name.clone(), at)));
    }
    for (pod, policy) in &plan.compiled.policies {
        let (Some(operator), Some(shard)) = (&policy.operator, policy.shard.as_deref()) else { continue };
        let members = &plan.snapshot.members;
        let stays = members.binary_search_by(|one| one.name.cmp(pod)).is_ok_and(|at| !members[at].terminating);
        if let Some(at) = by_name.get(operator).filter(|_| stays) {
            all[*at].staffed.insert(shard);
        }
    }
    all
}

/// `None` for a root that is switched off, or has not divided anything yet. `near` are the ShardingConfigs of its
/// namespace.
fn of_root<'a>(config: &'a ShardingConfig, near: &[&ShardingConfig], plan: &'a Plan) -> Option<Audited<'a>> {
    let rule = config.spec.root.as_ref().filter(|rule| rule.disable != Some(true))?;
    let name = full_name(&config.metadata);
    // One that is invalid, or overlaps with another one, changes nothing: what it has written holds.
    let written = || config.status.as_ref()?.ownership.as_ref();
    let table = plan.compiled.operators.get(&name).and_then(|record| record.ownership.as_ref()).or_else(written)?;
    let unenrolled = plan.snapshot.unenrolled.get(namespace(&config.metadata)).into_iter().flatten();
    let has_unenrolled = { unenrolled }.any(|pod| table.pod_uids.get(&pod.uid).is_some_and(|of| of == UNSHARDED));
    let served = &plan.snapshot.served;
    let division = Division::Root { rule, named: named_resources(rule), table, has_unenrolled, served };
    // The shards of an invalid root stand alone.
    let shards = near.iter().filter(|one| shard::is_made_by(config, one));
    let shards = shards.map(|shard| full_name(&shard.metadata));
    let operators = [name.clone()].into_iter().chain(shards).collect();
    Some(Audited { told: vec![name.clone()], operators, name, division, staffed: BTreeSet::new() })
}

/// Shards by hand of one lock are of one operator, and so are those that a root has left behind. `near` are the
/// ShardingConfigs of one namespace.
fn by_hand<'a>(near: &[&'a ShardingConfig], plan: &Plan) -> Vec<Audited<'a>> {
    let mut groups: BTreeMap<String, Vec<&ShardingConfig>> = BTreeMap::new();
    for config in near.iter().filter(|config| config.spec.root.is_none()) {
        let root = near.iter().find(|root| root.spec.root.is_some() && shard::is_made_by(root, config));
        // The shards of a root that divides are no operators of their own.
        if root.and_then(|root| root.spec.root.as_ref()).is_some_and(|rule| rule.disable != Some(true)) {
            continue;
        }
        let lock = config.spec.controller.as_ref().map(|controller| controller.leader_election_name.as_str());
        let key = match (root, lock) {
            (Some(root), _) => format!("root {}", name(&root.metadata)),
            (None, Some(lock)) => format!("lock {lock}"),
            (None, None) => format!("shard {}", name(&config.metadata)),
        };
        groups.entry(key).or_default().push(config);
    }
    let audited = groups.into_values().filter_map(|group| {
        let shards = group.iter().copied().filter_map(|config| {
            let policy = share::policy(config, namespace(&config.metadata)).ok()?;
            Some((name(&config.metadata), policy))
        });
        let division = Division::ByHand(shards.collect());
        let configs: Vec<String> = group.iter().map(|config| full_name(&config.metadata)).collect();
        // Also pods that get no policy, because their ShardingConfig overlaps with another one.
        let staffed = group.iter().filter(|config| selects_a_pod(config, plan)).map(|config| name(&config.metadata));
        let (staffed, name) = (staffed.collect(), configs.first()?.clone());
        Some(Audited { name, told: configs.clone(), operators: configs, division, staffed })
    });
    audited.collect()
}

fn selects_a_pod(config: &ShardingConfig, plan: &Plan) -> bool {
    let selector = config.spec.selector.as_ref().and_then(|selector| Selector::try_from(selector).ok());
    let near = plan.snapshot.members_in(namespace(&config.metadata));
    let mut staying = near.iter().filter(|pod| pod.enrolled() && !pod.terminating);
    selector.is_some_and(|selector| staying.any(|pod| selector.matches(&pod.labels)))
}

impl<'a> Audited<'a> {
    pub(super) fn divides(&self, group: &str, plural: &str) -> bool {
        match &self.division {
            Division::Root { named, .. } => is_named(named, group, plural),
            Division::ByHand(shards) => shards.iter().any(|(_, policy)| policy.is_limited(group, plural)),
        }
    }

    /// Whether it names the kind itself, rather than by a wildcard.
    pub(super) fn writes_out(&self, group: &str, plural: &str) -> bool {
        let is_it = |one: &ResourceMatch| {
            one.api_groups.iter().any(|name| name == group) && one.resources.iter().any(|name| name == plural)
        };
        match &self.division {
            Division::Root { named, .. } => named.iter().any(is_it),
            Division::ByHand(shards) => {
                let limits = shards.iter().flat_map(|(_, policy)| &policy.limits);
                limits.flat_map(|limit| &limit.relate_resources).any(is_it)
            }
        }
    }

    /// The kinds that a root writes out, and the API server serves. A shard by hand may select by other labels than the
    /// manager's, and its kinds need not be labelled.
    pub(super) fn needed_kinds(&self) -> impl Iterator<Item = (String, String)> {
        let (named, served) = match &self.division {
            Division::Root { named, served, .. } => (&named[..], Some(*served)),
            Division::ByHand(_) => (&[][..], None),
        };
        let each = |one: &ResourceMatch| {
            let of_group =
                |group: &String| one.resources.iter().map(|plural| (group.clone(), plural.clone())).collect();
            one.api_groups.iter().map(of_group).collect::<Vec<Vec<_>>>().concat()
        };
        let is_served =
            move |group: &str, plural: &str| served.is_some_and(|served| served.supports(group, plural, &[]));
        let is_needed = move |(group, plural): &(String, String)| {
            let is_namespace = (group.as_str(), plural.as_str()) == ("", NAMESPACES);
            plural != WILDCARD && group != WILDCARD && !is_namespace && is_served(group, plural)
        };
        named.iter().flat_map(each).filter(is_needed)
    }

    pub(super) fn kind(&self, group: &str, plural: &str) -> KindDivision<'a> {
        match &self.division {
            Division::Root { rule, table, .. } => {
                let selector = share::divided(rule, group, plural).unwrap_or_else(Selector::nothing);
                KindDivision::Root { selector, table }
            }
            Division::ByHand(shards) => {
                let of_kind = |(shard, policy): &(&'a str, Policy)| Some((*shard, policy.selector_for(group, plural)?));
                KindDivision::ByHand(shards.iter().filter_map(of_kind).collect())
            }
        }
    }

    /// Whether a pod is there that may serve the shard.
    pub(super) fn is_staffed(&self, shard: &str) -> bool {
        self.staffed.contains(shard)
    }

    pub(super) fn has_unenrolled(&self) -> bool {
        matches!(self.division, Division::Root { has_unenrolled: true, .. })
    }
}

impl<'a> KindDivision<'a> {
    /// Who should own objects that are alike. `None`: nobody divides them.
    pub(super) fn intended_owner(&self, objects: &AlikeObjects<'_>) -> Option<IntendedOwner<'a>> {
        match self {
            Self::Root { selector, table } => selector.matches(objects.labels).then(|| by_table(table, objects)),
            Self::ByHand(shards) => {
                let mut selecting = shards.iter().filter(|(_, selector)| selector.matches(objects.labels));
                selecting.next().map(|(shard, _)| IntendedOwner::Shard(shard))
            }
        }
    }

    /// Shards that are to own something.
    pub(super) fn shards(&self) -> BTreeSet<&'a str> {
        match self {
            Self::Root { table, .. } => {
                let owners = table.slots.values().chain(table.namespaces.values());
                owners.map(String::as_str).filter(|owner| *owner != UNSHARDED).collect()
            }
            Self::ByHand(shards) => shards.iter().map(|(shard, _)| *shard).collect(),
        }
    }

    /// Whether shards see objects by the labels of the manager.
    pub(super) fn is_by_our_labels(&self) -> bool {
        matches!(self, Self::Root { .. })
    }
}

fn by_table<'a>(table: &'a Ownership, objects: &AlikeObjects<'_>) -> IntendedOwner<'a> {
    match table.owner(objects.slot, objects.namespace) {
        Some(UNSHARDED) => IntendedOwner::Unsharded,
        Some(shard) => IntendedOwner::Shard(shard),
        None => {
            let revoked = |revoked: &Revoked| {
                revoked.slots.contains_key(&objects.slot)
                    || objects.namespace.is_some_and(|namespace| revoked.namespaces.contains_key(namespace))
            };
            IntendedOwner::Nobody { moves: table.revoked.as_ref().is_some_and(revoked) }
        }
    }
}

/// Whether an object has the labels by which shards of a root see it.
pub(super) fn has_labels(labels: &Labels, labelling: &shard::Labelling, objects: &AlikeObjects<'_>) -> bool {
    let namespace = match objects.namespace {
        Some(namespace) => namespace.to_owned(),
        None => shard::Labelling::cluster_namespace(objects.slot),
    };
    labels.get(&labelling.hash_key) == Some(&objects.slot.to_string())
        && labels.get(&labelling.namespace_key) == Some(&namespace)
}

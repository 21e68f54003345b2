//! Says which member clusters the pods of a shard see.

use std::collections::BTreeSet;
use std::sync::Arc;

use ctrlmesh_common::api::{Root, ShardingConfig};
use ctrlmesh_common::member_path::PathTemplate;
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::policy::members::MAX_PATHS;
use ctrlmesh_common::policy::{Members, Policy};
use ctrlmesh_common::slots::{Slot, SlotSet};

use super::CompiledPolicy;
use crate::rules::object_name::{name, namespace};
use crate::rules::pod::Member;
use crate::rules::shared::{Shared, each};

/// The members of a root, or of a shard by hand, as `shard` sees them. Where a root divides clusters, those are seen
/// that are in the shard's slots by the table.
pub(super) fn of_shard(
    members: Members,
    root: &ShardingConfig,
    table: Option<&Ownership>,
    shard: &ShardingConfig,
) -> Members {
    if !root.spec.root.as_ref().is_some_and(Root::divides_clusters) {
        return members;
    }
    // Until it is known who owns what, nobody sees any.
    let sees = table.map(|table| table.slots_of(name(&shard.metadata)).collect()).unwrap_or_default();
    Members { sees: Some(sees), ..members }
}

/// The members that a pod of no shard may know: those of the root whose workload it is of, also of one that is switched
/// off, or of any shard by hand of its namespace, or else those that it knew.
pub(super) fn members_of(
    pod: &Member,
    configs: &[Shared<ShardingConfig>],
    last: Option<&Arc<CompiledPolicy>>,
) -> Option<Members> {
    let near = || each(configs).filter(|config| namespace(&config.metadata) == pod.name.namespace);
    let rules = near().filter_map(|config| config.spec.root.as_ref()).filter(|rule| pod.is_of_target(rule));
    let of_roots = rules.flat_map(|rule| &rule.clusters);
    let by_hand = near().filter(|config| config.spec.root.is_none()).flat_map(|config| &config.spec.clusters);
    let mut paths: Vec<PathTemplate> = Vec::new();
    for path in of_roots.chain(by_hand).filter_map(|one| one.path.parse().ok()) {
        if paths.len() < MAX_PATHS && !paths.iter().any(|known| known.overlaps(&path)) {
            paths.push(path);
        }
    }
    if paths.is_empty() {
        return last.and_then(|last| last.policy.members.clone());
    }
    Some(Members { paths, ..Members::default() })
}

/// Takes all members away from a policy, where they are divided.
pub(super) fn hide(policy: &mut Policy) {
    seen(policy).for_each(BTreeSet::clear);
}

/// Shows those in these slots, too.
pub(super) fn show(policy: &mut Policy, slots: SlotSet) {
    seen(policy).for_each(|sees| sees.extend(slots.iter()));
}

/// What is seen of members, where they are divided.
fn seen(policy: &mut Policy) -> impl Iterator<Item = &mut BTreeSet<Slot>> {
    policy.members.iter_mut().filter_map(|members| members.sees.as_mut())
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::api::{Clusters, ShardingConfigSpec, Unit};

    use super::super::tests::{compiled, pod, root, status};
    use super::super::*;
    use super::*;

    fn rule(more: &str) -> String {
        root(&format!(
            "targetStatefulSet: op, auto: {{shardingSize: 2, everyShardReplicas: 1}}, \
             clusters: [{{path: '/clusters/{{cluster}}'}}]{more}"
        ))
    }

    #[test]
    fn each_shard_sees_the_members_in_its_slots() {
        let root = |unit: Option<Unit>| {
            let spec = ShardingConfigSpec { root: Some(Root { unit, ..Root::default() }), ..Default::default() };
            ShardingConfig::new("root", spec)
        };
        let shard = |name: &str| ShardingConfig::new(name, ShardingConfigSpec::default());
        let slot = |number: i64| Slot::try_from(number).unwrap();
        let owners = [(1, "a"), (2, "b"), (3, "a")].map(|(number, owner)| (slot(number), owner.to_owned()));
        let table = Ownership { slots: owners.into(), ..Ownership::default() };
        let sees = |root: &ShardingConfig, table: Option<&Ownership>, name: &str| {
            of_shard(Members::default(), root, table, &shard(name)).sees
        };
        let divided = root(Some(Unit::Cluster));
        assert_eq!(sees(&divided, Some(&table), "a"), Some([slot(1), slot(3)].into()));
        assert_eq!(sees(&divided, Some(&table), "c"), Some([].into()));
        assert_eq!(sees(&divided, None, "a"), Some([].into()), "nobody knows who owns what");
        for undivided in [None, Some(Unit::Namespace)] {
            assert_eq!(sees(&root(undivided), Some(&table), "a"), None);
        }
    }

    #[test]
    fn members_are_compiled_by_the_table_and_for_nobody_none() {
        let pods = ["op-0", "op-1"].map(|name| Member { uid: format!("u-{name}"), ..pod(name, &[]) });
        let text = rule(", unit: Cluster, fence: Proxy");
        let first = compiled(std::slice::from_ref(&text), &pods, &Compiled::default());
        let second = compiled(&[text + &status(&first, "ops/root")], &pods, &first);
        for policy in second.policies.values() {
            let (members, fence) = (policy.policy.members.as_ref().unwrap(), policy.policy.fence.as_ref().unwrap());
            let own = fence.slots.iter().filter(|(_, owner)| Some(*owner) == fence.owner.as_ref());
            assert_eq!(members.sees, Some(own.map(|(slot, _)| *slot).collect()));
            assert_eq!(members.paths.len(), 1);
        }
        let other = Member { owner: None, ..pod("stray", &[]) };
        let last = second.policies.values().next().unwrap().clone();
        assert_eq!(members_of(&other, &[], None), None);
        let off = Root { disable: Some(true), target_stateful_set: Some("op".to_owned()), ..Root::default() };
        let clusters = ["/a", "/clusters/{cluster}", "/clusters/{cluster}/x"];
        let clusters = clusters.map(|path| Clusters { path: path.to_owned() }).to_vec();
        let spec = ShardingConfigSpec { root: Some(Root { clusters, ..off }), ..Default::default() };
        let mut root = ShardingConfig::new("off", spec);
        root.metadata.namespace = Some("ops".to_owned());
        let of_root = members_of(&pods[0], &[root.into()], None).unwrap();
        assert_eq!(of_root.paths, ["/clusters/{cluster}".parse().unwrap()], "those that can be read and told apart");
        let known = members_of(&other, &[], Some(&last)).unwrap();
        let nothing = CompiledPolicy::nothing_for(&other, Some(known)).policy;
        assert_eq!(nothing.members.unwrap().sees, Some([].into()));
    }

    #[test]
    fn who_owns_nothing_sees_no_member() {
        let sees = |slots: &[i64]| {
            let sees = slots.iter().map(|number| Slot::try_from(*number).unwrap()).collect();
            Policy { members: Some(Members { sees: Some(sees), ..Members::default() }), ..Policy::default() }
        };
        let mut policy = sees(&[1, 2]);
        show(&mut policy, [Slot::try_from(3).unwrap()].into_iter().collect());
        assert_eq!(policy, sees(&[1, 2, 3]));
        hide(&mut policy);
        assert_eq!(policy, sees(&[]));
        let mut undivided = Policy { members: Some(Members::default()), ..Policy::default() };
        hide(&mut undivided);
        assert_eq!(undivided.members, Some(Members::default()));
    }
}

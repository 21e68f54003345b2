use std::collections::BTreeMap;

use ctrlmesh_common::api::read_sharding_configs;
use ctrlmesh_common::ownership::{Revoked, UNSHARDED};
use ctrlmesh_common::selector::Labels;
use ctrlmesh_common::slots::{Slot, SlotSet};
use proptest::prelude::*;

use super::*;
use crate::rules::validate;

/// A root with `rule` in its `spec.root`, in YAML's flow style.
fn root(rule: &str) -> ShardingConfig {
    let text = format!(
        "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\n\
         metadata: {{name: op-root, namespace: ops, uid: 1b4}}\n\
         spec:\n  controller: {{leaderElectionName: op}}\n  root: {{prefix: op, targetStatefulSet: op, {rule}}}\n"
    );
    read_sharding_configs(&text).unwrap().remove(0)
}

fn names(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn shards(rule: &str, known: &[&str]) -> Vec<Shard> {
    divide(&root(rule), &Labelling::default(), &names(known), &[]).unwrap().unwrap()
}

fn selectors(shards: &[Shard]) -> Vec<String> {
    let selector = |shard: &Shard| {
        let limit = shard.config.spec.limits[0].selector.as_ref().unwrap();
        Selector::try_from(limit).unwrap().to_string().replace("ctrlmesh.kusionstack.io/", "")
    };
    shards.iter().map(selector).collect()
}

fn error(rule: &str) -> String {
    divide(&root(rule), &Labelling::default(), &BTreeSet::new(), &[]).unwrap_err().to_string()
}

fn refs(configs: &[ShardingConfig]) -> Vec<&ShardingConfig> {
    configs.iter().collect()
}

#[test]
fn shards_are_called_and_linked_as_the_predecessors() {
    let shards = shards(
        "canary: {replicas: 1, inShardHash: ['3']}, auto: {shardingSize: 2, everyShardReplicas: 2}, resourceSelector: [{relateResources: [{apiGroups: [''], resources: [pods]}], selector: {matchLabels: {team: a}}}, {relateResources: [{apiGroups: [apps], resources: ['*']}]}]",
        &[],
    );
    let called: Vec<&str> = shards.iter().map(|shard| shard.share.name.as_str()).collect();
    assert_eq!(called, ["op-0-canary", "op-1-normal", "op-2-normal"]);
    let child = &shards[0].config;
    assert_eq!(child.metadata.namespace.as_deref(), Some("ops"));
    assert_eq!(child.metadata.labels.as_ref().unwrap()[label::AUTO_SHARDING_ROOT], "op-root");
    let owner = &child.metadata.owner_references.as_ref().unwrap()[0];
    assert_eq!((owner.kind.as_str(), owner.uid.as_str()), ("ShardingConfig", "1b4"));
    assert_eq!(owner.api_version, "ctrlmesh.kusionstack.io/v1alpha1");
    assert_eq!(owner.controller, Some(true));
    let pods = Selector::try_from(child.spec.selector.as_ref().unwrap()).unwrap();
    assert_eq!(pods.to_string(), "ctrlmesh.kusionstack.io/sharding-config-injected=op-0-canary");
    assert_eq!(child.spec.controller.as_ref().unwrap().leader_election_name, "op");
    assert_eq!(child.spec.limits.len(), 2);
    assert_eq!(selectors(&shards[..1]), ["team=a,sharding-hash in (3)"], "what any shard may see, and of that its own");
}

#[test]
fn a_canary_of_hashes_leaves_the_other_hashes() {
    let shards = shards(
        "canary: {replicas: 1, inShardHash: ['0', '31']}, auto: {shardingSize: 15, everyShardReplicas: 1}",
        &["any"],
    );
    let selectors = selectors(&shards);
    assert_eq!(selectors[..3], ["sharding-hash in (0,31)", "sharding-hash in (1,2)", "sharding-hash in (3,4)"]);
}

/// The root, divided and written before.
fn written(rule: &str, before: Option<&ShardingConfig>) -> (ShardingConfig, Vec<Shard>) {
    let mut root = root(rule);
    root.status = before.and_then(|before| before.status.clone());
    let shards = divide(&root, &Labelling::default(), &BTreeSet::new(), &[]).unwrap().unwrap();
    let status = root.status.get_or_insert_default();
    status.ownership = Some(Ownership { epoch: 1, ..table(&shards, &BTreeMap::new()) });
    (root, shards)
}

fn canary(last: u8) -> String {
    let hashes: Vec<String> = (0..=last).map(|hash| format!("'{hash}'")).collect();
    format!(
        "canary: {{replicas: 1, inShardHash: [{}]}}, auto: {{shardingSize: 2, everyShardReplicas: 1}}",
        hashes.join(",")
    )
}

#[test]
fn a_canary_that_grows_takes_from_no_shard_that_can_keep() {
    let (first, before) = written(&canary(10), None);
    let (_, after) = written(&canary(12), Some(&first));
    let slots = |shards: &[Shard]| shards.iter().map(|shard| shard.share.slots.to_string()).collect::<Vec<_>>();
    let last = "22,23,24,25,26,27,28,29,30,31";
    assert_eq!(slots(&before)[1..], ["11,12,13,14,15,16,17,18,19,20,21", last]);
    assert_eq!(slots(&after)[1..], ["13,14,15,16,17,18,19,20,21", last]);
    assert!(after[1].config.spec.limits[0].selector.is_some());
    assert_eq!(selectors(&after)[1], "sharding-hash in (13,14,15,16,17,18,19,20,21)", "so do the shards' limits");
}

#[test]
fn what_pods_without_a_proxy_take_over_stays_meant_for_its_shard() {
    let (first, _) = written(&canary(10), None);
    let (mut root, shards) = written(&canary(22), Some(&first));
    let last = |shards: &[Shard]| shards[2].share.slots.to_string();
    assert_eq!(last(&shards), "23,24,25,26,27");
    // The operator leaves: the first normal shard is the last one with a pod.
    let table = root.status.as_mut().unwrap().ownership.as_mut().unwrap();
    table.slots.values_mut().filter(|owner| *owner != "op-1-normal").for_each(|owner| *owner = UNSHARDED.to_owned());
    let made: Vec<ShardingConfig> = shards.iter().map(|shard| shard.config.clone()).collect();
    let divided = |made: &[&ShardingConfig]| divide(&root, &Labelling::default(), &BTreeSet::new(), made);
    assert_eq!(divided(&refs(&made)).unwrap().unwrap(), shards);
    // Where nobody knows, it is divided as if nobody had had them.
    assert_eq!(last(&divided(&[]).unwrap().unwrap()), "24,25,26,27");
}

#[test]
fn a_division_stays_the_same_while_it_is_carried_out() {
    let two = "auto: {shardingSize: 2, everyShardReplicas: 1}";
    let three = "auto: {shardingSize: 3, everyShardReplicas: 1}";
    let (mut root, before) = written(two, None);
    let (_, wanted) = written(three, Some(&root));
    let moves = wanted[2].share.slots.iter().map(|slot| {
        let former = before.iter().find(|shard| shard.share.slots.contains(slot)).unwrap();
        (slot, former.share.name.clone())
    });
    let moves: BTreeMap<Slot, String> = moves.collect();
    // Half of them are granted, the others revoked.
    let table = root.status.as_mut().unwrap().ownership.as_mut().unwrap();
    table.slots.retain(|slot, _| !moves.contains_key(slot));
    let (granted, revoked): (Vec<_>, Vec<_>) = moves.into_iter().partition(|(slot, _)| slot.number() % 2 == 0);
    table.slots.extend(granted.into_iter().map(|(slot, _)| (slot, "op-3-normal".to_owned())));
    table.revoked = Some(Revoked { epoch: 1, slots: revoked.into_iter().collect(), ..Revoked::default() });
    assert_eq!(written(three, Some(&root)).1, wanted);
}

#[test]
fn a_canary_of_namespaces_is_left_out_by_all_others() {
    let shards = shards(
        "canary: {replicas: 1, inNamespaces: [shop, pay]}, auto: {shardingSize: 16, everyShardReplicas: 1}",
        &["any"],
    );
    let selectors = selectors(&shards);
    assert_eq!(selectors[..2], ["namespace in (pay,shop)", "sharding-hash in (0,1),namespace notin (pay,shop)"]);
}

#[test]
fn a_canary_of_both_is_the_union_and_others_have_the_rest() {
    let hash = NamespaceHash::default();
    let known: Vec<String> = (0..200).map(|number| format!("ns-{number}")).collect();
    let known: Vec<&str> = known.iter().map(String::as_str).collect();
    let shards = shards(
        "canary: {replicas: 1, inNamespaces: [ns-1], inShardHash: ['4']}, auto: {shardingSize: 3, everyShardReplicas: 1}",
        &known,
    );
    for name in known {
        let slot = hash.slot(name);
        let owner = owners(&shards, &labels(slot, Some(name)));
        let canary = name == "ns-1" || slot.number() == 4;
        assert_eq!(owner == ["op-0-canary"], canary, "{name}");
        assert_eq!(owner.len(), 1, "{name}");
    }
    for slot in SlotSet::ALL.iter() {
        let owner = owners(&shards, &labels(slot, Some(&Labelling::cluster_namespace(slot))));
        assert_eq!(owner.len(), 1, "of cluster scope, {slot}");
        assert_eq!(owner == ["op-0-canary"], slot.number() == 4, "of cluster scope, {slot}");
    }
    let sizes: Vec<usize> = shards.iter().map(|shard| shard.share.slots.len()).collect();
    assert_eq!(sizes, [1, 11, 10, 10], "the normal ones divide what the canary leaves");
}

#[test]
fn namespaces_whose_hash_the_canary_has_need_no_name() {
    let hash = NamespaceHash::default().slot("shop");
    let shards = shards(
        &format!(
            "canary: {{replicas: 1, inNamespaces: [shop], inShardHash: ['{hash}']}}, auto: {{shardingSize: 1, everyShardReplicas: 1}}"
        ),
        &["shop"],
    );
    assert_eq!(selectors(&shards)[0], format!("sharding-hash in ({hash})"));
}

#[test]
fn a_root_that_is_switched_off_makes_nothing() {
    let root = root("disable: true");
    assert_eq!(divide(&root, &Labelling::default(), &BTreeSet::new(), &[]), Ok(None));
}

#[test]
fn a_root_that_cannot_be_divided_says_which_field_is_wrong() {
    let auto = "auto: {shardingSize: 2, everyShardReplicas: 1}";
    assert!(error("auto: {shardingSize: 33, everyShardReplicas: 1}").starts_with("spec.root.auto.shardingSize"));
    assert!(error("manual: [{id: 1, hashes: ['0']}]").starts_with("spec.root.manual: the hashes 1,2,"));
    let excluded = format!(
        "canary: {{replicas: 1, inNamespaces: [shop]}}, {auto}, resourceSelector: [{{selector: {{matchExpressions: [{{key: ctrlmesh.kusionstack.io/namespace, operator: In, values: [pay]}}]}}}}]"
    );
    assert!(error(&excluded).contains("everything that shard \"op-0-canary\" could own"));
    let many: Vec<String> = (0..63).map(|n| format!("{{key: k{n}, operator: Exists}}")).collect();
    let many = format!(
        "{auto}, resourceSelector: [{{selector: {{matchExpressions: [{}, {}]}}}}]",
        many.join(","),
        "{key: z, operator: Exists}"
    );
    assert!(error(&many).contains("at most 62 matchExpressions"), "{}", error(&many));
    let mut no_root = root(auto);
    no_root.spec.root = None;
    assert_eq!(divide(&no_root, &Labelling::default(), &BTreeSet::new(), &[]), Err(DivideError::NoRoot));
    let known: BTreeSet<String> = (0..200_000).map(|number| format!("ns-{number}")).collect();
    let canary = root(&format!("canary: {{replicas: 1, inNamespaces: [shop], inShardHash: ['4']}}, {auto}"));
    assert!(matches!(divide(&canary, &Labelling::default(), &known, &[]), Err(DivideError::TooManyNamespaces { .. })));
}

#[test]
fn an_own_label_key_and_hash_are_used_throughout() {
    let labelling = Labelling {
        hash_key: "example.com/hash".to_owned(),
        namespace_key: "example.com/ns".to_owned(),
        control_key: "example.com/control".to_owned(),
        hash: NamespaceHash::Kusionstack,
    };
    // ns-a is in slot 15 of the predecessors' hash.
    let root = root(
        "canary: {replicas: 1, inNamespaces: [shop], inShardHash: ['15']}, auto: {shardingSize: 31, everyShardReplicas: 1}",
    );
    let shards = divide(&root, &labelling, &names(&["ns-a", "ns-b"]), &[]).unwrap().unwrap();
    assert_eq!(
        selectors(&shards)[..2],
        [
            "example.com/ns in (cluster.15,ns-a,shop)",
            "example.com/hash in (0),example.com/ns notin (cluster.15,ns-a,shop)"
        ]
    );
}

fn labels(slot: Slot, namespace: Option<&str>) -> Labels {
    let hash = (label::SHARDING_HASH.to_owned(), slot.to_string());
    let namespace = namespace.map(|name| (label::NAMESPACE.to_owned(), name.to_owned()));
    [hash].into_iter().chain(namespace).collect()
}

/// Shards whose limits all match.
fn owners<'a>(shards: &'a [Shard], labels: &Labels) -> Vec<&'a str> {
    let matches = |shard: &&Shard| {
        shard
            .config
            .spec
            .limits
            .iter()
            .all(|limit| Selector::try_from(limit.selector.as_ref().unwrap()).unwrap().matches(labels))
    };
    shards.iter().filter(matches).map(|shard| shard.share.name.as_str()).collect()
}

#[derive(Clone, Debug)]
struct AnyRoot {
    rule: String,
    known: BTreeSet<String>,
}

/// Any valid rule, and any number of namespaces.
fn any_root() -> impl Strategy<Value = AnyRoot> {
    let namespace = || "[a-d][a-z]?-[0-9]";
    let namespaces = |most| proptest::collection::btree_set(namespace(), 0..most);
    let canary = (0..u32::MAX, namespaces(6), any::<bool>(), 1..4_u8);
    let parts = proptest::collection::vec(0..6_usize, 32);
    (canary, 1..33_usize, proptest::option::of(parts), namespaces(60)).prop_map(
        |((bits, mut pinned, with, replicas), size, manual, known)| {
            let bits = if bits % 3 == 0 { 0 } else { bits & bits.rotate_left(7) };
            let (bits, with) = (if with { bits } else { 0 }, with && (bits != 0 || !pinned.is_empty()));
            if !with {
                pinned.clear();
            }
            let hashes: Vec<u32> = (0..32).filter(|slot| bits & (1 << slot) != 0).collect();
            let left: Vec<u32> = (0..32).filter(|slot| bits & (1 << slot) == 0).collect();
            let quoted = |hashes: &[u32]| hashes.iter().map(|hash| format!("'{hash}'")).collect::<Vec<_>>().join(",");
            let canary = if with {
                let pinned = pinned.iter().cloned().collect::<Vec<_>>().join(",");
                format!(
                    "canary: {{replicas: {replicas}, inNamespaces: [{pinned}], inShardHash: [{}]}}, ",
                    quoted(&hashes)
                )
            } else {
                String::new()
            };
            let division = match manual {
                None => format!("auto: {{shardingSize: {}, everyShardReplicas: {replicas}}}", size.min(left.len())),
                Some(parts) => {
                    let mut manual: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
                    for (slot, part) in left.iter().zip(parts) {
                        manual.entry(part + 1).or_default().push(*slot);
                    }
                    let manual: Vec<String> =
                        manual.iter().map(|(id, part)| format!("{{id: {id}, hashes: [{}]}}", quoted(part))).collect();
                    format!("manual: [{}]", manual.join(","))
                }
            };
            AnyRoot { rule: canary + &division, known }
        },
    )
}

proptest! {
    #[test]
    fn every_object_has_one_owner_and_is_seen_by_that_one_only(
        any in any_root(),
        wrong in 0..32_i64,
        strange in "[a-d][a-z]?-[0-9]",
        which: prop::sample::Index,
    ) {
        let root = root(&any.rule);
        let labelling = Labelling::default();
        let shards = divide(&root, &labelling, &any.known, &[]).unwrap().unwrap();
        let rule = root.spec.root.as_ref().unwrap();
        let canary = rule.canary.clone().unwrap_or_default();
        let known: Vec<String> = any.known.iter().cloned().chain(canary.in_namespaces).collect();
        let table = table(&shards, &BTreeMap::new());
        prop_assert!(table.is_total());
        let hash = labelling.hash;
        if !known.is_empty() {
            let name = which.get(&known);
            let seen = owners(&shards, &labels(hash.slot(name), Some(name)));
            prop_assert_eq!(seen, [table.owner(hash.slot(name), Some(name)).unwrap()], "known: {}", name);
        }
        let slot = hash.slot(&strange);
        let seen = owners(&shards, &labels(slot, Some(&Labelling::cluster_namespace(slot))));
        prop_assert_eq!(seen, [table.owner(slot, None).unwrap()], "of cluster scope");
        let owner = table.owner(slot, Some(&strange)).unwrap();
        let seen = owners(&shards, &labels(slot, Some(&strange)));
        prop_assert!(seen.is_empty() || seen == [owner], "not seen yet: {:?}, {}", seen, owner);
        prop_assert!(!seen.is_empty() || owner.ends_with("-canary"), "only the canary waits");
        // Labelled with another slot, as during a change of the hash.
        let wrong = Slot::try_from(wrong).unwrap();
        prop_assert!(owners(&shards, &labels(wrong, Some(&strange))).len() <= 1);
    }

    #[test]
    fn the_canary_owns_the_union_of_its_lists_and_nobody_else_does(any in any_root()) {
        let root = root(&any.rule);
        let shards = divide(&root, &Labelling::default(), &any.known, &[]).unwrap().unwrap();
        let hash = NamespaceHash::default();
        let canary = root.spec.root.as_ref().unwrap().canary.clone().unwrap_or_default();
        for namespace in any.known.iter().chain(&canary.in_namespaces) {
            let slot = hash.slot(namespace);
            let is_canarys = canary.in_namespaces.contains(namespace) || canary.in_shard_hash.contains(&slot.to_string());
            prop_assert_eq!(owners(&shards, &labels(slot, Some(namespace))) == ["op-0-canary"], is_canarys);
        }
    }

    #[test]
    fn shards_stand_together_as_the_admission_demands(any in any_root()) {
        let shards = divide(&root(&any.rule), &Labelling::default(), &any.known, &[]).unwrap().unwrap();
        let configs: Vec<ShardingConfig> = shards.iter().map(|shard| shard.config.clone()).collect();
        for config in &configs {
            prop_assert_eq!(validate::sharding_config(config, &configs, None), validate::Report::default());
        }
    }

    #[test]
    fn automatic_shards_differ_by_at_most_one_slot(any in any_root()) {
        let root = root(&any.rule);
        prop_assume!(root.spec.root.as_ref().unwrap().auto.is_some());
        let shards = divide(&root, &Labelling::default(), &any.known, &[]).unwrap().unwrap();
        let sizes: Vec<usize> = shards.iter().filter(|shard| !shard.share.canary).map(|shard| shard.share.slots.len()).collect();
        let (least, most) = (sizes.iter().min().unwrap(), sizes.iter().max().unwrap());
        prop_assert!(*least >= 1 && most - least <= 1, "{:?}", sizes);
    }
}

#[test]
fn a_shard_that_is_as_it_should_be_is_left_alone() {
    let rule = "auto: {shardingSize: 2, everyShardReplicas: 1}";
    let wanted = shards(rule, &[]);
    let existing: Vec<ShardingConfig> = wanted.iter().map(|shard| shard.config.clone()).collect();
    assert_eq!(changes(&root(rule), &wanted, &refs(&existing)), Changes::default());
    let mut annotated = existing.clone();
    annotated[0].metadata.annotations = Some([("a".to_owned(), "b".to_owned())].into());
    assert_eq!(changes(&root(rule), &wanted, &refs(&annotated)), Changes::default());
}

#[test]
fn missing_or_edited_shards_are_restored_and_others_removed() {
    let rule = "auto: {shardingSize: 2, everyShardReplicas: 1}";
    let before = shards("auto: {shardingSize: 4, everyShardReplicas: 1}", &[]);
    let wanted = shards(rule, &[]);
    let mut existing: Vec<ShardingConfig> = before.iter().map(|shard| shard.config.clone()).collect();
    existing.remove(1);
    existing[1].metadata.labels = None;
    let found = changes(&root(rule), &wanted, &refs(&existing));
    assert_eq!(found.apply.len(), 2, "one changed in place, one missing");
    assert_eq!(found.remove, ["op-3-normal", "op-4-normal"], "also one whose label somebody removed");
    assert_eq!(found.conflicts, []);
    let mut existing: Vec<ShardingConfig> = wanted.iter().map(|shard| shard.config.clone()).collect();
    existing[0].metadata.owner_references = None;
    existing[1].metadata.labels = None;
    assert_eq!(changes(&root(rule), &wanted, &refs(&existing)).apply.len(), 2);
}

#[test]
fn foreign_configs_are_neither_changed_nor_removed() {
    let rule = "auto: {shardingSize: 2, everyShardReplicas: 1}";
    let wanted = shards(rule, &[]);
    let mut existing: Vec<ShardingConfig> = wanted.iter().map(|shard| shard.config.clone()).collect();
    existing[0].metadata.owner_references = None;
    existing[0].metadata.labels = None;
    existing[1].spec.selector = Some(LabelSelector::any_of("a", ["b".to_owned()]));
    let mut another = existing[1].clone();
    another.metadata.name = Some("op-9-normal".to_owned());
    another.metadata.owner_references.as_mut().unwrap()[0].uid = "2c5".to_owned();
    existing.push(another);
    let found = changes(&root(rule), &wanted, &refs(&existing));
    assert_eq!((found.apply.len(), found.remove.len()), (0, 0));
    assert_eq!(
        found.conflicts,
        [Conflict::Foreign { name: "op-1-normal".to_owned() }, Conflict::Selector { name: "op-2-normal".to_owned() }]
    );
}

#[test]
fn a_label_alone_makes_nobody_a_shard_of_a_root() {
    let rule = "auto: {shardingSize: 1, everyShardReplicas: 1}";
    let (wanted, root) = (shards(rule, &[]), root(rule));
    let mut by_hand = wanted[0].config.clone();
    by_hand.metadata.name = Some("mine".to_owned());
    by_hand.metadata.owner_references = None;
    let existing = [wanted[0].config.clone(), by_hand.clone()];
    assert_eq!(changes(&root, &wanted, &refs(&existing)), Changes::default(), "it is nobody's orphan");
    assert!(!is_of(&root, &by_hand));
    let mut strange = wanted[0].config.clone();
    strange.metadata.owner_references = None;
    strange.spec.selector = Some(LabelSelector::any_of("a", ["b".to_owned()]));
    let found = changes(&root, &wanted, &refs(&[strange]));
    assert_eq!(found.conflicts, [Conflict::Foreign { name: "op-1-normal".to_owned() }]);
}

use ctrlmesh_common::names::label;
use ctrlmesh_common::ownership::MAX_EPOCH;
use ctrlmesh_common::policy::{Limit, Redirect};
use ctrlmesh_common::selector::Selector;
use ctrlmesh_common::wire;
use proptest::prelude::*;

use super::*;
use crate::rules::manifest::Manifests;
use crate::rules::pod::{Admitted, Owner};
use crate::rules::shared::shared;

/// A standalone shard in namespace `ops`, of the pods labelled with its name.
pub(super) fn shard(name: &str, limits: &str) -> String {
    format!(
        "---\napiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {{name: {name}, namespace: ops}}\n\
         spec: {{controller: {{leaderElectionName: op}}, selector: {{matchLabels: {{shard: {name}}}}}, limits: [{{selector: {{matchLabels: {limits}}}}}]}}\n"
    )
}

/// A root in namespace `ops` with `rule` in its `spec.root`.
pub(super) fn root(rule: &str) -> String {
    format!(
        "---\napiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {{name: root, namespace: ops}}\n\
         spec: {{root: {{prefix: r, {rule}}}}}\n"
    )
}

pub(super) fn pod(name: &str, labels: &[(&str, &str)]) -> Member {
    let enrolled = [(label::ENABLE_PROXY, "true")];
    let labels = enrolled.iter().chain(labels);
    Member {
        name: PodName { namespace: "ops".to_owned(), name: name.to_owned() },
        labels: labels.map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
        owner: Some(Owner { kind: "StatefulSet".to_owned(), name: "op".to_owned() }),
        ..Member::default()
    }
}

pub(super) fn compiled(texts: &[String], members: &[Member], before: &Compiled) -> Compiled {
    let mut manifests = Manifests::default();
    for text in texts {
        manifests.read(text).unwrap();
    }
    let labelling = Labelling::default();
    let world = World {
        configs: &manifests.configs,
        breakers: &manifests.breakers,
        injections: &manifests.injections,
        members: &shared(members),
        namespaces: &manifests.namespaces,
        first_ordinals: &manifests.first_ordinals,
        unenrolled: &manifests.unenrolled(),
        evidence: &BTreeMap::new(),
        leads: true,
        held_back: &BTreeSet::new(),
        waiting: &BTreeSet::new(),
        loads: &BTreeMap::new(),
        labelling: &labelling,
    };
    compile(world, &before.policies)
}

#[test]
fn a_pod_labelled_after_admission_is_reported() {
    let admitted = pod("op-0", &[("shard", "a")]);
    let past_us = Member { admitted: Admitted::Bypassed, ..pod("op-1", &[("shard", "a")]) };
    let texts = [shard("a", "{team: a}")];
    let compiled = compiled(&texts, &[admitted, past_us], &Compiled::default());
    assert_eq!(epochs(&compiled), [("op-0", 1)]);
    let [trouble] = &compiled.troubles[..] else { panic!("{:?}", compiled.troubles) };
    assert!(trouble.object == "Pod ops/op-1" && trouble.message.contains("make it anew"));
}

pub(super) fn epochs(compiled: &Compiled) -> Vec<(&str, u64)> {
    let policies = compiled.policies.iter();
    policies.map(|(pod, policy)| (pod.name.as_str(), policy.policy.epoch)).collect()
}

/// The status that the leader would write for the operator `name`.
pub(super) fn status(compiled: &Compiled, name: &str) -> String {
    let Record { epoch, policy_digest, ownership, wanted, .. } = &compiled.operators[name];
    let (ownership, wanted) = (serde_json::to_string(ownership).unwrap(), serde_json::to_string(wanted).unwrap());
    format!("status: {{epoch: {epoch}, policyDigest: \"{policy_digest}\", ownership: {ownership}, wanted: {wanted}}}\n")
}

#[test]
fn an_epoch_grows_only_with_what_the_policy_says() {
    let pods = [pod("p", &[("shard", "a")]), pod("q", &[("shard", "b")])];
    let nobody = Compiled::default();
    let (a, b) = (shard("a", "{team: a}"), shard("b", "{team: b}"));
    let first = compiled(&[a.clone(), b.clone()], &pods, &nobody);
    assert_eq!(epochs(&first), [("p", 1), ("q", 1)]);
    assert!(sendable(&first, &nobody.policies).is_empty(), "nobody has written it down");
    let (of_a, of_b) = (status(&first, "ops/a"), status(&first, "ops/b"));
    let written = compiled(&[b.clone() + &of_b, a + &of_a], &pods, &nobody);
    assert_eq!(written.policies, first.policies);
    assert_eq!(sendable(&written, &nobody.policies), written.policies);
    let changed = [shard("a", "{team: c}") + &of_a, b + &of_b];
    let changed = compiled(&changed, &pods, &written);
    assert_eq!(epochs(&changed), [("p", 2), ("q", 1)]);
    assert_eq!(sendable(&changed, &written.policies), written.policies, "nobody has written it");
}

#[test]
fn a_policy_is_serialised_once_for_all_pods_that_share_it() {
    let alike = [pod("p", &[("shard", "a")]), pod("q", &[("shard", "a")])];
    let inside = Member { redirect: Redirect::Nowhere, ..pod("r", &[("shard", "a")]) };
    let pods = [alike[0].clone(), alike[1].clone(), inside];
    let compiled = compiled(&[shard("a", "{team: a}")], &pods, &Compiled::default());
    let policies: Vec<_> = compiled.policies.values().collect();
    assert!(Arc::ptr_eq(policies[0], policies[1]) && !Arc::ptr_eq(policies[0], policies[2]));
    for policy in policies {
        assert_eq!(serde_json::from_slice::<Policy>(policy.json()).unwrap(), policy.policy);
        assert_eq!(policy.digest(), wire::digest(policy.json()));
    }
}

#[test]
fn pods_of_a_root_are_fenced_by_its_table() {
    let rule = |more: &str| {
        let rule = "targetStatefulSet: op, auto: {shardingSize: 2, everyShardReplicas: 1}";
        root(&format!("{rule}{more}"))
    };
    let node = Some("n".to_owned());
    let pods = ["op-0", "op-1"].map(|name| Member { uid: format!("u-{name}"), node: node.clone(), ..pod(name, &[]) });
    let fences = |text: String| {
        let first = compiled(std::slice::from_ref(&text), &pods, &Compiled::default());
        let compiled = compiled(&[text + &status(&first, "ops/root")], &pods, &first);
        let table = compiled.operators["ops/root"].ownership.clone().unwrap();
        let fences = compiled.policies.values().map(|one| (one.shard.clone().unwrap(), one.policy.fence.clone()));
        (table, fences.collect::<Vec<_>>())
    };
    let (table, of_pods) = fences(rule(""));
    assert_eq!(table.pod_uids.len(), 2);
    for (shard, fence) in &of_pods {
        let fence = fence.as_ref().unwrap();
        assert_eq!((fence.operator.as_str(), fence.owner.as_ref()), ("ops/root", Some(shard)));
        assert_eq!((&fence.slots, &fence.namespaces), (&table.slots, &table.namespaces));
        assert_eq!(fence.resources, [], "every kind");
    }
    let divided = ", resourceSelector: [{relateResources: [{apiGroups: [''], resources: [pods]}]}";
    let (_, of_pods) = fences(rule(&format!("{divided}]")));
    assert!(of_pods.iter().all(|(_, fence)| fence.as_ref().unwrap().resources.len() == 1));
    let (_, of_pods) = fences(rule(", resourceSelector: [{selector: {matchLabels: {a: b}}}]"));
    assert!(of_pods.iter().all(|(_, fence)| fence.as_ref().unwrap().resources.is_empty()));
    let (_, of_pods) = fences(rule(", fence: 'Off'"));
    assert!(of_pods.iter().all(|(_, fence)| fence.is_none()));
    let alone = compiled(&[shard("a", "{team: a}")], &[pod("p", &[("shard", "a")])], &Compiled::default());
    assert!(alone.policies.values().all(|policy| policy.policy.fence.is_none()));
}

#[test]
fn switching_the_fence_is_a_new_epoch() {
    let rule = "targetStatefulSet: op, auto: {shardingSize: 2, everyShardReplicas: 1}";
    let pods = [Member { uid: "u".to_owned(), ..pod("op-0", &[]) }];
    let first = compiled(&[root(rule)], &pods, &Compiled::default());
    let status = status(&first, "ops/root");
    let same = compiled(&[root(rule) + &status], &pods, &first);
    assert_eq!(epochs(&same), epochs(&first));
    let off = compiled(&[root(&format!("{rule}, fence: 'Off'")) + &status], &pods, &first);
    assert_eq!(epochs(&off), [("op-0", 2)]);
}

#[test]
fn a_new_pod_keeps_the_epoch_and_a_moved_one_raises_it() {
    let rule = "targetStatefulSet: op, auto: {shardingSize: 2, everyShardReplicas: 1}";
    let first = compiled(&[root(rule)], &[pod("op-0", &[])], &Compiled::default());
    let said = root(rule) + &status(&first, "ops/root");
    let more = compiled(&[said], &[pod("op-0", &[]), pod("op-1", &[])], &first);
    let record = &more.operators["ops/root"];
    assert!(record.written && record.epoch == 1, "{record:?}");
    assert_eq!(record.ownership.as_ref().unwrap().epoch, 2, "the table has a pod more");
    assert_eq!(epochs(&more), [("op-0", 1), ("op-1", 1)]);
    let said = status(&first, "ops/root");
    let said = said.replace(r#""op-0":"r-1-normal""#, r#""op-0":"r-2-normal""#);
    let moved = compiled(&[root(rule) + &said], &[pod("op-0", &[])], &first);
    assert!(!moved.operators["ops/root"].written);
    assert_eq!(epochs(&moved), [("op-0", 2)]);
}

#[test]
fn epochs_go_on_after_a_root_was_off_and_its_shards_edited() {
    let rule = "targetStatefulSet: op, auto: {shardingSize: 2, everyShardReplicas: 1}";
    let first = compiled(&[root(rule)], &[pod("op-0", &[])], &Compiled::default());
    let said = root(rule) + &status(&first, "ops/root");
    let child = shard("r-1-normal", "{edited: by-hand}") + "status: {epoch: 9}\n";
    let of_root = format!("{{name: r-1-normal, labels: {{{}: root}}", label::AUTO_SHARDING_ROOT);
    let child = child.replace("{name: r-1-normal", &of_root);
    let after = compiled(&[said, child], &[pod("op-0", &[])], &first);
    assert_eq!(epochs(&after), [("op-0", 10)]);
}

#[test]
fn an_epoch_that_leaves_no_room_for_a_later_one_counts_as_none() {
    let rule = "targetStatefulSet: op, auto: {shardingSize: 1, everyShardReplicas: 1}";
    let pods = [pod("op-0", &[])];
    let first = compiled(&[root(rule)], &pods, &Compiled::default());
    let said = status(&first, "ops/root");
    for most in [MAX_EPOCH, i64::MAX.cast_unsigned()] {
        let wrong = said.replace("epoch: 1", &format!("epoch: {most}"));
        let wrong = wrong.replace("\"epoch\":1", &format!("\"epoch\":{most}"));
        let found = compiled(&[root(rule) + &wrong], &pods, &first);
        let record = &found.operators["ops/root"];
        let table = record.ownership.as_ref().unwrap();
        assert_eq!((record.epoch, record.written, table.epoch), (1, false, 1), "{most}");
        let after = compiled(&[root(rule) + &status(&found, "ops/root")], &pods, &found);
        assert!(after.operators["ops/root"].written, "{most}");
    }
    let last = said.replace("epoch: 1", &format!("epoch: {}", MAX_EPOCH - 1));
    let other = "targetStatefulSet: op, auto: {shardingSize: 2, everyShardReplicas: 1}";
    let found = compiled(&[root(other) + &last], &pods, &first);
    assert_eq!(found.operators["ops/root"].epoch, MAX_EPOCH, "it can be written");
}

#[test]
fn an_invalid_config_changes_nothing_and_is_reported() {
    let pods = [pod("p", &[("shard", "a")])];
    let first = compiled(&[shard("a", "{team: a}")], &pods, &Compiled::default());
    for wrong in ["{'a b': c}", "{}"] {
        let after = compiled(&[shard("a", wrong)], &pods, &first);
        assert_eq!(after.policies, first.policies, "{wrong}");
        assert_eq!(after.troubles[0].object, "ShardingConfig ops/a", "{wrong}");
        assert!(after.troubles[0].message.starts_with("spec.limits[0].selector"), "{wrong}");
        let never = compiled(&[shard("a", wrong)], &pods, &Compiled::default());
        assert!(never.policies.is_empty(), "{wrong}");
    }
    let removed = compiled(&[], &pods, &first);
    assert_eq!(removed.policies[&pods[0].name].policy, Policy::nothing(), "a pod of no shard sees nothing");
}

#[test]
fn an_invalid_root_changes_nothing_and_is_reported() {
    let pods = [pod("op-0", &[]), pod("op-1", &[])];
    let rule = |size| format!("targetStatefulSet: op, auto: {{shardingSize: {size}, everyShardReplicas: 1}}");
    let first = compiled(&[root(&rule(2))], &pods, &Compiled::default());
    assert_eq!(first.policies.len(), 2);
    let after = compiled(&[root(&rule(40))], &pods, &first);
    assert_eq!(after.policies, first.policies);
    assert!(after.troubles[0].message.starts_with("spec.root.auto.shardingSize"));
}

#[test]
fn a_pod_of_two_shards_keeps_its_policy() {
    let pods = [pod("p", &[("shard", "a")])];
    let first = compiled(&[shard("a", "{team: a}")], &pods, &Compiled::default());
    let other = shard("b", "{team: b}").replace("{shard: b}", "{shard: a}");
    let both = [shard("a", "{team: a}"), other];
    assert_eq!(compiled(&both, &pods, &first).policies, first.policies);
    let never = compiled(&both, &pods, &Compiled::default());
    assert!(never.policies.is_empty());
    assert_eq!(never.troubles.len(), 1);
    assert_eq!(never.troubles[0].object, "Pod ops/p");
}

#[test]
fn pods_not_enrolled_get_no_policy_and_foreign_ones_see_nothing() {
    let mut foreign = pod("p", &[("shard", "a")]);
    foreign.name.namespace = "other".to_owned();
    let mut stranger = pod("q", &[("shard", "a")]);
    stranger.labels.remove(label::ENABLE_PROXY);
    let pods = [foreign, stranger];
    let found = compiled(&[shard("a", "{team: a}")], &pods, &Compiled::default());
    assert_eq!(found.policies.len(), 1);
    assert_eq!(found.policies[&pods[0].name].shard, None);
}

#[test]
fn epochs_go_on_from_what_was_written_down() {
    let pods = [pod("p", &[("shard", "a")])];
    let text = shard("a", "{team: a}") + "status: {epoch: 41}\n";
    assert_eq!(epochs(&compiled(&[text], &pods, &Compiled::default())), [("p", 42)]);
}

#[test]
fn the_output_can_be_read_back() {
    let rule = "targetStatefulSet: op, canary: {replicas: 1, inNamespaces: [shop]}, auto: {shardingSize: 2, everyShardReplicas: 1}";
    let pods = [pod("op-0", &[]), pod("op-1", &[])];
    let compiled = compiled(&[root(rule)], &pods, &Compiled::default());
    let text = serde_saphyr::to_string(&compiled).unwrap();
    assert_eq!(serde_saphyr::from_str::<Compiled>(&text).unwrap(), compiled);
}

/// A shard that `root` has made.
pub(super) fn child(name: &str) -> String {
    let injected = format!("{}: {name}", label::SHARDING_CONFIG_INJECTED);
    let of_root = format!("labels: {{{}: root}}, namespace: ops", label::AUTO_SHARDING_ROOT);
    let child = shard(name, &format!("{{team: {name}}}")).replace("namespace: ops", &of_root);
    child.replace(&format!("{{shard: {name}}}"), &format!("{{{injected}}}"))
}

pub(super) fn shards(compiled: &Compiled) -> Vec<(&str, &str)> {
    let policies = compiled.policies.iter();
    policies.filter_map(|(pod, policy)| Some((pod.name.as_str(), policy.shard.as_deref()?))).collect()
}

/// Inactive roots: one is switched off, one cannot be divided.
pub(super) const INACTIVE_ROOT_RULES: [&str; 2] =
    ["disable: true, ", "auto: {shardingSize: 40, everyShardReplicas: 1}, "];

#[test]
fn epochs_go_on_in_the_shards_of_an_inactive_root() {
    for rule in INACTIVE_ROOT_RULES {
        let root = root(&format!("{rule}targetStatefulSet: op")) + "status: {epoch: 7}\n";
        let pods = [pod("op-0", &[])];
        let texts = [root.clone(), child("r-1-normal")];
        let found = compiled(&texts, &pods, &Compiled::default());
        assert_eq!(epochs(&found), [("op-0", 8)], "{rule}: its pods have 7");
        let said = status(&found, "ops/r-1-normal");
        let after = compiled(&[root, child("r-1-normal") + &said], &pods, &found);
        let record = &after.operators["ops/r-1-normal"];
        assert_eq!((record.epoch, record.written), (8, true), "{rule}");
    }
}

proptest! {
    #[test]
    fn the_order_of_the_input_does_not_count(
        configs in Just((0..6).map(|at| shard(&format!("s{at}"), &format!("{{team: t{at}}}"))).chain([root("targetStatefulSet: op, auto: {shardingSize: 3, everyShardReplicas: 2}")]).collect::<Vec<_>>()).prop_shuffle(),
        pods in Just((0..12).map(|at| if at % 2 == 0 { pod(&format!("op-{at}"), &[]) } else { pod(&format!("x-{at}"), &[("shard", &format!("s{}", at % 6))]) }).collect::<Vec<_>>()).prop_shuffle(),
    ) {
        let mut sorted = (configs.clone(), pods.clone());
        sorted.0.sort();
        sorted.1.sort_by(|one, other| one.name.cmp(&other.name));
        let found = compiled(&configs, &pods, &Compiled::default());
        prop_assert_eq!(found.policies.len(), 12);
        prop_assert_eq!(&found, &compiled(&sorted.0, &sorted.1, &Compiled::default()));
        prop_assert_eq!(&compiled(&sorted.0, &sorted.1, &found), &found);
    }
}

#[test]
fn a_policy_too_large_to_be_sent_is_reported_and_not_used() {
    let mut manifests = Manifests::default();
    manifests.read(&shard("a", "{team: a}")).unwrap();
    let (namespaces, first_ordinals) = (BTreeSet::new(), BTreeMap::new());
    let world = World {
        configs: &manifests.configs,
        breakers: &manifests.breakers,
        injections: &manifests.injections,
        members: &[],
        namespaces: &namespaces,
        first_ordinals: &first_ordinals,
        unenrolled: &BTreeMap::new(),
        evidence: &BTreeMap::new(),
        leads: true,
        held_back: &BTreeSet::new(),
        waiting: &BTreeSet::new(),
        loads: &BTreeMap::new(),
        labelling: &Labelling::default(),
    };
    let (operators, _) = operators(world);
    let policy = |count: usize| {
        let values: Vec<String> = (0..count).map(|n| format!("{n:060}")).collect();
        let selector = Selector::parse(&format!("a in ({})", values.join(","))).unwrap();
        let limit = Limit { relate_resources: Vec::new(), selector, changed_at: None };
        let policy = Policy { limits: vec![limit], ..Policy::default() };
        BTreeMap::from([("a".to_owned(), operators[0].compiled("a", policy))])
    };
    assert_eq!(check_sizes(&operators[0], &policy(1000)), Ok(()));
    let trouble = check_sizes(&operators[0], &policy(40_000)).unwrap_err();
    assert_eq!(trouble.configs, ["ops/a"]);
    assert!(trouble.message.contains("at most 2097152 are allowed"), "{trouble:?}");
}

#[test]
fn a_root_says_whether_its_pods_are_restarted() {
    let restarts = |on_loss: &str| {
        let rule = format!("targetStatefulSet: op, auto: {{shardingSize: 1, everyShardReplicas: 1}}{on_loss}");
        let compiled = compiled(&[root(&rule)], &[pod("op-0", &[])], &Compiled::default());
        compiled.policies.values().all(|told| told.policy.restart_on_loss)
    };
    assert!(restarts(", onLoss: Restart"));
    assert!(!restarts(", onLoss: Splice") && !restarts(""));
}

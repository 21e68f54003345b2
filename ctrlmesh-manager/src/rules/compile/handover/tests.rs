use std::collections::BTreeSet;

use ctrlmesh_common::handover::{PodEvidence, Server};
use ctrlmesh_common::names::OWNERSHIP_FINALIZER;
use ctrlmesh_common::ownership::UNSHARDED;
use ctrlmesh_common::slots::{NamespaceHash, Slot};

use super::*;
use crate::rules::compile::tests::root;
use crate::rules::compile::{Compiled, Record, compile};
use crate::rules::manifest::Manifests;
use crate::rules::shard::Labelling;

mod balance;
mod bed;
mod elastic;
mod rollouts;

use bed::{Bed, enrolled, plain, slot};

const ROOT: &str = "ops/root";

const A: &str = "r-1-normal";

const B: &str = "r-2-normal";

const TWO: &str = "fence: Server, targetStatefulSet: op, auto: {shardingSize: 2, everyShardReplicas: 1}";

#[test]
fn slots_are_taken_away_proved_and_only_then_given() {
    let mut bed = Bed::new("fence: Server, targetStatefulSet: op, auto: {shardingSize: 1, everyShardReplicas: 2}");
    bed.enrolled = vec![enrolled("op-0"), enrolled("op-1")];
    let first = bed.settle();
    assert!(bed.table.epoch == 2 && bed.owners() == [A].into() && first.waiting.is_empty(), "{first:?}");
    assert_eq!(bed.see(31, "x"), ["op-0", "op-1"], "of one shard, the operator decides");
    // Two shards of one pod each.
    bed.root = root(TWO);
    let revoked = bed.step();
    let taken: Vec<Slot> = bed.table.revoked.as_ref().unwrap().slots.keys().copied().collect();
    assert_eq!((taken.len(), taken[0]), (16, slot(16)), "no slot moves that need not");
    assert!(revoked.moves && revoked.epoch == 3 && bed.table.epoch == 3, "{revoked:?}");
    assert_eq!(bed.see(31, "x"), [""; 0], "nobody sees what is taken away");
    assert_eq!(bed.see(0, "x"), ["op-0"]);
    // Nothing is proved: the same table, however often.
    let waiting = bed.step();
    assert!(!waiting.moves && waiting.written && bed.table.epoch == 3);
    assert!(waiting.waiting.iter().any(|one| one.contains("op-0")), "{:?}", waiting.waiting);
    // The API server only; the proxies have not acknowledged.
    bed.evidence.server = Server::Enforces(3);
    assert!(!bed.step().moves);
    // An acknowledgement of an older epoch.
    bed.proves();
    bed.evidence.pods.values_mut().for_each(|pod| pod.acknowledged = Some(2));
    assert!(!bed.step().moves);
    bed.proves();
    let granted = bed.step();
    assert!(granted.moves && bed.table.revoked.is_none() && bed.table.epoch == 4, "{granted:?}");
    assert_eq!((bed.see(31, "x"), bed.see(0, "x")), (vec!["op-1".to_owned()], vec!["op-0".to_owned()]));
    let end = bed.step();
    assert!(end.written && !end.moves && end.waiting.is_empty() && end.epoch == 4, "{end:?}");
}

#[test]
fn pods_of_a_root_that_was_made_again_prove_first() {
    for rule in [TWO.to_owned(), TWO.replace("Server", "Proxy")] {
        let mut bed = Bed::new(&rule);
        bed.enrolled = vec![enrolled("op-0"), enrolled("op-1")];
        let taken = bed.step();
        assert!(bed.owners().is_empty() && taken.epoch == 1 && bed.table.epoch == 1, "{taken:?}");
        assert_eq!(bed.see(0, "x"), [""; 0], "nobody sees what is nobody's");
        bed.step();
        assert!(bed.owners().is_empty());
        bed.settle();
        assert_eq!((bed.owners(), bed.see(0, "x")), ([A, B].into(), vec!["op-0".to_owned()]));
    }
}

#[test]
fn nothing_is_granted_before_all_objects_are_labelled() {
    let of_generation = |rule: &str| root(rule).replace("name: root,", "name: root, generation: 2,");
    let one = "fence: Server, targetStatefulSet: op, auto: {shardingSize: 1, everyShardReplicas: 2}";
    let mut bed = Bed { root: of_generation(one), ..Bed::new(one) };
    bed.enrolled = vec![enrolled("op-0"), enrolled("op-1")];
    bed.settle();
    bed.root = of_generation(TWO);
    let waiting = bed.settle().waiting;
    assert!(bed.table.revoked.is_some() && waiting[0].contains("Labelled"), "{waiting:?}");
    let labelled = "status: {conditions: [{type: Labelled, status: 'True', observedGeneration: 2, reason: Complete, \
        message: '', lastTransitionTime: '2026-01-01T00:00:00Z'}], ";
    bed.status = bed.status.replace("status: {", labelled);
    bed.step();
    assert!(bed.table.revoked.is_none() && bed.owners() == [A, B].into(), "{:?}", bed.table);
}

#[test]
fn nothing_is_taken_away_before_all_objects_are_labelled() {
    let of_generation = |rule: &str| root(rule).replace("name: root,", "name: root, generation: 2,");
    let mut bed = Bed { root: of_generation(TWO), ..Bed::new(TWO) };
    bed.evidence.server = Server::Enforces(0);
    bed.unenrolled = vec![plain("op-0")];
    bed.enrolled = vec![enrolled("op-1")];
    assert!(bed.compiled().operators.is_empty(), "a running operator is left alone");
    // A table from before the API server fenced.
    bed.root = of_generation(&TWO.replace("Server", "'Off'"));
    bed.step();
    bed.root = of_generation(TWO);
    let slots = bed.table.slots.clone();
    let waiting = bed.step().waiting;
    assert!(bed.table.revoked.is_none() && bed.table.slots == slots, "{:?}", bed.table);
    assert!(waiting[0].contains("Labelled"), "{waiting:?}");
}

#[test]
fn a_manager_that_starts_amid_a_move_goes_on_with_it() {
    let mut bed = Bed::new("fence: Server, targetStatefulSet: op, auto: {shardingSize: 1, everyShardReplicas: 2}");
    bed.enrolled = vec![enrolled("op-0"), enrolled("op-1")];
    bed.settle();
    bed.root = root(TWO);
    bed.evidence = evidence::nothing();
    bed.step();
    // It has told nobody anything, and heard nothing.
    bed.before = Compiled::default();
    let table = bed.table.clone();
    let record = bed.step();
    assert!(record.written && bed.table == table, "it tells what is written, and grants nothing");
    assert_eq!(bed.see(31, "x"), [""; 0]);
    bed.proves();
    assert_eq!(bed.settle().waiting, [""; 0]);
    assert_eq!(bed.see(31, "x"), ["op-1"]);
}

#[test]
fn a_running_operator_keeps_all_until_shards_have_pods() {
    let mut bed = Bed::new(TWO);
    bed.unenrolled = vec![plain("op-0"), plain("op-1"), Member { owner: None, ..plain("other") }];
    let first = bed.step();
    assert_eq!((bed.owners(), bed.table.pod_uids.len()), ([UNSHARDED].into(), 2));
    assert!(first.waiting[0].contains("has no ready pod") && first.unserved.is_empty(), "{first:?}");
    // The rolling update has come to its first pod, which is not ready yet.
    bed.unenrolled.remove(1);
    bed.enrolled = vec![Member { ready: false, ..enrolled("op-1") }];
    bed.settle();
    assert_eq!(bed.owners(), [UNSHARDED].into());
    bed.enrolled[0].ready = true;
    bed.step();
    assert_eq!(bed.table.revoked.as_ref().unwrap().slots[&slot(31)], UNSHARDED);
    bed.settle();
    assert_eq!(bed.owners(), [UNSHARDED, B].into());
    assert_eq!(bed.see(0, "x"), [""; 0]);
    // And to the last.
    bed.unenrolled.clear();
    bed.enrolled.push(enrolled("op-0"));
    let end = bed.settle();
    assert!(bed.owners() == [A, B].into() && end.waiting.is_empty(), "{end:?}");
    // The label is taken away again.
    bed.enrolled.remove(1);
    bed.unenrolled = vec![plain("op-0")];
    bed.settle();
    assert_eq!(bed.owners(), [UNSHARDED, B].into());
    bed.enrolled.clear();
    bed.unenrolled.push(plain("op-1"));
    bed.settle();
    assert_eq!(bed.owners(), [UNSHARDED].into());
}

#[test]
fn without_a_fence_an_unenrolled_pod_must_have_ended() {
    let mut bed = Bed::new(TWO);
    bed.unenrolled = vec![plain("op-0")];
    bed.enrolled = vec![enrolled("op-1")];
    bed.step();
    bed.proves();
    bed.evidence.server = Server::None;
    let stuck = bed.settle_without_proof();
    assert!(stuck.waiting.iter().any(|what| what.contains("op-0")), "{stuck:?}");
    bed.unenrolled[0].stopped = true;
    bed.evidence.pods.get_mut("plain-op-0").unwrap().gone = true;
    bed.settle_without_proof();
    assert_eq!(bed.owners(), [A, B].into());
    assert!(!bed.table.pod_uids.contains_key("plain-op-0"));
}

impl Bed {
    fn settle_without_proof(&mut self) -> Record {
        (0..5).map(|_| self.step()).last().unwrap()
    }
}

#[test]
fn a_root_that_is_deleted_hands_everything_back() {
    let mut bed = Bed::new(TWO);
    bed.enrolled = vec![enrolled("op-0"), enrolled("op-1")];
    bed.settle();
    let leaving = format!("finalizers: ['{OWNERSHIP_FINALIZER}'], deletionTimestamp: '2026-01-01T00:00:00Z'");
    for rule in [TWO.to_owned(), TWO.replace("Size: 2", "Size: 40")] {
        bed.root = root(&rule).replace("namespace: ops", &format!("namespace: ops, {leaving}"));
        bed.proves();
        let record = bed.settle();
        assert_eq!(bed.owners(), [UNSHARDED].into(), "{rule}");
        assert!(record.waiting.is_empty() && record.unserved.is_empty(), "{record:?}");
        assert_eq!(bed.see(0, "x"), [""; 0]);
    }
}

#[test]
fn a_pinned_namespace_moves_by_itself() {
    let mut bed = Bed::new(TWO);
    bed.enrolled = vec![enrolled("op-0"), enrolled("op-1")];
    bed.settle();
    let pinned = "fence: Server, targetStatefulSet: op, canary: {replicas: 1, inNamespaces: [shop]}, auto: {shardingSize: 2, everyShardReplicas: 1}";
    bed.root = root(pinned);
    bed.enrolled.push(enrolled("op-2"));
    let of_shop = NamespaceHash::default().slot("shop").number();
    bed.evidence = evidence::nothing();
    bed.step();
    assert!(bed.table.revoked.as_ref().unwrap().namespaces.contains_key("shop"), "{:?}", bed.table);
    assert_eq!(bed.see(of_shop, "shop"), [""; 0], "it is nobody's");
    bed.proves();
    bed.settle();
    assert_eq!(bed.table.namespaces, [("shop".to_owned(), "r-0-canary".to_owned())].into());
    assert_eq!(bed.see(of_shop, "shop"), ["op-0"]);
    // The pin goes.
    bed.root = root(TWO);
    bed.proves();
    bed.settle();
    assert!(bed.table.namespaces.is_empty() && bed.owners() == [A, B].into(), "{:?}", bed.table);
    assert_eq!(bed.see(of_shop, "shop").len(), 1);
}

#[test]
fn what_lapsed_for_another_table_proves_nothing() {
    let mut bed = Bed::new("fence: Server, targetStatefulSet: op, auto: {shardingSize: 1, everyShardReplicas: 2}");
    bed.enrolled = vec![enrolled("op-0"), enrolled("op-1")];
    bed.settle();
    bed.root = root(TWO);
    bed.step();
    bed.proves();
    let silent = PodEvidence { acknowledged: None, gone: false, lapsed: true };
    bed.evidence.pods.values_mut().for_each(|pod| *pod = silent);
    bed.about = Some(1);
    assert!(!bed.step().moves);
    bed.about = None;
    assert!(bed.step().moves, "a silent proxy does not hold it up");
}

#[test]
fn nothing_is_decided_before_the_unenrolled_pods_are_known() {
    let mut manifests = Manifests::default();
    manifests.read(&root(TWO)).unwrap();
    let world = World {
        configs: &manifests.configs,
        breakers: &manifests.breakers,
        injections: &manifests.injections,
        members: &[enrolled("op-0").into()],
        namespaces: &BTreeSet::new(),
        first_ordinals: &BTreeMap::new(),
        labelling: &Labelling::default(),
        unenrolled: &BTreeMap::new(),
        evidence: &BTreeMap::new(),
        leads: true,
        held_back: &BTreeSet::new(),
        waiting: &BTreeSet::new(),
        loads: &BTreeMap::new(),
    };
    let found = compile(world, &BTreeMap::new());
    assert!(found.operators.is_empty() && found.policies.is_empty() && found.troubles.is_empty(), "{found:?}");
}

#[test]
fn a_root_without_a_fence_moves_at_once() {
    let rule = |size: u8| {
        format!("fence: 'Off', targetStatefulSet: op, auto: {{shardingSize: {size}, everyShardReplicas: 1}}")
    };
    let mut bed = Bed::new(&rule(1));
    bed.enrolled = vec![enrolled("op-0"), enrolled("op-1")];
    bed.unenrolled = vec![plain("op-2")];
    bed.step();
    bed.root = root(&rule(2));
    bed.step();
    assert!(bed.owners() == [A, B].into() && bed.table.revoked.is_none());
}

#[test]
fn where_only_proxies_fence_they_and_the_ends_of_pods_prove() {
    let rule = TWO.replace("Server", "Proxy");
    let mut bed = Bed::new(&rule);
    bed.unenrolled = vec![plain("op-0"), plain("op-1")];
    bed.settle();
    assert_eq!(bed.owners(), [UNSHARDED].into());
    // One is made anew.
    bed.unenrolled.remove(1);
    bed.enrolled.push(enrolled("op-1"));
    let waiting = bed.settle_by_proxies(&["plain-op-1"]).waiting;
    assert!(waiting[0].contains("pod op-0 of unsharded has not ended"), "{waiting:?}");
    assert_eq!(bed.owners(), [UNSHARDED].into(), "the old pod has no proxy that could refuse");
    bed.unenrolled.clear();
    bed.enrolled.push(enrolled("op-0"));
    bed.settle_by_proxies(&["plain-op-0", "plain-op-1"]);
    assert_eq!(bed.owners(), [A, B].into());
}

#[test]
fn a_root_that_gets_the_servers_fence_keeps_its_table() {
    let flips = TWO.replace("Server", "'Off'");
    let mut bed = Bed::new(&flips);
    bed.enrolled = vec![enrolled("op-0"), enrolled("op-1")];
    bed.step();
    let (slots, policies) = (bed.table.slots.clone(), bed.before.policies.clone());
    bed.root = root(TWO);
    let record = bed.step();
    assert_eq!((&bed.table.slots, bed.table.pod_uids.len()), (&slots, 2));
    assert!(bed.table.revoked.is_none() && record.epoch == 2, "{record:?}");
    let limits =
        |all: &super::super::PoliciesByPod| -> Vec<_> { all.values().map(|one| one.policy.limits.clone()).collect() };
    assert_eq!(limits(&bed.before.policies), limits(&policies));
}

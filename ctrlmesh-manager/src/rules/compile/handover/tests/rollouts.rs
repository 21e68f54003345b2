//! Ownership follows what the status says of a version on trial.

use ctrlmesh_common::names::label;
use ctrlmesh_common::slots::SlotSet;

use super::bed::{Bed, enrolled, slot};
use crate::rules::pod::{Member, Owner};

const DEPLOYMENT: &str =
    "rollout: {}, fence: Server, targetDeployment: op, auto: {shardingSize: 3, everyShardReplicas: 1}";

const STATEFUL_SET: &str =
    "rollout: {}, fence: Server, targetStatefulSet: op, auto: {shardingSize: 3, everyShardReplicas: 1}";

fn of_deployment(name: &str, revision: &str) -> Member {
    let mut pod = enrolled(name);
    pod.labels.insert(label::POD_TEMPLATE_HASH.to_owned(), revision.to_owned());
    let owner = Owner { kind: "ReplicaSet".to_owned(), name: format!("op-{revision}") };
    Member { owner: Some(owner), ..pod }
}

fn of_set(ordinal: u32, revision: &str) -> Member {
    let mut pod = enrolled(&format!("op-{ordinal}"));
    pod.labels.insert(label::CONTROLLER_REVISION_HASH.to_owned(), revision.to_owned());
    Member { uid: format!("uid-{ordinal}-{revision}"), ..pod }
}

fn trial(phase: &str, slots: &str) -> String {
    format!(
        "{{promoted: one, trial: {{revision: two, phase: {phase}, step: 1, slots: [{slots}], passed: 0, failed: 0, \
         stepStartedAt: '2026-01-01T00:00:00Z'}}}}"
    )
}

impl Bed {
    fn owned(&self, shard: &str) -> SlotSet {
        self.table.slots_of(shard).collect()
    }

    fn counts(&self, shards: [&str; 4]) -> [usize; 4] {
        shards.map(|shard| self.owned(shard).len())
    }
}

/// A root of this rule, whose operator has three pods of revision `one`.
fn promoted(rule: &str) -> Bed {
    let mut bed = Bed::new(rule);
    bed.rollout = "{promoted: one}".to_owned();
    bed.enrolled = ["a", "b", "c"].map(|name| of_deployment(name, "one")).into();
    bed.settle();
    bed
}

const SHARDS: [&str; 4] = ["r-1-normal", "r-2-normal", "r-3-normal", "r-1-second"];

#[test]
fn a_new_version_owns_its_slice_then_shard_by_shard_all() {
    let mut bed = promoted(DEPLOYMENT);
    assert_eq!(bed.counts(SHARDS), [11, 11, 10, 0]);
    bed.enrolled.push(of_deployment("new", "two"));
    bed.settle();
    assert_eq!(bed.counts(SHARDS), [11, 11, 10, 0], "nothing is decided yet");
    assert_eq!((bed.see(5, "x"), bed.before.policies.len()), (vec!["a".to_owned()], 4));
    bed.rollout = trial("Analysing", "'5'");
    bed.settle();
    assert_eq!((bed.counts(SHARDS), bed.see(5, "x")), ([10, 11, 10, 1], vec!["new".to_owned()]));
    let before = bed.table.clone();
    bed.rollout = trial("RollingBack", "");
    bed.settle();
    assert_eq!((bed.counts(SHARDS), bed.see(5, "x")), ([11, 11, 10, 0], vec!["a".to_owned()]));
    bed.rollout = trial("Analysing", "'5'");
    bed.settle();
    assert_eq!(bed.table.slots, before.slots);
    bed.rollout = trial("Promoting", "");
    let record = bed.settle();
    assert_eq!(bed.counts(SHARDS), [0, 11, 10, 11], "the shard of one pod is taken over");
    assert!(bed.owned("r-1-second").contains(5.try_into().unwrap()));
    assert!(record.waiting.iter().any(|one| one.contains("r-2-second has no ready pod")), "{:?}", record.waiting);
    // The Deployment ends that pod, and makes another new one.
    bed.enrolled.remove(0);
    bed.enrolled.push(of_deployment("newer", "two"));
    bed.settle();
    assert_eq!((bed.counts(SHARDS)[1], bed.owned("r-2-second").len()), (0, 11));
    bed.enrolled.retain(|pod| pod.labels[label::POD_TEMPLATE_HASH] == "two");
    bed.enrolled.push(of_deployment("newest", "two"));
    bed.settle();
    let slots = bed.table.slots.clone();
    bed.rollout = "{promoted: two, second: true}".to_owned();
    let record = bed.settle();
    assert_eq!((bed.table.slots.clone(), record.waiting), (slots, Vec::new()), "promotion moves nothing");
    assert_eq!(bed.owned("r-3-second").len(), 10);
}

#[test]
fn a_shadow_sees_its_slice_owns_nothing_and_makes_dry_runs() {
    let mut bed = promoted(DEPLOYMENT);
    bed.enrolled.push(of_deployment("new", "two"));
    bed.settle();
    let slots = bed.table.slots.clone();
    let shadow = trial("Analysing", "'5'").replace("step: 1,", "step: 1, shadow: true,");
    bed.rollout = shadow.clone();
    bed.settle();
    assert_eq!(bed.table.slots, slots, "nothing moves");
    let is_shadow = |bed: &Bed, name: &str| {
        let told = bed.before.policies.iter().find(|(pod, _)| pod.name == name);
        told.is_some_and(|(_, told)| told.policy.shadow)
    };
    assert_eq!(bed.see(5, "x"), ["a", "new"]);
    assert!(!bed.see(6, "x").contains(&"new".to_owned()));
    assert_eq!(["a", "b", "c", "new"].map(|pod| is_shadow(&bed, pod)), [false, false, false, true]);
    // The real step takes the same slot, and leaves no shadow behind.
    bed.rollout = trial("Analysing", "'5'");
    bed.settle();
    assert_eq!((bed.counts(SHARDS), bed.see(5, "x")), ([10, 11, 10, 1], vec!["new".to_owned()]));
    assert!(!is_shadow(&bed, "new"));
    // What it owned is given back first.
    bed.rollout = shadow;
    let before = bed.see(5, "x");
    bed.settle();
    assert_eq!((before, bed.see(5, "x")), (vec!["new".to_owned()], vec!["a".to_owned(), "new".to_owned()]));
    assert_eq!((bed.counts(SHARDS), is_shadow(&bed, "new")), ([11, 11, 10, 0], true));
    bed.rollout = trial("Analysing", "").replace("step: 1,", "step: 1, shadow: true, namespaces: [shop],");
    bed.settle();
    assert!(bed.see(6, "shop").contains(&"new".to_owned()) && !bed.see(5, "x").contains(&"new".to_owned()));
    bed.rollout = trial("RollingBack", "");
    bed.settle();
    assert_eq!((bed.see(5, "x"), is_shadow(&bed, "new")), (vec!["a".to_owned()], false));
}

#[test]
fn a_pod_is_a_shadow_until_it_owns_and_never_while_it_may_still_write() {
    let mut bed = promoted(&DEPLOYMENT.replace("rollout: {}", "rollout: {steps: [{slots: 1, shadow: true}]}"));
    bed.enrolled.extend(["new", "other"].map(|name| of_deployment(name, "two")));
    let shadow = trial("Analysing", "'5'").replace("step: 1,", "step: 1, shadow: true,");
    bed.rollout = shadow.clone();
    bed.settle();
    assert_eq!(bed.see(5, "x"), ["a", "new"], "of two new pods one shadows");
    let told = |bed: &Bed| {
        let told = bed.before.policies.iter().find(|(pod, _)| pod.name == "new").map(|(_, told)| told.clone());
        told.map(|told| (told.policy.shadow, bed.see(5, "x").contains(&"new".to_owned())))
    };
    // The real step takes the slot away from the old version first.
    bed.rollout = trial("Analysing", "'5'").replace("step: 1,", "step: 2,");
    bed.step();
    assert!(bed.table.revoked.is_some());
    assert_eq!(told(&bed), Some((true, true)), "it goes on as a shadow");
    bed.settle();
    assert_eq!((told(&bed), bed.counts(SHARDS)), (Some((false, true)), [10, 11, 10, 1]));
    // Back to a shadow, as after a promotion of a revision that was held.
    bed.rollout = shadow;
    bed.step();
    assert!(bed.table.revoked.is_some());
    assert_eq!(told(&bed), Some((false, false)), "a write may be under way");
    bed.settle();
    assert_eq!((told(&bed), bed.counts(SHARDS)), (Some((true, true)), [11, 11, 10, 0]));
}

#[test]
fn a_pod_that_a_statefulset_replaces_is_stood_in_for() {
    let mut bed = Bed::new(STATEFUL_SET);
    bed.rollout = "{promoted: one}".to_owned();
    bed.enrolled = (0..3).map(|ordinal| of_set(ordinal, "one")).collect();
    bed.settle();
    assert_eq!(bed.counts(SHARDS), [11, 11, 10, 0]);
    bed.enrolled[2] = of_set(2, "two");
    bed.rollout = trial("Starting", "");
    bed.settle_with(|bed| {
        bed.proves();
        bed.evidence.pods.entry("uid-2-one".to_owned()).or_default().gone = true;
    });
    assert_eq!(bed.counts(SHARDS), [16, 16, 0, 0], "the others stand in");
    bed.rollout = trial("Analysing", "'5', '31'");
    bed.settle();
    let slice = bed.owned("r-3-second");
    assert_eq!((slice.to_string().as_str(), bed.see(5, "x")), ("5,31", vec!["op-2".to_owned()]));
    bed.rollout = trial("RollingBack", "");
    bed.settle();
    assert_eq!(bed.counts(SHARDS), [16, 16, 0, 0], "it keeps nothing, though its shard has no other pod");
    bed.rollout = trial("Promoting", "");
    bed.settle();
    assert_eq!((bed.owned("r-3-second").len(), bed.counts(SHARDS)[2..].to_vec()), (10, vec![0, 0]));
}

#[test]
fn pinned_namespaces_go_to_the_version_on_trial_and_back() {
    let rule = "rollout: {}, fence: Server, targetDeployment: op, canary: {replicas: 1, inNamespaces: [shop]}, \
                auto: {shardingSize: 1, everyShardReplicas: 1}";
    let mut bed = Bed::new(rule);
    bed.rollout = "{promoted: one}".to_owned();
    bed.enrolled = ["a", "b"].map(|name| of_deployment(name, "one")).into();
    bed.settle();
    bed.enrolled.push(of_deployment("new", "two"));
    let owner = |bed: &Bed| bed.table.owner(slot(21), Some("shop")).map(str::to_owned);
    assert_eq!(owner(&bed).as_deref(), Some("r-0-canary"));
    bed.rollout = trial("Analysing", "'5'").replace("phase:", "namespaces: [shop, pay], phase:");
    bed.settle();
    assert_eq!((owner(&bed).as_deref(), bed.see(21, "shop")), (Some("r-0-second"), vec!["new".to_owned()]));
    assert_eq!(bed.table.owner(slot(5), Some("x")), Some("r-0-second"));
    assert_eq!(bed.table.owner(slot(1), Some("pay")), Some("r-0-second"));
    bed.rollout = trial("RollingBack", "");
    bed.settle();
    assert_eq!((owner(&bed).as_deref(), bed.see(21, "shop")), (Some("r-0-canary"), vec!["a".to_owned()]));
    assert_eq!(bed.see(5, "x"), ["b"]);
    assert_eq!(bed.table.owner(slot(1), Some("pay")), Some("r-1-normal"));
}

#[test]
fn shares_by_hand_lose_the_slice_and_get_it_back() {
    let half = |from: u8| (from..from + 16).map(|slot| format!("'{slot}'")).collect::<Vec<_>>().join(", ");
    let rule = format!(
        "rollout: {{}}, fence: Proxy, targetStatefulSet: op, manual: [{{id: 1, hashes: [{}]}}, {{id: 2, hashes: [{}]}}]",
        half(0),
        half(16)
    );
    let mut bed = Bed::new(&rule);
    bed.rollout = "{promoted: one}".to_owned();
    bed.enrolled = (0..3).map(|ordinal| of_set(ordinal, "one")).collect();
    bed.settle();
    bed.enrolled[2] = of_set(2, "two");
    for (phase, slots, counts) in
        [("Analysing", "'5', '20'", [15, 15, 0, 2]), ("Held", "", [16, 16, 0, 0]), ("Promoting", "", [0, 16, 0, 16])]
    {
        bed.rollout = trial(phase, slots);
        bed.settle_by_proxies(&["uid-2-one"]);
        assert_eq!(bed.counts(SHARDS), counts, "{phase}");
    }
}

#[test]
fn an_elastic_root_tries_a_version_and_lets_it_in_pod_by_pod() {
    const PARTS: [&str; 4] = ["r-1-normal", "r-1-second", "r-2-second", "r-3-second"];
    let mut bed = promoted("rollout: {}, fence: Server, targetDeployment: op, auto: {shardingSize: 8}");
    assert_eq!(bed.counts(SHARDS), [11, 11, 10, 0]);
    bed.enrolled.push(of_deployment("new", "two"));
    bed.rollout = trial("Starting", "");
    bed.settle();
    assert_eq!(bed.counts(SHARDS), [11, 11, 10, 0], "nothing is tried yet");
    bed.rollout = trial("Analysing", "'5'");
    let record = bed.settle();
    assert_eq!((bed.owned("r-1-second").to_string().as_str(), record.waiting.len()), ("5", 0));
    assert_eq!(bed.counts(SHARDS)[..3].iter().sum::<usize>(), 31);
    // The others are followed meanwhile, and not the new one.
    bed.enrolled[1].ready = false;
    bed.settle();
    assert_eq!((bed.counts(SHARDS)[1], bed.owned("r-1-second").len()), (0, 1));
    bed.enrolled[1].ready = true;
    bed.settle();
    bed.rollout = trial("RollingBack", "");
    bed.settle();
    assert_eq!((bed.owned("r-1-second").len(), bed.counts(SHARDS)[1] > 0), (0, true));
    bed.rollout = trial("Promoting", "");
    bed.settle();
    assert_eq!(bed.counts(SHARDS), [8, 8, 8, 8], "it gets a pod's part");
    for (gone, comes) in [("c", "newer"), ("b", "newest")] {
        bed.enrolled.retain(|pod| pod.name.name != gone);
        bed.enrolled.push(of_deployment(comes, "two"));
        bed.settle_with(|bed| {
            bed.proves();
            bed.evidence.pods.entry(format!("uid-{gone}")).or_default().gone = true;
        });
    }
    assert_eq!(bed.counts(PARTS), [8, 8, 8, 8]);
    bed.enrolled.remove(0);
    bed.settle_with(|bed| {
        bed.proves();
        bed.evidence.pods.entry("uid-a".to_owned()).or_default().gone = true;
    });
    let slots = bed.table.slots.clone();
    bed.rollout = "{promoted: two, second: true}".to_owned();
    let record = bed.settle();
    assert_eq!((bed.table.slots == slots, record.waiting, bed.counts(PARTS)[0]), (true, Vec::new(), 0));
}

use ctrlmesh_common::slots::Slot;
use serde_json::json;

use super::division::Owner;
use super::samples::{Pods, cluster, live_pods, now, root};
use super::*;
use crate::top::sample::Sample;
use crate::top::traffic::PodTraffic;

const PODS: &Pods<'_> =
    &[("web-1-normal", &[("web-a", "n1", true), ("web-b", "n2", true)]), ("web-2-normal", &[("web-c", "n2", true)])];

fn division(more: serde_json::Value, pods: &Pods<'_>) -> (ShardingConfig, Division) {
    let live = cluster(&root(more), pods);
    let root = live.configs[0].clone();
    let division = Division::of(&root, &live, &live_pods()).unwrap();
    (root, division)
}

fn slots(numbers: impl IntoIterator<Item = i64>) -> SlotSet {
    numbers.into_iter().map(|number| Slot::try_from(number).unwrap()).collect()
}

/// Identifier, hashes and replicas of each shard, as the root has them.
fn manual(root: &ShardingConfig) -> Vec<(i32, usize, Option<i32>)> {
    let rule = root.spec.root.as_ref().unwrap();
    assert_eq!(rule.auto, None);
    rule.manual.iter().map(|one| (one.id, one.hashes.len(), one.replicas)).collect()
}

#[test]
fn a_division_written_by_hand_is_the_same_one() {
    let (root, division) = division(json!({}), PODS);
    let written = division.written(&root);
    assert_eq!(manual(&written), [(1, 16, Some(2)), (2, 16, Some(2))]);
    let again = cluster(&written, PODS);
    let again = Division::of(&again.configs[0], &again, &live_pods()).unwrap();
    assert_eq!(again.shards[0].slots, division.shards[0].slots);
}

#[test]
fn a_slot_goes_to_one_shard_only() {
    let (root, mut division) = division(json!({}), PODS);
    division.give(slots([0, 1, 31]), Owner::Shard(1));
    assert_eq!((division.shards[0].slots.len(), division.shards[1].slots.len()), (14, 18));
    assert_eq!(manual(&division.written(&root)), [(1, 14, Some(2)), (2, 18, Some(2))]);
}

#[test]
fn a_shard_may_be_left_without_slots() {
    let (root, mut division) = division(json!({}), PODS);
    division.give(SlotSet::ALL, Owner::Shard(1));
    let written = division.written(&root);
    let live = cluster(&root, PODS);
    let plan = live.change(&written, &live.configs).unwrap().plan();
    assert_eq!((plan.moves.len(), plan.moves[0].slots.len()), (1, 16), "{plan:?}");
}

#[test]
fn a_namespace_goes_to_a_canary_alone_and_back_with_its_slot() {
    let canary = json!({"canary": {"replicas": 1, "inNamespaces": ["market"]}});
    let (root, mut division) = division(canary, PODS);
    let slot = Slot::try_from(5).unwrap();
    let of = |division: &Division| division.written(&root).spec.root.unwrap().canary.unwrap().in_namespaces;
    division.give_namespace("shop", slot, Owner::Canary);
    assert_eq!(of(&division), ["market", "shop"]);
    division.give_namespace("shop", slot, Owner::Shard(1));
    assert_eq!(of(&division), ["market"]);
    assert!(division.shards[1].slots.contains(slot) && !division.shards[0].slots.contains(slot));
}

#[test]
fn a_drained_pod_leaves_its_shard_to_another_pod_of_it() {
    let (_, mut division) = division(json!({}), PODS);
    let before = division.shards[0].slots;
    let standbys = drain::drain(&mut division, "web", &|pod| pod.name == "web-a", &Weights::default()).unwrap();
    assert_eq!((standbys.len(), standbys[0].others.as_slice()), (1, &["web-b".to_owned()][..]));
    assert_eq!(division.shards[0].slots, before);
}

#[test]
fn the_last_pod_of_a_shard_leaves_all_to_other_shards() {
    let (_, mut division) = division(json!({}), PODS);
    let standbys = drain::drain(&mut division, "web", &|pod| pod.node.as_deref() == Some("n2"), &Weights::default());
    assert_eq!(standbys.unwrap()[0].pod, "web-b", "web-a takes over");
    assert_eq!((division.shards[0].slots, division.shards[1].slots), (SlotSet::ALL, SlotSet::EMPTY));
}

#[test]
fn what_nobody_can_take_over_is_not_drained() {
    let (_, mut all) = division(json!({}), PODS);
    let refused = drain::drain(&mut all, "web", &|_| true, &Weights::default());
    assert!(matches!(refused, Err(SteerError::NoOtherPod { .. })), "{refused:?}");
    let starting: &Pods<'_> =
        &[("web-1-normal", &[("web-a", "n1", true)]), ("web-2-normal", &[("web-c", "n2", false)])];
    let (_, mut starting) = division(json!({}), starting);
    let refused = drain::drain(&mut starting, "web", &|pod| pod.name == "web-a", &Weights::default());
    assert!(matches!(refused, Err(SteerError::NoOtherPod { .. })), "the other has no policy: {refused:?}");
    let canary = json!({"canary": {"replicas": 1, "inNamespaces": ["market"]}});
    let (_, mut canary) = division(canary, &[("web-0-canary", &[("web-x", "n1", true)])]);
    let refused = drain::drain(&mut canary, "web", &|_| true, &Weights::default());
    assert!(matches!(refused, Err(SteerError::OfCanary { .. })), "{refused:?}");
}

#[test]
fn a_shard_without_a_pod_gives_all_away() {
    let (_, mut division) = division(json!({}), &PODS[..1]);
    level(&mut division, "web", &Weights::default()).unwrap();
    assert_eq!((division.shards[0].slots, division.shards[1].slots), (SlotSet::ALL, SlotSet::EMPTY));
}

#[test]
fn a_root_that_tries_a_version_is_not_steered() {
    let mut root = root(json!({"rollout": {}}));
    let began = "2026-01-01T00:00:00Z";
    let live = cluster(&root, PODS);
    let trial = json!({"revision": "new", "phase": "Analysing", "step": 1, "stepStartedAt": began, "passed": 0,
        "failed": 0, "message": "why"});
    root.status = serde_json::from_value(json!({"rollout": {"promoted": "old", "trial": trial}})).unwrap();
    let refused = Division::of(&root, &live, &live_pods());
    assert!(matches!(refused, Err(SteerError::Trial { .. })), "{refused:?}");
}

#[test]
fn what_waits_for_a_pod_leaves_a_drained_shard_too() {
    // The third shard has no pod. So the first two own all meanwhile.
    let auto = json!({"auto": {"shardingSize": 3, "everyShardReplicas": 1}});
    let two: &Pods<'_> = &[("web-1-normal", &[("web-a", "n1", true)]), ("web-2-normal", &[("web-c", "n2", true)])];
    let mut live = cluster(&root(auto), two);
    let before = cluster(&root(json!({})), two).configs[0].status.clone();
    live.configs[0].status = before;
    let root = live.configs[0].clone();
    let mut division = Division::of(&root, &live, &live_pods()).unwrap();
    assert!(!division.shards[2].slots.is_empty() && division.shards[0].held.len() == 16, "{division:?}");
    let waiting = division.shards[2].slots.intersection(division.shards[0].held);
    drain::drain(&mut division, "web", &|pod| pod.name == "web-a", &Weights::default()).unwrap();
    assert!(!waiting.is_empty() && waiting.intersection(division.shards[2].slots).is_empty());
    assert_eq!((division.shards[0].slots, waiting.intersection(division.shards[1].slots)), (SlotSet::EMPTY, waiting));
}

#[test]
fn a_pod_that_leaves_takes_nothing_over() {
    let live = cluster(&root(json!({})), PODS);
    let root = live.configs[0].clone();
    let leaving = LivePods::at(now(), &[("ops", "web-b"), ("other", "web-a")]);
    let division = Division::of(&root, &live, &leaving).unwrap();
    let is_live: Vec<_> = division.shards[0].pods.iter().map(|pod| pod.is_live).collect();
    assert_eq!(is_live, [true, false]);
    let later = LivePods::at(now() + jiff::SignedDuration::from_mins(10), &[]);
    let away = Division::of(&root, &live, &later).unwrap();
    assert!(away.shards.iter().flat_map(|shard| &shard.pods).all(|pod| !pod.is_live), "{away:?}");
}

fn traffic(pod: &str, requests: f64) -> PodTraffic {
    PodTraffic::of_requests("ops", pod, requests)
}

#[test]
fn requests_without_a_namespace_are_spread_over_the_shard() {
    let (_, division) = division(json!({}), PODS);
    let hash = ctrlmesh_common::slots::NamespaceHash::default();
    let sample = Sample { pods: vec![traffic("web-a", 32.0), traffic("foreign", 99.0)], not_read: Vec::new() };
    let slots = load::by_slot(&sample, &division, hash, "ops").unwrap();
    assert_eq!((slots.len(), slots.values().all(|count| *count == 1000)), (16, true), "{slots:?}");
}

#[test]
fn nothing_is_evened_out_by_half_a_measurement() {
    let (_, division) = division(json!({}), PODS);
    let hash = ctrlmesh_common::slots::NamespaceHash::default();
    let unread = Sample { pods: vec![traffic("web-a", 32.0)], not_read: vec!["web-c: gone".to_owned()] };
    assert!(matches!(load::by_slot(&unread, &division, hash, "ops"), Err(SteerError::NotRead { .. })));
    let idle = Sample { pods: vec![traffic("web-a", 0.0)], not_read: Vec::new() };
    assert!(matches!(load::by_slot(&idle, &division, hash, "ops"), Err(SteerError::NoRequests)));
}

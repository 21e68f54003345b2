use std::collections::BTreeSet;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::ownership::UNSHARDED;
use ctrlmesh_common::selector::Labels;
use ctrlmesh_manager::rules::shard::Labelling;
use serde_json::{Value, json};

use super::*;
use crate::top::sample::Sample;
use crate::top::traffic::PodTraffic;

fn root(shards: u32, more: Value) -> ShardingConfig {
    let websites = json!([{"relateResources": [{"apiGroups": ["web.example.com"], "resources": ["websites"]}]}]);
    let mut rule = json!({"prefix": "web", "targetStatefulSet": "web", "resourceSelector": websites,
        "auto": {"shardingSize": shards, "everyShardReplicas": 1}});
    more.as_object().unwrap().iter().for_each(|(key, value)| rule[key] = value.clone());
    let kind = "ShardingConfig";
    serde_json::from_value(json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": kind,
        "metadata": {"name": "web", "namespace": "ops", "uid": "u"}, "spec": {"root": rule}}))
    .unwrap()
}

/// The root with the table that it comes to, and its shards, each with a pod.
fn applied(shards: u32) -> Vec<ShardingConfig> {
    let mut root = root(shards, json!({}));
    let divided = shard::divide(&root, &Labelling::default(), &BTreeSet::new(), &[]).unwrap().unwrap();
    let ownership = Some(shard::table(&divided, &BTreeMap::new()));
    root.status = Some(ctrlmesh_common::api::ShardingConfigStatus { ownership, ..Default::default() });
    let made = divided.into_iter().enumerate().map(|(at, shard)| {
        let status = json!({"pods": [{"name": format!("web-{at}")}]});
        ShardingConfig { status: serde_json::from_value(status).unwrap(), ..shard.config }
    });
    let made: Vec<_> = made.collect();
    [root].into_iter().chain(made).collect()
}

/// What comes of it, with two websites in each of 20 namespaces.
fn planned(wanted: &ShardingConfig, live: &[ShardingConfig]) -> RootPlan {
    let mut change = Change::of(wanted, live, &BTreeSet::new(), &Labelling::default()).unwrap();
    let labels = Labels::from([("team".to_owned(), "a".to_owned())]);
    for (group, plural) in [("web.example.com", "websites"), ("", "configmaps")] {
        let Some(mut selected) = change.select(group, plural) else { continue };
        for namespace in (0..20).map(|at| format!("shop-{at}")) {
            for name in ["one", "two"] {
                let object = Counted { namespace: Some(namespace.as_str()), name, labels: &labels };
                change.count(&mut selected, object);
            }
        }
        change.add(selected);
    }
    change.plan()
}

#[test]
fn the_same_root_moves_nothing() {
    let plan = planned(&root(2, json!({})), &applied(2));
    assert!(!plan.moves_anything() && !plan.is_new && plan.objects() == 40, "{plan:?}");
    assert!(plan.shards.iter().all(|shard| shard.before == shard.after), "{plan:?}");
    assert_eq!((plan.imbalance_before, plan.changed_pods.len()), (plan.imbalance_after, 0));
}

#[test]
fn another_shard_takes_an_even_part_of_each() {
    let plan = planned(&root(3, json!({"onLoss": "Restart"})), &applied(2));
    let sizes: Vec<_> = plan.shards.iter().map(|one| (one.before.slots.len(), one.after.slots.len())).collect();
    assert_eq!(sizes, [(16, 11), (16, 11), (0, 10)], "{plan:?}");
    let to: BTreeSet<_> = plan.moves.iter().map(|one| one.to.as_deref()).collect();
    assert_eq!(to, [Some("web-3-normal")].into());
    let moved: u64 = plan.moves.iter().map(|one| one.objects).sum();
    assert_eq!((moved, plan.objects()), (plan.shards[2].after.objects, 40));
    assert!(moved > 0 && plan.moves.iter().map(|one| one.slots.len()).sum::<usize>() == 10);
    assert_eq!((plan.restarted_pods, plan.without_pods), (plan.changed_pods, vec!["web-3-normal".to_owned()]));
}

#[test]
fn a_pinned_namespace_moves_by_name() {
    let canary = json!({"canary": {"replicas": 1, "inNamespaces": ["shop-3"]}});
    let plan = planned(&root(2, canary), &applied(2));
    let pinned: Vec<_> = plan.moves.iter().filter(|one| !one.namespaces.is_empty()).collect();
    assert_eq!((pinned.len(), pinned[0].objects, pinned[0].to.as_deref()), (1, 2, Some("web-0-canary")), "{plan:?}");
    assert_eq!(pinned[0].slots, []);
}

#[test]
fn shards_without_slots_of_an_elastic_root_get_none() {
    let more = json!({"auto": {"shardingSize": 8}});
    let plan = planned(&root(2, more), &applied(2));
    assert!(plan.is_elastic && !plan.moves_anything(), "{plan:?}");
    let canary = json!({"auto": {"shardingSize": 8}, "canary": {"replicas": 1, "inNamespaces": ["shop-3"]}});
    let plan = planned(&root(2, canary), &[]);
    assert_eq!(plan.without_pods, ["web-0-canary"], "others have what a normal shard has no pod for");
}

#[test]
fn a_new_root_takes_all_and_one_that_is_off_takes_nothing() {
    let plan = planned(&root(2, json!({})), &[]);
    assert!(plan.is_new && plan.moves.iter().all(|one| one.from.is_none()), "{plan:?}");
    assert_eq!(plan.moves.iter().map(|one| one.objects).sum::<u64>(), 40);
    let off = json!({"disable": true, "resourceSelector": [], "onLoss": "Restart"});
    let plan = planned(&root(3, off), &applied(2));
    assert!(plan.is_off && !plan.moves_anything() && plan.restarted_pods.is_empty(), "{plan:?}");
}

#[test]
fn what_is_selected_no_more_is_nobodys() {
    let team = |team| {
        json!({"resourceSelector": [{"selector": {"matchLabels": {"team": team}},
        "relateResources": [{"apiGroups": ["web.example.com"], "resources": ["websites"]}]}]})
    };
    let same = planned(&root(2, team("a")), &applied(2));
    assert_eq!(
        (same.moves.len(), same.selection),
        (0, vec!["websites.web.example.com by another selector".to_owned()])
    );
    let plan = planned(&root(2, team("b")), &applied(2));
    assert_eq!((plan.objects(), plan.moves.iter().map(|one| one.objects).sum::<u64>()), (0, 40));
    assert!(plan.moves.iter().all(|one| one.to.is_none() && one.slots.is_empty()), "{plan:?}");
}

#[test]
fn what_is_on_its_way_counts_for_its_former_owner() {
    let mut live = applied(2);
    let table = live[0].status.as_mut().unwrap().ownership.as_mut().unwrap();
    let slot = *table.slots.keys().next().unwrap();
    let owner = table.slots.remove(&slot).unwrap();
    table.revoked = serde_json::from_value(json!({"epoch": 7, "slots": {slot.to_string(): owner}})).unwrap();
    assert!(!planned(&root(2, json!({})), &live).moves_anything());
}

#[test]
fn pods_restart_where_they_see_less() {
    let related = |resources: &[(&str, &str)]| {
        let related = |(group, resource): &(&str, &str)| json!({"apiGroups": [group], "resources": [resource]});
        let all: Vec<Value> = resources.iter().map(related).collect();
        json!({"onLoss": "Restart", "resourceSelector": [{"relateResources": all}]})
    };
    let (sites, maps) = (("web.example.com", "websites"), ("", "configmaps"));
    let restarted = |wanted: Value| {
        let plan = planned(&root(2, wanted), &applied(2));
        (plan.selection, plan.restarted_pods.len())
    };
    assert_eq!(restarted(related(&[sites])), (vec![], 0));
    assert_eq!(restarted(related(&[sites, maps])), (vec!["configmaps anew".to_owned()], 2));
    let none = restarted(related(&[("", "secrets")]));
    assert_eq!(none, (vec!["websites.web.example.com no more".to_owned()], 0), "every pod sees all of them");
}

#[test]
fn what_waits_for_a_pod_already_is_no_move() {
    let mut live = applied(2);
    let table = live[0].status.as_mut().unwrap().ownership.as_mut().unwrap();
    table.slots.values_mut().for_each(|owner| UNSHARDED.clone_into(owner));
    let plan = planned(&root(2, json!({})), &live);
    assert!(!plan.moves_anything() && plan.pending.len() == 32, "{plan:?}");
}

#[test]
fn requests_go_with_what_they_are_for() {
    let live = applied(2);
    let mut change = Change::of(&root(1, json!({})), &live, &BTreeSet::new(), &Labelling::default()).unwrap();
    let requests = |pod: &str, count| PodTraffic::of_requests("ops", pod, count);
    let sample = |pods| Sample { pods, not_read: Vec::new() };
    // Each shard has 16 of 32 slots, and the second one all the load.
    let stranger = PodTraffic::of_requests("else", "web-0", 9.0);
    change.measure(&sample(vec![requests("web-1", 8.0), requests("nobody", 9.0), stranger])).unwrap();
    let plan = change.plan();
    let of = |owned: &Owned| owned.requests_per_second.unwrap();
    let before: Vec<f64> = plan.shards.iter().map(|shard| of(&shard.before)).collect();
    let after: Vec<f64> = plan.shards.iter().map(|shard| of(&shard.after)).collect();
    assert_eq!((before, after), (vec![0.0, 4.0], vec![4.0, 0.0]));
    assert_eq!((plan.load_imbalance_before, plan.load_imbalance_after), (Some(2.0), Some(1.0)));

    let idle = change.measure(&sample(vec![requests("web-1", 0.0)])).unwrap_err();
    assert_eq!(idle, "requests: no pod of root ops/web has asked for anything");
    let mut new = Change::of(&root(1, json!({})), &[], &BTreeSet::new(), &Labelling::default()).unwrap();
    let why = new.measure(&sample(vec![requests("web-1", 8.0)])).unwrap_err();
    assert_eq!(why, "requests: root ops/web is new, and nobody works for it yet");
}

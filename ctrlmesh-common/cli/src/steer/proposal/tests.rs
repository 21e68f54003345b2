use ctrlmesh_common::slots::{Slot, SlotSet};

use super::super::samples::{plan, root};
use super::*;

/// With slot 31 at the second shard alone.
fn wanted(live: &ShardingConfig) -> ShardingConfig {
    let mut wanted = live.clone();
    let rule = wanted.spec.root.as_mut().unwrap();
    let hashes = |slots: SlotSet| slots.iter().map(|slot| slot.to_string()).collect::<Vec<_>>();
    let last: SlotSet = [Slot::try_from(31).unwrap()].into_iter().collect();
    let manual =
        json!([{"id": 1, "hashes": hashes(last.complement()), "replicas": 2}, {"id": 2, "hashes": hashes(last)}]);
    rule.auto = None;
    rule.manual = serde_json::from_value(manual).unwrap();
    wanted
}

#[test]
fn a_patch_has_only_what_changes() {
    let live = root(json!({}));
    let proposal = Proposal::of(&live, &wanted(&live), plan(&live, &wanted(&live)));
    let expected_end = r#"    - {"hashes":["31"],"id":2}"#;
    let text = proposal.yaml("");
    assert!(text.starts_with("spec:\n  root:\n    auto: null\n    manual:\n    - {"), "{text}");
    assert!(text.trim_end().ends_with(expected_end), "{text}");
    assert!(proposal.patch.unwrap().pointer("/spec/root/canary").is_none());
}

#[test]
fn a_canary_is_written_with_both_its_lists() {
    let live = root(json!({"canary": {"replicas": 1, "inNamespaces": ["shop"]}}));
    let mut wanted = wanted(&live);
    wanted.spec.root.as_mut().unwrap().canary.as_mut().unwrap().in_namespaces = vec!["market".to_owned()];
    let patch = Proposal::of(&live, &wanted, plan(&live, &wanted)).patch.unwrap();
    let expected = json!({"inNamespaces": ["market"], "inShardHash": []});
    assert_eq!(patch.pointer("/spec/root/canary"), Some(&expected));
}

#[test]
fn nothing_is_written_where_nothing_moves() {
    let live = root(json!({}));
    let proposal = Proposal::of(&live, &live, plan(&live, &live));
    assert_eq!((proposal.patch.clone(), proposal.yaml("")), (None, String::new()));
}

#[test]
fn other_writers_of_the_division_are_named() {
    let mut live = root(json!({}));
    let entry = |manager: &str, field: &str| json!({"manager": manager, "operation": "Update", "fieldsV1": {"f:spec": {"f:root": {field: {}}}}});
    let entries = json!([entry("helm", "f:auto"), entry("other", "f:fence"), entry(FIELD_MANAGER, "f:manual")]);
    live.metadata.managed_fields = serde_json::from_value(entries).unwrap();
    let proposal = Proposal::of(&live, &wanted(&live), plan(&live, &wanted(&live)));
    assert_eq!(proposal.other_writers, ["helm"]);
}

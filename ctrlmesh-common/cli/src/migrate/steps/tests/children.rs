//! How children and copies are made.

use super::*;

#[test]
fn children_are_replaced_by_ones_that_the_root_owns() {
    let planned = plan(Step::Adopt, &snapshot());
    assert!(planned.problems.is_empty(), "{:?}", planned.problems);
    assert_eq!(
        said(&planned),
        [
            "delete ShardingConfig ops/op-0-canary",
            "delete ShardingConfig ops/op-1-normal",
            "create ShardingConfig ops/op-0-canary",
            "create ShardingConfig ops/op-1-normal",
        ]
    );
    let Action::Create(made) = &planned.changes[3].change.action else { panic!("{planned:?}") };
    assert_eq!(made["metadata"]["ownerReferences"][0]["uid"], "uid-op-root");
    let limits = made["spec"]["limits"].to_string();
    assert!(limits.contains("ctrlmesh.kusionstack.io/shard-hash"), "the labels of the predecessor: {limits}");
}

#[test]
fn what_is_only_called_like_a_child_is_not_replaced() {
    for labels in [None, Some([(label::AUTO_SHARDING_ROOT.to_owned(), "another".to_owned())].into())] {
        let mut snapshot = snapshot();
        snapshot.rules[2].metadata.labels = labels;
        let planned = plan(Step::Adopt, &snapshot);
        assert!(!said(&planned).contains(&"delete ShardingConfig ops/op-1-normal".to_owned()), "{planned:?}");
        let [problem] = &planned.problems[..] else { panic!("{planned:?}") };
        assert!(problem.contains("ops/op-1-normal") && problem.contains("auto-sharding-root=op-root"), "{problem}");
        assert_eq!(plan(Step::Guard, &snapshot).problems, planned.problems, "before anything is changed");
    }
}

#[test]
fn an_adoption_that_was_cut_goes_on() {
    let mut snapshot = snapshot();
    let all = plan(Step::Adopt, &snapshot);
    // The first child was replaced; the second one was deleted, and not made again.
    let Action::Create(made) = &all.changes[2].change.action else { panic!("{all:?}") };
    snapshot.rules.remove(2);
    snapshot.rules[1] = object(made.clone());
    assert_eq!(said(&plan(Step::Adopt, &snapshot)), ["create ShardingConfig ops/op-1-normal"]);
}

#[test]
fn a_root_that_cannot_be_divided_is_named() {
    let mut snapshot = snapshot();
    snapshot.rules[0].data["spec"]["root"]["auto"]["shardingSize"] = json!(40);
    let planned = plan(Step::Adopt, &snapshot);
    assert!(planned.problems[0].contains("ops/op-root") && planned.changes.is_empty(), "{planned:?}");
    assert_eq!(plan(Step::Guard, &snapshot).problems, planned.problems, "before anything is changed");
}

#[test]
fn a_disabled_root_keeps_its_children() {
    let mut snapshot = snapshot();
    snapshot.rules[0].data["spec"]["root"]["disable"] = json!(true);
    let planned = plan(Step::Adopt, &snapshot);
    assert!(planned.changes.is_empty() && planned.notes[0].contains("disabled"), "{planned:?}");
}

#[test]
fn kridges_roots_are_copied_and_their_children_are_not() {
    let mut snapshot = snapshot();
    let kridge = |object: DynamicObject| {
        let text = serde_json::to_string(&object).unwrap().replace("ctrlmesh.kusionstack", "kridge.kusionstack");
        serde_json::from_str(&text).unwrap()
    };
    snapshot.kridge = snapshot.rules.drain(..).map(kridge).collect();
    let planned = plan(Step::Convert, &snapshot);
    assert!(planned.problems.is_empty(), "{:?}", planned.problems);
    let mut made = said(&planned);
    made.sort();
    assert_eq!(
        made,
        ["create CircuitBreaker ops/slow", "create ShardingConfig ops/op-by-hand", "create ShardingConfig ops/op-root"]
    );
}

#[test]
fn a_copy_that_would_be_refused_is_named_first() {
    let mut snapshot = snapshot();
    let mut root = root();
    root.data["spec"]["root"]["auto"]["shardingSize"] = json!(40);
    let text = serde_json::to_string(&root).unwrap().replace("ctrlmesh.kusionstack", "kridge.kusionstack");
    (snapshot.rules, snapshot.kridge) = (Vec::new(), vec![serde_json::from_str(&text).unwrap()]);
    let planned = plan(Step::Guard, &snapshot);
    assert!(planned.problems[0].contains("ops/op-root") && planned.problems[0].contains("shardingSize"), "{planned:?}");
}

use super::*;
use crate::plan::change::Owned;

/// A root of which half goes to another shard.
fn planned() -> RootPlan {
    let slots = |from: u8, to: u8| (from..to).map(|slot| Slot::try_from(i64::from(slot)).unwrap()).collect();
    let owned = |from, to, objects| Owned { slots: slots(from, to), objects, ..Owned::default() };
    let shard = |name: &str, before, after| ShardPlan { name: name.to_owned(), before, after };
    let text = str::to_owned;
    RootPlan {
        namespace: text("ops"),
        name: text("web"),
        workload: text("Deployment web"),
        is_new: false,
        is_off: false,
        is_elastic: false,
        shards: vec![
            shard("web-1-normal", owned(0, 32, 90), owned(0, 16, 50)),
            shard("web-2-normal", Owned::default(), owned(16, 32, 40)),
        ],
        moves: vec![Move {
            from: Some(text("web-1-normal")),
            to: Some(text("web-2-normal")),
            slots: slots(16, 32),
            namespaces: Vec::new(),
            objects: 40,
        }],
        imbalance_before: Some(1.0),
        imbalance_after: Some(1.111),
        load_imbalance_before: None,
        load_imbalance_after: None,
        restarted_pods: Vec::new(),
        changed_pods: vec![text("web-0")],
        expected_seconds: Some(0.5),
        late_pods: Vec::new(),
        without_pods: vec![text("web-2-normal")],
        selection: vec![text("pods anew")],
        pending: slots(3, 5),
    }
}

#[test]
fn a_plan_is_one_screen() {
    let printed = screen(&Plan { roots: vec![planned()], not_counted: vec!["pods: forbidden".to_owned()] });
    let expected = "\
Root:      ops/web, Deployment web
State:     it is there, and something moves
Objects:   90
Imbalance: 1.00 -> 1.11: the most objects of a shard, to the mean
Selects:   pods anew
Restarts:  no pod
Reads:     three for each open watch of 1 pod(s); nothing is listed anew
Time:      about 0.5 s; up to 22 s where a proxy does not answer

SHARD          SLOTS          NAMESPACES   OBJECTS
web-1-normal   0-31 -> 0-15   -            90 -> 50
web-2-normal   - -> 16-31     -            0 -> 40

Moves:
  FROM           TO             SLOTS   NAMESPACES   OBJECTS
  web-1-normal   web-2-normal   16-31   -            40

Slots 3-4 are not with their shard yet, with or without this.

Without a pod: web-2-normal. With a fence, what they gain stays with its owner until one serves.

Not counted:
  pods: forbidden
";
    assert_eq!(printed, expected);
}

#[test]
fn a_plan_with_load_has_a_column_for_it() {
    let mut plan = planned();
    (plan.load_imbalance_before, plan.load_imbalance_after) = (Some(2.0), Some(1.25));
    for (shard, [before, after]) in plan.shards.iter_mut().zip([[8.0, 3.04], [0.0, 5.0]]) {
        (shard.before.requests_per_second, shard.after.requests_per_second) = (Some(before), Some(after));
    }
    let printed = root(&plan);
    assert!(printed.contains("Load:      2.00 -> 1.25: the most requests of a shard, to the mean\n"), "{printed}");
    assert!(printed.contains("OBJECTS    REQUESTS/S\n"), "{printed}");
    assert!(printed.contains("90 -> 50   8.0 -> 3.0\n") && printed.contains("0 -> 40    0.0 -> 5.0\n"), "{printed}");
}

#[test]
fn a_plan_says_that_shares_follow_the_pods() {
    let printed = root(&RootPlan { is_elastic: true, ..planned() });
    assert!(printed.contains("\nThe root is elastic. Of what its normal shards own here,"), "{printed}");
}

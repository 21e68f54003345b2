//! Shares that follow the pods.

use super::*;

const ELASTIC: &str = "fence: Server, targetStatefulSet: op, auto: {shardingSize: 4}";

const D: &str = "r-3-normal";

/// Three pods, with a third each.
fn settled() -> Bed {
    let mut bed = Bed::new(ELASTIC);
    bed.enrolled = vec![enrolled("op-0"), enrolled("op-1"), enrolled("op-2")];
    let record = bed.settle();
    assert!(bed.owners() == [A, B, D].into() && record.waiting.is_empty() && record.unserved.is_empty(), "{record:?}");
    bed
}

#[test]
fn what_a_pod_had_that_is_not_ready_goes_to_others() {
    let mut bed = settled();
    let before = bed.table.slots.clone();
    bed.enrolled[1].ready = false;
    let revoked = bed.step();
    assert!(revoked.moves && !revoked.waiting.is_empty(), "{revoked:?}");
    let taken = bed.table.revoked.as_ref().unwrap().slots.clone();
    assert!(taken.len() == 11 && taken.values().all(|owner| owner == B), "only its own: {taken:?}");
    let record = bed.settle();
    assert!(bed.owners() == [A, D].into() && record.waiting.is_empty(), "{record:?}");
    // It is ready again, but held back.
    bed.enrolled[1].ready = true;
    bed.held_back.insert(bed.enrolled[1].uid.clone());
    bed.settle();
    assert_eq!(bed.owners(), [A, D].into());
    bed.held_back.clear();
    bed.settle();
    let kept = before.iter().filter(|(slot, owner)| bed.table.slots.get(slot) == Some(owner)).count();
    assert!(bed.owners() == [A, B, D].into() && kept >= 21, "{kept} of {before:?} are where they were");
}

#[test]
fn a_pod_that_is_back_before_others_have_its_slots_gets_none() {
    let mut bed = settled();
    bed.enrolled[1].ready = false;
    bed.step();
    assert!(bed.table.revoked.is_some());
    bed.enrolled[1].ready = true;
    bed.held_back.insert(bed.enrolled[1].uid.clone());
    bed.settle();
    assert_eq!(bed.owners(), [A, D].into());
}

#[test]
fn a_pod_that_is_asked_to_end_owns_nothing_from_then_on() {
    let mut bed = settled();
    bed.enrolled[2].terminating = true;
    bed.step();
    let taken = bed.table.revoked.as_ref().unwrap().slots.clone();
    assert!(taken.len() == 10 && taken.values().all(|owner| owner == D), "{taken:?}");
}

#[test]
fn whoever_does_not_lead_plans_what_is_written() {
    let changes: [fn(&mut Bed); 2] = [
        |bed| bed.enrolled[1].ready = false,
        |bed| {
            bed.enrolled.push(enrolled("op-3"));
            bed.held_back.insert("uid-op-0".to_owned());
        },
    ];
    for change in changes {
        let mut bed = settled();
        change(&mut bed);
        let leading = bed.compiled().operators.remove(ROOT).unwrap();
        assert!(leading.moves && !leading.written, "{leading:?}");
        bed.leads = false;
        let found = bed.compiled();
        let following = &found.operators[ROOT];
        assert!(following.written && !following.moves && following.ownership == Some(bed.table.clone()));
        for (pod, policy) in &bed.before.policies {
            assert_eq!(found.policies[pod].digest(), policy.digest(), "{pod}");
        }
    }
}

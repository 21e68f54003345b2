use ctrlmesh_common::slots::SlotSet;
use proptest::prelude::*;

use super::*;

/// Shards by number of pods; the first one is the canary.
fn shares(replicas: &[usize]) -> Vec<Share> {
    let share = |(at, replicas): (usize, &usize)| Share {
        name: format!("s{at}"),
        canary: at == 0,
        second: false,
        replicas: *replicas,
        slots: SlotSet::EMPTY,
        namespaces: [].into(),
    };
    replicas.iter().enumerate().map(share).collect()
}

fn record(pod: &str, revision: &str, shard: Option<&str>) -> PodRecord {
    PodRecord {
        pod: pod.to_owned(),
        revision: revision.to_owned(),
        shard: shard.map(str::to_owned),
        terminating: false,
        ready: false,
        stands_by: false,
        created_at: None,
    }
}

#[test]
fn a_standby_moves_and_never_the_only_ready_pod() {
    let shares = shares(&[1, 1]);
    let pod = |pod: &str, ready: bool, created_at: i64| PodRecord {
        ready,
        created_at: Some(created_at),
        ..record(pod, "r", Some("s0"))
    };
    let moved = |records: &[PodRecord]| -> Vec<String> {
        let assignment = assign(&shares, records, Moves::All);
        assignment.into_iter().filter(|(_, shard)| shard == "s1").map(|(pod, _)| pod).collect()
    };
    assert_eq!(moved(&[pod("a", true, 5), pod("b", true, 9), pod("c", true, 7)]), ["b"], "the youngest");
    assert_eq!(moved(&[pod("a", false, 5), pod("b", true, 9)]), ["a"], "b alone works");
    assert_eq!(moved(&[pod("a", true, 5), pod("b", false, 9)]), ["b"]);
    let mut leaves = pod("c", true, 1);
    leaves.terminating = true;
    assert_eq!(moved(&[pod("a", true, 5), pod("b", false, 3), leaves]), ["b"]);
}

#[test]
fn with_too_few_pods_only_a_ready_one_moves() {
    let shares = shares(&[2, 2]);
    let pod = |pod: &str, ready: bool| PodRecord { ready, ..record(pod, "r", Some("s0")) };
    let moved = |records: &[PodRecord]| {
        let after = assigned(&shares, records, Moves::Ready);
        after
            .into_iter()
            .filter(|record| record.shard.as_deref() == Some("s1"))
            .map(|record| record.pod)
            .collect::<Vec<_>>()
    };
    assert_eq!(moved(&[pod("a", false), pod("b", false)]), Vec::<String>::new(), "two more are on their way");
    assert_eq!(moved(&[pod("a", true), pod("b", false)]), Vec::<String>::new(), "the shard's only ready one");
    assert_eq!(moved(&[pod("a", true), pod("b", true), pod("c", false)]), ["b"]);
}

/// Pods that stay, by shard.
fn counts(shares: &[Share], records: &[PodRecord]) -> Vec<usize> {
    let of = |share: &Share| {
        let is = |record: &&PodRecord| !record.terminating && record.shard.as_deref() == Some(&share.name);
        records.iter().filter(is).count()
    };
    shares.iter().map(of).collect()
}

fn assigned(shares: &[Share], records: &[PodRecord], moves: Moves) -> Vec<PodRecord> {
    let assignment = assign(shares, records, moves);
    let with = |record: &PodRecord| PodRecord { shard: assignment.get(&record.pod).cloned(), ..record.clone() };
    records.iter().map(with).collect()
}

#[test]
fn ordinals_fill_the_shards_in_order_and_the_rest_stands_by() {
    let shares = shares(&[2, 1, 2]);
    let names: Vec<&str> = (0..9).map(|ordinal| by_ordinal(&shares, ordinal).unwrap().name.as_str()).collect();
    assert_eq!(names, ["s0", "s0", "s1", "s2", "s2", "s1", "s2", "s1", "s2"]);
    assert_eq!(by_ordinal(&[], 0), None);
}

#[test]
fn every_shard_has_a_pod_before_any_has_two() {
    let shares = shares(&[1, 3, 3]);
    let mut records = Vec::new();
    for (pod, total) in ["a", "b", "c", "d", "e"].into_iter().zip(1..) {
        let shard = choose(&shares, &records, "r").unwrap().name.clone();
        records.push(record(pod, "r", Some(&shard)));
        let served = counts(&shares, &records).into_iter().filter(|pods| *pods > 0).count();
        assert_eq!(served, total.min(3));
    }
    assert_eq!(counts(&shares, &records), [1, 2, 2]);
}

#[test]
fn a_replaced_pod_is_replaced_in_its_shard() {
    let shares = shares(&[1, 1, 2]);
    let mut records: Vec<PodRecord> = ["s0", "s1", "s2", "s2"]
        .iter()
        .zip(["a", "b", "c", "d"])
        .map(|(shard, pod)| record(pod, "r", Some(shard)))
        .collect();
    for at in 0..records.len() {
        let mut others = records.clone();
        others[at].terminating = true;
        assert_eq!(choose(&shares, &others, "r").map(|share| &share.name), records[at].shard.as_ref());
        others.remove(at);
        assert_eq!(choose(&shares, &others, "r").map(|share| &share.name), records[at].shard.as_ref());
    }
    records.push(record("e", "r", None));
    assert_eq!(choose(&shares, &records, "r").unwrap().name, "s1", "standby, but not of the canary");
}

#[test]
fn a_new_revision_is_divided_anew_beside_the_old() {
    let shares = shares(&[1, 1, 1]);
    let old = [record("a", "old", Some("s0")), record("b", "old", Some("s2"))];
    assert_eq!(choose(&shares, &old, "new").unwrap().name, "s1", "who has nobody at all");
}

#[test]
fn pods_move_only_to_shards_that_lack_them_once_all_is_settled() {
    let shares = shares(&[1, 1, 1]);
    let records = [record("a", "r", Some("s1")), record("b", "r", Some("s1")), record("c", "r", Some("s0"))];
    assert_eq!(assigned(&shares, &records, Moves::None), records);
    assert_eq!(counts(&shares, &assigned(&shares, &records, Moves::All)), [1, 1, 1]);
    let gone = [record("a", "r", Some("s7")), record("b", "r", Some("s1"))];
    assert_eq!(counts(&shares, &assigned(&shares, &gone, Moves::None)), [1, 1, 0], "its shard is no more");
}

#[test]
fn shards_without_a_pod_are_reported() {
    let shares = shares(&[1, 1, 1]);
    let assignment = assign(&shares, &[record("a", "r", None)], Moves::All);
    assert_eq!(unserved(&shares, &assignment).collect::<Vec<_>>(), ["s1", "s2"]);
    assert_eq!(assign(&[], &[record("a", "r", None)], Moves::All), BTreeMap::new());
}

fn any_records() -> impl Strategy<Value = (Vec<Share>, Vec<PodRecord>)> {
    let record = (0..9_usize, 0..3_u8, 0..6_u8);
    let replicas = proptest::collection::vec(1..4_usize, 1..6);
    (replicas, proptest::collection::vec(record, 0..20)).prop_map(|(replicas, records)| {
        let records = records.into_iter().enumerate().map(|(at, (shard, revision, terminating))| PodRecord {
            ready: at % 2 == 0,
            stands_by: false,
            created_at: None,
            pod: format!("p{at:02}"),
            revision: format!("r{revision}"),
            shard: (shard < 7).then(|| format!("s{shard}")),
            terminating: terminating == 0,
        });
        (shares(&replicas), records.collect())
    })
}

fn any_moves() -> impl Strategy<Value = Moves> {
    prop_oneof![Just(Moves::None), Just(Moves::Ready), Just(Moves::All)]
}

proptest! {
    #[test]
    fn every_pod_has_a_shard_that_exists((shares, records) in any_records(), moves in any_moves()) {
        let assignment = assign(&shares, &records, moves);
        prop_assert_eq!(assignment.len(), records.len());
        prop_assert!(assignment.values().all(|name| shares.iter().any(|share| share.name == *name)));
    }

    #[test]
    fn assigning_again_changes_nothing((shares, records) in any_records(), moves in any_moves()) {
        let once = assigned(&shares, &records, moves);
        prop_assert_eq!(assigned(&shares, &once, moves), once);
    }

    #[test]
    fn no_pod_moves_while_something_is_under_way((shares, records) in any_records()) {
        let assignment = assign(&shares, &records, Moves::None);
        for record in &records {
            if let Some(shard) = record.shard.as_ref().filter(|name| shares.iter().any(|share| share.name == **name)) {
                prop_assert_eq!(&assignment[&record.pod], shard);
            }
        }
    }

    #[test]
    fn once_settled_no_shard_is_empty_for_no_reason((shares, records) in any_records()) {
        let counts = counts(&shares, &assigned(&shares, &records, Moves::All));
        let pods: usize = counts.iter().sum();
        prop_assert!(pods < shares.len() || counts.iter().all(|pods| *pods > 0), "{:?}", counts);
        let wanted: usize = shares.iter().map(|share| share.replicas).sum();
        let enough = shares.iter().zip(&counts).all(|(share, pods)| *pods >= share.replicas);
        prop_assert!(pods < wanted || enough, "{:?}", counts);
    }

    /// As a Deployment does it: new pods up to the surge, then old ones go, in any order.
    #[test]
    fn a_rollout_ends_with_the_same_division_and_moves_nobody(
        replicas in proptest::collection::vec(1..4_usize, 1..6),
        surge in 1..4_usize,
        order: Vec<prop::sample::Index>,
    ) {
        let shares = shares(&replicas);
        let wanted: usize = replicas.iter().sum();
        let fresh = |revision: &str| (0..wanted).map(|at| record(&format!("{revision}-{at:02}"), revision, None)).collect::<Vec<_>>();
        let mut records = assigned(&shares, &fresh("old"), Moves::All);
        prop_assert_eq!(counts(&shares, &records), replicas.clone());
        let mut order = order.into_iter().cycle();
        for new in fresh("new") {
            if records.len() == wanted + surge {
                let old: Vec<usize> = (0..records.len()).filter(|at| records[*at].revision == "old").collect();
                let which = order.next().map_or(0, |index| index.index(old.len()));
                records.remove(old[which]);
            }
            let before = records.clone();
            records.push(new);
            records = assigned(&shares, &records, Moves::None);
            prop_assert_eq!(&records[..before.len()], &before[..]);
        }
        records.retain(|record| record.revision == "new");
        prop_assert_eq!(counts(&shares, &records), replicas);
        prop_assert_eq!(assigned(&shares, &records, Moves::All), records);
    }
}

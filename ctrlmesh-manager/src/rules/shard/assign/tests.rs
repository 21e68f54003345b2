use ctrlmesh_common::slots::SlotSet;
use proptest::prelude::*;

use super::*;

/// Shards by number of pods; the first one is the canary.
fn shares(replicas: &[usize]) -> Vec<Share> {
    let share = |(at, replicas): (usize, &usize)| Share {
        name: format!("s{at}"),
        canary: at == 0,
        replicas: *replicas,
        slots: SlotSet::EMPTY,
        namespaces: [].into(),
    };
    replicas.iter().enumerate().map(share).collect()
}

fn seat(pod: &str, revision: &str, shard: Option<&str>) -> PodRecord {
    PodRecord {
        pod: pod.to_owned(),
        revision: revision.to_owned(),
        shard: shard.map(str::to_owned),
        leaving: false,
    }
}

/// Pods that stay, by shard.
fn counts(shares: &[Share], seats: &[PodRecord]) -> Vec<usize> {
    let of = |share: &Share| {
        let is = |seat: &&PodRecord| !seat.leaving && seat.shard.as_deref() == Some(&share.name);
        seats.iter().filter(is).count()
    };
    shares.iter().map(of).collect()
}

fn seated(shares: &[Share], seats: &[PodRecord], settled: bool) -> Vec<PodRecord> {
    let assignment = assign(shares, seats, settled);
    let with =
        |seat: &PodRecord| PodRecord { shard: assignment.get(&seat.pod).cloned(), ..seat.clone() };
    seats.iter().map(with).collect()
}

#[test]
fn ordinals_fill_the_shards_in_order_and_the_rest_stands_by() {
    let shares = shares(&[2, 1, 2]);
    let names: Vec<&str> =
        (0..9).map(|ordinal| by_ordinal(&shares, ordinal).unwrap().name.as_str()).collect();
    assert_eq!(names, ["s0", "s0", "s1", "s2", "s2", "s1", "s2", "s1", "s2"]);
    assert_eq!(by_ordinal(&[], 0), None);
}

#[test]
fn every_shard_has_a_pod_before_any_has_two() {
    let shares = shares(&[1, 3, 3]);
    let mut seats = Vec::new();
    for (pod, total) in ["a", "b", "c", "d", "e"].into_iter().zip(1..) {
        let shard = choose(&shares, &seats, "r").unwrap().name.clone();
        seats.push(seat(pod, "r", Some(&shard)));
        let served = counts(&shares, &seats).into_iter().filter(|pods| *pods > 0).count();
        assert_eq!(served, total.min(3));
    }
    assert_eq!(counts(&shares, &seats), [1, 2, 2]);
}

#[test]
fn a_replaced_pod_is_replaced_in_its_shard() {
    let shares = shares(&[1, 1, 2]);
    let mut seats: Vec<PodRecord> = ["s0", "s1", "s2", "s2"]
        .iter()
        .zip(["a", "b", "c", "d"])
        .map(|(shard, pod)| seat(pod, "r", Some(shard)))
        .collect();
    for at in 0..seats.len() {
        let mut others = seats.clone();
        others[at].leaving = true;
        assert_eq!(
            choose(&shares, &others, "r").map(|share| &share.name),
            seats[at].shard.as_ref()
        );
        others.remove(at);
        assert_eq!(
            choose(&shares, &others, "r").map(|share| &share.name),
            seats[at].shard.as_ref()
        );
    }
    seats.push(seat("e", "r", None));
    assert_eq!(choose(&shares, &seats, "r").unwrap().name, "s1", "standby, but not of the canary");
}

#[test]
fn a_new_revision_is_divided_anew_beside_the_old() {
    let shares = shares(&[1, 1, 1]);
    let old = [seat("a", "old", Some("s0")), seat("b", "old", Some("s2"))];
    assert_eq!(choose(&shares, &old, "new").unwrap().name, "s1", "who has nobody at all");
}

#[test]
fn pods_move_only_to_shards_that_lack_them_and_only_once_all_is_settled() {
    let shares = shares(&[1, 1, 1]);
    let seats =
        [seat("a", "r", Some("s1")), seat("b", "r", Some("s1")), seat("c", "r", Some("s0"))];
    assert_eq!(seated(&shares, &seats, false), seats);
    assert_eq!(counts(&shares, &seated(&shares, &seats, true)), [1, 1, 1]);
    let gone = [seat("a", "r", Some("s7")), seat("b", "r", Some("s1"))];
    assert_eq!(counts(&shares, &seated(&shares, &gone, false)), [1, 1, 0], "its shard is no more");
}

#[test]
fn shards_without_a_pod_are_told() {
    let shares = shares(&[1, 1, 1]);
    let assignment = assign(&shares, &[seat("a", "r", None)], true);
    assert_eq!(unserved(&shares, &assignment).collect::<Vec<_>>(), ["s1", "s2"]);
    assert_eq!(assign(&[], &[seat("a", "r", None)], true), BTreeMap::new());
}

fn any_seats() -> impl Strategy<Value = (Vec<Share>, Vec<PodRecord>)> {
    let seat = (0..9_usize, 0..3_u8, 0..6_u8);
    let replicas = proptest::collection::vec(1..4_usize, 1..6);
    (replicas, proptest::collection::vec(seat, 0..20)).prop_map(|(replicas, seats)| {
        let seats =
            seats.into_iter().enumerate().map(|(at, (shard, revision, leaving))| PodRecord {
                pod: format!("p{at:02}"),
                revision: format!("r{revision}"),
                shard: (shard < 7).then(|| format!("s{shard}")),
                leaving: leaving == 0,
            });
        (shares(&replicas), seats.collect())
    })
}

proptest! {
    #[test]
    fn every_pod_has_a_shard_that_exists((shares, seats) in any_seats(), settled: bool) {
        let assignment = assign(&shares, &seats, settled);
        prop_assert_eq!(assignment.len(), seats.len());
        prop_assert!(assignment.values().all(|name| shares.iter().any(|share| share.name == *name)));
    }

    #[test]
    fn assigning_again_changes_nothing((shares, seats) in any_seats(), settled: bool) {
        let once = seated(&shares, &seats, settled);
        prop_assert_eq!(seated(&shares, &once, settled), once);
    }

    #[test]
    fn no_pod_moves_while_something_is_under_way((shares, seats) in any_seats()) {
        let assignment = assign(&shares, &seats, false);
        for seat in &seats {
            if let Some(shard) = seat.shard.as_ref().filter(|name| shares.iter().any(|share| share.name == **name)) {
                prop_assert_eq!(&assignment[&seat.pod], shard);
            }
        }
    }

    #[test]
    fn once_settled_no_shard_is_empty_for_no_reason((shares, seats) in any_seats()) {
        let counts = counts(&shares, &seated(&shares, &seats, true));
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
        let fresh = |revision: &str| (0..wanted).map(|at| seat(&format!("{revision}-{at:02}"), revision, None)).collect::<Vec<_>>();
        let mut seats = seated(&shares, &fresh("old"), true);
        prop_assert_eq!(counts(&shares, &seats), replicas.clone());
        let mut order = order.into_iter().cycle();
        for new in fresh("new") {
            if seats.len() == wanted + surge {
                let old: Vec<usize> = (0..seats.len()).filter(|at| seats[*at].revision == "old").collect();
                let which = order.next().map_or(0, |index| index.index(old.len()));
                seats.remove(old[which]);
            }
            let before = seats.clone();
            seats.push(new);
            seats = seated(&shares, &seats, false);
            prop_assert_eq!(&seats[..before.len()], &before[..]);
        }
        seats.retain(|seat| seat.revision == "new");
        prop_assert_eq!(counts(&shares, &seats), replicas);
        prop_assert_eq!(seated(&shares, &seats, true), seats);
    }
}

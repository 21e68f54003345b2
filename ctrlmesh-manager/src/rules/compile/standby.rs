//! Chooses which pod of each shard works, where the operator does not elect one.
//!
//! Pure. Without a lock of its own, each pod of a shard would write. So one of them writes for the shard, and the
//! others are owned by nobody's share: they see nothing, and stand by. Another one follows a pod that does not serve.
//! It does so only once the table no longer lets that one write.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::handover::EVERY_OWNER;
use ctrlmesh_common::ownership::{Ownership, STANDBY, UNSHARDED};

use super::owning::owner_in;
use crate::rules::pod::Member;

/// Leaves the shard in `owners`, by UID, to one pod of each. The others get [`STANDBY`]. `live` are the pods that may
/// write, and `held_back` the UIDs of those that have come back only just.
pub(super) fn choose(
    owners: &mut BTreeMap<String, String>,
    live: &[&Member],
    held_back: &BTreeSet<String>,
    current: &Ownership,
) {
    // One that is no pod of the operator any more has to stop before another one follows.
    let revoked = current.revoked.iter().flat_map(|revoked| &revoked.pod_uids);
    for (uid, owner) in current.pod_uids.iter().chain(revoked) {
        if owner != UNSHARDED && !owners.contains_key(uid) {
            owners.insert(uid.clone(), STANDBY.to_owned());
        }
    }
    let mut by_shard: BTreeMap<&str, Vec<&Member>> = BTreeMap::new();
    for pod in live {
        if let Some(shard) = owners.get(&pod.uid) {
            by_shard.entry(shard).or_default().push(pod);
        }
    }
    let revoked = current.revoked.iter().flat_map(|revoked| revoked.pod_uids.values());
    let may_write: BTreeSet<&str> = current.pod_uids.values().chain(revoked).map(String::as_str).collect();
    let working = by_shard.iter().filter_map(|(shard, pods)| {
        let is_writer = |pod: &&&Member| owner_in(current, &pod.uid) == Some(*shard);
        let serves = pods.iter().any(|pod| pod.serves());
        // Also one that moves to another shard, or has ended without a proof.
        let worker = if may_write.contains(shard) || may_write.contains(EVERY_OWNER) {
            pods.iter().filter(is_writer).filter(|pod| pod.serves() || !serves).min_by_key(|pod| age(pod))
        } else {
            pods.iter().min_by_key(|pod| (!pod.serves(), held_back.contains(&pod.uid), age(pod)))
        };
        worker.map(|pod| pod.uid.as_str())
    });
    let working: BTreeSet<&str> = working.collect();
    let idle: Vec<String> =
        live.iter().map(|pod| &pod.uid).filter(|uid| !working.contains(uid.as_str())).cloned().collect();
    for uid in idle {
        if let Some(owner) = owners.get_mut(&uid) {
            STANDBY.clone_into(owner);
        }
    }
}

/// The oldest first.
fn age(pod: &Member) -> (Option<i64>, &str) {
    (pod.created_at, &pod.uid)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use ctrlmesh_common::handover::{self, Desired, Evidence, PodEvidence, Server};
    use ctrlmesh_common::names::label;
    use ctrlmesh_common::slots::{NamespaceHash, SlotSet};
    use proptest::prelude::*;

    use super::*;

    const SHARDS: [&str; 2] = ["r-1-normal", "r-2-normal"];

    fn pod(uid: &str, ready: bool) -> Member {
        let labels = [(label::ENABLE_PROXY.to_owned(), "true".to_owned())].into();
        Member { uid: uid.to_owned(), ready, labels, ..Member::default() }
    }

    /// The table that follows, with these pods of these shards.
    fn step(
        current: &Ownership,
        pods: &[(Member, &str)],
        acknowledged: &BTreeMap<String, u64>,
        gone: &BTreeSet<String>,
    ) -> Ownership {
        let mut pod_uids: BTreeMap<String, String> =
            pods.iter().map(|(pod, shard)| (pod.uid.clone(), (*shard).to_owned())).collect();
        let live: Vec<&Member> = pods.iter().map(|(pod, _)| pod).collect();
        choose(&mut pod_uids, &live, &BTreeSet::new(), current);
        let halves = SlotSet::ALL.divide(2).into_iter().zip(SHARDS);
        let slots =
            halves.flat_map(|(part, shard)| part.iter().map(move |slot| (slot, shard.to_owned())).collect::<Vec<_>>());
        let desired = Desired { slots: slots.collect(), pod_uids, ..Desired::default() };
        let uids = acknowledged.keys().chain(gone);
        let shown = |uid: &String| PodEvidence {
            acknowledged: acknowledged.get(uid).copied(),
            gone: gone.contains(uid),
            lapsed: false,
        };
        let pods = uids.map(|uid| (uid.clone(), shown(uid))).collect();
        let evidence = Evidence { server: Server::None, pods };
        handover::next(current, &desired, NamespaceHash::default(), &evidence).table
    }

    /// Steps with everything acknowledged until nothing changes.
    fn settled(mut table: Ownership, pods: &[(Member, &str)], gone: &[&str]) -> Ownership {
        let gone = gone.iter().map(|uid| (*uid).to_owned()).collect();
        loop {
            let all = pods.iter().map(|(pod, _)| (pod.uid.clone(), table.epoch)).collect();
            let next = step(&table, pods, &all, &gone);
            if next == table {
                return table;
            }
            table = next;
        }
    }

    fn workers(table: &Ownership) -> Vec<(&str, &str)> {
        let all = table.pod_uids.iter().filter(|(_, owner)| *owner != STANDBY);
        all.map(|(uid, owner)| (uid.as_str(), owner.as_str())).collect()
    }

    #[test]
    fn one_pod_of_each_shard_works_while_it_serves() {
        let [one, two] = SHARDS;
        let mut pods =
            vec![(pod("a", false), one), (pod("b", false), one), (pod("c", true), two), (pod("d", true), two)];
        let table = settled(Ownership::default(), &pods, &[]);
        assert_eq!(workers(&table), [("a", one), ("c", two)]);
        pods[1].0.ready = true;
        let table = settled(table, &pods, &[]);
        assert_eq!(workers(&table), [("b", one), ("c", two)]);
        pods[0].0.ready = true;
        let table = settled(table, &pods, &[]);
        assert_eq!(workers(&table), [("b", one), ("c", two)], "who works goes on");
        let table = settled(table, &pods[..2], &["c", "d"]);
        assert_eq!(workers(&table), [("b", one)]);
        pods.remove(1);
        assert_eq!(workers(&settled(table, &pods[..1], &["b", "c", "d"])), [("a", one)]);
    }

    #[test]
    fn nobody_follows_before_the_former_pod_is_done() {
        let one = SHARDS[0];
        let mut pods = vec![(pod("a", true), one), (pod("b", true), one)];
        let table = settled(Ownership::default(), &pods, &[]);
        pods[0].0.ready = false;
        // Its proxy is silent.
        let acknowledged = [("a".to_owned(), table.epoch), ("b".to_owned(), u64::MAX)].into();
        let mut waits = table;
        for _ in 0..4 {
            waits = step(&waits, &pods, &acknowledged, &BTreeSet::new());
        }
        assert_eq!(workers(&waits), []);
        assert_eq!(
            waits.revoked.clone().map(|revoked| revoked.pod_uids),
            Some([("a".to_owned(), one.to_owned())].into())
        );
        let gone = settled(waits, &pods[1..], &["a"]);
        assert_eq!(workers(&gone), [("b", one)]);
    }

    #[test]
    fn a_pod_that_is_the_operators_no_more_has_to_stop_first() {
        let one = SHARDS[0];
        let pods = vec![(pod("a", true), one), (pod("b", true), one)];
        let table = settled(Ownership::default(), &pods, &[]);
        // Somebody took its labels; it lives on.
        let silent = step(&table, &pods[1..], &BTreeMap::new(), &BTreeSet::new());
        assert_eq!(workers(&step(&silent, &pods[1..], &BTreeMap::new(), &BTreeSet::new())), []);
        let acknowledged = [("a".to_owned(), silent.epoch)].into();
        let mut stopped = silent;
        for _ in 0..2 {
            stopped = step(&stopped, &pods[1..], &acknowledged, &BTreeSet::new());
        }
        assert_eq!(workers(&stopped), [("b", one)]);
    }

    #[test]
    fn whoever_stood_by_needs_no_proof() {
        let one = SHARDS[0];
        let pods = vec![(pod("a", true), one), (pod("b", true), one)];
        let table = settled(Ownership::default(), &pods, &[]);
        let gone = ["a".to_owned()].into();
        let forgotten = step(&table, &pods[1..], &BTreeMap::new(), &gone);
        let next = step(&forgotten, &pods[1..], &BTreeMap::new(), &gone);
        assert_eq!(workers(&next), [("b", one)]);
    }

    proptest! {
        /// Whatever pods say, acknowledge and belong to, no two of them may write for one shard.
        #[test]
        fn no_two_pods_may_write_for_one_shard(
            steps in prop::collection::vec(prop::collection::vec((any::<bool>(), any::<bool>(), 0..4, 0_usize..2), 4), 1..30),
        ) {
            let (mut table, mut acknowledged) = (Ownership::default(), BTreeMap::new());
            for states in steps {
                let pods: Vec<(Member, &str)> = states
                    .iter()
                    .zip(["a", "b", "c", "d"])
                    .filter(|((_, _, life, _), _)| *life < 2)
                    .map(|((ready, _, _, shard), uid)| (pod(uid, *ready), SHARDS[*shard]))
                    .collect();
                // Of one that has ended, that need not be proved yet.
                let gone = states.iter().zip(["a", "b", "c", "d"]).filter(|((_, _, life, _), _)| *life == 3);
                let gone: BTreeSet<String> = gone.map(|(_, uid)| uid.to_owned()).collect();
                for ((_, acknowledges, ..), uid) in states.iter().zip(["a", "b", "c", "d"]) {
                    if *acknowledges {
                        acknowledged.insert(uid.to_owned(), table.epoch);
                    }
                }
                table = step(&table, &pods, &acknowledged, &gone);
                let revoked = table.revoked.iter().flat_map(|revoked| &revoked.pod_uids);
                for shard in SHARDS {
                    let writers: BTreeSet<&String> =
                        table.pod_uids.iter().chain(revoked.clone()).filter(|(_, owner)| *owner == shard).map(|(uid, _)| uid).collect();
                    prop_assert!(writers.len() <= 1, "{shard}: {writers:?} in {table:?}");
                }
            }
        }
    }
}

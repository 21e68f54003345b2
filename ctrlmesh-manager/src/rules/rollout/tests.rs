use std::collections::BTreeMap;

use ctrlmesh_common::api::{Auto, Controller};
use ctrlmesh_common::names::label;
use ctrlmesh_common::ownership::Revoked;
use ctrlmesh_common::slots::Slot;

use super::*;
use crate::rules::manifest::Manifests;
use crate::rules::pod::{Owner, PodName};
use crate::rules::shared::Shared;

const ROOT: &str = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: root, namespace: ops}\n\
    spec: {root: {prefix: r, targetDeployment: op, rollout: {}, auto: {shardingSize: 1, everyShardReplicas: 1}}}\n";

/// A root with this status, and a pod of each of the revisions `one` and `two`.
fn case(rollout: &str) -> (Vec<Shared<ShardingConfig>>, Vec<Shared<Member>>) {
    let mut manifests = Manifests::default();
    manifests.read(&format!("{ROOT}status: {{rollout: {rollout}}}\n")).unwrap();
    (manifests.configs, ["one", "two"].map(|revision| pod(revision).into()).into())
}

fn pod(revision: &str) -> Member {
    let labels = [(label::ENABLE_PROXY, "true"), (label::POD_TEMPLATE_HASH, revision)];
    Member {
        name: PodName { namespace: "ops".to_owned(), name: format!("op-{revision}") },
        uid: revision.to_owned(),
        labels: labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
        owner: Some(Owner { kind: "ReplicaSet".to_owned(), name: format!("op-{revision}") }),
        gate: Some(Gate::default()),
        created_at: Some(100),
        ready: true,
        ..Member::default()
    }
}

fn trial(phase: &str) -> String {
    format!(
        "{{promoted: one, trial: {{revision: two, phase: {phase}, step: 1, passed: 0, failed: 0, message: why, \
         stepStartedAt: '2026-01-01T00:00:00Z'}}}}"
    )
}

/// Whether each of both pods may be Ready.
fn gates(rollout: &str) -> [Option<bool>; 2] {
    let (configs, members) = case(rollout);
    let all = workloads(&configs, &members);
    [0, 1].map(|at| all[0].gate(&members[at], &[], true).map(|gate| gate.holds))
}

#[test]
fn pods_on_trial_wait_and_others_do_not() {
    assert_eq!(gates("{promoted: one}"), [Some(true), Some(false)]);
    for phase in ["Starting", "Analysing", "Waiting", "Held", "RollingBack"] {
        assert_eq!(gates(&trial(phase)), [Some(true), Some(false)], "{phase}");
    }
    assert_eq!(gates(&trial("Promoting")), [Some(true), None], "there is no table yet");
    let (mut configs, members) = case(&trial("Analysing"));
    configs[0].spec.root.as_mut().unwrap().rollout = None;
    let without = workloads(&configs, &members)[0].gate(&members[1], &[], true).unwrap();
    assert!(without.holds && without.reason == "NoRollout");
    assert!(differs(&Gate::default(), &without));
}

#[test]
fn a_pod_that_takes_over_waits_for_its_share_and_for_the_marks() {
    let (mut configs, mut members) = case(&trial("Promoting"));
    let share = Share {
        name: "r-1-second".to_owned(),
        canary: false,
        second: true,
        replicas: 1,
        slots: [5, 6].map(|slot: i64| Slot::try_from(slot).unwrap()).into_iter().collect(),
        namespaces: BTreeSet::new(),
    };
    let table = |owned: &[i64]| {
        let owner = |slot: &i64| (Slot::try_from(*slot).unwrap(), "r-1-second".to_owned());
        let pods = [("one", "r-1-normal"), ("two", "r-1-second")];
        Ownership {
            slots: owned.iter().map(owner).collect(),
            pod_uids: pods.map(|(uid, shard)| (uid.to_owned(), shard.to_owned())).into(),
            ..Ownership::default()
        }
    };
    let mut holds = |owned: &[i64], members: &[Shared<Member>]| {
        configs[0].status.as_mut().unwrap().ownership = Some(table(owned));
        let all = workloads(&configs, members);
        let deleted_first = all[0].deleted_first(200);
        assert_eq!(deleted_first, ["one"].into());
        let are_marked = all[0].are_marked(&deleted_first);
        all[0].gate(&members[1], std::slice::from_ref(&share), are_marked).unwrap().holds
    };
    assert!(!holds(&[5, 6], &members), "the pod that it replaces is not marked");
    for (cost, expected) in
        [(DeletionCost::DeletedFirst, true), (DeletionCost::Other, true), (DeletionCost::None, false)]
    {
        members[0].deletion_cost = cost;
        assert_eq!(holds(&[5, 6], &members), expected, "{cost:?}");
    }
    members[0].deletion_cost = DeletionCost::DeletedFirst;
    assert!(!holds(&[5], &members), "a slot is on its way");
    // Its shard has another pod, which works.
    let standing_by = |owned: &[i64]| {
        let pods = [("op-one", "r-1-normal"), ("op-two", "r-1-second")];
        let mut table = table(owned);
        table.pods = pods.map(|(pod, shard)| (pod.to_owned(), shard.to_owned())).into();
        table.pod_uids.insert("two".to_owned(), STANDBY.to_owned());
        let (mut configs, _) = case(&trial("Promoting"));
        configs[0].status.as_mut().unwrap().ownership = Some(table);
        workloads(&configs, &members)[0].gate(&members[1], std::slice::from_ref(&share), true).unwrap().holds
    };
    assert_eq!((standing_by(&[5]), standing_by(&[5, 6])), (false, true));
    members[1].ready = false;
    assert!(!holds(&[5, 6], &members));
}

#[test]
fn a_pod_of_an_elastic_root_takes_over_with_some_of_it() {
    let (mut configs, members) = case(&trial("Promoting"));
    configs[0].spec.root.as_mut().unwrap().auto.as_mut().unwrap().every_shard_replicas = None;
    let share = Share {
        name: "r-1-second".to_owned(),
        canary: false,
        second: true,
        replicas: 1,
        slots: SlotSet::EMPTY,
        namespaces: BTreeSet::new(),
    };
    let other = Share { name: "r-1-normal".to_owned(), second: false, ..share.clone() };
    let canary = Share { name: "r-0-normal".to_owned(), canary: true, ..other.clone() };
    let shares = [canary, share, other];
    // So many slots of its shard, of the other one, and of the canary.
    let mut holds = |own: usize, others: usize, canary: usize, members: &[Shared<Member>]| {
        let owners = [("r-1-second", own), ("r-1-normal", others), ("r-0-normal", canary)];
        let owners = owners.into_iter().flat_map(|(owner, count)| std::iter::repeat_n(owner.to_owned(), count));
        configs[0].status.as_mut().unwrap().ownership = Some(Ownership {
            slots: owners.zip(0..).map(|(owner, number)| (Slot::try_from(number).unwrap(), owner)).collect(),
            pod_uids: [("two".to_owned(), "r-1-second".to_owned())].into(),
            ..Ownership::default()
        });
        workloads(&configs, members)[0].gate(&members[1], &shares, true).unwrap().holds
    };
    let mut members = members;
    for (own, others, canary, expected) in
        [(0, 32, 0, false), (1, 31, 0, false), (8, 8, 16, true), (7, 8, 16, true), (6, 8, 16, false), (0, 1, 31, true)]
    {
        assert_eq!(holds(own, others, canary, &members), expected, "{own} {others} {canary}");
    }
    members[1].gate.as_mut().unwrap().holds = Some(true);
    assert!(holds(4, 8, 16, &members), "others come and go");
    members[1].ready = false;
    assert!(!holds(8, 8, 16, &members));
}

#[test]
fn only_a_held_pod_of_a_former_template_is_stuck() {
    let (mut configs, _) = case(&trial("RollingBack"));
    let root = configs[0].spec.root.as_mut().unwrap();
    (root.target_deployment, root.target_stateful_set) = (None, Some("op".to_owned()));
    let mut pod = pod("two");
    pod.name.name = "op-1".to_owned();
    pod.owner = Some(Owner { kind: "StatefulSet".to_owned(), name: "op".to_owned() });
    pod.labels.insert(label::CONTROLLER_REVISION_HASH.to_owned(), "two".to_owned());
    pod.gate = Some(Gate { holds: Some(false), ..Gate::default() });
    let cases = BTreeMap::from([("two", false), ("one", true)]);
    for (update_revision, expected) in cases {
        let members = [pod.clone().into()];
        let stuck = workloads(&configs, &members)[0].stuck(Some(update_revision), 200).len();
        assert_eq!(stuck == 1, expected, "{update_revision}");
        assert!(workloads(&configs, &members)[0].stuck(Some(update_revision), 120).is_empty(), "it has just come");
    }
    for holds in [None, Some(true)] {
        pod.gate = Some(Gate { holds, ..Gate::default() });
        assert!(workloads(&configs, &[pod.clone().into()])[0].stuck(Some("one"), 200).is_empty(), "{holds:?}");
    }
}

#[test]
fn pods_that_own_nothing_go_first() {
    let (mut configs, mut members) = case(&trial("Promoting"));
    let root = configs[0].spec.root.as_mut().unwrap();
    (root.rollout, root.auto) =
        (None, Some(Auto { sharding_size: 4, every_shard_replicas: None, elastic: None, balance: None }));
    configs[0].status.as_mut().unwrap().rollout = None;
    for pod in &mut members {
        pod.gate = None;
    }
    let slot = Slot::try_from(5).unwrap();
    let mut marked = |owner: &str, now: i64, is_elastic: bool, members: &[Shared<Member>]| -> Vec<String> {
        let auto = configs[0].spec.root.as_mut().unwrap().auto.as_mut().unwrap();
        auto.every_shard_replicas = (!is_elastic).then_some(1);
        configs[0].status.as_mut().unwrap().ownership = Some(Ownership {
            slots: [(slot, "r-1-normal".to_owned())].into(),
            pod_uids: [("one", "r-1-normal"), ("two", owner)].map(|(uid, of)| (uid.to_owned(), of.to_owned())).into(),
            revoked: Some(Revoked::default()),
            ..Ownership::default()
        });
        let all = workloads(&configs, members);
        all.first().map(|one| one.deleted_first(now)).into_iter().flatten().map(str::to_owned).collect()
    };
    assert_eq!(marked("r-2-normal", 130, true, &members), ["two"]);
    assert_eq!(marked(STANDBY, 130, false, &members), ["two"]);
    for (owner, now, is_elastic) in
        [("r-2-normal", 130, false), ("r-2-normal", 129, true), (STANDBY, 129, false), ("r-1-normal", 130, true)]
    {
        assert_eq!(marked(owner, now, is_elastic, &members), [""; 0], "{owner} {now} {is_elastic}");
    }
    let lock = Controller { leader_election_name: "lock".to_owned() };
    // A mark is taken away again, whatever the root has become.
    (members[1].deletion_cost, configs[0].spec.controller) = (DeletionCost::DeletedFirst, Some(lock));
    configs[0].spec.root.as_mut().unwrap().auto.as_mut().unwrap().every_shard_replicas = Some(1);
    assert_eq!(workloads(&configs, &members).len(), 1);
    members[1].deletion_cost = DeletionCost::None;
    assert!(workloads(&configs, &members).is_empty());
}

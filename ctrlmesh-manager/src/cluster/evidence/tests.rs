use std::sync::LazyLock;

use ctrlmesh_common::api::FenceMode;
use ctrlmesh_common::policy::fence::LAPSED_AFTER;
use ctrlmesh_common::policy::{Fence, Policy};
use ctrlmesh_common::resource::ResourceMatch;

use super::*;
use crate::cluster::cache::Snapshot;
use crate::drain::Drain;
use crate::rules::compile::{CompiledPolicy, Record};
use crate::rules::evidence::GONE_AFTER;

const WITHIN: Duration = Duration::from_secs(5);

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// A root with a pod `op-0` of UID `there`, which was sent a policy of epoch 7; `lost` does not exist any more.
fn plan() -> Plan {
    let text = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: op, namespace: ops}\n\
        spec: {root: {prefix: r, fence: Server, targetStatefulSet: op, auto: {shardingSize: 1, everyShardReplicas: 1}}}\n\
        status: {ownership: {epoch: 7, podUids: {there: r-1-normal, lost: r-1-normal}, revoked: {epoch: 7, slots: {'1': r-1-normal}}}}\n---\n\
        apiVersion: v1\nkind: Pod\nmetadata: {name: op-0, namespace: ops, uid: there}\nspec: {containers: []}\n";
    let snapshot = Snapshot::of_manifests(text);
    let mut plan = Plan { snapshot: Arc::new(snapshot), ..Plan::default() };
    let policy = Policy { epoch: 7, ..Policy::nothing() };
    let sent = CompiledPolicy::new(Some("r-1-normal".to_owned()), Some("ops/op".to_owned()), 1, policy);
    plan.compiled.policies.insert("ops/op-0".parse().unwrap(), Arc::new(sent));
    plan
}

fn gathered(times: &mut Times, plan: &Plan, receipt: InForce, now: Instant) -> (Evidences, Option<Instant>) {
    let receipts = [("ops/op-0".parse().unwrap(), receipt)].into();
    let server = |root: &str, _: &str| if root == "ops/op" { Server::Enforces(7) } else { Server::None };
    times.gather(plan, &receipts, server, WITHIN, None, now)
}

/// The same plan where only the proxies fence. `op-0` has a policy with this fence, from version 3 of the root.
fn plan_by_proxies(fence: Fence, generation: i64) -> Plan {
    let mut plan = plan();
    let snapshot = Arc::make_mut(&mut plan.snapshot);
    let meta = &mut snapshot.configs[0].metadata;
    (meta.resource_version, meta.generation) = (Some("3".to_owned()), Some(generation));
    snapshot.configs[0].spec.root.as_mut().unwrap().fence = Some(FenceMode::Proxy);
    let policy = Policy { epoch: 6, fence: Some(fence), ..Policy::nothing() };
    let sent = CompiledPolicy::new(Some("r-1-normal".to_owned()), Some("ops/op".to_owned()), 3, policy);
    plan.compiled.policies.insert("ops/op-0".parse().unwrap(), Arc::new(sent));
    plan
}

fn digest(plan: &Plan) -> u64 {
    plan.sendable().values().next().unwrap().digest()
}

fn said(digest: u64) -> BTreeMap<PodName, InForce> {
    [("ops/op-0".parse().unwrap(), InForce { uid: "there".to_owned(), digest })].into()
}

#[test]
fn a_receipt_counts_for_its_uid_and_the_last_policy() {
    let (plan, mut times) = (plan(), Times::default());
    let sent = plan.sendable().values().next().unwrap().digest();
    for (uid, digest, counts) in [("there", sent, true), ("before", sent, false), ("there", sent ^ 1, false)] {
        let receipt = InForce { uid: uid.to_owned(), digest };
        let (found, _) = gathered(&mut times, &plan, receipt, *START);
        let acknowledged = found["ops/op"].evidence.pods["there"].acknowledged;
        assert_eq!(acknowledged, counts.then_some(7), "{uid}");
    }
    // The rest of the move made a new policy, which the proxy does not have yet.
    let mut later = plan.clone();
    let one = Arc::make_mut(later.compiled.policies.values_mut().next().unwrap());
    *one = CompiledPolicy::new(one.shard.clone(), one.operator.clone(), 1, Policy { epoch: 8, ..Policy::nothing() });
    let receipt = InForce { uid: "there".to_owned(), digest: sent };
    let (found, _) = gathered(&mut times, &later, receipt, *START);
    assert_eq!(found["ops/op"].evidence.pods["there"].acknowledged, Some(7));
    let mut of_other = plan;
    let one = Arc::make_mut(of_other.compiled.policies.values_mut().next().unwrap());
    one.operator = Some("ops/other".to_owned());
    let receipt = InForce { uid: "there".to_owned(), digest: sent };
    let (found, _) = gathered(&mut Times::default(), &of_other, receipt, *START);
    assert_eq!(found["ops/op"].evidence.pods["there"].acknowledged, None, "another operator's epochs");
}

#[test]
fn a_pod_that_vanished_is_gone_in_time_and_returns_if_seen() {
    let (plan, mut times) = (plan(), Times::default());
    let mut gone = |plan: &Plan, after: Duration| {
        let receipt = InForce { uid: String::new(), digest: 0 };
        let (found, due) = gathered(&mut times, plan, receipt, *START + after);
        let pods = &found["ops/op"].evidence.pods;
        assert!(!pods["there"].gone);
        (pods["lost"].gone, pods["lost"].lapsed, due.map(|due| due - *START))
    };
    assert_eq!(gone(&plan, Duration::ZERO), (false, false, Some(WITHIN)));
    assert_eq!(gone(&plan, WITHIN), (false, true, Some(GONE_AFTER)));
    assert_eq!(gone(&plan, GONE_AFTER), (true, true, None));
    let mut seen = (*plan.snapshot).clone();
    seen.members.push(seen.members[0].clone());
    seen.members[1].uid = "lost".to_owned();
    let seen = Plan { snapshot: Arc::new(seen), ..plan.clone() };
    assert!(!gone(&seen, GONE_AFTER).0);
    assert!(!gone(&plan, GONE_AFTER).0, "it counts from when it vanished again");
}

#[test]
fn a_pod_that_was_seen_to_end_is_gone_at_once() {
    let mut plan = plan();
    let snapshot = Snapshot { stopped: ["lost".to_owned()].into(), ..(*plan.snapshot).clone() };
    plan.snapshot = Arc::new(snapshot);
    let receipt = InForce { uid: String::new(), digest: 0 };
    let (found, _) = gathered(&mut Times::default(), &plan, receipt, *START);
    assert!(found["ops/op"].evidence.pods["lost"].gone);
}

#[test]
fn nothing_is_remembered_while_no_root_is_fenced() {
    let mut times = Times::default();
    let receipt = || InForce { uid: String::new(), digest: 0 };
    gathered(&mut times, &plan(), receipt(), *START);
    assert!(!times.missing_since.is_empty() && !times.revoked_since.is_empty());
    let (found, due) = gathered(&mut times, &Plan::default(), receipt(), *START + WITHIN);
    assert!(found.is_empty() && due.is_none());
    assert!(times.missing_since.is_empty() && times.revoked_since.is_empty());
}

#[tokio::test(start_paused = true)]
async fn only_the_leader_plans_with_what_is_proved() {
    let (_plans, plans) = watch::channel(Some(Arc::new(plan())));
    let (_receipts, receipts_changed) = watch::channel(0);
    let (_fences, fences) = watch::channel(());
    let (lead, leadership) = Leadership::by_hand();
    let follower = EvidenceFollower {
        plans,
        receipts: BTreeMap::new,
        receipts_changed,
        fences,
        server: |(), _, _| Server::Enforces(7),
        acknowledge_within: WITHIN,
        leadership,
        confirmations: Arc::default(),
    };
    let (proved, mut evidence) = watch::channel(None);
    Drain::default().spawn(follower.run(proved));
    for leads in [true, false, true] {
        lead(leads);
        let changed = time::timeout(Duration::from_mins(1), evidence.changed()).await;
        assert!(matches!(changed, Ok(Ok(()))), "leads: {leads}");
        let found = evidence.borrow_and_update().clone();
        assert_eq!(found.is_some_and(|found| found.contains_key("ops/op")), leads);
    }
}

#[test]
fn a_silent_pod_lapses_where_its_policy_was_in_force() {
    let lapsing = Fence { lapses: true, ..Fence::default() };
    let plan = plan_by_proxies(lapsing.clone(), 1);
    let open = Policy { fail_open: true, fence: Some(lapsing), ..Policy::nothing() };
    let mut fail_open = plan.clone();
    let open = CompiledPolicy::new(None, Some("ops/op".to_owned()), 3, open);
    fail_open.compiled.policies.insert("ops/op-0".parse().unwrap(), Arc::new(open));
    for (plan, in_force, leads, lapses) in [
        (&plan, digest(&plan), true, true),
        (&plan, digest(&plan) ^ 1, true, false),
        (&plan, digest(&plan), false, false),
        (&plan_by_proxies(Fence::default(), 1), digest(&plan_by_proxies(Fence::default(), 1)), true, false),
        (&fail_open, digest(&fail_open), true, false),
    ] {
        let (mut times, confirmations) = (Times::default(), Confirmations::default());
        times.lapsing.update(plan, || said(in_force));
        let mut gathered = |since: Duration, now: Duration| {
            let leader = leads.then_some(Leader { since: *START + since, confirmations: &confirmations });
            let (found, due) = times.gather(plan, &BTreeMap::new(), |_, _| Server::None, WITHIN, leader, *START + now);
            let found = found["ops/op"].clone();
            (found.evidence.pods["there"].lapsed, found.lapses_at.get("there").copied(), due.map(|due| due - *START))
        };
        let first = gathered(Duration::ZERO, Duration::ZERO);
        let due = if lapses { LAPSED_AFTER.min(GONE_AFTER) } else { GONE_AFTER };
        assert_eq!((first.0, first.1.is_some(), first.2), (false, lapses, Some(due)));
        assert_eq!(gathered(Duration::ZERO, GONE_AFTER).1, first.1, "the same moment");
        // Another term of this replica.
        let again = (GONE_AFTER, GONE_AFTER + LAPSED_AFTER);
        assert!(!gathered(again.0, LAPSED_AFTER).0);
        assert_eq!(gathered(again.0, again.1).0, lapses);
        assert_eq!(confirmations.confirm("there", 2, *START), !lapses);
    }
}

#[test]
fn what_lapses_is_known_until_another_policy_may_be_in_force() {
    let plan = |generation| plan_by_proxies(Fence { lapses: true, ..Fence::default() }, generation);
    let mut pods = LapsingPods::default();
    let has = |pods: &mut LapsingPods, plan: &Plan, digest| {
        pods.update(plan, || said(digest));
        pods.has("there")
    };
    let first = plan(1);
    assert!(!has(&mut pods, &first, 0));
    assert!(has(&mut pods, &first, digest(&first)));
    assert!(has(&mut pods, &plan(2), 0), "a later one lapses, too");
    let lasting = plan_by_proxies(Fence::default(), 3);
    assert!(!has(&mut pods, &lasting, digest(&lasting)));
    assert!(!has(&mut pods, &plan(4), digest(&lasting)), "the other one may be in force");
    assert!(has(&mut pods, &plan(4), digest(&plan(4))));
    assert!(!has(&mut pods, &plan(6), 0), "what the root said between is not known");
    let mut pods = LapsingPods::default();
    assert!(has(&mut pods, &first, digest(&first)));
    let mut unwritten = plan(2);
    unwritten.compiled.operators.insert("ops/op".to_owned(), Record::default());
    assert!(has(&mut pods, &unwritten, 0), "nothing follows from it yet");
    assert!(!has(&mut pods, &plan(3), 0), "what followed from it was not seen");
}

#[test]
fn a_policy_that_fences_more_kinds_is_proved_anew() {
    let plan = |kinds: &[&str], generation| {
        let list = |kind: &&str| ResourceMatch { api_groups: vec![String::new()], resources: vec![(*kind).to_owned()] };
        let resources = kinds.iter().map(list).collect();
        plan_by_proxies(Fence { lapses: true, resources, ..Fence::default() }, generation)
    };
    let mut pods = LapsingPods::default();
    let mut has = |plan: &Plan, digest| {
        pods.update(plan, || said(digest));
        pods.has("there")
    };
    let first = plan(&["configmaps", "secrets"], 1);
    assert!(has(&first, digest(&first)));
    let fewer = plan(&["configmaps"], 2);
    assert!(has(&fewer, digest(&first)), "the first fences more, and lapses");
    let more = plan(&["configmaps", "services"], 3);
    assert!(!has(&more, digest(&fewer)), "what is in force does not fence services");
    assert!(has(&more, digest(&more)));
    let all = plan(&[], 4);
    assert!(!has(&all, digest(&more)), "every kind is more than some");
    assert!(has(&all, digest(&all)));
    assert!(has(&plan(&["pods"], 5), digest(&all)), "pods are among all");
    let all = plan(&[], 6);
    assert!(has(&all, digest(&all)));
    assert!(!has(&plan(&["events"], 7), digest(&all)), "events are not: they have to be named");
}

use ctrlmesh_common::api::{CircuitBreaker, CircuitBreakerStatus, ShardingConfigStatus};
use ctrlmesh_common::ownership::Revoked;
use ctrlmesh_common::slots::NamespaceHash;
use jiff::Timestamp;

use super::*;
use crate::cluster::cache::{CachedBreaker, Snapshot};
use crate::cluster::plan::{self, Plan};
use crate::labels::ObjectCounts;
use crate::rules::compile::PoliciesByPod;
use crate::status::breaker_status::of;
use crate::status::rules_writer::RulesKind as _;
use crate::status::targets::ReceiptsByPod;

const BREAKER: &str = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1
kind: CircuitBreaker
metadata: {name: wild, namespace: ops, generation: 3}
spec:
  selector: {matchLabels: {app: op}}
  rateLimitings:
  - name: deletes
    bucket: {interval: 5m, percentOfShare: 2}
    resourceRules: [{apiGroups: [web.example.com], resources: [sites, sites/status], verbs: [delete], namespaces: ['*']}]
";

const ROOT: &str = "---
apiVersion: ctrlmesh.kusionstack.io/v1alpha1
kind: ShardingConfig
metadata: {name: op, namespace: ops}
spec: {root: {prefix: r, targetStatefulSet: op, fence: 'Off', auto: {shardingSize: 2, everyShardReplicas: 1}}}
";

const BY_HAND: &str = "---
apiVersion: ctrlmesh.kusionstack.io/v1alpha1
kind: ShardingConfig
metadata: {name: op, namespace: ops}
spec: {selector: {matchLabels: {app: op}}, limits: [{selector: {matchLabels: {team: a}}}]}
";

struct Bed {
    plan: Plan,
    object: CircuitBreaker,
    objects: ObjectCounts,
}

impl Bed {
    /// The pods `op-0` and `op-1` with policies that are written, and 100 sites in each of 20 namespaces.
    fn new(breaker: &str, config: &str) -> Self {
        let pod = |number: u32| {
            format!(
                "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: op-{number}, namespace: ops, uid: u-{number}, \
                 annotations: {{ctrlmesh.kusionstack.io/injected: 'true'}}, ownerReferences: [{{apiVersion: apps/v1, kind: StatefulSet, name: op, uid: x, controller: true}}], \
                 labels: {{app: op, ctrlmesh.kusionstack.io/enable-proxy: 'true'}}}}\nspec: {{containers: []}}\n"
            )
        };
        let mut snapshot = Snapshot::of_manifests(&(breaker.to_owned() + config + &pod(0) + &pod(1)));
        let nothing = PoliciesByPod::new();
        let first = plan::of(snapshot.clone(), &nothing);
        let record = &first.compiled.operators["ops/op"];
        snapshot.configs[0].status = Some(ShardingConfigStatus {
            epoch: i64::try_from(record.epoch).ok(),
            policy_digest: Some(record.policy_digest.clone()),
            ownership: record.ownership.clone(),
            ..ShardingConfigStatus::default()
        });
        let names: Vec<String> = (0..2000).map(|number| format!("site-{number}")).collect();
        let spaces: Vec<String> = (0..20).map(|number| format!("shop-{number}")).collect();
        let sites: Vec<(Option<&str>, &str)> =
            names.iter().enumerate().map(|(at, name)| (Some(spaces[at % 20].as_str()), name.as_str())).collect();
        let objects = ObjectCounts::of_kind("web.example.com", "sites", &sites);
        Self { plan: plan::of(snapshot, &nothing), object: serde_saphyr::from_str(breaker).unwrap(), objects }
    }

    fn status(&self) -> CircuitBreakerStatus {
        let cached = CachedBreaker { object: self.object.clone().into(), read: Breaker::from(&self.object) };
        let (plan, receipts, now) = (&self.plan, &ReceiptsByPod::new(), Timestamp::UNIX_EPOCH);
        of(&cached, Observed { plan, receipts, objects: &self.objects, new_leader: false, now })
    }

    /// The sizes by shard, once they are written.
    fn write(&mut self) -> Vec<(String, i64)> {
        let status = self.status();
        let sizes = status.shares.iter().map(|one| (one.shard.clone(), one.objects)).collect();
        self.object.status = Some(status);
        sizes
    }

    fn programmed(&self) -> (String, String) {
        let conditions = self.status().conditions;
        let one = conditions.iter().find(|one| one.type_ == "Programmed").unwrap();
        (one.reason.clone(), one.message.clone())
    }

    fn budget(&self) -> Option<u64> {
        let read = Breaker::from(&self.object);
        let mut guards = read.guards("u-0", Some("ops/op"), Some("r-1-normal"));
        guards.next().unwrap().budget.unwrap().requests()
    }
}

#[test]
fn objects_count_for_the_shard_that_owns_their_slot() {
    let mut bed = Bed::new(BREAKER, ROOT);
    assert_eq!(bed.budget(), None, "nothing is written yet");
    assert_eq!(bed.programmed().0, "Counting");
    let sizes = bed.write();
    let table = bed.plan.compiled.operators["ops/op"].ownership.clone().unwrap();
    let owned = |shard: &str| {
        let hash = NamespaceHash::default();
        let spaces = (0..20).map(|number| format!("shop-{number}"));
        let own = spaces.filter(|space| table.owner(hash.slot(space), Some(space)) == Some(shard));
        100 * i64::try_from(own.count()).unwrap()
    };
    let expected = ["r-1-normal", "r-2-normal"].map(|shard| (format!("ops/op/{shard}"), owned(shard)));
    assert_eq!(sizes, expected);
    assert!(sizes.iter().all(|(_, objects)| *objects > 0) && owned("r-1-normal") + owned("r-2-normal") == 2000);
    assert_eq!(bed.budget(), u64::try_from(sizes[0].1 / 50).ok());
    assert_eq!(bed.programmed().0, "Waiting");
}

#[test]
fn a_share_that_moves_or_has_no_pod_keeps_its_size() {
    let mut bed = Bed::new(BREAKER, ROOT);
    let sizes = bed.write();
    bed.objects = ObjectCounts::of_kind("web.example.com", "sites", &[]);
    let records = &mut bed.plan.compiled.operators;
    records.get_mut("ops/op").unwrap().ownership.as_mut().unwrap().revoked = Some(Revoked::default());
    assert_eq!(bed.write(), sizes, "what moves is nobody's for a moment");
    assert_eq!(bed.programmed().0, "Waiting");
    let records = &mut bed.plan.compiled.operators;
    records.get_mut("ops/op").unwrap().ownership.as_mut().unwrap().revoked = None;
    let mut snapshot = Snapshot::clone(&bed.plan.snapshot);
    snapshot.members.clear();
    bed.plan.snapshot = snapshot.into();
    assert_eq!(bed.write(), [("ops/op/r-1-normal".to_owned(), 0), ("ops/op/r-2-normal".to_owned(), 0)]);
    let records = &mut bed.plan.compiled.operators;
    records.get_mut("ops/op").unwrap().ownership = Some(Ownership::default());
    assert!(bed.write().is_empty(), "they own nothing any more");
}

#[test]
fn a_shard_that_owns_nothing_yet_has_no_budget() {
    let mut bed = Bed::new(BREAKER, ROOT);
    let records = &mut bed.plan.compiled.operators;
    let table = records.get_mut("ops/op").unwrap().ownership.as_mut().unwrap();
    table.slots.values_mut().for_each(|owner| *owner = "r-2-normal".to_owned());
    table.namespaces.insert("shop-3".to_owned(), "elsewhere".to_owned());
    assert_eq!(bed.write(), [("ops/op/r-2-normal".to_owned(), 1900)], "a pinned namespace is its owner's");
    assert_eq!(bed.budget(), None);
    assert!(bed.programmed().1.ends_with("it owns nothing yet"));
}

#[test]
fn objects_of_cluster_scope_and_namespaces_count_by_their_own_slots() {
    let breaker = BREAKER.replace("sites, sites/status", "zones");
    let mut bed = Bed::new(&breaker, ROOT);
    let names: Vec<String> = (0..50).map(|number| format!("zone-{number}")).collect();
    let zones: Vec<(Option<&str>, &str)> = names.iter().map(|name| (None, name.as_str())).collect();
    bed.objects = ObjectCounts::of_kind("web.example.com", "zones", &zones);
    assert_eq!(bed.write().iter().map(|(_, objects)| objects).sum::<i64>(), 50);
    let one = Bed::new(&breaker.replace("namespaces: ['*']", "namespaces: [shop-3]"), ROOT);
    let sizes = Bed { objects: bed.objects, ..one }.write();
    assert_eq!(sizes.iter().map(|(_, objects)| objects).sum::<i64>(), 0, "they are in no namespace");
    let breaker = BREAKER.replace("[web.example.com]", "['']").replace("sites, sites/status", "namespaces");
    let mut bed = Bed::new(&breaker, ROOT);
    let mut snapshot = Snapshot::clone(&bed.plan.snapshot);
    snapshot.namespaces = (0..7).map(|number| format!("shop-{number}")).collect();
    bed.plan.snapshot = snapshot.into();
    assert_eq!(bed.write().iter().map(|(_, objects)| objects).sum::<i64>(), 7);
}

#[test]
fn growth_is_written_at_once_and_other_counts_may_wait() {
    let with = |objects: i64| {
        let size =
            ShareSize { limit: "a".to_owned(), shard: "b".to_owned(), objects, resource_rules_hash: String::new() };
        CircuitBreakerStatus { shares: vec![size], ..CircuitBreakerStatus::default() }
    };
    let may_wait = |before, after| CircuitBreaker::differ_in_counts_only(&with(before), &with(after));
    assert!(may_wait(10, 9) && !may_wait(10, 11));
    assert!(!CircuitBreaker::differ_in_counts_only(&CircuitBreakerStatus::default(), &with(1)));
}

#[test]
fn only_the_namespaces_of_the_rule_count() {
    let one = Bed::new(&BREAKER.replace("namespaces: ['*']", "namespaces: [shop-3]"), ROOT).write();
    assert_eq!(one.iter().map(|(_, objects)| objects).sum::<i64>(), 100, "{one:?}");
}

#[test]
fn what_is_not_counted_stays_and_is_said() {
    let mut bed = Bed::new(BREAKER, ROOT);
    let counted = bed.objects.clone();
    bed.objects = ObjectCounts::default();
    let (reason, message) = bed.programmed();
    assert_eq!(reason, "NotCounted");
    assert!(
        message.contains(
            "limit \"deletes\", shard ops/op/r-1-normal: sites of group \"web.example.com\" are not labelled"
        ),
        "{message}"
    );
    assert!(bed.write().is_empty() && bed.budget().is_none());
    bed.objects = counted;
    let sizes = bed.write();
    bed.objects = ObjectCounts::default();
    assert_eq!(bed.write(), sizes, "a new leader knows nothing yet");
    // The same limit, of other kinds.
    bed.object.spec.rate_limitings[0].resource_rules[0].resources = vec!["pages".to_owned()];
    assert!(bed.budget().is_none() && bed.write().is_empty());
}

#[test]
fn a_shard_by_hand_is_not_counted() {
    let bed = Bed::new(BREAKER, BY_HAND);
    let (reason, message) = bed.programmed();
    assert_eq!(reason, "NotCounted");
    assert!(message.ends_with("it is a shard by hand, and nobody knows what it owns"), "{message}");
    let no_shard = Bed::new(BREAKER, &BY_HAND.replace("{app: op}", "{app: other}"));
    let (reason, message) = no_shard.programmed();
    assert_eq!((reason.as_str(), message.as_str()), ("NotCounted", "pod op-0 is of no shard; pod op-1 is of no shard"));
}

#[test]
fn a_budget_follows_a_share_that_shrinks_at_once_and_one_that_grows_by_a_tenth() {
    let read = Breaker::from(&serde_saphyr::from_str::<CircuitBreaker>(BREAKER).unwrap());
    let guard = &read.rules[0].guard;
    for (before, now, stays) in [
        (1000, 1000, true),
        (1000, 1049, true),
        (1000, 1100, true),
        (1000, 1150, false),
        (1000, 999, false),
        (1049, 1001, true),
        (10, 60, true),
        (10, 100, false),
    ] {
        assert_eq!(is_near(guard, before, now), stays, "{before} {now}");
    }
}

use std::sync::Arc;
use std::time::SystemTime;

use ctrlmesh_common::api::TargetStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::*;
use crate::cluster::cache::Snapshot;
use crate::cluster::plan;
use crate::cluster::plan::Plan;
use crate::labels::ObjectCounts;
use crate::push::policy_store::Receipt;
use crate::rules::compile::PoliciesByPod;
use crate::rules::pod::PodName;
use crate::status::targets::ReceiptsByPod;

const BREAKER: &str = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1
kind: CircuitBreaker
metadata: {name: wild, namespace: ops, generation: 3}
spec:
  selector: {matchLabels: {app: a}}
  rateLimitings:
  - {name: creates, bucket: {burst: 5, interval: 1s, limit: 2}, resourceRules: [{apiGroups: [''], resources: [pods], verbs: [create], namespaces: ['*']}]}
  - {name: deletes, bucket: {burst: 5, interval: 1s, limit: 2}, resourceRules: [{apiGroups: [''], resources: [pods], verbs: [delete], namespaces: ['*']}]}
";

struct Bed {
    breaker: CachedBreaker,
    plan: Plan,
    receipts: ReceiptsByPod,
    objects: ObjectCounts,
}

impl Bed {
    fn new(breaker: &str, pods: &[&str]) -> Self {
        let pod = |name: &&str| {
            format!(
                "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: ops, uid: u-{name}, annotations: {{ctrlmesh.kusionstack.io/injected: 'true'}}, \
                 labels: {{app: a, ctrlmesh.kusionstack.io/enable-proxy: 'true'}}}}\nspec: {{containers: []}}\nstatus: {{podIP: 10.0.0.7}}\n"
            )
        };
        let text = breaker.to_owned() + &pods.iter().map(pod).collect::<String>();
        let plan = plan::of(Snapshot::of_manifests(&text), &PoliciesByPod::new());
        let object: CircuitBreaker = serde_saphyr::from_str(breaker).unwrap();
        let read = Breaker::from(&object);
        let breaker = CachedBreaker { object: Arc::new(object), read };
        Self { breaker, plan, receipts: ReceiptsByPod::new(), objects: ObjectCounts::default() }
    }

    /// The proxy of a pod reports these limits, and whether they are open since 5 s after 1970.
    fn report(&mut self, pod: &str, open: &[(&str, bool)]) {
        let name = PodName { namespace: "ops".to_owned(), name: pod.to_owned() };
        let state = |(rule, open): &(&str, bool)| GuardState {
            breaker: "ops/wild".to_owned(),
            rule: (*rule).to_owned(),
            open: *open,
            changed_at: if *open { 5_400 } else { 0 },
            allowed: 7,
            refused: 1,
            last_refused: String::new(),
        };
        let receipt = Receipt {
            uid: format!("u-{pod}"),
            node: None,
            by: Arc::from("proxy"),
            epoch: 1,
            digest: self.plan.sendable()[&name].digest(),
            refused: None,
            connected: true,
            lost: false,
            last_contact: SystemTime::UNIX_EPOCH,
            guards: open.iter().map(state).collect(),
            webhook: None,
        };
        self.receipts.insert(name, receipt);
    }

    fn status(&self) -> CircuitBreakerStatus {
        let (plan, receipts, now) = (&self.plan, &self.receipts, Timestamp::UNIX_EPOCH);
        of(&self.breaker, Observed { plan, receipts, objects: &self.objects, new_leader: false, now })
    }

    /// The status is written, and a new leader knows nothing else.
    fn write(&mut self) -> CircuitBreakerStatus {
        let status = self.status();
        let mut object = CircuitBreaker::clone(&self.breaker.object);
        object.status = Some(status.clone());
        self.breaker.object = Arc::new(object);
        self.receipts.clear();
        status
    }
}

fn shown(status: &CircuitBreakerStatus) -> Vec<String> {
    let shown = |one: &Condition| format!("{} {} {}: {}", one.type_, one.status, one.reason, one.message);
    status.conditions.iter().map(shown).collect()
}

#[test]
fn pods_and_their_limits_are_listed() {
    let mut bed = Bed::new(BREAKER, &["a", "b"]);
    bed.report("a", &[("creates", false), ("deletes", true), ("creates-of-before", true)]);
    let status = bed.status();
    assert_eq!(
        shown(&status),
        [
            "Accepted True Valid: it is valid and complete",
            "Programmed False Waiting: 1 of 2 proxies enforce it",
            "Open True Opened: limit \"deletes\" in pod a",
        ]
    );
    assert_eq!(status.observed_generation, Some(3));
    let [a, b] = &status.target_status[..] else { panic!("{status:?}") };
    assert_eq!((a.target.pod_name.as_deref(), a.target.pod_ip.as_deref()), (Some("a"), Some("10.0.0.7")));
    assert_eq!((&a.target.config_hash, &b.target.config_hash), (&status.current_spec_hash, &None));
    let limits: Vec<_> = a.limiting_snapshots.iter().map(|one| (one.name.as_str(), one.state, one.refused)).collect();
    assert_eq!(limits, [("creates", BreakerState::Closed, Some(1)), ("deletes", BreakerState::Opened, Some(1))]);
    let since = a.limiting_snapshots[1].last_transition_time.as_ref();
    assert_eq!(since.map(|time| time.0.as_second()), Some(5));
    assert!(b.limiting_snapshots.is_empty());
}

#[test]
fn what_rules_on_others_refused_is_listed_beside_the_limits() {
    let rules = "  trafficInterceptRules:\n  - {name: creates, interceptType: Whitelist, contentType: Normal, contents: [a], methods: ['*']}\n";
    let mut bed = Bed::new(&(BREAKER.to_owned() + rules), &["a"]);
    bed.report("a", &[("creates", true)]);
    let receipt = bed.receipts.values_mut().next().unwrap();
    let refused = GuardState { last_refused: "b:443".to_owned(), open: false, ..receipt.guards[0].clone() };
    receipt.guards = receipt.guards.iter().cloned().chain([refused]).collect();
    let status = bed.write();
    let [target] = &status.target_status[..] else { panic!("{status:?}") };
    assert_eq!(target.limiting_snapshots[0].state, BreakerState::Opened, "a limit may have the same name");
    assert_eq!(target.intercept_snapshots[0].last_refused, "b:443");
    assert_eq!(bed.status(), status, "a new leader knows nothing else");
}

#[test]
fn what_a_new_leader_does_not_know_stays() {
    let mut bed = Bed::new(BREAKER, &["a"]);
    bed.report("a", &[("creates", true)]);
    let first = bed.write();
    assert!(shown(&first)[1].contains("Acknowledged"), "{first:?}");
    assert_eq!(bed.status(), first);
    // A proxy that has started again does not know since when.
    bed.report("a", &[("creates", true)]);
    let receipt = bed.receipts.values_mut().next().unwrap();
    receipt.guards = receipt.guards.iter().map(|state| GuardState { changed_at: 0, ..state.clone() }).collect();
    assert_eq!(bed.status(), first);
}

#[test]
fn openings_and_closings_are_events_by_limit() {
    let mut bed = Bed::new(BREAKER, &["a", "b"]);
    bed.report("a", &[("creates", true), ("deletes", false)]);
    let first = bed.write();
    let said = |before: &CircuitBreakerStatus, after: &CircuitBreakerStatus| {
        let events = transitions(before, after).into_iter();
        events.map(|event| format!("{} {}", event.reason, event.message)).collect::<Vec<_>>()
    };
    assert_eq!(said(&CircuitBreakerStatus::default(), &first), ["BreakerOpened limit \"creates\" opened in pod a"]);
    bed.report("a", &[("creates", false), ("deletes", true)]);
    bed.report("b", &[("deletes", true)]);
    let second = bed.status();
    let expected =
        ["BreakerOpened limit \"deletes\" opened in pod a, b", "BreakerClosed limit \"creates\" closed in pod a"];
    assert_eq!(said(&first, &second), expected);
    assert!(said(&second, &second).is_empty());
}

#[test]
fn what_limits_nothing_says_why() {
    let programmed = |text: &str, pods: &[&str]| shown(&Bed::new(text, pods).status())[1].clone();
    assert!(programmed(BREAKER, &[]).contains("NoPods"));
    let off = BREAKER.replace("generation: 3", "labels: {circuitbreaker.ctrlmesh.kusionstack.io/disable: 'true'}");
    assert!(programmed(&off, &["a"]).contains("Disabled"));
    let invalid = BREAKER.replace("app: a", "app: '%'");
    assert!(programmed(&invalid, &["a"]).contains("Invalid"));
    let mut bed = Bed::new(BREAKER, &["a"]);
    bed.report("a", &[]);
    bed.receipts.values_mut().for_each(|receipt| receipt.refused = Some("unknown field `guards`".to_owned()));
    let status = bed.status();
    assert_eq!(shown(&status)[1], "Programmed False PolicyRefused: the proxy refuses its policy in pod a");
    let message = status.target_status[0].target.message.as_deref();
    assert_eq!(message, Some("its proxy refuses its policy: unknown field `guards`"));
}

#[test]
fn the_open_ones_stay_where_there_is_no_room_for_all() {
    let snapshot = |open| LimitingSnapshot {
        name: "r".to_owned(),
        state: if open { BreakerState::Opened } else { BreakerState::Closed },
        last_transition_time: None,
        allowed: None,
        refused: None,
    };
    let target = |opens| BreakerTargetStatus {
        target: TargetStatus::default(),
        limiting_snapshots: (0..64).map(|at| snapshot(opens && at == 63)).collect(),
        intercept_snapshots: Vec::new(),
    };
    let mut targets: Vec<_> = (0..500).map(|at| target(at >= 490)).collect();
    bound(&mut targets);
    assert_eq!(targets.len(), MAX_PODS);
    assert_eq!(opened(&targets)["r"].len(), 10);
    assert_eq!(targets.iter().map(|one| one.limiting_snapshots.len()).sum::<usize>(), MAX_SNAPSHOTS);
}

#[test]
fn who_has_a_part_is_not_forgotten_while_the_breaker_is_off() {
    let shared = BREAKER.replace("limit: 2}", "limit: 2, scope: Operator}");
    let mut bed = Bed::new(&shared, &["a", "b"]);
    let divided = |bed: &Bed| bed.status().divisions.iter().map(|one| one.pods.len()).collect::<Vec<_>>();
    assert_eq!(divided(&bed), [0], "nobody has acknowledged anything");
    bed.report("a", &[]);
    bed.report("b", &[]);
    assert_eq!(divided(&bed), [2]);
    let divisions = serde_json::json!({ "divisions": bed.status().divisions });
    let off = shared.replace("generation: 3", "labels: {circuitbreaker.ctrlmesh.kusionstack.io/disable: 'true'}");
    let mut bed = Bed::new(&format!("{off}status: {divisions}\n"), &["a", "b"]);
    assert_eq!(divided(&bed), [2], "their proxies may not know");
    bed.report("a", &[]);
    assert_eq!(divided(&bed), [1]);
    bed.report("b", &[]);
    assert!(divided(&bed).is_empty());
}

#[test]
fn a_pod_that_is_gone_has_closed_nothing() {
    let mut bed = Bed::new(BREAKER, &["a"]);
    bed.report("a", &[("creates", true)]);
    let first = bed.write();
    let none = Bed { breaker: bed.breaker, ..Bed::new(BREAKER, &[]) }.status();
    assert!(transitions(&first, &none).is_empty());
}

#[test]
fn rules_on_other_servers_count_as_limits_do() {
    let rules = "  trafficInterceptRules:\n  - {name: out, interceptType: Whitelist, contentType: Normal, contents: [CONTENT], methods: ['*']}\n";
    let with = |content: &str| BREAKER.to_owned() + &rules.replace("CONTENT", content);
    let mut bed = Bed::new(&with("a/v1"), &["a"]);
    bed.report("a", &[]);
    let conditions = shown(&bed.status());
    assert!(conditions[1].starts_with("Programmed True Acknowledged"), "{conditions:?}");
    assert!(conditions[3].starts_with("PathNotVisible True MatchedByHost"), "{conditions:?}");
    let plain = Bed::new(&with("a"), &["a"]).status();
    assert_eq!(plain.conditions.len(), 3);
    assert_ne!(plain.current_spec_hash, bed.status().current_spec_hash);
}

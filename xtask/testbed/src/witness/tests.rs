//! Logs as an API server writes them, with each fault, and without.

use std::time::Duration;

use ctrlmesh_common::slots::NamespaceHash;
use serde_json::{Value, json};

use super::{OperatorUnderTest, Verdict, Witness, missed};

/// The pods, and for whom each writes at first.
const PODS: [(&str, &str); 3] = [("a-0", "op-a"), ("b-0", "op-b"), ("old-0", "unsharded")];

/// A bound that none of these logs keeps a slot unowned for, unless it is the test's point.
const BOUND: Duration = Duration::from_secs(5);

#[derive(Default)]
struct Log {
    lines: Vec<Value>,
    /// How often the root was made again.
    root: usize,
}

impl Log {
    /// The object is of `op-a` in epoch 1 (version 10, second 10), of nobody in 2 (version 20), of `op-b` in 3 (30).
    fn of_a_move() -> Self {
        let mut log = Self::default();
        log.table(10, 1, Some("op-a"), None);
        log.table(20, 2, None, Some("op-a"));
        log.table(22, 3, Some("op-b"), None);
        log
    }

    /// The slot of the object's namespace has this owner from this version on; all others are of `op-c`.
    fn table(&mut self, version: i64, epoch: u64, owner: Option<&str>, former: Option<&str>) {
        self.table_with(version, json!({"epoch": epoch}), owner, former);
    }

    fn table_with(&mut self, version: i64, more: Value, owner: Option<&str>, former: Option<&str>) {
        let own = slot();
        let mut table = more;
        for slot in (0..32).map(|slot| slot.to_string()).filter(|slot| *slot != own) {
            table["slots"][slot] = json!("op-c");
        }
        for (pod, owner) in PODS {
            table["podUids"][format!("uid-{pod}")] = json!(owner);
        }
        if let Some(owner) = owner {
            table["slots"][&own] = json!(owner);
        }
        if let Some(former) = former {
            table["revoked"] = json!({"epoch": table["epoch"], "slots": {own: former}});
        }
        let root = json!({"resource": "shardingconfigs", "apiGroup": "ctrlmesh.kusionstack.io", "namespace": "ops",
            "name": "op-root", "subresource": "status"});
        let uid = self.root.to_string();
        let made =
            json!({"metadata": {"resourceVersion": version.to_string(), "uid": uid}, "status": {"ownership": table}});
        self.line(version, &root, ("manager", None), Some(&made));
    }

    /// A pod writes the object, which makes this version, in the second of the same number.
    fn write(&mut self, version: i64, pod: &str) {
        self.write_of(version, pod, "shop");
    }

    fn write_of(&mut self, version: i64, pod: &str, name: &str) {
        let made = json!({"metadata": {"resourceVersion": version.to_string()}});
        self.line(version, &map(name), ("op", Some(pod)), Some(&made));
    }

    fn line(&mut self, second: i64, of: &Value, (user, pod): (&str, Option<&str>), made: Option<&Value>) {
        let extra = pod.map(|pod| {
            json!({"authentication.kubernetes.io/pod-name": [pod],
                "authentication.kubernetes.io/pod-uid": [format!("uid-{pod}")]})
        });
        let at = jiff::Timestamp::from_second(second).unwrap().to_string();
        self.lines.push(json!({"kind": "Event", "apiVersion": "audit.k8s.io/v1", "stage": "ResponseComplete",
            "auditID": self.lines.len().to_string(), "verb": if made.is_some() { "patch" } else { "delete" },
            "requestURI": "/x", "user": {"username": format!("system:serviceaccount:ops:{user}"), "extra": extra.unwrap_or(json!({}))},
            "objectRef": of, "responseStatus": {"code": 200}, "responseObject": made,
            "requestReceivedTimestamp": at, "stageTimestamp": at}));
    }

    fn verdict(&self) -> Verdict {
        // As of two API servers, one log after the other.
        let mut witness = Witness::of(OperatorUnderTest {
            namespace: "ops".to_owned(),
            account: "op".to_owned(),
            root: "op-root".to_owned(),
            resources: ["configmaps".to_owned()].into(),
            hash: NamespaceHash::default(),
        });
        let (even, odd): (Vec<_>, Vec<_>) = (0..).zip(&self.lines).partition(|(number, _)| number % 2 == 0);
        even.into_iter().chain(odd).for_each(|(_, line)| witness.hear(&line.to_string()));
        witness.verdict()
    }

    fn is_clean(&self) {
        self.verdict().ensure_clean(BOUND).unwrap();
    }

    fn faults(&self) -> [usize; 3] {
        let verdict = self.verdict();
        assert!(verdict.ensure_clean(BOUND).is_err());
        [verdict.shared.len(), verdict.late.len(), verdict.foreign.len()]
    }
}

fn map(name: &str) -> Value {
    json!({"resource": "configmaps", "namespace": "shop", "name": name})
}

fn slot() -> String {
    NamespaceHash::default().slot("shop").to_string()
}

#[test]
fn a_move_with_one_writer_at_a_time_is_clean() {
    let mut log = Log::of_a_move();
    log.write(11, "a-0");
    // Begun before it was revoked: the proof is what waits for it.
    log.write(21, "a-0");
    log.write(23, "b-0");
    let verdict = log.verdict();
    verdict.ensure_clean(BOUND).unwrap();
    assert_eq!((verdict.writes, verdict.authors, verdict.epochs, verdict.most_turns()), (3, 2, 3, 1));
    assert_eq!(verdict.unowned, [(slot(), Duration::from_secs(2))].into());
    assert!(verdict.to_string().contains("1 slots moved, unowned for 2s at most"), "{verdict}");
}

#[test]
fn a_write_of_the_former_owner_after_the_grant_is_found() {
    let mut log = Log::of_a_move();
    log.write(23, "b-0");
    log.write(24, "a-0");
    assert_eq!(log.faults(), [1, 1, 0]);
    let verdict = log.verdict();
    assert!(verdict.to_string().contains("late: configmaps shop/shop, version 24, epoch 3"), "{verdict}");
    assert_eq!(verdict.shared[0].by, "op-b and op-a");
}

#[test]
fn a_late_write_is_found_where_the_new_owner_wrote_nothing() {
    let mut log = Log::of_a_move();
    log.write(24, "a-0");
    assert_eq!(log.faults(), [0, 1, 0]);
}

#[test]
fn a_write_before_the_grant_by_the_next_owner_is_found() {
    let mut log = Log::of_a_move();
    log.write(21, "b-0");
    assert_eq!(log.faults(), [0, 0, 1]);
}

#[test]
fn a_pod_that_no_table_has_writes_for_nobody() {
    let mut log = Log::of_a_move();
    log.write(23, "new-0");
    assert_eq!(log.faults(), [0, 0, 1]);
    let mut log = Log::of_a_move();
    log.write(9, "new-0");
    log.is_clean();
}

#[test]
fn a_slot_that_is_nobodys_for_long_is_found() {
    let mut log = Log::of_a_move();
    log.table(40, 4, None, Some("op-b"));
    log.write(47, "b-0");
    let verdict = log.verdict();
    assert_eq!(verdict.longest_unowned(), Duration::from_secs(7), "it still is");
    let error = verdict.ensure_clean(BOUND).unwrap_err().to_string();
    assert!(error.starts_with("a slot was unowned for longer than 5s"), "{error}");
}

#[test]
fn writes_are_ordered_by_version_and_not_by_time() {
    let mut log = Log::of_a_move();
    log.write(21, "a-0");
    // The other API server answered late.
    log.lines.last_mut().unwrap()["stageTimestamp"] = json!("1970-01-01T00:00:29Z");
    log.write(23, "b-0");
    log.is_clean();
    assert_eq!(log.verdict().most_turns(), 1);
}

#[test]
fn a_write_that_changed_nothing_is_none() {
    let mut log = Log::of_a_move();
    log.write(11, "a-0");
    log.write(23, "b-0");
    let nothing = json!({"metadata": {"resourceVersion": "11"}});
    log.line(25, &map("shop"), ("op", Some("b-0")), Some(&nothing));
    log.is_clean();
    assert_eq!((log.verdict().writes, log.verdict().ambiguous), (2, 0));
}

#[test]
fn what_changed_nothing_is_no_write_where_its_author_is_unknown() {
    let mut log = Log::of_a_move();
    // Whoever made version 21 ended before it was answered.
    let nothing = json!({"metadata": {"resourceVersion": "21"}});
    log.line(25, &map("shop"), ("op", Some("b-0")), Some(&nothing));
    log.write(26, "b-0");
    log.is_clean();
    assert_eq!(log.verdict().writes, 1);
}

#[test]
fn what_came_before_the_next_version_may_have_made_its_own() {
    let mut log = Log::of_a_move();
    log.write(21, "b-0");
    // The other API server answered late.
    log.lines.last_mut().unwrap()["stageTimestamp"] = json!("1970-01-01T00:00:29Z");
    log.write(26, "b-0");
    assert_eq!(log.faults(), [0, 0, 1]);
}

#[test]
fn of_two_with_one_version_the_owner_made_it() {
    let mut log = Log::of_a_move();
    log.write(23, "a-0");
    log.write(23, "b-0");
    // Answered later.
    log.lines.last_mut().unwrap()["stageTimestamp"] = json!("1970-01-01T00:00:24Z");
    log.is_clean();
    assert_eq!(log.verdict().ambiguous, 1);
}

#[test]
fn a_write_without_version_is_placed_by_its_time() {
    let mut log = Log::of_a_move();
    log.line(22, &map("shop"), ("op", Some("a-0")), None);
    log.is_clean();
    log.line(23, &map("shop"), ("op", Some("a-0")), None);
    assert_eq!(log.faults(), [0, 1, 0]);
}

#[test]
fn who_is_no_pod_of_the_operator_is_not_checked() {
    let mut log = Log::of_a_move();
    log.write(23, "b-0");
    let made = |version: &str| json!({"metadata": {"resourceVersion": version}});
    log.line(24, &map("shop"), ("op", None), Some(&made("24")));
    log.line(25, &map("shop"), ("another", Some("a-0")), Some(&made("25")));
    let mut other = map("shop");
    other["resource"] = json!("leases");
    log.line(26, &other, ("op", Some("a-0")), Some(&made("26")));
    log.is_clean();
    assert_eq!(log.verdict().writes, 1);
}

#[test]
fn refusals_and_dry_runs_are_no_writes() {
    let mut log = Log::of_a_move();
    log.write(23, "b-0");
    log.write(24, "a-0");
    log.lines.last_mut().unwrap()["responseStatus"]["code"] = json!(403);
    log.write(25, "a-0");
    log.lines.last_mut().unwrap()["requestURI"] = json!("/x?fieldManager=y&dryRun=All");
    log.is_clean();
}

#[test]
fn a_log_without_writes_proves_nothing() {
    let error = Log::of_a_move().verdict().ensure_clean(BOUND).unwrap_err().to_string();
    assert!(error.starts_with("no write was checked"), "{error}");
}

#[test]
fn a_pinned_or_a_taken_namespace_counts_before_its_slot() {
    let mut log = Log::default();
    log.table_with(10, json!({"epoch": 1, "namespaces": {"shop": "op-b"}}), Some("op-a"), None);
    log.write(11, "b-0");
    log.is_clean();
    log.table_with(20, json!({"epoch": 2}), Some("op-a"), None);
    let table = &mut log.lines.last_mut().unwrap()["responseObject"]["status"]["ownership"];
    table["revoked"] = json!({"epoch": 2, "namespaces": {"shop": "op-b"}});
    log.write(21, "b-0");
    log.is_clean();
    log.write_of(22, "a-0", "other");
    assert_eq!(log.faults(), [0, 0, 1]);
}

#[test]
fn without_a_root_nothing_is_anybodys() {
    let mut log = Log::of_a_move();
    log.table(30, 4, Some("unsharded"), None);
    log.write(31, "old-0");
    log.table(32, 4, Some("unsharded"), None);
    log.table(33, 5, Some("unsharded"), None);
    let made = &mut log.lines.last_mut().unwrap()["responseObject"];
    made["metadata"]["deletionTimestamp"] = json!("1970-01-01T00:00:32Z");
    // Not a version of its own.
    made["metadata"]["resourceVersion"] = json!("30");
    log.write(34, "a-0");
    log.is_clean();
    log.root += 1;
    log.table(40, 5, Some("op-b"), None);
    log.write(41, "old-0");
    assert_eq!(log.faults(), [0, 1, 0]);
}

#[test]
fn what_any_owner_may_have_had_has_one_writer_yet() {
    let mut log = Log::default();
    log.table(10, 1, None, Some(""));
    log.write(11, "a-0");
    log.is_clean();
    log.write(12, "b-0");
    assert_eq!(log.faults(), [1, 0, 0]);
}

#[test]
fn a_root_that_is_made_again_counts_its_epochs_anew() {
    let mut log = Log::of_a_move();
    log.write(23, "b-0");
    log.root += 1;
    log.table(40, 3, Some("op-a"), None);
    log.write(41, "a-0");
    assert!(log.verdict().shared.is_empty(), "epoch 3 of another root");
}

#[test]
fn objects_that_nobody_worked_on_are_missed() {
    let object = |name: &str, generation: i64, observed: i64| {
        json!({"metadata": {"namespace": "shop", "name": name, "generation": generation},
            "status": {"observedGeneration": observed}})
    };
    let all = [
        object("done", 2, 2),
        object("late", 3, 2),
        json!({"metadata": {"namespace": "shop", "name": "new", "generation": 1}}),
    ];
    assert_eq!(missed(&all), ["shop/late", "shop/new"]);
}

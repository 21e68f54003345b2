use ctrlmesh_common::policy::Guard;
use ctrlmesh_common::policy::guard::{Bucket, RequestMatch, Trigger};
use tempfile::TempDir;
use tokio::sync::watch;

use super::*;

fn guard(rule: &str, trigger: Trigger) -> Guard {
    let all = || vec!["*".to_owned()];
    let requests = RequestMatch { api_groups: all(), resources: all(), verbs: all(), namespaces: all() };
    Guard {
        breaker: "ops/wild".to_owned(),
        rule: rule.to_owned(),
        bucket: Some(Bucket { burst: 1, limit: 0, interval_nanoseconds: 1 }),
        trigger,
        sleeping_window_nanoseconds: None,
        requests: vec![requests],
        reset: None,
    }
}

fn policy(epoch: u64, guards: &[Guard]) -> Arc<Policy> {
    Arc::new(Policy { epoch, guards: guards.to_vec(), ..Policy::default() })
}

struct Bed {
    policy: watch::Sender<Arc<Policy>>,
    metrics: Arc<Metrics>,
    folder: TempDir,
    guards: Arc<PodGuards>,
}

impl Bed {
    fn new(guards: &[Guard]) -> Self {
        let (policy, current) = watch::channel(policy(1, guards));
        let (metrics, folder) = (Metrics::new(), TempDir::new().unwrap());
        let kept = GuardFile::of(folder.path(), None, "u");
        let guards = PodGuards::new(current, &metrics, Some(kept));
        Self { policy, metrics, folder, guards }
    }

    /// The guards of the next process, for a pod with this UID.
    fn next(&self, uid: &str) -> Arc<PodGuards> {
        let kept = GuardFile::of(self.folder.path(), None, uid);
        PodGuards::new(self.policy.subscribe(), &Metrics::new(), Some(kept))
    }

    fn shows(&self, line: &str) -> bool {
        let page = self.metrics.render().unwrap();
        page.lines().any(|shown| shown == format!("ctrlmesh_proxy_guard_{line}"))
    }
}

fn passes(guards: &Arc<PodGuards>) -> bool {
    guards.admit(&RequestInfo::parse("GET", "/api/v1/pods").unwrap()).is_ok()
}

#[test]
fn a_change_of_the_policy_counts_from_the_next_request_on() {
    let bed = Bed::new(&[]);
    assert!(passes(&bed.guards) && passes(&bed.guards));
    bed.policy.send_replace(policy(2, &[guard("one", Trigger::ForceOpened)]));
    assert!(!passes(&bed.guards));
    assert!(bed.shows(r#"open{rule="ops/wild/one"} 1"#));
    assert!(bed.shows(r#"requests_total{rule="ops/wild/one",outcome="refused"} 1"#));
    bed.policy.send_replace(policy(3, &[guard("one", Trigger::ForceClosed)]));
    assert!(passes(&bed.guards) && bed.shows(r#"open{rule="ops/wild/one"} 0"#));
    bed.policy.send_replace(policy(4, &[]));
    assert!(passes(&bed.guards) && !bed.metrics.render().unwrap().contains("ops/wild"));
}

#[test]
fn open_breakers_are_kept_for_the_same_pod() {
    let bed = Bed::new(&[guard("one", Trigger::Normal)]);
    assert!(passes(&bed.guards) && passes(&bed.next("u")), "a bucket is full in the next process");
    assert!(!passes(&bed.guards));
    bed.guards.save();
    assert!(!passes(&bed.next("u")) && passes(&bed.next("another")));
    bed.policy.send_replace(policy(2, &[Guard { reset: Some("one".to_owned()), ..guard("one", Trigger::Normal) }]));
    assert!(passes(&bed.guards));
    bed.guards.save();
    assert!(passes(&bed.next("u")));
}

#[test]
fn a_file_that_is_not_whole_begins_closed() {
    let bed = Bed::new(&[guard("one", Trigger::Normal)]);
    assert!(passes(&bed.guards) && !passes(&bed.guards));
    bed.guards.save();
    assert!(!passes(&bed.next("u")));
    let file = bed.folder.path().join("guards").join("_");
    let text = std::fs::read_to_string(&file).unwrap();
    let (head, content) = text.split_once('\n').unwrap();
    let flip = |last: char| if last == '0' { '1' } else { '0' };
    let (sum, last) = head.split_at(head.len() - 1);
    std::fs::write(&file, format!("{sum}{}\n{content}", last.chars().map(flip).collect::<String>())).unwrap();
    assert!(passes(&bed.next("u")));
}

#[test]
fn a_probe_without_an_answer_has_failed() {
    let window = Guard {
        bucket: Some(Bucket { burst: 1, limit: 1, interval_nanoseconds: 1 }),
        sleeping_window_nanoseconds: Some(1),
        ..guard("one", Trigger::Normal)
    };
    let info = RequestInfo::parse("GET", "/api/v1/pods").unwrap();
    for (status, closes) in
        [(Some(200), true), (Some(404), true), (Some(429), false), (Some(503), false), (None, false)]
    {
        let bed = Bed::new(std::slice::from_ref(&window));
        // As another process left it.
        let open = r#"[{"guard": GUARD, "until": 0}]"#.replace("GUARD", &serde_json::to_string(&window).unwrap());
        lock(&bed.guards.state).guards = Guards::restored(serde_json::from_str(&open).unwrap(), Moment(0));
        bed.policy.send_replace(policy(2, std::slice::from_ref(&window)));
        lock(&bed.guards.state).shown = u64::MAX;
        let unsent = bed.guards.admit(&info).unwrap().expect("the first is the probe");
        assert!(bed.guards.admit(&info).is_err(), "one probe at a time");
        drop(unsent);
        let mut probe = bed.guards.admit(&info).unwrap().expect("the other one was not sent");
        probe.sent();
        match status {
            Some(status) => probe.answered(StatusCode::from_u16(status).unwrap()),
            None => drop(probe),
        }
        let is_open = bed.shows(r#"open{rule="ops/wild/one"} 1"#);
        assert_eq!(!is_open, closes, "{status:?}");
    }
}

#[tokio::test]
async fn a_change_shows_without_a_request() {
    let bed = Bed::new(&[]);
    let drain = Drain::default();
    drain.spawn(bed.guards.clone().follow(drain.clone(), None));
    bed.policy.send_replace(policy(2, &[guard("one", Trigger::ForceOpened)]));
    while !bed.shows(r#"open{rule="ops/wild/one"} 1"#) {
        task::yield_now().await;
    }
    assert!(drain.finish(Duration::from_mins(1)).await);
}

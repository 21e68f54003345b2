use ctrlmesh_common::policy::guard::{Bucket, RequestMatch, Trigger};
use ctrlmesh_common::policy::{Guard, Policy};
use tempfile::TempDir;
use tokio::sync::watch;

use super::*;
use crate::policy::GuardReports;

fn guard(rule: &str, trigger: Trigger) -> Guard {
    let all = || vec!["*".to_owned()];
    let requests = RequestMatch {
        api_groups: all(),
        resources: all(),
        verbs: all(),
        namespaces: all(),
        ..RequestMatch::default()
    };
    Guard {
        breaker: "ops/wild".to_owned(),
        rule: rule.to_owned(),
        bucket: Some(Bucket { burst: 1, limit: 0, interval_nanoseconds: 1 }),
        budget: None,
        part: None,
        trigger,
        sleeping_window_nanoseconds: None,
        requests: vec![requests],
        urls: Vec::new(),
        reset: None,
        holds: false,
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
    guards.admit(&RequestInfo::parse("GET", "/api/v1/pods").unwrap(), false).is_ok()
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
        let unsent = bed.guards.admit(&info, false).unwrap().expect("the first is the probe");
        assert!(bed.guards.admit(&info, false).is_err(), "one probe at a time");
        drop(unsent);
        let mut probe = bed.guards.admit(&info, false).unwrap().expect("the other one was not sent");
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
    drain.spawn(bed.guards.clone().follow(PublishGuards::default(), drain.clone(), None));
    bed.policy.send_replace(policy(2, &[guard("one", Trigger::ForceOpened)]));
    while !bed.shows(r#"open{rule="ops/wild/one"} 1"#) {
        task::yield_now().await;
    }
    assert!(drain.finish(Duration::from_mins(1)).await);
}

#[tokio::test(start_paused = true)]
async fn what_guards_did_is_published_at_most_once_a_second() {
    let bed = Bed::new(&[guard("one", Trigger::Normal)]);
    let (reports, drain) = (GuardReports::default(), Drain::default());
    let publish = reports.begin("ops/a".parse().unwrap());
    drain.spawn(bed.guards.clone().follow(publish, drain.clone(), None));
    let mut changes = reports.changes();
    let mut next = async || {
        let begun = Instant::now();
        changes.changed().await.unwrap();
        let states = changes.borrow_and_update().values().flat_map(|one| one.state.to_vec()).collect::<Vec<_>>();
        let states = states.iter().map(|one| (one.open, one.changed_at > 0, one.allowed, one.refused));
        (states.collect::<Vec<_>>(), begun.elapsed())
    };
    assert_eq!(next().await.0, [(false, false, 0, 0)]);
    assert!(passes(&bed.guards));
    assert!(!passes(&bed.guards));
    assert_eq!(next().await, (vec![(true, true, 1, 1)], REPORT_INTERVAL));
    assert!(!passes(&bed.guards));
    assert_eq!(next().await, (vec![(true, true, 1, 2)], REPORT_INTERVAL + COUNTS_INTERVAL), "counts alone");
    bed.policy.send_replace(policy(2, &[]));
    assert_eq!(next().await, (vec![], REPORT_INTERVAL));
    assert!(drain.finish(REPORT_INTERVAL).await);
    assert!(changes.borrow().is_empty());
}

/// As a session does it.
async fn admit_or_hold(guards: &Arc<PodGuards>) -> Result<Option<Probe>, Refused> {
    let info = RequestInfo::parse("GET", "/api/v1/pods").unwrap();
    let mut hold = guards.hold().unwrap();
    loop {
        let may_hold = hold.goes_on();
        match guards.admit(&info, may_hold) {
            Err(refused) if may_hold && refused.holds => hold.wait(&refused).await,
            done => return done,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_is_held_until_the_breaker_closes() {
    let holding = |trigger| Guard { holds: true, ..guard("one", trigger) };
    let bed = Bed::new(&[holding(Trigger::Normal)]);
    assert!(admit_or_hold(&bed.guards).await.is_ok());
    let begun = Instant::now();
    let refused = admit_or_hold(&bed.guards).await.unwrap_err();
    assert_eq!((refused.holds, begun.elapsed()), (true, HOLD));
    assert!(bed.shows(r#"requests_total{rule="ops/wild/one",outcome="refused"} 1"#), "once");
    let reset = Guard { reset: Some("one".to_owned()), ..holding(Trigger::Normal) };
    let (held, ()) = tokio::join!(admit_or_hold(&bed.guards), async {
        time::sleep(HOLD / 2).await;
        bed.policy.send_replace(policy(2, &[reset]));
        drop(bed.guards.latest_state());
    });
    assert!(held.is_ok());
    assert_eq!(begun.elapsed(), HOLD * 3 / 2);
    // A limiter holds nothing, and neither does a breaker beside a rule that refuses at once.
    for others in
        [vec![holding(Trigger::LimiterOnly)], vec![holding(Trigger::ForceOpened), guard("two", Trigger::ForceOpened)]]
    {
        let bed = Bed::new(&others);
        let begun = Instant::now();
        drop(admit_or_hold(&bed.guards).await);
        assert!(admit_or_hold(&bed.guards).await.is_err());
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }
}

#[test]
fn no_more_than_some_requests_are_held() {
    let bed = Bed::new(&[]);
    let held: Vec<Hold> = std::iter::from_fn(|| bed.guards.hold()).take(MAX_HELD + 1).collect();
    assert_eq!(held.len(), MAX_HELD);
    drop(held);
    assert!(bed.guards.hold().is_some());
}

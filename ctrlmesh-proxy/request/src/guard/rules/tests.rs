use ctrlmesh_common::policy::egress::{UrlParts, UrlRequest};
use ctrlmesh_common::policy::guard::{Bucket, Part, RequestMatch, Trigger};
use proptest::prelude::*;

use super::*;

const SECOND: u64 = 1_000_000_000;

/// A limiter of this many requests for `resource`, and none after.
fn limiter(rule: &str, resource: &str, burst: u32) -> Guard {
    let all = || vec!["*".to_owned()];
    let requests = RequestMatch {
        api_groups: all(),
        resources: vec![resource.to_owned()],
        verbs: all(),
        namespaces: all(),
        ..RequestMatch::default()
    };
    Guard {
        breaker: "ops/wild".to_owned(),
        rule: rule.to_owned(),
        bucket: Some(Bucket { burst, limit: 0, interval_nanoseconds: SECOND }),
        budget: None,
        part: None,
        trigger: Trigger::LimiterOnly,
        sleeping_window_nanoseconds: None,
        requests: vec![requests],
        urls: Vec::new(),
        reset: None,
        holds: false,
    }
}

fn breaker(rule: &str, resource: &str, burst: u32) -> Guard {
    Guard { trigger: Trigger::Normal, ..limiter(rule, resource, burst) }
}

fn guards(guards: &[Guard]) -> Guards {
    let mut all = Guards::default();
    all.replace(guards, Moment(0));
    all
}

/// Asks for a pod, at a moment.
fn ask(guards: &mut Guards, now: u64) -> Result<Admitted, (Refused, Vec<usize>)> {
    guards.admit(&RequestInfo::parse("GET", "/api/v1/namespaces/a/pods/p").unwrap(), Moment(now))
}

/// The rule that refuses a pod.
fn refuses(guards: &mut Guards) -> Option<String> {
    ask(guards, 0).err().map(|(refused, _)| refused.rule)
}

fn open(guards: &Guards) -> Vec<&str> {
    guards.states().filter(|(_, is_open)| *is_open).map(|(guard, _)| guard.rule.as_str()).collect()
}

#[test]
fn requests_to_other_servers_are_counted_by_their_url() {
    let url = UrlParts {
        host: "api.example.com".to_owned(),
        port: Some(8080),
        path: Some("/v1/*".to_owned()),
        ..UrlParts::default()
    };
    let post = UrlRequest { url, method: "POST".to_owned() };
    let mut guards = guards(&[Guard { requests: Vec::new(), urls: vec![post], ..limiter("posts", "", 1) }]);
    let mut asks = |host, port, request| {
        let asked = guards.admit_egress(&Visible { scheme: None, host, port, request }, Moment(0));
        asked.map(|admitted| admitted.charged.len()).map_err(|(refused, _)| refused.rule)
    };
    let host = "api.example.com";
    assert_eq!(asks(host, 8080, Some(("GET", "/v1/a"))), Ok(0));
    assert_eq!(asks(host, 8080, Some(("POST", "/v2"))), Ok(0));
    assert_eq!(asks(host, 8081, Some(("POST", "/v1/a"))), Ok(0));
    assert_eq!(asks("example.com", 8080, Some(("POST", "/v1/a"))), Ok(0));
    assert_eq!(asks(host, 8080, Some(("POST", "/v1/a"))), Ok(1));
    assert_eq!(asks(host, 8080, Some(("POST", "/v1/b"))), Err("posts".to_owned()));
    assert_eq!(asks(host, 8080, None), Err("posts".to_owned()), "what is not seen may be one");
    assert_eq!(ask(&mut guards, 0), Ok(Admitted::default()), "the API server is another server");
}

#[test]
fn a_request_that_one_rule_refuses_is_charged_to_none() {
    let mut guards = guards(&[limiter("two", "*", 2), limiter("one", "pods", 1), limiter("other", "services", 0)]);
    assert_eq!(ask(&mut guards, 0), Ok(Admitted { charged: vec![0, 1], probe: None }));
    for _ in 0..5 {
        assert_eq!(refuses(&mut guards).as_deref(), Some("one"));
    }
    let nodes = RequestInfo::parse("GET", "/api/v1/nodes/n").unwrap();
    assert!(guards.admit(&nodes, Moment(0)).is_ok(), "one is left of two");
    assert_eq!(guards.admit(&nodes, Moment(0)).unwrap_err().1, [0]);
}

#[test]
fn a_request_that_no_rule_matches_costs_nothing() {
    let mut guards = guards(&[breaker("one", "services", 1)]);
    for _ in 0..5 {
        assert_eq!(ask(&mut guards, 0), Ok(Admitted::default()));
    }
}

#[test]
fn the_refusal_with_the_longest_wait_is_named() {
    let timed = |rule: &str, limit| {
        let bucket = Some(Bucket { burst: 1, limit, interval_nanoseconds: 60 * SECOND });
        Guard { bucket, ..limiter(rule, "pods", 1) }
    };
    for order in [[("a", 6), ("b", 1), ("c", 3)], [("c", 3), ("a", 6), ("b", 1)]] {
        let mut guards = guards(&order.map(|(rule, limit)| timed(rule, limit)));
        assert!(ask(&mut guards, 0).is_ok());
        let (refused, refusing) = ask(&mut guards, 0).unwrap_err();
        assert_eq!((refused.rule.as_str(), refused.retry_after, refusing.len()), ("b", Some(60), 3));
    }
    let mut guards = guards(&[timed("a", 1), limiter("never", "pods", 1), timed("b", 1)]);
    assert!(ask(&mut guards, 0).is_ok());
    let (refused, _) = ask(&mut guards, 0).unwrap_err();
    assert_eq!((refused.rule.as_str(), refused.retry_after), ("never", None));
}

#[test]
fn a_rule_keeps_bucket_and_state_while_its_fields_stay() {
    let (kept, other) = (breaker("kept", "*", 1), breaker("other", "nodes", 1));
    let mut guards = guards(&[kept.clone(), other.clone()]);
    assert!(ask(&mut guards, 0).is_ok() && ask(&mut guards, 0).is_err());
    let changed = Guard { bucket: Some(Bucket { burst: 9, ..other.bucket.unwrap() }), ..other };
    guards.replace(&[changed.clone(), limiter("new", "pods", 3), kept.clone()], Moment(0));
    assert_eq!(open(&guards), ["kept"]);
    assert_eq!(refuses(&mut guards).as_deref(), Some("kept"));
    // Its own fields change, so it begins anew.
    let widened = Guard { bucket: Some(Bucket { burst: 2, ..kept.bucket.unwrap() }), ..kept };
    guards.replace(&[changed, widened], Moment(0));
    assert!(open(&guards).is_empty() && ask(&mut guards, 0).is_ok());
}

#[test]
fn each_new_value_of_a_reset_closes_once() {
    let rule = breaker("one", "pods", 1);
    let with = |reset: Option<&str>| [Guard { reset: reset.map(str::to_owned), ..rule.clone() }];
    let mut guards = guards(&with(None));
    let opens = |guards: &mut Guards| {
        let passed = ask(guards, 0).is_ok();
        assert!(ask(guards, 0).is_err());
        passed
    };
    assert!(opens(&mut guards));
    for (reset, closes) in [
        (Some("one"), true),
        (Some("one"), false),
        (None, false),
        (Some("one"), false),
        (Some("one 2"), true),
        (Some("one 2"), false),
    ] {
        guards.replace(&with(reset), Moment(0));
        assert_eq!(opens(&mut guards), closes, "{reset:?}");
    }
}

#[test]
fn a_probe_closes_every_breaker_that_it_was_for() {
    let timed = |rule: &str| Guard {
        bucket: Some(Bucket { burst: 1, limit: 1, interval_nanoseconds: 1 }),
        sleeping_window_nanoseconds: Some(SECOND),
        ..breaker(rule, "pods", 1)
    };
    let mut guards = guards(&[timed("a"), timed("b"), limiter("c", "pods", 9)]);
    assert!(ask(&mut guards, 0).is_ok() && ask(&mut guards, 0).is_err());
    assert_eq!(open(&guards), ["a", "b"]);
    let admitted = ask(&mut guards, SECOND).unwrap();
    assert_eq!(admitted.charged, [0, 1, 2]);
    assert!(ask(&mut guards, SECOND + 5).is_err(), "one probe at a time");
    guards.probe_ended(admitted.probe.unwrap(), true, Moment(SECOND + 9));
    assert!(open(&guards).is_empty());
    assert_eq!(ask(&mut guards, SECOND + 9).map(|admitted| admitted.probe), Ok(None));
}

#[test]
fn what_is_open_is_open_in_the_next_process() {
    let timed = Guard { sleeping_window_nanoseconds: Some(9 * SECOND), ..breaker("timed", "pods", 1) };
    let manual = Guard { reset: Some("manual".to_owned()), ..breaker("manual", "pods", 1) };
    let all = [timed, manual, limiter("limiter", "pods", 1), breaker("closed", "nodes", 1)];
    let mut guards = guards(&all);
    assert!(ask(&mut guards, SECOND).is_ok() && ask(&mut guards, SECOND).is_err());
    let kept = serde_json::to_string(&guards.open()).unwrap();
    // The next process may begin with another clock.
    for (now, timed_until) in [(2 * SECOND, 10 * SECOND), (0, 9 * SECOND)] {
        let mut next = Guards::restored(serde_json::from_str(&kept).unwrap(), Moment(now));
        next.replace(&all, Moment(0));
        assert_eq!(open(&next), ["timed", "manual"]);
        let timed = next.open().remove(0);
        assert_eq!(timed.until, Some(Moment(timed_until)));
    }
    let mut next = Guards::restored(serde_json::from_str(&kept).unwrap(), Moment(0));
    next.replace(&all.map(|guard| Guard { reset: Some("again".to_owned()), ..guard }), Moment(0));
    assert!(open(&next).is_empty(), "it was reset meanwhile");
}

proptest! {
    #[test]
    fn the_order_of_rules_does_not_matter(
        rules in prop::collection::vec((0..3_usize, 1..6_u32, 0..4_u32, 0..3_usize), 1..6)
            .prop_flat_map(|rules| (Just(rules.clone()), Just(rules).prop_shuffle())),
        requests in prop::collection::vec((0..3_usize, 0..50_u64), 1..60),
    ) {
        const RESOURCES: [&str; 3] = ["pods", "nodes", "*"];
        const TRIGGERS: [(Trigger, Option<u64>); 3] =
            [(Trigger::LimiterOnly, None), (Trigger::Normal, Some(30)), (Trigger::Normal, None)];
        let of = |rules: &[(usize, u32, u32, usize)]| {
            let named = rules.iter().map(|(resource, burst, limit, trigger)| {
                let (trigger, sleeping_window_nanoseconds) = TRIGGERS[*trigger];
                let bucket = Some(Bucket { burst: *burst, limit: *limit, interval_nanoseconds: 20 });
                let rule = format!("{resource} {burst} {limit} {trigger:?} {sleeping_window_nanoseconds:?}");
                Guard { bucket, trigger, sleeping_window_nanoseconds, ..limiter(&rule, RESOURCES[*resource], 1) }
            });
            guards(&named.collect::<Vec<_>>())
        };
        let (mut one, mut other) = (of(&rules.0), of(&rules.1));
        let mut now = 0;
        for (resource, step) in requests {
            now += step;
            let target = format!("/api/v1/{}/x", ["pods", "nodes", "services"][resource]);
            let request = RequestInfo::parse("GET", &target).unwrap();
            let answers = [&mut one, &mut other].map(|guards| {
                let answer = guards.admit(&request, Moment(now));
                if let Some(probe) = answer.as_ref().ok().and_then(|admitted| admitted.probe) {
                    guards.probe_ended(probe, now % 2 == 0, Moment(now));
                }
                answer.map(|admitted| (admitted.charged.len(), admitted.probe)).map_err(|(refused, _)| refused)
            });
            prop_assert_eq!(&answers[0], &answers[1]);
            let open = |guards: &Guards| {
                let mut open: Vec<_> = open(guards).into_iter().map(str::to_owned).collect();
                open.sort();
                open
            };
            prop_assert_eq!(open(&one), open(&other));
        }
    }
}

#[test]
fn an_older_part_of_the_same_bucket_is_not_taken() {
    let part = |group: &str, generation, of| Part { group: group.to_owned(), generation, of, number: Some(0) };
    let with = |part| Guard { part: Some(part), ..breaker("one", "pods", 9) };
    let mut guards = guards(&[with(part("ops/op", 7, 3))]);
    let parts = |guards: &Guards| guards.states().map(|(guard, _)| guard.part.clone().unwrap()).collect::<Vec<_>>();
    for reset in [None, Some("one".to_owned())] {
        guards.replace(&[Guard { reset, ..with(part("ops/op", 6, 1)) }], Moment(0));
        assert_eq!(parts(&guards), [part("ops/op", 7, 3)]);
    }
    for newer in [part("ops/op", 8, 2), part("ops/op/shard", 1, 1)] {
        guards.replace(&[with(newer.clone())], Moment(0));
        assert_eq!(parts(&guards), [newer]);
    }
}

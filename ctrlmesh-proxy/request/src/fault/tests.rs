use ctrlmesh_common::policy::fault::{Abort, ApiFault, Delay, HeaderMatch, HttpMatch, Times};
use ctrlmesh_common::policy::guard::RequestMatch;
use proptest::prelude::*;

use super::*;

fn fault(name: &str) -> Fault {
    Fault {
        injection: "ops/storm".to_owned(),
        fault: name.to_owned(),
        delay: None,
        abort: None,
        api_fault: None,
        requests: Vec::new(),
        http: Vec::new(),
        times: None,
        includes_lock: false,
    }
}

pub(super) fn abort(name: &str, status: u16, share: Share) -> Fault {
    Fault { abort: Some(Abort { status, share }), ..fault(name) }
}

pub(super) fn delay(name: &str, nanoseconds: u64) -> Fault {
    Fault { delay: Some(Delay { nanoseconds, jitter_nanoseconds: 0, share: WHOLE }), ..fault(name) }
}

pub(super) fn api(name: &str, kind: ApiFaultKind) -> Fault {
    Fault { api_fault: Some(ApiFault { kind, share: WHOLE }), ..fault(name) }
}

pub(super) fn noon() -> Timestamp {
    "2026-11-26T12:00:00Z".parse().unwrap()
}

/// What a request meets at noon, with dice that always show `shown`.
fn met_with(faults: &[Fault], method: &str, target: &str, is_for_lock: bool, shown: Share) -> Effects {
    let info = RequestInfo::parse(method, target).unwrap();
    let path = target.split('?').next().unwrap_or_default();
    let has_header = |name: &str, value: &str| name.eq_ignore_ascii_case("user-agent") && value == "op/1";
    let request =
        FaultyRequest { info: &info, method, host: "Kubernetes.default", path, has_header: &has_header, is_for_lock };
    Faults::new(faults).unwrap().effects(request, noon(), &mut || shown)
}

pub(super) fn met(faults: &[Fault], method: &str, target: &str) -> Effects {
    met_with(faults, method, target, false, 0)
}

pub(super) const PODS: &str = "/api/v1/namespaces/a/pods";

#[test]
fn delays_add_up_and_the_first_abort_ends() {
    let faults = [delay("one", 5), delay("two", 7), abort("no", 500, 0), abort("yes", 503, WHOLE), delay("late", 9)];
    let effects = met(&faults, "GET", PODS);
    let answer = effects.answer.clone().unwrap();
    assert_eq!((effects.delay, answer.code, answer.reason), (12, 503, "ServiceUnavailable"));
    assert!(answer.message.contains("fault \"yes\" of FaultInjection ops/storm"), "{answer:?}");
    assert_eq!(effects.hits.iter().map(|hit| hit.rule).collect::<Vec<_>>(), [0, 1, 3]);
}

#[test]
fn a_share_of_none_never_hits_and_of_all_always() {
    for shown in [0, WHOLE / 2, WHOLE - 1] {
        assert_eq!(met_with(&[abort("a", 500, 0)], "GET", PODS, false, shown), Effects::default());
        assert!(met_with(&[abort("a", 500, WHOLE)], "GET", PODS, false, shown).answer.is_some());
    }
}

#[test]
fn the_lock_is_spared_unless_the_fault_includes_it() {
    let lease = "/apis/coordination.k8s.io/v1/namespaces/ops/leases/op";
    let mut faults = [abort("a", 500, WHOLE)];
    assert_eq!(met_with(&faults, "PUT", lease, true, 0), Effects::default());
    assert!(met_with(&faults, "PUT", lease, false, 0).answer.is_some());
    faults[0].includes_lock = true;
    assert!(met_with(&faults, "PUT", lease, true, 0).answer.is_some());
}

#[test]
fn resources_and_http_must_both_match() {
    let one = |text: &str| vec![text.to_owned()];
    let lists = RequestMatch {
        api_groups: one(""),
        resources: one("pods"),
        verbs: one("list"),
        namespaces: one("*"),
        ..RequestMatch::default()
    };
    let with = |http: HttpMatch| Fault { requests: vec![lists.clone()], http: vec![http], ..abort("a", 500, WHOLE) };
    let header = |value: &str| HeaderMatch { name: "User-Agent".to_owned(), value: value.to_owned() };
    for (http, expected) in [
        (HttpMatch::default(), true),
        (HttpMatch { host: Some(TextMatch::Exact("kubernetes.DEFAULT".to_owned())), ..HttpMatch::default() }, true),
        (HttpMatch { host: Some(TextMatch::Regex("kubernetes".to_owned())), ..HttpMatch::default() }, false),
        (HttpMatch { path: Some(TextMatch::Regex("/api/.*/pods".to_owned())), ..HttpMatch::default() }, true),
        (HttpMatch { path: Some(TextMatch::Exact("/api".to_owned())), ..HttpMatch::default() }, false),
        (HttpMatch { method: Some("GET".to_owned()), ..HttpMatch::default() }, true),
        (HttpMatch { method: Some("POST".to_owned()), ..HttpMatch::default() }, false),
        (HttpMatch { headers: vec![header("op/1")], ..HttpMatch::default() }, true),
        (HttpMatch { headers: vec![header("op/1"), header("op/2")], ..HttpMatch::default() }, false),
    ] {
        let faults = [with(http.clone())];
        assert_eq!(met(&faults, "GET", &format!("{PODS}?limit=1")).answer.is_some(), expected, "{http:?}");
        assert!(met(&faults, "GET", &format!("{PODS}/p")).answer.is_none(), "a get");
        assert!(met(&faults, "GET", "/healthz").answer.is_none(), "no resource");
    }
    assert!(met(&[abort("a", 500, WHOLE)], "GET", "/healthz").answer.is_some(), "no match is every request");
}

#[test]
fn api_faults_hit_only_what_an_api_server_does_them_to() {
    let (watch, list, put, create) = (format!("{PODS}?watch=1"), PODS, format!("{PODS}/p"), PODS);
    let cut = ApiFaultKind::CutWatch { after_nanoseconds: 0 };
    let slow = ApiFaultKind::SlowBody { bytes_per_second: 1 };
    for (kind, [of_watch, of_list, of_put, of_create]) in [
        (ApiFaultKind::AnswerLost, [false, true, true, true]),
        (cut, [true, false, false, false]),
        (ApiFaultKind::DelayEvents { nanoseconds: 1 }, [true, false, false, false]),
        (slow, [true, true, true, true]),
        (ApiFaultKind::GoAway, [true, true, true, true]),
        (ApiFaultKind::Stale { age_nanoseconds: 1_000_000_000 }, [false, true, false, false]),
    ] {
        let faults = [api("a", kind)];
        let hit = |method, target: &str| !met(&faults, method, target).on_answer.is_empty();
        let got = [hit("GET", &watch), hit("GET", list), hit("PUT", &put), hit("POST", create)];
        assert_eq!(got, [of_watch, of_list, of_put, of_create], "{kind:?}");
    }
    let answer = |kind, method, target: &str| met(&[api("a", kind)], method, target).answer.map(|one| one.code);
    assert_eq!(answer(ApiFaultKind::ExpireWatch, "GET", &watch), Some(410));
    assert_eq!(answer(ApiFaultKind::ExpireWatch, "GET", list), None);
    assert_eq!(answer(ApiFaultKind::Conflict, "PUT", &put), Some(409));
    assert_eq!(answer(ApiFaultKind::Conflict, "POST", create), None);
    let many = met(&[api("a", ApiFaultKind::TooManyRequests { retry_after_seconds: 7 })], "GET", list);
    assert_eq!(many.answer.unwrap().retry_after, Some(7));
}

#[test]
fn an_answer_takes_the_place_of_what_would_be_done_to_the_servers() {
    let faults = [api("lost", ApiFaultKind::AnswerLost), delay("slow", 3), abort("a", 409, WHOLE)];
    let effects = met(&faults, "POST", PODS);
    assert_eq!(effects.answer.as_ref().map(|answer| answer.reason), Some("AlreadyExists"));
    assert!(effects.on_answer.is_empty());
    assert_eq!(effects.hits.iter().map(|hit| hit.what.name()).collect::<Vec<_>>(), ["delay", "abort"]);
}

#[test]
fn a_request_is_hit_as_long_as_all_its_faults_are_there() {
    let (one, two) = (delay("one", 5), abort("two", 500, WHOLE));
    let both = Faults::new(&[one.clone(), two.clone()]).unwrap();
    let effects = met(&[one.clone(), two.clone()], "GET", PODS);
    let still = |faults: &[Fault]| both.still_hit(&effects, &Faults::new(faults).unwrap(), noon());
    assert!(still(&[two.clone(), one.clone()]));
    assert!(!still(&[one]) && !still(&[delay("one", 6), two]));
    let until = Times { zone: "UTC".to_owned(), until: Some(43_201), ..Times::default() };
    let timed = [Fault { times: Some(until), ..abort("a", 500, WHOLE) }];
    let (faults, effects) = (Faults::new(&timed).unwrap(), met(&timed, "GET", PODS));
    assert!(faults.have_times(&effects) && !both.have_times(&effects));
    assert!(faults.still_hit(&effects, &faults, noon()));
    assert!(!faults.still_hit(&effects, &faults, "2026-11-26T12:00:01Z".parse().unwrap()), "its time is over");
}

#[test]
fn a_fault_is_done_at_its_times_only() {
    let at = |from| Times { zone: "UTC".to_owned(), from: Some(from), ..Times::default() };
    let [noon, later] = [43_200, 43_201].map(|from| Fault { times: Some(at(from)), ..abort("a", 500, WHOLE) });
    assert!(met(&[noon], "GET", PODS).answer.is_some());
    assert!(met(&[later], "GET", PODS).answer.is_none());
}

proptest! {
    #[test]
    fn a_delay_is_between_its_bounds(nanoseconds in 1..u64::MAX / 2, jitter_nanoseconds in 0..u64::MAX / 2, shown in 0..WHOLE) {
        let delay = Delay { nanoseconds, jitter_nanoseconds, share: WHOLE };
        let effects = met_with(&[Fault { delay: Some(delay), ..fault("a") }], "GET", PODS, false, shown);
        prop_assert!((nanoseconds..=nanoseconds + jitter_nanoseconds).contains(&effects.delay));
    }

    #[test]
    fn a_share_hits_the_dice_below_it(share in 0..=WHOLE, shown in 0..WHOLE) {
        let effects = met_with(&[abort("a", 500, share)], "GET", PODS, false, shown);
        prop_assert_eq!(effects.answer.is_some(), shown < share);
    }
}

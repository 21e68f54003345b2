use ctrlmesh_common::policy::fault::{Abort, Delay, HeaderMatch, HttpMatch};

use super::*;

fn fault(name: &str, abort: Option<Share>) -> Fault {
    Fault {
        injection: "ops/storm".to_owned(),
        fault: name.to_owned(),
        delay: None,
        abort: abort.map(|share| Abort { status: 503, share }),
        api_fault: None,
        requests: Vec::new(),
        http: Vec::new(),
        times: None,
        includes_lock: false,
    }
}

fn asked<T>(is_for_lock: bool, ask: impl Fn(KnownRequest<'_>, Timestamp) -> T) -> T {
    let info = RequestInfo::parse("GET", "/api/v1/namespaces/shop/pods").unwrap();
    let path = "/api/v1/namespaces/shop/pods";
    ask(KnownRequest { info: &info, method: "GET", path, is_for_lock }, Timestamp::UNIX_EPOCH)
}

#[test]
fn only_a_fault_that_hits_all_answers_for_certain() {
    for (share, expected) in [(WHOLE, Some(503)), (WHOLE / 2, None)] {
        let faults = [fault("down", Some(share))];
        let code = asked(false, |request, now| answer(&faults, request, now)).map(|status| status.code);
        assert_eq!(code, expected, "{share}");
        let met = asked(false, |request, now| matching(&faults, request, now));
        assert_eq!((met.len(), met[0].name.as_str(), met[0].effects[0].as_str()), (1, "ops/storm/down", "abort"));
    }
}

#[test]
fn a_fault_is_said_with_its_share() {
    let delay = |share| Some(Delay { nanoseconds: 1, jitter_nanoseconds: 0, share });
    for (delay, abort, expected) in [
        (None, WHOLE / 4, "25% of such requests: abort."),
        (delay(WHOLE / 4), WHOLE / 2, "25% of such requests or more: delay and abort."),
        (delay(WHOLE), WHOLE, "every such request: delay and abort."),
    ] {
        let faults = [Fault { delay, ..fault("down", Some(abort)) }];
        let said = asked(false, |request, now| matching(&faults, request, now)).remove(0).sentence();
        assert_eq!(said, format!("Fault ops/storm/down hits {expected}"));
    }
}

#[test]
fn headers_and_hosts_are_not_known() {
    let headers = vec![HeaderMatch { name: "x-team".to_owned(), value: "a".to_owned() }];
    let by_header = Fault { http: vec![HttpMatch { headers, ..HttpMatch::default() }], ..fault("header", Some(WHOLE)) };
    let met = asked(false, |request, now| matching(std::slice::from_ref(&by_header), request, now));
    assert!(met[0].depends_on_headers, "{met:?}");
    assert_eq!(asked(false, |request, now| answer(std::slice::from_ref(&by_header), request, now)), None);
}

#[test]
fn faults_of_other_requests_are_not_shown() {
    let post = HttpMatch { method: Some("POST".to_owned()), ..HttpMatch::default() };
    let other = Fault { http: vec![post], ..fault("post", Some(WHOLE)) };
    let delay = Some(Delay { nanoseconds: 1, jitter_nanoseconds: 0, share: WHOLE });
    let faults = [other, Fault { delay, ..fault("slow", None) }];
    let names = |is_for_lock| asked(is_for_lock, |request, now| matching(&faults, request, now)).len();
    assert_eq!((names(false), names(true)), (1, 0), "the lock is spared");
}

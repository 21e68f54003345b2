use ctrlmesh_common::policy::Fault;
use ctrlmesh_common::policy::egress::Scheme;
use ctrlmesh_common::policy::fault::{ApiFaultKind, Times, WHOLE};
use jiff::Timestamp;

use super::*;
use crate::fault::tests::{PODS, abort, api, delay, met, noon};
use crate::fault::{Effects, Faults};

const GET: Option<(&str, &str)> = Some(("GET", "/v1/prices"));

fn clear(host: &str, port: u16) -> Visible<'_> {
    Visible { scheme: Some(Scheme::Http), host, port, request: GET }
}

fn tls(host: &str, port: u16) -> Visible<'_> {
    Visible { scheme: Some(Scheme::Https), host, port, request: None }
}

fn met_at(faults: &[Fault], visible: Visible<'_>, now: Timestamp) -> Effects {
    let has_header = |name: &str, value: &str| name.eq_ignore_ascii_case("x-user") && value == "op";
    Faults::new(faults).unwrap().egress_effects(EgressRequest { visible, has_header: &has_header }, now, &mut || 0)
}

fn hits(http: &HttpMatch, visible: Visible<'_>) -> bool {
    let faults = [Fault { http: vec![http.clone()], ..abort("a", 503, WHOLE) }];
    met_at(&faults, visible, noon()).answer.is_some()
}

fn at(ports: &[u16]) -> HttpMatch {
    HttpMatch { ports: ports.to_vec(), ..HttpMatch::default() }
}

fn exact(text: &str) -> TextMatch {
    TextMatch::Exact(text.to_owned())
}

fn regex(text: &str) -> TextMatch {
    TextMatch::Regex(text.to_owned())
}

#[test]
fn ports_tell_other_servers_from_the_api_server() {
    let with = |http: &[HttpMatch]| [Fault { http: http.to_vec(), ..abort("a", 503, WHOLE) }];
    for (http, of_api, at_80, at_81) in [
        (&[][..], true, false, false),
        (&[at(&[])], true, false, false),
        (&[at(&[80])], false, true, false),
        (&[at(&[80]), at(&[80, 81])], false, true, true),
        (&[at(&[]), at(&[81])], true, false, true),
    ] {
        let faults = with(http);
        assert_eq!(met(&faults, "GET", PODS).answer.is_some(), of_api, "{http:?}");
        for (port, expected) in [(80, at_80), (81, at_81)] {
            assert_eq!(met_at(&faults, clear("a", port), noon()).answer.is_some(), expected, "{http:?}: {port}");
        }
    }
    assert_eq!(met_at(&[api("a", ApiFaultKind::GoAway)], clear("a", 80), noon()), Effects::default());
    let wrong = Fault { http: vec![at(&[80])], ..api("a", ApiFaultKind::GoAway) };
    assert_eq!(Faults::new(&[wrong]).unwrap_err(), FaultError::Ports);
}

#[test]
fn hosts_are_compared_as_hosts() {
    for (host, visible, expected) in [
        (exact("Prices.shop"), "prices.SHOP.", true),
        (exact("prices.shop"), "prices.shop.svc", false),
        (exact("fd00::1"), "fd00:0:0::1", true),
        (exact("[fd00::1]"), "fd00::1", true),
        (exact("10.0.0.1"), "::ffff:10.0.0.1", true),
        (regex(r"prices\..*"), "PRICES.shop", true),
        (regex(r"prices\..*"), "xprices.shop", false),
        (regex(r"\[fd00::1\]"), "fd00::1", true),
    ] {
        let http = HttpMatch { host: Some(host.clone()), ..at(&[80]) };
        assert_eq!(hits(&http, clear(visible, 80)), expected, "{host:?}: {visible}");
        assert_eq!(hits(&http, tls(visible, 80)), expected, "{host:?}: {visible}");
    }
}

#[test]
fn what_tls_hides_may_be_anything() {
    let header = |value: &str| vec![HeaderMatch { name: "X-User".to_owned(), value: value.to_owned() }];
    for (http, in_the_clear) in [
        (HttpMatch { path: Some(exact("/v1/prices")), ..at(&[80]) }, true),
        (HttpMatch { path: Some(exact("/v1/%70rices")), ..at(&[80]) }, true),
        (HttpMatch { path: Some(exact("/v1")), ..at(&[80]) }, false),
        (HttpMatch { path: Some(regex("/v1/.*")), ..at(&[80]) }, true),
        (HttpMatch { path: Some(regex("/v2/.*")), ..at(&[80]) }, false),
        (HttpMatch { method: Some("GET".to_owned()), ..at(&[80]) }, true),
        (HttpMatch { method: Some("POST".to_owned()), ..at(&[80]) }, false),
        (HttpMatch { headers: header("op"), ..at(&[80]) }, true),
        (HttpMatch { headers: header("other"), ..at(&[80]) }, false),
    ] {
        assert_eq!(hits(&http, clear("a", 80)), in_the_clear, "{http:?}");
        assert!(hits(&http, tls("a", 80)), "{http:?}");
        assert!(hits(&http, Visible { scheme: None, ..tls("10.0.0.1", 80) }), "{http:?}");
        assert!(!hits(&http, tls("a", 443)), "{http:?}: the port is seen");
    }
}

#[test]
fn another_way_to_write_a_path_is_the_same_path() {
    let http = HttpMatch { path: Some(regex("/private/.*")), ..at(&[80]) };
    let asked = |path| hits(&http, Visible { request: Some(("GET", path)), ..clear("a", 80) });
    assert!(asked("/private/a") && asked("/public/%2e%2e//private/a") && !asked("/private/../public"));
}

#[test]
fn delays_add_up_and_the_first_abort_ends_there_too() {
    let elsewhere = |fault: Fault| Fault { http: vec![at(&[80])], ..fault };
    let faults = [
        elsewhere(delay("one", 5)),
        delay("api", 100),
        elsewhere(delay("two", 7)),
        elsewhere(abort("no", 500, 0)),
        elsewhere(abort("yes", 503, WHOLE)),
        elsewhere(delay("late", 9)),
    ];
    let effects = met_at(&faults, clear("a", 80), noon());
    let answer = effects.answer.as_ref().unwrap();
    assert_eq!((effects.delay, answer.code), (12, 503));
    assert_eq!(answer.message, "ctrlmesh: fault \"yes\" of FaultInjection ops/storm");
    assert_eq!(effects.hits.iter().map(|hit| hit.rule).collect::<Vec<_>>(), [0, 2, 4]);
}

#[test]
fn times_count_there_too() {
    let until = Times { zone: "UTC".to_owned(), until: Some(43_201), ..Times::default() };
    let faults = [Fault { times: Some(until), http: vec![at(&[80])], ..abort("a", 503, WHOLE) }];
    assert!(met_at(&faults, clear("a", 80), noon()).answer.is_some());
    assert!(met_at(&faults, clear("a", 80), "2026-11-26T12:00:01Z".parse().unwrap()).answer.is_none());
}

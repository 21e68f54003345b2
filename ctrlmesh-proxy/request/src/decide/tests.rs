use ctrlmesh_common::policy::{Limit, Lock, Mode};
use ctrlmesh_common::resource::ResourceMatch;

use super::*;

mod fence;

fn policy() -> Policy {
    let pods = ResourceMatch { api_groups: vec![String::new()], resources: vec!["pods".to_owned()] };
    Policy {
        limits: vec![Limit {
            relate_resources: vec![pods],
            selector: Selector::parse("a=1").unwrap(),
            changed_at: Some(100),
        }],
        lock: Some(Lock { namespace: "ops".into(), name: "op".into(), shard: "s1".into() }),
        ..Policy::default()
    }
}

fn decided(method: &str, target: &str) -> Decision {
    decide(&policy(), &RequestInfo::parse(method, target).unwrap())
}

fn refused(method: &str, target: &str) -> Refusal {
    match decided(method, target) {
        Decision::Refuse(refusal) => refusal,
        other => panic!("{method} {target}: {other:?}"),
    }
}

fn lock_plan(method: &str, target: &str) -> (bool, bool, bool) {
    match decided(method, target) {
        Decision::Rewrite(Plan { lock: Some(lock), .. }) => (lock.in_path, lock.in_fields.is_some(), lock.in_body),
        other => panic!("{method} {target}: {other:?}"),
    }
}

#[test]
fn collections_are_narrowed_in_every_spelling() {
    let narrowed = Decision::Rewrite(Plan { selector: Some(Selector::parse("a=1").unwrap()), ..Plan::default() });
    for (method, target) in [
        ("GET", "/api/v1/pods"),
        ("HEAD", "/api/v1/pods"),
        ("GET", "/api/v2alpha1/pods/"),
        ("GET", "/api/v1/po%64s"),
        ("GET", "/api/v1/namespaces/ns/pods?watch"),
        ("GET", "/api/v1/watch/pods"),
        ("GET", "/api/v1/watch/namespaces/ns/pods/a"),
        ("GET", "/api/v1/pods?fieldSelector=metadata.name=a"),
        ("GET", "/api/v1/pods?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&resourceVersion="),
        ("DELETE", "/api/v1/namespaces/ns/pods"),
        ("POST", "/api/v1/watch/pods"),
    ] {
        assert_eq!(decided(method, target), narrowed, "{method} {target}");
    }
}

#[test]
fn what_the_api_server_proxies_elsewhere_is_refused_under_limits() {
    let allowing = Policy { allow_proxy: true, ..policy() };
    let lock_only = Policy { limits: Vec::new(), ..policy() };
    for (target, to) in [
        ("/api/v1/namespaces/ns/pods/https:p:8443/proxy/metrics", "pod"),
        ("/api/v1/namespaces/ns/pods/a/proxy/x//../y%2Fz", "pod"),
        ("/api/v1/namespaces/ns/services/s/proxy", "service"),
        ("/api/v1/nodes/n/proxy/./x", "node"),
        ("/api/v1/nodes/n/proxy/pods", "node"),
        ("/api/v1/nodes/n/pro%78y/pods", "node"),
        ("/api/v1/proxy/namespaces/ns/pods/p/x", "pod"),
    ] {
        for method in ["GET", "POST", "DELETE"] {
            assert_eq!(refused(method, target), Refusal::Proxied { to }, "{method} {target}");
            let info = RequestInfo::parse(method, target).unwrap();
            assert_eq!(decide(&allowing, &info), Decision::Pass, "{method} {target}");
            assert_eq!(decide(&lock_only, &info), Decision::Pass, "{target}");
        }
    }
    for target in ["/api/v1/namespaces/ns/pods/p/exec?command=a", "/apis/example.com/v1/namespaces/ns/pods/p/proxy"] {
        assert!(!matches!(decided("GET", target), Decision::Refuse(Refusal::Proxied { .. })), "{target}");
    }
}

#[test]
fn events_are_narrowed_in_both_their_groups() {
    for group in ["", "events.k8s.io"] {
        let mut policy = policy();
        policy.limits[0].relate_resources =
            vec![ResourceMatch { api_groups: vec![group.to_owned()], resources: vec!["events".to_owned()] }];
        for (method, target) in [
            ("GET", "/api/v1/events"),
            ("GET", "/apis/events.k8s.io/v1/namespaces/ns/events?watch=1"),
            ("DELETE", "/apis/events.k8s.io/v1/namespaces/ns/events"),
        ] {
            let decision = decide(&policy, &RequestInfo::parse(method, target).unwrap());
            assert!(matches!(&decision, Decision::Rewrite(plan) if plan.selector.is_some()), "{group} {target}");
        }
    }
}

#[test]
fn single_objects_and_other_resources_pass() {
    for (method, target) in [
        ("GET", "/api/v1/namespaces/ns/pods/a"),
        ("GET", "/api/v1/namespaces/ns/pods/a?watch=1"),
        ("POST", "/api/v1/namespaces/ns/pods?labelSelector=a"),
        ("DELETE", "/api/v1/namespaces/ns/pods/a"),
        ("GET", "/api/v1/namespaces/ns/pods/a/log?follow=true"),
        ("POST", "/api/v1/namespaces/ns/pods/a/exec?command=%2Fbin%2Fsh&command=.."),
        ("GET", "/api/v1/secrets"),
        ("GET", "/apis/metrics.k8s.io/v1beta1/pods"),
        ("GET", "/healthz//x"),
        ("GET", "/openapi/v3?x=a;b"),
        ("GET", "/apis/coordination.k8s.io/v1/namespaces/other/leases/op---s2"),
        ("DELETE", "/api/v1/namespaces/other/configmaps"),
    ] {
        assert_eq!(decided(method, target), Decision::Pass, "{method} {target}");
    }
}

#[test]
fn a_path_that_can_be_read_in_two_ways_is_refused() {
    for target in [
        "/api/v1//pods",
        "//api/v1/pods",
        "/api/v1/pods//",
        "/api/v1/x/../pods",
        "/healthz/../api/v1/pods",
        "/api/v1/%2e%2E/v1/pods",
        "/api/v1/./pods",
        "/api%2Fv1/pods",
        "/api/v1/namespaces/a%2fb/pods",
        "/api/v1/namespaces/ns/pods/a%2Fproxy/../..",
        "/api/v1/namespaces/ns/pods/a/proxy%2F..",
        "http://host/api/v1/pods",
        "/api/v1/namespaces/ns/pods/a/proxy/../../b",
        "/api/v1/namespaces/ns/pods/a/proxy/x/%2e%2e/../../../pods",
        "/api/v1/namespaces/ns/pods/a/proxy/x//../..%2F../../pods",
        "/api/v1/nodes/n/proxy/..",
    ] {
        assert!(matches!(refused("GET", target), Refusal::AmbiguousPath { .. }), "{target}");
    }
    let long = format!("/api/v1/pods?{}labelSelector=b", "x&".repeat(10_000));
    assert_eq!(refused("GET", &long), Refusal::AmbiguousQuery);
}

#[test]
fn a_query_with_no_room_for_the_policy_is_refused() {
    for (pairs, room) in [(9_999, true), (10_000, false), (10_001, false)] {
        let target = format!("/api/v1/pods?dryRun=All{}", "&x".repeat(pairs - 1));
        for method in ["GET", "DELETE"] {
            let narrowed = matches!(decided(method, &target), Decision::Rewrite(_));
            assert_eq!(narrowed, room, "{method} {pairs}");
        }
    }
    // Nothing is added to it.
    let full = format!("/api/v1/secrets?{}", "x&".repeat(9_999));
    assert_eq!(decided("GET", &full), Decision::Pass);
}

#[test]
fn a_method_that_no_resource_has_is_refused_where_it_is_limited() {
    assert_eq!(refused("get", "/api/v1/pods"), Refusal::Method);
    assert_eq!(refused("FOO", "/api/v1/namespaces/ns/pods"), Refusal::Method);
    assert_eq!(decided("OPTIONS", "/api/v1/secrets"), Decision::Pass);
}

#[test]
fn a_version_from_before_the_change_is_expired() {
    let expired = Refusal::Expired { asked: 99, changed_at: 100 };
    assert_eq!(refused("GET", "/api/v1/pods?watch=1&resourceVersion=99"), expired);
    // {"v":"meta.k8s.io/v1","rv":99,"start":"a"}
    let token = "eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6OTksInN0YXJ0IjoiYSJ9";
    assert_eq!(refused("GET", &format!("/api/v1/pods?limit=5&continue={token}")), expired);
    let unknown = Refusal::UnknownContinue { changed_at: 100 };
    assert_eq!(refused("GET", "/api/v1/pods?limit=5&continue=%21"), unknown);
    for query in ["watch=1&resourceVersion=100", "watch=1&resourceVersion=0", "watch=1", "resourceVersion=99"] {
        let target = format!("/api/v1/pods?{query}");
        assert!(matches!(decided("GET", &target), Decision::Rewrite(_)), "{query}");
    }
}

#[test]
fn a_state_from_before_the_change_is_asked_for_anew() {
    let newer = |query: &str| match decided("GET", &format!("/api/v1/pods?{query}")) {
        Decision::Rewrite(plan) => plan.not_older_than.map(|newer| (newer.version, newer.all)),
        other => panic!("{query}: {other:?}"),
    };
    for (query, all) in [
        ("resourceVersion=0", true),
        ("resourceVersion=0&limit=500", true),
        ("resourceVersion=0&limit=500&resourceVersionMatch=NotOlderThan", true),
        ("resourceVersion=99", false),
        ("resourceVersion=99&limit=0", false),
        ("resourceVersion=99&limit=5&resourceVersionMatch=NotOlderThan", false),
        ("watch=1&sendInitialEvents=true&resourceVersion=99&resourceVersionMatch=NotOlderThan", false),
    ] {
        assert_eq!(newer(query), Some((100, all)), "{query}");
    }
    for query in [
        "",
        "resourceVersion=",
        "resourceVersion=x",
        "resourceVersion=100",
        "resourceVersion=99&limit=5",
        "resourceVersion=99&resourceVersionMatch=Exact",
        "watch=1&resourceVersion=0",
        "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan",
    ] {
        assert_eq!(newer(query), None, "{query}");
    }
    assert_eq!(decided("GET", "/api/v1/secrets?resourceVersion=0"), Decision::Pass);
    let full = format!("/api/v1/pods?resourceVersion=0{}", "&x".repeat(9_997));
    assert_eq!(refused("GET", &full), Refusal::AmbiguousQuery);
}

#[test]
fn decisions_that_depend_on_the_change_say_so() {
    for (query, dated) in [
        ("watch=1&resourceVersion=99", Some(100)),
        ("limit=5&continue=%21", Some(100)),
        ("resourceVersion=0", Some(100)),
        ("watch=1&resourceVersion=100", None),
        ("", None),
    ] {
        let target = format!("/api/v1/pods?{query}");
        let request = RequestInfo::parse("GET", &target).unwrap();
        assert_eq!(decide(&policy(), &request).dated(), dated, "{query}");
        let Decision::Rewrite(plan) = decide_undated(&policy(), &request) else {
            panic!("{query}");
        };
        assert!(plan.selector.is_some() && plan.not_older_than.is_none(), "{query}");
    }
}

#[test]
fn every_request_that_can_touch_the_lock_is_renamed() {
    let leases = "/apis/coordination.k8s.io/v1/namespaces/ops/leases";
    for (method, target, plan) in [
        ("GET", format!("{leases}/op"), (true, false, false)),
        ("GET", format!("{leases}/%6fp"), (true, false, false)),
        ("PUT", format!("{leases}/op"), (true, false, true)),
        ("PATCH", format!("{leases}/op/status"), (true, false, true)),
        ("DELETE", format!("{leases}/op"), (true, false, false)),
        ("POST", leases.to_owned(), (false, false, true)),
        ("GET", leases.to_owned(), (false, false, false)),
        ("GET", format!("{leases}?watch=1&fieldSelector=metadata.name%3Dop"), (false, true, false)),
        ("GET", format!("{leases}?fieldSelector=metadata.name!=op"), (false, true, false)),
        ("DELETE", format!("{leases}?fieldSelector=metadata.name=op"), (false, true, false)),
        ("GET", "/apis/coordination.k8s.io/v1/leases".to_owned(), (false, false, false)),
        (
            "GET",
            "/api/v1/configmaps?fieldSelector=metadata.name=op,metadata.namespace=ops".to_owned(),
            (false, true, false),
        ),
        (
            "GET",
            "/api/v1/configmaps?fieldSelector=metadata.name=op,metadata.namespace=x".to_owned(),
            (false, false, false),
        ),
        ("GET", "/api/v1/namespaces/ops/endpoints/op".to_owned(), (true, false, false)),
        ("GET", "/apis/coordination.k8s.io/v1/watch/namespaces/ops/leases/op".to_owned(), (true, false, false)),
    ] {
        assert_eq!(lock_plan(method, &target), plan, "{method} {target}");
    }
}

#[test]
fn no_request_reaches_another_shards_lock() {
    let leases = "/apis/coordination.k8s.io/v1/namespaces/ops/leases";
    for (method, target) in [
        ("GET", format!("{leases}/op---s2")),
        ("PUT", format!("{leases}/op---s1")),
        ("DELETE", format!("{leases}/op%2D--s2")),
        ("GET", format!("{leases}?fieldSelector=metadata.name=op---s2")),
        ("GET", format!("{leases}?fieldSelector=metadata.name!=op---s1")),
        ("GET", "/apis/coordination.k8s.io/v1/leases?fieldSelector=metadata.name=op---s2".to_owned()),
    ] {
        assert!(matches!(refused(method, &target), Refusal::ReservedName { .. }), "{method} {target}");
    }
    assert_eq!(refused("DELETE", leases), Refusal::LockCollection);
    let across = "/api/v1/configmaps?fieldSelector=metadata.name=op";
    assert_eq!(refused("GET", across), Refusal::LockAcrossNamespaces);
}

#[test]
fn without_limits_and_lock_everything_passes() {
    let request = RequestInfo::parse("GET", "/api/v1//pods").unwrap();
    assert_eq!(decide(&Policy::default(), &request), Decision::Pass);
    let pass = Policy { mode: Mode::Pass, ..policy() };
    assert_eq!(decide(&pass, &request), Decision::Pass);
}

#[test]
fn a_list_tells_from_which_version_on_it_may_be_answered() {
    for (target, expected) in [
        ("/api/v1/pods", Some(0)),
        ("/api/v1/pods?resourceVersion=&limit=500", Some(0)),
        ("/api/v1/pods?resourceVersion=0&limit=500", Some(0)),
        ("/api/v1/pods?resourceVersion=7", Some(7)),
        ("/api/v1/pods?resourceVersion=7&resourceVersionMatch=NotOlderThan&limit=500", Some(7)),
        ("/api/v1/pods?resourceVersion=7&limit=500", None),
        ("/api/v1/pods?resourceVersion=7&resourceVersionMatch=Exact", None),
        ("/api/v1/pods?resourceVersionMatch=Exact", None),
        ("/api/v1/pods?resourceVersion=seven", None),
        ("/api/v1/pods?limit=500&continue=abc", None),
        ("/api/v1/pods?watch=1", None),
        ("/api/v1/pods?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan", None),
        ("/api/v1/namespaces/a/pods/one", None),
        ("/healthz", None),
    ] {
        let request = RequestInfo::parse("GET", target).unwrap();
        assert_eq!(oldest_wanted(&request), expected, "{target}");
    }
    let all = RequestInfo::parse("DELETE", "/api/v1/namespaces/a/pods").unwrap();
    assert_eq!(oldest_wanted(&all), None);
}

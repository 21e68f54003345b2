use super::super::Metrics;
use super::*;

#[test]
fn requests_are_shown_by_pod_shard_verb_and_resource() {
    let metrics = Metrics::new();
    let requests = metrics.pods.requests("ops/operator-0");
    metrics.pods.set_policy(
        "ops/operator-0",
        PodPolicyLabels { epoch: 7, shard: "op-0".to_owned() },
        &CancellationToken::new(),
    );
    let deployments = requests.resource("apps", "deployments");
    for outcome in [Outcome::Ok, Outcome::Ok, Outcome::ClientError] {
        deployments.ended(Verb::of("patch"), outcome, None);
    }
    (0..3).for_each(|_| deployments.watch_event());
    deployments.response_bytes(1_000);
    requests.answered_after(Verb::of("patch"), Duration::from_millis(3), None);
    for _ in 0..100 {
        requests.in_namespace("shop");
    }
    requests.member("member-1").ended(Outcome::Ok);
    requests.member("member-1").ended(Outcome::Refused);
    let page = metrics.render().unwrap();
    let pod = r#"namespace="ops",pod="operator-0",shard="op-0""#;
    let patch = r#"verb="patch",group="apps",resource="deployments""#;
    for line in [
        r#"ctrlmesh_proxy_policy_epoch{pod="ops/operator-0"} 7"#.to_owned(),
        format!("ctrlmesh_proxy_pod_requests_total{{{pod},{patch},outcome=\"ok\"}} 2"),
        format!("ctrlmesh_proxy_pod_requests_total{{{pod},{patch},outcome=\"client_error\"}} 1"),
        format!(r#"ctrlmesh_proxy_pod_watch_events_total{{{pod},group="apps",resource="deployments"}} 3"#),
        format!(r#"ctrlmesh_proxy_pod_response_bytes_total{{{pod},group="apps",resource="deployments"}} 1000"#),
        format!(r#"ctrlmesh_proxy_pod_request_seconds_bucket{{le="0.002",{pod},verb="patch"}} 0"#),
        format!(r#"ctrlmesh_proxy_pod_request_seconds_bucket{{le="0.004",{pod},verb="patch"}} 1"#),
        format!(r#"ctrlmesh_proxy_pod_namespace_requests_total{{{pod},object_namespace="shop"}} 41"#),
        format!(r#"ctrlmesh_proxy_pod_namespace_requests_total{{{pod},object_namespace="_other"}} 59"#),
        format!(r#"ctrlmesh_proxy_pod_member_requests_total{{{pod},cluster="member-1",outcome="ok"}} 1"#),
        format!(r#"ctrlmesh_proxy_pod_member_requests_total{{{pod},cluster="member-1",outcome="refused"}} 1"#),
    ] {
        assert!(page.lines().any(|shown| shown == line), "no `{line}` in\n{page}");
    }
    let aborted = |line: &str| line.starts_with("ctrlmesh_proxy_pod_requests_total{") && line.contains("aborted");
    assert!(!page.lines().any(aborted), "what did not happen has no series");
}

#[test]
fn the_series_of_a_pod_end_with_it() {
    let metrics = Metrics::new();
    let requests = metrics.pods.requests("ops/a");
    requests.resource("", "pods").ended(Verb::of("get"), Outcome::Ok, None);
    assert!(Arc::ptr_eq(&requests, &metrics.pods.requests("ops/a")), "its connections share the counts");
    assert!(metrics.render().unwrap().contains(r#"pod="a""#));
    metrics.pods.forget("ops/a");
    assert!(!metrics.render().unwrap().contains(r#"pod="a""#));
    metrics.pods.set_policy("ops/b", PodPolicyLabels::default(), &CancellationToken::new());
    drop(metrics.pods.requests("ops/b"));
    let page = metrics.render().unwrap();
    assert!(page.contains(r#"policy_epoch{pod="ops/b"}"#), "{page}");
    assert!(!page.contains("pod_namespace_requests_total{namespace=\"ops\",pod=\"b\""), "{page}");
}

#[test]
fn resources_beyond_the_bound_share_their_series() {
    let requests = PodRequests::default();
    for at in 0..MAX_RESOURCES + 9 {
        requests.resource("example.com", &format!("kind{at}")).ended(Verb::of("list"), Outcome::Ok, None);
    }
    assert_eq!(requests.resources.read().unwrap().len(), MAX_RESOURCES + 1);
    let other = requests.resource("example.com", "one-more");
    assert_eq!(other.resource, OTHER);
    let list = VERBS.iter().position(|verb| *verb == "list").unwrap();
    assert_eq!(other.counts[list][Outcome::Ok as usize].load(Ordering::Relaxed), 9);
    assert_eq!(requests.resource("example.com", "kind3").resource, "kind3");
    assert_eq!(PodRequests::default().resource("", &"x".repeat(254)).resource, OTHER);
}

#[test]
fn members_beyond_the_bound_share_their_series() {
    let requests = PodRequests::default();
    for at in 0..MAX_MEMBERS + 9 {
        requests.member(&format!("member-{at}")).ended(Outcome::Ok);
    }
    assert_eq!(lock(&requests.members).len(), MAX_MEMBERS + 1);
    let of = |name: &str| requests.member(name).0[Outcome::Ok as usize].load(Ordering::Relaxed);
    assert_eq!((of("one-more"), of("member-3")), (9, 1));
    assert!(lock(&requests.members).contains_key(OTHER_MEMBERS));
}

#[test]
fn a_pod_that_is_gone_does_not_come_back() {
    let metrics = Metrics::new();
    let gone = CancellationToken::new();
    metrics.pods.set_policy("ops/a", PodPolicyLabels::default(), &gone);
    gone.cancel();
    metrics.pods.forget("ops/a");
    metrics.pods.set_policy("ops/a", PodPolicyLabels::default(), &gone);
    assert!(!metrics.render().unwrap().contains("ops/a"));
}

#[test]
fn exemplars_name_the_trace_of_a_request() {
    let metrics = Metrics::with_exemplars(true);
    let requests = metrics.pods.requests("ops/a");
    let trace = Some(TraceId::from(7));
    requests.resource("", "pods").ended(Verb::of("get"), Outcome::Ok, trace);
    requests.resource("", "pods").ended(Verb::of("get"), Outcome::Ok, None);
    requests.answered_after(Verb::of("get"), Duration::from_millis(3), trace);
    requests.answered_after(Verb::of("get"), Duration::from_mins(1), None);
    metrics.added(Duration::from_micros(3), trace);
    let page = metrics.render().unwrap();
    let exemplar = r#" # {trace_id="00000000000000000000000000000007"} "#;
    for (series, value) in [
        (
            r#"pod_requests_total{namespace="ops",pod="a",shard="",verb="get",group="",resource="pods",outcome="ok"} 2"#,
            "1.0",
        ),
        (r#"pod_request_seconds_bucket{le="0.004",namespace="ops",pod="a",shard="",verb="get"} 1"#, "0.003"),
        (r#"added_seconds_bucket{le="0.000004"} 1"#, "0.000003"),
    ] {
        let start = format!("ctrlmesh_proxy_{series}{exemplar}{value} ");
        assert!(page.lines().any(|line| line.starts_with(&start)), "no `{start}` in\n{page}");
    }
    let longest =
        r#"ctrlmesh_proxy_pod_request_seconds_bucket{le="+Inf",namespace="ops",pod="a",shard="",verb="get"} 2"#;
    assert!(page.lines().any(|line| line == longest), "no `{longest}` in\n{page}");
}

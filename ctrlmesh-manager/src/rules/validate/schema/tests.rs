use ctrlmesh_common::api::{CircuitBreaker, FaultInjection, ManagerState};
use serde_json::json;

use super::*;
use crate::rules::validate;

fn breaker(limiting: Value, rule: Value) -> Vec<String> {
    let selector = json!({"matchLabels": {"app": "a"}});
    let object = json!({"metadata": {"name": "a"}, "spec": {
        "selector": selector, "rateLimitings": [limiting], "trafficInterceptRules": [rule]}});
    let breaker: CircuitBreaker = serde_json::from_value(object).unwrap();
    validate::circuit_breaker(&breaker).errors.iter().map(ToString::to_string).collect()
}

fn limiting(change: Value) -> Value {
    let mut value = json!({"name": "a", "bucket": {"burst": 1, "interval": "1s", "limit": 0},
        "resourceRules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"], "namespaces": ["*"]}]});
    change.as_object().unwrap().iter().for_each(|(name, part)| value[name] = part.clone());
    value
}

fn rule(contents: &str, kind: &str) -> Value {
    json!({"name": "a", "interceptType": "Whitelist", "contentType": kind, "contents": [contents], "methods": ["GET"]})
}

fn fault(fault: Value) -> Vec<String> {
    let selector = json!({"matchLabels": {"app": "a"}});
    let object = json!({"metadata": {"name": "a"}, "spec": {"selector": selector, "httpFault": [fault]}});
    let injection: FaultInjection = serde_json::from_value(object).unwrap();
    validate::fault_injection(&injection).errors.iter().map(ToString::to_string).collect()
}

fn assert_refused(found: &[String], expected: &str) {
    assert!(found.iter().any(|found| found.starts_with(expected)), "{expected}\n{found:?}");
}

#[test]
fn breakers_that_the_schema_refuses_are_refused() {
    let plain = || rule("http://a", "Normal");
    assert_eq!(breaker(limiting(json!({})), plain()), Vec::<String>::new());
    let cases = [
        (
            json!({"bucket": {"burst": 0, "interval": "1s", "limit": 1}}),
            "spec.rateLimitings[0].bucket.burst: 0 is not allowed; allowed are 1 to 4294967295",
        ),
        (
            json!({"bucket": {"burst": 1, "interval": "soon", "limit": 1}}),
            "spec.rateLimitings[0].bucket.interval: \"soon\" must be a duration greater than zero",
        ),
        (
            json!({"bucket": {"burst": 1, "interval": "0s", "limit": 1}}),
            "spec.rateLimitings[0].bucket.interval: \"0s\" must be",
        ),
        (
            json!({"bucket": {"burst": 1, "interval": "99999999h", "limit": 1}}),
            "spec.rateLimitings[0].bucket.interval: \"99999999h\" must be",
        ),
        (json!({"bucket": null}), "spec.rateLimitings[0].bucket: is required with the trigger policies"),
        (json!({"resourceRules": []}), "spec.rateLimitings[0].resourceRules: at least one rule"),
        (
            json!({"recoverPolicy": {"type": "SleepingWindow"}}),
            "spec.rateLimitings[0].recoverPolicy.sleepingWindowSize: is required",
        ),
        (
            json!({"restRules": [{"url": "ftp://a", "method": "GET"}]}),
            "spec.rateLimitings[0].restRules[0].url: \"ftp://a\" is not allowed; it must match",
        ),
        (
            json!({"restRules": [{"url": "http://a", "method": "get"}]}),
            "spec.rateLimitings[0].restRules[0].method: \"get\" is not allowed",
        ),
        (json!({"name": ""}), "spec.rateLimitings[0].name: has 0 characters; allowed are 1 to 253"),
    ];
    for (change, expected) in cases {
        assert_refused(&breaker(limiting(change), plain()), expected);
    }
    let found = breaker(limiting(json!({})), rule("a(b", "Regexp"));
    assert_refused(&found, "spec.trafficInterceptRules[0].contents[0]: \"a(b\" is no regular expression");
    let found = breaker(limiting(json!({})), rule("a(b", "Normal"));
    assert_refused(&found, "spec.trafficInterceptRules[0].contents[0]: \"a(b\" is not of the form");
    let huge = breaker(limiting(json!({})), rule("(a{1000}){1000}", "Regexp"));
    assert_refused(&huge, "spec.trafficInterceptRules[0].contents[0]: ");
}

#[test]
fn expressions_are_those_of_go() {
    for of_go in [r"http://x/\{id\}/.*", r"a{0,2}", r"\d+"] {
        assert_eq!(breaker(limiting(json!({})), rule(of_go, "Regexp")), Vec::<String>::new());
    }
    let twice = breaker(limiting(json!({})), rule("a**", "Regexp"));
    assert_refused(
        &twice,
        "spec.trafficInterceptRules[0].contents[0]: \"a**\" is no regular expression of Go's (RE2's) syntax: at character 3: a repetition",
    );
}

#[test]
fn faults_that_the_schema_refuses_are_refused() {
    let delay = json!({"fixedDelay": "1s"});
    assert_eq!(fault(json!({"delay": delay})), Vec::<String>::new());
    let matches = |http: Value| json!({"delay": {"fixedDelay": "1s"}, "match": {"httpMatch": [http]}});
    let cases = [
        (json!({"name": "a"}), "spec.httpFault[0].delay: at least one of delay, abort and apiFault"),
        (json!({"delay": {"fixedDelay": "-1s"}}), "spec.httpFault[0].delay.fixedDelay: \"-1s\" must be"),
        (
            json!({"delay": {"fixedDelay": "1s", "percent": "101"}}),
            "spec.httpFault[0].delay.percent: \"101\" is not allowed",
        ),
        (
            json!({"abort": {"httpStatus": 199}}),
            "spec.httpFault[0].abort.httpStatus: 199 is not allowed; allowed are 200 to 599",
        ),
        (
            matches(json!({"host": {"regex": "["}})),
            "spec.httpFault[0].match.httpMatch[0].host.regex: \"[\" is no regular expression",
        ),
        (
            matches(json!({"path": {}})),
            "spec.httpFault[0].match.httpMatch[0].path.exact: exactly one of exact and regex",
        ),
    ];
    for (change, expected) in cases {
        assert_refused(&fault(change), expected);
    }
}

#[test]
fn a_fault_that_could_never_be_done_is_refused() {
    let time = |time: Value| json!({"delay": {"fixedDelay": "1s"}, "effectiveTime": time});
    let cases = [
        (
            time(json!({"startTime": "24:00:00"})),
            "spec.httpFault[0].effectiveTime.startTime: \"24:00:00\" is not allowed",
        ),
        (
            time(json!({"startTime": "10:00:00", "endTime": "10:00:00"})),
            "spec.httpFault[0].effectiveTime.endTime: is the same as startTime",
        ),
        (
            time(json!({"daysOfWeek": [7]})),
            "spec.httpFault[0].effectiveTime.daysOfWeek[0]: 7 is not allowed; allowed are 0 to 6",
        ),
        (time(json!({"months": [1, 1]})), "spec.httpFault[0].effectiveTime.months[1]: is listed twice"),
        (
            time(json!({"months": [2, 4], "daysOfMonth": [31]})),
            "spec.httpFault[0].effectiveTime.daysOfMonth: none of these days",
        ),
    ];
    for (change, expected) in cases {
        assert_refused(&fault(change), expected);
    }
    let possible = json!({"months": [2], "daysOfMonth": [29, 31], "startTime": "22:00:00", "endTime": "06:00:00"});
    assert_eq!(fault(time(possible)), Vec::<String>::new());
}

#[test]
fn there_is_one_manager_state() {
    let named =
        |name: &str| serde_json::from_value::<ManagerState>(json!({"metadata": {"name": name}, "spec": {}})).unwrap();
    assert_eq!(validate::manager_state(&named("ctrlmesh-manager")).errors, []);
    assert_eq!(validate::manager_state(&named("other")).errors[0].field, "metadata.name");
}

#[test]
fn an_unknown_field_is_reported_with_path_and_known_fields() {
    let object = json!({"apiVersion": "v", "kind": "ShardingConfig", "metadata": {"name": "a"}, "spec": {
        "selector": {"matchLabels": {"a": "b"}}, "limits": [{"relatedResources": [], "selector": null}], "rooot": {}}});
    let found: Vec<String> = of_manifest("ShardingConfig", &object).iter().map(ToString::to_string).collect();
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!(
        found[0],
        "spec.limits[0].relatedResources: is not a field that is known here; known are objectSelector, relateResources, selector"
    );
    assert!(
        found[1].starts_with("spec.rooot: is not a field that is known here; known are allowProxy, clusterHashes, clusters, controller, limits"),
        "{found:?}"
    );
}

#[test]
fn a_value_of_another_type_is_named_with_its_path() {
    let object = json!({"spec": {"root": {"prefix": 5, "auto": {"shardingSize": 1.5}}, "limits": {}}});
    let found: Vec<String> = of_manifest("ShardingConfig", &object).iter().map(ToString::to_string).collect();
    let expected = [
        "spec.limits: must be of the type array",
        "spec.root.auto.shardingSize: 1.5 is no integer",
        "spec.root.prefix: must be of the type string",
    ];
    assert_eq!(found, expected);
}

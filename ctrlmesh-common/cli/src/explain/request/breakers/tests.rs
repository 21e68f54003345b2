use ctrlmesh_common::policy::guard::RequestMatch;
use serde_json::json;

use super::*;

const MINUTE: u64 = 60 * NANOSECONDS;

fn guard(trigger: Trigger, window: Option<u64>) -> Guard {
    let all = || vec!["*".to_owned()];
    let (api_groups, resources, verbs, namespaces) = (all(), vec!["pods".to_owned()], all(), all());
    Guard {
        breaker: "ops/calm".to_owned(),
        rule: "pods".to_owned(),
        bucket: None,
        budget: None,
        part: None,
        trigger,
        sleeping_window_nanoseconds: window,
        requests: vec![RequestMatch { api_groups, resources, verbs, namespaces, ..RequestMatch::default() }],
        urls: Vec::new(),
        reset: None,
        holds: false,
    }
}

/// CircuitBreaker `ops/calm`, whose rule has this state in pod `a` since the first second.
fn breaker(state: &str) -> CircuitBreaker {
    let snapshot = json!({"name": "pods", "state": state, "lastTransitionTime": "1970-01-01T00:00:00Z"});
    let breaker = json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "CircuitBreaker",
        "metadata": {"namespace": "ops", "name": "calm"}, "spec": {"selector": {}},
        "status": {"targetStatus": [{"podName": "a", "limitingSnapshots": [snapshot]}]}});
    serde_json::from_value(breaker).unwrap()
}

fn said(guard: Guard, breakers: &[CircuitBreaker], second: i64) -> (RuleState, Option<(u16, Option<u32>)>) {
    let info = RequestInfo::parse("GET", "/api/v1/namespaces/shop/pods/one").unwrap();
    let rules = rules(&[guard], &info, ("a", breakers), Timestamp::from_second(second).unwrap());
    (rules[0].state, answer(&rules).map(|status| (status.code, status.retry_after)))
}

#[test]
fn the_spec_and_the_status_say_what_a_rule_does() {
    let (open, closed) = ([breaker("Opened")], [breaker("Closed")]);
    for (guard, breakers, expected) in [
        (guard(Trigger::ForceOpened, None), &closed[..], (RuleState::ForceOpened, Some((429, None)))),
        (guard(Trigger::ForceClosed, None), &open[..], (RuleState::ForceClosed, None)),
        (guard(Trigger::Normal, None), &open[..], (RuleState::Open, Some((429, None)))),
        (guard(Trigger::Normal, Some(MINUTE)), &open[..], (RuleState::Open, Some((429, Some(50))))),
        (guard(Trigger::Normal, Some(NANOSECONDS)), &open[..], (RuleState::HalfOpen, None)),
        (guard(Trigger::Normal, None), &closed[..], (RuleState::Closed, None)),
        (guard(Trigger::Normal, None), &[][..], (RuleState::NotReported, None)),
    ] {
        assert_eq!(said(guard.clone(), breakers, 10), expected, "{guard:?}");
    }
}

#[test]
fn only_rules_that_match_are_shown() {
    let info = RequestInfo::parse("GET", "/api/v1/namespaces/shop/secrets").unwrap();
    assert_eq!(rules(&[guard(Trigger::Normal, None)], &info, ("a", &[]), Timestamp::UNIX_EPOCH), []);
}

#[test]
fn every_state_has_a_sentence() {
    let info = RequestInfo::parse("GET", "/api/v1/pods").unwrap();
    let holding = Guard { holds: true, ..guard(Trigger::Normal, None) };
    let rule = rules(&[holding], &info, ("a", &[breaker("Opened")]), Timestamp::UNIX_EPOCH).remove(0);
    let expected = "Rule \"pods\" of CircuitBreaker ops/calm is open in this pod, and refuses the request. \
                    Before it is refused for an open breaker, the request waits for up to 20 s.";
    assert_eq!(rule.sentence(), expected);
}

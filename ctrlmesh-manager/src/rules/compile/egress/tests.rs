use ctrlmesh_common::policy::Redirect;
use ctrlmesh_common::policy::egress::UrlMatch;

use crate::rules::compile::tests::{compiled, epochs, pod, shard, status};
use crate::rules::compile::{Compiled, sendable};

use super::*;

/// A breaker `name` of namespace `ops`, with this more in its metadata, for pods with the label `app`.
fn breaker(name: &str, metadata: &str, rules: &str) -> String {
    format!(
        "---\napiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: CircuitBreaker\nmetadata: {{name: {name}, namespace: ops{metadata}}}\n\
         spec: {{selector: {{matchLabels: {{app: op}}}}, trafficInterceptRules: [{rules}]}}\n"
    )
}

fn rule(name: &str, kind: &str, contents: &str) -> String {
    format!("{{name: {name}, interceptType: Whitelist, contentType: {kind}, contents: [{contents}], methods: ['*']}}")
}

/// An injection `name` of namespace `ops` for the same pods.
fn injection(name: &str, faults: &str) -> String {
    format!(
        "---\napiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: FaultInjection\nmetadata: {{name: {name}, namespace: ops}}\n\
         spec: {{selector: {{matchLabels: {{app: op}}}}, httpFault: [{faults}]}}\n"
    )
}

fn fault(name: &str, http: &str) -> String {
    format!("{{name: {name}, abort: {{httpStatus: 503}}, match: {{httpMatch: [{http}]}}}}")
}

/// The faults of the first pod, each with how many of its matches are left.
fn faults(compiled: &Compiled) -> Vec<(String, usize)> {
    let policy = &compiled.policies.values().next().unwrap().policy;
    policy.faults.iter().map(|fault| (fault.full_name(), fault.http.len())).collect()
}

fn op(name: &str) -> Member {
    pod(name, &[("shard", "a"), ("app", "op")])
}

fn egress(compiled: &Compiled) -> Option<&Egress> {
    compiled.policies.values().next().unwrap().policy.egress.as_ref()
}

/// The rules of the first pod, as `BREAKER/RULE`.
fn rules(compiled: &Compiled) -> Vec<String> {
    let access = egress(compiled).into_iter().flat_map(|egress| &egress.access);
    access.map(|rule| format!("{}/{}", rule.breaker, rule.rule)).collect()
}

fn many_ports(first: u16, count: u16) -> String {
    (first..first + count).map(|port| format!("'a:{port}'")).collect::<Vec<_>>().join(", ")
}

#[test]
fn a_pod_has_the_rules_and_ports_of_every_breaker_that_selects_it() {
    let texts = [
        shard("a", "{team: a}"),
        breaker("b", "", &rule("same", "Normal", "'a:8443', b")),
        breaker("a", "", &format!("{}, {}", rule("same", "Normal", "'http://c'"), rule("more", "Regexp", "'.*'"))),
        breaker("elsewhere", "", &rule("one", "Normal", "a")).replace("namespace: ops", "namespace: other"),
    ];
    let other = pod("q", &[("shard", "a")]);
    let compiled = compiled(&texts, &[op("p"), other], &Compiled::default());
    assert_eq!(rules(&compiled), ["ops/a/same", "ops/a/more", "ops/b/same"]);
    assert_eq!(egress(&compiled).unwrap().ports, [80, 443, 8443]);
    assert!(matches!(egress(&compiled).unwrap().access[1].urls[..], [UrlMatch::Regex(_)]));
    let policies: Vec<_> = compiled.policies.values().map(|one| &one.policy).collect();
    assert!(policies[1].egress.is_none() && policies.iter().all(|policy| policy.check().is_ok()));
}

#[test]
fn what_is_switched_off_or_invalid_gives_no_rule() {
    let of = |text: String| egress(&compiled(&[text], &[op("p")], &Compiled::default())).is_some();
    let one = rule("one", "Normal", "a");
    let labels = |value: &str| format!(", labels: {{circuitbreaker.ctrlmesh.kusionstack.io/disable: '{value}'}}");
    assert!(of(breaker("b", &labels("false"), &one)));
    assert!(!of(breaker("b", &labels("true"), &one)));
    assert!(!of(breaker("b", ", deletionTimestamp: '2026-01-01T00:00:00Z'", &one)));
    assert!(!of(breaker("b", "", &rule("one", "Normal", "'a?b'"))));
    assert!(!of(breaker("b", "", "")));
}

#[test]
fn rules_leave_epochs_alone_and_are_sent_at_once() {
    let pods = [op("p")];
    let first = compiled(&[shard("a", "{team: a}")], &pods, &Compiled::default());
    let rules = breaker("b", "", &rule("one", "Normal", "a"));
    let said = shard("a", "{team: a}") + &status(&first, "ops/a");
    let with_rules = compiled(&[said, rules.clone()], &pods, &first);
    assert_eq!(epochs(&with_rules), epochs(&first));
    let texts = [shard("a", "{team: b}") + &status(&first, "ops/a"), rules];
    let unwritten = sendable(&compiled(&texts, &pods, &first), &first.policies);
    let policy = &unwritten[&pods[0].name].policy;
    assert!(policy.egress.is_some() && policy.limits == first.policies[&pods[0].name].policy.limits);
    let gone = compiled(&[shard("a", "{}")], &pods, &with_rules);
    assert_eq!(egress(&gone), None);
}

#[test]
fn rules_beyond_the_ports_of_a_pod_are_left_out_and_reported() {
    let guard = "rateLimitings: [{name: g, triggerPolicy: ForceOpened, resourceRules: [{apiGroups: [''], resources: [pods], verbs: [list], namespaces: ['*']}]}], trafficInterceptRules";
    let texts = [
        breaker("a", "", &rule("one", "Normal", &many_ports(100, 20))),
        breaker("b", "", &rule("one", "Normal", &many_ports(110, 23))).replace("trafficInterceptRules", guard),
        breaker("c", "", &rule("one", "Normal", &many_ports(110, 22))),
    ];
    let compiled = compiled(&texts, &[op("p")], &Compiled::default());
    assert_eq!(
        (rules(&compiled), egress(&compiled).unwrap().ports.len()),
        (vec!["ops/a/one".into(), "ops/c/one".into()], 32)
    );
    let [trouble] = compiled.troubles.as_slice() else { panic!("{:?}", compiled.troubles) };
    assert_eq!(trouble.object, "CircuitBreaker ops/b");
    let message = "its trafficInterceptRules and restRules do not hold for Pod ops/p: all CircuitBreakers and FaultInjections of a pod may name 32 ports";
    assert_eq!(trouble.message, message);
    assert_eq!(compiled.policies.values().next().unwrap().policy.guards.len(), 1, "its limits hold");
}

#[test]
fn rules_beyond_the_regular_expressions_of_a_pod_are_left_out() {
    let regexps = |name: &str, count: usize| breaker(name, "", &rule("one", "Regexp", &vec!["a"; count].join(", ")));
    let texts = [regexps("a", 10), regexps("b", 7), regexps("c", 6)];
    let compiled = compiled(&texts, &[op("p")], &Compiled::default());
    assert_eq!(rules(&compiled), ["ops/a/one", "ops/c/one"]);
    assert!(compiled.troubles[0].message.ends_with("may have 16 regular expressions"), "{:?}", compiled.troubles);
}

#[test]
fn a_pod_whose_proxy_sees_no_other_server_has_no_rule() {
    let texts = [shard("a", "{team: a}"), breaker("b", "", &rule("one", "Normal", "a"))];
    for (redirect, forward_proxy, has_rule) in [
        (Redirect::Node, false, true),
        (Redirect::Sidecar, false, true),
        (Redirect::Nowhere, false, false),
        (Redirect::Nowhere, true, true),
    ] {
        let pod = Member { redirect, forward_proxy, ..op("p") };
        let compiled = compiled(&texts, &[pod], &Compiled::default());
        assert_eq!(egress(&compiled).is_some(), has_rule, "{redirect:?} {forward_proxy}");
        assert_eq!(compiled.troubles, []);
        assert_eq!(compiled.policies.values().next().unwrap().policy.forward_proxy, forward_proxy);
    }
}

#[test]
fn ports_are_those_of_rules_and_faults() {
    let at_ports = fault("one", "{ports: [8443, 80]}, {path: {exact: /a}}");
    let texts = [breaker("b", "", &rule("one", "Normal", "'a:8080'")), injection("i", &at_ports)];
    let of_both = compiled(&texts, &[op("p")], &Compiled::default());
    assert_eq!(egress(&of_both).unwrap().ports, [80, 8080, 8443]);
    assert_eq!((rules(&of_both), faults(&of_both)), (vec!["ops/b/one".into()], vec![("ops/i/one".into(), 2)]));
    let of_faults = compiled(&texts[1..], &[op("p")], &Compiled::default());
    assert_eq!(egress(&of_faults), Some(&Egress { ports: vec![80, 8443], access: Vec::new() }));
    let of_api = compiled(&[injection("i", &fault("one", "{path: {exact: /a}}"))], &[op("p")], &Compiled::default());
    assert_eq!((egress(&of_api), faults(&of_api)), (None, vec![("ops/i/one".into(), 1)]));
}

#[test]
fn faults_beyond_the_ports_of_a_pod_are_left_out_and_reported() {
    let ports: Vec<String> = (200..220).map(|port| port.to_string()).collect();
    let large = format!(
        "{}, {}",
        fault("all", &format!("{{ports: [{}]}}, {{}}", ports.join(", "))),
        fault("out", "{ports: [200]}")
    );
    let texts = [
        breaker("a", "", &rule("one", "Normal", &many_ports(100, 20))),
        injection("a", &fault("api", "{path: {exact: /a}}")),
        injection("b", &large),
        injection("c", &fault("in", "{ports: [100, 300]}")),
    ];
    let compiled = compiled(&texts, &[op("p")], &Compiled::default());
    assert_eq!(egress(&compiled).unwrap().ports.len(), 21);
    let expected = [("ops/a/api", 1), ("ops/b/all", 1), ("ops/c/in", 1)];
    assert_eq!(faults(&compiled), expected.map(|(name, matches)| (name.to_owned(), matches)));
    let [trouble] = compiled.troubles.as_slice() else { panic!("{:?}", compiled.troubles) };
    assert_eq!(trouble.object, "FaultInjection ops/b");
    let message = "its faults of requests to other servers do not hold for Pod ops/p: all CircuitBreakers and FaultInjections of a pod may name 32 ports";
    assert_eq!(trouble.message, message);
}

#[test]
fn a_pod_whose_proxy_sees_no_other_server_has_faults_of_the_api_server_only() {
    let outside = Member { redirect: Redirect::Nowhere, ..op("p") };
    let both = format!("{}, {}", fault("both", "{ports: [80]}, {path: {exact: /a}}"), fault("out", "{ports: [80]}"));
    let compiled = compiled(&[shard("a", "{team: a}"), injection("i", &both)], &[outside], &Compiled::default());
    assert_eq!((egress(&compiled), compiled.troubles.as_slice()), (None, &[][..]));
    assert_eq!(faults(&compiled), [("ops/i/both".into(), 1)]);
    let policy = serde_json::to_string(&compiled.policies.values().next().unwrap().policy).unwrap();
    assert!(!policy.contains("ports"), "an older proxy refuses what it does not know: {policy}");
}

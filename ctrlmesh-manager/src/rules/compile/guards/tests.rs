use ctrlmesh_common::policy::egress::{Scheme, UrlParts};
use ctrlmesh_common::policy::guard::{Bucket, Part, Trigger};

use crate::rules::compile::tests::{compiled, epochs, pod, shard, status};
use crate::rules::compile::{Compiled, sendable};

use super::*;

/// A breaker `name` of namespace `ops`, with this more in its metadata, for pods with the label `app`.
fn breaker(name: &str, metadata: &str, rules: &str) -> String {
    format!(
        "---\napiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: CircuitBreaker\nmetadata: {{name: {name}, namespace: ops{metadata}}}\n\
         spec: {{selector: {{matchLabels: {{app: op}}}}, rateLimitings: [{rules}]}}\n"
    )
}

/// A rule over `resource`.
fn rule(name: &str, resource: &str, more: &str) -> String {
    let requests = format!("[{{apiGroups: ['*'], resources: [{resource}], verbs: [create], namespaces: ['*']}}]");
    format!(
        "{{name: {name}, bucket: {{burst: 5, interval: 1s, limit: 2}}, triggerPolicy: LimiterOnly, resourceRules: {requests}{more}}}"
    )
}

fn op(name: &str, shard: &str) -> Member {
    pod(name, &[("shard", shard), ("app", "op")])
}

/// The rules of each pod.
fn rules(compiled: &Compiled) -> Vec<(&str, Vec<String>)> {
    let of = |policy: &CompiledPolicy| {
        policy.policy.guards.iter().map(|one| format!("{}/{}", one.breaker, one.rule)).collect()
    };
    compiled.policies.iter().map(|(pod, policy)| (pod.name.as_str(), of(policy))).collect()
}

#[test]
fn a_pod_has_the_rules_of_every_breaker_that_selects_it() {
    let pods = [op("p", "a"), op("q", "none"), pod("r", &[("shard", "a")])];
    let texts = [
        shard("a", "{team: a}"),
        breaker("b", "", &rule("same", "pods", "")),
        breaker("a", "", &format!("{}, {}", rule("same", "pods", ""), rule("more", "nodes", ""))),
        breaker("elsewhere", "", &rule("one", "pods", "")).replace("namespace: ops", "namespace: other"),
    ];
    let compiled = compiled(&texts, &pods, &Compiled::default());
    let all = ["ops/a/same", "ops/a/more", "ops/b/same"].map(str::to_owned).to_vec();
    assert_eq!(rules(&compiled), [("p", all.clone()), ("q", all), ("r", Vec::new())]);
    let guard = &compiled.policies.values().next().unwrap().policy.guards[0];
    assert_eq!(guard.bucket, Some(Bucket { burst: 5, limit: 2, interval_nanoseconds: 1_000_000_000 }));
    assert_eq!((guard.trigger, guard.sleeping_window_nanoseconds, &guard.reset), (Trigger::LimiterOnly, None, &None));
    assert!(compiled.policies.values().all(|policy| policy.policy.check().is_ok()));
}

#[test]
fn guards_leave_epochs_alone_and_are_sent_at_once() {
    let pods = [op("p", "a")];
    let first = compiled(&[shard("a", "{team: a}")], &pods, &Compiled::default());
    let said = shard("a", "{team: a}") + &status(&first, "ops/a");
    let guarded = compiled(&[said, breaker("b", "", &rule("one", "pods", ""))], &pods, &first);
    assert_eq!(epochs(&guarded), epochs(&first));
    assert_eq!(guarded.operators["ops/a"].policy_digest, first.operators["ops/a"].policy_digest);
    let digest = |compiled: &Compiled| compiled.policies.values().map(|policy| policy.digest()).collect::<Vec<_>>();
    assert_ne!(digest(&guarded), digest(&first));
    // The status of the operator cannot be written, or the ShardingConfig is wrong: the guards change nevertheless.
    let texts = [shard("a", "{team: b}") + &status(&first, "ops/a"), breaker("b", "", &rule("one", "pods", ""))];
    let unwritten = sendable(&compiled(&texts, &pods, &first), &first.policies);
    let policy = &unwritten[&pods[0].name].policy;
    assert_eq!((policy.guards.len(), &policy.limits), (1, &first.policies[&pods[0].name].policy.limits));
    let texts = [shard("a", "{}"), breaker("b", "", &rule("one", "pods", ""))];
    assert_eq!(rules(&compiled(&texts, &pods, &first))[0].1.len(), 1);
    let gone = compiled(&[shard("a", "{}")], &pods, &guarded);
    assert_eq!(rules(&gone), [("p", Vec::new())]);
}

#[test]
fn pods_with_the_same_guards_share_one_policy() {
    let pods = [op("p", "a"), op("q", "a"), pod("r", &[("shard", "a")])];
    let texts = [shard("a", "{team: a}"), breaker("b", "", &rule("one", "pods", ""))];
    let compiled = compiled(&texts, &pods, &Compiled::default());
    let policies: Vec<_> = compiled.policies.values().collect();
    assert!(Arc::ptr_eq(policies[0], policies[1]) && !Arc::ptr_eq(policies[0], policies[2]));
}

#[test]
fn what_is_switched_off_invalid_or_for_others_is_left_out() {
    let pods = [op("p", "a")];
    let of = |text: String| {
        let compiled = compiled(&[text], &pods, &Compiled::default());
        let troubles: Vec<String> = compiled.troubles.iter().map(|one| one.object.clone()).collect();
        (rules(&compiled)[0].1.len(), troubles)
    };
    let one = rule("one", "pods", "");
    let labels = |value: &str| format!(", labels: {{circuitbreaker.ctrlmesh.kusionstack.io/disable: '{value}'}}");
    assert_eq!(of(breaker("b", &labels("false"), &one)), (1, Vec::new()));
    assert_eq!(of(breaker("b", &labels("true"), &one)), (0, Vec::new()));
    assert_eq!(of(breaker("b", ", deletionTimestamp: '2026-01-01T00:00:00Z'", &one)), (0, Vec::new()));
    let invalid = breaker("b", "", &one.replace("interval: 1s", "interval: soon"));
    assert_eq!(of(invalid), (0, vec!["CircuitBreaker ops/b".to_owned()]));
}

#[test]
fn limits_on_other_servers_name_urls_and_ports() {
    let rest = "{name: r, triggerPolicy: ForceOpened, restRules: [{url: 'http://a/', method: GET}, {url: 'https://*.b:8443/v1/*', method: '*'}]}";
    let compiled = compiled(&[breaker("b", "", rest)], &[op("p", "a")], &Compiled::default());
    let policy = &compiled.policies.values().next().unwrap().policy;
    let url = |scheme, host: &str, port, path: &str| UrlParts {
        scheme: Some(scheme),
        host: host.to_owned(),
        port: Some(port),
        path: Some(path.to_owned()),
    };
    let [first, second] = policy.guards[0].urls.as_slice() else { panic!("{policy:?}") };
    assert_eq!((&first.url, &*first.method), (&url(Scheme::Http, "a", 80, "/"), "GET"));
    assert_eq!((&second.url, &*second.method), (&url(Scheme::Https, "*.b", 8443, "/v1/*"), "*"));
    let egress = policy.egress.as_ref().unwrap();
    assert_eq!((&*egress.ports, egress.access.len()), (&[80, 8443][..], 0));
    assert_eq!(policy.check(), Ok(()));
}

#[test]
fn a_reset_names_one_rule_and_may_say_more() {
    for (value, resets) in [("one", true), ("one 2026-11-25", true), ("one2", false), ("two", false), ("", false)] {
        let annotation = format!(", annotations: {{circuitbreaker.ctrlmesh.kusionstack.io/reset: '{value}'}}");
        let texts = [breaker("b", &annotation, &rule("one", "pods", ""))];
        let compiled = compiled(&texts, &[op("p", "a")], &Compiled::default());
        let guard = &compiled.policies.values().next().unwrap().policy.guards[0];
        assert_eq!(guard.reset.as_deref(), resets.then_some(value), "{value}");
    }
}

#[test]
fn a_window_is_only_that_of_its_policy() {
    let recovery = |text: &str| {
        let rule = rule("one", "pods", &format!(", recoverPolicy: {text}")).replace("LimiterOnly", "Normal");
        let compiled = compiled(&[breaker("b", "", &rule)], &[op("p", "a")], &Compiled::default());
        compiled.policies.values().next().unwrap().policy.guards[0].sleeping_window_nanoseconds
    };
    assert_eq!(recovery("{type: SleepingWindow, sleepingWindowSize: 1m30s}"), Some(90_000_000_000));
    assert_eq!(recovery("{type: Manual, sleepingWindowSize: 1m30s}"), None);
}

#[test]
fn breakers_that_have_no_room_are_reported() {
    let namespaces: Vec<String> = (0..1000).map(|at| format!("namespace-{at:050}")).collect();
    let rule =
        rule("one", "pods", "").replace("namespaces: ['*']", &format!("namespaces: [{}]", namespaces.join(", ")));
    let texts: Vec<String> = (0..6).map(|at| breaker(&format!("b{at}"), "", &rule)).collect();
    let compiled = compiled(&texts, &[op("p", "a")], &Compiled::default());
    let kept = rules(&compiled)[0].1.len();
    let objects: Vec<&str> = compiled.troubles.iter().map(|one| one.object.as_str()).collect();
    assert_eq!((kept, objects), (4, vec!["CircuitBreaker ops/b4", "CircuitBreaker ops/b5"]));
    assert!(compiled.troubles[0].message.contains("Pod ops/p"), "{:?}", compiled.troubles[0]);
}

#[test]
fn pods_have_the_parts_that_the_status_gives_them() {
    let shared = rule("one", "pods", "").replace("limit: 2", "limit: 2, scope: Operator");
    let status = "status: {divisions: [{group: ops/a, generation: 7, parts: 3, pods: [{name: q, uid: uid-of-q}, {name: p, uid: uid-of-p}]}]}\n";
    let pods = ["p", "q", "r"].map(|name| Member { uid: format!("uid-of-{name}"), ..op(name, "a") });
    let parts = |status: &str| {
        let texts = [shard("a", "{team: a}"), breaker("b", "", &shared) + status];
        let compiled = compiled(&texts, &pods, &Compiled::default());
        assert!(compiled.policies.values().all(|policy| policy.policy.check().is_ok()));
        compiled.policies.values().map(|policy| policy.policy.guards[0].part.clone()).collect::<Vec<_>>()
    };
    let part = |generation, of, number| Some(Part { group: "ops/a".to_owned(), generation, of, number });
    assert_eq!(parts(status), [part(7, 3, Some(1)), part(7, 3, Some(0)), part(7, 3, None)]);
    assert_eq!(parts(""), [(); 3].map(|()| part(0, 1, None)), "nobody knows how it is divided");
}

use crate::rules::compile::Compiled;
use crate::rules::compile::tests::{compiled, pod, root, shard, shards, status};

/// Names of the ShardingConfigs that get no new policy.
fn refused(compiled: &Compiled) -> Vec<&str> {
    let troubles = compiled.troubles.iter();
    troubles.map(|trouble| trouble.object.trim_start_matches("ShardingConfig ops/")).collect()
}

#[test]
fn of_two_owners_of_an_object_the_one_in_force_or_older_stays() {
    let pods = [pod("p", &[("shard", "a")]), pod("q", &[("shard", "b")])];
    let created_at = |text: String, day: u32| {
        let created_at = format!("namespace: ops, creationTimestamp: '2026-01-0{day}T00:00:00Z'");
        text.replacen("namespace: ops", &created_at, 1)
    };
    let (a, b) = (created_at(shard("a", "{team: x}"), 2), created_at(shard("b", "{team: x}"), 1));
    let never = compiled(&[a.clone(), b.clone()], &pods, &Compiled::default());
    assert_eq!(refused(&never), ["a"], "it is the younger");
    assert_eq!(shards(&never), [("q", "b")]);
    let message = &never.troubles[0].message;
    assert!(message.starts_with("spec.limits: could own objects of a resource that is not named"));
    assert!(message.ends_with("; no new policy is sent until they do"), "{message}");
    let by_name = compiled(&[shard("b", "{team: x}"), shard("a", "{team: x}")], &pods, &never);
    assert_eq!(refused(&by_name), ["b"], "of no age, by name");
    // `a` was alone; then the older `b` was changed to own the same.
    let alone = compiled(std::slice::from_ref(&a), &pods, &Compiled::default());
    let written = a.clone() + &status(&alone, "ops/a");
    let changed = compiled(&[written.clone(), b.clone()], &pods, &alone);
    assert_eq!(refused(&changed), ["b"], "it is not in force");
    assert_eq!(changed.policies[&pods[0].name], alone.policies[&pods[0].name]);
    // The policy of `a` changes without an edit, as with another version of the manager: nothing is in force.
    let digest = &alone.operators["ops/a"].policy_digest;
    let accepted = |status: &str, generation: u32| {
        let condition = format!(
            "{{type: Accepted, status: '{status}', observedGeneration: {generation}, reason: r, message: m, lastTransitionTime: '2026-01-03T00:00:00Z'}}"
        );
        format!("conditions: [{condition}]")
    };
    let second = |text: &str| text.replacen("namespace: ops", "namespace: ops, generation: 2", 1);
    for (of_a, of_b, why) in [
        (accepted("True", 2), accepted("False", 2), "it was not accepted"),
        (accepted("True", 2), accepted("True", 1), "it was edited since it was accepted"),
        (accepted("True", 1), accepted("False", 2), "it was edited as well, but accepted before"),
    ] {
        let of_a = second(&written).replace(digest, "0").replace("status: {", &format!("status: {{{of_a}, "));
        let of_b = second(&b) + &format!("status: {{epoch: 1, policyDigest: '1', {of_b}}}\n");
        let found = compiled(&[of_a, of_b], &pods, &alone);
        assert_eq!(refused(&found), ["b"], "{why}");
    }
    // Both came into force while nothing was checked.
    let other = compiled(std::slice::from_ref(&b), &pods, &Compiled::default());
    let both = [written, b + &status(&other, "ops/b")];
    assert_eq!(refused(&compiled(&both, &pods, &alone)), ["a"], "it is the younger");
    assert_eq!(compiled(&both, &pods, &alone).policies[&pods[0].name], alone.policies[&pods[0].name]);
}

#[test]
fn of_two_roots_with_one_prefix_or_one_target_the_older_divides() {
    let rule = "targetStatefulSet: op, auto: {shardingSize: 1, everyShardReplicas: 1}";
    let pods = [pod("op-0", &[])];
    let old = "namespace: ops, creationTimestamp: '2026-01-01T00:00:00Z'";
    let first = root(rule).replace("namespace: ops", old);
    for (from, to) in [("targetStatefulSet: op", "targetStatefulSet: x"), ("prefix: r", "prefix: s")] {
        let later = root(rule).replace("name: root", "name: later").replace(from, to);
        let found = compiled(&[later, first.clone()], &pods, &Compiled::default());
        assert_eq!(refused(&found)[0], "later", "{to}");
        assert_eq!(found.operators.keys().collect::<Vec<_>>(), ["ops/root"], "{to}");
        assert_eq!(shards(&found), [("op-0", "r-1-normal")], "{to}");
    }
}

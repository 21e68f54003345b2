use ctrlmesh_common::api::read_sharding_configs;
use ctrlmesh_common::names::label;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::*;

fn config(name: &str, spec: &str) -> ShardingConfig {
    let text = format!(
        "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {{name: {name}, namespace: a}}\nspec: {spec}\n"
    );
    read_sharding_configs(&text).unwrap().remove(0)
}

fn shard(name: &str, team: &str) -> ShardingConfig {
    let limits = format!("[{{selector: {{matchLabels: {{team: {team}}}}}}}]");
    config(
        name,
        &format!(
            "{{controller: {{leaderElectionName: lock}}, selector: {{matchLabels: {{shard: {name}}}}}, limits: {limits}}}"
        ),
    )
}

fn root(name: &str, more: &str) -> ShardingConfig {
    let rule = "targetStatefulSet: op, auto: {shardingSize: 2, everyShardReplicas: 1}";
    let mut root =
        config(name, &format!("{{controller: {{leaderElectionName: lock}}, root: {{prefix: r, {rule}{more}}}}}"));
    root.metadata.uid = Some(format!("uid-of-{name}"));
    root
}

fn owned(mut config: ShardingConfig, root: &ShardingConfig) -> ShardingConfig {
    config.metadata.owner_references = Some(vec![OwnerReference {
        api_version: "ctrlmesh.kusionstack.io/v1alpha1".to_owned(),
        kind: "ShardingConfig".to_owned(),
        name: root.metadata.name.clone().unwrap(),
        uid: root.metadata.uid.clone().unwrap(),
        controller: Some(true),
        block_owner_deletion: None,
    }]);
    config
}

fn labelled(mut config: ShardingConfig, root: &str) -> ShardingConfig {
    config.metadata.labels = Some([(label::AUTO_SHARDING_ROOT.to_owned(), root.to_owned())].into());
    config
}

fn errors(config: &ShardingConfig, others: &[&ShardingConfig]) -> Vec<String> {
    let mut report = Report::default();
    with_others(config, others, &mut report);
    report.errors.iter().map(ToString::to_string).collect()
}

fn losers(configs: &[&ShardingConfig], near: &[&ShardingConfig]) -> Vec<(usize, String)> {
    superseded(configs, near).into_iter().map(|(at, problem)| (at, problem.to_string())).collect()
}

#[test]
fn a_label_that_names_a_root_spares_nobody_from_being_compared() {
    let (one, other) = (shard("one", "a"), shard("other", "a"));
    let nope = |config: &ShardingConfig| labelled(config.clone(), "nope");
    assert_eq!(errors(&nope(&one), &[&nope(&other)]).len(), 1);
    let root = root("root", "");
    assert_eq!(errors(&labelled(one, "root"), &[&root]).len(), 1);
}

#[test]
fn shards_of_a_root_are_compared_only_if_it_is_switched_off() {
    let on = root("root", "");
    let (one, other) = (owned(shard("one", "a"), &on), owned(shard("other", "a"), &on));
    assert_eq!(errors(&one, &[&other, &on]), Vec::<String>::new());
    assert_eq!(errors(&on, &[&one, &other]), Vec::<String>::new());
    let stranger = shard("stranger", "a");
    assert_eq!(errors(&one, &[&stranger, &on]).len(), 1);
    let off = root("root", ", disable: true");
    let found = errors(&one, &[&other, &off]);
    assert!(found[0].contains("ShardingConfig \"other\", of the same operator"), "{found:?}");
    assert_eq!(errors(&off, &[&one, &other]), Vec::<String>::new());
    // Its owner is gone, so it will be deleted too.
    assert_eq!(errors(&one, &[&stranger]), Vec::<String>::new());
    let mut earlier = on.clone();
    earlier.metadata.uid = Some("another".to_owned());
    assert_eq!(errors(&earlier, &[&one]), Vec::<String>::new());
}

#[test]
fn a_root_makes_no_shard_that_is_called_as_one_that_is_there() {
    let root = root("root", ", canary: {replicas: 1, inShardHash: ['7']}");
    for name in ["r-0-canary", "r-1-normal", "r-2-normal"] {
        let mut there = shard(name, "a");
        there.spec.controller = None;
        there.spec.selector = None;
        let found = errors(&root, &[&there]);
        assert!(found[0].starts_with("spec.root.prefix: would make a shard called"), "{found:?}");
        let found = errors(&there, &[&root]);
        assert_eq!(found[0], "metadata.name: is what root \"root\" calls one of its shards; choose another");
        assert_eq!(errors(&root, &[&owned(there.clone(), &root)]), Vec::<String>::new());
        assert_eq!(errors(&owned(there, &root), &[&root]), Vec::<String>::new());
    }
    let mut free = shard("r-3-normal", "a");
    free.spec.controller = Some(ctrlmesh_common::api::Controller { leader_election_name: "x".to_owned() });
    assert_eq!(errors(&root, &[&free]), Vec::<String>::new());
}

#[test]
fn two_roots_never_have_one_prefix() {
    let mut other = root("other", "");
    other.spec.root.as_mut().unwrap().target_stateful_set = Some("more".to_owned());
    other.spec.controller = None;
    let found = errors(&root("root", ""), &[&other]);
    assert_eq!(found, ["spec.root.prefix: is that of root \"other\" too; their shards would have the same names"]);
    other.spec.root.as_mut().unwrap().disable = Some(true);
    assert_eq!(errors(&root("root", ""), &[&other]), Vec::<String>::new(), "it makes none");
}

#[test]
fn of_two_rivals_the_later_loses_and_blocks_nobody() {
    let (a, b, c) = (shard("a", "x"), shard("b", "x"), shard("c", "y"));
    let all = [&a, &b, &c];
    let found = losers(&all, &all);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].0 == 1 && found[0].1.contains("as ShardingConfig \"a\""), "{found:?}");
    let d = shard("d", "x");
    let of_b = [&b, &a, &d, &c];
    assert_eq!(losers(&of_b, &of_b).iter().map(|one| one.0).collect::<Vec<_>>(), [1, 2]);
    let on = root("root", "");
    let made = owned(shard("e", "y"), &on);
    let all = [&on, &made];
    assert_eq!(losers(&all, &all), []);
    let by_hand = [&on, &c];
    assert_eq!(losers(&by_hand, &by_hand).len(), 1);
    let target = root("later", "");
    let roots = [&on, &target];
    assert!(losers(&roots, &roots)[0].1.starts_with("spec.root.targetStatefulSet"));
    let mut unknown = shard("f", "x");
    unknown.spec.controller = None;
    let unsure = [&a, &unknown];
    assert_eq!(losers(&unsure, &unsure), [], "nobody knows that they are of one operator");
}

#[test]
fn limits_in_another_order_are_compared_by_what_they_leave() {
    let limits = |first: &str, second: &str| {
        let pods = format!(
            "{{relateResources: [{{apiGroups: [''], resources: [pods]}}], selector: {{matchLabels: {{team: {first}}}}}}}"
        );
        let rest = format!(
            "{{relateResources: [{{apiGroups: [apps], resources: ['*']}}], selector: {{matchLabels: {{team: {second}}}}}}}"
        );
        (format!("[{pods}, {rest}]"), format!("[{rest}, {pods}]"))
    };
    let shard = |name: &str, limits: &str| {
        config(
            name,
            &format!(
                "{{controller: {{leaderElectionName: lock}}, selector: {{matchLabels: {{shard: {name}}}}}, limits: {limits}}}"
            ),
        )
    };
    let one = shard("one", &limits("a", "a").0);
    for (first, second, expected) in [
        ("b", "b", None),
        ("a", "b", Some("the same pods as")),
        ("b", "a", Some("objects of a resource that is not named")),
    ] {
        let (alike, turned) = limits(first, second);
        for limits in [alike, turned] {
            let found = errors(&one, &[&shard("other", &limits)]);
            assert_eq!(found.len(), usize::from(expected.is_some()), "{found:?}");
            let said = found.first().zip(expected);
            assert!(said.is_none_or(|(found, expected)| found.contains(expected)), "{found:?}");
        }
    }
}

fn limited(name: &str, limits: &[String]) -> ShardingConfig {
    config(
        name,
        &format!(
            "{{controller: {{leaderElectionName: lock}}, selector: {{matchLabels: {{shard: {name}}}}}, limits: [{}]}}",
            limits.join(", ")
        ),
    )
}

fn values(what: &str, count: usize) -> String {
    (0..count).map(|at| format!("{what}{at}")).collect::<Vec<_>>().join(", ")
}

#[test]
fn one_limit_of_many_resources_is_compared_once() {
    let requirements = |what: &str| {
        let keys = (0..8).map(|key| format!("{{key: k{key}, operator: In, values: [{}]}}", values(what, 1024)));
        keys.collect::<Vec<_>>().join(", ")
    };
    let limit = |first: usize, what: &str| {
        let entries = (0..32).map(|at| {
            let resources = values(&format!("r{}x", (first + at) % 32), 64);
            format!("{{apiGroups: [apps], resources: [{resources}]}}")
        });
        let entries = entries.collect::<Vec<_>>().join(", ");
        let selector = requirements(what);
        format!("{{relateResources: [{entries}], selector: {{matchExpressions: [{selector}]}}}}")
    };
    // In another order, so that they are not alike at first sight. Compared per resource, it would take 2,048
    // times 16,000 values, which exceeds the budget.
    let one = limited("one", &[limit(0, "a")]);
    assert_eq!(errors(&one, &[&limited("other", &[limit(1, "b")])]), Vec::<String>::new());
    let found = errors(&one, &[&limited("other", &[limit(1, "a")])]);
    assert!(found[0].contains("could own the same r0x0.apps"), "{found:?}");
}

#[test]
fn configs_that_take_too_long_to_compare_are_refused() {
    let limit = |values_of: &str| {
        format!("{{selector: {{matchExpressions: [{{key: k, operator: In, values: [{}]}}]}}}}", values(values_of, 100))
    };
    let (one, other) = (limited("one", &[limit("a")]), limited("other", &[limit("b")]));
    let (mine, theirs) = (Claim::of(&one), Claim::of(&other));
    let compared = |steps: usize| compared(&one, &mine, &other, &theirs, Relation::Same, &mut Budget::of(steps));
    assert_eq!(compared(1000), None);
    let found = compared(100).unwrap().to_string();
    let expected = "spec.limits: names too many resources and values to be compared with ShardingConfig \"other\"";
    assert!(found.starts_with(expected), "{found}");
}

fn warnings(config: &ShardingConfig, others: &[&ShardingConfig], keys: &[&str]) -> Vec<String> {
    let mut report = Report::default();
    with_others(config, others, &mut report);
    hashes(config, others, keys, &mut report);
    assert_eq!(report.errors, []);
    report.warnings.iter().map(ToString::to_string).collect()
}

/// A shard of `hashes` by the label `key`.
fn of_hashes(key: &str, name: &str, hashes: std::ops::Range<u8>) -> ShardingConfig {
    let hashes = hashes.map(|hash| format!("'{hash}'")).collect::<Vec<_>>().join(", ");
    let pods = "relateResources: [{apiGroups: [''], resources: [pods]}]";
    let selector = format!("{{key: {key}, operator: In, values: [{hashes}]}}");
    limited(name, &[format!("{{{pods}, selector: {{matchExpressions: [{selector}]}}}}")])
}

#[test]
fn hashes_that_no_manual_shard_has_are_reported_for_any_label() {
    let missing =
        ["spec.limits: the hashes 2 of pods belong to nobody: neither this shard nor another of its operator has them"];
    for key in [label::SHARDING_HASH, label::SHARD_HASH, "example.com/slot"] {
        let of = |name: &str, hashes| of_hashes(key, name, hashes);
        let (first, second, third) = (of("one", 0..2), of("two", 3..30), of("three", 30..32));
        let said = |others: &[&ShardingConfig]| warnings(&first, others, &["example.com/slot"]);
        assert_eq!(said(&[&second, &third]), missing, "{key}");
        assert_eq!(said(&[&second, &third, &of("four", 2..3)]), Vec::<String>::new(), "{key}");
    }
    let other = of_hashes("example.com/slot", "one", 0..2);
    assert_eq!(warnings(&other, &[], &[]), Vec::<String>::new(), "it may be any label");
}

#[test]
fn hashes_of_unknown_operators_or_roots_are_not_reported() {
    let of = |name: &str, hashes| of_hashes(label::SHARDING_HASH, name, hashes);
    let (first, second, third) = (of("one", 0..2), of("two", 3..30), of("three", 30..32));
    let none = Vec::<String>::new();
    assert_eq!(warnings(&shard("by-team", "a"), &[], &[]), none, "it is not divided by hash");
    let mut stranger = of("four", 2..3);
    stranger.spec.controller = Some(ctrlmesh_common::api::Controller { leader_election_name: "x".to_owned() });
    assert_eq!(warnings(&first, &[&second, &third, &stranger], &[]).len(), 1);
    let on = root("root", "");
    assert_eq!(warnings(&owned(of("r-1-normal", 0..2), &on), &[&on], &[]), none, "its root has them all");
    let mut anybodys = first.clone();
    anybodys.spec.controller = None;
    assert_eq!(warnings(&anybodys, &[], &[]), none, "nobody knows who its like are");
}

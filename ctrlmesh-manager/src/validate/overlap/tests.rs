use ctrlmesh_common::api::read_sharding_configs;
use ctrlmesh_common::names::label;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::*;

/// One ShardingConfig by its spec, in YAML's flow style.
fn config(name: &str, spec: &str) -> ShardingConfig {
    let text = format!(
        "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {{name: {name}, namespace: a}}\nspec: {spec}\n"
    );
    read_sharding_configs(&text).unwrap().remove(0)
}

/// A shard of the operator with the lock `lock` that sees objects of this team.
fn shard(name: &str, team: &str) -> ShardingConfig {
    let limits = format!("[{{selector: {{matchLabels: {{team: {team}}}}}}}]");
    config(
        name,
        &format!(
            "{{controller: {{leaderElectionName: lock}}, selector: {{matchLabels: {{shard: {name}}}}}, limits: {limits}}}"
        ),
    )
}

/// A root of the operator with the lock `lock`.
fn root(name: &str, more: &str) -> ShardingConfig {
    let rule = "targetStatefulSet: op, auto: {shardingSize: 2, everyShardReplicas: 1}";
    let mut root = config(
        name,
        &format!("{{controller: {{leaderElectionName: lock}}, root: {{prefix: r, {rule}{more}}}}}"),
    );
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

fn yielded(configs: &[&ShardingConfig], near: &[&ShardingConfig]) -> Vec<(usize, String)> {
    yielding(configs, near).into_iter().map(|(at, problem)| (at, problem.to_string())).collect()
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
fn what_a_root_owns_is_compared_with_it_and_its_like_only_where_it_is_switched_off() {
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
    // Its owner is gone, so it will be too.
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
        assert_eq!(
            found[0],
            "metadata.name: is what root \"root\" calls one of its shards; choose another"
        );
        assert_eq!(errors(&root, &[&owned(there.clone(), &root)]), Vec::<String>::new());
        assert_eq!(errors(&owned(there, &root), &[&root]), Vec::<String>::new());
    }
    let mut free = shard("r-3-normal", "a");
    free.spec.controller =
        Some(ctrlmesh_common::api::Controller { leader_election_name: "x".to_owned() });
    assert_eq!(errors(&root, &[&free]), Vec::<String>::new());
}

#[test]
fn two_roots_never_have_one_prefix() {
    let mut other = root("other", "");
    other.spec.root.as_mut().unwrap().target_stateful_set = Some("more".to_owned());
    other.spec.controller = None;
    let found = errors(&root("root", ""), &[&other]);
    assert_eq!(
        found,
        ["spec.root.prefix: is that of root \"other\" too; their shards would have the same names"]
    );
    other.spec.root.as_mut().unwrap().disable = Some(true);
    assert_eq!(errors(&root("root", ""), &[&other]), Vec::<String>::new(), "it makes none");
}

#[test]
fn of_two_that_are_there_the_later_yields_and_stands_in_nobodys_way() {
    let (a, b, c) = (shard("a", "x"), shard("b", "x"), shard("c", "y"));
    let all = [&a, &b, &c];
    let found = yielded(&all, &all);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].0 == 1 && found[0].1.contains("as ShardingConfig \"a\""), "{found:?}");
    let d = shard("d", "x");
    let of_b = [&b, &a, &d, &c];
    assert_eq!(yielded(&of_b, &of_b).iter().map(|one| one.0).collect::<Vec<_>>(), [1, 2]);
    let on = root("root", "");
    let made = owned(shard("e", "y"), &on);
    let all = [&on, &made];
    assert_eq!(yielded(&all, &all), []);
    let by_hand = [&on, &c];
    assert_eq!(yielded(&by_hand, &by_hand).len(), 1);
    let target = root("later", "");
    let roots = [&on, &target];
    assert!(yielded(&roots, &roots)[0].1.starts_with("spec.root.targetStatefulSet"));
    let mut unknown = shard("f", "x");
    unknown.spec.controller = None;
    let unsure = [&a, &unknown];
    assert_eq!(yielded(&unsure, &unsure), [], "nobody knows that they are of one operator");
}

#[test]
fn limits_that_are_covered_in_another_order_are_compared_by_what_they_leave() {
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

/// One shard with this limit.
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
fn what_one_limit_says_of_many_resources_is_compared_once() {
    let requirements = |what: &str| {
        let keys = (0..8)
            .map(|key| format!("{{key: k{key}, operator: In, values: [{}]}}", values(what, 4096)));
        keys.collect::<Vec<_>>().join(", ")
    };
    let limit = |entries: usize, what: &str| {
        let entries = (0..entries).map(|at| {
            format!("{{apiGroups: [apps], resources: [{}]}}", values(&format!("r{at}x"), 64))
        });
        format!(
            "{{relateResources: [{}], selector: {{matchExpressions: [{}]}}}}",
            entries.collect::<Vec<_>>().join(", "),
            requirements(what)
        )
    };
    let one = limited("one", &[limit(32, "a")]);
    assert_eq!(errors(&one, &[&limited("other", &[limit(31, "b")])]), Vec::<String>::new());
    assert_eq!(errors(&one, &[&limited("other", &[limit(31, "a")])]).len(), 1);
}

#[test]
fn what_would_take_too_long_to_compare_is_refused() {
    let limits = |groups: bool, what: &str| {
        let limit = |at: usize| {
            let related = if groups {
                format!("apiGroups: [g{at}], resources: ['*']")
            } else {
                format!("apiGroups: ['*'], resources: [r{at}]")
            };
            format!(
                "{{relateResources: [{{{related}}}], selector: {{matchExpressions: [{{key: k, operator: In, values: [{}]}}]}}}}",
                values(what, 4096)
            )
        };
        (0..64).map(limit).collect::<Vec<_>>()
    };
    let (one, other) = (limited("one", &limits(true, "a")), limited("other", &limits(false, "b")));
    let found = errors(&one, &[&other]);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("names too many resources and values to be compared"), "{found:?}");
    let both = [&one, &other];
    assert_eq!(yielded(&both, &both).len(), 1);
}

use ctrlmesh_common::api::read_sharding_configs;

use super::*;

/// Shards of one operator, by name and by the limits of each, in YAML's flow style.
fn shards(limits: &[(&str, &str)]) -> Vec<ShardingConfig> {
    let documents = limits.iter().map(|(name, limits)| {
        format!(
            "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {{name: {name}, namespace: a}}\n\
             spec:\n  controller: {{leaderElectionName: lock}}\n  selector: {{matchLabels: {{shard: {name}}}}}\n  limits: {limits}\n"
        )
    });
    read_sharding_configs(&documents.collect::<Vec<_>>().join("---\n")).unwrap()
}

fn errors(shards: &[ShardingConfig]) -> Vec<String> {
    sharding_config(&shards[0], shards, None).errors.iter().map(Problem::to_string).collect()
}

fn pods(selector: &str) -> String {
    format!("{{relateResources: [{{apiGroups: [''], resources: [pods]}}], selector: {selector}}}")
}

#[test]
fn shards_that_exclude_each_other_may_stand_together() {
    let a = pods("{matchExpressions: [{key: team, operator: In, values: [a]}]}");
    let b = pods("{matchExpressions: [{key: team, operator: NotIn, values: [a, c]}]}");
    assert_eq!(
        errors(&shards(&[("one", &format!("[{a}]")), ("other", &format!("[{b}]"))])),
        Vec::<String>::new()
    );
}

#[test]
fn shards_that_could_own_the_same_object_are_refused_by_name() {
    let a = pods("{matchLabels: {team: a}}");
    let b = pods("{matchLabels: {tier: b}}");
    let found = errors(&shards(&[("one", &format!("[{a}]")), ("other", &format!("[{b}]"))]));
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].starts_with("spec.limits: could own the same pods as ShardingConfig \"other\""),
        "{found:?}"
    );
}

#[test]
fn a_shard_that_does_not_limit_what_another_does_owns_all_of_it() {
    let a = pods("{matchLabels: {team: a}}");
    let b = "{relateResources: [{apiGroups: [apps], resources: [deployments]}], selector: {matchLabels: {team: b}}}";
    let found = errors(&shards(&[("one", &format!("[{a}]")), ("other", &format!("[{b}]"))]));
    assert_eq!(found.len(), 1, "{found:?}");
}

#[test]
fn a_wildcard_covers_resources_that_nobody_names() {
    let all = "[{selector: {matchLabels: {team: a}}}]";
    let others = "[{selector: {matchLabels: {tier: b}}}]";
    let found = errors(&shards(&[("one", all), ("other", others)]));
    assert!(found[0].contains("objects of a resource that is not named"), "{found:?}");
    let excluding = "[{selector: {matchLabels: {team: b}}}]";
    assert_eq!(errors(&shards(&[("one", all), ("other", excluding)])), Vec::<String>::new());
}

#[test]
fn limits_on_one_resource_are_all_in_force() {
    // Only together do the two limits of `one` exclude `other`.
    let both = "[{selector: {matchLabels: {team: a}}}, {relateResources: [{apiGroups: [''], resources: [pods]}], selector: {matchLabels: {tier: x}}}]";
    let other = "[{selector: {matchLabels: {team: b}}}]";
    assert_eq!(errors(&shards(&[("one", both), ("other", other)])), Vec::<String>::new());
}

#[test]
fn an_earlier_state_of_itself_is_no_conflict() {
    let limits = format!("[{}]", pods("{matchLabels: {team: a}}"));
    let shards = shards(&[("one", &limits)]);
    assert_eq!(errors(&[shards[0].clone(), shards[0].clone()]), Vec::<String>::new());
}

#[test]
fn a_pod_is_in_one_shard_only() {
    let limits = |team| format!("[{}]", pods(&format!("{{matchLabels: {{team: {team}}}}}")));
    let shards = shards(&[("one", &limits("a")), ("other", &limits("b"))]);
    let mut both = shards.clone();
    both[1].spec.selector = both[0].spec.selector.clone();
    let pod =
        PodLabels { name: "p".to_owned(), labels: [("shard".to_owned(), "one".to_owned())].into() };
    assert_eq!(
        sharding_config(&shards[0], &shards, Some(std::slice::from_ref(&pod))),
        Report::default()
    );
    let report = sharding_config(&both[0], &both, Some(&[pod]));
    assert!(
        report.errors[0]
            .to_string()
            .starts_with("spec.selector: selects pod \"p\", which ShardingConfig \"other\"")
    );
    let report = sharding_config(&shards[0], &shards, Some(&[]));
    assert_eq!((report.errors.len(), report.warnings.len()), (0, 1));
}

#[test]
fn a_manifest_that_cannot_be_read_names_line_and_field() {
    let text = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: a}\nspec:\n  limits: 5\n";
    let error = read_sharding_configs(&format!("# one\n---\n{text}")).unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains('7'), "the line: {source}");
    let foreign = text.replace("ctrlmesh.kusionstack.io/v1alpha1", "apps/v1");
    assert!(
        read_sharding_configs(&foreign)
            .unwrap_err()
            .to_string()
            .contains("apiVersion: \"apps/v1\", allowed are")
    );
    let kridge = text.replace("ctrlmesh.", "kridge.").replace("limits: 5", "limits: []");
    assert_eq!(read_sharding_configs(&kridge).unwrap().len(), 1);
}

#[test]
fn limits_that_would_keep_the_webhook_busy_are_refused() {
    let names = |kind: &str, limit: usize| {
        (0..32).map(|at| format!("{kind}{limit}x{at}")).collect::<Vec<_>>().join(", ")
    };
    let limits = (0..64).map(|limit| {
        let (groups, resources) = (names("g", limit), names("r", limit));
        format!(
            "{{relateResources: [{{apiGroups: [{groups}], resources: [{resources}]}}], selector: {{matchLabels: {{team: a}}}}}}"
        )
    });
    let limits = format!("[{}]", limits.collect::<Vec<_>>().join(", "));
    let found = errors(&shards(&[("one", &limits), ("other", &limits)]));
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].contains("2048 groups and 2048 resources in 64 entries are too many"),
        "{found:?}"
    );
}

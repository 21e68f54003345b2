use super::*;

const SHARD: &str = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: NAME}\n\
    spec: {selector: {matchLabels: {shard: NAME}}, limits: [{LIMIT}]}\n";

fn shard(name: &str, limit: &str) -> String {
    SHARD.replace("NAME", name).replace("LIMIT", limit)
}

fn check(files: &[&str]) -> Vec<(String, Vec<String>)> {
    let files = files.iter().enumerate().map(|(at, text)| {
        (format!("file{at}"), serde_saphyr::from_multiple::<Value>(text).unwrap())
    });
    let verdicts = manifests(&files.collect::<Vec<_>>()).into_iter();
    let said = verdicts.map(|verdict| {
        let errors = verdict.report.map_or_else(
            || vec!["passed over".to_owned()],
            |report| report.errors.iter().map(ToString::to_string).collect(),
        );
        (format!("{} {} {}", verdict.kind, verdict.name, verdict.place), errors)
    });
    said.collect()
}

#[test]
fn a_misspelled_field_is_refused_and_not_dropped() {
    let typo = shard(
        "a",
        "relatedResources: [{apiGroups: [''], resources: [pods]}], selector: {matchLabels: {team: a}}",
    );
    let found = check(&[&typo]);
    assert_eq!(found[0].0, "ShardingConfig a file0, document 1");
    assert_eq!(found[0].1.len(), 1, "{found:?}");
    assert!(
        found[0].1[0]
            .starts_with("spec.limits[0].relatedResources: is not a field that is known here"),
        "{found:?}"
    );
}

#[test]
fn shards_in_several_files_and_in_lists_are_compared() {
    let limit = "selector: {matchLabels: {team: a}}";
    let indented = shard("b", limit).replace('\n', "\n  ");
    let list = format!("apiVersion: v1\nkind: List\nitems:\n- {}\n", indented.trim_end());
    let found = check(&[&shard("a", limit), &list]);
    assert_eq!(found[1].0, "ShardingConfig b file1, document 1, items[0]");
    for (place, errors) in &found {
        assert_eq!(errors.len(), 1, "{place}: {errors:?}");
        assert!(errors[0].starts_with("spec.limits: could own"), "{errors:?}");
    }
}

#[test]
fn items_of_a_typed_list_need_no_kind() {
    let list = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: CircuitBreakerList\nitems:\n- metadata: {name: a}\n  spec: {selector: {}}\n";
    let found = check(&[list]);
    assert_eq!(found[0].0, "CircuitBreaker a file0, document 1, items[0]");
    assert!(
        found[0].1[0].starts_with("spec.selector: must have at least one requirement"),
        "{found:?}"
    );
}

#[test]
fn all_four_kinds_are_checked_and_others_passed_over() {
    let meta = |kind: &str, version: &str, spec: &str| {
        format!("apiVersion: {version}\nkind: {kind}\nmetadata: {{name: a}}\nspec: {spec}\n")
    };
    let ours = "ctrlmesh.kusionstack.io/v1alpha1";
    let documents = [
        meta(
            "FaultInjection",
            ours,
            "{selector: {matchLabels: {a: b}}, httpFault: [{delay: {fixedDelay: soon}}]}",
        ),
        meta("ManagerState", ours, "{}"),
        meta("Deployment", "apps/v1", "{}"),
        meta("ShardingConfig", "ctrlmesh.kusionstack.io/v1", "{}"),
        meta("Shardingconfig", ours, "{}"),
        meta("ShardingConfig", "apps/v1", "{}"),
    ];
    let found = check(&[&documents.join("---\n")]);
    let first: Vec<&str> = found.iter().map(|(_, errors)| errors[0].as_str()).collect();
    let expected = [
        "spec.httpFault[0].delay.fixedDelay: \"soon\" must be",
        "metadata.name: must be ctrlmesh-manager",
        "passed over",
        "apiVersion: \"ctrlmesh.kusionstack.io/v1\" is not served; allowed is ctrlmesh.kusionstack.io/v1alpha1",
        "kind: \"Shardingconfig\" is no kind of ctrlmesh.kusionstack.io",
        "apiVersion: \"apps/v1\" is not served",
    ];
    for (found, expected) in first.iter().zip(expected) {
        assert!(found.starts_with(expected), "{found}\n{expected}");
    }
    assert_eq!(found.len(), 6);
}

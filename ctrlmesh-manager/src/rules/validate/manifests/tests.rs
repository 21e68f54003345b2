use super::*;

const SHARD: &str = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: NAME}\n\
    spec: {controller: {leaderElectionName: op}, selector: {matchLabels: {shard: NAME}}, limits: [{LIMIT}]}\n";

fn shard(name: &str, limit: &str) -> String {
    SHARD.replace("NAME", name).replace("LIMIT", limit)
}

fn check(files: &[&str]) -> Vec<(String, Vec<String>)> {
    let files = files
        .iter()
        .enumerate()
        .map(|(at, text)| (format!("file{at}"), serde_saphyr::from_multiple::<Value>(text).unwrap()));
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
    let typo =
        shard("a", "relatedResources: [{apiGroups: [''], resources: [pods]}], selector: {matchLabels: {team: a}}");
    let found = check(&[&typo]);
    assert_eq!(found[0].0, "ShardingConfig a file0, document 1");
    assert_eq!(found[0].1.len(), 1, "{found:?}");
    assert!(
        found[0].1[0].starts_with("spec.limits[0].relatedResources: is not a field that is known here"),
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
    assert!(found[0].1[0].starts_with("spec.selector: must have at least one requirement"), "{found:?}");
}

#[test]
fn all_four_kinds_are_checked_and_others_passed_over() {
    let meta = |kind: &str, version: &str, spec: &str| {
        format!("apiVersion: {version}\nkind: {kind}\nmetadata: {{name: a}}\nspec: {spec}\n")
    };
    let ours = "ctrlmesh.kusionstack.io/v1alpha1";
    let documents = [
        meta("FaultInjection", ours, "{selector: {matchLabels: {a: b}}, httpFault: [{delay: {fixedDelay: soon}}]}"),
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

fn errors_of_metadata(metadata: &str) -> Vec<String> {
    let text = shard("a", "selector: {matchLabels: {team: a}}").replace("{name: a}", metadata);
    check(&[&text]).remove(0).1
}

#[test]
fn metadata_that_the_api_server_refuses_is_refused_by_field() {
    let owner =
        |more: &str| format!("{{name: a, ownerReferences: [{{apiVersion: v1, kind: Pod, name: p, uid: u{more}}}]}}");
    for good in ["{generateName: a-}", "{name: a, labels: {x.io/y: '1', z: ''}}", &owner(", controller: true")] {
        assert_eq!(errors_of_metadata(good), Vec::<String>::new(), "{good}");
    }
    let cases = [
        ("{name: My_Shard}", "metadata.name: \"My_Shard\" must be a lower-case DNS subdomain"),
        ("{name: A.b}", "metadata.name: \"A.b\" must be"),
        ("{name: pre-}", "metadata.name: \"pre-\" must be"),
        ("{name: ''}", "metadata.name: or generateName is required"),
        ("{}", "metadata.name: or generateName is required"),
        ("", "metadata: is required"),
        ("5", "metadata: must be of the type object"),
        ("{name: 5}", "metadata.name: must be of the type string"),
        ("{generateName: A-}", "metadata.generateName: \"A-\""),
        ("{name: a, namespace: a.b}", "metadata.namespace: \"a.b\" must be a DNS label"),
        ("{name: a, lables: {}}", "metadata.lables: is not a field"),
        ("{name: a, labels: {a: 1}}", "metadata.labels.a: must be of the type string"),
        ("{name: a, labels: {-a: b}}", "metadata.labels.-a: "),
        ("{name: a, labels: {a: -b}}", "metadata.labels.a: "),
        ("{name: a, annotations: {a/b/c: d}}", "metadata.annotations.a/b/c: "),
        (&owner(", nmae: x"), "metadata.ownerReferences[0].nmae: is not a field"),
        (&owner(", controller: 'yes'"), "metadata.ownerReferences[0].controller: must be of the type boolean"),
        ("{name: a, ownerReferences: [{name: b}]}", "metadata.ownerReferences[0].apiVersion: is required"),
    ];
    for (metadata, expected) in cases {
        let found = errors_of_metadata(metadata);
        assert!(found.iter().any(|found| found.starts_with(expected)), "{metadata}: {found:?}");
        let wrong_reason = found.iter().any(|found| found.contains("at most 63 characters, because"));
        assert!(!wrong_reason, "{metadata}: {found:?}");
    }
}

#[test]
fn no_namespace_is_one_namespace_and_the_default() {
    let limit = "selector: {matchLabels: {team: a}}";
    let placed = |name: &str, namespace: &str| {
        shard(name, limit).replace(&format!("{{name: {name}}}"), &format!("{{name: {name}, namespace: {namespace}}}"))
    };
    for (text, errors) in [(placed("b", "default"), 1), (placed("b", "elsewhere"), 0)] {
        let found = check(&[&shard("a", limit), &text]);
        assert_eq!([found[0].1.len(), found[1].1.len()], [errors, errors], "{found:?}");
    }
    let generated = shard("a", limit).replace("{name: a}", "{generateName: a-}");
    let found = check(&[&generated, &generated]);
    assert!(found[0].1[0].starts_with("spec.limits: could own"), "{found:?}");
}

#[test]
fn one_resource_twice_is_an_error_of_the_second() {
    let one = shard("a", "selector: {matchLabels: {team: a}}");
    let found = check(&[&one, &one.replace("{name: a}", "{name: a, namespace: default}")]);
    assert_eq!(found[0].1, Vec::<String>::new());
    assert_eq!(found[1].1.len(), 1, "{found:?}");
    let twice = "metadata.name: is that of file0, document 1 too";
    assert!(found[1].1[0].starts_with(twice), "{found:?}");
    let elsewhere = one.replace("{name: a}", "{name: a, namespace: b}");
    assert_eq!(check(&[&one, &elsewhere])[1].1, Vec::<String>::new());
}

#[test]
fn the_predecessors_group_is_refused_and_the_rest_checked() {
    let spelled = |text: &str| text.replace("ctrlmesh.kusionstack.io/", "kridge.kusionstack.io/");
    let other = spelled(
        "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ManagerState\nmetadata: {name: ctrlmesh-manager}\n",
    );
    let allowed =
        "apiVersion: \"kridge.kusionstack.io/v1alpha1\" is not served; allowed is ctrlmesh.kusionstack.io/v1alpha1";
    assert_eq!(check(&[&other])[0].1, [allowed]);
    let one = spelled(&shard("a", "selector: {matchLabels: {team: a}}"));
    assert_eq!(check(&[&one])[0].1, [format!("{allowed}; the rest may stay as it is")]);
    let wrong = spelled(&shard("a", "selector: {}"));
    assert_eq!(check(&[&wrong])[0].1.len(), 2);
}

#[test]
fn nulls_and_integral_numbers_are_read_as_by_the_api_server() {
    let spec = |spec: &str| {
        format!(
            "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {{name: a}}\nspec: {spec}\n"
        )
    };
    let limits = "limits: [{selector: {matchLabels: {a: null, b: c}}}]";
    let good = format!(
        "{{selector: {{matchLabels: {{a: b}}}}, webhook: {{certDir: /c, port: 9443.0}}, root: null, {limits}}}"
    );
    assert_eq!(check(&[&spec(&good)])[0].1, Vec::<String>::new());
    let root = |more: &str| spec(&format!("{{root: {{prefix: a, targetStatefulSet: a, {more}}}}}"));
    let cases = [
        (
            spec("{selector: {matchLabels: {a: b}}, limits: [null]}"),
            "spec.limits[0]: must be of the type object, and not null",
        ),
        (
            root("auto: {shardingSize: 1, everyShardReplicas: 1}, canary: {replicas: 1, inNamespaces: [null]}"),
            "spec.root.canary.inNamespaces[0]: must be of the type string, and not null",
        ),
        (
            spec("{selector: {matchLabels: {a: b}}, webhook: {certDir: /c, port: 1.5}, limits: []}"),
            "spec.webhook.port: 1.5 is no integer",
        ),
    ];
    for (text, expected) in cases {
        let found = &check(&[&text])[0].1;
        assert!(found.iter().any(|found| found == expected), "{found:?}");
    }
}

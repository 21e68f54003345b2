use ctrlmesh_common::api::read_sharding_configs;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

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

/// One `ShardingConfig` of the namespace `a`: its name, its labels, and its spec, in YAML's flow style.
fn config(name: &str, labels: &str, spec: &str) -> ShardingConfig {
    let text = format!(
        "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\n\
         metadata: {{name: {name}, namespace: a, labels: {labels}}}\nspec: {spec}\n"
    );
    read_sharding_configs(&text).unwrap().remove(0)
}

/// A shard of the operator with this lock, if any, that sees objects of this team.
fn shard(name: &str, lock: Option<&str>, team: &str) -> ShardingConfig {
    let lock = lock
        .map_or_else(String::new, |lock| format!("controller: {{leaderElectionName: {lock}}}, "));
    let limits = format!("[{{selector: {{matchLabels: {{team: {team}}}}}}}]");
    config(
        name,
        "{}",
        &format!("{{{lock}selector: {{matchLabels: {{shard: {name}}}}}, limits: {limits}}}"),
    )
}

/// A root whose rule has this in addition.
fn root(name: &str, lock: &str, target: &str, more: &str) -> ShardingConfig {
    let lock = if lock.is_empty() {
        String::new()
    } else {
        format!("controller: {{leaderElectionName: {lock}}}, ")
    };
    let auto = "auto: {shardingSize: 2, everyShardReplicas: 1}";
    config(
        name,
        "{}",
        &format!("{{{lock}root: {{prefix: {name}, targetStatefulSet: {target}, {auto}{more}}}}}"),
    )
}

fn errors_beside(config: &ShardingConfig, other: &ShardingConfig) -> Vec<String> {
    let report = sharding_config(config, std::slice::from_ref(other), None);
    report.errors.iter().map(Problem::to_string).collect()
}

fn warnings_beside(config: &ShardingConfig, other: &ShardingConfig) -> Vec<String> {
    let report = sharding_config(config, std::slice::from_ref(other), None);
    report.warnings.iter().map(Problem::to_string).collect()
}

#[test]
fn a_shard_without_a_lock_could_be_of_any_operator_and_is_suspicious_only() {
    let (one, other) = (shard("one", None, "a"), shard("other", Some("lock"), "a"));
    for (one, other) in [(&one, &other), (&other, &one), (&one, &shard("third", None, "a"))] {
        assert_eq!(errors_beside(one, other), Vec::<String>::new());
        let found = warnings_beside(one, other);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("if both are of one operator; name the lock"), "{found:?}");
    }
    assert_eq!(warnings_beside(&one, &shard("other", Some("lock"), "b")), Vec::<String>::new());
    let elsewhere = {
        let mut other = other.clone();
        other.metadata.namespace = Some("b".to_owned());
        other
    };
    assert_eq!(warnings_beside(&one, &elsewhere), Vec::<String>::new());
    let many: Vec<_> = (0..9).map(|at| shard(&format!("more-{at}"), None, "a")).collect();
    let report = sharding_config(&one, &many, None);
    assert_eq!((report.errors.len(), report.warnings.len()), (0, 1), "one says enough");
}

#[test]
fn shards_with_different_locks_are_of_different_operators() {
    let (one, other) = (shard("one", Some("x"), "a"), shard("other", Some("y"), "a"));
    assert_eq!(errors_beside(&one, &other), Vec::<String>::new());
}

/// A shard of this pod, with this lock, if any.
fn shard_of_pod(name: &str, pod: &str, lock: &str) -> ShardingConfig {
    let lock = if lock.is_empty() {
        String::new()
    } else {
        format!("controller: {{leaderElectionName: {lock}}}, ")
    };
    let key = names::label::STATEFULSET_POD_NAME;
    let selector = format!("{{matchExpressions: [{{key: {key}, operator: In, values: [{pod}]}}]}}");
    let limits = "[{selector: {matchLabels: {team: a}}}]";
    config(name, "{}", &format!("{{{lock}selector: {selector}, limits: {limits}}}"))
}

#[test]
fn pods_that_are_named_tell_operators_apart_where_a_lock_does_not() {
    let none = Vec::<String>::new();
    let one = shard_of_pod("one", "op-0", "");
    let elsewhere = shard_of_pod("other", "more-op-0", "");
    assert_eq!(errors_beside(&one, &elsewhere), none);
    assert_eq!(warnings_beside(&one, &elsewhere), none);
    assert_eq!(errors_beside(&one, &shard_of_pod("other", "op-1", "")).len(), 1);
    assert_eq!(errors_beside(&one, &root("root", "", "other-op", "")), none);
    assert_eq!(errors_beside(&one, &root("root", "", "op", "")).len(), 1);
}

#[test]
fn pods_of_one_workload_are_of_one_operator_whatever_the_locks_say() {
    let one = shard_of_pod("one", "op-0", "lx");
    for other in [shard_of_pod("other", "op-1", "ly"), root("root", "ly", "op", "")] {
        for (one, other) in [(&one, &other), (&other, &one)] {
            let found = errors_beside(one, other);
            assert_eq!(found.len(), 1, "{found:?}");
            assert!(found[0].contains("of the same operator; their selectors must"), "{found:?}");
        }
    }
    let apart = shard_of_pod("other", "more-0", "ly");
    assert_eq!(errors_beside(&one, &apart), Vec::<String>::new());
    assert_eq!(errors_beside(&one, &shard_of_pod("other", "more-0", "lx")).len(), 1, "one lock");
}

#[test]
fn a_root_divides_everything_that_its_shards_could_own() {
    let by_hand = shard("one", Some("lock"), "a");
    let everything = root("root", "lock", "op", "");
    let found = errors_beside(&everything, &by_hand);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with("spec.root: could own"), "{found:?}");
    assert!(errors_beside(&by_hand, &everything)[0].starts_with("spec.limits: could own"));
    let others = "resourceSelector: [{selector: {matchLabels: {team: b}}}]";
    let apart = root("root", "lock", "op", &format!(", {others}"));
    assert_eq!(errors_beside(&apart, &by_hand), Vec::<String>::new());
    let off = root("root", "lock", "op", ", disable: true");
    assert_eq!(errors_beside(&off, &by_hand), Vec::<String>::new(), "it makes no shards");
}

#[test]
fn two_roots_never_divide_the_same_pods() {
    let one = root("one", "x", "op", "");
    let found = errors_beside(&one, &root("other", "y", "op", ""));
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].starts_with("spec.root.targetStatefulSet: is the target of root \"other\" too"),
        "{found:?}"
    );
    assert_eq!(errors_beside(&one, &root("other", "y", "more", "")), Vec::<String>::new());
    assert_eq!(errors_beside(&one, &root("other", "", "more", "")), Vec::<String>::new());
    let found = errors_beside(&one, &root("other", "x", "more", ""));
    assert!(found[0].starts_with("spec.root: could own objects"), "{found:?}");
}

#[test]
fn a_root_is_not_compared_with_its_own_shards() {
    let one = root("one", "lock", "op", "");
    let spec = "{controller: {leaderElectionName: lock}, selector: {matchLabels: {a: b}}, limits: [{selector: {matchLabels: {team: a}}}]}";
    let label = |root: &str| format!("{{{}: {root}}}", names::label::AUTO_SHARDING_ROOT);
    let own = config("one-1-normal", &label("one"), spec);
    assert_eq!(errors_beside(&one, &own), Vec::<String>::new());
    assert_eq!(errors_beside(&own, &one), Vec::<String>::new());
    assert_eq!(errors_beside(&one, &config("two-1-normal", &label("two"), spec)).len(), 1);
}

#[test]
fn the_shards_of_one_root_are_not_compared_while_they_are_changed_one_by_one() {
    let spec = "{controller: {leaderElectionName: lock}, selector: {matchLabels: {a: b}}, limits: [{selector: {matchLabels: {team: a}}}]}";
    let made = |name: &str, root: &str, uid: &str| {
        let mut made =
            config(name, &format!("{{{}: {root}}}", names::label::AUTO_SHARDING_ROOT), spec);
        let owner = OwnerReference { uid: uid.to_owned(), ..OwnerReference::default() };
        made.metadata.owner_references = Some(vec![owner]);
        made
    };
    let one = made("op-1-normal", "op", "1");
    assert_eq!(errors_beside(&one, &made("op-2-normal", "op", "1")), Vec::<String>::new());
    assert_eq!(errors_beside(&one, &made("op-2-normal", "op", "2")).len(), 1, "of an earlier root");
    assert_eq!(errors_beside(&one, &made("more-1-normal", "more", "1")).len(), 1);
}

const PODS: &str = "[{apiGroups: [''], resources: [pods]}]";
const ANY: &str = "[{apiGroups: ['*'], resources: ['*']}]";
const APPS: &str =
    "[{apiGroups: [''], resources: [services]}, {apiGroups: [apps], resources: ['*']}]";

/// Resources of two limits that cover one resource twice, and what is said of it.
const TWICE: [(&str, &str, &str); 8] = [
    (
        PODS,
        PODS,
        "spec.limits[1].relateResources[0]: covers pods a second time, first in spec.limits[0].relateResources[0]",
    ),
    (
        PODS,
        "[{apiGroups: ['*'], resources: [pods]}]",
        "spec.limits[1].relateResources[0]: covers pods a second time",
    ),
    (
        PODS,
        "[{apiGroups: [''], resources: ['*']}]",
        "spec.limits[1].relateResources[0]: covers pods a second time",
    ),
    (
        APPS,
        "[{apiGroups: [apps], resources: [deployments]}]",
        "spec.limits[1].relateResources[0]: covers deployments.apps a second time, first in spec.limits[0].relateResources[1]",
    ),
    (
        "[]",
        ANY,
        "spec.limits[1].relateResources[0]: covers every resource a second time, first in spec.limits[0];",
    ),
    (
        ANY,
        "[]",
        "spec.limits[1]: covers every resource a second time, first in spec.limits[0].relateResources[0]",
    ),
    ("[]", "[]", "spec.limits[1]: covers every resource a second time"),
    (
        "[]",
        PODS,
        "spec.limits[1].relateResources[0]: covers pods a second time, first in spec.limits[0];",
    ),
];

#[test]
fn a_resource_is_limited_once_however_it_is_spelled() {
    let limit = |resources: &str, team: &str| {
        format!("{{relateResources: {resources}, selector: {{matchLabels: {{team: {team}}}}}}}")
    };
    for (first, second, expected) in TWICE {
        // The second limit alone would leave nothing of what the first leaves.
        let limits = format!("[{}, {}]", limit(first, "a"), limit(second, "b"));
        let found = errors(&shards(&[("one", &limits)]));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with(expected), "{found:?}");
        assert!(found[0].contains("one entry per resource is allowed"), "{found:?}");
    }
    let limits = format!("[{}, {}]", limit(PODS, "a"), limit(APPS, "b"));
    assert_eq!(errors(&shards(&[("one", &limits)])), Vec::<String>::new());
    // Two entries of one limit say the same of what both cover.
    let both =
        limit("[{apiGroups: [''], resources: [pods]}, {apiGroups: ['*'], resources: [pods]}]", "a");
    assert_eq!(errors(&shards(&[("one", &format!("[{both}]"))])), Vec::<String>::new());
    let divided =
        format!(", resourceSelector: [{{relateResources: {PODS}}}, {{relateResources: {ANY}}}]");
    let found = sharding_config(&root("root", "", "op", &divided), &[], None).errors;
    assert_eq!(found[0].field, "spec.root.resourceSelector[1].relateResources[0]", "{found:?}");
}

/// Each spec has to be refused so.
fn assert_refused(cases: &[(String, &str)]) {
    for (spec, expected) in cases {
        let report = sharding_config(&config("shard", "{}", spec), &[], None);
        let found = report.errors.iter().map(Problem::to_string).collect::<Vec<_>>();
        assert!(found.iter().any(|found| found.starts_with(expected)), "{expected}: {found:?}");
    }
}

#[test]
fn what_the_schema_bounds_is_bounded_here() {
    let shard = |more: &str| {
        format!(
            "{{selector: {{matchLabels: {{a: b}}}}, limits: [{{selector: {{matchLabels: {{a: b}}}}}}]{more}}}"
        )
    };
    let (lock, folder) = ("l".repeat(201), "/".repeat(4097));
    let labels = (0..65).map(|at| format!("k{at}: v")).collect::<Vec<_>>().join(", ");
    let cases = [
        (
            shard(&format!(", controller: {{leaderElectionName: {lock}}}")),
            "spec.controller.leaderElectionName: has 201 characters; allowed are 1 to 200",
        ),
        (
            shard(", controller: {leaderElectionName: My_Lock}"),
            "spec.controller.leaderElectionName: must be the name",
        ),
        (
            shard(&format!(", webhook: {{certDir: {folder}, port: 1}}")),
            "spec.webhook.certDir: has 4097 characters; allowed are 1 to 4096",
        ),
        (shard(", webhook: {certDir: '', port: 1}"), "spec.webhook.certDir: has 0 characters"),
        (
            shard(", webhook: {certDir: a, port: 65536}"),
            "spec.webhook.port: 65536 is not allowed; allowed are 1 to 65535",
        ),
        (
            format!(
                "{{selector: {{matchLabels: {{{labels}}}}}, limits: [{{selector: {{matchLabels: {{a: b}}}}}}]}}"
            ),
            "spec.selector.matchLabels: has 65 entries; at most 64 are allowed",
        ),
    ];
    assert_refused(&cases);
}

#[test]
fn what_the_schema_bounds_of_a_root_is_bounded_here() {
    let root = |more: &str| format!("{{root: {{prefix: a, targetStatefulSet: a, {more}}}}}");
    let cases = [
        (
            root("auto: {shardingSize: 2, everyShardReplicas: 0}"),
            "spec.root.auto.everyShardReplicas: 0 is not allowed; allowed are 1 to 1000",
        ),
        (
            root("disable: true, auto: {shardingSize: 33, everyShardReplicas: 1}"),
            "spec.root.auto.shardingSize: 33 shards cannot be made",
        ),
        (
            root("disable: true, manual: [{id: 33, hashes: ['0']}]"),
            "spec.root.manual[0].id: 33 is not allowed; allowed are 1 to 32",
        ),
        (
            root(
                "auto: {shardingSize: 2, everyShardReplicas: 1}, canary: {replicas: 1, inNamespaces: [a, a]}",
            ),
            "spec.root.canary.inNamespaces[1]: is listed twice",
        ),
        (
            root(
                "auto: {shardingSize: 2, everyShardReplicas: 1}, canary: {replicas: 1001, inNamespaces: [A_]}",
            ),
            "spec.root.canary.inNamespaces[0]: \"A_\" is not allowed; it must match",
        ),
    ];
    assert_refused(&cases);
}

#[test]
fn a_canary_of_every_hash_leaves_none_to_divide() {
    let all = (0..32).map(|hash| format!("'{hash}'")).collect::<Vec<_>>().join(", ");
    let root = root("root", "", "op", &format!(", canary: {{replicas: 1, inShardHash: [{all}]}}"));
    let found = sharding_config(&root, &[], None).errors;
    assert_eq!(found[0].field, "spec.root.auto.shardingSize");
    assert!(found[0].message.starts_with("no shard can be made, because canary"), "{found:?}");
}

#[test]
fn a_selector_of_a_root_is_ignored_and_said_to_be() {
    let spec = "{selector: {}, root: {prefix: a, targetStatefulSet: a, auto: {shardingSize: 2, everyShardReplicas: 1}}}";
    let report = sharding_config(&config("root", "{}", spec), &[], None);
    assert_eq!(report.errors, []);
    let warned = report.warnings[0].to_string();
    assert_eq!(warned, "spec.selector: is ignored, because a root owns no pods itself");
}

#[test]
fn the_name_of_the_shards_own_lock_must_be_one() {
    let spec = |lock: usize| {
        format!(
            "{{controller: {{leaderElectionName: {}}}, selector: {{matchLabels: {{a: b}}}}, limits: [{{selector: {{matchLabels: {{a: b}}}}}}]}}",
            "l".repeat(lock)
        )
    };
    let name = "n".repeat(60);
    assert_eq!(sharding_config(&config(&name, "{}", &spec(190)), &[], None).errors, []);
    let found = sharding_config(&config(&name, "{}", &spec(191)), &[], None).errors;
    assert_eq!(found[0].field, "spec.controller.leaderElectionName");
    assert!(found[0].message.ends_with("of 254 characters; at most 253 are allowed"), "{found:?}");
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
    let many = (0..64).map(|at| format!("{{apiGroups: ['g{at}'], resources: [pods]}}"));
    let many = format!("{{relateResources: [{}]}}", many.collect::<Vec<_>>().join(", "));
    let divided = format!(", resourceSelector: [{many}, {many}, {many}]");
    let found = sharding_config(&root("root", "", "op", &divided), &[], None).errors;
    assert_eq!(found[0].field, "spec.root.resourceSelector");
    assert!(found[0].message.contains("in 192 entries are too many"), "{found:?}");
}

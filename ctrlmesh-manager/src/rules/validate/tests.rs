use ctrlmesh_common::api::read_sharding_configs;

use super::*;

mod beside;

/// Shards of one operator, by name and limits in YAML's flow style.
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

/// In namespace `a`; the spec is in YAML's flow style.
fn config(name: &str, labels: &str, spec: &str) -> ShardingConfig {
    let text = format!(
        "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\n\
         metadata: {{name: {name}, namespace: a, labels: {labels}}}\nspec: {spec}\n"
    );
    read_sharding_configs(&text).unwrap().remove(0)
}

/// A shard of `team`, with this lock.
fn shard(name: &str, lock: Option<&str>, team: &str) -> ShardingConfig {
    let lock = lock.map_or_else(String::new, |lock| format!("controller: {{leaderElectionName: {lock}}}, "));
    let limits = format!("[{{selector: {{matchLabels: {{team: {team}}}}}}}]");
    config(name, "{}", &format!("{{{lock}selector: {{matchLabels: {{shard: {name}}}}}, limits: {limits}}}"))
}

/// A root with `more` in its rule.
fn root(name: &str, lock: &str, target: &str, more: &str) -> ShardingConfig {
    let lock = if lock.is_empty() { String::new() } else { format!("controller: {{leaderElectionName: {lock}}}, ") };
    let auto = "auto: {shardingSize: 2, everyShardReplicas: 1}";
    config(name, "{}", &format!("{{{lock}root: {{prefix: {name}, targetStatefulSet: {target}, {auto}{more}}}}}"))
}

const PODS: &str = "[{apiGroups: [''], resources: [pods]}]";

const ANY: &str = "[{apiGroups: ['*'], resources: ['*']}]";

const APPS: &str = "[{apiGroups: [''], resources: [services]}, {apiGroups: [apps], resources: ['*']}]";

/// Resources of two limits that cover one resource twice, and the message.
const TWICE: [(&str, &str, &str); 8] = [
    (
        PODS,
        PODS,
        "spec.limits[1].relateResources[0]: covers pods a second time, first in spec.limits[0].relateResources[0]",
    ),
    (PODS, "[{apiGroups: ['*'], resources: [pods]}]", "spec.limits[1].relateResources[0]: covers pods a second time"),
    (PODS, "[{apiGroups: [''], resources: ['*']}]", "spec.limits[1].relateResources[0]: covers pods a second time"),
    (
        APPS,
        "[{apiGroups: [apps], resources: [deployments]}]",
        "spec.limits[1].relateResources[0]: covers deployments.apps a second time, first in spec.limits[0].relateResources[1]",
    ),
    ("[]", ANY, "spec.limits[1].relateResources[0]: covers every resource a second time, first in spec.limits[0];"),
    (ANY, "[]", "spec.limits[1]: covers every resource a second time, first in spec.limits[0].relateResources[0]"),
    ("[]", "[]", "spec.limits[1]: covers every resource a second time"),
    ("[]", PODS, "spec.limits[1].relateResources[0]: covers pods a second time, first in spec.limits[0];"),
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
    // Two entries of one limit conflict in the same way.
    let both = limit("[{apiGroups: [''], resources: [pods]}, {apiGroups: ['*'], resources: [pods]}]", "a");
    assert_eq!(errors(&shards(&[("one", &format!("[{both}]"))])), Vec::<String>::new());
    let divided = format!(", resourceSelector: [{{relateResources: {PODS}}}, {{relateResources: {ANY}}}]");
    let found = sharding_config(&root("root", "", "op", &divided), &[], None).errors;
    assert_eq!(found[0].field, "spec.root.resourceSelector[1].relateResources[0]", "{found:?}");
}

fn assert_refused(cases: &[(String, &str)]) {
    for (spec, expected) in cases {
        let report = sharding_config(&config("shard", "{}", spec), &[], None);
        let found = report.errors.iter().map(Problem::to_string).collect::<Vec<_>>();
        assert!(found.iter().any(|found| found.starts_with(expected)), "{expected}: {found:?}");
    }
}

#[test]
fn bounds_of_the_schema_are_checked() {
    let shard = |more: &str| {
        format!("{{selector: {{matchLabels: {{a: b}}}}, limits: [{{selector: {{matchLabels: {{a: b}}}}}}]{more}}}")
    };
    let (lock, folder) = ("l".repeat(201), "/".repeat(4097));
    let labels = (0..65).map(|at| format!("k{at}: v")).collect::<Vec<_>>().join(", ");
    let cases = [
        (
            shard(&format!(", controller: {{leaderElectionName: {lock}}}")),
            "spec.controller.leaderElectionName: has 201 characters; allowed are 1 to 200",
        ),
        (shard(", controller: {leaderElectionName: My_Lock}"), "spec.controller.leaderElectionName: must be the name"),
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
            format!("{{selector: {{matchLabels: {{{labels}}}}}, limits: [{{selector: {{matchLabels: {{a: b}}}}}}]}}"),
            "spec.selector.matchLabels: has 65 entries; at most 64 are allowed",
        ),
    ];
    assert_refused(&cases);
}

#[test]
fn bounds_of_the_schema_are_checked_for_roots() {
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
            root("auto: {shardingSize: 2, everyShardReplicas: 1}, canary: {replicas: 1, inNamespaces: [a, a]}"),
            "spec.root.canary.inNamespaces[1]: is listed twice",
        ),
        (
            root("auto: {shardingSize: 2, everyShardReplicas: 1}, canary: {replicas: 1001, inNamespaces: [A_]}"),
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
fn selector_and_limits_of_a_root_are_ignored_with_a_warning() {
    let spec = "{selector: {}, limits: [{selector: {matchLabels: {team: a}}}], root: {prefix: a, targetStatefulSet: a, auto: {shardingSize: 2, everyShardReplicas: 1}}}";
    let report = sharding_config(&config("root", "{}", spec), &[], None);
    assert_eq!(report.errors, []);
    let warned: Vec<String> = report.warnings.iter().map(ToString::to_string).collect();
    let ignored = [
        "spec.limits: is ignored in a root, whose shards divide what root.resourceSelector names",
        "spec.selector: is ignored, because a root owns no pods itself",
    ];
    assert!(ignored.iter().all(|line| warned.iter().any(|one| one == line)), "{warned:?}");
}

#[test]
fn a_root_is_warned_of_what_a_wildcard_makes_vanish() {
    let warned = |resources: &str| {
        let report = sharding_config(&root("root", "", "op", resources), &[], None);
        assert_eq!(report.errors, [], "{resources}");
        let of_field = |one: &&Problem| one.field == "spec.root.resourceSelector";
        report.warnings.iter().find(of_field).map(|one| one.message.clone())
    };
    let entry = |group: &str, resource: &str| format!("{{apiGroups: ['{group}'], resources: ['{resource}']}}");
    let only = |entries: &[String]| format!(", resourceSelector: [{{relateResources: [{}]}}]", entries.join(", "));
    let every = "a wildcard also limits events, events.events.k8s.io, leases.coordination.k8s.io, whose";
    for resources in [String::new(), ", resourceSelector: [{}]".to_owned(), only(&[entry("*", "*")])] {
        assert!(warned(&resources).unwrap().starts_with(every), "{resources}");
    }
    assert!(warned(&only(&[entry("", "*")])).unwrap().starts_with("a wildcard also limits events, whose"));
    for resources in [only(&[entry("apps", "*")]), only(&[entry("", "*"), entry("", "events")])] {
        assert_eq!(warned(&resources), None, "{resources}");
    }
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
fn a_manifest_that_cannot_be_read_names_line_and_field() {
    let text =
        "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: a}\nspec:\n  limits: 5\n";
    let error = read_sharding_configs(&format!("# one\n---\n{text}")).unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains('7'), "the line: {source}");
    let foreign = text.replace("ctrlmesh.kusionstack.io/v1alpha1", "apps/v1");
    assert!(read_sharding_configs(&foreign).unwrap_err().to_string().contains("apiVersion: \"apps/v1\", allowed are"));
    let kridge = text.replace("ctrlmesh.", "kridge.").replace("limits: 5", "limits: []");
    assert_eq!(read_sharding_configs(&kridge).unwrap().len(), 1);
    for (spec, wanted) in [
        (
            "limts: []",
            "document 1: spec.limts: no such field; allowed are allowProxy, clusterHashes, clusters, controller, limits, root,",
        ),
        ("limits: [{selector: {}}, {selector: {matchLables: {a: b}}}]", "spec.limits[1].selector.matchLables: no"),
        ("root: {canary: {replica: 1}}", "spec.root.canary.replica: no such field; allowed are in"),
    ] {
        let error = read_sharding_configs(&text.replace("limits: 5", spec)).unwrap_err();
        assert!(error.to_string().contains(wanted), "{error}");
    }
    let labels = "selector: {matchLabels: {any: name}}";
    assert_eq!(read_sharding_configs(&text.replace("limits: 5", labels)).unwrap().len(), 1);
}

#[test]
fn limits_that_would_keep_the_webhook_busy_are_refused() {
    let names =
        |kind: &str, limit: usize| (0..32).map(|at| format!("{kind}{limit}x{at}")).collect::<Vec<_>>().join(", ");
    let limits = (0..64).map(|limit| {
        let (groups, resources) = (names("g", limit), names("r", limit));
        format!(
            "{{relateResources: [{{apiGroups: [{groups}], resources: [{resources}]}}], selector: {{matchLabels: {{team: a}}}}}}"
        )
    });
    let limits = format!("[{}]", limits.collect::<Vec<_>>().join(", "));
    let found = errors(&shards(&[("one", &limits), ("other", &limits)]));
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("2048 groups and 2048 resources in 64 entries are too many"), "{found:?}");
    let many = (0..64).map(|at| format!("{{apiGroups: ['g{at}'], resources: [pods]}}"));
    let many = format!("{{relateResources: [{}]}}", many.collect::<Vec<_>>().join(", "));
    let divided = format!(", resourceSelector: [{many}, {many}, {many}]");
    let found = sharding_config(&root("root", "", "op", &divided), &[], None).errors;
    assert_eq!(found[0].field, "spec.root.resourceSelector");
    assert!(found[0].message.contains("in 192 entries are too many"), "{found:?}");
}

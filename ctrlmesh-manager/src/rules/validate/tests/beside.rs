use crate::rules::pod::{Owner, PodName};

use super::*;

#[test]
fn shards_that_exclude_each_other_may_stand_together() {
    let a = pods("{matchExpressions: [{key: team, operator: In, values: [a]}]}");
    let b = pods("{matchExpressions: [{key: team, operator: NotIn, values: [a, c]}]}");
    assert_eq!(errors(&shards(&[("one", &format!("[{a}]")), ("other", &format!("[{b}]"))])), Vec::<String>::new());
}

#[test]
fn shards_that_could_own_the_same_object_are_refused_by_name() {
    let a = pods("{matchLabels: {team: a}}");
    let b = pods("{matchLabels: {tier: b}}");
    let found = errors(&shards(&[("one", &format!("[{a}]")), ("other", &format!("[{b}]"))]));
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with("spec.limits: could own the same pods as ShardingConfig \"other\""), "{found:?}");
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

fn errors_beside(config: &ShardingConfig, other: &ShardingConfig) -> Vec<String> {
    let report = sharding_config(config, std::slice::from_ref(other), None);
    report.errors.iter().map(Problem::to_string).collect()
}

fn warnings_beside(config: &ShardingConfig, other: &ShardingConfig) -> Vec<String> {
    let report = sharding_config(config, std::slice::from_ref(other), None);
    report.warnings.iter().map(Problem::to_string).collect()
}

#[test]
fn a_shard_without_a_lock_gives_only_a_warning() {
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

/// A shard of the pod `pod`.
fn shard_of_pod(name: &str, pod: &str, lock: &str) -> ShardingConfig {
    let lock = if lock.is_empty() { String::new() } else { format!("controller: {{leaderElectionName: {lock}}}, ") };
    let key = names::label::STATEFULSET_POD_NAME;
    let selector = format!("{{matchExpressions: [{{key: {key}, operator: In, values: [{pod}]}}]}}");
    let limits = "[{selector: {matchLabels: {team: a}}}]";
    config(name, "{}", &format!("{{{lock}selector: {selector}, limits: {limits}}}"))
}

#[test]
fn named_pods_tell_operators_apart_where_a_lock_does_not() {
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
fn pods_of_one_workload_are_one_operator_whatever_the_locks() {
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
    assert!(found[0].starts_with("spec.root.targetStatefulSet: is the target of root \"other\" too"), "{found:?}");
    assert_eq!(errors_beside(&one, &root("other", "y", "more", "")), Vec::<String>::new());
    assert_eq!(errors_beside(&one, &root("other", "", "more", "")), Vec::<String>::new());
    let found = errors_beside(&one, &root("other", "x", "more", ""));
    assert!(found[0].starts_with("spec.root: could own objects"), "{found:?}");
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
    both[1].spec.selector.as_mut().unwrap().match_labels = [("team".to_owned(), "x".to_owned())].into();
    let labels = [("shard", "one"), ("team", "x")].map(|(k, v)| (k.to_owned(), v.to_owned()));
    let name = PodName { name: "p".to_owned(), ..PodName::default() };
    let pod = Member { name, labels: labels.into(), ..Member::default() };
    assert_eq!(sharding_config(&shards[0], &shards, Some(&[&pod])), Report::default());
    let report = sharding_config(&both[0], &both, Some(&[&pod]));
    assert!(
        report.errors[0].to_string().starts_with("spec.selector: selects pod \"p\", which ShardingConfig \"other\"")
    );
    let report = sharding_config(&shards[0], &shards, Some(&[]));
    assert_eq!((report.errors.len(), report.warnings.len()), (0, 1));
}

/// An enrolled pod with the label `app: op`.
fn pod_of(name: &str, kind: &str, owner: &str) -> Member {
    let name = PodName { namespace: "a".to_owned(), name: name.to_owned() };
    let labels = [("app", "op"), (names::label::POD_TEMPLATE_HASH, "x")];
    Member {
        name,
        labels: labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
        owner: Some(Owner { kind: kind.to_owned(), name: owner.to_owned() }),
        ..Member::default()
    }
}

/// A manual shard of another operator, for pods with the label `app: op`.
fn shard_of_app(name: &str) -> ShardingConfig {
    let mut shard = shard(name, Some("of-its-own"), "a");
    let labels = [("app".to_owned(), "op".to_owned())].into();
    shard.spec.selector = Some(LabelSelector { match_labels: labels, ..LabelSelector::default() });
    shard
}

/// The problems of each beside the other, with these pods.
fn said_of_both(one: &ShardingConfig, other: &ShardingConfig, pods: &[&Member]) -> [Vec<String>; 2] {
    [(one, other), (other, one)].map(|(one, other)| {
        let report = sharding_config(one, std::slice::from_ref(other), Some(pods));
        report.errors.iter().map(Problem::to_string).collect()
    })
}

#[test]
fn a_pod_under_a_root_is_of_no_manual_shard() {
    let (by_hand, by_root) = (shard_of_app("one"), root("root", "lock", "op", ""));
    let pods = ["op-0", "op-1"].map(|name| pod_of(name, "StatefulSet", "op"));
    let pods: Vec<&Member> = pods.iter().collect();
    let expected = [
        "spec.root.targetStatefulSet: has pod \"op-0\", which ShardingConfig \"one\" selects too; a pod can be in one shard only",
        "spec.selector: selects pod \"op-0\", which root \"root\" divides; a pod can be in one shard only",
    ];
    assert_eq!(said_of_both(&by_root, &by_hand, &pods), expected.map(|one| vec![one.to_owned()]));
    let none = [Vec::<String>::new(), Vec::new()];
    let strangers = pod_of("op-0", "StatefulSet", "more");
    assert_eq!(said_of_both(&by_root, &by_hand, &[&strangers]), none, "of another workload");
    let elsewhere = root("root", "lock", "more", "");
    assert_eq!(said_of_both(&elsewhere, &by_hand, &pods), none, "that divides other pods");
    assert_eq!(said_of_both(&by_root, &shard("one", Some("x"), "a"), &pods), none);
    let off = root("root", "lock", "op", ", disable: true");
    assert_eq!(said_of_both(&off, &by_hand, &pods), none, "it divides nothing");
}

/// A shard that `root` has made.
fn child_of(root: &mut ShardingConfig) -> ShardingConfig {
    root.metadata.uid = Some("u".to_owned());
    let mut child = shard("root-1-normal", Some("lock"), "a");
    let labels = [("made".to_owned(), "by-root".to_owned())].into();
    child.spec.selector = Some(LabelSelector { match_labels: labels, ..LabelSelector::default() });
    let owner = serde_json::json!([{"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
        "name": "root", "uid": "u", "controller": true}]);
    child.metadata.owner_references = serde_json::from_value(owner).unwrap();
    child
}

#[test]
fn a_root_that_is_off_keeps_its_pods_while_it_has_shards() {
    let mut off = root("root", "lock", "op", ", disable: true");
    let child = child_of(&mut off);
    let pod = pod_of("op-0", "StatefulSet", "op");
    let refused = |one: &ShardingConfig, other: &ShardingConfig| {
        let beside = [other.clone(), child.clone()];
        let alone = sharding_config(one, &beside[..1], Some(&[&pod])).errors;
        assert!(alone.is_empty(), "{alone:?}");
        let errors = sharding_config(one, &beside, Some(&[&pod])).errors;
        errors.iter().map(Problem::to_string).collect::<Vec<_>>().join("; ")
    };
    let by_hand = shard_of_app("one");
    let selects = "spec.selector: selects pod \"op-0\", which root \"root\" divides";
    let found = refused(&by_hand, &off);
    assert!(found.contains(selects), "{found}");
    assert_eq!(refused(&off, &by_hand), "", "whoever is in the way may be switched off");
    let other = root("other", "another-lock", "op", "");
    let target = "spec.root.targetStatefulSet: is the target of root \"root\" too";
    let found = refused(&other, &off);
    assert!(found.contains(target), "{found}");
}

#[test]
fn a_deployments_pod_under_a_root_is_of_no_manual_shard() {
    let mut by_root = root("root", "lock", "op", "");
    let rule = by_root.spec.root.as_mut().unwrap();
    rule.target_deployment = rule.target_stateful_set.take();
    let mut pod = pod_of("op-x-abc", "ReplicaSet", "op-x");
    let found = said_of_both(&by_root, &shard_of_app("one"), &[&pod]);
    let [of_root, of_shard] = found.map(|all| all.join("; "));
    assert!(of_root.starts_with("spec.root.targetDeployment: has pod \"op-x-abc\""), "{of_root}");
    assert!(of_shard.starts_with("spec.selector: selects pod \"op-x-abc\""), "{of_shard}");
    pod.ended = true;
    let found = said_of_both(&by_root, &shard_of_app("one"), &[&pod]);
    assert_eq!(found, [Vec::<String>::new(), Vec::new()], "evicted ones stay for long");
}

#[test]
fn a_shard_that_names_a_roots_pod_is_refused_before_it_exists() {
    let mut named = shard_of_pod("one", "op-0", "lx");
    let apart = ", resourceSelector: [{selector: {matchLabels: {team: b}}}]";
    let by_root = root("root", "ly", "op", apart);
    let [of_root, of_shard] = said_of_both(&by_root, &named, &[]).map(|all| all.join("; "));
    assert!(of_root.starts_with("spec.root.targetStatefulSet: has pod \"op-0\""), "{of_root}");
    assert!(of_shard.starts_with("spec.selector: selects pod \"op-0\""), "{of_shard}");
    named = shard_of_pod("one", "more-0", "lx");
    assert_eq!(said_of_both(&by_root, &named, &[]), [Vec::<String>::new(), Vec::new()]);
}

#[test]
fn a_roots_own_shards_do_not_conflict_with_it() {
    let mut by_root = root("root", "lock", "op", "");
    let mut child = child_of(&mut by_root);
    child.spec.selector = shard_of_app("root-1-normal").spec.selector;
    let pod = pod_of("op-0", "StatefulSet", "op");
    assert_eq!(said_of_both(&by_root, &child, &[&pod]), [Vec::<String>::new(), Vec::new()]);
}

#[test]
fn two_shards_that_select_the_same_pods_are_refused() {
    let shard = |name, lock, first: &str, then: &str| {
        let requirement = |key: &str| match key.split_once('=') {
            Some((key, value)) => format!("{{key: {key}, operator: In, values: [{value}]}}"),
            None => format!("{{key: {key}, operator: Exists}}"),
        };
        let keys = [first, then].map(requirement).join(", ");
        let limits = format!("[{}]", pods("{matchLabels: {team: a}}"));
        config(
            name,
            "{}",
            &format!(
                "{{controller: {{leaderElectionName: {lock}}}, selector: {{matchExpressions: [{keys}]}}, limits: {limits}}}"
            ),
        )
    };
    let one = shard("one", "a", "app", "tier");
    assert_eq!(errors_beside(&one, &shard("other", "b", "app", "zone")), Vec::<String>::new());
    let found = errors_beside(&one, &shard("other", "b", "tier", "app"));
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with("spec.selector: selects the same pods as ShardingConfig \"other\""), "{found:?}");
    // One value, written in two ways.
    let mut other = shard("other", "b", "tier", "app");
    let selector = other.spec.selector.as_mut().unwrap();
    selector.match_expressions.clear();
    selector.match_labels = [("app".to_owned(), "x".to_owned())].into();
    assert_eq!(errors_beside(&shard("one", "a", "app=x", "app=x"), &other).len(), 1);
    assert_eq!(errors_beside(&shard("one", "a", "app=y", "app=y"), &other), Vec::<String>::new());
}

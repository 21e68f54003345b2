use ctrlmesh_common::names::label;
use proptest::prelude::*;

use super::*;
use crate::manifest::Manifests;
use crate::pod::Maker;

/// A shard by itself, in namespace `ops`, of the pods labelled with its name.
fn shard(name: &str, limits: &str) -> String {
    format!(
        "---\napiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {{name: {name}, namespace: ops}}\n\
         spec: {{controller: {{leaderElectionName: op}}, selector: {{matchLabels: {{shard: {name}}}}}, limits: [{{selector: {{matchLabels: {limits}}}}}]}}\n"
    )
}

/// A root, in namespace `ops`, by what stands under `spec.root` besides its prefix.
fn root(rule: &str) -> String {
    format!(
        "---\napiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {{name: root, namespace: ops}}\n\
         spec: {{root: {{prefix: r, {rule}}}}}\n"
    )
}

fn pod(name: &str, labels: &[(&str, &str)]) -> Member {
    let enrolled = [(label::ENABLE_PROXY, "true")];
    let labels = enrolled.iter().chain(labels);
    Member {
        name: PodName { namespace: "ops".to_owned(), name: name.to_owned() },
        labels: labels.map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
        maker: Some(Maker { kind: "StatefulSet".to_owned(), name: "op".to_owned() }),
        leaving: false,
    }
}

fn compiled(texts: &[String], members: &[Member], before: &Compiled) -> Compiled {
    let mut manifests = Manifests::default();
    for text in texts {
        manifests.read(text).unwrap();
    }
    let labelling = Labelling::default();
    let world = World {
        configs: &manifests.configs,
        members,
        namespaces: &manifests.namespaces,
        labelling: &labelling,
    };
    compile(world, &before.policies)
}

/// By pod, its epoch.
fn epochs(compiled: &Compiled) -> Vec<(&str, u64)> {
    let policies = compiled.policies.iter();
    policies.map(|(name, told)| (name.name.as_str(), told.policy.epoch)).collect()
}

#[test]
fn an_epoch_grows_only_with_what_the_policy_says() {
    let pods = [pod("p", &[("shard", "a")]), pod("q", &[("shard", "b")])];
    let first =
        compiled(&[shard("a", "{team: a}"), shard("b", "{team: b}")], &pods, &Compiled::default());
    assert_eq!(epochs(&first), [("p", 1), ("q", 1)]);
    let same = compiled(&[shard("b", "{team: b}"), shard("a", "{team: a}")], &pods, &first);
    assert_eq!(same, first);
    let changed = compiled(&[shard("a", "{team: c}"), shard("b", "{team: b}")], &pods, &first);
    assert_eq!(epochs(&changed), [("p", 2), ("q", 1)]);
    let back = compiled(&[shard("a", "{team: a}"), shard("b", "{team: b}")], &pods, &changed);
    assert_eq!(epochs(&back), [("p", 3), ("q", 1)]);
}

#[test]
fn a_changed_limit_keeps_the_versions_of_the_others() {
    let pods = [pod("p", &[("shard", "a")])];
    let mut first = compiled(&[shard("a", "{team: a}")], &pods, &Compiled::default());
    let told = first.policies.values_mut().next().unwrap();
    told.policy.limits[0].changed_at = Some(17);
    let same = compiled(&[shard("a", "{team: a}")], &pods, &first);
    assert_eq!(same.policies, first.policies);
    let changed = compiled(&[shard("a", "{team: b}")], &pods, &first);
    assert_eq!(changed.policies.values().next().unwrap().policy.limits[0].changed_at, None);
}

#[test]
fn what_is_wrong_changes_nothing_and_is_told() {
    let pods = [pod("p", &[("shard", "a")])];
    let first = compiled(&[shard("a", "{team: a}")], &pods, &Compiled::default());
    for wrong in ["{'a b': c}", "{}"] {
        let after = compiled(&[shard("a", wrong)], &pods, &first);
        assert_eq!(after.policies, first.policies, "{wrong}");
        assert_eq!(after.troubles[0].object, "ShardingConfig ops/a", "{wrong}");
        assert!(after.troubles[0].message.starts_with("spec.limits[0].selector"), "{wrong}");
        let never = compiled(&[shard("a", wrong)], &pods, &Compiled::default());
        assert!(never.policies.is_empty(), "{wrong}");
    }
    let removed = compiled(&[], &pods, &first);
    assert_eq!(removed, Compiled::default());
}

#[test]
fn a_root_that_cannot_be_divided_changes_nothing_and_is_told() {
    let pods = [pod("op-0", &[]), pod("op-1", &[])];
    let rule = |size| {
        format!("targetStatefulSet: op, auto: {{shardingSize: {size}, everyShardReplicas: 1}}")
    };
    let first = compiled(&[root(&rule(2))], &pods, &Compiled::default());
    assert_eq!(first.policies.len(), 2);
    let after = compiled(&[root(&rule(40))], &pods, &first);
    assert_eq!(after.policies, first.policies);
    assert!(after.troubles[0].message.starts_with("spec.root.auto.shardingSize"));
}

#[test]
fn a_pod_of_two_shards_keeps_what_it_was_told() {
    let pods = [pod("p", &[("shard", "a")])];
    let first = compiled(&[shard("a", "{team: a}")], &pods, &Compiled::default());
    let other = shard("b", "{team: b}").replace("{shard: b}", "{shard: a}");
    let both = [shard("a", "{team: a}"), other];
    assert_eq!(compiled(&both, &pods, &first).policies, first.policies);
    let never = compiled(&both, &pods, &Compiled::default());
    assert!(never.policies.is_empty());
    assert_eq!(never.troubles.len(), 1);
    assert_eq!(never.troubles[0].object, "Pod ops/p");
}

#[test]
fn pods_that_are_not_enrolled_or_of_another_namespace_are_told_nothing() {
    let mut foreign = pod("p", &[("shard", "a")]);
    foreign.name.namespace = "other".to_owned();
    let mut stranger = pod("q", &[("shard", "a")]);
    stranger.labels.remove(label::ENABLE_PROXY);
    let found = compiled(&[shard("a", "{team: a}")], &[foreign, stranger], &Compiled::default());
    assert_eq!(found, Compiled::default());
}

#[test]
fn what_the_roots_status_says_of_a_pod_counts_before_its_label() {
    let rule = "targetDeployment: op, auto: {shardingSize: 2, everyShardReplicas: 1}";
    let mut pod = pod(
        "op-5c9-x",
        &[(label::POD_TEMPLATE_HASH, "5c9"), (label::SHARDING_CONFIG_INJECTED, "r-1-normal")],
    );
    pod.maker = Some(Maker { kind: "ReplicaSet".to_owned(), name: "op-5c9".to_owned() });
    let pods = [pod];
    let shard_of = |text: String| {
        compiled(&[text], &pods, &Compiled::default())
            .policies
            .values()
            .next()
            .unwrap()
            .shard
            .clone()
    };
    assert_eq!(shard_of(root(rule)), "r-1-normal");
    let status = "status: {ownership: {epoch: 6, pods: {op-5c9-x: r-2-normal}}}\n";
    assert_eq!(shard_of(root(rule) + status), "r-2-normal");
    let table =
        &compiled(&[root(rule) + status], &pods, &Compiled::default()).ownership["ops/root"];
    assert_eq!(table.epoch, 7);
    assert_eq!(table.shard_of("op-5c9-x"), Some("r-2-normal"));
}

#[test]
fn epochs_go_on_from_what_was_written_down() {
    let pods = [pod("p", &[("shard", "a")])];
    let text = shard("a", "{team: a}") + "status: {epoch: 41}\n";
    assert_eq!(epochs(&compiled(&[text], &pods, &Compiled::default())), [("p", 42)]);
}

#[test]
fn what_is_printed_is_read_back() {
    let rule = "targetStatefulSet: op, canary: {replicas: 1, inNamespaces: [shop]}, auto: {shardingSize: 2, everyShardReplicas: 1}";
    let pods = [pod("op-0", &[]), pod("op-1", &[])];
    let compiled = compiled(&[root(rule)], &pods, &Compiled::default());
    let text = serde_saphyr::to_string(&compiled).unwrap();
    assert_eq!(serde_saphyr::from_str::<Compiled>(&text).unwrap(), compiled);
}

proptest! {
    #[test]
    fn the_order_of_what_is_given_does_not_count(
        configs in Just((0..6).map(|at| shard(&format!("s{at}"), &format!("{{team: t{at}}}"))).chain([root("targetStatefulSet: op, auto: {shardingSize: 3, everyShardReplicas: 2}")]).collect::<Vec<_>>()).prop_shuffle(),
        pods in Just((0..12).map(|at| if at % 2 == 0 { pod(&format!("op-{at}"), &[]) } else { pod(&format!("x-{at}"), &[("shard", &format!("s{}", at % 6))]) }).collect::<Vec<_>>()).prop_shuffle(),
    ) {
        let mut sorted = (configs.clone(), pods.clone());
        sorted.0.sort();
        sorted.1.sort_by(|one, other| one.name.cmp(&other.name));
        let found = compiled(&configs, &pods, &Compiled::default());
        prop_assert_eq!(found.policies.len(), 12);
        prop_assert_eq!(&found, &compiled(&sorted.0, &sorted.1, &Compiled::default()));
        prop_assert_eq!(&compiled(&sorted.0, &sorted.1, &found), &found);
    }
}

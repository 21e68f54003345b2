use ctrlmesh_common::names::label;

use crate::rules::compile::Compiled;
use crate::rules::compile::tests::{INACTIVE_ROOT_RULES, child, compiled, pod, root, shards};
use crate::rules::pod::{Member, Owner};

#[test]
fn ordinals_are_counted_from_the_statefulsets_first() {
    let rule = "targetStatefulSet: op, auto: {shardingSize: 2, everyShardReplicas: 1}";
    let set = "---\napiVersion: apps/v1\nkind: StatefulSet\nmetadata: {name: op, namespace: ops}\n\
               spec: {serviceName: op, ordinals: {start: 5}, selector: {}, template: {}}\n";
    let pods = [pod("op-4", &[(label::SHARDING_CONFIG_INJECTED, "r-2-normal")]), pod("op-5", &[]), pod("op-6", &[])];
    let found = compiled(&[root(rule), set.to_owned()], &pods, &Compiled::default());
    let shards: Vec<&str> = found.policies.values().filter_map(|policy| policy.shard.as_deref()).collect();
    assert_eq!(shards, ["r-2-normal", "r-1-normal", "r-2-normal"], "one that is about to go stays");
}

#[test]
fn the_roots_status_takes_precedence_over_a_pods_label() {
    let rule = "targetDeployment: op, auto: {shardingSize: 2, everyShardReplicas: 1}";
    let mut pod =
        pod("op-5c9-x", &[(label::POD_TEMPLATE_HASH, "5c9"), (label::SHARDING_CONFIG_INJECTED, "r-1-normal")]);
    pod.owner = Some(Owner { kind: "ReplicaSet".to_owned(), name: "op-5c9".to_owned() });
    let pods = [pod];
    let shard_of = |text: String| {
        compiled(&[text], &pods, &Compiled::default()).policies.values().next().unwrap().shard.clone().unwrap()
    };
    assert_eq!(shard_of(root(rule)), "r-1-normal");
    let status = "status: {ownership: {epoch: 6, pods: {op-5c9-x: r-2-normal}}}\n";
    assert_eq!(shard_of(root(rule) + status), "r-2-normal");
    let record = &compiled(&[root(rule) + status], &pods, &Compiled::default()).operators["ops/root"];
    let table = record.ownership.as_ref().unwrap();
    assert_eq!((table.epoch, record.epoch), (7, 7));
    assert_eq!(table.shard_of("op-5c9-x"), Some("r-2-normal"));
}

#[test]
fn a_deployments_pods_move_to_an_empty_shard_after_a_rollout() {
    let pod = |name: &str, revision: &str, shard: &str| {
        let mut pod = pod(name, &[(label::POD_TEMPLATE_HASH, revision), (label::SHARDING_CONFIG_INJECTED, shard)]);
        let name = format!("op-{revision}");
        pod.owner = Some(Owner { kind: "ReplicaSet".to_owned(), name });
        pod
    };
    let rule = "targetDeployment: op, auto: {shardingSize: 2, everyShardReplicas: 1}";
    let served = |pods: &[Member]| {
        let compiled = compiled(&[root(rule)], pods, &Compiled::default());
        compiled.operators["ops/root"].unserved.is_empty()
    };
    let mut pods = vec![pod("a", "1", "r-1-normal"), pod("b", "1", "r-1-normal")];
    assert!(served(&pods));
    pods.push(pod("c", "2", "r-1-normal"));
    assert!(!served(&pods), "a rollout moves nobody");
    pods.remove(2);
    pods[0].terminating = true;
    assert!(!served(&pods), "its successor will be given the other shard");
}

/// A pod of the Deployment `op`, in its first shard.
fn of_deployment(name: &str, revision: &str) -> Member {
    let labels = [(label::POD_TEMPLATE_HASH, revision), (label::SHARDING_CONFIG_INJECTED, "r-1-normal")];
    let name_of_set = format!("op-{revision}");
    let owner = Some(Owner { kind: "ReplicaSet".to_owned(), name: name_of_set });
    Member { owner, ..pod(name, &labels) }
}

#[test]
fn a_pod_that_has_ended_gets_no_shard_and_serves_none() {
    let rule = |target: &str| format!("{target}: op, auto: {{shardingSize: 2, everyShardReplicas: 1}}");
    let unserved = |target: &str, pods: &[Member]| {
        let found = compiled(&[root(&rule(target))], pods, &Compiled::default());
        found.operators["ops/root"].unserved.clone()
    };
    let ended = |pod: Member| Member { ended: true, terminating: true, ..pod };
    let mut pods = vec![of_deployment("a", "1"), of_deployment("b", "1")];
    pods.push(ended(of_deployment("evicted", "1")));
    assert_eq!(unserved("targetDeployment", &pods), Vec::<String>::new(), "they are divided");
    let found = compiled(&[root(&rule("targetDeployment"))], &pods, &Compiled::default());
    assert_eq!(shards(&found), [("a", "r-1-normal"), ("b", "r-2-normal")]);
    let failed = [pod("op-0", &[]), ended(pod("op-1", &[]))];
    assert_eq!(unserved("targetStatefulSet", &failed), ["r-2-normal"], "nobody is there");
}

#[test]
fn a_pod_that_terminates_for_long_counts_until_replaced() {
    let served = |size: u8, pods: &[Member]| {
        let rule = format!("targetDeployment: op, auto: {{shardingSize: {size}, everyShardReplicas: 1}}");
        let found = compiled(&[root(&rule)], pods, &Compiled::default());
        usize::from(size) - found.operators["ops/root"].unserved.len()
    };
    let at = |pod: Member, created_at: i64| Member { created_at: Some(created_at), ready: true, ..pod };
    let goes = |pod: Member, since: i64| Member { terminating: true, deleted_at: Some(since), ..pod };
    let (a, b) = (at(of_deployment("a", "1"), 10), at(of_deployment("b", "1"), 20));
    let gone = goes(at(of_deployment("gone", "1"), 1), 15);
    assert_eq!(served(3, &[a.clone(), b.clone(), gone.clone()]), 2, "b has come in its place");
    assert_eq!(served(2, &[a.clone(), b.clone(), goes(gone.clone(), 25)]), 2, "there are enough");
    assert_eq!(served(3, &[a.clone(), b.clone(), goes(gone.clone(), 25)]), 1, "another will come");
    let both = [a.clone(), b.clone(), gone.clone(), goes(at(of_deployment("too", "1"), 2), 15)];
    assert_eq!(served(3, &both), 1, "b comes in the place of one only");
    let old = goes(at(of_deployment("old", "0"), 1), 15);
    assert_eq!(served(3, &[a.clone(), b.clone(), old]), 2, "the rollout is over, but for what is stuck");
    let starting = [a, b].map(|pod| Member { ready: false, ..pod });
    assert_eq!(served(3, &starting), 1, "the watch may show two of three that were created at once");
    assert_eq!(served(2, &starting), 2, "all are there");
}

#[test]
fn an_inactive_root_still_assigns_its_statefulsets_pods() {
    for rule in INACTIVE_ROOT_RULES {
        let rule = format!("{rule}targetStatefulSet: op");
        let children = [child("r-2-normal"), child("r-1-normal"), child("r-0-canary")];
        let pods = ["op-0", "op-1", "op-2", "op-3"].map(|name| pod(name, &[]));
        let of = |root: String| [vec![root], children.to_vec()].concat();
        let found = compiled(&of(root(&rule)), &pods, &Compiled::default());
        let expected = [("op-0", "r-0-canary"), ("op-1", "r-1-normal"), ("op-2", "r-2-normal"), ("op-3", "r-1-normal")];
        assert_eq!(shards(&found), expected, "{rule}: as they would have been divided");
        let written = "status: {ownership: {epoch: 1, pods: {op-0: r-2-normal, op-1: r-7-normal}}}\n";
        let found = compiled(&of(root(&rule) + written), &pods, &Compiled::default());
        assert_eq!(shards(&found)[..2], [("op-0", "r-2-normal"), ("op-1", "r-1-normal")], "{rule}");
        let nobody = compiled(&[root(&rule)], &pods, &Compiled::default());
        assert_eq!(shards(&nobody), [], "{rule}: there is no shard");
    }
}

#[test]
fn an_inactive_root_still_assigns_its_deployments_pods() {
    for rule in INACTIVE_ROOT_RULES {
        let root = root(&format!("{rule}targetDeployment: op"));
        let of_deployment = |name: &str, labels: &[(&str, &str)]| {
            let mut pod = pod(name, labels);
            pod.labels.insert(label::POD_TEMPLATE_HASH.to_owned(), "1".to_owned());
            let name = "op-1".to_owned();
            pod.owner = Some(Owner { kind: "ReplicaSet".to_owned(), name });
            pod
        };
        let injected = [(label::SHARDING_CONFIG_INJECTED, "r-2-normal")];
        let pods = [of_deployment("a", &[]), of_deployment("b", &injected)];
        let texts = [root, child("r-1-normal"), child("r-2-normal")];
        let found = compiled(&texts, &pods, &Compiled::default());
        assert_eq!(shards(&found), [("a", "r-1-normal"), ("b", "r-2-normal")], "{rule}");
        assert!(found.troubles.iter().all(|one| !one.object.starts_with("Pod ")), "{rule}");
    }
}

mod labels;

use std::sync::{Arc, LazyLock};

use ctrlmesh_common::policy::Policy;
use regex::Regex;

use super::*;
use crate::cluster::cache::Snapshot;
use crate::cluster::plan::{self, Changed};

pub(super) const ROOT: &str = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\n\
    metadata: {name: root, namespace: ops, generation: 4}\n\
    spec: {root: {prefix: r, targetStatefulSet: op, auto: {shardingSize: 2, everyShardReplicas: 1}}}\n---\n";

/// A standalone shard that selects every pod.
const SHARD: &str = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: a, namespace: ops}\n\
    spec: {selector: {matchLabels: {ctrlmesh.kusionstack.io/enable-proxy: \"true\"}}, limits: [{selector: {matchLabels: {team: a}}}]}\n---\n";

pub(super) fn pod(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: ops, labels: {{ctrlmesh.kusionstack.io/enable-proxy: \"true\"}}, \
         ownerReferences: [{{apiVersion: apps/v1, kind: StatefulSet, name: op, uid: a, controller: true}}]}}\n---\n"
    )
}

pub(super) fn plan(text: &str) -> Plan {
    plan::of(Snapshot::of_manifests(text), &BTreeMap::new())
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

pub(super) fn inputs(contacts: &BTreeMap<PodName, Contact>, now: i64) -> StatusInputs<'_> {
    static NONE: BTreeMap<String, Vec<String>> = BTreeMap::new();
    static FENCES: States = States::new();
    static UNKNOWN: LazyLock<LabelCoverages> = LazyLock::new(LabelCoverages::default);
    static NO_ROLLOUTS: Decisions = Decisions::new();
    static NO_AUDIT: Ownerships = None;
    StatusInputs {
        contacts,
        conflicts: &NONE,
        unlabelled: None,
        coverages: &UNKNOWN,
        ownerships: &NO_AUDIT,
        rollouts: &NO_ROLLOUTS,
        fences: &FENCES,
        new_leader: false,
        now: at(now),
    }
}

pub(super) fn name(pod: &str) -> PodName {
    format!("ops/{pod}").parse().unwrap()
}

fn status(plan: &Plan, which: usize, contacts: &[(&str, u64)], now: i64) -> ShardingConfigStatus {
    let contact = |pod, epoch| {
        let policy = plan.compiled.policies[&name(pod)].policy.clone();
        let digest = CompiledPolicy::new(None, None, 0, Policy { epoch, ..policy }).digest();
        Contact { epoch, digest, refused: None, connected: true, at: at(now), webhook: None }
    };
    let contacts = contacts.iter().map(|(pod, epoch)| (name(pod), contact(pod, *epoch))).collect();
    let inputs = inputs(&contacts, now);
    of_config(plan, which, inputs)
}

/// The status of the first ShardingConfig.
pub(super) fn of_first(plan: &Plan, inputs: StatusInputs<'_>) -> ShardingConfigStatus {
    of_config(plan, 0, inputs)
}

fn of_config(plan: &Plan, which: usize, inputs: StatusInputs<'_>) -> ShardingConfigStatus {
    of(&plan.snapshot.configs[which], plan, &PlanIndex::of(plan, &Changed::All), inputs)
}

fn summary(status: &ShardingConfigStatus) -> Vec<String> {
    let say = |one: &Condition| format!("{}={} {}", one.type_, one.status, one.reason);
    status.conditions.iter().map(say).collect()
}

/// The same manifests with `status` in the root.
pub(super) fn with(status: &ShardingConfigStatus, text: &str) -> Plan {
    let status = format!("status: {}\n---\n", serde_json::to_string(status).unwrap());
    plan(&text.replacen("---\n", &status, 1))
}

#[test]
fn a_root_is_programmed_when_every_proxy_has_acknowledged_it() {
    let text = ROOT.to_owned() + &pod("op-0") + &pod("op-1");
    let first = status(&plan(&text), 0, &[("op-0", 1), ("op-1", 1)], 100);
    let expected = [
        "Accepted=True Valid",
        "Programmed=False Waiting",
        "Degraded=False AsExpected",
        "Settled=True Settled",
        "Fenced=False Pending",
    ];
    assert_eq!(summary(&first), expected);
    assert_eq!((first.epoch, first.observed_generation, first.is_root), (Some(1), Some(4), Some(true)));
    assert_eq!(first.root.as_ref().unwrap().child_sharding_configs, ["r-1-normal", "r-2-normal"]);
    assert_eq!(first.ownership.as_ref().unwrap().pods.len(), 2);
    let plan = with(&first, &text);
    let some = status(&plan, 0, &[("op-0", 1)], 200);
    assert_eq!(some.conditions[1].message, "1 of 2 proxies have acknowledged epoch 1");
    assert_eq!(some.conditions[1].last_transition_time, Time(at(100)), "it has not changed");
    let all = status(&plan, 0, &[("op-0", 1), ("op-1", 1)], 300);
    assert_eq!(summary(&all)[1], "Programmed=True Acknowledged");
    assert_eq!(all.conditions[1].last_transition_time, Time(at(300)));
    assert_eq!(all.conditions[0], first.conditions[0]);
}

#[test]
fn a_fenced_root_is_settled_when_nothing_is_on_its_way() {
    let text = ROOT.replace("prefix: r,", "prefix: r, fence: Server,") + &pod("op-0") + &pod("op-1");
    let (mut plan, settled) = (plan(&text), |plan: &Plan| status(plan, 0, &[], 100).conditions[3].clone());
    let record = plan.compiled.operators.values_mut().next().unwrap();
    record.waiting.clear();
    assert_eq!(summary(&status(&plan, 0, &[], 100))[3], "Settled=True Settled");
    let record = plan.compiled.operators.values_mut().next().unwrap();
    record.waiting = vec!["this".to_owned(), "that".to_owned()];
    let moving = settled(&plan);
    assert_eq!((moving.status.as_str(), moving.message.as_str()), ("False", "this; that"));
    plan.compiled.operators.clear();
    assert_eq!(settled(&plan).reason, "Undecided");
}

#[test]
fn a_new_leader_does_not_revoke_acknowledgements() {
    let text = ROOT.to_owned() + &pod("op-0") + &pod("op-1");
    let first = status(&plan(&text), 0, &[], 100);
    let all = status(&with(&first, &text), 0, &[("op-0", 1), ("op-1", 1)], 200);
    let written = with(&all, &text);
    let led = |plan: &Plan, new_leader, contacts: &BTreeMap<PodName, Contact>| {
        let inputs = StatusInputs { new_leader, ..inputs(contacts, 300) };
        summary(&of_first(plan, inputs))[1].clone()
    };
    assert_eq!(led(&written, true, &BTreeMap::new()), "Programmed=True Acknowledged");
    assert_eq!(led(&written, false, &BTreeMap::new()), "Programmed=False Waiting", "for a while");
    let behind = [(name("op-0"), Contact::default())].into();
    assert_eq!(led(&written, true, &behind), "Programmed=False Waiting", "it has a contact");
    assert_eq!(led(&with(&first, &text), true, &BTreeMap::new()), "Programmed=False Waiting");
}

#[test]
fn more_shards_than_pods_are_reported() {
    let found = status(&plan(&(ROOT.to_owned() + &pod("op-0"))), 0, &[], 1);
    assert_eq!(summary(&found)[2], "Degraded=True ShardsWithoutPods");
    assert!(found.conditions[2].message.contains("r-2-normal"), "{:?}", found.conditions[2]);
    let none = status(&plan(ROOT), 0, &[], 1);
    assert_eq!(summary(&none)[1..3], ["Programmed=False NoPods", "Degraded=True NoPods"]);
}

#[test]
fn an_invalid_config_keeps_its_status() {
    let text = ROOT.to_owned() + &pod("op-0") + &pod("op-1");
    let before = status(&plan(&text), 0, &[], 1);
    let wrong = text.replace("shardingSize: 2", "shardingSize: 40");
    let after = status(&with(&before, &wrong), 0, &[], 2);
    assert_eq!(summary(&after)[0], "Accepted=False Invalid");
    assert!(after.conditions[0].message.starts_with("spec.root.auto.shardingSize"));
    assert_eq!((after.ownership, after.epoch), (before.ownership, before.epoch));
}

#[test]
fn a_shard_has_its_roots_epoch_only_once_it_is_written() {
    let child = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\n\
        metadata: {name: r-1-normal, namespace: ops, labels: {ctrlmesh.kusionstack.io/auto-sharding-root: root}}\nspec: {}\n---\n";
    let text = ROOT.to_owned() + &pod("op-0") + child;
    let first = plan(&text);
    assert_eq!(status(&first, 1, &[], 1).epoch, None);
    let second = with(&status(&first, 0, &[], 1), &text);
    let shard = status(&second, 1, &[("op-0", 1)], 2);
    assert_eq!(shard.epoch, Some(1));
    assert_eq!(summary(&shard)[1], "Programmed=True Acknowledged");
    assert_eq!(shard.pods[0].name, "op-0");
    assert_eq!((shard.pods[0].epoch, shard.pods[0].last_contact.clone()), (Some(1), Some(Time(at(2)))));
}

#[test]
fn a_config_with_the_name_of_a_shard_is_not_the_roots() {
    let stranger = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: r-1-normal, namespace: ops}\n\
        spec: {selector: {matchLabels: {app: other}}, limits: [{selector: {matchLabels: {'a b': c}}}]}\n---\n";
    let text = ROOT.to_owned() + &pod("op-0") + stranger;
    let written = with(&status(&plan(&text), 0, &[], 1), &text);
    let found = status(&written, 1, &[("op-0", 1)], 2);
    assert_eq!((found.epoch, found.pods.len()), (None, 0));
    assert_eq!(summary(&found)[..2], ["Accepted=False Invalid", "Programmed=False Pending"]);
    let valid = text.replace("'a b'", "ab");
    let written = with(&status(&plan(&valid), 0, &[], 1), &valid);
    let found = status(&written, 1, &[("op-0", 1)], 2);
    assert_eq!(summary(&found)[..2], ["Accepted=True Valid", "Programmed=False NoPods"]);
    let root = status(&written, 0, &[("op-0", 1)], 2);
    assert_eq!(root.conditions[1].message, "every proxy, 1 of 1, has acknowledged epoch 1");
}

#[test]
fn a_node_that_cannot_serve_outweighs_what_its_proxy_acknowledged() {
    let on_node = pod("op-0").replacen("---\n", "spec: {nodeName: node-a, containers: []}\n---\n", 1);
    let text = SHARD.to_owned() + &on_node;
    let mut plan = with(&status(&plan(&text), 0, &[], 1), &text);
    let programmed = |plan: &Plan| {
        let conditions = status(plan, 0, &[("op-0", 1)], 100).conditions;
        conditions.into_iter().find(|one| one.type_ == "Programmed").map(|one| (one.status, one.reason)).unwrap()
    };
    assert_eq!(programmed(&plan), ("True".to_owned(), "Acknowledged".to_owned()));
    Arc::get_mut(&mut plan.snapshot).unwrap().unfit_nodes.insert("node-a".to_owned());
    assert_eq!(programmed(&plan), ("False".to_owned(), "NodeCannotServe".to_owned()));
}

#[test]
fn each_pod_has_a_node_an_epoch_and_a_last_contact() {
    let on_node = pod("op-0") + &pod("op-1");
    let on_node = on_node.replacen("---\n", "spec: {nodeName: node-a, containers: []}\n---\n", 1);
    let status = status(&plan(&(SHARD.to_owned() + &on_node)), 0, &[("op-0", 1)], 100);
    let pod = |name: &str, node: Option<&str>, epoch, last_contact: Option<i64>| PodStatus {
        name: name.to_owned(),
        node: node.map(str::to_owned),
        epoch,
        last_contact: last_contact.map(|second| Time(at(second))),
        stands_by: false,
    };
    let wanted = [pod("op-0", Some("node-a"), Some(1), Some(100)), pod("op-1", None, None, None)];
    assert_eq!(status.pods, wanted);
}

#[test]
fn a_contact_is_written_down_again_only_after_a_while() {
    let text = SHARD.to_owned() + &pod("op-0");
    let first = status(&plan(&text), 0, &[("op-0", 1)], 1000);
    let contact = |now| {
        let status = status(&with(&first, &text), 0, &[("op-0", 1)], now);
        status.pods[0].last_contact.as_ref().unwrap().0.as_second()
    };
    // At multiples of five minutes, for all pods at once.
    assert_eq!((contact(1010), contact(1199), contact(1200)), (1000, 1000, 1200));
    assert_eq!(contact(1201), 1201);
}

#[test]
fn the_same_epoch_of_another_operator_is_not_acknowledged() {
    let text = ROOT.to_owned() + &pod("op-0");
    let written = status(&plan(&text), 0, &[], 1);
    let plan = with(&written, &text);
    let other = Contact { epoch: 1, digest: 7, connected: true, ..Contact::default() };
    let contacts = [(name("op-0"), other)].into();
    let inputs = inputs(&contacts, 2);
    let found = of_first(&plan, inputs);
    assert_eq!(summary(&found)[1], "Programmed=False Waiting");
    assert_eq!(summary(&status(&plan, 0, &[("op-0", 1)], 2))[1], "Programmed=True Acknowledged");
}

#[test]
fn an_absent_proxy_is_reported_after_a_minute() {
    let text = ROOT.to_owned() + &pod("op-0") + &pod("op-1");
    let plan = plan(&text);
    let found = |connected, now| {
        let contact = Contact { connected, at: at(100), ..Contact::default() };
        let contacts = [(name("op-0"), contact)].into();
        let inputs = inputs(&contacts, now);
        of_first(&plan, inputs)
    };
    assert_eq!(summary(&found(false, 160))[2], "Degraded=False AsExpected");
    assert_eq!(summary(&found(false, 161))[2], "Degraded=True ProxyAway");
    assert_eq!(
        found(false, 161).conditions[2].message,
        "no word for a minute from the proxies of op-0; they go on by their last policy, if they live"
    );
    assert_eq!(summary(&found(true, 1000))[2], "Degraded=False AsExpected");
}

#[test]
fn a_pod_of_two_shards_and_a_refused_policy_are_reported() {
    let shard = |name: &str| {
        format!(
            "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {{name: {name}, namespace: ops}}\n\
            spec: {{selector: {{matchLabels: {{ctrlmesh.kusionstack.io/enable-proxy: \"true\"}}}}, limits: [{{selector: {{matchLabels: {{team: {name}}}}}}}]}}\n---\n"
        )
    };
    let selected_twice = plan(&(shard("a") + &shard("b") + &pod("op-0")));
    for which in [0, 1] {
        assert_eq!(summary(&status(&selected_twice, which, &[], 1))[2], "Degraded=True PodSelectedTwice");
    }
    let plan = plan(&(shard("a") + &pod("op-0")));
    let contact = Contact { refused: Some("no".to_owned()), ..Contact::default() };
    let contacts = [(name("op-0"), contact)].into();
    let found = of_first(&plan, inputs(&contacts, 1));
    assert_eq!(summary(&found)[2], "Degraded=True PolicyRefused");
    assert_eq!(found.conditions[2].message, "the proxy of pod op-0 refuses its policy: no");
    let conflicts = [("ops/a".to_owned(), vec!["x".to_owned()])].into();
    let none = BTreeMap::new();
    let inputs = StatusInputs { conflicts: &conflicts, ..inputs(&none, 1) };
    let found = of_first(&plan, inputs);
    assert_eq!(summary(&found)[2], "Degraded=True Conflict");
}

#[test]
fn limits_say_at_which_version_their_epoch_began() {
    let versioned = |version: &str| ROOT.replace("name: root,", &format!("name: root, resourceVersion: '{version}',"));
    let changes = |plan: &Plan| -> Vec<Option<u64>> {
        let policies = plan.compiled.policies.values();
        policies.flat_map(|policy| &policy.policy.limits).map(|limit| limit.changed_at).collect()
    };
    let text = versioned("40") + &pod("op-0");
    let first = plan(&text);
    assert!(changes(&first).iter().all(Option::is_none), "nobody has written it down");
    let written = status(&first, 0, &[], 1);
    assert_eq!((written.epoch, written.changed_at.as_deref()), (Some(1), Some("40")));
    // The version has changed, the epoch has not.
    let second = with(&written, &(versioned("50") + &pod("op-0")));
    assert!(!changes(&second).is_empty() && changes(&second).iter().all(|at| *at == Some(40)));
    assert_eq!(status(&second, 0, &[("op-0", 1)], 2).changed_at.as_deref(), Some("40"));
    let other = text.replace("shardingSize: 2", "shardingSize: 1").replace("'40'", "'60'");
    let one_shard = status(&with(&written, &other), 0, &[], 3);
    assert_eq!((one_shard.epoch, one_shard.changed_at.as_deref()), (Some(2), Some("60")));
}

#[test]
fn a_pods_last_contact_is_not_that_of_its_successor() {
    let created_at = |second: i64| {
        let time = Time(at(second));
        let time = serde_json::to_string(&time).unwrap();
        ROOT.to_owned().replace("root: {prefix: r, targetStatefulSet: op, auto: {shardingSize: 2, everyShardReplicas: 1}}", "selector: {matchLabels: {ctrlmesh.kusionstack.io/enable-proxy: 'true'}}, limits: [{selector: {matchLabels: {a: b}}}]")
            + &pod("op-0").replace("namespace: ops, labels", &format!("namespace: ops, creationTimestamp: {time}, labels"))
    };
    let first = status(&plan(&created_at(50)), 0, &[("op-0", 1)], 100);
    assert_eq!(first.pods[0].epoch, Some(1));
    let again = status(&with(&first, &created_at(50)), 0, &[], 200);
    assert_eq!(again.pods, first.pods, "nothing new is known of it");
    let next = status(&with(&first, &created_at(150)), 0, &[], 200);
    assert_eq!((next.pods[0].epoch, next.pods[0].last_contact.clone()), (None, None));
}

#[test]
fn pods_that_have_ended_are_not_listed() {
    let ended = |name: &str, phase: &str| pod(name).replace("---\n", &format!("status: {{phase: {phase}}}\n---\n"));
    let text = SHARD.to_owned() + &pod("op-0") + &ended("op-1", "Failed") + &ended("op-2", "Succeeded");
    let found = status(&plan(&text), 0, &[], 1);
    let names: Vec<&str> = found.pods.iter().map(|pod| pod.name.as_str()).collect();
    assert_eq!(names, ["op-0"]);
    assert_eq!(found.conditions[1].message, "0 of 1 proxies have acknowledged epoch 1");
}

/// The reasons that a function of a file can give, in order.
fn reasons(source: &str, function: &str) -> Vec<String> {
    let (_, body) = source.split_once(&format!("fn {function}(")).unwrap();
    let (body, _) = body.split_once("\n}\n").unwrap();
    let given = Regex::new(r#"finding\(\s*(?:true|false),\s*"(\w+)""#).unwrap();
    assert_eq!(given.find_iter(body).count(), body.matches("finding(").count(), "{function}");
    given.captures_iter(body).map(|one| one[1].to_owned()).collect()
}

#[test]
fn the_docs_list_every_reason_in_the_order_of_precedence() {
    let docs = include_str!("../../../../docs/sharding-config.md");
    let row = Regex::new(r"(?m)^\| `(\w+)` \| (?:True|False) \| `(\w+)` \|").unwrap();
    let rows: Vec<_> = row.captures_iter(docs).map(|row| row.extract::<2>().1).collect();
    let (compute, programmed) = (include_str!("../compute.rs"), include_str!("programmed.rs"));
    let all: [(&str, &str, &[&str]); 3] = [
        ("Accepted", compute, &["accepted"]),
        ("Programmed", programmed, &["of"]),
        ("Degraded", compute, &["degraded", "unlabelled"]),
    ];
    for (condition, source, functions) in all {
        let listed = rows.iter().filter(|row| row[0] == condition).map(|row| row[1].to_owned());
        let given: Vec<String> = functions.iter().flat_map(|function| reasons(source, function)).collect();
        assert_eq!(listed.collect::<Vec<_>>(), given, "{condition}");
    }
}

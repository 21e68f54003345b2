use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::*;
use crate::audit::OwnedFinding;
use crate::cluster::cache::Snapshot;
use crate::cluster::plan;
use crate::ownership::fence_state::{FenceState, Unfenced};
use crate::rules::label_coverage::{KindName, LabelCoverage, LabelGap, MissingRule};

const ROOT: &str = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: op, namespace: ops, uid: '1'}\n\
    spec: {root: {disable: true, prefix: r, targetStatefulSet: op}}\n---\n";

fn child(name: &str) -> String {
    format!(
        "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {{name: {name}, namespace: ops, ownerReferences: \
         [{{apiVersion: ctrlmesh.kusionstack.io/v1alpha1, kind: ShardingConfig, name: op, uid: '1', controller: true}}]}}\n\
         spec: {{selector: {{matchLabels: {{ctrlmesh.kusionstack.io/sharding-config-injected: {name}}}}}, limits: [{{selector: {{matchLabels: {{team: {name}}}}}}}]}}\n---\n"
    )
}

fn pod(name: &str, labels: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: ops, uid: {name}, annotations: {{ctrlmesh.kusionstack.io/injected: 'true'}}, labels: {{ctrlmesh.kusionstack.io/enable-proxy: 'true', {labels}}}, \
         ownerReferences: [{{apiVersion: apps/v1, kind: StatefulSet, name: op, uid: a, controller: true}}]}}\n---\n"
    )
}

fn planned(text: &str) -> Plan {
    plan::of(Snapshot::of_manifests(text), &BTreeMap::new())
}

fn labelled(plan: &Plan) -> Vec<(String, String)> {
    let label = |write: Write| match write {
        Write::Label { pod, shard, .. } => Some((pod.name, shard)),
        _ => None,
    };
    let writes = writes(plan, &Observations::default(), &Changed::All, Timestamp::UNIX_EPOCH);
    writes.into_iter().filter_map(label).collect()
}

#[test]
fn pods_of_a_root_are_labelled_also_where_it_is_switched_off() {
    let injected = "ctrlmesh.kusionstack.io/sharding-config-injected: r-2-normal";
    let pods = pod("op-0", "") + &pod("op-1", injected) + &pod("x", "app: mine");
    let by_hand = child("mine").replace("ownerReferences", "finalizers: [], ownerReferences");
    let by_hand = by_hand.replace("uid: '1', ", "uid: '9', ");
    let by_hand = by_hand.replace("{ctrlmesh.kusionstack.io/sharding-config-injected: mine}", "{app: mine}");
    let text = ROOT.to_owned() + &child("r-1-normal") + &child("r-2-normal") + &by_hand + &pods;
    let expected = [("op-0".to_owned(), "r-1-normal".to_owned())];
    assert_eq!(labelled(&planned(&text)), expected, "and nobody else's");
    let on = text.replace("disable: true", "auto: {shardingSize: 2, everyShardReplicas: 1}");
    assert_eq!(labelled(&planned(&on)), expected);
}

#[test]
fn an_existing_shard_is_changed_only_in_its_seen_version() {
    let root = ROOT.replace("disable: true", "auto: {shardingSize: 2, everyShardReplicas: 1}");
    let edited = child("r-1-normal").replace("namespace: ops", "namespace: ops, uid: '7', resourceVersion: '42'");
    let planned = planned(&(root + &edited));
    let writes = writes(&planned, &Observations::default(), &Changed::All, Timestamp::UNIX_EPOCH);
    let applied = writes.iter().filter_map(|write| match write {
        Write::Apply { config, .. } => Some(&config.metadata),
        _ => None,
    });
    let observed: Vec<_> =
        applied.map(|meta| (meta.name.as_deref(), meta.uid.as_deref(), meta.resource_version.as_deref())).collect();
    let expected = [(Some("r-1-normal"), Some("7"), Some("42")), (Some("r-2-normal"), None, None)];
    assert_eq!(observed, expected);
}

#[test]
fn of_some_namespaces_the_same_is_written_as_of_all() {
    let of = |namespace: &str| {
        let root = ROOT.replace("disable: true", "auto: {shardingSize: 2, everyShardReplicas: 1}");
        (root + &child("r-1-normal") + &pod("op-0", "")).replace("namespace: ops", &format!("namespace: {namespace}"))
    };
    let planned = planned(&(of("prod") + &of("prod-eu")));
    let writes = |within: &Changed| writes(&planned, &Observations::default(), within, Timestamp::UNIX_EPOCH);
    let all = writes(&Changed::All);
    assert!(all.len() > 6 && writes(&Changed::default()).is_empty());
    for namespace in ["prod", "prod-eu"] {
        let of_it: Vec<Write> = all.iter().filter(|write| write.namespace() == namespace).cloned().collect();
        assert_eq!(writes(&Changed::In([namespace.to_owned()].into())), of_it);
        assert!(!of_it.is_empty() && of_it.len() < all.len());
    }
}

/// Writes all that is to be written, until nothing is.
fn settled(text: &str, observed: &Observations) -> Plan {
    let mut planned = planned(text);
    for _ in 0..8 {
        let writes = writes(&planned, observed, &Changed::All, Timestamp::UNIX_EPOCH);
        if writes.is_empty() {
            return planned;
        }
        let mut snapshot = Snapshot::clone(&planned.snapshot);
        for write in writes {
            make(&mut snapshot, write);
        }
        planned = plan::of(snapshot, planned.sendable());
    }
    panic!("it does not settle");
}

fn make(snapshot: &mut Snapshot, write: Write) {
    let is = |one: &ShardingConfig, name: &str| full_name(&one.metadata) == name;
    let object = write.object();
    let mut there = snapshot.configs.iter_mut().find(|one| is(one, &object));
    match (write, &mut there) {
        (Write::Apply { mut config, .. }, None) => {
            config.metadata.uid = Some(object);
            snapshot.configs.push((*config).into());
            snapshot.configs.sort_by_key(|one| full_name(&one.metadata));
        }
        (Write::Apply { config, .. }, Some(there)) => there.spec = config.spec,
        (Write::Status { config, .. }, Some(there)) => there.status = config.status,
        (Write::Finalizers { finalizers, .. }, Some(there)) => there.metadata.finalizers = Some(finalizers),
        (Write::Label { pod, shard, .. }, _) => {
            let pod = snapshot.members.iter_mut().find(|member| member.name == pod).unwrap();
            pod.labels.insert(ctrlmesh_common::names::label::SHARDING_CONFIG_INJECTED.to_owned(), shard);
        }
        (write, _) => panic!("{write:?}"),
    }
}

type Change = fn(&mut Snapshot, &mut Observations);

/// What may change in the namespace `prod-eu`, or everywhere.
fn changes() -> Vec<(&'static str, Change)> {
    fn root(snapshot: &mut Snapshot) -> &mut ShardingConfig {
        snapshot.configs.iter_mut().find(|one| full_name(&one.metadata) == "prod-eu/op").unwrap()
    }
    fn pod(snapshot: &mut Snapshot) -> &mut Member {
        snapshot.members.iter_mut().find(|one| one.name.namespace == "prod-eu").unwrap()
    }
    vec![
        ("a generation", |snapshot, _| root(snapshot).metadata.generation = Some(9)),
        ("a division", |snapshot, _| {
            root(snapshot).spec.root.as_mut().unwrap().auto.as_mut().unwrap().sharding_size = 3;
        }),
        ("a status", |snapshot, _| root(snapshot).status = None),
        ("a finalizer", |snapshot, _| root(snapshot).metadata.finalizers = None),
        ("a label", |snapshot, _| pod(snapshot).labels.clear()),
        ("a node", |snapshot, _| {
            pod(snapshot).node = Some("bad".to_owned());
            snapshot.unfit_nodes.insert("bad".to_owned());
        }),
        ("a contact", |_, observed| {
            let contact = Contact { connected: true, ..Contact::default() };
            observed.contacts = Arc::new([("prod-eu/op-0".parse().unwrap(), contact)].into());
        }),
        ("a fence", |_, observed| {
            let open = FenceState::Open(Unfenced::NotWritten { why: "x".to_owned() });
            observed.fences = Arc::new([("prod-eu/op".to_owned(), open)].into());
        }),
        ("a coverage", |_, observed| {
            let coverage = LabelCoverage { established: true, ..LabelCoverage::default() };
            observed.coverages = [("prod-eu/op".to_owned(), coverage)].into_iter().collect();
        }),
        ("a finding of the audit", |_, observed| {
            let finding = OwnedFinding { holds: false, reason: "Unowned", message: "x".to_owned() };
            observed.ownerships = Arc::new(Some([("prod-eu/op".to_owned(), Some(finding))].into()));
        }),
        ("unlabelled objects", |_, observed| observed.unlabelled = Some(Unlabelled::Some("x".to_owned()))),
    ]
}

#[test]
fn what_changes_is_in_the_namespaces_that_are_looked_at() {
    let of = |namespace: &str| {
        let root = ROOT.replace("disable: true", "auto: {shardingSize: 2, everyShardReplicas: 1}");
        (root + &pod("op-0", "")).replace("namespace: ops", &format!("namespace: {namespace}"))
    };
    let observed = Observations { ownerships: Arc::new(Some(BTreeMap::new())), ..Observations::default() };
    let before = settled(&(of("prod") + &of("prod-eu")), &observed);
    for (what, change) in changes() {
        let (mut snapshot, mut now) = (Snapshot::clone(&before.snapshot), observed.clone());
        change(&mut snapshot, &mut now);
        let after = plan::of(snapshot, before.sendable());
        let scope = Changed::between_plans(&before, &after).union(now.changed(&observed, Timestamp::UNIX_EPOCH));
        let all = writes(&after, &now, &Changed::All, Timestamp::UNIX_EPOCH);
        assert!(!all.is_empty(), "{what} changes nothing");
        assert_eq!(writes(&after, &now, &scope, Timestamp::UNIX_EPOCH), all, "{what}: {scope:?}");
        let is_of_all = ["a node", "unlabelled objects"].contains(&what);
        assert_eq!(scope.has("prod"), is_of_all, "{what}: {scope:?}");
    }
}

#[test]
fn a_proxy_that_is_away_for_a_minute_is_looked_at() {
    let at = |seconds: i64| Timestamp::from_second(seconds).unwrap();
    let contact = Contact { at: at(100), ..Contact::default() };
    let contacts = Arc::new([("prod/op-0".parse().unwrap(), contact)].into());
    let observed = Observations { contacts, ..Observations::default() };
    for (now, is_looked_at) in [(100, false), (159, false), (161, true), (219, true), (221, false)] {
        assert_eq!(observed.changed(&observed, at(now)).has("prod"), is_looked_at, "{now}");
    }
    assert_eq!(observed.next_away(at(130)), Some(Duration::from_millis(30_001)));
    assert_eq!(observed.next_away(at(161)), None);
}

/// Conditions are given as `TYPE=STATUS REASON`.
fn status(conditions: &[&str]) -> ShardingConfigStatus {
    let condition = |said: &&str| {
        let (type_, rest) = said.split_once('=').unwrap();
        let (status, reason) = rest.split_once(' ').unwrap();
        Condition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message: format!("{reason}, said at length"),
            observed_generation: None,
            last_transition_time: Time(Timestamp::UNIX_EPOCH),
        }
    };
    let conditions = conditions.iter().map(condition).collect();
    ShardingConfigStatus { conditions, ..ShardingConfigStatus::default() }
}

#[test]
fn events_report_what_got_worse_or_recovered_once() {
    const WELL: [&str; 3] = ["Accepted=True Valid", "Programmed=True Acknowledged", "Degraded=False AsExpected"];
    let notes = |before: Option<&[&str]>, after: &[&str]| -> Vec<String> {
        let events = events(before.map(status).as_ref(), &status(after));
        let say = |one: &EventNote| {
            assert_eq!(one.message, format!("{}, said at length", one.reason));
            format!("{} {}", if one.warning { "Warning" } else { "Normal" }, one.reason)
        };
        events.iter().map(say).collect()
    };
    let with = |at: usize, said: &'static str| {
        let mut all = WELL;
        all[at] = said;
        all
    };
    assert!(notes(None, &WELL).is_empty(), "a good start is no event");
    let invalid = with(0, "Accepted=False Invalid");
    assert_eq!(notes(None, &invalid), ["Warning Invalid"]);
    assert_eq!(notes(Some(&WELL), &invalid), ["Warning Invalid"]);
    assert!(notes(Some(&invalid), &invalid).is_empty());
    assert_eq!(notes(Some(&invalid), &WELL), ["Normal Valid"]);
    let away = with(2, "Degraded=True ProxyAway");
    assert_eq!(notes(Some(&WELL), &away), ["Warning ProxyAway"]);
    assert_eq!(notes(Some(&away), &with(2, "Degraded=True Refused")), ["Warning Refused"]);
    assert_eq!(notes(Some(&away), &WELL), ["Normal AsExpected"]);
    let waiting = with(1, "Programmed=False Waiting");
    assert!(notes(Some(&WELL), &waiting).is_empty(), "that proxies have yet to answer is none");
    assert_eq!(notes(Some(&waiting), &WELL), ["Normal Acknowledged"]);
    let unfit = with(1, "Programmed=False NodeCannotServe");
    assert_eq!(notes(Some(&waiting), &unfit), ["Warning NodeCannotServe"]);
    assert!(notes(Some(&unfit), &unfit).is_empty());
}

#[test]
fn a_fence_that_is_lost_or_cannot_be_is_an_event() {
    let reported = |before: Option<&str>, after: &str| -> Vec<String> {
        let before = before.map(|before| status(&[before]));
        let events = events(before.as_ref(), &status(&[after]));
        events.iter().map(|one| format!("{} {}", if one.warning { "Warning" } else { "Normal" }, one.reason)).collect()
    };
    let nothing: [&str; 0] = [];
    assert_eq!(reported(None, "Fenced=False NotProved"), nothing, "it is being built");
    assert_eq!(reported(Some("Fenced=False NotProved"), "Fenced=True Enforced"), ["Normal Enforced"]);
    assert_eq!(reported(Some("Fenced=True Enforced"), "Fenced=False NotProved"), ["Warning NotProved"]);
    assert_eq!(reported(None, "Fenced=False Unsupported"), ["Warning Unsupported"]);
    assert_eq!(reported(Some("Fenced=True Enforced"), "Fenced=False Off"), nothing, "somebody wanted it");
}

#[test]
fn an_event_proposes_the_role_that_is_missing() {
    let kind = KindName { group: "apps".to_owned(), resource: "deployments".to_owned() };
    let forbidden = LabelGap::Forbidden(vec![MissingRule { kind: kind.clone(), verbs: vec!["patch"] }]);
    let coverage = LabelCoverage { established: false, gap: Some(forbidden), needed: vec![kind] };
    let coverages = LabelCoverages::from_iter([("ops/a".to_owned(), coverage)]);
    let mut root = ShardingConfig::new("a", ctrlmesh_common::api::ShardingConfigSpec::default());
    root.metadata.namespace = Some("ops".to_owned());
    let said = |conditions: &[&str]| events(None, &status(conditions));
    let both = said(&["Degraded=True LabelsForbidden", "Labelled=False LabelsForbidden"]);
    assert_eq!(both.len(), 1, "it is said once: {both:?}");
    let proposed = proposed_roles(&root, &both, &coverages);
    let [role] = &proposed[..] else { panic!("{proposed:?}") };
    assert!(role.message.contains("name: ctrlmesh-labels:ops:a") && role.message.contains("[deployments]"));
    assert!(proposed_roles(&root, &said(&["Degraded=True Unlabelled"]), &coverages).is_empty());
    assert!(said(&["Degraded=True Labelling"]).is_empty());
}

#[test]
fn another_message_is_another_event() {
    let mut before = status(&["Degraded=True ShardsWithoutPods"]);
    let after = before.clone();
    before.conditions[0].message = "no pod is of a".to_owned();
    assert_eq!(events(Some(&before), &after).len(), 1);
    assert!(events(Some(&after), &after).is_empty());
}

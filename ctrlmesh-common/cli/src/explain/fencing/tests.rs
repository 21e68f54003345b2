use ctrlmesh_common::selector::Labels;
use ctrlmesh_manager::rules::pod::Owner;
use serde_json::{Value, json};

use super::*;

/// Root `web` of configmaps in namespace `ops`; pod `web-0` owns slot 7, and `web-1` owns slot 8.
fn root(fence: &str, condition: Option<(&str, &str)>) -> ShardingConfig {
    let rule = json!({"prefix": "web", "targetStatefulSet": "web", "fence": fence,
        "resourceSelector": [{"relateResources": [{"apiGroups": [""], "resources": ["configmaps"]}]}]});
    let table = json!({"epoch": 3, "slots": {"7": "web-0-normal", "8": "web-1-normal"},
        "podUids": {"u-0": "web-0-normal", "u-1": "web-1-normal"}});
    let conditions = condition.map(|(status, reason)| {
        json!({"type": "Fenced", "status": status, "reason": reason, "message": "said so",
            "lastTransitionTime": "2026-01-01T00:00:00Z"})
    });
    let conditions: Vec<Value> = conditions.into_iter().collect();
    let root = json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
        "metadata": {"namespace": "ops", "name": "web", "uid": "r"},
        "spec": {"root": rule, "controller": {"leaderElectionName": "web"}},
        "status": {"epoch": 3, "ownership": table, "conditions": conditions}});
    serde_json::from_value(root).unwrap()
}

fn pod(ordinal: u8) -> Member {
    let mut pod = Member { uid: format!("u-{ordinal}"), account: "robot".to_owned(), ..Member::default() };
    pod.name.namespace = "ops".to_owned();
    pod.name.name = format!("web-{ordinal}");
    pod
}

/// A namespace whose slot is 7, and its labels.
fn place() -> (String, Labels) {
    let labelling = Labelling::default();
    let name =
        (0..10_000).map(|number| format!("ns-{number}")).find(|name| labelling.hash.slot(name).number() == 7).unwrap();
    let labels = labelling.of_namespace(&name).map(|(key, value)| (key.to_owned(), value));
    (name, labels.into())
}

fn said(root: &ShardingConfig, resource: &str, has_labels: bool) -> [(Outcome, Outcome); 2] {
    let (namespace, labels) = place();
    let written = Written {
        group: "",
        resource,
        subresource: "",
        namespace: Some(&namespace),
        name: "object",
        labels: has_labels.then_some(&labels),
    };
    let pods = [pod(0), pod(1)];
    let answers = answers(root, &written, &[&pods[0], &pods[1]], &Labelling::default());
    [0, 1].map(|at| (answers[at].proxy.outcome, answers[at].api_server.outcome))
}

#[test]
fn the_owner_writes_and_the_other_pod_is_refused_by_both() {
    let enforced = root("Server", Some(("True", "Enforced")));
    let expected = [(Outcome::Allowed, Outcome::Allowed), (Outcome::Refused, Outcome::Refused)];
    assert_eq!(said(&enforced, "configmaps", true), expected);
    let (namespace, labels) = place();
    let (group, resource, subresource, name) = ("", "configmaps", "", "object");
    let written = Written { group, resource, subresource, namespace: Some(&namespace), name, labels: Some(&labels) };
    let refused = answers(&enforced, &written, &[&pod(1)], &Labelling::default()).remove(0);
    assert_eq!((refused.pod.as_str(), refused.writes_for.as_deref()), ("web-1", Some("web-1-normal")));
    let said = format!(
        "namespace {namespace} in slot 7 belongs to web-0-normal, and pod web-1 writes for web-1-normal, by epoch 3"
    );
    assert_eq!(refused.api_server.message, said);
    let said =
        "ctrlmesh: slot 7 belongs to \"web-0-normal\" here, and this pod writes for \"web-1-normal\" (epoch 3); see";
    assert!(refused.proxy.message.starts_with(said), "{}", refused.proxy.message);
}

#[test]
fn what_is_not_enforced_is_said_so() {
    use Outcome::{Allowed, NotFenced, NotKnown, NotProved, Refused};
    for (root, resource, has_labels, expected) in [
        (root("Proxy", None), "configmaps", true, [(Allowed, NotFenced), (Refused, NotFenced)]),
        (root("Off", None), "configmaps", true, [(NotFenced, NotFenced), (NotFenced, NotFenced)]),
        (root("Server", Some(("False", "NotProved"))), "configmaps", true, [(Allowed, Allowed), (Refused, NotProved)]),
        (root("Server", None), "configmaps", true, [(Allowed, Allowed), (Refused, NotProved)]),
        (root("Server", Some(("True", "Enforced"))), "secrets", true, [(NotFenced, NotFenced), (NotFenced, NotFenced)]),
        (root("Server", Some(("True", "Enforced"))), "configmaps", false, [(Allowed, NotKnown), (Refused, NotKnown)]),
    ] {
        assert_eq!(said(&root, resource, has_labels), expected, "{:?} {resource}", root.spec.root.unwrap().fence);
    }
    let mut disabled = root("Server", Some(("True", "Enforced")));
    disabled.spec.root.as_mut().unwrap().disable = Some(true);
    assert_eq!(said(&disabled, "configmaps", true), [(NotFenced, NotFenced); 2]);
    let mut new = root("Server", None);
    new.status = None;
    assert_eq!(said(&new, "configmaps", true), [(NotFenced, NotFenced); 2]);
}

#[test]
fn the_condition_says_who_refuses() {
    for (root, expected) in [
        (root("Off", None), "Nobody refuses writes: spec.root.fence is Off."),
        (root("Proxy", None), "Only the proxies refuse writes: spec.root.fence is Proxy."),
        (
            root("Server", Some(("True", "Enforced"))),
            "The API server and the proxies refuse writes (condition Fenced, Enforced: said so).",
        ),
        (
            root("Server", None),
            "The proxies refuse writes. The API server is not known to (condition Fenced, it is not there yet).",
        ),
    ] {
        assert_eq!(Fencing::of(&root, root.spec.root.as_ref().unwrap()).sentence(), expected);
    }
}

#[test]
fn a_shadow_is_refused_nothing_by_its_proxy() {
    let mut root = root("Proxy", None);
    let rule = root.spec.root.as_mut().unwrap();
    rule.rollout = Some(serde_json::from_value(json!({})).unwrap());
    let trial = json!({"revision": "new", "phase": "Analysing", "step": 0, "shadow": true,
        "stepStartedAt": "2026-01-01T00:00:00Z", "passed": 0, "failed": 0, "message": "why"});
    let rollout = json!({"promoted": "old", "trial": trial});
    root.status.as_mut().unwrap().rollout = serde_json::from_value(rollout).unwrap();
    let (namespace, labels) = place();
    let written = Written {
        group: "",
        resource: "configmaps",
        subresource: "",
        namespace: Some(&namespace),
        name: "object",
        labels: Some(&labels),
    };
    let of = |revision: &str| {
        let mut pod = pod(1);
        pod.owner = Some(Owner { kind: "StatefulSet".to_owned(), name: "web".to_owned() });
        pod.labels.insert("controller-revision-hash".to_owned(), revision.to_owned());
        answers(&root, &written, &[&pod], &Labelling::default()).remove(0).proxy
    };
    assert_eq!(of("old").outcome, Outcome::Refused, "the slot is of another shard");
    let shadow = of("new");
    assert!(shadow.outcome == Outcome::NotFenced && shadow.message.contains("dry run"), "{shadow:?}");
}

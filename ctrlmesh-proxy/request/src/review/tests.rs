use std::num::NonZeroU16;

use ctrlmesh_common::policy::webhook::OnUnowned;
use ctrlmesh_common::policy::{Fence, Limit};
use ctrlmesh_common::resource::ResourceMatch;
use ctrlmesh_common::slots::{NamespaceHash, SlotSet};
use serde_json::{Value, json};

use super::*;

fn websites() -> Vec<ResourceMatch> {
    vec![ResourceMatch { api_groups: vec!["example.com".to_owned()], resources: vec!["websites".to_owned()] }]
}

fn limit(selector: &str) -> Limit {
    Limit { relate_resources: websites(), selector: Selector::parse(selector).unwrap(), changed_at: None }
}

fn webhook(peers: &[(&str, &[Limit])]) -> Webhook {
    let peer = |(shard, limits): &(&str, &[Limit])| Peer {
        shard: (*shard).to_owned(),
        addresses: vec!["10.0.0.1".parse().unwrap()],
        limits: limits.to_vec(),
    };
    Webhook {
        port: NonZeroU16::new(9443).unwrap(),
        certificate: String::new(),
        key: String::new(),
        on_unowned: OnUnowned::Local,
        peers: peers.iter().map(peer).collect(),
    }
}

/// Shard `a` has all slots but that of `shop`, which shard `b` has; the namespace `moving` is nobody's, and `pinned` is
/// of a shard that is no peer.
fn fenced() -> Policy {
    let hash = NamespaceHash::default();
    let owner = |slot| if slot == hash.slot("shop") { "b" } else { "a" };
    let fence = Fence {
        owner: Some("a".to_owned()),
        hash,
        slots: SlotSet::ALL.iter().map(|slot| (slot, owner(slot).to_owned())).collect(),
        namespaces: [("pinned".to_owned(), "unsharded".to_owned())].into(),
        revoked: ["moving".to_owned()].into(),
        resources: websites(),
        ..Fence::default()
    };
    Policy { fence: Some(fence), ..Policy::default() }
}

fn review(group: &str, resource: &str, namespace: &str, name: &str) -> Review {
    let (group, resource) = (group.to_owned(), resource.to_owned());
    Review { group, resource, namespace: namespace.to_owned(), name: name.to_owned(), labels: Labels::new() }
}

fn named(answerer: Answerer<'_>) -> &str {
    match answerer {
        Answerer::Local | Answerer::Own => "local",
        Answerer::Owner(peer) => &peer.shard,
        Answerer::Moving => "moving",
        Answerer::Unowned => "unowned",
    }
}

#[test]
fn the_owner_of_the_namespace_answers() {
    let (policy, webhook) = (fenced(), webhook(&[("b", &[])]));
    for (group, resource, namespace, name, expected) in [
        ("example.com", "websites", "own", "w", "local"),
        ("example.com", "websites", "shop", "w", "b"),
        // The API server makes the name later.
        ("example.com", "websites", "shop", "", "b"),
        ("example.com", "websites", "moving", "w", "moving"),
        ("example.com", "websites", "pinned", "w", "unowned"),
        // Of cluster scope.
        ("example.com", "websites", "", "shop", "b"),
        ("example.com", "websites", "", "", "local"),
        // Not divided.
        ("", "configmaps", "shop", "c", "local"),
    ] {
        let review = review(group, resource, namespace, name);
        assert_eq!(named(review.answerer(&policy, &webhook)), expected, "{review:?}");
    }
    let pass = Policy { mode: Mode::Pass, ..policy };
    assert_eq!(review("example.com", "websites", "shop", "w").answerer(&pass, &webhook), Answerer::Local);
}

#[test]
fn without_a_fence_the_labels_tell_the_owner() {
    let policy = Policy { limits: vec![limit("team=a")], ..Policy::default() };
    let webhook = webhook(&[("b", &[limit("team=b")]), ("c", &[limit("team in (c, d)")]), ("none", &[])]);
    for (team, expected) in [("a", "local"), ("b", "b"), ("d", "c"), ("e", "unowned")] {
        let mut review = review("example.com", "websites", "own", "w");
        review.labels.insert("team".to_owned(), team.to_owned());
        assert_eq!(named(review.answerer(&policy, &webhook)), expected, "{team}");
    }
    let other = review("", "configmaps", "own", "c");
    assert_eq!(named(other.answerer(&policy, &webhook)), "local", "no limit covers it");
}

fn body(version: &str, request: &Value) -> Vec<u8> {
    let review =
        json!({"apiVersion": format!("admission.k8s.io/{version}"), "kind": "AdmissionReview", "request": request});
    review.to_string().into_bytes()
}

#[test]
fn a_review_is_read_as_the_api_server_wrote_it() {
    let object = |team: &str| json!({"metadata": {"labels": {"team": team, "empty": null}, "namespace": "forged"}});
    let resource = json!({"group": "example.com", "version": "v1", "resource": "websites"});
    let request = |object: &Value, old: &Value| {
        json!({
            "uid": "1", "resource": resource, "namespace": "shop", "name": "w", "operation": "UPDATE",
            "object": object, "oldObject": old, "options": {"deep": [1, {"a": null}]},
        })
    };
    for (object, old, team) in [
        (object("a"), Value::Null, Some("a")),
        (object("a"), object("b"), Some("b")),
        (Value::Null, object("b"), Some("b")),
        (json!({}), Value::Null, None),
        (json!({"metadata": {}}), Value::Null, None),
    ] {
        for version in ["v1", "v1beta1"] {
            let review = Review::parse(&body(version, &request(&object, &old))).unwrap();
            let expected = self::review("example.com", "websites", "shop", "w");
            assert_eq!(review.labels.get("team").map(String::as_str), team);
            assert_eq!(Review { labels: Labels::new(), ..review }, expected);
        }
    }
    let of_cluster = Review::parse(&body("v1", &json!({"resource": resource}))).unwrap();
    assert_eq!(of_cluster, review("example.com", "websites", "", ""));
}

#[test]
fn what_is_no_review_is_none() {
    let conversion =
        json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "ConversionReview", "request": {"uid": "1"}});
    for text in [
        &b""[..],
        b"{",
        b"[]",
        b"{}",
        conversion.to_string().as_bytes(),
        &body("v2", &json!({"resource": {"group": "", "resource": "pods"}})),
        &body("v1", &json!({})),
        &body("v1", &Value::Null),
    ] {
        assert_eq!(Review::parse(text), None, "{}", String::from_utf8_lossy(text));
    }
}

use std::collections::BTreeMap;

use ctrlmesh_common::policy::Redirect;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use regex::Regex;

use super::super::tests::{ROOT, inputs, name, of_first, plan, pod, with};
use super::super::{Contact, StatusInputs};
use super::*;
use crate::rules::compile::Trouble;

const PODS: [&str; 2] = ["op-0", "op-1"];

fn with_webhook() -> String {
    let root = ROOT.replace("spec: {", "spec: {webhook: {certDir: /certs, port: 9443}, ");
    root + &pod("op-0") + &pod("op-1")
}

fn routed() -> WebhookState {
    WebhookState { port_taken: true, certificate_read: true, error: String::new() }
}

fn without_certificate() -> WebhookState {
    WebhookState { certificate_read: false, error: "the key is no PEM".to_owned(), ..routed() }
}

/// What the proxies of the two pods say, as far as they are connected.
fn contacts(states: [Option<WebhookState>; 2]) -> BTreeMap<crate::rules::pod::PodName, Contact> {
    let contact = |webhook| Contact { connected: true, webhook, ..Contact::default() };
    PODS.iter().zip(states).map(|(pod, state)| (name(pod), contact(state))).collect()
}

fn condition(plan: &Plan, inputs: StatusInputs<'_>) -> Condition {
    let status = of_first(plan, inputs);
    status.conditions.into_iter().find(|one| one.type_ == WEBHOOK_ROUTED).unwrap()
}

fn said(plan: &Plan, states: [Option<WebhookState>; 2]) -> (String, String, String) {
    let found = condition(plan, inputs(&contacts(states), 1));
    (found.status, found.reason, found.message)
}

#[test]
fn only_an_operator_with_a_webhook_has_the_condition() {
    let without = plan(&(ROOT.to_owned() + &pod("op-0")));
    let none = BTreeMap::new();
    let status = of_first(&without, inputs(&none, 1));
    assert!(status.conditions.iter().all(|one| one.type_ != WEBHOOK_ROUTED));
}

#[test]
fn reviews_are_routed_where_every_connected_proxy_says_so() {
    let plan = plan(&with_webhook());
    let (status, reason, message) = said(&plan, [Some(routed()), Some(routed())]);
    assert_eq!((&*status, &*reason), ("True", "Routed"));
    assert_eq!(message, "every proxy that is connected, 2 of 2, routes reviews");
    let mut some = contacts([Some(routed()), Some(without_certificate())]);
    some.get_mut(&name("op-1")).unwrap().connected = false;
    assert_eq!(condition(&plan, inputs(&some, 1)).message, "every proxy that is connected, 1 of 1, routes reviews");
}

#[test]
fn what_a_proxy_cannot_do_is_said_with_its_pod() {
    let plan = plan(&with_webhook());
    let untaken = WebhookState { error: "find its addresses".to_owned(), ..WebhookState::default() };
    let (status, reason, message) = said(&plan, [Some(without_certificate()), Some(untaken)]);
    assert_eq!((&*status, &*reason), ("False", "PortNotTaken"));
    let expected =
        "pod op-1 is called past its proxy, which cannot take port 9443 and tries again: cannot find its addresses";
    assert_eq!(message, expected);
    let (status, reason, message) = said(&plan, [Some(without_certificate()), None]);
    assert_eq!((&*status, &*reason), ("False", "NoCertificate"));
    let begin = "calls to pod op-0 pass unread until there is a certificate: the key is no PEM; compare spec.webhook";
    assert!(message.starts_with(begin), "{message}");
}

#[test]
fn a_proxy_that_says_nothing_is_not_known() {
    let plan = plan(&with_webhook());
    let (status, reason, message) = said(&plan, [Some(routed()), None]);
    assert_eq!((&*status, &*reason), ("False", "Pending"));
    assert!(message.starts_with("no node proxy has said whether it takes calls to pod op-1;"), "{message}");
    let nobody = condition(&plan, inputs(&BTreeMap::new(), 1));
    assert_eq!((&*nobody.reason, &*nobody.message), ("Pending", "no proxy of the pods is connected"));
}

#[test]
fn a_new_leader_keeps_what_was_known() {
    let (text, known) = (with_webhook(), contacts([Some(routed()), Some(routed())]));
    let first = plan(&text);
    let before = of_first(&first, inputs(&known, 1));
    let (later, nobody) = (with(&before, &text), BTreeMap::new());
    let reason = |new_leader, contacts| condition(&later, StatusInputs { new_leader, ..inputs(contacts, 2) }).reason;
    assert_eq!(reason(true, &nobody), "Routed");
    assert_eq!(reason(false, &nobody), "Pending", "for a while");
    assert_eq!(reason(true, &contacts([Some(without_certificate()), None])), "NoCertificate");
}

#[test]
fn pods_that_are_called_past_their_proxy_are_named() {
    let with = |redirect| {
        let mut plan = plan(&with_webhook());
        let mut snapshot = (*plan.snapshot).clone();
        snapshot.members[1].redirect = redirect;
        plan.snapshot = snapshot.into();
        said(&plan, [Some(routed()), Some(routed())])
    };
    let (status, reason, message) = with(Redirect::Nowhere);
    assert_eq!((&*status, &*reason), ("False", "NotIntercepted"));
    assert!(message.starts_with("pod op-1 is called past"), "{message}");
    assert_eq!(with(Redirect::Sidecar).1, "Routed");
}

#[test]
fn shards_that_do_not_know_the_others_are_reported() {
    let mut plan = plan(&with_webhook());
    let trouble = |shard: &str| Trouble {
        object: "ShardingConfig ops/root".to_owned(),
        configs: vec!["ops/root".to_owned()],
        message: format!("spec.webhook: the proxies of shard {shard:?} do not know the other shards: it is too much"),
    };
    plan.compiled.troubles.push(trouble("r-1-normal"));
    let (_, reason, message) = said(&plan, [Some(routed()), None]);
    assert_eq!((&*reason, message), ("NoRoom", trouble("r-1-normal").message));
    let found = |shard| compile::webhook_without_room(&plan.compiled.troubles, "ops/root", Some(shard)).is_some();
    assert_eq!(["r-1-normal", "r-2-normal"].map(found), [true, false]);
}

#[test]
fn a_root_without_pods_or_switched_off_says_so() {
    let text = with_webhook();
    let (root, _) = text.split_once("---\n").unwrap();
    let reason = |text: &str| condition(&plan(text), inputs(&BTreeMap::new(), 1)).reason;
    assert_eq!(reason(&format!("{root}---\n")), "NoPods");
    assert_eq!(reason(&text.replace("prefix: r,", "prefix: r, disable: true,")), "Disabled");
}

#[test]
fn the_docs_list_every_reason() {
    let (source, docs) = (include_str!("../webhook.rs"), include_str!("../../../../../docs/sharding-config.md"));
    let given = Regex::new(r#"finding\((?:true|false), "(\w+)""#).unwrap();
    let mut reasons: Vec<&str> = given.captures_iter(source).map(|one| one.extract::<1>().1[0]).collect();
    let row = Regex::new(r"(?m)^\| `WebhookRouted` \| (?:True|False) \| `(\w+)` \|").unwrap();
    let mut rows: Vec<&str> = row.captures_iter(docs).map(|row| row.extract::<1>().1[0]).collect();
    reasons.sort_unstable();
    rows.sort_unstable();
    assert_eq!(reasons, rows);
    assert_eq!(rows.len(), 8);
}

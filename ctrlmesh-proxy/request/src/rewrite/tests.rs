use std::collections::BTreeMap;

use ctrlmesh_common::policy::{Limit, Lock, Policy};
use ctrlmesh_common::selector::Selector;
use proptest::prelude::*;

use super::*;
use crate::decide::{Decision, decide};

fn sent(policy: &Policy, method: &str, asked: &str) -> String {
    let request = RequestInfo::parse(method, asked).unwrap();
    match decide(policy, &request) {
        Decision::Pass => asked.to_owned(),
        Decision::Rewrite(plan) => target(&request, &plan),
        Decision::Refuse(refusal) => panic!("{method} {asked}: {refusal}"),
    }
}

fn limited(selector: &str) -> Policy {
    let limit = Limit { selector: Selector::parse(selector).unwrap(), ..Limit::default() };
    Policy { limits: vec![limit], ..Policy::default() }
}

fn locked() -> Policy {
    let lock = Lock { namespace: "ops".into(), name: "op".into(), shard: "s1".into() };
    Policy { lock: Some(lock), ..Policy::default() }
}

#[test]
fn an_older_state_is_asked_for_anew_and_nothing_else_changes() {
    let mut policy = limited("a=1");
    policy.limits[0].changed_at = Some(70);
    let newer = "labelSelector=a%3D1&resourceVersion=70&resourceVersionMatch=NotOlderThan";
    for (asked, more) in [
        ("resourceVersion=0", ""),
        ("limit=500&resourceVersion=0&x=%zz&resourceVersion=9", "&x=%zz"),
        ("resourceVersion=69&timeoutSeconds=5", "&timeoutSeconds=5"),
        ("limit=5&resourceVersionMatch=NotOlderThan&resourceVersion=69", "&limit=5"),
    ] {
        let asked = format!("/api/v1/pods?{asked}");
        assert_eq!(sent(&policy, "GET", &asked), format!("/api/v1/pods?{newer}{more}"), "{asked}");
    }
    // Switched off, and the operator holds its share of before.
    let mut policy = limited("");
    policy.limits[0].changed_at = Some(70);
    let query = "resourceVersion=70&resourceVersionMatch=NotOlderThan";
    let sent = sent(&policy, "GET", "/api/v1/pods?resourceVersion=0");
    assert_eq!(sent, format!("/api/v1/pods?{query}"));
}

#[test]
fn rows_in_which_a_lock_is_looked_for_hold_their_objects() {
    let maps = "/api/v1/namespaces/ops/configmaps";
    for (asked, wanted) in [
        ("?includeObject=None", ""),
        ("?watch=1&x=%zz&include%4fbject=%4eone&includeObject=Object&y", "?watch=1&x=%zz&y"),
        ("?includeObject=Object&includeObject=None", "?includeObject=Object&includeObject=None"),
        ("?includeObject=none", "?includeObject=none"),
        ("?fieldSelector=metadata.name%3Dop&includeObject=None", "?fieldSelector=metadata.name%3Dop---s1"),
        ("/op?includeObject=None&pretty=1", "/op---s1?pretty=1"),
    ] {
        let asked = format!("{maps}{asked}");
        let (asked, wanted) = (sent(&locked(), "GET", &asked), format!("{maps}{wanted}"));
        assert_eq!(asked.replace("%3D", "="), wanted.replace("%3D", "="));
    }
    for others in ["/api/v1/pods?includeObject=None", "/api/v1/namespaces/x/configmaps?includeObject=None"] {
        assert_eq!(sent(&locked(), "GET", others), others);
    }
}

#[test]
fn the_policy_stands_before_what_the_client_asks() {
    for (asked, wanted) in [
        ("", "labelSelector=a%20in%20%281%2C2%29"),
        ("limit=5&x=%zz&y;z", "labelSelector=a%20in%20%281%2C2%29&limit=5&x=%zz&y;z"),
        ("limit=5&labelSelector=team%3Db&watch", "labelSelector=a%20in%20%281%2C2%29%2Cteam%3Db&limit=5&watch"),
        ("labelSelector=b+in+(c)", "labelSelector=a%20in%20%281%2C2%29%2Cb+in+(c)"),
        ("labelSelector=&x", "labelSelector=a%20in%20%281%2C2%29&x"),
        ("labelSelector=+%09", "labelSelector=a%20in%20%281%2C2%29"),
        ("labelSelector=%00b", "labelSelector=a%20in%20%281%2C2%29"),
        ("labelSelector=b&labelSelector=c&label%53elector=d", "labelSelector=a%20in%20%281%2C2%29%2Cb"),
        ("labelSelector=b;labelSelector=c", "labelSelector=a%20in%20%281%2C2%29&labelSelector=b;labelSelector=c"),
        ("labelSelector=%zz", "labelSelector=a%20in%20%281%2C2%29&labelSelector=%zz"),
        ("labelselector=b", "labelSelector=a%20in%20%281%2C2%29&labelselector=b"),
    ] {
        let asked = format!("/api/v1/pods?{asked}");
        assert_eq!(sent(&limited("a in (1,2)"), "GET", &asked), format!("/api/v1/pods?{wanted}"), "{asked}");
    }
}

#[test]
fn a_path_without_a_query_gets_one() {
    assert_eq!(sent(&limited("a"), "DELETE", "/api/v1/pods"), "/api/v1/pods?labelSelector=a");
}

#[test]
fn the_lock_is_renamed_in_path_and_field_selector_only() {
    let leases = "/apis/coordination.k8s.io/v1/namespaces/ops/leases";
    for (asked, wanted) in [
        ("/op", "/op---s1"),
        ("/%6fp?x=op", "/op---s1?x=op"),
        ("/op/status?fieldManager=op", "/op---s1/status?fieldManager=op"),
        ("/other", "/other"),
        ("?fieldSelector=metadata.name=op&x=%7e", "?fieldSelector=metadata.name%3Dop---s1&x=%7e"),
        (
            "?watch&fieldSelector=a!=b,metadata.name!=op,metadata.name==op",
            "?watch&fieldSelector=a%21%3Db%2Cmetadata.name%21%3Dop---s1%2Cmetadata.name%3D%3Dop---s1",
        ),
        (
            "?fieldSelector=metadata.name%3Dop&fieldSelector=metadata.name%3Dop",
            "?fieldSelector=metadata.name%3Dop---s1&fieldSelector=metadata.name%3Dop",
        ),
        ("?fieldSelector=metadata.name=opp", "?fieldSelector=metadata.name=opp"),
    ] {
        let asked = format!("{leases}{asked}");
        assert_eq!(sent(&locked(), "GET", &asked), format!("{leases}{wanted}"), "{asked}");
    }
}

#[test]
fn a_namespace_that_is_called_like_the_lock_is_not_renamed() {
    let lock = Lock { namespace: "op".into(), name: "op".into(), shard: "s1".into() };
    let policy = Policy { lock: Some(lock), ..Policy::default() };
    let asked = "/apis/coordination.k8s.io/v1/namespaces/op/leases/op";
    assert_eq!(sent(&policy, "GET", asked), format!("{asked}---s1"));
}

/// Text that may or may not be a selector, made of what selectors are made of.
fn client_text() -> impl Strategy<Value = String> {
    let pieces = [
        "a", "b", "c", "in", "notin", "1", "2", "=", "==", "!=", "!", "(", ")", ",", " ", "\t", "\0", ">", "<", "é",
        "&", ";", "%", "+", "#",
    ];
    prop_oneof![
        2 => prop::collection::vec(prop::sample::select(pieces.to_vec()), 0..10).prop_map(|pieces| pieces.concat()),
        3 => prop::collection::vec(requirement(), 0..4).prop_map(|all| all.join(",")),
    ]
}

fn requirement() -> impl Strategy<Value = String> {
    let key = prop::sample::select(vec!["a", "b", "x.io/c"]);
    let shape = prop::sample::select(vec!["=1", "!=1", " in (1,2)", " notin (2,)", "", ">1", "<2", "==", " in (2)"]);
    (key, shape, any::<bool>())
        .prop_map(|(key, shape, not)| if not { format!("!{key}") } else { format!("{key}{shape}") })
}

/// Escapes some bytes that need none, and all that do.
fn spelled(text: &str, seed: u64) -> String {
    let mut state = seed;
    let spell = |byte: u8| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        match byte {
            b' ' if state >> 62 == 0 => "+".to_owned(),
            b' ' | b'%' | b'+' | b'&' | b';' | b'#' | 0..=0x1f | 0x7f..=0xff => {
                format!("%{byte:02x}")
            }
            _ if state >> 62 == 1 => format!("%{byte:02X}"),
            _ => char::from(byte).to_string(),
        }
    };
    text.bytes().map(spell).collect()
}

fn every_object() -> Vec<BTreeMap<String, String>> {
    let values = [None, Some(""), Some("1"), Some("2"), Some("3")];
    let mut objects = Vec::new();
    for a in values {
        for b in values {
            for c in values {
                let labels = [("a", a), ("b", b), ("x.io/c", c)];
                objects.push(
                    labels.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?.to_owned()))).collect(),
                );
            }
        }
    }
    objects
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_server_sees_exactly_the_client_and_the_policy(
        policy in prop::collection::vec(requirement(), 1..4),
        client in client_text(),
        before in prop::sample::select(vec!["", "limit=1&", "labelSelector=%zz&", "labelSelector=a;b&", "&", "watch&"]),
        after in prop::sample::select(vec!["", "&labelSelector=b", "&label%53elector=!b", "&x=;", "&labelSelector"]),
        key in prop::sample::select(vec!["labelSelector", "label%53elector", "%6CabelSelector"]),
        seed in any::<u64>(),
    ) {
        let policy = policy.join(",");
        let asked = format!("/api/v1/pods?{before}{key}={}{after}", spelled(&client, seed));
        let sent = sent(&limited(&policy), "GET", &asked);
        let seen = RequestInfo::parse("GET", &sent).unwrap();
        let policy = Selector::parse(&policy).unwrap();
        let counted = seen.query().pairs().filter(|pair| pair.is("labelSelector")).count();
        prop_assert_eq!(counted, 1, "{}", &sent);
        match (Selector::parse(&client), Selector::parse(seen.label_selector())) {
            (Ok(client), Ok(seen)) => {
                for labels in every_object() {
                    let wanted = client.matches(&labels) && policy.matches(&labels);
                    prop_assert_eq!(seen.matches(&labels), wanted, "{} {:?}", &sent, labels);
                }
            }
            (Err(_), Err(_)) => {}
            (client, seen) => prop_assert!(false, "{}: {:?} became {:?}", sent, client, seen),
        }
    }
}

#[test]
fn a_list_asks_for_one_state_and_nothing_else_changes() {
    let exact = "resourceVersion=70&resourceVersionMatch=Exact";
    for (list, expected) in [
        ("/api/v1/pods", format!("/api/v1/pods?{exact}")),
        ("/api/v1/pods?", format!("/api/v1/pods?{exact}")),
        ("/api/v1/pods?resourceVersion=0", format!("/api/v1/pods?{exact}")),
        (
            "/api/v1/pods?labelSelector=a%3D1&limit=5&resource%56ersion=9&resourceVersionMatch=NotOlderThan&a=b?c",
            format!("/api/v1/pods?{exact}&labelSelector=a%3D1&limit=5&a=b?c"),
        ),
    ] {
        assert_eq!(at_version(list, 70), Some(expected), "{list}");
    }
    let pairs = |count: usize| format!("/api/v1/pods?{}", ["a"].repeat(count).join("&"));
    assert!(at_version(&pairs(9_998), 70).is_some());
    assert_eq!(at_version(&pairs(9_999), 70), None, "the server would read none of it");
}

use serde_json::json;

use super::*;
use crate::decide::{Decision, Refusal, decide};
use ctrlmesh_common::policy::Policy;

fn write(method: &str, target: &str) -> Option<IntendedWrite> {
    let info = RequestInfo::parse(method, target).unwrap();
    IntendedWrite::of(&info, target)
}

#[test]
fn a_target_gets_one_dry_run() {
    for (given, expected) in [
        ("/api/v1/pods", "/api/v1/pods?dryRun=All"),
        ("/api/v1/pods?a=b&c=d", "/api/v1/pods?dryRun=All&a=b&c=d"),
        ("/api/v1/pods?dryRun=&a=b", "/api/v1/pods?dryRun=All&a=b"),
        ("/api/v1/pods?dry%52un=x", "/api/v1/pods?dryRun=All"),
    ] {
        assert_eq!(target(given).as_deref(), Some(expected));
    }
    // With one pair more than that, the server reads none.
    let pairs = |count: usize| format!("/api/v1/pods?{}", vec!["a=b"; count].join("&"));
    assert!(target(&pairs(9999)).is_some());
    assert_eq!(target(&pairs(10_000)), None);
}

#[test]
fn a_write_is_seen_where_its_object_is() {
    let pods = "/api/v1/namespaces/a/pods";
    let of = |method: &str, target: String| write(method, &target).map(|write| write.outcome);
    let text = str::to_owned;
    for (method, target, expected) in [
        ("POST", text(pods), Some(Outcome::New(text(pods)))),
        ("PUT", format!("{pods}/x?a=b"), Some(Outcome::Object(format!("{pods}/x")))),
        ("PATCH", format!("{pods}/x/status"), Some(Outcome::Object(format!("{pods}/x")))),
        ("PATCH", format!("{pods}/x/scale"), Some(Outcome::Object(format!("{pods}/x/scale")))),
        ("DELETE", format!("{pods}/x"), Some(Outcome::Deleted(format!("{pods}/x")))),
        ("POST", format!("{pods}/x/eviction"), Some(Outcome::Deleted(format!("{pods}/x")))),
        ("POST", format!("{pods}/x/binding"), Some(Outcome::Unseen)),
        (
            "DELETE",
            format!("{pods}?propagationPolicy=Orphan&labelSelector=a%3Db"),
            Some(Outcome::Emptied(format!("{pods}?labelSelector=a%3Db&limit=100"))),
        ),
        ("GET", text(pods), None),
        ("PUT", format!("{pods}/x?dryRun=All"), None),
        ("POST", text("/api/v1/namespaces/a/events"), None),
        ("POST", text("/api/v1/namespaces/a/serviceaccounts/x/token"), None),
        ("POST", text("/apis/authorization.k8s.io/v1/subjectaccessreviews"), None),
    ] {
        assert_eq!(of(method, target.clone()), expected, "{method} {target}");
    }
    let status = write("PUT", "/apis/apps/v1/namespaces/a/deployments/x/status").unwrap();
    assert_eq!((status.resource.as_str(), status.name.as_str()), ("deployments.apps/status", "x"));
}

#[test]
fn a_new_object_has_the_name_in_the_answer_unless_it_was_made_up() {
    let new = || write("POST", "/api/v1/namespaces/a/pods").unwrap();
    let named = new().named(&json!({"metadata": {"name": "x"}})).unwrap();
    assert_eq!(
        (named.name.as_str(), &named.outcome),
        ("x", &Outcome::Object("/api/v1/namespaces/a/pods/x".to_owned()))
    );
    assert_eq!(new().named(&json!({"metadata": {"name": "x-1", "generateName": "x-"}})), None);
    assert_eq!(new().named(&json!({"kind": "Status"})), None);
}

#[test]
fn options_of_a_deletion_become_those_of_a_dry_run() {
    let json = delete_options("application/json", br#"{"kind":"DeleteOptions","dryRun":[],"gracePeriodSeconds":0}"#);
    let json: Value = serde_json::from_slice(&json.unwrap()).unwrap();
    assert_eq!(json, json!({"kind": "DeleteOptions", "dryRun": ["All"], "gracePeriodSeconds": 0}));
    // An envelope of `DeleteOptions` with a grace period of 0.
    let type_meta = b"\x0a\x02v1\x12\x0dDeleteOptions";
    let envelope = |message: &[u8]| {
        let length = |bytes: &[u8]| u8::try_from(bytes.len()).unwrap();
        [b"k8s\0\x0a", &[length(type_meta)][..], type_meta, b"\x12", &[length(message)], message, b"\x1a\0\"\0"]
            .concat()
    };
    let protobuf = delete_options("application/vnd.kubernetes.protobuf", &envelope(b"\x08\x00")).unwrap();
    assert_eq!(protobuf, envelope(b"\x08\x00\x2a\x03All"));
    let empty = delete_options("application/vnd.kubernetes.protobuf", &envelope(b"")).unwrap();
    assert_eq!(empty, envelope(b"\x2a\x03All"));
    let cbor = delete_options("application/cbor", b"\xd9\xd9\xf7\xa1\x44kind\x4dDeleteOptions").unwrap();
    assert_eq!(cbor, b"\xd9\xd9\xf7\xa2\x46dryRun\x81\x43All\x44kind\x4dDeleteOptions");
    for (kind, body) in [
        ("application/json", &b"[]"[..]),
        ("application/yaml", b"kind: DeleteOptions"),
        ("application/cbor", b"\xa1\x66dryRun\x80"),
        ("application/cbor", b"\xbf\x44kind\x4dDeleteOptions\xff"),
        ("application/vnd.kubernetes.protobuf", b"{}"),
        ("text/plain", b"{}"),
    ] {
        assert_eq!(delete_options(kind, body), Err(UnreadableOptions), "{kind}");
    }
}

#[test]
fn only_the_json_of_an_accept_header_is_left() {
    assert_eq!(
        json_accept("application/vnd.kubernetes.protobuf, application/json;q=0.5").as_deref(),
        Some("application/json;q=0.5")
    );
    assert_eq!(json_accept("*/*").as_deref(), Some("application/json"));
    assert_eq!(json_accept("").as_deref(), Some("application/json"));
    assert_eq!(json_accept("application/vnd.kubernetes.protobuf"), None);
}

#[test]
fn a_shadow_is_refused_what_has_no_dry_run() {
    let shadow = Policy { shadow: true, ..Policy::default() };
    let pods = "/api/v1/namespaces/a/pods";
    let is_refused = |method: &str, target: String| {
        let info = RequestInfo::parse(method, &target).unwrap();
        matches!(decide(&shadow, &info), Decision::Refuse(Refusal::Shadow { .. }))
    };
    for (method, target, expected) in [
        ("PUT", format!("{pods}/x"), false),
        ("POST", format!("{pods}/x/eviction"), false),
        ("GET", format!("{pods}/x/log"), false),
        ("POST", format!("{pods}/x/exec"), true),
        ("GET", format!("{pods}/x/portforward"), true),
        ("GET", "/api/v1/namespaces/a/services/x/proxy/y".to_owned(), true),
        ("PUT", "/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachines/x/restart".to_owned(), true),
        ("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews".to_owned(), false),
        ("GET", "/version".to_owned(), false),
        ("POST", "/anything".to_owned(), true),
    ] {
        assert_eq!(is_refused(method, target.clone()), expected, "{method} {target}");
    }
    let passing = Policy { mode: ctrlmesh_common::policy::Mode::Pass, ..shadow.clone() };
    let exec = format!("{pods}/x/exec");
    assert_eq!(decide(&passing, &RequestInfo::parse("POST", &exec).unwrap()), Decision::Pass);
}

use std::fs;
use std::path::Path;

use ctrlmesh_common::policy::Lock;
use serde_json::Value;

use super::*;
use crate::rewrite::watch_frames_for_tests;

const EDITABLE: [(Encoding, &str); 2] = [(Encoding::Json, "json"), (Encoding::Protobuf, "protobuf")];

fn rename() -> Rename {
    let lock = Lock { namespace: "ops".into(), name: "op".into(), shard: "s1".into() };
    Rename { on_server: lock.per_shard(), lock }
}

/// What the real API server answered.
fn recorded(name: &str, extension: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded");
    fs::read(folder.join(format!("{name}.{extension}"))).unwrap()
}

fn replaced_once(body: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let at = body.windows(from.len()).position(|window| window == from).unwrap();
    [&body[..at], to, &body[at + from.len()..]].concat()
}

/// Names of the objects in an answer, with their namespaces.
fn names(body: &[u8], encoding: Encoding) -> Vec<(String, String)> {
    let document = Document { body, encoding };
    let root = document.root().unwrap();
    let name = |item: &Node| {
        let metadata = document.field(item, "metadata").unwrap().unwrap();
        let text = |name| document.text_of(&metadata, name).unwrap().unwrap_or_default().into_owned();
        (text("namespace"), text("name"))
    };
    document.items(&root, "items").unwrap().iter().map(name).collect()
}

#[test]
fn an_object_has_the_clients_name_here_and_the_servers_there() {
    for (encoding, extension) in EDITABLE {
        let body = recorded("lease", extension);
        let down = response(&body, encoding, &rename()).unwrap();
        let up = request(&down, encoding, &rename()).unwrap();
        assert_ne!(down, body, "{encoding:?}");
        assert_eq!(up, body, "{encoding:?}");
    }
}

#[test]
fn a_vacated_lease_is_the_same_without_a_holder() {
    for (encoding, extension) in EDITABLE {
        let body = recorded("lease", extension);
        let vacated = vacated(&body, encoding, &rename()).unwrap();
        assert_eq!(holder(&vacated, encoding), Some(Holder::Nobody), "{encoding:?}");
        let renamed = response(&body, encoding, &rename()).unwrap();
        assert!(vacated.len() + "op---s1_1".len() <= renamed.len(), "{encoding:?}");
        assert_eq!(
            request(&vacated, encoding, &rename()).unwrap().len(),
            vacated.len() + "---s1".len(),
            "{encoding:?}"
        );
    }
}

#[test]
fn a_lease_says_who_holds_it() {
    for (encoding, extension) in [EDITABLE[0], EDITABLE[1], (Encoding::Cbor, "cbor")] {
        let own = Some(Holder::Somebody("op---s1_1".to_owned()));
        assert_eq!(holder(&recorded("lease", extension), encoding), own, "{extension}");
        assert_eq!(holder(&recorded("lease-missing", extension), encoding), Some(Holder::Unsaid), "{extension}");
    }
    for (body, expected) in [
        (r#"{"spec":{"leaseDurationSeconds":1}}"#, Some(Holder::Unsaid)),
        (r#"{"metadata":{}}"#, Some(Holder::Unsaid)),
        (r#"{"spec":{"holderIdentity":""}}"#, Some(Holder::Nobody)),
        (r#"{"spec":{"holderIdentity":null}}"#, Some(Holder::Nobody)),
        ("[", None),
    ] {
        assert_eq!(holder(body.as_bytes(), Encoding::Json), expected, "{body}");
    }
}

#[test]
fn only_the_name_changes_in_json() {
    let json = recorded("lease", "json");
    let down = response(&json, Encoding::Json, &rename()).unwrap();
    assert_eq!(down, replaced_once(&json, b"\"name\": \"op---s1\"", b"\"name\": \"op\""));
}

#[test]
fn in_protobuf_only_the_name_and_the_lengths_around_it_change() {
    let body = recorded("lease", "protobuf");
    let down = response(&body, Encoding::Protobuf, &rename()).unwrap();
    let name = body.windows(9).position(|window| window == b"\x0a\x07op---s1").unwrap();
    let renamed = down.windows(4).position(|window| window == b"\x0a\x02op").unwrap();
    assert_eq!(down[renamed + 4..], body[name + 9..]);
    assert_eq!(down.len(), body.len() - 5);
}

#[test]
fn a_list_shows_our_lock_and_none_of_the_others() {
    for (encoding, extension) in EDITABLE {
        for list in ["lease-list", "metadata-list"] {
            let body = recorded(list, extension);
            let down = response(&body, encoding, &rename()).unwrap();
            let ops = |name: &str| ("ops".to_owned(), name.to_owned());
            assert_eq!(names(&down, encoding), [ops("op"), ops("other")], "{list} {encoding:?}");
        }
    }
}

#[test]
fn a_list_across_namespaces_is_renamed_only_in_ours() {
    for (encoding, extension) in EDITABLE {
        let body = recorded("lease-list-all", extension);
        let names = names(&response(&body, encoding, &rename()).unwrap(), encoding);
        assert!(names.contains(&("x".into(), "op---s1".into())), "{encoding:?} {names:?}");
        assert_eq!(names.iter().filter(|(namespace, _)| namespace == "ops").count(), 2, "{encoding:?}");
    }
}

#[test]
fn a_list_without_the_lock_is_not_touched() {
    for (encoding, extension) in EDITABLE {
        let body = recorded("configmap-list", extension);
        assert!(matches!(response(&body, encoding, &rename()), Ok(Cow::Borrowed(_))), "{encoding:?}");
    }
}

#[test]
fn a_table_shows_our_lock_and_none_of_the_others() {
    let body = recorded("lease-table", "json");
    let table: Value = serde_json::from_slice(&response(&body, Encoding::Json, &rename()).unwrap()).unwrap();
    let rows = table["rows"].as_array().unwrap();
    let shown: Vec<_> = rows.iter().map(|row| (&row["cells"][0], &row["object"]["metadata"]["name"])).collect();
    assert_eq!(shown, [(&"op".into(), &"op".into()), (&"other".into(), &"other".into())]);
}

#[test]
fn a_status_speaks_of_the_clients_name() {
    for (encoding, extension) in EDITABLE {
        let body = recorded("lease-exists", extension);
        let down = response(&body, encoding, &rename()).unwrap();
        let document = Document { body: &down, encoding };
        let root = document.root().unwrap();
        let message = document.text_of(&root, "message").unwrap().unwrap();
        assert_eq!(message, "leases.coordination.k8s.io \"op\" already exists", "{encoding:?}");
        let details = document.field(&root, "details").unwrap().unwrap();
        assert_eq!(document.text_of(&details, "name").unwrap().unwrap(), "op", "{encoding:?}");
    }
}

#[test]
fn a_watch_shows_our_lock_and_none_of_the_others() {
    for (encoding, extension) in EDITABLE {
        let stream = recorded("lease-watch", extension);
        let frames = watch_frames_for_tests(&stream, encoding);
        assert_eq!(frames.len(), 4, "{encoding:?}");
        let mut seen = Vec::new();
        for bytes in frames {
            if let Some(shown) = frame(&bytes, encoding, &rename()).unwrap() {
                let document = Document { body: &shown, encoding };
                let object = document.event_object(&document.event().unwrap()).unwrap().unwrap();
                let metadata = document.field(&object, "metadata").unwrap().unwrap();
                seen.push(document.text_of(&metadata, "name").unwrap().unwrap().into_owned());
            }
        }
        assert_eq!(seen, ["op", "other"], "{encoding:?}");
    }
}

#[test]
fn a_table_watch_hides_what_a_list_hides() {
    let stream = recorded("lease-table-watch", "json");
    let frames = watch_frames_for_tests(&stream, Encoding::Json);
    let shown = frames.iter().filter_map(|bytes| frame(bytes, Encoding::Json, &rename()).unwrap());
    let shown: Vec<Value> = shown.map(|bytes| serde_json::from_slice(&bytes).unwrap()).collect();
    let cells: Vec<_> = shown.iter().map(|event| &event["object"]["rows"][0]["cells"][0]).collect();
    assert_eq!(cells, ["op", "other"]);
}

#[test]
fn patches_of_every_kind_are_renamed() {
    for (patch, wanted) in [
        (
            r#"{"metadata":{"name":"op","x":1},"spec":{"name":"op"}}"#,
            r#"{"metadata":{"name":"op---s1","x":1},"spec":{"name":"op"}}"#,
        ),
        (r#" {"metadata" : {"na\u006de" : "\u006fp"}} "#, r#" {"metadata" : {"na\u006de" : "op---s1"}} "#),
        (r#"{"spec":{"holderIdentity":"op"}}"#, r#"{"spec":{"holderIdentity":"op"}}"#),
        (
            r#"[{"op":"test","path":"/metadata/name","value":"op"}]"#,
            r#"[{"op":"test","path":"/metadata/name","value":"op---s1"}]"#,
        ),
        (
            r#"[{"op":"add","path":"/metadata","value":{"name":"op"}}]"#,
            r#"[{"op":"add","path":"/metadata","value":{"name":"op---s1"}}]"#,
        ),
        (r#"[{"op":"remove","path":"/spec"}]"#, r#"[{"op":"remove","path":"/spec"}]"#),
        ("", ""),
    ] {
        assert_eq!(request(patch.as_bytes(), Encoding::Json, &rename()).unwrap(), wanted.as_bytes(), "{patch}");
    }
}

#[test]
fn json_sent_as_yaml_is_editable_and_yaml_and_cbor_are_not() {
    let apply = "application/apply-patch+yaml";
    let body = br#"{"metadata":{"name":"op"}}"#;
    assert_eq!(Encoding::of_editable(apply, body), Some(Encoding::Json));
    for yaml in ["metadata:\n  name: op\n", "{'metadata': {'name': 'op'}}", "{metadata: {name: op}}", "{} # x"] {
        assert_eq!(Encoding::of_editable(apply, yaml.as_bytes()), None, "{yaml}");
    }
    assert_eq!(Encoding::of_editable("", body), Some(Encoding::Json));
    assert_eq!(Encoding::of_editable("Application/JSON; charset=utf-8", body), Some(Encoding::Json));
    for other in ["text/plain", "application/cbor", "application/apply-patch+cbor"] {
        assert_eq!(Encoding::of_editable(other, body), None, "{other}");
    }
}

#[test]
fn cbor_passes_only_where_nothing_is_to_be_edited() {
    let refused = Err(LockError::Document(DocumentError::ReadOnly));
    for body in ["lease", "lease-list"] {
        assert_eq!(response(&recorded(body, "cbor"), Encoding::Cbor, &rename()), refused, "{body}");
    }
    let maps = recorded("configmap-list", "cbor");
    assert_eq!(response(&maps, Encoding::Cbor, &rename()), Ok(Cow::Borrowed(&*maps)));
}

#[test]
fn only_what_can_be_edited_is_asked_for() {
    for (accept, editable) in [
        ("application/json", None),
        ("application/vnd.kubernetes.protobuf,application/json;q=0.5, */*", None),
        ("application/cbor", Some("application/json")),
        ("application/cbor, application/json;q=0.9", Some("application/json;q=0.9")),
        ("application/json;as=Table, Application/CBOR-seq;q=0.1", Some("application/json;as=Table")),
        (
            "application/yaml;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/yaml;q=0.5",
            Some("application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json;q=0.5"),
        ),
    ] {
        assert_eq!(crate::rewrite::editable_accept(accept).as_deref(), editable, "{accept}");
    }
}

#[test]
fn no_body_reaches_another_shards_lock() {
    for body in [
        r#"{"metadata":{"name":"op---s2"}}"#,
        r#"{"metadata":{"name":"op---s1"}}"#,
        r#"{"metadata":{"generateName":"op---s"}}"#,
        r#"{"metadata":{"name":"op\u002d--s2"}}"#,
        r#"[{"op":"add","path":"/metadata/name","value":"op---s2"}]"#,
    ] {
        let refused = request(body.as_bytes(), Encoding::Json, &rename());
        assert!(matches!(refused, Err(LockError::ReservedName { .. })), "{body}: {refused:?}");
    }
}

#[test]
fn a_field_that_stands_twice_is_refused() {
    for body in [
        r#"{"metadata":{"name":"a"},"metadata":{"name":"op---s2"}}"#,
        r#"{"metadata":{"name":"a","n\u0061me":"op---s2"}}"#,
    ] {
        let refused = request(body.as_bytes(), Encoding::Json, &rename());
        assert!(matches!(refused, Err(LockError::Document(DocumentError::Repeated { .. }))), "{body}: {refused:?}");
    }
    let lease = recorded("lease", "protobuf");
    let document = Document { body: &lease, encoding: Encoding::Protobuf };
    let metadata = document.field(&document.root().unwrap(), "metadata").unwrap().unwrap();
    let message = [super::super::document::protobuf_field(1, &lease[metadata.at.clone()])].concat().repeat(2);
    let twice = super::super::document::envelope("coordination.k8s.io/v1", "Lease", &message);
    assert!(request(&twice, Encoding::Protobuf, &rename()).is_err());
}

#[test]
fn a_body_that_is_cut_short_or_too_large_is_refused() {
    for (encoding, extension) in EDITABLE {
        let body = recorded("lease", extension);
        for end in 1..body.len() {
            // Where protobuf ends between two fields, what is left is whole.
            let cut = request(&body[..end], encoding, &rename());
            assert!(cut.is_err() || encoding == Encoding::Protobuf, "{encoding:?} {end}");
        }
        assert_eq!(request(&vec![b' '; MAX_BODY_BYTES + 1], encoding, &rename()), Err(LockError::TooLarge));
    }
}

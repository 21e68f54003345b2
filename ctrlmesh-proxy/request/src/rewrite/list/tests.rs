use std::fs;
use std::path::Path;

use super::*;
use crate::rewrite::watch_frames_for_tests;

const ALL: [(Encoding, &str); 3] =
    [(Encoding::Json, "json"), (Encoding::Protobuf, "protobuf"), (Encoding::Cbor, "cbor")];

/// What the real API server answered.
fn recorded(name: &str, extension: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded");
    fs::read(folder.join(format!("{name}.{extension}"))).unwrap()
}

/// Type, API version, kind, name and version of an event.
fn told(frame: &[u8], encoding: Encoding) -> [String; 5] {
    let document = Document { body: frame, encoding };
    let event = document.event().unwrap();
    let object = document.event_object(&event).unwrap().unwrap();
    let metadata = document.field(&object, "metadata").unwrap().unwrap();
    let text = |node: &Node, name| document.text_of(node, name).unwrap().unwrap_or_default().into_owned();
    let (api_version, kind) = if encoding == Encoding::Protobuf {
        let raw = document.field(&document.field(&event, "object").unwrap().unwrap(), "raw").unwrap().unwrap();
        let inner = Document { body: &frame[raw.at], encoding };
        let meta = inner.type_meta().unwrap().unwrap();
        let text = |name| inner.text_of(&meta, name).unwrap().unwrap().into_owned();
        (text("apiVersion"), text("kind"))
    } else {
        (text(&object, "apiVersion"), text(&object, "kind"))
    };
    [text(&event, "type"), api_version, kind, text(&metadata, "name"), text(&metadata, "resourceVersion")]
}

#[test]
fn items_become_the_very_bytes_that_the_server_sends_as_added() {
    for (encoding, extension) in &ALL[..2] {
        let stream = recorded("configmap-watch", extension);
        let mut added = watch_frames_for_tests(&stream, *encoding);
        added.pop();
        let wanted: Vec<u8> = added.iter().flat_map(|frame| framed(frame, *encoding)).collect();
        let listed = events(&recorded("configmap-list", extension), *encoding, Change::Joins).unwrap();
        assert_eq!(listed.frames, wanted, "{encoding:?}");
    }
}

#[test]
fn items_of_every_kind_become_events_that_say_what_they_are() {
    for (encoding, extension) in ALL {
        for (list, watch) in
            [("configmap-list", "configmap-watch"), ("widget-list", "widget-watch"), ("lease-list", "lease-watch")]
        {
            if encoding == Encoding::Protobuf && list == "widget-list" {
                continue;
            }
            let listed = events(&recorded(list, extension), encoding, Change::Leaves).unwrap();
            let listed: Vec<_> =
                watch_frames_for_tests(&listed.frames, encoding).iter().map(|frame| told(frame, encoding)).collect();
            let sent = watch_frames_for_tests(&recorded(watch, extension), encoding);
            let sent = sent.iter().map(|frame| told(frame, encoding)).filter(|[kind, ..]| kind == "ADDED");
            let mut sent: Vec<_> = sent.map(|[_, rest @ ..]| rest).collect();
            sent.sort();
            assert!(listed.iter().all(|[kind, ..]| kind == "DELETED"), "{list} {encoding:?}");
            let listed: Vec<_> = listed.into_iter().map(|[_, rest @ ..]| rest).collect();
            assert_eq!(listed, sent, "{list} {encoding:?}");
        }
    }
}

#[test]
fn a_list_says_its_version_its_kind_and_its_next_page() {
    for (encoding, extension) in ALL {
        let whole = events(&recorded("configmap-list", extension), encoding, Change::Joins).unwrap();
        assert_eq!((whole.next, whole.version > 200), (None, true));
        assert_eq!(whole.kind, Some(Kind { api_version: "v1".into(), kind: "ConfigMap".into() }));
        let page = events(&recorded("configmap-page", extension), encoding, Change::Joins).unwrap();
        assert!(page.next.is_some(), "{encoding:?}");
        assert_eq!(watch_frames_for_tests(&page.frames, encoding).len(), 2);
    }
}

#[test]
fn a_pretty_list_becomes_frames_of_one_line() {
    let listed = events(&recorded("metadata-list", "json"), Encoding::Json, Change::Joins).unwrap();
    let frames = watch_frames_for_tests(&listed.frames, Encoding::Json);
    assert_eq!(frames.len(), 4);
    assert_eq!(told(&frames[0], Encoding::Json)[2], "PartialObjectMetadata");
}

#[test]
fn what_is_no_list_of_objects_becomes_nothing() {
    assert_eq!(events(&recorded("lease-table", "json"), Encoding::Json, Change::Joins), Err(ListError::NoKind));
    for (encoding, extension) in ALL {
        assert!(events(&recorded("lease-missing", extension), encoding, Change::Joins).is_err(), "{encoding:?}");
    }
    assert!(events(b"[]", Encoding::Json, Change::Joins).is_err());
}

#[test]
fn a_bookmark_holds_its_version_and_kind() {
    let kind = Kind { api_version: "apps/v1".into(), kind: "Deployment".into() };
    for (encoding, _) in ALL {
        let frames = watch_frames_for_tests(&bookmark(encoding, &kind, 42), encoding);
        assert_eq!(told(&frames[0], encoding), ["BOOKMARK", "apps/v1", "Deployment", "", "42"]);
    }
}

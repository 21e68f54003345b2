mod splices;

use std::fs;
use std::path::Path;

use super::*;
use crate::rewrite::watch_frames_for_tests;

const ALL: [(Encoding, &str); 3] =
    [(Encoding::Json, "json"), (Encoding::Protobuf, "protobuf"), (Encoding::Cbor, "cbor")];

const WATCH: &str = "/api/v1/namespaces/ops/configmaps?watch=1&allowWatchBookmarks=true&resourceVersion=100";
const WATCH_LIST: &str = "/api/v1/configmaps?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan";

/// What the real API server answered.
fn recorded(name: &str, extension: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded");
    fs::read(folder.join(format!("{name}.{extension}"))).unwrap()
}

fn request(target: &str) -> RequestInfo<'_> {
    RequestInfo::parse("GET", target).unwrap()
}

fn json_event(kind: &str, version: &str) -> Vec<u8> {
    format!("{{\"type\":\"{kind}\",\"object\":{{\"metadata\":{{\"resourceVersion\":\"{version}\"}}}}}}\n").into_bytes()
}

#[test]
fn the_bookmark_that_ends_the_initial_events_says_where_we_are() {
    for (encoding, extension) in ALL {
        let stream = recorded("configmap-watch", extension);
        let mut frames = Frames::new(encoding, &request(WATCH_LIST));
        let whole = watch_frames_for_tests(&stream, encoding);
        let bookmark = framed(whole.last().unwrap(), encoding).len();
        assert_eq!(frames.feed(&stream[..stream.len() - bookmark]).unwrap(), Some(stream.len() - bookmark));
        assert_eq!(frames.at(), None, "{encoding:?}");
        frames.feed(&stream[stream.len() - bookmark..]).unwrap();
        assert!(frames.at().is_some_and(|at| at > 200), "{encoding:?}");
        assert!(frames.at_boundary());
    }
}

#[test]
fn a_stream_may_be_cut_anywhere() {
    for (encoding, extension) in ALL {
        let stream = recorded("configmap-watch", extension);
        let mut whole = Frames::new(encoding, &request(WATCH));
        whole.feed(&stream).unwrap();
        let ends: Vec<usize> = watch_frames_for_tests(&stream, encoding)
            .iter()
            .scan(0, |end, frame| {
                *end += framed(frame, encoding).len();
                Some(*end)
            })
            .collect();
        for size in [1, 2, 3, 7, 100, 331, 1000] {
            let mut frames = Frames::new(encoding, &request(WATCH));
            let mut seen = Vec::new();
            for (number, chunk) in stream.chunks(size).enumerate() {
                let end = frames.feed(chunk).unwrap().map(|end| number * size + end);
                seen.extend(end);
                let fed = number * size + chunk.len();
                assert_eq!(frames.at_boundary(), ends.contains(&fed), "{encoding:?} {size} {fed}");
            }
            assert!(seen.iter().all(|end| ends.contains(end)), "{encoding:?} {size}");
            assert_eq!(seen.last(), ends.last(), "{encoding:?} {size}");
            assert_eq!(frames.at(), whole.at(), "{encoding:?} {size}");
        }
    }
}

#[test]
fn each_change_of_an_object_is_shown_once_wherever_the_stream_is_cut() {
    for (encoding, extension) in ALL {
        let stream = recorded("configmap-watch", extension);
        for target in [WATCH, WATCH_LIST] {
            let all = changes(&stream, encoding, target, stream.len());
            for size in [1, 7, 331, 1000] {
                assert_eq!(changes(&stream, encoding, target, size), all, "{encoding:?} {size}");
            }
            if target == WATCH_LIST {
                assert_eq!(all, [], "all of it was there before");
            } else {
                assert!(all.len() > 1, "{encoding:?}");
                assert!(all.iter().all(|change| !change.name.is_empty()), "{encoding:?}: {all:?}");
            }
        }
    }
}

/// The changes that a stream shows which comes in chunks of this size.
fn changes(stream: &[u8], encoding: Encoding, target: &str, size: usize) -> Vec<ObjectChange> {
    let (mut frames, mut all) = (Frames::new(encoding, &request(target)), Vec::new());
    for chunk in stream.chunks(size) {
        frames.feed_each(chunk, |frame| all.extend(object_change(frame, encoding))).unwrap();
    }
    all
}

#[test]
fn changes_are_shown_from_what_ends_the_initial_events_on() {
    let event = |kind: &str, name: &str, more: &str| {
        format!(r#"{{"type":"{kind}","object":{{"metadata":{{"name":"{name}","resourceVersion":"9"{more}}}}}}}"#) + "\n"
    };
    let end = event("BOOKMARK", "", r#","annotations":{"k8s.io/initial-events-end":"true"}"#);
    let [first, second] = [event("ADDED", "a", ""), event("ADDED", "b", "")];
    let names = |stream: &str, target| {
        changes(stream.as_bytes(), Encoding::Json, target, 40).into_iter().map(|change| change.name).collect::<Vec<_>>()
    };
    assert_eq!(names(&format!("{first}{end}{second}"), WATCH_LIST), ["b"]);
    let changed = event("MODIFIED", "c", "");
    assert_eq!(names(&format!("{first}{changed}{second}"), "/api/v1/configmaps?watch=1"), ["c", "b"]);
    assert_eq!(names(&format!("{first}{second}"), WATCH), ["a", "b"]);
}

#[test]
fn a_change_names_its_object_and_bookmarks_and_errors_are_none() {
    let named = |kind: &str, metadata: &str| {
        let frame = format!(r#"{{"type":"{kind}","object":{{"kind":"Pod","metadata":{{{metadata}}}}}}}"#);
        object_change(frame.as_bytes(), Encoding::Json).map(|change| (change.namespace, change.name, change.is_deleted))
    };
    let texts = |namespace: &str, name: &str, is_deleted| Some((namespace.to_owned(), name.to_owned(), is_deleted));
    let pod = r#""labels":{"name":"l"},"managedFields":[{"name":"m"}],"name":"a","namespace":"n""#;
    assert_eq!(named("ADDED", pod), texts("n", "a", false));
    assert_eq!(named("MODIFIED", r#""name":"node""#), texts("", "node", false));
    assert_eq!(named("DELETED", pod), texts("n", "a", true));
    for (kind, metadata) in [("BOOKMARK", r#""resourceVersion":"9""#), ("BOOKMARK", pod), ("ERROR", ""), ("ADDED", "")]
    {
        assert_eq!(named(kind, metadata), None, "{kind} {metadata}");
    }
}

/// An event of more than `bytes` bytes, with what looks like its end and its version inside.
fn large_event(version: u64, bytes: usize) -> Vec<u8> {
    let filling = r#"}\"\\,"resourceVersion":"9""#.repeat(bytes / 26 + 1);
    let event = serde_json::json!({"type": "MODIFIED", "object": {
        "kind": "Pod",
        "metadata": {"annotations": {"last": filling}, "name": "a", "resourceVersion": version.to_string()},
        "spec": {"text": filling, "resourceVersion": "7"},
    }});
    framed(event.to_string().as_bytes(), Encoding::Json)
}

#[test]
fn large_events_are_followed_however_they_are_cut() {
    for bytes in [10, MAX_UNREAD_BYTES, 10 << 10, 100 << 10] {
        let stream = [101, 105, 107].map(|version| large_event(version, bytes));
        let ends: Vec<usize> = stream
            .iter()
            .scan(0, |end, event| {
                *end += event.len();
                Some(*end)
            })
            .collect();
        let stream = stream.concat();
        for size in [stream.len(), 16 << 10, 4096, 1000, ends[0] + 1, ends[0], ends[0] - 1, ends[1] + 9] {
            let mut frames = Frames::new(Encoding::Json, &request(WATCH));
            let mut fed = 0;
            for chunk in stream.chunks(size) {
                let end = frames.feed(chunk).unwrap().map(|end| fed + end);
                let before = fed;
                fed += chunk.len();
                let expected = ends.iter().rev().copied().find(|end| *end <= fed && *end > before);
                assert_eq!(end, expected, "{bytes} {size} {fed}");
                let seen = ends.iter().filter(|end| **end <= fed).count();
                assert_eq!(frames.at(), Some([100, 101, 105, 107][seen]), "{bytes} {size} {fed}");
                assert_eq!(frames.at_boundary(), ends.contains(&fed), "{bytes} {size} {fed}");
            }
            // What was held of them is not held any more.
            assert!(frames.partial.capacity() <= MAX_UNREAD_BYTES.max(bytes), "{bytes} {size}");
        }
    }
}

#[test]
fn a_watch_is_where_its_last_event_is() {
    let mut frames = Frames::new(Encoding::Json, &request(WATCH));
    assert_eq!(frames.at(), Some(100));
    frames.feed(&[json_event("ADDED", "101"), json_event("DELETED", "105")].concat()).unwrap();
    assert_eq!(frames.at(), Some(105));
    frames.feed(&json_event("BOOKMARK", "110")).unwrap();
    frames.feed(b"\n").unwrap();
    frames.feed(b"{\"type\":\"MODI").unwrap();
    assert_eq!((frames.at(), frames.at_boundary()), (Some(110), false));
}

#[test]
fn initial_events_give_no_version() {
    for query in ["watch=1", "watch=1&resourceVersion=0", "watch=1&resourceVersion=5&sendInitialEvents=true"] {
        let target = format!("/api/v1/pods?{query}");
        let mut frames = Frames::new(Encoding::Json, &request(&target));
        frames.feed(&json_event("ADDED", "7")).unwrap();
        assert_eq!(frames.at(), None, "{query}");
    }
    let mut frames = Frames::new(Encoding::Json, &request("/api/v1/pods?watch=1"));
    frames.feed(&[json_event("ADDED", "7"), json_event("MODIFIED", "9"), json_event("ADDED", "12")].concat()).unwrap();
    assert_eq!(frames.at(), Some(12));
    // A client that asked for the bookmark waits for it: an event before it ends nothing.
    let mut frames = Frames::new(Encoding::Json, &request(WATCH_LIST));
    frames.feed(&json_event("MODIFIED", "9")).unwrap();
    assert_eq!(frames.at(), None);
}

#[test]
fn an_error_or_a_version_that_is_no_number_leaves_nothing_known() {
    for event in [
        b"{\"type\":\"ERROR\",\"object\":{\"kind\":\"Status\",\"metadata\":{},\"code\":410}}\n".to_vec(),
        json_event("ADDED", "x"),
        b"not json\n".to_vec(),
    ] {
        let mut frames = Frames::new(Encoding::Json, &request(WATCH));
        frames.feed(&event).unwrap();
        assert_eq!(frames.at(), None);
    }
}

#[test]
fn a_frame_that_never_ends_is_given_up() {
    let mut frames = Frames::new(Encoding::Protobuf, &request(WATCH));
    assert_eq!(frames.feed(&[0, 0, 0, 9]), Ok(None));
    let mut stream = u32::MAX.to_be_bytes().to_vec();
    stream.resize(MAX_FRAME_BYTES + 1, 0);
    let mut frames = Frames::new(Encoding::Protobuf, &request(WATCH));
    assert_eq!(frames.feed(&stream), Err(FrameError::TooLarge));
}

#[test]
fn an_expired_frame_is_an_error_event_with_a_status() {
    for (encoding, _) in ALL {
        let frame = expired(encoding, "gone");
        let bytes = watch_frames_for_tests(&frame, encoding).remove(0);
        let document = Document { body: &bytes, encoding };
        let event = document.event().unwrap();
        assert_eq!(document.text_of(&event, "type").unwrap().unwrap(), "ERROR", "{encoding:?}");
        let status = document.event_object(&event).unwrap().unwrap();
        assert_eq!(document.text_of(&status, "message").unwrap().unwrap(), "ctrlmesh: gone", "{encoding:?}");
    }
    let json: serde_json::Value = serde_json::from_slice(&expired(Encoding::Json, "gone")).unwrap();
    assert_eq!((&json["object"]["code"], &json["object"]["reason"]), (&410.into(), &"Expired".into()));
}

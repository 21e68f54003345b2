use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use ctrlmesh_common::policy::Lock;
use ctrlmesh_common::selector::Selector;
use proptest::prelude::*;

use super::*;
use crate::decide::{LockPlan, Plan, Rename};
use crate::rewrite::{list, watch_frames_for_tests};

const ALL: [(Encoding, &str); 3] =
    [(Encoding::Json, "json"), (Encoding::Protobuf, "protobuf"), (Encoding::Cbor, "cbor")];

const WATCH: &str =
    "/api/v1/namespaces/ops/configmaps?watch=1&allowWatchBookmarks=true&resourceVersion=100";
const WATCH_LIST: &str =
    "/api/v1/configmaps?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan";

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
        assert_eq!(
            frames.feed(&stream[..stream.len() - bookmark]).unwrap(),
            Some(stream.len() - bookmark)
        );
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
    for bytes in [10, MAX_KEPT_BYTES, 10 << 10, 100 << 10] {
        let stream = [101, 105, 107].map(|version| large_event(version, bytes));
        let ends: Vec<usize> = stream
            .iter()
            .scan(0, |end, event| {
                *end += event.len();
                Some(*end)
            })
            .collect();
        let stream = stream.concat();
        for size in
            [stream.len(), 16 << 10, 4096, 1000, ends[0] + 1, ends[0], ends[0] - 1, ends[1] + 9]
        {
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
            assert!(frames.partial.capacity() <= MAX_KEPT_BYTES.max(bytes), "{bytes} {size}");
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
fn where_a_watch_is_cannot_be_known_from_objects_that_were_there_before() {
    for query in
        ["watch=1", "watch=1&resourceVersion=0", "watch=1&resourceVersion=5&sendInitialEvents=true"]
    {
        let target = format!("/api/v1/pods?{query}");
        let mut frames = Frames::new(Encoding::Json, &request(&target));
        frames.feed(&json_event("ADDED", "7")).unwrap();
        assert_eq!(frames.at(), None, "{query}");
    }
    let mut frames = Frames::new(Encoding::Json, &request("/api/v1/pods?watch=1"));
    frames
        .feed(
            &[json_event("ADDED", "7"), json_event("MODIFIED", "9"), json_event("ADDED", "12")]
                .concat(),
        )
        .unwrap();
    assert_eq!(frames.at(), Some(12));
    // A client that asked for the bookmark waits for it: an event before it ends nothing.
    let mut frames = Frames::new(Encoding::Json, &request(WATCH_LIST));
    frames.feed(&json_event("MODIFIED", "9")).unwrap();
    assert_eq!(frames.at(), None);
}

#[test]
fn an_error_or_a_version_that_is_no_number_leaves_nothing_known() {
    for event in [
        b"{\"type\":\"ERROR\",\"object\":{\"kind\":\"Status\",\"metadata\":{},\"code\":410}}\n"
            .to_vec(),
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
        assert_eq!(
            document.text_of(&status, "message").unwrap().unwrap(),
            "ctrlmesh: gone",
            "{encoding:?}"
        );
    }
    let json: serde_json::Value = serde_json::from_slice(&expired(Encoding::Json, "gone")).unwrap();
    assert_eq!(
        (&json["object"]["code"], &json["object"]["reason"]),
        (&410.into(), &"Expired".into())
    );
}

fn selector(text: &str) -> Selector {
    Selector::parse(text).unwrap()
}

fn plan(selector_text: &str) -> Plan {
    Plan { selector: Some(selector(selector_text)), ..Plan::default() }
}

fn spliced(target: &str, old: &str, new: &str) -> Splice {
    Splice::new(&request(target), &plan(new), Encoding::Json, 226, Some(&selector(old))).unwrap()
}

#[test]
fn a_splice_asks_for_what_joins_then_for_what_leaves_then_for_the_watch() {
    let target = "/api/v1/configmaps?labelSelector=team%3Da&watch=1&fieldSelector=x%3Dy&timeoutSeconds=300&allowWatchBookmarks=true&resourceVersion=9";
    let mut splice = spliced(target, "slot in (1,2)", "slot in (2,3)");
    let empty = br#"{"kind":"ConfigMapList","apiVersion":"v1","metadata":{"resourceVersion":"226"},"items":[]}"#;
    let listing = |slot: u8| {
        Ask::List(format!(
            "/api/v1/configmaps?labelSelector=slot%20in%20%28{slot}%29%2Cteam%3Da&fieldSelector=x%3Dy&limit=100&resourceVersion=226&resourceVersionMatch=Exact"
        ))
    };
    assert_eq!(splice.ask(), listing(3));
    assert_eq!(splice.answer(200, "application/json", empty), Ok(Vec::new()));
    assert_eq!(splice.ask(), listing(1));
    let last = splice.answer(200, "application/json", empty).unwrap();
    assert_eq!(
        String::from_utf8(last).unwrap(),
        "{\"type\":\"BOOKMARK\",\"object\":{\"apiVersion\":\"v1\",\"kind\":\"ConfigMap\",\"metadata\":{\"resourceVersion\":\"226\"}}}\n"
    );
    let watch = "/api/v1/configmaps?labelSelector=slot%20in%20%282%2C3%29%2Cteam%3Da&watch=1&fieldSelector=x%3Dy&timeoutSeconds=300&allowWatchBookmarks=true&resourceVersion=226";
    assert_eq!(splice.ask(), Ask::Watch(watch.to_owned()));
}

#[test]
fn a_list_shows_objects_as_the_watch_does() {
    let accept = |accept| list_accept(Encoding::Json, accept);
    for whole in ["", "application/json", "application/json;q=0.9, */*;has=Table"] {
        assert_eq!(accept(whole).unwrap(), "application/json", "{whole}");
    }
    let metadata = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json";
    let list = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
    assert_eq!(accept(metadata).unwrap(), list);
    for other in [
        "application/json;as=Table;v=v1;g=meta.k8s.io,application/json",
        "application/json; as=PartialObjectMetadata;g=meta.k8s.io;v=v1",
        "application/json,application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1",
        "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1beta1",
        "application/json;q=0.1;as=PartialObjectMetadata;g=meta.k8s.io;v=v1",
        "application/json;as=PartialObjectMetadata",
        "application/json;as",
        "application/json;AS=PartialObjectMetadata",
        "application/json;as=\"PartialObjectMetadata\"",
        "application/json;as= Table",
        "application/json;as=PartialObjectMetadata,application/json;as=Table",
    ] {
        assert_eq!(accept(other), None, "{other}");
    }
}

#[test]
fn a_list_in_pages_is_asked_for_to_its_end() {
    let page = recorded("configmap-page", "json");
    let version = list::events(&page, Encoding::Json, list::Change::Joins).unwrap().version;
    let old = selector("slot=9");
    let mut splice =
        Splice::new(&request(WATCH), &plan("slot"), Encoding::Json, version, Some(&old)).unwrap();
    let frames = splice.answer(200, "application/json", &page).unwrap();
    assert_eq!(watch_frames_for_tests(&frames, Encoding::Json).len(), 2);
    let Ask::List(next) = splice.ask() else { panic!("{splice:?}") };
    // They are small, so the next ones are more.
    assert!(next.contains("&limit=500&continue=ey") && !next.contains("resourceVersion"), "{next}");
}

#[test]
fn a_page_holds_as_many_objects_as_make_it_no_larger_than_it_need_be() {
    for (object, limit) in [(100, 500), (3 << 10, 339), (10 << 10, 102), (1 << 20, 100)] {
        let mut splice = spliced(WATCH, "slot=1", "slot=2");
        let item = format!(r#"{{"metadata":{{"name":"{}"}}}}"#, "x".repeat(object - 24));
        let page = format!(
            r#"{{"kind":"ConfigMapList","apiVersion":"v1","metadata":{{"resourceVersion":"226","continue":"t"}},"items":[{item},{item}]}}"#
        );
        splice.answer(200, "application/json", page.as_bytes()).unwrap();
        let Ask::List(next) = splice.ask() else { panic!("{splice:?}") };
        let asked: usize =
            next.split_once("&limit=").unwrap().1.split_once('&').unwrap().0.parse().unwrap();
        assert!(asked.abs_diff(limit) <= limit / 10, "{object}: {asked}");
    }
}

#[test]
fn a_splice_that_cannot_be_right_expires() {
    let empty = br#"{"kind":"ConfigMapList","apiVersion":"v1","metadata":{"resourceVersion":"227"},"items":[]}"#;
    let answer = |status, content_type, body: &[u8]| {
        spliced(WATCH, "a=1", "a=2").answer(status, content_type, body)
    };
    assert_eq!(
        answer(410, "application/json", b""),
        Err(Expired::Refused { status: 410, at: 226 })
    );
    assert_eq!(answer(200, "application/json", empty), Err(Expired::Unreadable));
    assert_eq!(answer(200, "text/html", b"<html>"), Err(Expired::Unreadable));
    assert_eq!(
        answer(200, "application/json", &recorded("lease-table", "json")),
        Err(Expired::Unreadable)
    );
    let named = request("/api/v1/watch/namespaces/ops/configmaps/a");
    assert!(matches!(
        Splice::new(&named, &plan("a"), Encoding::Json, 1, None),
        Err(Expired::Named)
    ));
    let bound = selector("a>5");
    let incomparable = Splice::new(&request(WATCH), &plan("b"), Encoding::Json, 1, Some(&bound));
    assert!(matches!(incomparable, Err(Expired::Incomparable)));
}

#[test]
fn a_watch_by_prefix_is_listed_without_it() {
    let splice = spliced("/apis/apps/v1/watch/namespaces/ops/deployments", "a=1", "a=2");
    let Ask::List(list) = splice.ask() else { panic!("{splice:?}") };
    assert!(
        list.starts_with("/apis/apps/v1/namespaces/ops/deployments?labelSelector=a%20in%20%282%29"),
        "{list}"
    );
    let splice = spliced("/api/v1/watch/pods", "a=1", "a=1");
    assert_eq!(
        splice.ask(),
        Ask::Watch("/api/v1/watch/pods?labelSelector=a%3D1&resourceVersion=226".to_owned())
    );
}

#[test]
fn the_lock_stays_renamed_in_a_splice() {
    let lock = Lock { namespace: "ops".into(), name: "op".into(), shard: "s1".into() };
    let rename = Rename { on_server: lock.per_shard(), lock };
    let lock = LockPlan { rename, in_path: false, in_fields: true, in_body: false };
    let plan = Plan { lock: Some(lock), ..Plan::default() };
    let target =
        "/apis/coordination.k8s.io/v1/namespaces/ops/leases?watch&fieldSelector=metadata.name%3Dop";
    let splice = Splice::new(&request(target), &plan, Encoding::Json, 5, None).unwrap();
    let Ask::Watch(watch) = splice.ask() else { panic!("{splice:?}") };
    assert!(watch.contains("metadata.name%3Dop---s1&resourceVersion=5"), "{watch}");
}

#[test]
fn the_difference_of_two_sets_is_two_sets() {
    let found = difference(&selector("k in (1,2,3),x"), &selector("k in (2,3,4),x")).unwrap();
    assert_eq!(found.joins, [selector("k in (4),x")]);
    assert_eq!(found.leaves, [selector("k in (1),x")]);
    let grown = difference(&selector("k in (1)"), &selector("k in (1,2)")).unwrap();
    assert_eq!((grown.joins, grown.leaves), (vec![selector("k in (2)")], vec![]));
    let same = difference(&selector("a,k in (1)"), &selector("k in (1),a")).unwrap();
    assert_eq!((same.joins, same.leaves), (vec![], vec![]));
    let limited = difference(&Selector::everything(), &selector("k=1")).unwrap();
    assert_eq!((limited.joins, limited.leaves), (vec![], vec![selector("k!=1")]));
}

fn requirement() -> impl Strategy<Value = String> {
    let key = prop::sample::select(vec!["a", "b"]);
    let shape = prop::sample::select(vec![
        "=1",
        "!=1",
        " in (1,2)",
        " notin (2,)",
        "",
        " in (2,3)",
        "=",
        ">1",
    ]);
    (key, shape, any::<bool>())
        .prop_map(|(key, shape, not)| if not { format!("!{key}") } else { format!("{key}{shape}") })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_object_joins_or_leaves_exactly_once_or_not_at_all(
        old in prop::collection::vec(requirement(), 0..4),
        new in prop::collection::vec(requirement(), 0..4),
    ) {
        let (old, new) = (selector(&old.join(",")), selector(&new.join(",")));
        let Some(found) = difference(&old, &new) else { return Ok(()) };
        let values = [None, Some(""), Some("1"), Some("2"), Some("3"), Some("4")];
        for a in values {
            for b in values {
                let labels: BTreeMap<String, String> = [("a", a), ("b", b)]
                    .into_iter()
                    .filter_map(|(key, value)| Some((key.to_owned(), value?.to_owned())))
                    .collect();
                let count = |selectors: &[Selector]| selectors.iter().filter(|one| one.matches(&labels)).count();
                let (was, is) = (old.matches(&labels), new.matches(&labels));
                prop_assert_eq!(count(&found.joins), usize::from(is && !was), "{} {} {:?}", old, new, labels);
                prop_assert_eq!(count(&found.leaves), usize::from(was && !is), "{} {} {:?}", old, new, labels);
            }
        }
    }
}

#[test]
fn the_newest_version_is_asked_of_the_collection_and_not_of_an_object_in_it() {
    let selector = Selector::parse("a=1").unwrap();
    for (target, asked) in [
        (WATCH, "/api/v1/namespaces/ops/configmaps?labelSelector=a%3D1&limit=1"),
        (
            "/api/v1/watch/namespaces/x/pods/p?resourceVersion=5&fieldSelector=spec.nodeName%3Dn",
            "/api/v1/namespaces/x/pods?labelSelector=a%3D1&fieldSelector=metadata.name%3Dp&limit=1",
        ),
        (
            "/apis/rbac.authorization.k8s.io/v1/watch/clusterroles/system:%61,b/",
            "/apis/rbac.authorization.k8s.io/v1/clusterroles?labelSelector=a%3D1&fieldSelector=metadata.name%3Dsystem%3Aa%5C%2Cb&limit=1",
        ),
        (
            "/api/v1/watch/namespaces/x",
            "/api/v1/namespaces?labelSelector=a%3D1&fieldSelector=metadata.name%3Dx&limit=1",
        ),
    ] {
        assert_eq!(newest(&request(target), Some(&selector)).as_deref(), Some(asked));
    }
}

#[test]
fn only_a_list_says_the_version_of_a_list() {
    let version = |kind: &str| {
        let body = serde_json::json!({"kind": kind, "apiVersion": "v1", "metadata": {"resourceVersion": "9"}});
        list_version(body.to_string().as_bytes(), Encoding::Json)
    };
    assert_eq!(version("PodList"), Some(9));
    assert_eq!(version("PartialObjectMetadataList"), Some(9));
    assert_eq!(version("Pod"), None);
    assert_eq!(version("Status"), None);
}

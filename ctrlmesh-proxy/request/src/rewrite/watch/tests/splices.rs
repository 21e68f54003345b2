//! Splices of watches, and the requests that they make.

use std::collections::BTreeMap;

use ctrlmesh_common::policy::Lock;
use ctrlmesh_common::selector::Selector;
use proptest::prelude::*;

use super::*;
use crate::decide::{InFields, LockPlan, Plan, Rename};
use crate::rewrite::list;

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
fn a_splice_reads_joins_then_leaves_then_the_watch() {
    let target = "/api/v1/configmaps?labelSelector=team%3Da&watch=1&fieldSelector=x%3Dy&timeoutSeconds=300&allowWatchBookmarks=true&resourceVersion=9";
    let mut splice = spliced(target, "slot in (1,2)", "slot in (2,3)");
    let empty = br#"{"kind":"ConfigMapList","apiVersion":"v1","metadata":{"resourceVersion":"226"},"items":[]}"#;
    let listing = |slot: u8| {
        NextRead::List(format!(
            "/api/v1/configmaps?labelSelector=slot%20in%20%28{slot}%29%2Cteam%3Da&fieldSelector=x%3Dy&limit=100&resourceVersion=226&resourceVersionMatch=Exact"
        ))
    };
    assert_eq!(splice.next_read(), listing(3));
    assert_eq!(splice.answer(200, "application/json", empty), Ok(Vec::new()));
    assert_eq!(splice.next_read(), listing(1));
    let last = splice.answer(200, "application/json", empty).unwrap();
    assert_eq!(
        String::from_utf8(last).unwrap(),
        "{\"type\":\"BOOKMARK\",\"object\":{\"apiVersion\":\"v1\",\"kind\":\"ConfigMap\",\"metadata\":{\"resourceVersion\":\"226\"}}}\n"
    );
    let watch = "/api/v1/configmaps?labelSelector=slot%20in%20%282%2C3%29%2Cteam%3Da&watch=1&fieldSelector=x%3Dy&timeoutSeconds=300&allowWatchBookmarks=true&resourceVersion=226";
    assert_eq!(splice.next_read(), NextRead::Watch(watch.to_owned()));
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
    let mut splice = Splice::new(&request(WATCH), &plan("slot"), Encoding::Json, version, Some(&old)).unwrap();
    let frames = splice.answer(200, "application/json", &page).unwrap();
    assert_eq!(watch_frames_for_tests(&frames, Encoding::Json).len(), 2);
    let NextRead::List(next) = splice.next_read() else { panic!("{splice:?}") };
    // They are small, so the next ones are more.
    assert!(next.contains("&limit=500&continue=ey") && !next.contains("resourceVersion"), "{next}");
}

#[test]
fn a_page_has_as_many_objects_as_fit() {
    for (object, limit) in [(100, 500), (3 << 10, 339), (10 << 10, 102), (1 << 20, 100)] {
        let mut splice = spliced(WATCH, "slot=1", "slot=2");
        let item = format!(r#"{{"metadata":{{"name":"{}"}}}}"#, "x".repeat(object - 24));
        let page = format!(
            r#"{{"kind":"ConfigMapList","apiVersion":"v1","metadata":{{"resourceVersion":"226","continue":"t"}},"items":[{item},{item}]}}"#
        );
        splice.answer(200, "application/json", page.as_bytes()).unwrap();
        let NextRead::List(next) = splice.next_read() else { panic!("{splice:?}") };
        let asked: usize = next.split_once("&limit=").unwrap().1.split_once('&').unwrap().0.parse().unwrap();
        assert!(asked.abs_diff(limit) <= limit / 10, "{object}: {asked}");
    }
}

#[test]
fn a_splice_that_cannot_be_right_expires() {
    let empty = br#"{"kind":"ConfigMapList","apiVersion":"v1","metadata":{"resourceVersion":"227"},"items":[]}"#;
    let answer = |status, content_type, body: &[u8]| spliced(WATCH, "a=1", "a=2").answer(status, content_type, body);
    assert_eq!(answer(410, "application/json", b""), Err(Expired::Refused { status: 410, at: 226 }));
    assert_eq!(answer(200, "application/json", empty), Err(Expired::Unreadable));
    assert_eq!(answer(200, "text/html", b"<html>"), Err(Expired::Unreadable));
    assert_eq!(answer(200, "application/json", &recorded("lease-table", "json")), Err(Expired::Unreadable));
    let named = request("/api/v1/watch/namespaces/ops/configmaps/a");
    assert!(matches!(Splice::new(&named, &plan("a"), Encoding::Json, 1, None), Err(Expired::Named)));
    let bound = selector("a>5");
    let incomparable = Splice::new(&request(WATCH), &plan("b"), Encoding::Json, 1, Some(&bound));
    assert!(matches!(incomparable, Err(Expired::Incomparable)));
}

#[test]
fn a_watch_by_prefix_is_listed_without_it() {
    let splice = spliced("/apis/apps/v1/watch/namespaces/ops/deployments", "a=1", "a=2");
    let NextRead::List(list) = splice.next_read() else { panic!("{splice:?}") };
    assert!(list.starts_with("/apis/apps/v1/namespaces/ops/deployments?labelSelector=a%20in%20%282%29"), "{list}");
    let splice = spliced("/api/v1/watch/pods", "a=1", "a=1");
    assert_eq!(
        splice.next_read(),
        NextRead::Watch("/api/v1/watch/pods?labelSelector=a%3D1&resourceVersion=226".to_owned())
    );
}

#[test]
fn the_lock_stays_renamed_in_a_splice() {
    let lock = Lock { namespace: "ops".into(), name: "op".into(), shard: "s1".into() };
    let rename = Rename { on_server: lock.per_shard(), lock };
    let lock = LockPlan { rename, in_path: false, in_fields: Some(InFields::Alone), in_body: false, unless_lock: None };
    let plan = Plan { lock: Some(lock), ..Plan::default() };
    let target = "/apis/coordination.k8s.io/v1/namespaces/ops/leases?watch&fieldSelector=metadata.name%3Dop";
    let splice = Splice::new(&request(target), &plan, Encoding::Json, 5, None).unwrap();
    let NextRead::Watch(watch) = splice.next_read() else { panic!("{splice:?}") };
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
    let shape = prop::sample::select(vec!["=1", "!=1", " in (1,2)", " notin (2,)", "", " in (2,3)", "=", ">1"]);
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
fn the_newest_version_is_asked_of_the_collection() {
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

#[test]
fn a_watch_of_a_member_goes_on_there() {
    let templates = ["/clusters/{cluster}".parse().unwrap()];
    for (target, list) in [
        ("/clusters/m-1/api/v1/pods?watch=1&resourceVersion=9", "/clusters/m-1/api/v1/pods?"),
        ("/clusters/m-1/api/v1/watch/pods?resourceVersion=9", "/clusters/m-1/api/v1/pods?"),
    ] {
        let request = request(target).behind(&templates).unwrap();
        assert!(newest(&request, None).unwrap().starts_with(list), "{target}");
        let plan = Plan { selector: Some(Selector::nothing()), ..Plan::default() };
        let mut splice = Splice::new(&request, &plan, Encoding::Json, 226, None).unwrap();
        let empty = br#"{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"226"},"items":[]}"#;
        let mut lists = 0;
        let watched = loop {
            match splice.next_read() {
                NextRead::Watch(watched) => break watched,
                NextRead::List(listed) => {
                    assert!(listed.starts_with(list) && listed.contains("resourceVersion=226"), "{listed}");
                    splice.answer(200, "application/json", empty).unwrap();
                    lists += 1;
                }
            }
        };
        assert!(lists > 0, "all of it leaves");
        let path = target.split('?').next().unwrap();
        assert!(watched.starts_with(path) && watched.contains("labelSelector="), "{watched}");
    }
    let one = request("/clusters/m-1/api/v1/watch/namespaces/a/pods/p").behind(&templates).unwrap();
    let newest = newest(&one, None).unwrap();
    assert_eq!(newest, "/clusters/m-1/api/v1/namespaces/a/pods?fieldSelector=metadata.name%3Dp&limit=1");
}

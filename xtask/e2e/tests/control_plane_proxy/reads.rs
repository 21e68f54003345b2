//! Reads through the proxy are the API server's own bytes, restricted to the share.

use std::fs;

use http::{StatusCode, Version};
use serde_json::{Value, json};

use crate::bed::{Bed, WIDGETS, names, write_policy};
use crate::harness::proxy::Proxy;
use crate::harness::soon;

const BOTH: [Version; 2] = [Version::HTTP_11, Version::HTTP_2];

const ACCEPTS: [&str; 6] = [
    "application/json",
    "application/vnd.kubernetes.protobuf,application/json",
    "application/json;as=Table;v=v1;g=meta.k8s.io,application/json",
    "application/vnd.kubernetes.protobuf;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1;g=meta.k8s.io",
    "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io,application/json",
    "application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io,application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io",
];

const WATCH_LIST: &str = "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";

/// Config maps and widgets, half of them the pod's; where they are, and the newest version.
async fn filled(bed: &Bed) -> ([String; 2], String) {
    let widgets = bed.widgets().await;
    for number in 0..8 {
        let name = name(number);
        bed.create(&name, number % 2).await;
        let labels = json!({"slot": (number % 2).to_string()});
        let widget = json!({"apiVersion": "proxy.test/v1", "kind": "Widget", "metadata": {"name": name, "labels": labels}, "spec": {"slot": number}});
        bed.admin("POST", &widgets, &widget).await.unwrap();
    }
    let list = bed.admin("GET", &bed.config_maps(), &Value::Null).await.unwrap();
    let version = list["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
    ([bed.config_maps(), widgets], version)
}

#[tokio::test]
async fn lists_of_every_kind_are_the_server_s_own_bytes() {
    let bed = Bed::new().await;
    let (targets, at) = filled(&bed).await;
    let proxy = bed.proxy("policy", "slot=0");
    for target in &targets {
        for accept in ACCEPTS {
            for version in BOTH {
                let exact = format!("resourceVersion={at}&resourceVersionMatch=Exact");
                let direct = format!("{target}?{exact}&labelSelector=slot%3D0");
                let through = format!("{target}?{exact}");
                let answer = assert_same(&bed, &proxy, version, [&direct, &through], accept).await;
                let text = String::from_utf8_lossy(&answer).into_owned();
                assert!(text.contains("own-2") && !text.contains("other-"), "{target} as {accept}: {text}");
            }
        }
    }
}

#[tokio::test]
async fn the_pages_of_a_list_are_the_pod_s_share_and_all_of_it() {
    let bed = Bed::new().await;
    let (targets, _) = filled(&bed).await;
    let proxy = bed.proxy("policy", "slot=0");
    for target in &targets {
        for version in BOTH {
            let (mut seen, mut pages, mut next) = (Vec::new(), 0, String::new());
            loop {
                let page = format!("{target}?limit=3{next}");
                let (status, list) = bed.through(&proxy, version, &page).await;
                assert_eq!(status, StatusCode::OK, "{list}");
                seen.extend(names(&list));
                pages += 1;
                match list["metadata"]["continue"].as_str() {
                    Some(token) if !token.is_empty() => next = format!("&continue={token}"),
                    _ => break,
                }
            }
            let expected: Vec<String> = [0, 2, 4, 6].map(name).into();
            assert_eq!((seen, pages), (expected, 2), "{target}, {version:?}");
        }
    }
}

#[tokio::test]
async fn watches_and_watch_lists_are_the_servers_own_bytes() {
    let bed = Bed::new().await;
    let (targets, at) = filled(&bed).await;
    let proxy = bed.proxy("policy", "slot=0");
    // What happens between the version and now comes at once.
    for number in 0..8 {
        let change = json!({"metadata": {"annotations": {"touched": "yes"}}});
        for target in &targets {
            let target = format!("{target}/{}", name(number));
            bed.admin("PATCH", &target, &change).await.unwrap();
        }
    }
    for target in &targets {
        for accept in ACCEPTS {
            for version in BOTH {
                let accept = accept.replace("PartialObjectMetadataList", "PartialObjectMetadata");
                for query in [format!("watch=1&resourceVersion={at}"), WATCH_LIST.to_owned()] {
                    let target = format!("{target}?timeoutSeconds=1&{query}");
                    let narrowed = format!("{target}&labelSelector=slot%3D0");
                    assert_same(&bed, &proxy, version, [&narrowed, &target], &accept).await;
                }
            }
        }
    }
}

/// Neither is part of the other, or of a UID.
fn name(number: usize) -> String {
    format!("{}-{number}", if number.is_multiple_of(2) { "own" } else { "other" })
}

/// Asks the API server itself and through the proxy at the same time: the answers must be the same bytes. What differs
/// from one moment to the next is left out: the age in a Table, and the version of the bookmark that ends a watch list.
async fn assert_same(
    bed: &Bed,
    proxy: &Proxy,
    version: Version,
    [direct, through]: [&str; 2],
    accept: &str,
) -> Vec<u8> {
    let momentary = accept.contains("as=Table") || through.contains(WATCH_LIST);
    let mut tries = 0;
    loop {
        let asked = (bed.direct(version, direct, accept), bed.by(proxy, version, through, accept));
        let (expected, answer) = tokio::join!(asked.0, asked.1);
        assert_eq!((expected.status, answer.status), (StatusCode::OK, StatusCode::OK));
        assert_eq!(answer.headers["content-type"], expected.headers["content-type"]);
        let body = answer.body.to_vec();
        let same =
            if momentary { without_digits(&body) == without_digits(&expected.body) } else { body == expected.body };
        if same && !body.is_empty() {
            return body;
        }
        tries += 1;
        // A watch of one second shows less of what there is where the machine is slow.
        let is_cut = through.contains("timeoutSeconds=1&")
            && (body.starts_with(&expected.body) || expected.body.starts_with(&body));
        // An age may have got another digit just then, and the server may add a bookmark when it likes to.
        let texts = [&body[..], &expected.body].map(String::from_utf8_lossy);
        assert!((momentary || is_cut) && tries < 10, "{through} as {accept}, {version:?}: {texts:?}");
    }
}

fn without_digits(body: &[u8]) -> Vec<u8> {
    body.iter().map(|byte| if byte.is_ascii_digit() { b'0' } else { *byte }).collect()
}

#[tokio::test]
async fn a_quiet_kind_is_listed_and_watched_after_a_policy_change() {
    let bed = Bed::new().await;
    let ([_, quiet], _) = filled(&bed).await;
    let version_of = |list: &Value| -> u64 { list["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap() };
    let newest = async |target: &str| version_of(&bed.admin("GET", target, &Value::Null).await.unwrap());
    let before = newest(&quiet).await;
    bed.create("later", 0).await;
    let changed_at = newest(&bed.config_maps()).await;
    let limit = json!({"relateResources": [{"apiGroups": [WIDGETS], "resources": ["widgets"]}], "selector": "slot=0", "changedAt": changed_at});
    fs::write(bed.pki.path("policy"), json!({"limits": [limit]}).to_string()).unwrap();
    let policy = bed.pki.path("policy");
    let proxy = Proxy::start(&bed.pki, bed.upstream(), &["--policy", policy.to_str().unwrap()]);
    for version in BOTH {
        let late = format!("{quiet}?watch=1&resourceVersion={before}");
        assert!(bed.by(&proxy, version, &late, "application/json").await.is_expired_watch());
        let asked = [
            "resourceVersion=0".to_owned(),
            "limit=3&resourceVersion=0".to_owned(),
            format!("resourceVersion={before}&resourceVersionMatch=NotOlderThan"),
        ];
        for query in asked {
            let (status, list) = bed.through(&proxy, version, &format!("{quiet}?{query}")).await;
            assert_eq!((status, names(&list).len()), (StatusCode::OK, 4), "{query}: {list}");
            let at = version_of(&list);
            assert!(at >= changed_at, "{query}: {at} is from before {changed_at}");
            let watch = format!("{quiet}?watch=1&timeoutSeconds=1&resourceVersion={at}");
            assert_eq!(bed.through(&proxy, version, &watch).await.0, StatusCode::OK);
        }
    }
}

/// As where the policy's versions are of another store than those of the resource.
#[tokio::test]
async fn a_change_at_an_unknown_version_does_not_stop_reads() {
    let bed = Bed::new().await;
    let (targets, _) = filled(&bed).await;
    let limits = ["", WIDGETS].map(|group| {
        let resources = json!([{"apiGroups": [group], "resources": ["*"]}]);
        json!({"relateResources": resources, "selector": "slot=0", "changedAt": 1_u64 << 60})
    });
    fs::write(bed.pki.path("policy"), json!({"limits": limits}).to_string()).unwrap();
    let policy = bed.pki.path("policy");
    let proxy = Proxy::start(&bed.pki, bed.upstream(), &["--policy", policy.to_str().unwrap()]);
    for (version, target) in BOTH.into_iter().flat_map(|it| targets.each_ref().map(|at| (it, at))) {
        let cached = format!("{target}?resourceVersion=0");
        let (status, list) = bed.through(&proxy, version, &cached).await;
        assert_eq!(status, StatusCode::OK, "{target}: {list}");
        let (status, page) = bed.through(&proxy, version, &format!("{target}?limit=1")).await;
        let token = page["metadata"]["continue"].as_str().unwrap();
        assert_eq!(status, StatusCode::OK, "{target}: {page}");
        let next = format!("{target}?limit=9&continue={token}");
        let (status, rest) = bed.through(&proxy, version, &next).await;
        assert_eq!((status, names(&rest).len()), (StatusCode::OK, 3), "{target}: {rest}");
        let at = page["metadata"]["resourceVersion"].as_str().unwrap();
        let watch = format!("{target}?watch=1&timeoutSeconds=1&resourceVersion={at}");
        assert_eq!(bed.through(&proxy, version, &watch).await.0, StatusCode::OK, "{target}");
    }
}

#[tokio::test]
async fn a_watch_list_follows_a_policy_after_its_initial_events() {
    use http_body_util::BodyExt as _;

    let bed = Bed::new().await;
    let (targets, _) = filled(&bed).await;
    for target in &targets {
        let proxy = bed.proxy("policy", "slot=0");
        let mut client = crate::harness::client::Client::connect(&bed.pki, proxy.address, Version::HTTP_2).await;
        let request = http::Request::get(format!("{target}?{WATCH_LIST}"))
            .header("authorization", format!("Bearer {}", bed.token))
            .header("accept", "application/json")
            .body(http_body_util::Full::default())
            .unwrap();
        let mut watch = client.send(request).await.unwrap().into_body();
        let mut read = Vec::new();
        let mut lines: Vec<Value> = Vec::new();
        let mut changed = false;
        while lines.iter().filter(|line| line["type"] == "DELETED").count() < 4 {
            let frame = soon("an event", watch.frame()).await.unwrap().unwrap();
            read.extend(frame.into_data().unwrap());
            while let Some(end) = read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = read.drain(..=end).collect();
                let line: Value = serde_json::from_slice(&line).unwrap();
                // Other bookmarks come when the server likes.
                if line["type"] != "BOOKMARK" || ends_initial_events(&line) {
                    lines.push(line);
                }
            }
            let ended = lines.iter().any(ends_initial_events);
            if ended && !changed {
                assert_eq!(lines.len(), 5, "{lines:?}");
                changed = true;
                write_policy(&bed.pki, "policy", "slot=1");
            }
        }
        let kinds: Vec<&str> = lines.iter().map(|line| line["type"].as_str().unwrap()).collect();
        let expected = [&["ADDED"; 4][..], &["BOOKMARK"], &["ADDED"; 4], &["DELETED"; 4]].concat();
        assert_eq!(kinds[..13], expected);
        let slot = |line: &Value| line["object"]["metadata"]["labels"]["slot"].clone();
        assert!(lines[5..9].iter().all(|line| slot(line) == "1"));
        assert!(lines[9..13].iter().all(|line| slot(line) == "0"));
    }
}

fn ends_initial_events(line: &Value) -> bool {
    line["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"] == "true"
}

//! No spelling of a request shows a foreign object.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::sync::Arc;

use http::{Method, Request, Version};
use http_body_util::{BodyExt as _, Full};
use rustls_pki_types::ServerName;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::bed::{Bed, names};
use crate::harness::client::{Client, exchange_bytes};
use crate::harness::pki::Pki;
use crate::harness::proxy::Proxy;
use crate::harness::soon;

/// One request: method, target, further headers.
type Attempt = (&'static str, String, &'static [(&'static str, &'static str)]);

/// The first bytes of names that nobody may see through the proxy, and of those that may be seen.
const FOREIGN: &[u8] = b"foreign-";
const MINE: &[u8] = b"mine-";

const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io";
const METADATA: &str = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io";
const METADATA_PROTOBUF: &str = "application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io";

/// What may stand behind the question mark of a list.
const LISTS: [&str; 23] = [
    "labelSelector=slot%3D1",
    "labelSelector=slot%3D1&labelSelector=slot%3D0",
    "labelSelector=&labelSelector=slot%3D1",
    "%6CabelSelector=slot%3D1",
    "labelSelector=slot%3D0%2Cslot%3D1",
    "labelSelector=slot+in+(0,1)",
    "labelSelector=slot",
    "labelSelector=%00",
    "labelSelector=slot%3D1%00",
    "labelSelector=slot%3D0%00%2Cslot%3D1",
    ";labelSelector=slot%3D1",
    "labelSelector=slot%3D1%zz",
    "labelSelector",
    "fieldSelector=metadata.name%3Dforeign-0",
    "fieldSelector=metadata.name%21%3Dnone",
    "resourceVersion=0&resourceVersionMatch=NotOlderThan",
    "resourceVersion=0",
    "limit=1",
    "pretty=true",
    "watch=false",
    "watch=0",
    "watch=false&watch=1",
    "sendInitialEvents=true",
];

/// And of a watch.
const WATCHES: [&str; 10] = [
    "watch=1",
    "watch",
    "watch=true&watch=false",
    "watch=TRUE",
    "watch=yes",
    "watch=1&labelSelector=slot%3D1",
    "watch=1&resourceVersion=0",
    "watch=1&fieldSelector=metadata.name%3Dforeign-0",
    "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true",
    "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&resourceVersion=0",
];

#[tokio::test]
async fn complementary_selectors_show_disjoint_and_complete_sets() {
    let bed = Bed::new().await;
    for number in 0..10 {
        bed.create(&format!("c{number}"), number % 4).await;
    }
    let (one, two) = (bed.proxy("one", "slot in (0,1)"), bed.proxy("two", "slot notin (0,1)"));
    let all: BTreeSet<String> = bed.truth("").await.into_keys().collect();
    for version in [Version::HTTP_11, Version::HTTP_2] {
        let (_, first) = bed.through(&one, version, &bed.config_maps()).await;
        let (_, second) = bed.through(&two, version, &bed.config_maps()).await;
        let (first, second) = (names(&first), names(&second));
        assert!(first.is_disjoint(&second) && !first.is_empty() && !second.is_empty());
        assert_eq!(&first | &second, all);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_spelling_of_a_request_shows_a_foreign_object() {
    let bed = Arc::new(Bed::new().await);
    for number in 0..4 {
        bed.create(&format!("mine-{number}"), 0).await;
        bed.create(&format!("foreign-{number}"), 1).await;
    }
    let proxy = Arc::new(bed.proxy("policy", "slot=0"));
    let attempts = attempts(&bed).await;
    let mut asking = tokio::task::JoinSet::new();
    for attempt in attempts {
        let (bed, proxy) = (bed.clone(), proxy.clone());
        asking.spawn(async move {
            let raw = raw(&bed, &proxy, &attempt).await;
            let http2 = over_http2(&bed, &proxy, &attempt).await;
            (attempt, [raw, http2])
        });
    }
    let (mut asked, mut own) = (0, 0);
    while let Some(answered) = asking.join_next().await {
        let (attempt, answers) = answered.unwrap();
        for answer in answers {
            assert!(!holds(&answer, FOREIGN), "{attempt:?}: {}", String::from_utf8_lossy(&answer));
            asked += 1;
            own += usize::from(holds(&answer, MINE));
        }
    }
    // Many of them are answered, not refused.
    assert!(asked > 100 && own * 3 > asked, "{own} of {asked} show what may be seen");
    assert_eq!(bed.truth("slot=1").await.len(), 4);
}

async fn attempts(bed: &Bed) -> Vec<Attempt> {
    let maps = bed.config_maps();
    let namespace = &bed.namespace;
    let first = bed.admin("GET", &format!("{maps}?limit=1"), &Value::Null).await.unwrap();
    let token = first["metadata"]["continue"].as_str().unwrap().to_owned();
    let mut attempts: Vec<Attempt> = Vec::new();
    for query in LISTS {
        attempts.push(("GET", format!("{maps}?{query}"), &[]));
    }
    attempts.push(("GET", format!("{maps}?limit=500&continue={token}"), &[]));
    for pairs in [9_998, 9_999, 10_000, 10_001] {
        let full = "&x".repeat(pairs - 1);
        attempts.push(("GET", format!("{maps}?limit=500{full}"), &[]));
        attempts.push(("GET", format!("{maps}?watch=1&timeoutSeconds=1{full}"), &[]));
        attempts.push(("DELETE", format!("{maps}?dryRun=All{full}"), &[]));
    }
    for query in WATCHES {
        attempts.push(("GET", format!("{maps}?timeoutSeconds=1&{query}"), &[]));
    }
    for path in [
        format!("/api/v1/watch/namespaces/{namespace}/configmaps"),
        "/api/v1/watch/configmaps".to_owned(),
        format!("/api/v1/watch/namespaces/{namespace}/configmaps/foreign-0"),
    ] {
        attempts.push(("GET", format!("{path}?timeoutSeconds=1"), &[]));
    }
    attempts.extend(paths(&maps, namespace).map(|path| ("GET", path, &[][..])));
    for accept in [
        &[("accept", TABLE)][..],
        &[("accept", METADATA)],
        &[("accept", METADATA_PROTOBUF)],
        &[("accept", "application/vnd.kubernetes.protobuf")],
        &[("accept", "application/yaml")],
        &[("accept", "application/json;stream=watch")],
    ] {
        attempts.push(("GET", maps.clone(), accept));
        attempts.push(("GET", format!("{maps}?watch=1&timeoutSeconds=1"), accept));
    }
    for method in ["get", "Get", "gET", "FOO", "LIST", "WATCH", "POST", "PATCH", "PUT", "OPTIONS"] {
        attempts.push((method, format!("{maps}?timeoutSeconds=1"), &[]));
        attempts.push((method, format!("{maps}?watch=1&timeoutSeconds=1"), &[]));
    }
    attempts.push(("POST", maps.clone(), &[("x-http-method-override", "GET")]));
    attempts.push(("DELETE", format!("{maps}?dryRun=All"), &[]));
    attempts.push(("DELETE", format!("{maps}?dryRun=All&labelSelector=slot%3D1"), &[]));
    attempts
}

/// Paths that someone might read as the collection's.
fn paths(maps: &str, namespace: &str) -> [String; 17] {
    [
        format!("{maps}#x"),
        format!("{maps}?limit=5#&labelSelector=slot%3D1"),
        format!("/api/v1/namespaces/{namespace}#x/configmaps"),
        format!("/api/v1/namespaces/{namespace}/pods/a/proxy/../../configmaps"),
        format!("{maps}/"),
        format!("/{maps}"),
        format!("/api/v1/namespaces/{namespace}//configmaps"),
        format!("/api//v1/namespaces/{namespace}/configmaps"),
        format!("/api/v1/namespaces/{namespace}/./configmaps"),
        format!("/api/v1/namespaces/{namespace}%2Fconfigmaps"),
        format!("/api/v1/x/../namespaces/{namespace}/configmaps"),
        format!("/api/v1/namespaces/{namespace}/configmap%73"),
        format!("/%61pi/v1/namespaces/{namespace}/configmaps"),
        format!("/api/v1/namespaces/{namespace}/configmaps;x=y"),
        format!("/api/v1/configmaps?fieldSelector=metadata.namespace%3D{namespace}"),
        "/api/v1/configmaps".to_owned(),
        format!("https://kubernetes{maps}"),
    ]
}

fn holds(answer: &[u8], what: &[u8]) -> bool {
    answer.windows(what.len()).any(|window| window == what)
}

/// Bytes over HTTP/1.1, as no library would send them; and what comes back.
async fn raw(bed: &Bed, proxy: &Proxy, (method, target, headers): &Attempt) -> Vec<u8> {
    let mut head = format!(
        "{method} {target} HTTP/1.1\r\nHost: kubernetes\r\nConnection: close\r\nAuthorization: Bearer {}\r\n",
        bed.token
    );
    for (name, value) in *headers {
        write!(head, "{name}: {value}\r\n").unwrap();
    }
    head.push_str("\r\n");
    exchange_bytes(&bed.pki, proxy.address, head.as_bytes()).await.into_bytes()
}

/// The same over HTTP/2, where it can be said.
async fn over_http2(bed: &Bed, proxy: &Proxy, (method, target, headers): &Attempt) -> Vec<u8> {
    let Ok(uri) = target.parse::<http::Uri>() else { return Vec::new() };
    let mut request = Request::builder()
        .method(Method::from_bytes(method.as_bytes()).unwrap())
        .uri(uri)
        .header("authorization", format!("Bearer {}", bed.token));
    for (name, value) in *headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Full::default()).unwrap();
    let mut client = Client::connect(&bed.pki, proxy.address, Version::HTTP_2).await;
    let Ok(response) = client.send(request).await else { return Vec::new() };
    let body = soon("the end of a body", response.into_body().collect()).await;
    body.map(|body| body.to_bytes().to_vec()).unwrap_or_default()
}

/// Go's server takes a warning alert before a handshake. What comes back here is no handshake's answer.
#[tokio::test]
async fn a_handshake_behind_an_alert_meets_nobody() {
    let bed = Bed::new().await;
    let proxy = bed.proxy("policy", "slot=0");
    let mut stream = TcpStream::connect(proxy.address).await.unwrap();
    stream.write_all(b"\x15\x03\x01\x00\x02\x01\x5a").await.unwrap();
    let connect = TlsConnector::from(bed.pki.client(&["http/1.1"]))
        .connect(ServerName::try_from("kubernetes.default.svc").unwrap(), stream);
    assert!(soon("the end", connect).await.is_err());
}

/// A second request hidden in the first one's body is either none or one that is narrowed.
#[tokio::test]
async fn a_smuggled_request_shows_no_foreign_object() {
    let bed = Bed::new().await;
    bed.create("foreign-9", 1).await;
    let proxy = bed.proxy("policy", "slot=0");
    let hidden =
        format!("GET {} HTTP/1.1\r\nHost: k\r\nAuthorization: Bearer {}\r\n\r\n", bed.config_maps(), bed.token);
    let chunked = format!("0\r\n\r\n{hidden}");
    for (headers, body) in [
        (format!("Content-Length: {}\r\nTransfer-Encoding: chunked", chunked.len()), &chunked),
        (format!("Transfer-Encoding: chunked\r\nContent-Length: {}", chunked.len()), &chunked),
        ("Transfer-Encoding: chunked, identity".to_owned(), &chunked),
        ("Transfer-Encoding:\tchunked\r\nContent-Length: 0".to_owned(), &chunked),
        ("Content-Length: 0\r\nContent-Length: 5".to_owned(), &hidden),
        ("Content-Length: 0".to_owned(), &hidden),
        ("Upgrade: h2c\r\nConnection: Upgrade".to_owned(), &hidden),
    ] {
        let first =
            format!("POST /apis HTTP/1.1\r\nHost: k\r\nAuthorization: Bearer {}\r\n{headers}\r\n\r\n{body}", bed.token);
        let last = format!(
            "GET /version HTTP/1.1\r\nHost: k\r\nConnection: close\r\nAuthorization: Bearer {}\r\n\r\n",
            bed.token
        );
        let answer = exchange_bytes(&bed.pki, proxy.address, format!("{first}{last}").as_bytes()).await;
        assert!(!answer.contains("foreign-"), "{headers}: {answer}");
    }
}

#[tokio::test]
async fn a_deletecollection_deletes_only_what_the_pod_may_see() {
    let bed = Bed::new().await;
    let widgets = bed.widgets().await;
    for number in 0..6 {
        bed.create(&format!("c{number}"), number % 2).await;
        let labels = json!({"slot": (number % 2).to_string()});
        let widget = json!({"apiVersion": "proxy.test/v1", "kind": "Widget", "metadata": {"name": format!("w{number}"), "labels": labels}});
        bed.admin("POST", &widgets, &widget).await.unwrap();
    }
    let proxy = bed.proxy("policy", "slot=0");
    for (version, target) in [(Version::HTTP_11, bed.config_maps()), (Version::HTTP_2, widgets)] {
        for query in ["?labelSelector=slot%3D1", ""] {
            let request = Request::delete(format!("{target}{query}"))
                .header("authorization", format!("Bearer {}", bed.token))
                .body(Full::default())
                .unwrap();
            let mut client = Client::connect(&bed.pki, proxy.address, version).await;
            assert!(client.ask(request).await.status.is_success());
            let left = names(&bed.admin("GET", &target, &Value::Null).await.unwrap());
            assert_eq!(left.len(), if query.is_empty() { 3 } else { 6 }, "{target}{query}: {left:?}");
        }
        let list = bed.admin("GET", &target, &Value::Null).await.unwrap();
        let items = list["items"].as_array().unwrap();
        assert!(items.iter().all(|item| item["metadata"]["labels"]["slot"] == "1"));
    }
}

/// Every byte that a target may or may not hold, in the path and in the query. What no URI holds unescaped (RFC 3986),
/// and no library sends so, is refused by the proxy, while Go's parser lets some of it pass.
#[tokio::test]
async fn a_byte_in_a_target_is_handled_as_by_the_server_or_refused() {
    let bed = Bed::new().await;
    let proxy = bed.proxy("policy", "slot=0");
    let direct = Pki::new();
    fs::copy(bed.plane.ca(), direct.path("mesh.crt")).unwrap();
    let mut differ = Vec::new();
    for byte in 0x21..=0xff_u8 {
        for place in [&b"/api/v1/namespaces/a\0b"[..], b"/api/v1/namespaces?x=a\0b", b"/versio\0n"] {
            let target: Vec<u8> = place.iter().map(|one| if *one == 0 { byte } else { *one }).collect();
            let head = [
                b"GET ",
                &target[..],
                b" HTTP/1.1\r\nHost: k\r\nConnection: close\r\nAuthorization: Bearer ",
                bed.token.as_bytes(),
                b"\r\n\r\n",
            ]
            .concat();
            let theirs = status(&exchange_bytes(&direct, bed.upstream(), &head).await);
            let ours = status(&exchange_bytes(&bed.pki, proxy.address, &head).await);
            let no_uri = byte >= 0x80 || b"\"<>`#".contains(&byte);
            if ours != theirs && !(no_uri && ours == "HTTP/1.1 400") {
                differ.push(format!("{}: {theirs} there, {ours} here", target.escape_ascii()));
            }
        }
    }
    assert!(differ.is_empty(), "{differ:#?}");
}

fn status(answer: &str) -> String {
    answer.lines().next().unwrap_or_default().chars().take(12).collect()
}

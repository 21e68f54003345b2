//! What a stranger may do to the webhook of a pod, and does not gain by it.

use std::fs;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::NamedTempFile;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time;

use super::bed::{A, OF_A, OF_B, PORT, Webhooks, review};
use super::who;

/// What the proxy may use in these tests. Reviews may hold an eighth of it.
const MEMORY_LIMIT_BYTES: u64 = 128 << 20;

/// How many reviews come at once.
const REVIEWS: usize = 200;

/// Between two bytes of a client that is slow on purpose.
const TRICKLE_EVERY: Duration = Duration::from_millis(50);

/// A review of an object of the other pod's, which is as large as this.
fn sized(bytes: usize) -> Value {
    let mut large = review("websites", OF_B);
    large["request"]["object"]["data"] = json!("x".repeat(bytes));
    large
}

async fn with_little_memory() -> Webhooks {
    Webhooks::with(&["--memory-limit", &MEMORY_LIMIT_BYTES.to_string()]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_review_of_100_mb_is_streamed() {
    let pods = with_little_memory().await;
    assert_eq!(who(&pods, A, &review("websites", OF_B)).await, "b");
    let (before, large) = (pods.proxy.resident_bytes(), sized(100_000_000));
    let (status, answer) = pods.call(A, "/validate?timeout=30s", &large).await;
    assert_eq!((status, &answer["who"], &answer["bytes"]), (200, &json!("a"), &json!(large.to_string().len())));
    let taken = pods.proxy.peak_bytes() - before;
    assert!(taken < 32 << 20, "{taken} bytes");
}

#[tokio::test(flavor = "multi_thread")]
async fn reviews_at_once_are_all_answered_in_bounded_memory() {
    let pods = with_little_memory().await;
    assert_eq!(who(&pods, A, &review("websites", OF_B)).await, "b");
    let before = pods.proxy.resident_bytes();
    let body = NamedTempFile::new().unwrap();
    fs::write(body.path(), sized(1 << 20).to_string()).unwrap();
    let (data, ca) = (format!("@{}", body.path().display()), pods.node.pki.path("real.crt"));
    let (url, resolve) = (format!("https://localhost:{PORT}/validate?timeout=30s"), format!("localhost:{PORT}:{A}"));
    let at_once = ["--parallel", "--parallel-immediate", "--parallel-max", &REVIEWS.to_string(), "--max-time", "60"];
    let fixed = ["--cacert", ca.to_str().unwrap(), "--resolve", &resolve, "--data-binary", &data];
    let (text, code) = pods.curl(&[&fixed[..], &at_once, &[url.as_str(); REVIEWS]].concat()).await;
    assert_eq!(code, 0, "{text}");
    let by = |pod: &str| text.matches(&format!(r#""who":"{pod}""#)).count();
    assert_eq!(by("a") + by("b"), REVIEWS, "{text}");
    assert!(by("b") > 0, "none was held");
    // What is not held goes to the pod that was called: 200 MB would be taken without a bound.
    let taken = pods.proxy.peak_bytes() - before;
    assert!(taken < MEMORY_LIMIT_BYTES, "{taken} bytes, by the owner {}", by("b"));
}

/// Sends `first`, and then byte after byte, until the other side ends the connection.
async fn trickle(mut stream: impl AsyncRead + AsyncWrite + Unpin, first: &[u8]) {
    stream.write_all(first).await.unwrap();
    let mut answer = [0; 1024];
    loop {
        match time::timeout(TRICKLE_EVERY, stream.read(&mut answer)).await {
            Ok(Ok(0) | Err(_)) => return,
            Ok(Ok(_)) => {}
            Err(_elapsed) => {
                if stream.write_all(b"x").await.is_err() || stream.flush().await.is_err() {
                    return;
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_trickles_is_ended_while_others_are_served() {
    let pods = Webhooks::with(&["--header-timeout", "5s"]).await;
    let stream = pods.connect_tls().await;
    let head = b"POST /validate?timeout=1s HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n{";
    // The beginning of a TLS hello of 512 bytes, and of a body.
    let slow = async { tokio::join!(trickle(pods.connect(), b"\x16\x03\x01\x02\x00"), trickle(stream, head)) };
    let others = async {
        loop {
            assert_eq!(who(&pods, A, &review("websites", OF_B)).await, "b");
        }
    };
    tokio::select! {
        _ended = slow => {}
        () = others => {}
    }
    assert!(pods.answered("owner", "ok").await > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_with_the_name_of_proxies_gets_what_the_pod_says() {
    let pods = Webhooks::new().await;
    let body = NamedTempFile::new().unwrap();
    fs::write(body.path(), review("websites", OF_B).to_string()).unwrap();
    let data = format!("@{}", body.path().display());
    let name = "kubernetes.default.svc";
    let (url, resolve) = (format!("https://{name}:{PORT}/validate"), format!("{name}:{PORT}:{A}"));
    for (ca, expected) in [("mesh.crt", Some("a")), ("real.crt", None)] {
        let ca = pods.node.pki.path(ca);
        let call = ["--cacert", ca.to_str().unwrap(), "--resolve", &resolve, "--data-binary", &data, &url];
        let (text, code) = pods.curl(&call).await;
        match expected {
            Some(expected) => assert_eq!(serde_json::from_str::<Value>(&text).unwrap()["who"], expected),
            // The operator's own authority does not vouch for this name.
            None => assert_eq!(code, 60, "{text}"),
        }
    }
    assert_eq!(pods.answered("local", "ok").await, 1);
    assert_eq!(pods.answered("owner", "ok").await, 0);
    assert_eq!(who(&pods, A, &review("websites", OF_A)).await, "a");
}

//! A review that one pod is called for is answered by the pod that owns its object.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use self::bed::{A, A_V6, B, OF_A, OF_B, PORT, Webhooks, policy, review};
use crate::harness::pki::Pki;
use crate::harness::until;

mod bed;
mod attacks;
mod faults;

/// Who has answered a review.
async fn who(pods: &Webhooks, ip: &str, review: &Value) -> String {
    let (status, answer) = pods.call(ip, "/validate?timeout=10s", review).await;
    assert_eq!(status, 200, "{answer}");
    answer["who"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_review_is_answered_by_the_owner_of_its_object() {
    let pods = Webhooks::new().await;
    for ip in [A, B, A_V6] {
        assert_eq!(who(&pods, ip, &review("websites", OF_A)).await, "a", "{ip}");
        assert_eq!(who(&pods, ip, &review("websites", OF_B)).await, "b", "{ip}");
        let called = if ip == B { "b" } else { "a" };
        // Not divided, and no review at all.
        for body in [review("other", OF_B), json!({"kind": "ConversionReview"})] {
            assert_eq!(who(&pods, ip, &body).await, called, "{ip} {body}");
        }
        // Nobody's, for half of the time.
        let (_, answer) = pods.call(ip, "/validate?timeout=1s", &review("websites", "moving")).await;
        assert_eq!(answer["who"], called, "{ip}");
    }
    let body = review("websites", OF_B);
    let (_, answer) = pods.call(A, "/validate-it?timeout=10s&a=b", &body).await;
    let bytes = body.to_string().len();
    assert_eq!(
        answer,
        json!({"who": "b", "path": "/validate-it?timeout=10s&a=b", "method": "POST", "bytes": bytes,
            "peer": "127.0.0.2", "host": format!("localhost:{PORT}")})
    );
    assert_eq!(pods.answered("owner", "ok").await, 4);
    assert_eq!(pods.answered("fallback", "ok").await, 3);
    let page = pods.metrics().await;
    for count in ["{route=\"owner\"} 4\n", "{route=\"fallback\"} 3\n"] {
        assert!(page.contains(&format!("ctrlmesh_proxy_webhook_added_seconds_count{count}")), "{page}");
    }
    let (_, answer) = pods.call_with(A, "/healthz", &json!(null), &["--request", "GET"]).await;
    assert_eq!((&answer["who"], &answer["method"]), (&json!("a"), &json!("GET")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_review_of_what_moves_waits_for_the_new_owner() {
    let pods = Webhooks::new().await;
    let granted = |shard: &str, peer: &str, address: &str| {
        let webhook = Webhooks::webhook(&pods.node, &json!([{"shard": peer, "addresses": [address]}]));
        let mut granted = policy(2, shard, &webhook);
        granted["fence"]["revoked"] = json!([]);
        granted["fence"]["namespaces"] = json!({"moving": "b"});
        granted
    };
    // One proxy learns of it before the other, and one review is there before both.
    let moving = review("websites", "moving");
    let change = async {
        pods.change("a", &granted("a", "b", B)).await;
        pods.change("b", &granted("b", "a", A)).await;
    };
    let path = "/validate?timeout=30s";
    let (at_a, at_b, ()) = tokio::join!(pods.call(A, path, &moving), pods.call(B, path, &moving), change);
    for (status, answer) in [at_a, at_b] {
        assert_eq!((status, &answer["who"]), (200, &json!("b")), "{answer}");
    }
    assert_eq!(pods.answered("owner", "ok").await, 1);
    assert_eq!(pods.answered("fallback", "ok").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_review_takes_one_hop_whatever_the_tables_say() {
    let pods = Webhooks::new().await;
    // Each takes the other for the owner of everything.
    for (shard, other, address) in [("a", "b", B), ("b", "a", A)] {
        let webhook = Webhooks::webhook(&pods.node, &json!([{"shard": other, "addresses": [address]}]));
        let mut wrong = policy(2, "nobody", &webhook);
        for (_slot, owner) in wrong["fence"]["slots"].as_object_mut().unwrap() {
            *owner = json!(other);
        }
        pods.change(shard, &wrong).await;
    }
    assert_eq!(who(&pods, A, &review("websites", OF_A)).await, "b");
    assert_eq!(who(&pods, B, &review("websites", OF_A)).await, "a");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_that_cannot_be_asked_is_stood_in_for_or_not() {
    let mut pods = Webhooks::new().await;
    // Nobody listens; a server that is no proxy; and nobody at all. A second address is tried.
    pods.node.bed.ip("node", "addr add 10.244.9.9/32 dev lo");
    pods.serve("node", "10.244.9.9");
    for (epoch, addresses, expected) in [
        (2, json!(["10.244.1.1"]), "a"),
        (3, json!(["10.244.9.9"]), "a"),
        (4, json!([]), "a"),
        (5, json!(["10.244.1.1", "10.244.9.9", B]), "b"),
    ] {
        let webhook = Webhooks::webhook(&pods.node, &json!([{"shard": "b", "addresses": addresses}]));
        pods.change("a", &policy(epoch, "a", &webhook)).await;
        for _ in 0..3 {
            assert_eq!(who(&pods, A, &review("websites", OF_B)).await, expected, "{addresses}");
        }
    }
    let mut webhook = Webhooks::webhook(&pods.node, &json!([{"shard": "b", "addresses": []}]));
    webhook["onUnowned"] = json!("fail");
    pods.change("a", &policy(6, "a", &webhook)).await;
    for namespace in [OF_B, "moving"] {
        let (status, answer) = pods.call(A, "/validate?timeout=1s", &review("websites", namespace)).await;
        let whose = if namespace == OF_B {
            "of shard \"b\", which owns the object, has answered"
        } else {
            "owns the object now"
        };
        assert_eq!((status, answer), (502, json!(format!("ctrlmesh-proxy: no replica {whose}\n"))));
    }
    assert_eq!(who(&pods, A, &review("websites", OF_A)).await, "a");
    assert_eq!(pods.answered("fallback", "ok").await, 9);
    assert_eq!(pods.answered("refused", "error").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_that_does_not_answer_takes_half_of_the_time() {
    let pods = Webhooks::new().await;
    // It accepts, and says nothing.
    let mut silent = pods.node.bed.inside(&pods.node.bed.cgroup("node"), "node", "python3");
    let script = "import socket; s = socket.create_server(('10.244.1.1', 9443)); print('ready', flush=True); \
                  k = [s.accept() for _ in range(99)]";
    silent.args(["-c", script]).stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut silent = crate::bed::Process(silent.spawn().unwrap());
    assert_eq!(silent.line(), "ready");
    let webhook = Webhooks::webhook(&pods.node, &json!([{"shard": "b", "addresses": ["10.244.1.1"]}]));
    pods.change("a", &policy(2, "a", &webhook)).await;
    let (status, answer) = pods.call(A, "/validate?timeout=1s", &review("websites", OF_B)).await;
    assert_eq!((status, &answer["who"]), (200, &json!("a")));
    assert_eq!(pods.answered("fallback", "ok").await, 1);
    // That time was added to the call.
    let page = pods.metrics().await;
    let added = "ctrlmesh_proxy_webhook_added_seconds_sum{route=\"fallback\"} ";
    let added: f64 = page.lines().find_map(|line| line.strip_prefix(added)).unwrap().parse().unwrap();
    assert!(added >= 0.4, "{added}");
    let log = pods.proxy.log();
    assert!(log.contains("does not answer in time") || log.contains("is not reached"), "{log}");
}

/// Pod `a` reads its certificate from files of its own, which are not there yet.
async fn without_certificate() -> Webhooks {
    let pods = Webhooks::new().await;
    let mut webhook = Webhooks::webhook(&pods.node, &json!([{"shard": "b", "addresses": [B]}]));
    for (field, name) in [("certificate", "later.crt"), ("key", "later.key")] {
        webhook[field] = json!(pods.node.pki.path(name));
    }
    pods.change("a", &policy(2, "a", &webhook)).await;
    pods
}

fn replace(pods: &Webhooks, name: &str, text: impl AsRef<[u8]>) {
    let file = |name: &str| pods.node.pki.path(name);
    fs::write(file("next"), text).unwrap();
    fs::rename(file("next"), file(name)).unwrap();
}

fn read(pki: &Pki, name: &str) -> String {
    fs::read_to_string(pki.path(name)).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_pass_unread_until_there_is_a_certificate() {
    let pods = without_certificate().await;
    let answers = async |answerer: &str, said: &str| {
        until("the files to be read", || async {
            who(&pods, A, &review("websites", OF_B)).await == answerer && pods.proxy.log().contains(said)
        })
        .await;
    };
    answers("a", "is not found yet").await;
    // The key of another certificate, and one without line breaks, which must not be quoted.
    let key = read(&pods.node.pki, "leaf.key");
    replace(&pods, "later.crt", read(&pods.node.pki, "leaf.crt"));
    replace(&pods, "later.key", read(&Pki::new(), "leaf.key"));
    answers("a", "key and certificate do not fit together").await;
    replace(&pods, "later.key", key.replace('\n', ""));
    answers("a", "the key is no PEM").await;
    replace(&pods, "later.key", &key);
    answers("b", "certificate of the pod's webhook read").await;
    let page = pods.metrics().await;
    assert!(page.contains("ctrlmesh_proxy_webhook_connections_passed_total "), "{page}");
    assert!(!page.contains("ctrlmesh_proxy_webhook_connections_passed_total 0\n"), "{page}");
    let secret: String = key.lines().nth(1).unwrap().chars().take(20).collect();
    let bytes: Vec<String> = secret.bytes().map(|byte| byte.to_string()).collect();
    for quoted in [&secret, &bytes.join(", ")] {
        assert!(!pods.proxy.log().contains(quoted.as_str()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_certificate_counts_before_the_operator_has_it() {
    let (pods, other) = (without_certificate().await, Pki::new());
    for name in ["crt", "key"] {
        replace(&pods, &format!("later.{name}"), read(&other, &format!("leaf.{name}")));
    }
    let (ca, resolve) = (other.path("real.crt"), format!("localhost:{PORT}:{A}"));
    let url = format!("https://localhost:{PORT}/healthz");
    let call = ["--resolve", &resolve, "--output", "/dev/null", "--cacert", ca.to_str().unwrap(), &url];
    until("the new certificate", || async { pods.curl(&call).await.1 == 0 }).await;
    // A broken one changes nothing.
    replace(&pods, "later.crt", "-----BEGIN CERTIFICATE-----\nnone\n");
    until("the broken one to be read", || async {
        assert_eq!(pods.curl(&call).await.1, 0);
        pods.proxy.log().contains("the certificate is no PEM")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_connection_serves_one_call_after_the_other() {
    let pods = Webhooks::new().await;
    let body = tempfile::NamedTempFile::new().unwrap();
    fs::write(body.path(), review("websites", OF_B).to_string()).unwrap();
    let (data, ca) = (format!("@{}", body.path().display()), pods.node.pki.path("real.crt"));
    let url = format!("https://localhost:{PORT}/validate");
    let resolve = format!("localhost:{PORT}:{A}");
    let fixed = ["--cacert", ca.to_str().unwrap(), "--resolve", &resolve, "--data-binary", &data];
    let (text, code) =
        pods.curl(&[&fixed[..], &["--write-out", " %{num_connects}\n"], &[url.as_str(); 4]].concat()).await;
    assert_eq!(code, 0);
    let answers: Vec<(Value, &str)> = text
        .lines()
        .map(|line| line.rsplit_once(' ').unwrap())
        .map(|(answer, connects)| (serde_json::from_str(answer).unwrap(), connects))
        .collect();
    assert!(answers.iter().all(|(answer, _)| answer["who"] == "b"), "{text}");
    assert_eq!(answers.iter().map(|(_, connects)| *connects).collect::<Vec<_>>(), ["1", "0", "0", "0"]);
    assert_eq!(pods.answered("owner", "ok").await, 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_review_gets_what_the_operator_says() {
    let pods = Webhooks::new().await;
    // Larger than what is held: streamed to the pod that was called.
    let mut large = review("websites", OF_B);
    large["request"]["object"]["data"] = json!("x".repeat(8 << 20));
    let (status, answer) = pods.call(A, "/validate", &large).await;
    assert_eq!((status, &answer["who"]), (200, &json!("a")));
    assert_eq!(answer["bytes"], large.to_string().len());
    let (status, answer) = pods.call_with(A, "/validate", &large, &["--header", "transfer-encoding: chunked"]).await;
    assert_eq!((status, &answer["bytes"]), (200, &json!(large.to_string().len())));
    assert_eq!(pods.answered("fallback", "ok").await, 2);
    let held = review("websites", OF_B);
    let (_, answer) = pods.call_with(A, "/validate", &held, &["--header", "transfer-encoding: chunked"]).await;
    assert_eq!((&answer["who"], &answer["bytes"]), (&json!("b"), &json!(held.to_string().len())));
    // Without TLS.
    let (_, code) = pods.curl(&[&format!("http://{A}:{PORT}/")]).await;
    assert!([1, 52, 56].contains(&code), "the operator's server closes it: {code}");
    // A port that is no webhook's.
    let (_, code) = pods.curl(&[&format!("https://{A}:9444/")]).await;
    assert_eq!(code, 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_without_a_webhook_is_called_past_the_proxy() {
    let pods = Webhooks::new().await;
    let mut without = policy(2, "a", &json!(null));
    without.as_object_mut().unwrap().remove("webhook");
    pods.change("a", &without).await;
    until("the calls to pass", || async {
        // A connection that the proxy has taken and not answered ends with the webhook.
        let answered = pods.try_call(A, "/validate", &review("websites", OF_B), &[]).await;
        answered.is_ok_and(|(_, answer)| answer["who"] == "a" && answer["peer"] == "10.244.1.1")
    })
    .await;
    let webhook = Webhooks::webhook(&pods.node, &json!([{"shard": "b", "addresses": [B]}]));
    pods.change("a", &policy(3, "a", &webhook)).await;
    until("the calls to be taken", || async { who(&pods, A, &review("websites", OF_B)).await == "b" }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reviews_go_on_while_one_proxy_follows_another() {
    let mut pods = Webhooks::new().await;
    for _ in 0..3 {
        let before = pods.successor().await;
        let is_over = AtomicBool::new(false);
        let calls = async {
            let mut count = 0;
            while !is_over.load(Ordering::Relaxed) || count < 3 {
                assert_eq!(who(&pods, A, &review("websites", OF_B)).await, "b", "call {count}");
                count += 1;
            }
        };
        let change = async {
            before.terminate();
            assert!(before.ended().await.success());
            for pod in ["ops/a", "ops/b"] {
                pods.taken(pod).await;
            }
            is_over.store(true, Ordering::Relaxed);
        };
        tokio::join!(calls, change);
    }
}

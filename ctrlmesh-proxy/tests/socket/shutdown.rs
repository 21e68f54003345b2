//! Connections and requests after SIGTERM.

use std::sync::Arc;

use crate::harness::client::{Client, get, plain_get};
use crate::harness::pki::Pki;
use crate::harness::proxy::Proxy;
use crate::harness::upstream::{Upstream, streamed, whole};
use crate::harness::{soon, until};
use http::{StatusCode, Version};
use http_body_util::BodyExt as _;
use tokio::net::TcpStream;
use tokio::sync::Notify;

const BOTH: [Version; 2] = [Version::HTTP_11, Version::HTTP_2];
const PROTOCOLS: &[&str] = &["h2", "http/1.1"];

#[tokio::test]
async fn idle_connections_are_closed_and_the_process_ends_well() {
    let pki = Pki::new();
    let upstream = Upstream::http(pki.server(PROTOCOLS), |_| async { whole(StatusCode::OK, "") }).await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    let mut clients = Vec::new();
    for version in BOTH {
        let mut client = Client::connect(&pki, proxy.address, version).await;
        client.get("/api").await;
        clients.push(client);
    }
    proxy.terminate();
    assert!(proxy.ended().await.success());
    for client in clients {
        until("the client to notice", || async { client.is_closed() }).await;
    }
}

#[tokio::test]
async fn a_request_under_way_is_answered_before_the_process_ends() {
    for version in BOTH {
        let pki = Pki::new();
        let arrived = Arc::<Notify>::default();
        let release = Arc::<Notify>::default();
        let (there, released) = (arrived.clone(), release.clone());
        let upstream = Upstream::http(pki.server(PROTOCOLS), move |_| {
            let (there, released) = (there.clone(), released.clone());
            async move {
                there.notify_one();
                released.notified().await;
                whole(StatusCode::OK, "late")
            }
        })
        .await;
        let proxy = Proxy::start(&pki, upstream.address, &[]);
        let (address, admin) = (proxy.address, proxy.admin);
        let mut client = Client::connect(&pki, address, version).await;
        let answer = tokio::spawn(async move { client.get("/api").await });
        soon("the request", arrived.notified()).await;
        proxy.terminate();
        until("the proxy to be no longer ready", || async { plain_get(admin, "/readyz").await.0 == 503 }).await;
        until("new connections to be refused", || async { TcpStream::connect(address).await.is_err() }).await;
        release.notify_one();
        assert_eq!(answer.await.unwrap().body, "late", "{version:?}");
        assert!(proxy.ended().await.success());
    }
}

#[tokio::test]
async fn a_watch_ends_cleanly() {
    for version in BOTH {
        let pki = Pki::new();
        let upstream = Upstream::http(pki.server(PROTOCOLS), |_| async {
            let (mut send, mut response) = streamed();
            let json = http::HeaderValue::from_static("application/json");
            response.headers_mut().insert("content-type", json);
            tokio::spawn(async move {
                let event = r#"{"type":"ADDED","object":{"metadata":{"resourceVersion":"7"}}}"#;
                send.send_data(format!("{event}\n").into()).await.unwrap();
                std::future::pending::<()>().await;
            });
            response
        })
        .await;
        let proxy = Proxy::start(&pki, upstream.address, &[]);
        let mut client = Client::connect(&pki, proxy.address, version).await;
        let mut watch = client.send(get("/api/v1/pods?watch=true")).await.unwrap().into_body();
        let event = soon("an event", watch.frame()).await.unwrap().unwrap();
        assert!(event.into_data().unwrap().ends_with(b"}\n"));
        proxy.terminate();
        let rest = soon("the end", watch.collect()).await.unwrap();
        assert!(rest.to_bytes().is_empty(), "{version:?}");
        assert!(proxy.ended().await.success());
    }
}

#[tokio::test]
async fn what_never_ends_is_cut_at_the_deadline() {
    let pki = Pki::new();
    let arrived = Arc::<Notify>::default();
    let there = arrived.clone();
    let upstream = Upstream::http(pki.server(PROTOCOLS), move |_| {
        let there = there.clone();
        async move {
            there.notify_one();
            std::future::pending().await
        }
    })
    .await;
    let proxy = Proxy::start(&pki, upstream.address, &["--drain-timeout", "100ms"]);
    let mut client = Client::connect(&pki, proxy.address, Version::HTTP_2).await;
    let request = tokio::spawn(async move { client.send(get("/api")).await.is_err() });
    soon("the request", arrived.notified()).await;
    proxy.terminate();
    assert_eq!(proxy.ended().await.code(), Some(1));
    assert!(request.await.unwrap());
}

/// A sidecar whose manager is not there: it waits for its policy, and serves nothing.
fn waiting(pki: &Pki) -> Proxy {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ctrlmesh-proxy"));
    std::fs::write(pki.path("token"), "token").unwrap();
    command
        .args(["sidecar", "--listen", "127.0.0.1:0", "--upstream", "https://127.0.0.1:1"])
        .args(["--manager", "127.0.0.1:1", "--pod", "ns/op-0", "--manager-ca"])
        .arg(pki.path("real.crt"))
        .arg("--token")
        .arg(pki.path("token"))
        .arg("--state-dir")
        .arg(pki.path("state"));
    Proxy::waiting(pki, command)
}

#[tokio::test]
async fn a_proxy_that_waits_for_the_manager_lives_and_can_stop() {
    let pki = Pki::new();
    let proxy = waiting(&pki);
    assert_eq!(plain_get(proxy.admin, "/livez").await.0, 200);
    assert_eq!(plain_get(proxy.admin, "/readyz").await, (503, "waiting for listeners\n".into()));
    proxy.terminate();
    assert!(proxy.ended().await.success());
}

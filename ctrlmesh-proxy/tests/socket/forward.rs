//! The forward proxy of a sidecar.

use std::net::SocketAddr;

use http::StatusCode;
use http_body_util::Full;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;

use crate::harness::pki::Pki;
use crate::harness::proxy::Proxy;
use crate::harness::upstream::{Upstream, whole};
use crate::harness::{soon, until};

/// The one address at which it listens. One test alone may use it.
const FORWARD: &str = "127.0.0.1:15002";

/// Another server; says the path and the host that it was asked for.
async fn other() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = service_fn(async |request: http::Request<hyper::body::Incoming>| {
                let host = request.headers()["host"].to_str().unwrap().to_owned();
                let path = request.uri().path().to_owned();
                Ok::<_, std::convert::Infallible>(http::Response::new(Full::<bytes::Bytes>::from(host + &path)))
            });
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
    address
}

/// What comes back for a request, to its end.
async fn ask(request: &str) -> String {
    let mut stream = TcpStream::connect(FORWARD).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    soon("an answer", stream.read_to_string(&mut answer)).await.unwrap();
    answer
}

fn policy(epoch: u64, forward_proxy: bool, access: &Value) -> Value {
    let limits = json!([{"relateResources": [{"apiGroups": [""], "resources": ["pods"]}], "selector": "team=a"}]);
    let ports: Vec<u16> = access[0]["ports"]
        .as_array()
        .map_or(vec![80], |ports| ports.iter().map(|port| u16::try_from(port.as_u64().unwrap()).unwrap()).collect());
    json!({"epoch": epoch, "limits": limits, "forwardProxy": forward_proxy, "egress": {"ports": ports, "access": access}})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sidecar_has_a_forward_proxy_where_its_policy_says_so() {
    let pki = Pki::new();
    let upstream =
        Upstream::http(pki.server(&["http/1.1"]), |seen| async move { whole(StatusCode::OK, seen.target) }).await;
    let write = |policy: &Value| crate::harness::watches::write(&pki, policy);
    write(&policy(1, false, &json!([])));
    let file = pki.path("policy").display().to_string();
    let proxy = Proxy::start(&pki, upstream.address, &["--policy", &file]);
    assert!(TcpStream::connect(FORWARD).await.is_err());
    write(&policy(2, true, &json!([])));
    until("the forward proxy", || async { TcpStream::connect(FORWARD).await.is_ok() }).await;
    let other = other().await;
    let get = |url: &str| format!("GET {url} HTTP/1.1\r\nHost: ignored\r\nConnection: close\r\n\r\n");
    let answer = ask(&get(&format!("http://{other}/path"))).await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with(&format!("\r\n\r\n{other}/path")), "{answer}");
    let header = format!(
        "GET / HTTP/1.1\r\nHost: {FORWARD}\r\nMesh-Real-Endpoint: http://{other}/real\r\nConnection: close\r\n\r\n"
    );
    assert!(ask(&header).await.ends_with(&format!("{other}/real")));
    let itself = ask(&get(&format!("http://{FORWARD}/"))).await;
    assert!(itself.starts_with("HTTP/1.1 403") && itself.contains("an address of the proxy itself"), "{itself}");
    api_server(&pki, upstream.address).await;
    // Rules hold, and the proxy goes where the policy says so.
    let list = json!([{"parts": {"host": "127.0.0.1", "path": "/public"}}]);
    let rule = json!({"breaker": "ops/out", "rule": "one", "ports": [other.port()], "list": "allow", "urls": list, "methods": ["*"]});
    write(&policy(3, true, &json!([rule])));
    until("the rule", || async { ask(&get(&format!("http://{other}/private"))).await.starts_with("HTTP/1.1 403") })
        .await;
    assert!(ask(&get(&format!("http://{other}/public"))).await.starts_with("HTTP/1.1 200"));
    write(&policy(4, false, &json!([])));
    until("nobody to listen", || async { TcpStream::connect(FORWARD).await.is_err() }).await;
    drop(proxy);
}

/// The API server is reached through the proxy's own limits.
async fn api_server(pki: &Pki, address: SocketAddr) {
    let mut stream = TcpStream::connect(FORWARD).await.unwrap();
    stream.write_all(format!("CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n\r\n").as_bytes()).await.unwrap();
    let mut answer = [0; 64];
    let read = soon("an answer", stream.read(&mut answer)).await.unwrap();
    assert!(answer[..read].starts_with(b"HTTP/1.1 200"));
    let name = rustls_pki_types::ServerName::IpAddress(address.ip().into());
    let connector = TlsConnector::from(pki.client(&["http/1.1"]));
    let mut stream = connector.connect(name, stream).await.unwrap();
    stream.write_all(b"GET /api/v1/pods HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    soon("an answer", stream.read_to_string(&mut answer)).await.unwrap();
    assert!(answer.ends_with("/api/v1/pods?labelSelector=team%3Da"), "{answer}");
}

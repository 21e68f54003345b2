//! A recorded request and its response arrive byte by byte, but for the selector.

use std::sync::{Arc, Mutex};

use crate::harness::client::tls;
use crate::harness::pki::Pki;
use crate::harness::proxy::Proxy;
use crate::harness::soon;
use crate::harness::upstream::Upstream;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// As client-go sends it over HTTP/1.1.
const LIST: &str = "GET /api/v1/namespaces/a/pods?limit=500&resourceVersion=0 HTTP/1.1\r\n\
    Host: kubernetes.default.svc:443\r\n\
    User-Agent: operator/v0.0.0 (linux/amd64) kubernetes/$Format\r\n\
    Accept: application/vnd.kubernetes.protobuf,application/json\r\n\
    Authorization: Bearer secret\r\n\
    X-a-MiXeD-Name: 1\r\n\
    Accept-Encoding: gzip\r\n\r\n";

/// As kube-rs sends it, whose names are in lower case.
const PATCH: &str = "PATCH /api/v1/namespaces/a/pods/p HTTP/1.1\r\n\
    content-type: application/merge-patch+json\r\n\
    accept: application/json\r\n\
    authorization: Bearer secret\r\n\
    host: 10.96.0.1\r\n\
    content-length: 15\r\n\r\n\
    {\"metadata\":{}}";

/// As the API server answers.
const ANSWER: &str = "HTTP/1.1 200 OK\r\n\
    Audit-Id: 5f5fb4d2\r\n\
    Cache-Control: no-cache, private\r\n\
    Content-Type: application/json\r\n\
    X-Kubernetes-Pf-Flowschema-Uid: 1\r\n\
    Date: Sat, 21 Nov 2026 12:00:00 GMT\r\n\
    Content-Length: 2\r\n\r\n{}";

const POLICY: &str = r#"{"limits":[{"relateResources":[{"apiGroups":[""],"resources":["pods"]}],"selector":"a=b"}]}"#;

#[tokio::test]
async fn a_recorded_request_arrives_byte_by_byte_but_for_the_selector() {
    let pki = Pki::new();
    let seen = Arc::<Mutex<Vec<u8>>>::default();
    let record = seen.clone();
    let upstream = Upstream::bytes(pki.server(&["http/1.1"]), move |mut stream| {
        let record = record.clone();
        async move {
            let mut piece = [0; 4096];
            while let Ok(read @ 1..) = stream.read(&mut piece).await {
                let whole = {
                    let mut record = record.lock().unwrap();
                    record.extend_from_slice(&piece[..read]);
                    record.ends_with(b"\r\n\r\n") || record.ends_with(b"}")
                };
                if whole {
                    stream.write_all(ANSWER.as_bytes()).await.unwrap();
                }
            }
        }
    })
    .await;
    std::fs::write(pki.path("policy"), POLICY).unwrap();
    let policy = pki.path("policy").to_str().unwrap().to_owned();
    let proxy = Proxy::start(&pki, upstream.address, &["--policy", &policy]);
    let narrowed = LIST.replace("pods?", "pods?labelSelector=a%3Db&");
    let mut client = tls(&pki, proxy.address, "http/1.1").await;
    for (sent, expected) in [(LIST, narrowed.as_str()), (PATCH, PATCH)] {
        seen.lock().unwrap().clear();
        client.write_all(sent.as_bytes()).await.unwrap();
        let mut answer = vec![0; ANSWER.len()];
        soon("the answer", client.read_exact(&mut answer)).await.unwrap();
        assert_eq!(String::from_utf8_lossy(&answer), ANSWER);
        assert_eq!(String::from_utf8_lossy(&seen.lock().unwrap()), expected);
    }
}

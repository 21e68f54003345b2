//! Clients that the manager refuses.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ctrlmesh_common::wire::{self, Content, Hello, PodId, Report, Verdict};
use ctrlmesh_manager::push::policy_store::EnrolledPod;
use ctrlmesh_manager::rules::compile::CompiledPolicy;
use ctrlmesh_manager::rules::pod::PodName;
use ctrlmesh_runtime::grpc::GrpcError;
use http::Request;
use http_body_util::Empty;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use k8s_openapi::api::authentication::v1::TokenReview;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use rcgen::{CertificateParams, KeyPair};
use rustls_pki_types::ServerName;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tonic::{Code, Status};

use crate::bed::{AUDIENCE, Bed, UNPROVEN_OF_ONE, eventually, inside, of_node, of_pod, policy, soon, until};
use crate::replicas::believing;
use crate::token::{self, TestPod};

/// How many connections say nothing; `CTRLMESH_TEST_FULL=1` asks for ten times as many.
const CONNECTIONS: usize = 1000;

fn refusal(answer: Result<impl Sized, Status>) -> Code {
    match answer {
        Ok(_) => Code::Ok,
        Err(status) => status.code(),
    }
}

/// A call without a message, as no client of ours makes one.
pub(crate) async fn call(bed: &Bed, path: &str, token: Option<&str>) -> Code {
    let authorization = token.map(|token| ("authorization", format!("Bearer {token}")));
    call_with(bed, path, authorization.as_slice()).await
}

/// The same, with these in its head.
pub(crate) async fn call_with(bed: &Bed, path: &str, head: &[(&str, String)]) -> Code {
    let mut tls = believing(&std::fs::read_to_string(bed.path("manager.crt")).unwrap());
    tls.alpn_protocols = vec![b"h2".to_vec()];
    let stream = TcpStream::connect(bed.address).await.unwrap();
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let stream = TlsConnector::from(Arc::new(tls)).connect(name, stream).await.unwrap();
    let io = TokioIo::new(stream);
    let (mut sender, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
    let connection = tokio::spawn(connection);
    let mut request = Request::post(format!("https://{}{path}", bed.address))
        .header("content-type", "application/grpc")
        .header("te", "trailers");
    for (name, value) in head {
        request = request.header(*name, value);
    }
    let request = request.body(Empty::<Bytes>::new()).unwrap();
    let answer = soon("an answer", sender.send_request(request)).await.unwrap();
    connection.abort();
    Code::from_bytes(answer.headers()["grpc-status"].as_bytes())
}

#[tokio::test]
async fn expired_foreign_forged_and_unbound_tokens_are_refused() {
    let bed = Bed::new().await;
    let pod = bed.pod("op-0", "node-a").await;
    bed.publish(&[(&pod, "node-a", policy(1, "a=1"))]);
    let good = pod.token(&bed.client, AUDIENCE).await;
    assert_eq!(refusal(bed.follow(&good, of_pod(&pod)).await), Code::Ok);
    // Signed by the API server's own key, and still good: what the next one differs in is its age.
    let young = token::shifted(bed.plane, &good, Duration::ZERO);
    assert_eq!(refusal(bed.follow(&young, of_pod(&pod)).await), Code::Ok);
    let expired = token::shifted(bed.plane, &good, Duration::from_hours(1));
    let (signed, signature) = good.rsplit_once('.').unwrap();
    // Not the last letter: some of its bits mean nothing.
    let other = if signature.starts_with('A') { "B" } else { "A" };
    let forged = format!("{signed}.{other}{}", &signature[1..]);
    let foreign = pod.token(&bed.client, "https://kubernetes.default.svc").await;
    for (what, wrong) in [
        ("expired", expired),
        ("another audience", foreign),
        ("forged", forged),
        ("nonsense", "nonsense".to_owned()),
        ("huge", "x".repeat(9000)),
    ] {
        let before = bed.refused("token");
        assert_eq!(refusal(bed.follow(&wrong, of_pod(&pod)).await), Code::Unauthenticated, "{what}");
        assert_eq!(bed.refused("token"), before + 1, "{what}");
    }
    let unbound = pod.unbound_token(&bed.client, AUDIENCE).await;
    assert_eq!(refusal(bed.follow(&unbound, of_pod(&pod)).await), Code::Unauthenticated);
    assert_eq!(bed.refused("unbound"), 1);
}

#[tokio::test]
async fn tokens_that_prove_nothing_cost_the_api_server_little() {
    let bed = Bed::new().await;
    let pod = bed.pod("op-0", "node-a").await;
    bed.publish(&[(&pod, "node-a", policy(1, "a=1"))]);
    let good = pod.token(&bed.client, AUDIENCE).await;
    let reviews = || bed.metric("token_reviews_total");
    let unbound = pod.unbound_token(&bed.client, AUDIENCE).await;
    let foreign = pod.token(&bed.client, "https://kubernetes.default.svc").await;
    for wrong in ["nonsense", &unbound, &foreign] {
        assert_eq!(refusal(bed.follow(wrong, of_pod(&pod)).await), Code::Unauthenticated);
    }
    assert_eq!(reviews(), 0, "no signature could make them good");
    // They look like tokens, and each is another one.
    let (signed, _) = good.rsplit_once('.').unwrap();
    let (begun, mut answers) = (Instant::now(), Vec::new());
    for number in 0..60 {
        answers.push(refusal(bed.follow(&format!("{signed}.{number:086}"), of_pod(&pod)).await));
    }
    assert_eq!(answers[0], Code::Unauthenticated);
    // So many a minute.
    let minutes = begun.elapsed().as_secs() / 60;
    assert!(reviews() <= 30 * (1 + minutes), "{}", reviews());
    if minutes == 0 {
        assert_eq!(answers[59], Code::ResourceExhausted);
        assert!(bed.refused("too_many") >= 30);
    }
}

#[tokio::test]
async fn one_pod_cannot_have_all_connections() {
    let bed = Bed::new().await;
    let (one, other) = (bed.pod("op-0", "node-a").await, bed.pod("op-1", "node-a").await);
    bed.publish(&[(&one, "node-a", policy(1, "a=1")), (&other, "node-a", policy(2, "a=2"))]);
    let token = one.token(&bed.client, AUDIENCE).await;
    let mut held = Vec::new();
    for _ in 0..20 {
        held.extend(bed.follow(&token, of_pod(&one)).await);
    }
    assert_eq!(held.len(), 8);
    assert_eq!(bed.refused("too_many"), 12);
    let token = other.token(&bed.client, AUDIENCE).await;
    assert_eq!(refusal(bed.follow(&token, of_pod(&other)).await), Code::Ok);
}

#[tokio::test]
async fn a_call_without_a_token_is_refused() {
    let bed = Bed::new().await;
    assert_eq!(call(&bed, wire::SIGN, None).await, Code::Unauthenticated);
    assert_eq!(bed.refused("no_token"), 1);
}

/// Takes the pod out of the cluster, and waits until the API server knows that its token proves nothing: it asks what
/// it has seen of pods itself, and that may be late.
pub(crate) async fn gone(bed: &Bed, pod: &TestPod, token: &str) {
    let pods: Api<Pod> = Api::namespaced(bed.client.clone(), &bed.namespace);
    pods.delete(&pod.name, &DeleteParams::default().grace_period(0)).await.unwrap();
    let reviews: Api<TokenReview> = Api::all(bed.client.clone());
    let spec = json!({"token": token, "audiences": [AUDIENCE]});
    let review = serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap();
    eventually("the API server not to believe it", async || {
        let review = reviews.create(&PostParams::default(), &review).await.ok()?;
        review.status.is_none_or(|status| status.authenticated != Some(true)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_token_whose_pod_is_gone_proves_nothing() {
    let bed = Bed::new().await;
    let pod = bed.pod("op-0", "node-a").await;
    let token = pod.token(&bed.client, AUDIENCE).await;
    gone(&bed, &pod, &token).await;
    assert_eq!(refusal(bed.follow(&token, of_pod(&pod)).await), Code::Unauthenticated);
}

#[tokio::test]
async fn nobody_is_told_of_pods_that_are_not_its_own() {
    let bed = Bed::new().await;
    let (one, other) = (bed.pod("op-0", "node-a").await, bed.pod("op-1", "node-b").await);
    let node = bed.node_pod("node-a").await;
    bed.publish(&[(&one, "node-a", policy(1, "a=1")), (&other, "node-b", policy(2, "a=2"))]);
    let pod_token = one.token(&bed.client, AUDIENCE).await;
    let node_token = node.token(&bed.client, AUDIENCE).await;
    let elsewhere = bed.plane.namespace("elsewhere").await.unwrap();
    let namesake = token::pod(&bed.client, &elsewhere, "proxy", "node", "node-a").await;
    let namesake = namesake.token(&bed.client, AUDIENCE).await;
    let mut stale = of_pod(&one);
    stale.pod.as_mut().unwrap().uid = "another-incarnation".to_owned();
    for (what, token, hello) in [
        ("another pod", &pod_token, of_pod(&other)),
        ("another incarnation", &pod_token, stale),
        ("the pods of its node", &pod_token, of_node("node-a")),
        ("the pods of another node", &node_token, of_node("node-b")),
        ("a pod of its node, by the node's token", &node_token, of_pod(&one)),
        ("its node, as an account of the name in another namespace", &namesake, of_node("node-a")),
        ("nobody", &pod_token, Hello::default()),
    ] {
        let before = bed.refused("foreign");
        assert_eq!(refusal(bed.follow(token, hello).await), Code::PermissionDenied, "{what}");
        assert_eq!(bed.refused("foreign"), before + 1, "{what}");
    }
    let mut stream = bed.follow(&node_token, of_node("node-a")).await.unwrap();
    assert_eq!(stream.epochs().await, [("op-0".to_owned(), 1)].into());
}

#[tokio::test]
async fn a_verdict_on_anothers_pod_only_ends_the_stream() {
    let bed = Bed::new().await;
    let (one, other) = (bed.pod("op-0", "node-a").await, bed.pod("op-1", "node-a").await);
    bed.publish(&[(&one, "node-a", policy(1, "a=1")), (&other, "node-a", policy(2, "a=2"))]);
    let token = one.token(&bed.client, AUDIENCE).await;
    let mut stream = bed.follow(&token, of_pod(&one)).await.unwrap();
    stream.epochs().await;
    let id = PodId { namespace: other.namespace.clone(), name: other.name.clone(), uid: other.uid.clone() };
    let verdict = Verdict { pod: Some(id), epoch: 99, ..Verdict::default() };
    stream.reports.send(Report { content: Some(Content::Verdict(verdict)) }).await.unwrap();
    let ended = soon("the end", stream.updates.message()).await;
    assert_eq!(ended.unwrap_err().code(), Code::PermissionDenied);
    assert_eq!(bed.refused("foreign"), 1);
    assert_eq!(bed.receipt(&other), None);
}

#[tokio::test]
async fn who_says_too_much_of_one_policy_is_let_go() {
    let bed = Bed::new().await;
    let pod = bed.pod("op-0", "node-a").await;
    bed.publish(&[(&pod, "node-a", policy(1, "a=1"))]);
    let token = pod.token(&bed.client, AUDIENCE).await;
    let mut stream = bed.follow(&token, of_pod(&pod)).await.unwrap();
    let told = soon("the policy", stream.updates.message()).await.unwrap().unwrap();
    let id = PodId { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.clone() };
    for epoch in 0..17 {
        let digest = told.policies[0].digest;
        let verdict = Verdict { pod: Some(id.clone()), epoch, digest, ..Verdict::default() };
        // Where it is let go of already, it hears so below.
        drop(stream.reports.send(Report { content: Some(Content::Verdict(verdict)) }).await);
    }
    let ended = soon("the end", stream.updates.message()).await;
    assert_eq!(ended.unwrap_err().code(), Code::ResourceExhausted);
    assert_eq!(bed.refused("message"), 1);
}

#[tokio::test]
async fn only_a_manager_relays_and_asks_for_shards() {
    let bed = Bed::new().await;
    let pod = bed.pod("op-0", "node-a").await;
    let token = pod.token(&bed.client, AUDIENCE).await;
    for (count, path) in [(1, wire::RELAY), (2, wire::ASSIGN_SHARD)] {
        assert_eq!(call(&bed, path, Some(&token)).await, Code::PermissionDenied, "{path}");
        assert_eq!(bed.refused("foreign"), count);
    }
    assert_eq!(call(&bed, "/ctrlmesh.v1.Mesh/Other", Some(&token)).await, Code::Unimplemented);
}

#[tokio::test]
async fn plaintext_and_clients_without_our_ca_get_nothing() {
    let bed = Bed::new().await;
    let mut plain = TcpStream::connect(bed.address).await.unwrap();
    plain.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    // A reset is an end too.
    let _ended = soon("the end", plain.read_to_end(&mut answer)).await;
    assert!(!answer.windows(4).any(|bytes| bytes == b"HTTP"), "{answer:?}");
    until("plaintext to be counted", || bed.refused("tls") == 1).await;
    let mut manager = bed.manager("x");
    manager.ca = bed.path("mesh.crt");
    let refused = manager.connect(&ctrlmesh_runtime::drain::Drain::default()).await;
    assert!(matches!(refused, Err(GrpcError::Connect(_))), "{refused:?}");
    until("the refusal to be counted", || bed.refused("tls") == 2).await;
}

#[tokio::test]
async fn a_certificate_outside_the_constraints_is_refused() {
    let bed = Bed::new().await;
    let pod = bed.pod("op-0", "node-a").await;
    bed.publish(&[(&pod, "node-a", inside(policy(1, "a=1")))]);
    let token = pod.token(&bed.client, AUDIENCE).await;
    let mut link = bed.connect(&token).await.unwrap();
    // 10.96.0.1 is the API server's by the Service `kubernetes`.
    let within = link.sign(&csr(&["kubernetes.default.svc", "10.96.0.1"])).await.unwrap();
    assert_eq!(within.len(), 2);
    for outside in ["example.com", "10.96.0.2", "ctrlmesh-manager.ctrlmesh-system.svc"] {
        let before = bed.refused("csr");
        let answer = link.sign(&csr(&["kubernetes.default.svc", outside])).await;
        assert_eq!(refusal(answer), Code::InvalidArgument, "{outside}");
        assert_eq!(bed.refused("csr"), before + 1);
    }
}

#[tokio::test]
async fn a_pod_without_a_shard_or_a_sidecar_gets_no_certificate() {
    let bed = Bed::new().await;
    let pod = bed.pod("op-0", "node-a").await;
    let token = pod.token(&bed.client, AUDIENCE).await;
    let name = PodName { namespace: pod.namespace.clone(), name: pod.name.clone() };
    let notice = |uid: &str, policy: Option<CompiledPolicy>| EnrolledPod {
        name: name.clone(),
        uid: uid.to_owned(),
        node: Some("node-a".to_owned()),
        policy: policy.map(Arc::new),
    };
    let of_a_shard = |policy| CompiledPolicy::new(None, Some("ns/op".to_owned()), 0, policy);
    let by_the_node = of_a_shard(CompiledPolicy::nothing().policy);
    let of_a_shard = of_a_shard(inside(CompiledPolicy::nothing().policy));
    for (at, notices) in [
        vec![],
        vec![notice(&pod.uid, None)],
        vec![notice(&pod.uid, Some(CompiledPolicy::nothing()))],
        vec![notice("of another incarnation", Some(of_a_shard.clone()))],
        vec![notice(&pod.uid, Some(by_the_node))],
    ]
    .into_iter()
    .enumerate()
    {
        bed.store.publish(notices);
        let mut link = bed.connect(&token).await.unwrap();
        let answer = link.sign(&csr(&["kubernetes.default.svc"])).await;
        assert_eq!(refusal(answer), Code::PermissionDenied);
        assert_eq!(bed.refused("foreign"), u64::try_from(at).unwrap() + 1);
    }
    // It is waited for one that is about to be known.
    bed.store.publish([]);
    let mut link = bed.connect(&token).await.unwrap();
    let request = csr(&["kubernetes.default.svc"]);
    let (chain, ()) = tokio::join!(link.sign(&request), async {
        tokio::task::yield_now().await;
        bed.store.publish([notice(&pod.uid, Some(of_a_shard))]);
    });
    assert_eq!(chain.unwrap().len(), 2);
    // And no pod has as many as it likes.
    let mut refused = None;
    for _ in 0..100 {
        refused = link.sign(&request).await.err();
        if refused.is_some() {
            break;
        }
    }
    assert_eq!(refused.unwrap().code(), Code::ResourceExhausted);
}

/// A request for a certificate with these names.
pub(crate) fn csr(names: &[&str]) -> Vec<u8> {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let params = CertificateParams::new(names).unwrap();
    params.serialize_request(&KeyPair::generate().unwrap()).unwrap().der().to_vec()
}

#[tokio::test]
async fn a_huge_message_is_refused() {
    let bed = Bed::new().await;
    let pod = bed.pod("op-0", "node-a").await;
    let token = pod.token(&bed.client, AUDIENCE).await;
    let huge = Hello { version: "x".repeat(wire::MAX_REPORT_BYTES), ..of_pod(&pod) };
    assert_eq!(refusal(bed.follow(&token, huge).await), Code::OutOfRange);
    assert_eq!(bed.refused("message"), 1);
}

#[tokio::test]
async fn who_holds_many_connections_open_keeps_no_proxy_out() {
    let bed = Bed::new().await;
    let pod = bed.pod("op-0", "node-a").await;
    bed.publish(&[(&pod, "node-a", policy(1, "a=1"))]);
    let token = pod.token(&bed.client, AUDIENCE).await;
    let full = ctrlmesh_testbed::is_full();
    let count = if full { CONNECTIONS * 10 } else { CONNECTIONS };
    let attacker: SocketAddr = "127.0.0.9:0".parse().unwrap();
    let mut held = Vec::new();
    for _ in 0..count {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(attacker).unwrap();
        held.push(socket.connect(bed.address).await.unwrap());
    }
    let kept_out = u64::try_from(count - UNPROVEN_OF_ONE).unwrap();
    // Where the machine is so slow that some of those that were let in are given up already, others took their place.
    until("most to be refused", || bed.refused("too_many") + bed.refused("slow") >= kept_out).await;
    assert!(bed.refused("too_many") >= kept_out / 4 * 3, "{}", bed.refused("too_many"));
    let mut stream = bed.follow(&token, of_pod(&pod)).await.unwrap();
    assert_eq!(stream.epochs().await, [("op-0".to_owned(), 1)].into());
    // The few that were let in are let go of when they say nothing.
    until("the rest to be given up", || bed.refused("slow") >= u64::try_from(UNPROVEN_OF_ONE).unwrap()).await;
    drop(held);
}

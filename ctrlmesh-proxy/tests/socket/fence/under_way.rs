//! Writes under way when a slot is taken away.

use std::io;

use http::{StatusCode, Version};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_rustls::server::TlsStream;

use super::{BOTH, Bed, OWN, PATIENT, following, owning, request};
use crate::harness::client::Client;
use crate::harness::frames::{Frames, HEADERS, SETTINGS};
use crate::harness::pki::Pki;
use crate::harness::upstream::Upstream;
use crate::harness::{soon, until};

#[tokio::test(flavor = "multi_thread")]
async fn a_write_under_way_delays_the_acknowledgement() {
    for version in BOTH {
        let mut bed = Bed::new(owning(1, &[9, 31]), &PATIENT).await;
        let own = format!("{OWN}/w");
        let answer = bed.hold(version, &own).await;
        bed.stream.send(&owning(2, &[9])).await;
        bed.until_refused(&own).await;
        assert!(bed.stream.is_silent());
        bed.release.notify_one();
        assert_eq!(soon("the answer", answer).await.unwrap().status, StatusCode::OK);
        let verdict = bed.stream.verdict().await;
        assert_eq!((verdict.epoch, verdict.refused.as_str()), (2, ""));
        assert_eq!(bed.counted("writes_cut").await, 0.0);
    }
}

/// The API server may carry it out.
#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_its_client_gave_up_is_waited_for() {
    for version in BOTH {
        let mut bed = Bed::new(owning(1, &[9, 31]), &PATIENT).await;
        let own = format!("{OWN}/w");
        let given_up = bed.hold(version, &own).await;
        given_up.abort();
        assert!(given_up.await.is_err());
        until("the client to be gone", || async { bed.proxy.metric("ctrlmesh_proxy_streams").await == 0.0 }).await;
        bed.stream.send(&owning(2, &[9])).await;
        // Of the same slot. Until the policy is in force, the API server gets it.
        bed.until_refused(&format!("{OWN}/asked")).await;
        assert!(bed.stream.is_silent());
        bed.release.notify_one();
        assert_eq!(bed.stream.verdict().await.epoch, 2);
        let writes = bed.written().into_iter().filter(|write| *write == format!("PUT {own}"));
        assert_eq!((bed.counted("writes_cut").await, writes.count()), (0.0, 1));
    }
}

/// As long as any other.
#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_its_client_gave_up_is_cut_in_the_end() {
    for version in BOTH {
        let mut bed = Bed::new(owning(1, &[9, 31]), &["--write-drain-timeout", "50ms"]).await;
        let given_up = bed.hold(version, &format!("{OWN}/w")).await;
        given_up.abort();
        assert!(given_up.await.is_err());
        until("the client to be gone", || async { bed.proxy.metric("ctrlmesh_proxy_streams").await == 0.0 }).await;
        bed.stream.send(&owning(2, &[9])).await;
        assert_eq!(bed.stream.verdict().await.epoch, 2);
        until("the cut to be counted", || async { bed.counted("writes_cut").await == 1.0 }).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_to_a_slot_that_stays_delays_nothing() {
    let mut bed = Bed::new(owning(1, &[9, 31]), &[]).await;
    let answer = bed.hold(Version::HTTP_2, &format!("{OWN}/w")).await;
    bed.stream.send(&owning(2, &[31])).await;
    assert_eq!(bed.stream.verdict().await.epoch, 2);
    bed.release.notify_one();
    assert_eq!(soon("the answer", answer).await.unwrap().status, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_takes_too_long_is_cut() {
    for version in BOTH {
        let mut bed = Bed::new(owning(1, &[9, 31]), &["--write-drain-timeout", "50ms"]).await;
        let cut = bed.hold(version, &format!("{OWN}/w")).await;
        let kept = bed.hold(version, "/apis/example.com/v1/namespaces/shop/widgets/w").await;
        bed.stream.send(&owning(2, &[9])).await;
        let answer = soon("the answer", cut).await.unwrap();
        let status: Value = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!((answer.status, &status["reason"]), (StatusCode::GATEWAY_TIMEOUT, &json!("Timeout")), "{status}");
        assert_eq!(bed.stream.verdict().await.epoch, 2);
        assert_eq!(bed.counted("writes_cut").await, 1.0);
        bed.release.notify_waiters();
        assert_eq!(soon("the other", kept).await.unwrap().status, StatusCode::OK);
    }
}

/// Once a write of this protocol has arrived.
async fn until_written(mut stream: TlsStream<TcpStream>, version: Version) -> TlsStream<TcpStream> {
    if version == Version::HTTP_2 {
        let mut frames = Frames::begin(stream).await;
        frames.send(SETTINGS, 0, 0, &[]).await;
        while frames.next().await.unwrap().kind != HEADERS {}
        return frames.into_stream();
    }
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n{}") {
        assert!(stream.read_buf(&mut head).await.unwrap() > 0);
    }
    stream
}

/// The kernel would send what it holds of a cut write once a partition is over.
#[tokio::test(flavor = "multi_thread")]
async fn a_cut_write_resets_its_connection() {
    for (version, protocol) in BOTH.into_iter().zip(["http/1.1", "h2"]) {
        let pki = Pki::new();
        let (arrived, mut writes) = mpsc::unbounded_channel();
        let upstream = Upstream::bytes(pki.server(&[protocol]), move |stream| {
            let arrived = arrived.clone();
            async move { arrived.send(until_written(stream, version).await).unwrap() }
        })
        .await;
        let quickly = ["--write-drain-timeout", "50ms"];
        let (proxy, _manager, mut stream) = following(&pki, upstream.address, owning(1, &[9, 31]), &quickly).await;
        let mut client = Client::connect(&pki, proxy.address, version).await;
        let answer = tokio::spawn(async move { client.ask(request("PUT", &format!("{OWN}/w"))).await });
        let mut writing = soon("the write", writes.recv()).await.unwrap();
        stream.send(&owning(2, &[9])).await;
        assert_eq!(soon("the answer", answer).await.unwrap().status, StatusCode::GATEWAY_TIMEOUT);
        let mut rest = Vec::new();
        let end = soon("the end", writing.read_to_end(&mut rest)).await.unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::ConnectionReset, "{version:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_stream_does_not_acknowledge_what_is_not_settled() {
    let mut bed = Bed::new(owning(1, &[9, 31]), &[]).await;
    let own = format!("{OWN}/w");
    let answer = bed.hold(Version::HTTP_2, &own).await;
    bed.stream.send(&owning(2, &[9])).await;
    bed.until_refused(&own).await;
    let (stream, hello) = {
        bed.stream.end();
        bed.manager.stream().await
    };
    bed.stream = stream;
    assert_eq!(hello.known, []);
    bed.stream.send(&owning(2, &[9])).await;
    bed.release.notify_one();
    assert_eq!(soon("the answer", answer).await.unwrap().status, StatusCode::OK);
    assert_eq!(bed.stream.verdict().await.epoch, 2);
}

//! An API server that falls silent, or has not sent its SETTINGS yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::harness::frames::{ACK, DATA, END, Frames, HEADERS, PING, SETTINGS, asked, operator};
use crate::harness::pki::Pki;
use crate::harness::proxy::Proxy;
use crate::harness::upstream::Upstream;
use crate::harness::{soon, until};
use bytes::Bytes;
use h2::RecvStream;
use h2::client::SendRequest;
use http::StatusCode;
use tokio::sync::Notify;

/// Long enough for an answer on a busy machine, since a third of it is what a PING has.
const SILENCE: [&str; 2] = ["--silence-timeout", "15s"];

/// More requests at once than an API server takes on a connection, and fewer than it takes on two.
const BURST: usize = 150;

/// An operator, and its watch, of which the head has come.
async fn watching(pki: &Pki, proxy: &Proxy) -> (SendRequest<Bytes>, RecvStream) {
    let mut send = operator(pki, proxy).await.ready().await.unwrap();
    let (watch, _) = send.send_request(asked("/api/v1/pods?watch=1"), true).unwrap();
    let watch = soon("the watch", watch).await.unwrap().into_body();
    (send, watch)
}

/// The API server is dead, or what lies before it has forgotten the connection: no packet says so.
#[tokio::test]
async fn a_connection_without_a_pong_is_given_up() {
    let pki = Pki::new();
    let (connections, pings) = <(Arc<AtomicUsize>, Arc<AtomicUsize>)>::default();
    let pinged = pings.clone();
    let upstream = Upstream::bytes(pki.server(&["h2"]), move |stream| {
        let (pings, dead) = (pings.clone(), connections.fetch_add(1, Ordering::SeqCst) == 0);
        async move {
            let mut frames = Frames::begin(stream).await;
            frames.send(SETTINGS, 0, 0, &[]).await;
            while let Some(frame) = frames.next().await {
                if frame.kind == PING && frame.flags & ACK == 0 {
                    pings.fetch_add(1, Ordering::SeqCst);
                    if !dead {
                        frames.send(PING, ACK, 0, &frame.payload).await;
                    }
                }
                if frame.kind == HEADERS {
                    frames.answer(frame.stream).await;
                    let end = if dead { 0 } else { END };
                    frames.send(DATA, end, frame.stream, b"said").await;
                }
            }
        }
    })
    .await;
    let proxy = Proxy::start(&pki, upstream.address, &SILENCE);
    let (_send, mut watch) = watching(&pki, &proxy).await;
    assert_eq!(soon("an event", watch.data()).await.unwrap().unwrap(), "said");
    let end = soon("the watch to break off", watch.data()).await;
    assert!(end.is_none_or(|data| data.is_err()));
    assert_eq!(pinged.load(Ordering::SeqCst), 1);
    until("it to be counted", || async {
        proxy.metric("ctrlmesh_proxy_upstream_errors_total{reason=\"timeout\"}").await == 1.0
    })
    .await;
    let mut send = operator(&pki, &proxy).await.ready().await.unwrap();
    let (answer, _) = send.send_request(asked("/api"), true).unwrap();
    assert_eq!(soon("an answer", answer).await.unwrap().status(), StatusCode::OK);
    assert_eq!(upstream.connections(), 2);
}

#[tokio::test]
async fn a_quiet_connection_whose_pings_are_answered_stays() {
    let pki = Pki::new();
    let upstream = Upstream::bytes(pki.server(&["h2"]), |stream| async move {
        let mut frames = Frames::begin(stream).await;
        frames.send(SETTINGS, 0, 0, &[]).await;
        let (mut watch, mut pings) = (0, 0);
        while let Some(frame) = frames.next().await {
            if frame.kind == HEADERS {
                watch = frame.stream;
                frames.answer(watch).await;
            }
            if frame.kind == PING && frame.flags & ACK == 0 {
                frames.send(PING, ACK, 0, &frame.payload).await;
                pings += 1;
            }
            if pings == 2 {
                frames.send(DATA, END, watch, b"said").await;
            }
        }
    })
    .await;
    let proxy = Proxy::start(&pki, upstream.address, &SILENCE);
    let (_send, mut watch) = watching(&pki, &proxy).await;
    assert_eq!(soon("an event", watch.data()).await.unwrap().unwrap(), "said");
    assert_eq!(upstream.connections(), 1);
}

#[tokio::test]
async fn an_unanswered_request_retires_its_connection() {
    let pki = Pki::new();
    let go_on = Arc::<Notify>::default();
    let (next, connections) = (go_on.clone(), Arc::<AtomicUsize>::default());
    let upstream = Upstream::bytes(pki.server(&["h2"]), move |stream| {
        let (next, hangs) = (next.clone(), connections.fetch_add(1, Ordering::SeqCst) == 0);
        async move {
            let mut frames = Frames::begin(stream).await;
            frames.send(SETTINGS, 0, 0, &[]).await;
            let mut watch = None;
            loop {
                let frame = tokio::select! {
                    () = next.notified(), if watch.is_some() => {
                        frames.send(DATA, END, watch.unwrap(), b"said").await;
                        continue;
                    }
                    Some(frame) = frames.next() => frame,
                    else => return,
                };
                if frame.kind == HEADERS && (!hangs || watch.is_none()) {
                    frames.answer(frame.stream).await;
                    watch = hangs.then_some(frame.stream);
                    if !hangs {
                        frames.send(DATA, END, frame.stream, b"").await;
                    }
                }
            }
        }
    })
    .await;
    let proxy = Proxy::start(&pki, upstream.address, &["--response-timeout", "10s"]);
    let (mut send, mut watch) = watching(&pki, &proxy).await;
    for (path, status) in [("/hung", StatusCode::GATEWAY_TIMEOUT), ("/api", StatusCode::OK), ("/api", StatusCode::OK)] {
        let (answer, _) = send.send_request(asked(path), true).unwrap();
        assert_eq!(soon("an answer", answer).await.unwrap().status(), status, "{path}");
    }
    assert_eq!(upstream.connections(), 2);
    go_on.notify_one();
    assert_eq!(soon("the rest of the watch", watch.data()).await.unwrap().unwrap(), "said");
}

#[tokio::test]
async fn early_requests_keep_to_the_default_stream_limit() {
    const TAKEN: u32 = 100;
    let pki = Pki::new();
    let (asked_for, refused) = <(Arc<AtomicUsize>, Arc<AtomicUsize>)>::default();
    let all = Arc::<Notify>::default();
    let (count, refusals, whole) = (asked_for.clone(), refused.clone(), all.clone());
    let upstream = Upstream::bytes(pki.server(&["h2"]), move |stream| {
        let (count, refusals, whole) = (count.clone(), refusals.clone(), whole.clone());
        async move {
            let (mut frames, mut taken) = (Frames::begin(stream).await, 0);
            while let Some(frame) = frames.next().await {
                if frame.kind != HEADERS {
                    continue;
                }
                taken += 1;
                if taken > TAKEN {
                    refusals.fetch_add(1, Ordering::SeqCst);
                }
                if count.fetch_add(1, Ordering::SeqCst) + 1 == BURST {
                    whole.notify_one();
                }
            }
        }
    })
    .await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    let mut send = operator(&pki, &proxy).await;
    let mut answers = Vec::new();
    for _ in 0..BURST {
        send = send.ready().await.unwrap();
        answers.push(send.send_request(asked("/api"), true).unwrap().0);
    }
    soon("all requests", all.notified()).await;
    assert_eq!(refused.load(Ordering::SeqCst), 0);
    assert_eq!(upstream.connections(), 2);
}

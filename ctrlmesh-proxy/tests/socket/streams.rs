//! Connections that carry many streams, between an operator and an API server on bare HTTP/2.

use std::sync::Arc;
use std::time::Duration;

use crate::harness::frames::{asked, operator};
use crate::harness::pki::Pki;
use crate::harness::proxy::Proxy;
use crate::harness::soon;
use crate::harness::upstream::Upstream;
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use tokio::sync::Notify;

/// The size of responses that nobody reads: more than a stream's window.
const FLOOD_BYTES: usize = 2 << 20;

/// An API server on bare HTTP/2, which allows `streams` at once and does `answer` with each.
async fn http2<A, F>(pki: &Pki, streams: u32, answer: A) -> Upstream
where
    A: Fn(Request<h2::RecvStream>, h2::server::SendResponse<Bytes>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    Upstream::bytes(pki.server(&["h2"]), move |stream| {
        let answer = answer.clone();
        async move {
            let mut builder = h2::server::Builder::new();
            builder.max_concurrent_streams(streams);
            let mut connection = builder.handshake(stream).await.unwrap();
            while let Some(Ok((request, respond))) = connection.accept().await {
                let last = request.uri().path() == "/last";
                tokio::spawn(answer(request, respond));
                if last {
                    connection.graceful_shutdown();
                }
            }
        }
    })
    .await
}

fn ok() -> Response<()> {
    Response::new(())
}

#[tokio::test]
async fn a_goaway_reaches_the_client_and_open_streams_go_on() {
    let pki = Pki::new();
    let go_on = Arc::<Notify>::default();
    let next = go_on.clone();
    let upstream = http2(&pki, 100, move |request, mut respond| {
        let next = next.clone();
        async move {
            let mut body = respond.send_response(ok(), false).unwrap();
            if request.uri().path() == "/watch" {
                next.notified().await;
            }
            body.send_data(Bytes::from_static(b"said"), true).unwrap();
        }
    })
    .await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    let mut send = operator(&pki, &proxy).await.ready().await.unwrap();
    let (watch, _) = send.send_request(asked("/watch"), true).unwrap();
    let mut watch = soon("the watch", watch).await.unwrap().into_body();
    let (last, _) = send.send_request(asked("/last"), true).unwrap();
    soon("the last answer", last).await.unwrap();
    let leaving = async {
        while let Ok(ready) = send.clone().ready().await {
            send = ready;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon("the client's own GOAWAY", leaving).await;
    go_on.notify_one();
    assert_eq!(soon("the rest of the watch", watch.data()).await.unwrap().unwrap(), "said");
    // The next connection goes elsewhere.
    let mut next = operator(&pki, &proxy).await.ready().await.unwrap();
    let (answer, _) = next.send_request(asked("/api"), true).unwrap();
    assert_eq!(soon("an answer", answer).await.unwrap().status(), StatusCode::OK);
    assert_eq!(upstream.connections(), 2);
}

#[tokio::test]
async fn beyond_the_stream_limit_another_connection_opens() {
    let pki = Pki::new();
    let release = Arc::new(tokio::sync::Semaphore::new(0));
    let arrived = Arc::<Notify>::default();
    let (released, there) = (release.clone(), arrived.clone());
    let upstream = http2(&pki, 2, move |request, mut respond| {
        let (released, there) = (released.clone(), there.clone());
        async move {
            if request.uri().path() == "/held" {
                there.notify_one();
                released.acquire().await.unwrap().forget();
            }
            respond.send_response(ok(), true).unwrap();
        }
    })
    .await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    let mut send = operator(&pki, &proxy).await.ready().await.unwrap();
    let (first, _) = send.send_request(asked("/first"), true).unwrap();
    soon("the limit to be known", first).await.unwrap();
    let mut held = Vec::new();
    for _ in 0..5 {
        send = send.ready().await.unwrap();
        held.push(send.send_request(asked("/held"), true).unwrap().0);
        // The limit of a connection is known once something came back on it.
        soon("the request", arrived.notified()).await;
    }
    assert_eq!(upstream.connections(), 3);
    let (more, _) = send.send_request(asked("/more"), true).unwrap();
    soon("an answer beside them", more).await.unwrap();
    release.add_permits(5);
    for answer in held {
        assert_eq!(soon("an answer", answer).await.unwrap().status(), StatusCode::OK);
    }
    assert_eq!(upstream.connections(), 3);
}

#[tokio::test]
async fn unread_streams_block_no_other_and_cost_their_windows() {
    let pki = Pki::new();
    let upstream = http2(&pki, 200, |request, mut respond| async move {
        let mut body = respond.send_response(ok(), false).unwrap();
        let size = if request.uri().path() == "/large" { FLOOD_BYTES } else { 2 };
        body.reserve_capacity(size);
        body.send_data(Bytes::from(vec![b'x'; size]), true).unwrap();
        // Held until it is sent: dropping it resets the stream.
        let _reset = std::future::poll_fn(|cx| body.poll_reset(cx)).await;
    })
    .await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    let mut send = operator(&pki, &proxy).await.ready().await.unwrap();
    let before = proxy.resident_bytes();
    let mut stalled = Vec::new();
    for _ in 0..60 {
        send = send.ready().await.unwrap();
        let (answer, _) = send.send_request(asked("/large"), true).unwrap();
        // Its head is read, its body is not.
        stalled.push(soon("a head", answer).await.unwrap());
    }
    let (answer, _) = send.send_request(asked("/small"), true).unwrap();
    let mut body = soon("a head", answer).await.unwrap().into_body();
    assert_eq!(soon("a body beside them", body.data()).await.unwrap().unwrap().len(), 2);
    let grown = proxy.resident_bytes().saturating_sub(before);
    assert!(grown < 200 << 20, "the proxy grew by {grown} bytes");
}

#[tokio::test]
async fn over_http2_100_continue_passes_through() {
    let pki = Pki::new();
    let upstream = http2(&pki, 100, |request, mut respond| async move {
        assert_eq!(request.headers()["expect"], "100-continue");
        let early = Response::builder().status(StatusCode::CONTINUE).body(()).unwrap();
        respond.send_informational(early).unwrap();
        let mut body = request.into_body();
        let said = body.data().await.unwrap().unwrap();
        let mut answer = respond.send_response(ok(), false).unwrap();
        answer.send_data(said, true).unwrap();
    })
    .await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    let mut send = operator(&pki, &proxy).await.ready().await.unwrap();
    let mut request = asked("/api");
    request.headers_mut().insert("expect", "100-continue".parse().unwrap());
    let (mut answer, mut body) = send.send_request(request, false).unwrap();
    let early = soon("100 Continue", std::future::poll_fn(|cx| answer.poll_informational(cx)));
    assert_eq!(early.await.unwrap().unwrap().status(), StatusCode::CONTINUE);
    body.send_data(Bytes::from_static(b"body"), true).unwrap();
    let mut said = soon("the answer", answer).await.unwrap().into_body();
    assert_eq!(soon("its body", said.data()).await.unwrap().unwrap(), "body");
}

#[tokio::test]
async fn what_the_api_server_says_before_its_answer_passes_over_http2() {
    let pki = Pki::new();
    let upstream = http2(&pki, 100, |_request, mut respond| async move {
        for hint in ["1", "2"] {
            let early = Response::builder().status(StatusCode::EARLY_HINTS).header("link", hint);
            respond.send_informational(early.body(()).unwrap()).unwrap();
        }
        respond.send_response(ok(), true).unwrap();
    })
    .await;
    let proxy = Proxy::start(&pki, upstream.address, &[]);
    let mut send = operator(&pki, &proxy).await.ready().await.unwrap();
    let (mut answer, _) = send.send_request(asked("/api"), true).unwrap();
    for hint in ["1", "2"] {
        let early = soon("hints", std::future::poll_fn(|cx| answer.poll_informational(cx)));
        let early = early.await.unwrap().unwrap();
        assert_eq!((early.status(), early.headers()["link"].as_bytes()), (StatusCode::EARLY_HINTS, hint.as_bytes()));
    }
    assert_eq!(soon("the answer", answer).await.unwrap().status(), StatusCode::OK);
}

//! A proxy, or a manager, whose machine is gone: nothing comes from it any more, not even the end of its connection.

use std::net::SocketAddr;

use ctrlmesh_common::wire::{Report, Said, Update, Verdict};
use ctrlmesh_proxy::channel::Link;
use ctrlmesh_proxy::drain::Drain;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;

use crate::bed::{AUDIENCE, Bed, of_pod, policy, soon, until};
use crate::token::TestPod;

/// A way to `address` for one connection, on which nothing moves any more, nor ends, once it is `cut`.
async fn way_to(address: SocketAddr, cut: CancellationToken) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let way = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut near, _) = listener.accept().await.unwrap();
        let mut far = TcpStream::connect(address).await.unwrap();
        tokio::select! {
            _ended = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
            () = cut.cancelled() => std::future::pending().await,
        }
    });
    way
}

/// A stream of the pod that has its policy, over a way that can be `cut`.
async fn follows(
    bed: &Bed,
    pod: &TestPod,
    cut: &CancellationToken,
) -> (Link, mpsc::Sender<Report>, Streaming<Update>) {
    let token = pod.token(&bed.client, AUDIENCE).await;
    let stream = TcpStream::connect(way_to(bed.address, cut.clone()).await).await.unwrap();
    let mut link = bed.manager(&token).connect_over(stream, &Drain::default()).await.unwrap();
    let (reports, outbound) = mpsc::channel(8);
    reports.send(Report { said: Some(Said::Hello(of_pod(pod))) }).await.unwrap();
    let mut updates = link.follow(ReceiverStream::new(outbound), &[]).await.unwrap();
    let update = soon("an update", updates.message()).await.unwrap().unwrap();
    let Some(entry) = update.policies.into_iter().next() else { panic!("no policy") };
    let verdict =
        Verdict { pod: entry.pod, digest: entry.digest, epoch: 1, refused: String::new() };
    reports.send(Report { said: Some(Said::Verdict(verdict)) }).await.unwrap();
    (link, reports, updates)
}

#[tokio::test]
async fn each_notices_that_the_other_has_fallen_silent() {
    let bed = Bed::new().await;
    let pod = bed.pod("op-0", "node-a").await;
    bed.publish(&[(&pod, "node-a", policy(1, "a=1"))]);
    let cut = CancellationToken::new();
    let (_link, _reports, mut updates) = follows(&bed, &pod, &cut).await;
    until("its verdict", || bed.receipt(&pod).is_some_and(|one| one.connected)).await;
    assert_eq!(bed.metric("push_clients"), 1);
    cut.cancel();
    // The proxy gives the stream up, and would begin another.
    soon("the stream to end", updates.message()).await.unwrap_err();
    until("it to be away", || bed.receipt(&pod).is_some_and(|one| !one.connected)).await;
    until("its room to be given back", || bed.metric("push_clients") == 0).await;
}

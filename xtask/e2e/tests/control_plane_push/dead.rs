//! Proxies and managers whose machine vanishes without closing its connections.

use std::net::SocketAddr;

use ctrlmesh_runtime::drain::Drain;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::bed::{AUDIENCE, Bed, of_pod, policy, soon, until};
use crate::stream::Stream;

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

#[tokio::test]
async fn each_notices_that_the_other_has_fallen_silent() {
    let bed = Bed::new().await;
    let pod = bed.pod("op-0", "node-a").await;
    bed.publish(&[(&pod, "node-a", policy(1, "a=1"))]);
    let token = pod.token(&bed.client, AUDIENCE).await;
    let cut = CancellationToken::new();
    let way = TcpStream::connect(way_to(bed.address, cut.clone()).await).await.unwrap();
    let link = bed.manager(&token).connect_over(way, &Drain::default()).await.unwrap();
    let mut stream = Stream::begin(link, of_pod(&pod), &[]).await.unwrap();
    let update = stream.update().await;
    stream.applies(&update.policies[0], 1).await;
    until("its verdict", || bed.receipt(&pod).is_some_and(|one| one.connected)).await;
    assert_eq!(bed.metric("push_clients"), 1);
    cut.cancel();
    // The proxy gives the stream up, and would begin another.
    soon("the stream to end", stream.updates.message()).await.unwrap_err();
    until("it to be away", || bed.receipt(&pod).is_some_and(|one| !one.connected)).await;
    until("its room to be given back", || bed.metric("push_clients") == 0).await;
}

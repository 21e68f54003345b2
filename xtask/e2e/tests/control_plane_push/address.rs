//! Proxies find the manager at a new address.

use std::net::{IpAddr, Ipv4Addr};

use ctrlmesh_runtime::drain::Drain;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;

use crate::bed::{AUDIENCE, Bed, soon};

/// An address of this machine at which the manager is not.
const FORMER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

/// The Service was made anew: its former address leads nowhere by now, or to somebody else, who says nothing or
/// nonsense.
#[tokio::test]
async fn a_manager_that_left_its_address_is_found_by_its_name() {
    let bed = Bed::new().await;
    let pod = bed.pod("op-0", "a").await;
    let mut manager = bed.manager(&pod.token(&bed.client, AUDIENCE).await);
    manager.service_ip = Some(FORMER);
    let drain = Drain::default();
    soon("the manager past nobody", manager.connect(&drain)).await.unwrap();

    let other = TcpListener::bind((FORMER, bed.address.port())).await.unwrap();
    let (connected, accepted) = tokio::join!(manager.connect(&drain), other.accept());
    connected.expect("the manager past one who says nothing");
    drop(accepted);

    let nonsense = async {
        let (mut stream, _) = other.accept().await.unwrap();
        stream.write_all(b"SSH-2.0-other\r\n").await.unwrap();
        stream
    };
    let (connected, _stream) = tokio::join!(manager.connect(&drain), nonsense);
    connected.expect("the manager past one who says nonsense");
}

//! Sockets in the network namespaces of pods.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use ctrlmesh_intercept::listener::{self, Namespace};
use tokio::net::TcpSocket;
use tokio::task;

/// A socket to connect with to an address of this family. `None`: in this process's own namespace.
///
/// # Errors
/// If the namespace cannot be entered, or does not know the family.
pub async fn pod_socket(namespace: Option<Arc<Namespace>>, family: IpAddr) -> io::Result<TcpSocket> {
    let Some(namespace) = namespace else {
        return if family.is_ipv6() { TcpSocket::new_v6() } else { TcpSocket::new_v4() };
    };
    // A thread has to enter the namespace.
    let made = task::spawn_blocking(move || listener::outgoing(&namespace, family)).await;
    made.map_err(io::Error::other)?.map(TcpSocket::from_std_stream).map_err(io::Error::other)
}

//! Tells for whom a connection is that the node's kernel has redirected to a sidecar.
//!
//! A sidecar cannot read the kernel's tables. Connections to the API server's own addresses carry no number in their
//! source, so they are known without the kernel. Of others the kernel tells the destination, and whether it was the
//! port alone that led here, for as long as the node's proxy has it do so.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd as _;

use ctrlmesh_common::kernel::{BY_PORT, Decoded, is_reserved};
use nix::sys::socket;
use nix::sys::socket::sockopt::{Ip6tOriginalDst, OriginalDst};
use nix::sys::socket::{SockaddrIn, SockaddrIn6};
use tokio::net::TcpStream;

use crate::net::accept::{Origin, Purpose};
use crate::policy::Current;

/// What the kernel says of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Original {
    destination: SocketAddr,
    by_port: bool,
}

/// The origin of a connection, as long as the policy is this one. `None` for connections of others, and for those whose
/// destination the kernel does not tell.
pub(super) fn origin(policy: &Current, stream: &TcpStream, own: SocketAddr, client: SocketAddr) -> Option<Origin> {
    let original = || original(stream).filter(|one| !is_reserved(one.destination.ip().into()));
    decide(own, client, original, || policy.borrow().egress_ports().is_empty())
}

fn decide(
    own: SocketAddr,
    client: SocketAddr,
    original: impl FnOnce() -> Option<Original>,
    has_no_rule: impl FnOnce() -> bool,
) -> Option<Origin> {
    // Redirected connections arrive at loopback addresses, which nobody outside the pod can dial.
    if !own.ip().to_canonical().is_loopback() {
        return None;
    }
    if !carries_number(own.ip(), client.ip()) {
        return Some(Origin::default());
    }
    match original() {
        Some(Original { destination, by_port: true }) => {
            Some(Origin { purpose: Purpose::OtherServer, destination: Some(destination), ..Origin::default() })
        }
        // The API server behind one of many addresses.
        Some(_) => Some(Origin::default()),
        None => has_no_rule().then(Origin::default),
    }
}

/// Whether it stands for more than one address.
fn carries_number(own: IpAddr, client: IpAddr) -> bool {
    Decoded::read(own.into(), client.into()).is_some_and(|decoded| decoded.host.is_some())
}

/// The kernel answers with an address of the destination's own family.
fn original(stream: &TcpStream) -> Option<Original> {
    let socket = stream.as_fd();
    if let Ok(address) = socket::getsockopt(&socket, OriginalDst) {
        let by_port = address.sin_zero.starts_with(&BY_PORT.to_ne_bytes());
        let address = SockaddrIn::from(address);
        return Some(Original { destination: (address.ip(), address.port()).into(), by_port });
    }
    let address = socket::getsockopt(&socket, Ip6tOriginalDst).ok()?;
    let by_port = address.sin6_flowinfo == BY_PORT;
    let address = SockaddrIn6::from(address);
    Some(Original { destination: (address.ip(), address.port()).into(), by_port })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn without_the_kernel_only_what_is_surely_for_the_api_server_is_served() {
        for (own, client, has_no_rule, is_served) in [
            ("127.64.1.2:15001", "127.0.0.1:4000", false, true),
            ("127.64.1.2:15001", "127.128.0.7:4000", false, false),
            ("127.64.1.2:15001", "127.128.0.7:4000", true, true),
            ("127.0.0.1:15001", "127.0.0.1:4000", false, true),
            ("10.0.0.1:15001", "10.0.0.2:4000", true, false),
        ] {
            let origin = decide(address(own), address(client), || None, || has_no_rule);
            assert_eq!(origin, is_served.then(Origin::default), "{own} {client}");
        }
    }

    #[test]
    fn the_kernel_tells_other_servers_from_the_api_server_behind_many_addresses() {
        for destination in ["10.96.0.1:443", "[2001:db8::1]:443"] {
            let told = |by_port| {
                let original = || Some(Original { destination: address(destination), by_port });
                decide(address("127.64.1.2:15001"), address("127.128.0.7:4000"), original, || false).unwrap()
            };
            assert_eq!(told(false), Origin::default());
            let other = told(true);
            assert_eq!((other.purpose, other.destination), (Purpose::OtherServer, Some(address(destination))));
        }
    }
}

//! Opens TCP listeners, also on machines without IPv6.

use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use thiserror::Error;
use tokio::net::{TcpListener, TcpSocket};
use tracing::info;

/// Connections that wait to be accepted; the kernel allows no more by itself (`net.core.somaxconn`). A client that
/// finds the queue full tries again only after a second, then two.
const BACKLOG: u32 = 4096;

#[derive(Debug, Error)]
#[error("listen at {address}")]
pub struct ListenError {
    pub address: SocketAddr,
    pub source: io::Error,
}

/// The address of all interfaces, IPv4 and IPv6. By default Linux delivers IPv4 connections to an IPv6 socket too
/// (ipv6(7), `IPV6_V6ONLY`).
pub fn all_interfaces(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))
}

/// The IPv4 address to try after listening at `address` failed with `error`: only for [`all_interfaces`], on a machine
/// without IPv6.
pub fn ipv4_fallback(address: SocketAddr, error: &io::Error) -> Option<SocketAddr> {
    let taken = matches!(error.kind(), ErrorKind::AddrInUse | ErrorKind::PermissionDenied);
    let applies = address.ip() == Ipv6Addr::UNSPECIFIED && !taken;
    applies.then(|| SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port())))
}

/// Listens at `address`, and logs the address together with `purpose`.
///
/// # Errors
/// If the address is taken, not allowed or not of this machine.
pub fn listen(purpose: &'static str, address: SocketAddr) -> Result<TcpListener, ListenError> {
    let failed = |source| ListenError { address, source };
    let listener = match bind(address) {
        Err(error) if let Some(v4) = ipv4_fallback(address, &error) => bind(v4),
        bound => bound,
    };
    let listener = listener.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    info!(purpose, address = %bound, "listening");
    Ok(listener)
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_all_interfaces_fall_back_to_ipv4() {
        // EAFNOSUPPORT, of a kernel without IPv6.
        let unknown = io::Error::from_raw_os_error(97);
        let v4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 8080));
        assert_eq!(ipv4_fallback(all_interfaces(8080), &unknown), Some(v4));
        assert_eq!(ipv4_fallback("[::1]:8080".parse().unwrap(), &unknown), None);
        assert_eq!(ipv4_fallback(v4, &unknown), None);
        let taken = io::Error::from(ErrorKind::AddrInUse);
        assert_eq!(ipv4_fallback(all_interfaces(8080), &taken), None);
    }
}

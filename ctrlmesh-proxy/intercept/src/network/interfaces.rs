//! The addresses of the interfaces of a network namespace.

use std::io;
use std::net::IpAddr;

use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use nix::net::if_::InterfaceFlags;

/// The addresses of all interfaces in the network namespace of the calling thread, in their order, and whether each is
/// one of loopback.
///
/// # Errors
/// If the kernel does not tell.
pub fn addresses() -> io::Result<Vec<(IpAddr, bool)>> {
    Ok(getifaddrs()?.filter_map(|one| Some((ip(&one)?, one.flags.contains(InterfaceFlags::IFF_LOOPBACK)))).collect())
}

fn ip(one: &InterfaceAddress) -> Option<IpAddr> {
    let address = one.address.as_ref()?;
    let v4 = address.as_sockaddr_in().map(|v4| IpAddr::from(v4.ip()));
    v4.or_else(|| Some(IpAddr::from(address.as_sockaddr_in6()?.ip())))
}

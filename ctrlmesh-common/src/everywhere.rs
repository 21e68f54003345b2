//! How is listened at every address of a machine, whatever it speaks?

use std::io::{Error, ErrorKind};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

/// Every address, of both families: by default Linux gives a socket for all of IPv6 what comes over IPv4 too (ipv6(7),
/// `IPV6_V6ONLY`).
pub fn everywhere(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))
}

/// What to listen at where `address` failed with `error`: every address of IPv4, where every one of IPv6 was meant and
/// this machine has no IPv6.
pub fn without_ipv6(address: SocketAddr, error: &Error) -> Option<SocketAddr> {
    let taken = matches!(error.kind(), ErrorKind::AddrInUse | ErrorKind::PermissionDenied);
    let meant = address.ip() == Ipv6Addr::UNSPECIFIED && !taken;
    meant.then(|| SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_means_every_address_is_given_those_of_ipv4() {
        // EAFNOSUPPORT, of a kernel without IPv6.
        let unknown = Error::from_raw_os_error(97);
        let v4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 8080));
        assert_eq!(without_ipv6(everywhere(8080), &unknown), Some(v4));
        assert_eq!(without_ipv6("[::1]:8080".parse().unwrap(), &unknown), None);
        assert_eq!(without_ipv6(v4, &unknown), None);
        let taken = Error::from(ErrorKind::AddrInUse);
        assert_eq!(without_ipv6(everywhere(8080), &taken), None);
    }
}

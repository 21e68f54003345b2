// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only

//! Addresses of both families, as the kernel's contexts hold them.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The second word of an IPv4-mapped address, as it lies in memory.
const MAPPED: u32 = u32::from_ne_bytes([0, 0, 0xff, 0xff]);

/// An IPv6 or IPv4-mapped address: four words in network byte order, as the kernel's contexts hold them.
#[repr(transparent)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, FromBytes, Immutable, IntoBytes, KnownLayout,
)]
pub struct Address(pub [u32; 4]);

impl Address {
    /// From an IPv4 address in network byte order.
    #[inline]
    pub const fn mapped(ipv4: u32) -> Self {
        Self([0, 0, MAPPED, ipv4])
    }

    /// The IPv4 address in network byte order, if it is one.
    #[inline]
    pub const fn ipv4(self) -> Option<u32> {
        let [a, b, c, d] = self.0;
        if a == 0 && b == 0 && c == MAPPED { Some(d) } else { None }
    }

    /// The open bits of a prefix, in host byte order.
    #[inline]
    pub const fn host(self, bits: u8) -> u32 {
        u32::from_be(self.0[3]) & host_mask(bits)
    }

    /// The same prefix with other open bits.
    #[inline]
    #[must_use]
    pub const fn with_host(self, bits: u8, host: u32) -> Self {
        let [a, b, c, d] = self.0;
        let mask = host_mask(bits);
        Self([a, b, c, ((u32::from_be(d) & !mask) | (host & mask)).to_be()])
    }
}

impl From<IpAddr> for Address {
    fn from(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(ip) => Self::mapped(u32::from_ne_bytes(ip.octets())),
            IpAddr::V6(ip) => Self(zerocopy::transmute!(ip.octets())),
        }
    }
}

impl From<Address> for IpAddr {
    fn from(address: Address) -> Self {
        if let Some(ipv4) = address.ipv4() {
            return Self::V4(Ipv4Addr::from(ipv4.to_ne_bytes()));
        }
        let octets: [u8; 16] = zerocopy::transmute!(address.0);
        Self::V6(Ipv6Addr::from(octets))
    }
}

const fn host_mask(bits: u8) -> u32 {
    (1u32 << (bits & 31)) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_both_families_survive_the_round_trip() {
        for text in ["10.96.0.1", "0.0.0.0", "255.255.255.255", "fd00::1", "::1", "2001:db8::ffff:1"] {
            let ip: IpAddr = text.parse().unwrap();
            assert_eq!(IpAddr::from(Address::from(ip)), ip);
        }
        assert_eq!(
            Address::from("::ffff:10.96.0.1".parse::<IpAddr>().unwrap()).ipv4(),
            Some(u32::from_ne_bytes([10, 96, 0, 1]))
        );
    }
}

// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only

//! Connections to a port at any address, which are the only ones that are stored.
//!
//! Neither an address of ours nor a source address has room for 32 or 128 bits. So the kernel keeps where such a
//! connection was meant to go, under a number of as many bits as a prefix may leave open, and that number travels as
//! the open bits of a prefix do. The number is made of the socket's cookie, so that the socket's end finds the entry.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{Address, MAX_HOST_BITS};

/// In the place of the bits that a prefix leaves open: all of them, in either family.
pub const ANY_ADDRESS: u8 = 128;

/// Marks the answer to `SO_ORIGINAL_DST` of a connection that its port alone has led to the proxy.
pub const BY_PORT: u32 = u32::from_be_bytes(*b"port");

/// Connections to ports at any address that are open at a time, of all pods of a node.
pub const MAX_CONNECTIONS: u32 = 65_536;

/// Numbers that a socket may have; more sockets than one rarely want the same.
pub const CONNECTION_NUMBERS: u32 = 4;

/// Bits of a number.
const MASK: u32 = (1 << MAX_HOST_BITS) - 1;

/// From one number of a socket to its next: odd, and about the golden section of all numbers.
const STEP: u32 = 0x27_8dde;

/// Where one connection was meant to go.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, Immutable, IntoBytes, KnownLayout)]
pub struct Connection {
    /// Cookie of the client's socket, which no other socket of this boot has.
    pub cookie: u64,
    /// Nanoseconds of the monotonic clock at which the client's socket was closed; 0 while it is open.
    pub closed_ns: u64,
    /// The address that the client named.
    pub address: Address,
    /// TCP port, network byte order.
    pub port: u16,
    /// Slot of the pod.
    pub slot: u16,
    /// Zero; keeps the layout free of implicit padding.
    pub reserved: u32,
}

impl Connection {
    /// Where the client of a connection of this pod to this port (network byte order) wanted to go.
    #[inline]
    pub const fn original(&self, slot: u16, port: u16) -> Option<Address> {
        if self.slot == slot && self.port == port { Some(self.address) } else { None }
    }
}

/// The number that a socket gets at its first attempt, or a later one.
#[inline]
pub const fn connection_number(cookie: u64, attempt: u32) -> u32 {
    let [a, b, c, d, ..] = (cookie ^ (cookie >> MAX_HOST_BITS)).to_le_bytes();
    u32::from_le_bytes([a, b, c, d]).wrapping_add(attempt.wrapping_mul(STEP)) & MASK
}

const _: () = assert!(MAX_CONNECTIONS <= MASK / 16, "numbers are rarely taken");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cookies_that_follow_each_other_get_numbers_of_their_own() {
        let numbers = |attempt| (1..=u64::from(MAX_CONNECTIONS)).map(move |cookie| connection_number(cookie, attempt));
        let mut all: Vec<u32> = numbers(0).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), MAX_CONNECTIONS as usize);
        for attempt in 1..CONNECTION_NUMBERS {
            assert!(numbers(attempt).all(|number| number <= MASK));
            assert_ne!(connection_number(7, attempt), connection_number(7, 0));
        }
    }

    #[test]
    fn a_connection_of_another_pod_or_port_is_explained_by_nothing() {
        let address = Address::mapped(u32::from_ne_bytes([192, 0, 2, 1]));
        let connection = Connection { address, port: 443, slot: 7, ..Connection::default() };
        assert_eq!(connection.original(7, 443), Some(address));
        assert_eq!(connection.original(8, 443), None);
        assert_eq!(connection.original(7, 80), None);
    }
}

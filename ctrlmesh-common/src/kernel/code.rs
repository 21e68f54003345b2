// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only

//! Encodes pod, target and part of a prefix in an address.
//!
//! A number of 24 bits, below 12 · 2²⁰: generation, slot, index. For IPv4 it is added to 127.64.0.0, and the bits that
//! a prefix leaves open travel in the source, 127.(128+hi).mid.lo. For IPv6 both stand in the last two words of an
//! address of [`PREFIX`], which is made local on `lo` of a pod's network namespace and is nowhere else.
//!
//! The generation says which of a slot's tables gave the index. It changes when the slot gets another table or another
//! pod, so that an older connection is explained by its own table, or by none.

use super::{ANY_ADDRESS, Address, Destination, MAX_PODS, TABLE_ENTRIES};

/// Generations after which a slot's numbers come again.
pub const GENERATIONS: u16 = 12;

/// The first half of every native IPv6 address that we make: `fd63:746c:6d65:7368::/64`, "ctlmesh" behind the `fd`.
pub const PREFIX: [u8; 8] = *b"\xfdctlmesh";

/// Bits of [`PREFIX`].
pub const PREFIX_BITS: u8 = 64;

/// The address before the first encoded one, host byte order: 127.64.0.0.
const FIRST: u32 = u32::from_be_bytes([127, 64, 0, 0]);
/// Numbers in all.
const NUMBERS: u32 = GENERATIONS as u32 * MAX_PODS * TABLE_ENTRIES;
/// The first two words of an address of ours, as they lie in memory.
const NATIVE: [u32; 2] = {
    let [a, b, c, d, e, f, g, h] = PREFIX;
    [u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h])]
};

/// Which pod and which target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code {
    /// Which of the slot's tables, below [`GENERATIONS`].
    pub generation: u16,
    /// Pod, below [`MAX_PODS`].
    pub slot: u16,
    /// Entry of the table.
    pub index: u8,
}

/// What the two addresses of a redirected connection say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decoded {
    /// Pod and target.
    pub code: Code,
    /// The open bits of a prefix, where the connection carries some.
    pub host: Option<u32>,
}

impl Code {
    /// The address that an IPv4 client is sent to, in network byte order.
    #[inline]
    pub const fn ipv4(self) -> u32 {
        (FIRST + self.number()).to_be()
    }

    /// The address that an IPv6 client is sent to where our prefix is local, with the open bits of a prefix.
    #[inline]
    pub const fn ipv6(self, host: u32) -> Address {
        Address([NATIVE[0], NATIVE[1], host.to_be(), self.number().to_be()])
    }

    /// What `ipv4` (network byte order) stands for, if it is an encoded address.
    #[inline]
    pub const fn of_ipv4(ipv4: u32) -> Option<Self> {
        Self::of_number(u32::from_be(ipv4).wrapping_sub(FIRST))
    }

    const fn number(self) -> u32 {
        (self.generation as u32 * MAX_PODS + self.slot as u32) * TABLE_ENTRIES + self.index as u32
    }

    #[inline]
    const fn of_number(number: u32) -> Option<Self> {
        if number >= NUMBERS {
            return None;
        }
        let [_, _, _, index] = number.to_be_bytes();
        let slot = (number / TABLE_ENTRIES) % MAX_PODS;
        let generation = number / (TABLE_ENTRIES * MAX_PODS);
        Some(Self { generation: generation as u16, slot: slot as u16, index })
    }
}

impl Decoded {
    /// Reads the address that the client was sent to, and the client's own.
    #[inline]
    pub const fn read(sent_to: Address, source: Address) -> Option<Self> {
        if let Some(ipv4) = sent_to.ipv4() {
            let Some(code) = Code::of_ipv4(ipv4) else { return None };
            let host = match source.ipv4() {
                Some(source) => decode_host(source),
                None => None,
            };
            return Some(Self { code, host });
        }
        let [a, b, host, number] = sent_to.0;
        if a != NATIVE[0] || b != NATIVE[1] {
            return None;
        }
        match Code::of_number(u32::from_be(number)) {
            Some(code) => Some(Self { code, host: Some(u32::from_be(host)) }),
            None => None,
        }
    }
}

/// Whether `address` is one that we sent somebody to, whoever that was.
#[inline]
pub const fn is_encoded(address: Address) -> bool {
    Decoded::read(address, address).is_some()
}

/// Whether `address` is of a range from which we take the addresses that we send somebody to.
#[inline]
pub const fn is_reserved(address: Address) -> bool {
    match address.ipv4() {
        Some(ipv4) => Code::of_ipv4(ipv4).is_some(),
        None => address.0[0] == NATIVE[0] && address.0[1] == NATIVE[1],
    }
}

/// The source that carries the open bits of a prefix over IPv4, in network byte order.
#[inline]
pub const fn encode_host(host: u32) -> u32 {
    let [_, b, c, d] = host.to_be_bytes();
    u32::from_ne_bytes([127, 128 | (b & 0x3f), c, d])
}

/// The open bits of a prefix, if `ipv4` (network byte order) is a source that carries some.
#[inline]
const fn decode_host(ipv4: u32) -> Option<u32> {
    let [a, b, c, d] = ipv4.to_ne_bytes();
    if a == 127 && b & 0xc0 == 128 { Some(u32::from_be_bytes([0, b & 0x3f, c, d])) } else { None }
}

/// Where the client wanted to go, from the entry that its connection names and the open bits that it carries.
/// `None` if the entry was never used, or the connection does not carry the open bits of a prefix, or the entry is a
/// port at any address: then the number that it carries finds a [`Connection`](super::Connection).
#[inline]
pub const fn original(entry: &Destination, host: Option<u32>) -> Option<Address> {
    if entry.port == 0 || entry.host_bits == ANY_ADDRESS {
        return None;
    }
    if entry.host_bits == 0 {
        return Some(entry.address);
    }
    match host {
        Some(host) => Some(entry.address.with_host(entry.host_bits, host)),
        None => None,
    }
}

const _: () = assert!(NUMBERS == 0xc0_0000, "every address from 127.64.0.0 to 127.255.255.255");
const _: () = assert!(TABLE_ENTRIES == 1 << 8, "an index has 8 bits");

#[cfg(test)]
mod tests;

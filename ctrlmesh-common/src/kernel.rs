//! What do the kernel's programs and their loader agree on: map keys and values, sizes, and how an address is encoded.
//!
//! The design is stateless. `connect()` to a target becomes `connect()` to `127.(64+hi).lo.index`, which names the pod
//! (14 bits) and the target (8 bits); the proxy reads it with `getsockname()`. Where the target is a prefix, the bits
//! that the prefix leaves open travel in the source address, `127.(128+hi).mid.lo` (22 bits). Nothing is stored per
//! connection, so nothing can leak, race or fill up.
//!
//! Everything here is a value or a pure function; both sides run the same code, and the tests run on the host.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

mod outcome;

pub use outcome::Outcome;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Version of the layout below. It names the folder of the pins, so that two layouts never share a map.
pub const LAYOUT: u32 = 1;

/// Pods that one node can enrol.
pub const MAX_PODS: u32 = 4096;

/// Cgroups that one node can enrol: a pod's own, and those of its containers that are treated otherwise.
pub const MAX_CGROUPS: u32 = 8192;

/// Tables of targets. Pods share a table where they have the same API servers.
pub const MAX_TABLES: u32 = 64;

/// Entries of one table; the first is never used, so that a zero is never an index.
pub const TABLE_ENTRIES: u32 = 256;

/// Targets in all tables together.
pub const MAX_TARGETS: u32 = 4096;

/// Webhook ports that one node can take over.
pub const MAX_INBOUND: u32 = 4096;

/// Levels of cgroups below the root in which an enrolled one is looked for.
pub const MAX_CGROUP_DEPTH: i32 = 16;

/// Bits of an address that a prefix may leave open: what fits into the source address.
pub const MAX_HOST_BITS: u8 = 22;

/// Bytes of the ring buffer of events.
pub const EVENTS_BYTES: u32 = 256 * 1024;

/// One in so many redirected connections becomes an event. A power of two.
pub const EVENT_SAMPLE: u32 = 16;

/// The pod's connections pass where the proxy cannot take them. Without it they are refused.
pub const FAIL_OPEN: u32 = 1;
/// The proxy's listener is in the map of listeners, and its entry goes when the socket closes.
pub const CHECK_LISTENER: u32 = 2;
/// The proxy is somebody's own: ask the network namespace whether something listens.
pub const CHECK_PORT: u32 = 4;
/// The proxy beats; a beat that is too old means that it hangs.
pub const CHECK_HEARTBEAT: u32 = 8;
/// Report what happens through the ring buffer.
pub const REPORT: u32 = 16;

/// Connections of this cgroup are redirected.
pub const ROLE_REDIRECT: u16 = 0;
/// Connections of this cgroup pass: it is the proxy's own, inside an enrolled pod.
pub const ROLE_PASS: u16 = 1;

/// The second word of an IPv4-mapped address, as it lies in memory.
const MAPPED: u32 = u32::from_ne_bytes([0, 0, 0xff, 0xff]);

/// An IPv6 or IPv4-mapped address: four words in network byte order, as the kernel's contexts hold them.
#[repr(transparent)]
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    FromBytes,
    Immutable,
    IntoBytes,
    KnownLayout,
)]
pub struct Address(pub [u32; 4]);

/// Key of the table of targets, after the length of the prefix in bits.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromBytes, Immutable, IntoBytes, KnownLayout,
)]
pub struct TargetKey {
    /// Table that the pod uses.
    pub table: u16,
    /// TCP port, network byte order.
    pub port: u16,
    /// Address or prefix.
    pub address: Address,
}

/// What the table of targets answers.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, Immutable, IntoBytes, KnownLayout,
)]
pub struct TargetMatch {
    /// Entry of the table, 1 to 255.
    pub index: u8,
    /// Bits that the prefix leaves open; 0 for an exact address.
    pub host_bits: u8,
    /// Zero; keeps the layout free of implicit padding.
    pub reserved: u16,
}

/// A target, found by table and index.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, Immutable, IntoBytes, KnownLayout,
)]
pub struct Destination {
    /// Address, or the prefix with its open bits zero.
    pub address: Address,
    /// TCP port, network byte order; 0 where the entry was never used.
    pub port: u16,
    /// Bits that the prefix leaves open; 0 for an exact address.
    pub host_bits: u8,
    /// 1 where new connections no longer match, and only older ones are still explained.
    pub retired: u8,
}

/// A table's head.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, Immutable, IntoBytes, KnownLayout,
)]
pub struct Table {
    /// Fingerprint of the name that the table was made under; 0 where the table is free.
    pub name: u64,
}

/// An enrolled cgroup, found by its id.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, Immutable, IntoBytes, KnownLayout,
)]
pub struct Member {
    /// Slot of the pod.
    pub slot: u16,
    /// [`ROLE_REDIRECT`] or [`ROLE_PASS`].
    pub role: u16,
}

/// A pod, found by its slot.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, Immutable, IntoBytes, KnownLayout,
)]
pub struct Pod {
    /// Oldest beat that still counts as life, in nanoseconds.
    pub max_age_ns: u64,
    /// [`FAIL_OPEN`] and the checks.
    pub flags: u32,
    /// Whose beat is looked at.
    pub heartbeat: u32,
    /// Table of targets.
    pub table: u16,
    /// The proxy's TCP port, network byte order; 0 where the slot is free.
    pub port: u16,
    /// Zero; keeps the layout free of implicit padding.
    pub reserved: u32,
}

/// Key of a webhook port that the proxy takes over.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromBytes, Immutable, IntoBytes, KnownLayout,
)]
pub struct InboundKey {
    /// The pod's address.
    pub address: Address,
    /// TCP port, host byte order.
    pub port: u32,
}

/// Who takes an inbound connection.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, Immutable, IntoBytes, KnownLayout,
)]
pub struct Inbound {
    /// Entry in the map of inbound listeners: twice the slot, plus one for IPv6.
    pub listener: u32,
    /// [`FAIL_OPEN`] or nothing.
    pub flags: u32,
}

/// One connection, as the ring buffer reports it.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, Immutable, IntoBytes, KnownLayout,
)]
pub struct Event {
    /// Cgroup of the process.
    pub cgroup: u64,
    /// Original address.
    pub address: Address,
    /// Process.
    pub pid: u32,
    /// An [`Outcome`].
    pub outcome: u32,
    /// Original TCP port, network byte order.
    pub port: u16,
    /// Slot of the pod.
    pub slot: u16,
    /// Zero; keeps the layout free of implicit padding.
    pub reserved: u32,
}

// === impl Address ===

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

// === impl Event ===

impl Event {
    /// An event as it lies in the ring buffer.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        Self::read_from_bytes(bytes).ok()
    }
}

/// The address that the client is sent to, in network byte order. `slot` is below [`MAX_PODS`].
#[inline]
pub const fn encode(slot: u16, index: u8) -> u32 {
    let [hi, lo] = slot.to_be_bytes();
    u32::from_ne_bytes([127, 64 | (hi & 0x3f), lo, index])
}

/// Slot and index, if `ipv4` (network byte order) is an encoded address.
#[inline]
pub const fn decode(ipv4: u32) -> Option<(u16, u8)> {
    let [a, b, c, index] = ipv4.to_ne_bytes();
    if a == 127 && b & 0xc0 == 64 { Some((u16::from_be_bytes([b & 0x3f, c]), index)) } else { None }
}

/// The source that carries the open bits of a prefix, in network byte order.
#[inline]
pub const fn encode_host(host: u32) -> u32 {
    let [_, b, c, d] = host.to_be_bytes();
    u32::from_ne_bytes([127, 128 | (b & 0x3f), c, d])
}

/// The open bits of a prefix, if `ipv4` (network byte order) is a source that carries some.
#[inline]
pub const fn decode_host(ipv4: u32) -> Option<u32> {
    let [a, b, c, d] = ipv4.to_ne_bytes();
    if a == 127 && b & 0xc0 == 128 { Some(u32::from_be_bytes([0, b & 0x3f, c, d])) } else { None }
}

/// Where the client wanted to go, from the entry that its address names and the source of its connection.
/// `None` if the entry was never used, or the source does not carry the open bits of a prefix.
#[inline]
pub const fn original(entry: &Destination, source: u32) -> Option<Address> {
    if entry.port == 0 {
        return None;
    }
    if entry.host_bits == 0 {
        return Some(entry.address);
    }
    match decode_host(source) {
        Some(host) => Some(entry.address.with_host(entry.host_bits, host)),
        None => None,
    }
}

/// Position of an entry among the entries of all tables.
#[inline]
pub const fn entry(table: u16, index: u8) -> u32 {
    table as u32 * TABLE_ENTRIES + index as u32
}

/// Length of the key's part that is compared, in bits.
pub const fn prefix_bits(host_bits: u8) -> u32 {
    32 + 128 - host_bits as u32
}

const fn host_mask(bits: u8) -> u32 {
    (1u32 << (bits & 31)) - 1
}

const _: () = assert!(MAX_PODS <= 1 << 14, "a slot has 14 bits");
const _: () = assert!(TABLE_ENTRIES == 1 << 8, "an index has 8 bits");
const _: () = assert!(EVENT_SAMPLE.is_power_of_two(), "the sample is taken with a mask");

#[cfg(test)]
mod tests {
    use super::*;

    fn words(ip: [u8; 4]) -> u32 {
        u32::from_ne_bytes(ip)
    }

    #[test]
    fn every_slot_and_index_survives_the_round_trip() {
        for slot in 0..1 << 14 {
            for index in [0, 1, 7, 128, 255] {
                assert_eq!(decode(encode(slot, index)), Some((slot, index)));
            }
        }
    }

    #[test]
    fn an_encoded_address_is_loopback_and_outside_what_people_use() {
        for slot in [0, 1, 255, 256, 4095, 16_383] {
            let ip = Ipv4Addr::from(encode(slot, 1).to_ne_bytes());
            assert!(
                ip.is_loopback()
                    && ip >= Ipv4Addr::new(127, 64, 0, 0)
                    && ip < Ipv4Addr::new(127, 128, 0, 0),
                "{ip}"
            );
        }
    }

    #[test]
    fn addresses_of_others_are_not_decoded() {
        for ip in [
            [127, 0, 0, 1],
            [127, 0, 0, 53],
            [127, 63, 255, 255],
            [127, 128, 0, 0],
            [126, 64, 0, 1],
            [10, 64, 0, 1],
        ] {
            assert_eq!(decode(words(ip)), None, "{ip:?}");
        }
        for ip in [[127, 0, 0, 2], [127, 127, 255, 255], [127, 192, 0, 0], [10, 128, 0, 1]] {
            assert_eq!(decode_host(words(ip)), None, "{ip:?}");
        }
    }

    #[test]
    fn every_open_bit_survives_the_round_trip() {
        for bit in 0..MAX_HOST_BITS {
            assert_eq!(decode_host(encode_host(1 << bit)), Some(1 << bit));
        }
        assert_eq!(
            decode_host(encode_host((1 << MAX_HOST_BITS) - 1)),
            Some((1 << MAX_HOST_BITS) - 1)
        );
        assert_eq!(Ipv4Addr::from(encode_host(0).to_ne_bytes()), Ipv4Addr::new(127, 128, 0, 0));
    }

    #[test]
    fn addresses_of_both_families_survive_the_round_trip() {
        for text in
            ["10.96.0.1", "0.0.0.0", "255.255.255.255", "fd00::1", "::1", "2001:db8::ffff:1"]
        {
            let ip: IpAddr = text.parse().unwrap();
            assert_eq!(IpAddr::from(Address::from(ip)), ip);
        }
        assert_eq!(
            Address::from("::ffff:10.96.0.1".parse::<IpAddr>().unwrap()).ipv4(),
            Some(words([10, 96, 0, 1]))
        );
    }

    #[test]
    fn an_exact_target_needs_no_source() {
        let entry = Destination {
            address: Address::mapped(words([10, 96, 0, 1])),
            port: 443u16.to_be(),
            ..Destination::default()
        };
        assert_eq!(original(&entry, words([127, 0, 0, 1])), Some(entry.address));
    }

    #[test]
    fn a_prefix_is_completed_from_the_source() {
        for (prefix, bits, ip) in [
            ("10.96.0.0", 20, "10.99.7.200"),
            ("fd00::", 20, "fd00::7:c8"),
            ("10.64.0.0", 22, "10.127.255.255"),
        ] {
            let [prefix, ip]: [Address; 2] =
                [prefix, ip].map(|text| text.parse::<IpAddr>().unwrap().into());
            let entry = Destination { address: prefix, port: 1, host_bits: bits, retired: 0 };
            assert_eq!(original(&entry, encode_host(ip.host(bits))), Some(ip));
        }
    }

    #[test]
    fn a_prefix_without_its_source_is_not_guessed() {
        let entry = Destination {
            address: Address::mapped(words([10, 96, 0, 0])),
            port: 1,
            host_bits: 12,
            retired: 0,
        };
        assert_eq!(original(&entry, words([127, 0, 0, 1])), None);
    }

    #[test]
    fn an_entry_that_was_never_used_explains_nothing() {
        assert_eq!(original(&Destination::default(), words([127, 0, 0, 1])), None);
    }
}

// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only

//! The contract between the kernel's programs and their loader: map keys and values, sizes, address encoding.
//!
//! `connect()` to a target becomes `connect()` to an address that names the pod and the target; the proxy reads it with
//! `getsockname()`. The bits that a prefix leaves open travel with it. So nothing is stored for a connection to an API
//! server, and nothing can leak, race or fill up. Only for a port at any address the kernel stores where each
//! connection was meant to go: see [`Connection`].
//!
//! Everything here is a value or a pure function; both sides run the same code, and the tests run on the host.
//!
//! Because it becomes part of the kernel programs, this module and those below it are, as `ctrlmesh-ebpf` is, under
//! Apache-2.0 or GPL-2.0-only, at your choice.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

mod address;
mod code;
mod connection;
mod entry;
mod outcome;

pub use address::Address;
pub use code::{Code, Decoded, GENERATIONS, PREFIX, PREFIX_BITS, encode_host, is_encoded, is_reserved, original};
pub use connection::{ANY_ADDRESS, BY_PORT, CONNECTION_NUMBERS, Connection, MAX_CONNECTIONS, connection_number};
pub use entry::{Inbound, InboundKey, Member};
pub use outcome::Outcome;

/// Version of the layout below. It names the folder of the pins, so that two layouts never share a map.
pub const LAYOUT: u32 = 1;

/// Pods that one node can enrol.
pub const MAX_PODS: u32 = 4096;

/// Cgroups that one node can enrol: a pod's own, and those of its containers that are treated otherwise.
pub const MAX_CGROUPS: u32 = 8192;

/// Tables of targets; the first is never used, so that a zero is never a table. Pods share a table where they have the
/// same API servers.
pub const MAX_TABLES: u32 = 64;

/// Entries of one table; the first is never used, so that a zero is never an index.
pub const TABLE_ENTRIES: u32 = 256;

/// Targets in all tables together.
pub const MAX_TARGETS: u32 = 4096;

/// Addresses and ports whose connections one pod's proxy can take over.
pub const INBOUND_PER_POD: u32 = 4;

/// The same for a node: as many as all its pods can have, so that the table is never full.
pub const MAX_INBOUND: u32 = INBOUND_PER_POD * MAX_PODS;

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
/// Our IPv6 prefix is local in the pod's network namespace.
pub const NATIVE_IPV6: u32 = 32;

/// Key of the table of targets, after the length of the prefix in bits.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromBytes, Immutable, IntoBytes, KnownLayout)]
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, Immutable, IntoBytes, KnownLayout)]
pub struct TargetMatch {
    /// Entry of the table, 1 to 255.
    pub index: u8,
    /// Bits that the prefix leaves open; 0 for an exact address, [`ANY_ADDRESS`] for a port alone.
    pub host_bits: u8,
    /// Zero; keeps the layout free of implicit padding.
    pub reserved: u16,
}

/// A target, found by table and index.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, Immutable, IntoBytes, KnownLayout)]
pub struct Destination {
    /// Address, or the prefix with its open bits zero.
    pub address: Address,
    /// TCP port, network byte order; 0 where the entry was never used.
    pub port: u16,
    /// Bits that the prefix leaves open; 0 for an exact address, [`ANY_ADDRESS`] for a port alone.
    pub host_bits: u8,
    /// 1 where new connections no longer match, and only older ones are still explained.
    pub retired: u8,
}

/// A table's head. A table that was replaced by a fresh one of the same name has none: it only explains.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, Immutable, IntoBytes, KnownLayout)]
pub struct Table {
    /// Fingerprint of the name that the table was made under; 0 where the table is free, or has no name any more.
    pub name: u64,
}

/// A pod, found by its slot.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, Immutable, IntoBytes, KnownLayout)]
pub struct Pod {
    /// Oldest beat that still counts as life, in nanoseconds.
    pub max_age_ns: u64,
    /// [`FAIL_OPEN`] and the checks.
    pub flags: u32,
    /// Whose beat is looked at.
    pub heartbeat: u32,
    /// Generation → the table that explains its connections; 0 where none does. An entry is written before a connection
    /// can have its generation.
    pub tables: [u16; 16],
    /// The proxy's TCP port, network byte order; 0 where the slot is free.
    pub port: u16,
    /// Generation of new connections. Goes on when the slot is free.
    pub generation: u16,
    /// Zero; keeps the layout free of implicit padding.
    pub reserved: u32,
}

/// One connection, as the ring buffer reports it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, Immutable, IntoBytes, KnownLayout)]
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

impl Event {
    /// An event as it lies in the ring buffer.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        Self::read_from_bytes(bytes).ok()
    }
}

impl Pod {
    /// The table that explains connections of a generation. There is room for a power of two of them, so that a mask is
    /// all the proof that the verifier wants.
    #[inline]
    pub fn table(&self, generation: u16) -> Option<u16> {
        let table = self.tables[usize::from(generation & 15)];
        if table == 0 { None } else { Some(table) }
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

const _: () = assert!(GENERATIONS <= 16, "a pod remembers a table for each");
const _: () = assert!(EVENT_SAMPLE.is_power_of_two(), "the sample is taken with a mask");

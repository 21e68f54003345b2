// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only

//! Entries of hash tables that are read while the loader may give their memory to another key.
//!
//! Such a table never frees an entry's memory while a program runs, but it may use it again at once. So an entry is one
//! word, read with one load, and its first half says whose it is: a reader that finds another's looks again.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{Address, GENERATIONS, MAX_PODS, MAX_TABLES};

/// In the last byte of a member: its connections pass.
const PASSES: u8 = 0x80;

/// An enrolled cgroup, found by its id. Table and generation are always replaced together.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, Immutable, IntoBytes, KnownLayout)]
pub struct Member {
    /// The lower half of the cgroup's id, in which no two living cgroups are alike.
    cgroup: u32,
    slot: u16,
    /// Table of targets; 0 where there is none.
    table: u8,
    /// Generation of the slot in which it has this table, and [`PASSES`].
    generation: u8,
}

/// Key of a webhook port that the proxy takes over.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromBytes, Immutable, IntoBytes, KnownLayout)]
pub struct InboundKey {
    /// The pod's address.
    pub address: Address,
    /// TCP port, host byte order.
    pub port: u32,
}

/// Who takes an inbound connection.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, Immutable, IntoBytes, KnownLayout)]
pub struct Inbound {
    /// Fingerprint of the key.
    key: u32,
    /// Entry in the map of inbound listeners: twice the slot, plus one for IPv6.
    listener: u16,
    /// Zero; keeps the layout free of implicit padding.
    reserved: u16,
}

impl Member {
    /// A cgroup whose connections are redirected.
    #[inline]
    pub const fn redirected(cgroup: u64, slot: u16, table: u8, generation: u8) -> Self {
        Self { cgroup: lower(cgroup), slot, table, generation }
    }

    /// A cgroup whose connections pass: the proxy's own, inside an enrolled pod.
    #[inline]
    pub const fn passing(cgroup: u64, slot: u16) -> Self {
        Self { cgroup: lower(cgroup), slot, table: 0, generation: PASSES }
    }

    /// A member as it was loaded.
    #[inline]
    pub const fn of_word(word: u64) -> Self {
        zerocopy::transmute!(word)
    }

    /// Whether it is this cgroup's.
    #[inline]
    pub const fn is_of(self, cgroup: u64) -> bool {
        self.cgroup == lower(cgroup)
    }

    /// Slot of the pod.
    #[inline]
    pub const fn slot(self) -> u16 {
        self.slot
    }

    /// Table of targets; 0 where there is none.
    #[inline]
    pub const fn table(self) -> u16 {
        self.table as u16
    }

    /// Generation of the slot in which it has this table.
    #[inline]
    pub const fn generation(self) -> u16 {
        (self.generation & !PASSES) as u16
    }

    /// Whether its connections pass.
    #[inline]
    pub const fn passes(self) -> bool {
        self.generation & PASSES != 0
    }
}

impl InboundKey {
    /// FNV-1a over the five words. Keys that differ in the last one only, as pods' addresses do, never have the same.
    #[inline]
    const fn fingerprint(&self) -> u32 {
        let [a, b, c, d] = self.address.0;
        mix(mix(mix(mix(mix(0x811c_9dc5, self.port), a), b), c), d)
    }
}

impl Inbound {
    /// Calls to `key` go to the proxy's socket `listener`.
    #[inline]
    pub const fn new(key: &InboundKey, listener: u16) -> Self {
        Self { key: key.fingerprint(), listener, reserved: 0 }
    }

    /// An entry as it was loaded.
    #[inline]
    pub const fn of_word(word: u64) -> Self {
        zerocopy::transmute!(word)
    }

    /// Whether it is this key's.
    #[inline]
    pub const fn is_of(self, key: &InboundKey) -> bool {
        self.key == key.fingerprint()
    }

    /// Entry in the map of inbound listeners.
    #[inline]
    pub const fn listener(self) -> u32 {
        self.listener as u32
    }

    /// Slot of the pod.
    #[inline]
    pub const fn slot(self) -> u16 {
        self.listener / 2
    }
}

/// The lower half of a cgroup's id.
#[inline]
const fn lower(cgroup: u64) -> u32 {
    (cgroup & 0xffff_ffff) as u32
}

#[inline]
const fn mix(hash: u32, word: u32) -> u32 {
    (hash ^ word).wrapping_mul(0x0100_0193)
}

const _: () = assert!(size_of::<Member>() == 8 && size_of::<Inbound>() == 8, "one load each");
const _: () = assert!(MAX_TABLES <= 256 && GENERATIONS < 128, "each has a byte");
const _: () = assert!(2 * MAX_PODS <= 1 << 16, "a listener has two bytes");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_is_read_back_from_one_word() {
        let member = Member::redirected(0x7_0000_1234, 4095, 63, 11);
        let read = Member::of_word(zerocopy::transmute!(member));
        assert_eq!((read.slot(), read.table(), read.generation()), (4095, 63, 11));
        assert!(!read.passes() && read.is_of(0x7_0000_1234));
        let passing = Member::of_word(zerocopy::transmute!(Member::passing(9, 7)));
        assert_eq!((passing.slot(), passing.passes()), (7, true));
    }

    #[test]
    fn an_entry_of_another_cgroup_is_known_by_its_first_half_alone() {
        let (ours, theirs) = (Member::redirected(41, 1, 1, 1), Member::passing(42, 2));
        let (ours, theirs): (u64, u64) = (zerocopy::transmute!(ours), zerocopy::transmute!(theirs));
        // As it looks while it is overwritten from its first byte on.
        for bytes in 4..=8 {
            let mut mixed = ours.to_ne_bytes();
            mixed[..bytes].copy_from_slice(&theirs.to_ne_bytes()[..bytes]);
            assert!(!Member::of_word(u64::from_ne_bytes(mixed)).is_of(41), "{bytes}");
        }
        assert!(Member::of_word(ours).is_of(41) && !Member::of_word(ours).is_of(42));
    }

    #[test]
    fn an_inbound_entry_is_known_by_address_and_port() {
        let mapped = |last| Address::mapped(u32::from_ne_bytes([10, 244, 1, last]));
        let native = |last| Address([0x1234, 0, 0, u32::from(last)]);
        let keys = (0..=u8::MAX)
            .flat_map(|last| [(mapped(last), 9443), (native(last), 9443), (mapped(last), 9444)])
            .map(|(address, port)| InboundKey { address, port });
        for (at, ours) in keys.clone().enumerate() {
            let entry = Inbound::of_word(zerocopy::transmute!(Inbound::new(&ours, 8191)));
            assert_eq!((entry.listener(), entry.slot()), (8191, 4095));
            for (other, theirs) in keys.clone().enumerate() {
                assert_eq!(entry.is_of(&theirs), at == other, "{ours:?} {theirs:?}");
            }
        }
    }
}

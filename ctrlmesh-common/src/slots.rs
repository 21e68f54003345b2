//! Hashes namespaces into 32 slots, and divides slots among shards.
//!
//! A slot is the unit of ownership. Dividing is total: every slot of the divided set ends up in exactly one share.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// How many slots there are.
pub const COUNT: u8 = 32;

/// One of the 32 buckets of namespace names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u8);

/// A number that is no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{number} is not a slot: slots are 0 to 31")]
pub struct NotASlot {
    /// What was given.
    pub number: i64,
}

/// A text that is no slot, as it is written in a label.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a slot: slots are \"0\" to \"31\"")]
pub struct ParseSlotError {
    /// What was given.
    pub text: String,
}

/// A set of slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SlotSet(u32);

/// How a namespace's name becomes a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NamespaceHash {
    /// FNV-1a of 64 bits, modulo 32: the hash of Kubernetes' own sharded list.
    #[default]
    Fnv1a,
    /// The sum of the code points, modulo 32: the predecessors' hash. Badly skewed; it exists only for migration.
    Kusionstack,
}

/// A hash function that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is no namespace hash: allowed are `fnv1a` and `kusionstack`")]
pub struct UnknownHash {
    /// What was given.
    pub name: String,
}

impl Slot {
    /// The slot's number, 0 to 31.
    pub fn number(self) -> u8 {
        self.0
    }
}

impl TryFrom<i64> for Slot {
    type Error = NotASlot;

    fn try_from(number: i64) -> Result<Self, NotASlot> {
        u8::try_from(number).ok().filter(|number| *number < COUNT).map(Self).ok_or(NotASlot { number })
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(out)
    }
}

impl std::str::FromStr for Slot {
    type Err = ParseSlotError;

    fn from_str(text: &str) -> Result<Self, ParseSlotError> {
        let number = text.parse().ok().filter(|number: &u8| *number < COUNT);
        let slot = number.map(Self).filter(|slot| slot.to_string() == text);
        slot.ok_or_else(|| ParseSlotError { text: text.to_owned() })
    }
}

impl Serialize for Slot {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Slot {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

impl SlotSet {
    /// No slot.
    pub const EMPTY: Self = Self(0);

    /// All 32 slots.
    pub const ALL: Self = Self(u32::MAX);

    /// How many slots are in the set.
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Whether no slot is in the set.
    pub fn is_empty(self) -> bool {
        self == Self::EMPTY
    }

    /// Whether `slot` is in the set.
    pub fn contains(self, slot: Slot) -> bool {
        self.0 & (1 << slot.0) != 0
    }

    /// The slots that are in either set.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The slots that are in both sets.
    #[must_use]
    pub fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The slots that are not in the set.
    #[must_use]
    pub fn complement(self) -> Self {
        Self(!self.0)
    }

    /// The slots in the set, in ascending order.
    pub fn iter(self) -> impl Iterator<Item = Slot> {
        (0..COUNT).map(Slot).filter(move |slot| self.contains(*slot))
    }

    /// Divides the set into `shares` runs of ascending slots whose sizes differ by at most one, larger ones first.
    ///
    /// With more shares than slots the last ones are empty; with no share there is nothing to return.
    pub fn divide(self, shares: usize) -> Vec<Self> {
        let Some(rest) = self.len().checked_rem(shares) else {
            return Vec::new();
        };
        let least = self.len() / shares;
        let mut slots = self.iter();
        (0..shares).map(|share| slots.by_ref().take(least + usize::from(share < rest)).collect()).collect()
    }

    /// Divides the set into as many shares as there are `former` ones, whose sizes differ by at most one, so that the
    /// fewest slots leave the share that had them.
    ///
    /// A slot in more than one former share counts for the first. A share with too many slots keeps the lowest. Without
    /// former slots this is [`divide`](Self::divide).
    #[must_use]
    pub fn divide_from(self, former: &[Self]) -> Vec<Self> {
        let mut free = self;
        let had: Vec<Self> = former
            .iter()
            .map(|share| {
                let had = share.intersection(free);
                free = free.intersection(had.complement());
                had
            })
            .collect();
        let sizes = self.sizes_from(&had);
        let keep = |(had, size): (&Self, &usize)| had.iter().take(*size).collect();
        let kept: Vec<Self> = had.iter().zip(&sizes).map(keep).collect();
        let free = kept.iter().fold(self, |free, kept| free.intersection(kept.complement()));
        let mut free = free.iter();
        let filled = kept.into_iter().zip(sizes).map(|(kept, size)| {
            let added = free.by_ref().take(size - kept.len()).collect();
            kept.union(added)
        });
        filled.collect()
    }

    /// Divides the set like [`divide_from`](Self::divide_from), but only among the shares that had any of it. Where
    /// none had, among all.
    #[must_use]
    pub fn divide_among_owners(self, former: &[Self]) -> Vec<Self> {
        let owns = |share: &Self| !share.intersection(self).is_empty();
        if !former.iter().any(owns) {
            return self.divide_from(former);
        }
        let owners: Vec<Self> = former.iter().copied().filter(owns).collect();
        let mut parts = self.divide_from(&owners).into_iter();
        former.iter().map(|share| if owns(share) { parts.next().unwrap_or_default() } else { Self::EMPTY }).collect()
    }

    /// The sizes of shares that differ by at most one. Shares that had more are the larger ones, then the first.
    fn sizes_from(self, had: &[Self]) -> Vec<usize> {
        let Some(mut rest) = self.len().checked_rem(had.len()) else {
            return Vec::new();
        };
        let least = self.len() / had.len();
        let mut sizes = vec![least; had.len()];
        for had_more in [true, false] {
            for (size, _) in sizes.iter_mut().zip(had).filter(|(_, had)| (had.len() > least) == had_more) {
                let more = rest.min(1);
                *size += more;
                rest -= more;
            }
        }
        sizes
    }
}

impl FromIterator<Slot> for SlotSet {
    fn from_iter<I: IntoIterator<Item = Slot>>(slots: I) -> Self {
        Self(slots.into_iter().fold(0, |bits, slot| bits | 1 << slot.0))
    }
}

impl fmt::Display for SlotSet {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, slot) in self.iter().enumerate() {
            write!(out, "{}{slot}", if at == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

impl NamespaceHash {
    /// The slot of the namespace called `namespace`.
    pub fn slot(self, namespace: &str) -> Slot {
        let hash = match self {
            Self::Fnv1a => fnv1a(namespace.as_bytes()),
            Self::Kusionstack => namespace.chars().map(|point| u64::from(u32::from(point))).sum(),
        };
        #[expect(clippy::cast_possible_truncation, reason = "less than COUNT")]
        Slot((hash % u64::from(COUNT)) as u8)
    }
}

impl fmt::Display for NamespaceHash {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(match self {
            Self::Fnv1a => "fnv1a",
            Self::Kusionstack => "kusionstack",
        })
    }
}

impl std::str::FromStr for NamespaceHash {
    type Err = UnknownHash;

    fn from_str(name: &str) -> Result<Self, UnknownHash> {
        match name {
            "fnv1a" => Ok(Self::Fnv1a),
            "kusionstack" => Ok(Self::Kusionstack),
            _ => Err(UnknownHash { name: name.to_owned() }),
        }
    }
}

impl Serialize for NamespaceHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for NamespaceHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// FNV-1a of 64 bits (draft-eastlake-fnv; Go's `hash/fnv`).
pub fn fnv1a(bytes: &[u8]) -> u64 {
    const OFFSET_BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    bytes.iter().fold(OFFSET_BASIS, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn fnv1a_is_the_published_function() {
        // Vectors of draft-eastlake-fnv, appendix C.
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn the_hash_of_sharded_lists_gives_these_slots() {
        // Worked out apart from this code: objects carry them as labels, so they may never change.
        for (namespace, slot) in
            [("default", 30), ("kube-system", 30), ("ns-a", 16), ("ctrlmesh", 9), ("shop", 9), ("kube-public", 26)]
        {
            assert_eq!(NamespaceHash::Fnv1a.slot(namespace).number(), slot, "{namespace}");
            assert_eq!(NamespaceHash::default().slot(namespace).number(), slot, "{namespace}");
        }
    }

    #[test]
    fn the_predecessors_hash_gives_their_slots() {
        for (namespace, slot) in [("default", 5), ("kube-system", 25), ("ns-a", 15), ("ctrlmesh", 2)] {
            assert_eq!(NamespaceHash::Kusionstack.slot(namespace).number(), slot, "{namespace}");
        }
    }

    #[test]
    fn only_0_to_31_are_slots() {
        assert_eq!(Slot::try_from(31).map(Slot::number), Ok(31));
        assert_eq!(Slot::try_from(32), Err(NotASlot { number: 32 }));
        assert_eq!(Slot::try_from(-1), Err(NotASlot { number: -1 }));
    }

    #[test]
    fn a_slot_is_read_only_as_it_is_printed() {
        for number in 0..32 {
            let slot = Slot::try_from(number).unwrap();
            assert_eq!(slot.to_string().parse(), Ok(slot));
        }
        for wrong in ["", "32", "-1", "+1", "07", " 7", "7 "] {
            assert!(wrong.parse::<Slot>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn every_number_of_shares_is_balanced() {
        for shares in 1..=32 {
            let sizes: Vec<usize> = SlotSet::ALL.divide(shares).into_iter().map(SlotSet::len).collect();
            let (least, most) = (sizes.iter().min().unwrap(), sizes.iter().max().unwrap());
            assert!(*least >= 1 && most - least <= 1, "{shares} shares: {sizes:?}");
        }
        assert!(SlotSet::ALL.divide(0).is_empty());
    }

    proptest! {
        #[test]
        fn dividing_gives_each_slot_to_exactly_one_share(bits: u32, shares in 1..40_usize) {
            let set = SlotSet(bits);
            let divided = set.divide(shares);
            prop_assert_eq!(divided.len(), shares);
            prop_assert_eq!(divided.iter().fold(SlotSet::EMPTY, |all, share| all.union(*share)), set);
            prop_assert_eq!(divided.iter().map(|share| share.len()).sum::<usize>(), set.len());
        }

        #[test]
        fn dividing_anew_moves_only_what_balance_asks_for(bits: u32, bounds in vec(any::<u32>(), 1..12)) {
            let (set, former): (_, Vec<SlotSet>) = (SlotSet(bits), bounds.into_iter().map(SlotSet).collect());
            let divided = set.divide_from(&former);
            prop_assert_eq!(divided.iter().fold(SlotSet::EMPTY, |all, share| all.union(*share)), set);
            prop_assert_eq!(divided.iter().map(|share| share.len()).sum::<usize>(), set.len());
            let (least, more) = (set.len() / former.len(), set.len() % former.len());
            prop_assert!(divided.iter().all(|share| (least..=least + 1).contains(&share.len())));
            // A share keeps all that it had, if that is not too much. At most `more` of the others keep one more.
            let mut seen = SlotSet::EMPTY;
            let had = former.iter().map(|share| {
                let had = share.intersection(set).intersection(seen.complement());
                seen = seen.union(had);
                had
            });
            let had: Vec<SlotSet> = had.collect();
            let large = had.iter().filter(|had| had.len() > least).count();
            let most = had.iter().map(|had| had.len().min(least)).sum::<usize>() + more.min(large);
            let kept = had.iter().zip(&divided).map(|(had, share)| had.intersection(*share).len());
            prop_assert_eq!(kept.sum::<usize>(), most);
            prop_assert_eq!(set.divide_from(&divided), divided, "what is balanced stays");
        }

        #[test]
        fn only_owners_get_anything(bits: u32, bounds in vec(any::<u32>(), 1..12)) {
            let (set, former): (_, Vec<SlotSet>) = (SlotSet(bits), bounds.into_iter().map(SlotSet).collect());
            let divided = set.divide_among_owners(&former);
            prop_assert_eq!(divided.len(), former.len());
            prop_assert_eq!(divided.iter().fold(SlotSet::EMPTY, |all, share| all.union(*share)), set);
            prop_assert_eq!(divided.iter().map(|share| share.len()).sum::<usize>(), set.len());
            let had_any = former.iter().any(|share| !share.intersection(set).is_empty());
            for (share, part) in former.iter().zip(&divided) {
                prop_assert!(part.is_empty() || !had_any || !share.intersection(set).is_empty());
            }
        }

        #[test]
        fn without_a_former_division_slots_are_divided_in_runs(bits: u32, shares in 0..40_usize) {
            prop_assert_eq!(SlotSet(bits).divide_from(&vec![SlotSet::EMPTY; shares]), SlotSet(bits).divide(shares));
        }

        #[test]
        fn a_division_half_carried_out_leads_to_the_same(bits: u32, former in vec(any::<u32>(), 1..12), done: u32) {
            let mut seen = SlotSet::EMPTY;
            let former = former.into_iter().map(|bits| {
                let share = SlotSet(bits).intersection(seen.complement());
                seen = seen.union(share);
                share
            });
            let former: Vec<SlotSet> = former.collect();
            let (set, done) = (SlotSet(bits), SlotSet(done));
            let divided = set.divide_from(&former);
            let half = former.iter().zip(&divided).map(|(before, after)| {
                before.intersection(done.complement()).union(after.intersection(done))
            });
            prop_assert_eq!(set.divide_from(&half.collect::<Vec<_>>()), divided);
        }

        #[test]
        fn a_slot_is_in_the_set_or_in_its_complement(bits: u32, number in 0..32_i64) {
            let (set, slot) = (SlotSet(bits), Slot::try_from(number).unwrap());
            prop_assert!(set.contains(slot) != set.complement().contains(slot));
            prop_assert!(set.intersection(set.complement()).is_empty());
        }
    }
}

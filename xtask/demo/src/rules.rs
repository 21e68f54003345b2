//! Checks that replicas requested only slots that their shard had at that moment.
//!
//! Pure: takes the rules that the root was given, which shards the pods are of, and what the audit log says they asked
//! for.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::names::label;
use ctrlmesh_common::selector::Selector;
use ctrlmesh_common::slots::{NamespaceHash, SlotSet};
use jiff::Timestamp;

use crate::history::ListOrWatch;

/// The rules of a root, in their order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rules(Vec<Rule>);

#[derive(Clone, Copy, Debug)]
struct Rule {
    /// The slots of the canary.
    canary: SlotSet,
    /// When it was written.
    begun: Timestamp,
    /// Since when it is the only one in force, once it is.
    alone: Option<Timestamp>,
    /// Since when nothing moves under it; later than that where something else happened in between.
    still: Option<Timestamp>,
}

/// A time in which each slot has one shard.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LastMove {
    /// Since when.
    pub(crate) since: Timestamp,
    /// The slots of the canary.
    pub(crate) canary: SlotSet,
}

/// The slots of the canary at first: a third.
pub(crate) fn third() -> SlotSet {
    SlotSet::ALL.divide(3).first().copied().unwrap_or_default()
}

/// The shards, and the slots of each, where the canary has these. The normal ones keep what they had at first, as far
/// as balance allows.
fn shares(canary: SlotSet) -> BTreeMap<String, SlotSet> {
    let normal = (1..).zip(canary.complement().divide_from(&third().complement().divide(2)));
    let normal = normal.map(|(number, part)| (format!("share-{number}-normal"), part));
    normal.chain([("share-0-canary".to_owned(), canary)]).collect()
}

/// The shard that a namespace belongs to where the canary has these slots.
pub(crate) fn shard_of(namespace: &str, canary: SlotSet) -> String {
    let slot = NamespaceHash::Fnv1a.slot(namespace);
    let mut shares = shares(canary).into_iter();
    shares.find(|(_, part)| part.contains(slot)).map(|(shard, _)| shard).unwrap_or_default()
}

/// The slots that a selector lets pass; none where it also lets objects pass that are of no slot.
fn admitted(selector: &Selector) -> Option<SlotSet> {
    let of_slots = |value: Option<&str>| {
        let requirements = selector.requirements().iter();
        requirements.filter(|one| one.key() == label::SHARDING_HASH).all(|one| one.condition().admits(value))
    };
    let passes = |slot: &_| of_slots(Some(&format!("{slot}")));
    (!of_slots(None)).then(|| SlotSet::ALL.iter().filter(passes).collect())
}

impl Rules {
    /// A rule was written that gives the canary these slots.
    pub(crate) fn begin(&mut self, begun: Timestamp, canary: SlotSet) {
        self.0.push(Rule { canary, begun, alone: None, still: None });
    }

    /// The last rule is the only one in force, and nothing moves any more.
    ///
    /// # Errors
    /// Where there is none.
    pub(crate) fn stand(&mut self, since: Timestamp) -> Result<()> {
        let last = self.0.last_mut().context("there is no rule yet")?;
        last.alone.get_or_insert(since);
        last.still = Some(since);
        Ok(())
    }

    /// Since when nothing moves; nothing where something does, or nothing has ever been divided.
    pub(crate) fn still(&self) -> Option<LastMove> {
        let last = self.0.last()?;
        Some(LastMove { since: last.still?, canary: last.canary })
    }

    /// What a shard may have had at a moment: while something moves, by either rule.
    fn shares_at<'a>(&'a self, shard: &'a str, at: Timestamp) -> impl Iterator<Item = SlotSet> {
        let next = self.0.iter().skip(1).map(Some).chain([None]);
        let in_force = self.0.iter().zip(next).filter(move |(rule, next)| {
            let is_over = next.and_then(|next| next.alone).is_some_and(|alone| alone <= at);
            rule.begun <= at && !is_over
        });
        in_force.filter_map(move |(rule, _)| shares(rule.canary).get(shard).copied())
    }

    /// That whatever a pod asked for was limited to slots that a shard of its had then; `shards` are those that each
    /// pod has ever been of.
    ///
    /// # Errors
    /// The first request that was not.
    pub(crate) fn limit(
        &self,
        shards: &BTreeMap<String, BTreeSet<String>>,
        asked: &[(String, ListOrWatch)],
    ) -> Result<()> {
        ensure!(!asked.is_empty(), "nothing was asked for");
        let is_own = |(pod, asked): &&(String, ListOrWatch)| {
            let Some(slots) = asked.selector.as_ref().and_then(admitted) else { return false };
            let own = shards.get(pod).into_iter().flatten();
            let mut own = own.flat_map(|shard| self.shares_at(shard, asked.at));
            own.any(|share| slots.intersection(share.complement()).is_empty())
        };
        let strange = asked.iter().find(|one| !is_own(one));
        ensure!(strange.is_none(), "asked for what is not its own: {strange:?}; shards {shards:?}");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::Resource;
    use crate::history::tests::at;

    fn half() -> SlotSet {
        SlotSet::ALL.divide(2)[0]
    }

    /// From second 1 on the canary has a third; from 5 on half, which alone is in force from 8 on.
    fn rules() -> Rules {
        let mut rules = Rules::default();
        rules.begin(at(1), third());
        rules.stand(at(2)).unwrap();
        rules.begin(at(5), half());
        assert!(rules.still().is_none(), "it moves");
        rules.stand(at(8)).unwrap();
        rules
    }

    fn selector(slots: SlotSet) -> String {
        let slots: Vec<String> = slots.iter().map(|slot| slot.to_string()).collect();
        format!("{} in ({})", label::SHARDING_HASH, slots.join(","))
    }

    /// What is said of a canary that asks so at that second.
    fn limited(second: i64, selector: &str) -> Result<()> {
        let shards = BTreeMap::from([("op".to_owned(), BTreeSet::from(["share-0-canary".to_owned()]))]);
        let asked = ListOrWatch {
            at: at(second),
            resource: Resource::new("", "configmaps"),
            namespace: String::new(),
            selector: Selector::parse(selector).ok(),
        };
        rules().limit(&shards, &[("op".to_owned(), asked)])
    }

    #[test]
    fn who_asks_for_its_own_share_or_less_is_limited() {
        for second in [1, 4, 6, 9] {
            assert!(limited(second, &selector(third())).is_ok(), "{second}");
        }
        assert!(limited(3, &format!("app=main,{}", selector(third()))).is_ok());
        assert!(limited(3, &Selector::nothing().to_string()).is_ok(), "it sees nothing");
    }

    #[test]
    fn a_share_counts_only_while_a_rule_gives_it() {
        assert!(limited(4, &selector(half())).is_err(), "it is given at 5");
        assert!(limited(5, &selector(half())).is_ok() && limited(9, &selector(half())).is_ok());
        let mut rules = rules();
        rules.begin(at(10), third());
        let half_at =
            |rules: &Rules, second| rules.shares_at("share-0-canary", at(second)).any(|share| share == half());
        assert!(half_at(&rules, 20), "it moves still");
        rules.stand(at(15)).unwrap();
        assert!(half_at(&rules, 14) && !half_at(&rules, 15));
    }

    #[test]
    fn a_selector_that_lets_others_pass_is_no_limit() {
        let hash = label::SHARDING_HASH;
        let other = selector(third().complement());
        let absent = format!("!{hash}");
        for wrong in ["", "app=main", hash, &format!("{hash} notin (31)"), &other, &absent] {
            assert!(limited(3, wrong).is_err(), "{wrong}");
        }
        assert!(limited(3, "a in (").is_err(), "it cannot be read");
        assert!(limited(3, &selector(SlotSet::ALL)).is_err());
        assert!(rules().limit(&BTreeMap::new(), &[]).is_err(), "nobody asked for anything");
    }

    #[test]
    fn a_namespace_is_of_one_shard_whatever_the_canary_has() {
        let shards: BTreeSet<String> = (0..60).map(|number| shard_of(&format!("shop-{number:02}"), third())).collect();
        assert_eq!(shards.into_iter().collect::<Vec<_>>(), ["share-0-canary", "share-1-normal", "share-2-normal"]);
        assert_eq!(shard_of("shop-00", SlotSet::ALL), "share-0-canary");
    }
}

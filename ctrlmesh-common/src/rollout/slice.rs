//! Chooses the slots and namespaces that a revision owns in a step.
//!
//! A slot without objects would show nothing, and the fullest one is the greatest risk. So slots of middling size come
//! first, then those around them, and empty ones last. A later step keeps what the one before it had.

use std::collections::BTreeSet;

use crate::api::RolloutStep;
use crate::slots::{COUNT, Slot, SlotSet};

/// How many objects each slot has.
pub type SlotLoads = [u64; COUNT as usize];

/// Slots and namespaces of the last of `steps`, all of them up to it. `had` are the slots of the step before it.
/// `canary` is what the first step consists of instead, where the root has one.
pub fn slice(
    steps: &[RolloutStep],
    had: &[String],
    canary: Option<&(Vec<String>, Vec<String>)>,
    loads: &SlotLoads,
) -> (Vec<String>, Vec<String>) {
    let mut namespaces: BTreeSet<String> = steps.iter().flat_map(|step| step.namespaces.iter().cloned()).collect();
    namespaces.extend(canary.iter().flat_map(|(_, namespaces)| namespaces.iter().cloned()));
    let pinned = canary.iter().flat_map(|(slots, _)| slots);
    let mut slots: SlotSet = had.iter().chain(pinned).filter_map(|slot| slot.parse::<Slot>().ok()).collect();
    let count = match steps {
        [] => 0,
        [_] if canary.is_some() => slots.len(),
        [.., step] => count(step),
    };
    for slot in ranked(loads) {
        if slots.len() >= count {
            break;
        }
        slots = slots.union([slot].into_iter().collect());
    }
    (slots.iter().map(|slot| slot.to_string()).collect(), namespaces.into_iter().collect())
}

/// How many slots the step says, of all that there are.
fn count(step: &RolloutStep) -> usize {
    let all = usize::from(COUNT);
    let percent = step.percent.map(|percent| (usize::try_from(percent).unwrap_or_default() * all).div_ceil(100));
    let slots = step.slots.and_then(|slots| usize::try_from(slots).ok());
    slots.or(percent).unwrap_or_default().min(all)
}

fn ranked(loads: &SlotLoads) -> Vec<Slot> {
    let all = loads.iter().zip(SlotSet::ALL.iter());
    let (mut filled, empty): (Vec<_>, Vec<_>) = all.partition(|(load, _)| **load > 0);
    filled.sort();
    let middle = filled.len().saturating_sub(1) / 2;
    let mut ranked: Vec<_> = filled.into_iter().enumerate().collect();
    ranked.sort_by_key(|(at, _)| (at.abs_diff(middle), *at));
    ranked.into_iter().map(|(_, slot)| slot).chain(empty).map(|(_, slot)| slot).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_slots(slots: i32) -> RolloutStep {
        RolloutStep { slots: Some(slots), ..RolloutStep::default() }
    }

    #[test]
    fn slots_of_middling_size_come_first_and_empty_ones_last() {
        let mut loads = SlotLoads::default();
        (loads[3], loads[7], loads[9], loads[20]) = (1, 5, 100, 7);
        let slots = |step, had: &[String]| slice(&[step], had, None, &loads).0;
        assert_eq!(slots(of_slots(1), &[]), ["7"]);
        assert_eq!(slots(of_slots(3), &[]), ["3", "7", "20"]);
        assert_eq!(slots(of_slots(5), &[]), ["0", "3", "7", "9", "20"]);
        assert_eq!(slots(of_slots(2), &["31".to_owned()]), ["7", "31"], "what it had stays");
        let quarter = RolloutStep { percent: Some(25), ..RolloutStep::default() };
        assert_eq!(slots(quarter, &[]).len(), 8);
        let some = RolloutStep { percent: Some(1), ..RolloutStep::default() };
        assert_eq!(slots(some, &[]).len(), 1, "whole slots");
    }

    #[test]
    fn namespaces_stay_and_a_canary_is_the_first_step() {
        let shop = RolloutStep { namespaces: vec!["shop".to_owned()], ..RolloutStep::default() };
        let steps = [shop, of_slots(1)];
        let loads = SlotLoads::default();
        assert_eq!(slice(&steps[..1], &[], None, &loads), (vec![], vec!["shop".to_owned()]));
        assert_eq!(slice(&steps, &[], None, &loads), (vec!["0".to_owned()], vec!["shop".to_owned()]));
        let canary = (vec!["4".to_owned(), "5".to_owned()], vec!["pay".to_owned()]);
        let (slots, namespaces) = slice(&steps[1..], &[], Some(&canary), &loads);
        assert_eq!((slots.len(), namespaces), (2, vec!["pay".to_owned()]));
    }
}

//! Measures the load of slots by the counts that proxies report.
//!
//! The counts of a proxy only grow. So a load is the difference of two reports of the same proxy, some time apart. A
//! proxy that begins anew begins at 0: its counts do not compare with those of the one before it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use ctrlmesh_common::balance::Weights;
use ctrlmesh_common::slots::Slot;
use ctrlmesh_common::wire::{SlotLoad, Traffic};
use tokio::time::Instant;

use crate::rules::balance::Measured;

/// What a rate is given in.
const THOUSAND_SECONDS_IN_MILLIS: u64 = 1_000_000;

type Counts = BTreeMap<Slot, u64>;

/// What the proxies of pods have reported lately.
#[derive(Debug)]
pub(super) struct LoadMeter {
    /// Over how long a load is measured.
    window: Duration,
    /// By the UID of the pod.
    pods: BTreeMap<String, PodCounts>,
}

/// The reports of one proxy.
#[derive(Debug)]
struct PodCounts {
    /// When the proxy began to count.
    since: u64,
    /// When they were seen, the oldest first: one from before the window, and those in it.
    seen: VecDeque<(Instant, Counts)>,
}

impl LoadMeter {
    pub(super) fn new(window: Duration) -> Self {
        Self { window, pods: BTreeMap::new() }
    }

    /// Takes what proxies have reported last, by the UID of the pod. All others are forgotten.
    pub(super) fn observe(&mut self, reports: &BTreeMap<String, Traffic>, now: Instant) {
        self.pods.retain(|uid, pod| reports.get(uid).is_some_and(|traffic| traffic.since == pod.since));
        for (uid, traffic) in reports {
            let new = || PodCounts { since: traffic.since, seen: VecDeque::new() };
            let pod = self.pods.entry(uid.clone()).or_insert_with(new);
            pod.seen.push_back((now, counts(traffic)));
            while pod.seen.get(1).is_some_and(|(at, _)| now.saturating_duration_since(*at) >= self.window) {
                pod.seen.pop_front();
            }
        }
    }

    /// The load of the slots of these pods, over the time for which all of them have been observed. `None` while that
    /// is less than half of the window.
    pub(super) fn measured(&self, uids: &BTreeSet<&String>) -> Option<Measured> {
        let pods: Vec<&PodCounts> = uids.iter().map(|uid| self.pods.get(*uid)).collect::<Option<_>>()?;
        let mut measured = Measured::default();
        // A slot that came to a new pod meanwhile would count for longer with its former owner.
        let Some(from) = pods.iter().filter_map(|pod| pod.seen.front()).map(|(at, _)| *at).max() else {
            return Some(measured);
        };
        for pod in pods {
            let (_, before) = pod.seen.iter().find(|(at, _)| *at >= from)?;
            let (until, after) = pod.seen.back()?;
            let elapsed = until.saturating_duration_since(from);
            if elapsed < self.window / 2 {
                return None;
            }
            measured.add(before, after, elapsed);
        }
        Some(measured)
    }
}

impl Measured {
    fn add(&mut self, before: &Counts, after: &Counts, elapsed: Duration) {
        let millis = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX).max(1);
        for (slot, count) in after {
            let more = count.saturating_sub(before.get(slot).copied().unwrap_or_default());
            let Weights(rates) = &mut self.rates;
            let rate = rates.entry(*slot).or_default();
            *rate = rate.saturating_add(more.saturating_mul(THOUSAND_SECONDS_IN_MILLIS) / millis);
            self.requests = self.requests.saturating_add(more);
        }
    }
}

/// What is no slot does not count.
fn counts(traffic: &Traffic) -> Counts {
    let load = |one: &SlotLoad| Some((Slot::try_from(i64::from(one.slot)).ok()?, one.requests));
    traffic.slots.iter().filter_map(load).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_mins(5);
    const MINUTE: Duration = Duration::from_mins(1);

    fn report(since: u64, counts: &[(u32, u64)]) -> Traffic {
        let slots = counts.iter().map(|(slot, requests)| SlotLoad { slot: *slot, requests: *requests }).collect();
        Traffic { since, slots, ..Traffic::default() }
    }

    fn reports(all: &[(&str, Traffic)]) -> BTreeMap<String, Traffic> {
        all.iter().map(|(uid, traffic)| ((*uid).to_owned(), traffic.clone())).collect()
    }

    fn rates(meter: &LoadMeter, uids: &[&str]) -> Option<Vec<(u8, u64)>> {
        let uids: Vec<String> = uids.iter().map(ToString::to_string).collect();
        let measured = meter.measured(&uids.iter().collect())?;
        Some(measured.rates.0.into_iter().map(|(slot, rate)| (slot.number(), rate)).collect())
    }

    #[test]
    fn a_load_is_the_difference_of_two_reports() {
        let (mut meter, start) = (LoadMeter::new(WINDOW), Instant::now());
        meter.observe(&reports(&[("a", report(7, &[(1, 5000)])), ("b", report(8, &[(2, 10)]))]), start);
        assert_eq!(rates(&meter, &["a", "b"]), None, "nothing to compare with");
        meter.observe(
            &reports(&[("a", report(7, &[(1, 5300), (99, 9)])), ("b", report(8, &[(2, 10)]))]),
            start + 3 * MINUTE,
        );
        // 300 in 180 s.
        assert_eq!(rates(&meter, &["a", "b"]), Some(vec![(1, 1666), (2, 0)]));
        assert_eq!(rates(&meter, &["a", "c"]), None, "one has not reported");
        assert_eq!(rates(&meter, &[]), Some(vec![]));
    }

    #[test]
    fn a_slot_that_has_moved_counts_with_both_owners() {
        let (mut meter, start) = (LoadMeter::new(WINDOW), Instant::now());
        for minute in 0..=4_u64 {
            let [left, got] = [60 * minute.min(2), 60 * minute.saturating_sub(2)];
            let both = reports(&[("a", report(7, &[(1, left)])), ("b", report(8, &[(1, got)]))]);
            meter.observe(&both, start + MINUTE * u32::try_from(minute).unwrap());
        }
        // 60 in each minute, whoever has it.
        assert_eq!(rates(&meter, &["a", "b"]), Some(vec![(1, 1000)]));
    }

    #[test]
    fn a_slot_that_came_to_a_new_pod_counts_once() {
        let (mut meter, start) = (LoadMeter::new(WINDOW), Instant::now());
        for minute in 0..=5_u64 {
            let mut both = reports(&[("a", report(7, &[(1, 60 * minute.min(2))]))]);
            if minute >= 2 {
                both.extend(reports(&[("b", report(8, &[(1, 60 * (minute - 2))]))]));
            }
            meter.observe(&both, start + MINUTE * u32::try_from(minute).unwrap());
        }
        assert_eq!(rates(&meter, &["a", "b"]), Some(vec![(1, 1000)]));
    }

    #[test]
    fn counts_from_different_beginnings_do_not_compare() {
        let (mut meter, start) = (LoadMeter::new(WINDOW), Instant::now());
        meter.observe(&reports(&[("a", report(7, &[(1, 5000)]))]), start);
        meter.observe(&reports(&[("a", report(9, &[(1, 6000)]))]), start + 4 * MINUTE);
        assert_eq!(rates(&meter, &["a"]), None, "the proxy has begun anew");
        meter.observe(&reports(&[("a", report(9, &[(1, 6060)]))]), start + 7 * MINUTE);
        assert_eq!(rates(&meter, &["a"]), Some(vec![(1, 333)]));
    }

    #[test]
    fn what_is_older_than_the_window_does_not_count() {
        let (mut meter, start) = (LoadMeter::new(WINDOW), Instant::now());
        // 600 in the first minute, and nothing after that.
        for minute in 0..=8 {
            let count = if minute == 0 { 0 } else { 600 };
            meter.observe(&reports(&[("a", report(7, &[(1, count)]))]), start + MINUTE * minute);
        }
        assert_eq!(rates(&meter, &["a"]), Some(vec![(1, 0)]));
        assert_eq!(meter.pods["a"].seen.len(), 6, "it forgets");
        meter.observe(&reports(&[]), start + 9 * MINUTE);
        assert!(meter.pods.is_empty());
    }
}

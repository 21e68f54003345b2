//! The requests of the last interval: what a budget has spent.
//!
//! In any time of an interval, no more requests pass than the budget allows. Times that are close together are kept as
//! the latest of them, so that the log stays small. So a request may count for a thousandth of the interval longer, and
//! never shorter.

use std::collections::VecDeque;

use super::Moment;

/// Into so many parts of an interval times are rounded.
const PARTS: u64 = 1024;

/// The requests that count still.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// By time; at most one more than [`PARTS`], once those that are over are dropped.
    groups: VecDeque<Group>,
    /// Requests of all groups.
    requests: u64,
}

/// Requests that count until the same moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Group {
    first: Moment,
    last: Moment,
    requests: u64,
}

impl Window {
    /// When a request may pass, with at most `allowed` in an `interval` of nanoseconds: `now`, later, or never.
    pub fn next(&self, allowed: u64, interval: u64, now: Moment) -> Option<Moment> {
        let over = self.groups.iter().take_while(|group| group.ends(interval) <= now);
        let (groups, requests) = over.fold((0, 0), |(groups, sum), group| (groups + 1, sum + group.requests));
        let Some(too_many) = (self.requests - requests).checked_sub(allowed) else { return Some(now) };
        let mut gone = 0;
        let frees = |group: &&Group| {
            gone += group.requests;
            gone > too_many
        };
        self.groups.iter().skip(groups).find(frees).map(|group| group.ends(interval))
    }

    /// Counts one more request. The caller has asked [`Self::next`].
    pub fn take(&mut self, interval: u64, now: Moment) {
        while let Some(over) = self.groups.pop_front_if(|group| group.ends(interval) <= now) {
            self.requests -= over.requests;
        }
        self.requests += 1;
        match self.groups.back_mut() {
            Some(group) if now < group.first.after(interval / PARTS) || now <= group.last => {
                group.last = group.last.max(now);
                group.requests += 1;
            }
            _ => self.groups.push_back(Group { first: now, last: now, requests: 1 }),
        }
    }
}

impl Group {
    fn ends(&self, interval: u64) -> Moment {
        self.last.after(interval)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn passes(window: &mut Window, allowed: u64, interval: u64, now: u64) -> bool {
        let passes = window.next(allowed, interval, Moment(now)) == Some(Moment(now));
        if passes {
            window.take(interval, Moment(now));
        }
        passes
    }

    #[test]
    fn the_whole_budget_passes_at_once_and_comes_back_after_the_interval() {
        let mut window = Window::default();
        for now in [5, 5, 6] {
            assert!(passes(&mut window, 3, 100, now));
        }
        assert_eq!(window.next(3, 100, Moment(7)), Some(Moment(105)));
        assert!(!passes(&mut window, 3, 100, 104));
        assert!(passes(&mut window, 3, 100, 105) && passes(&mut window, 3, 100, 105));
        assert_eq!(window.next(3, 100, Moment(105)), Some(Moment(106)));
    }

    #[test]
    fn a_budget_that_shrinks_waits_for_what_was_spent() {
        let mut window = Window::default();
        for now in 0..5 {
            assert!(passes(&mut window, 5, 100, now));
        }
        assert_eq!(window.next(2, 100, Moment(50)), Some(Moment(103)), "two may count then");
        assert_eq!(window.next(6, 100, Moment(50)), Some(Moment(50)));
        assert_eq!(window.next(0, 100, Moment(50)), None);
    }

    #[test]
    fn the_log_stays_small() {
        let (mut window, interval) = (Window::default(), 1 << 30);
        for now in 0..200_000 {
            window.take(interval, Moment(now * 20_000));
        }
        assert!(window.groups.len() <= 1026, "{}", window.groups.len());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        /// It is never above the budget in any interval, and a thousandth of it stricter at most.
        #[test]
        fn it_does_what_a_list_of_all_times_does(
            allowed in 1..12_u64,
            interval in prop::sample::select(vec![1_u64, 50, 1024, 50_000, 5_000_000]),
            steps in prop::collection::vec((0..200_u64, 0..4_u32), 1..300),
        ) {
            let (mut window, mut times, mut now) = (Window::default(), Vec::<u64>::new(), 0);
            for (step, scale) in steps {
                now += step * 10_u64.pow(scale);
                let within = |time: u64, interval: u64| time + interval > now;
                let spent = |interval| times.iter().filter(|time| within(**time, interval)).count() as u64;
                let (strict, exact) = (spent(interval + interval / PARTS) < allowed, spent(interval) < allowed);
                let next = window.next(allowed, interval, Moment(now)).unwrap();
                let passed = passes(&mut window, allowed, interval, now);
                prop_assert!(exact || !passed, "more than {allowed} by {now}");
                prop_assert!(passed || !strict, "refused at {now}");
                if passed {
                    times.push(now);
                } else {
                    let mut later = window.clone();
                    prop_assert!(!passes(&mut later, allowed, interval, next.0 - 1));
                    prop_assert!(passes(&mut later, allowed, interval, next.0));
                }
            }
        }
    }
}

//! Knows which pods have come back only just, or again and again.
//!
//! What a pod lost while it was away comes back to it once it has stayed: each move costs the others work. A pod that
//! is seen for the first time is not held back. A manager that begins anew does not know how often a pod was away.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use crate::rules::pod::Member;

/// How long a pod that was away once has to be ready; twice as long after each further time.
const SETTLE: Duration = Duration::from_secs(30);

/// No pod has to be ready for longer. One that was is as good as new.
const LONGEST: Duration = Duration::from_mins(10);

/// What is known of one pod.
#[derive(Clone, Copy, Debug, Default)]
struct Attendance {
    /// `None` while it does not serve.
    serves_since: Option<Instant>,
    /// How often it has stopped to serve.
    absences: u32,
}

/// The pods, by UID.
#[derive(Debug, Default)]
pub(super) struct Comebacks(BTreeMap<String, Attendance>);

impl Comebacks {
    /// Takes down which pods serve now. Returns the UIDs of those that serve and are held back, and when that changes
    /// by time alone.
    pub(super) fn follow(&mut self, members: &[Member], now: Instant) -> (BTreeSet<String>, Option<Instant>) {
        let enrolled = || members.iter().filter(|pod| pod.enrolled() && !pod.uid.is_empty());
        let there: BTreeSet<&String> = enrolled().map(|pod| &pod.uid).collect();
        self.0.retain(|uid, _| there.contains(uid));
        let (mut held, mut due) = (BTreeSet::new(), None);
        for pod in enrolled() {
            let attendance = self.0.entry(pod.uid.clone()).or_default();
            if let Some(until) = attendance.follow(pod.serves(), now) {
                held.insert(pod.uid.clone());
                due = due.into_iter().chain([until]).min();
            }
        }
        (held, due)
    }
}

impl Attendance {
    /// Until when the pod is held back.
    fn follow(&mut self, serves: bool, now: Instant) -> Option<Instant> {
        match self.serves_since {
            None if serves => self.serves_since = Some(now),
            Some(since) if !serves => {
                let is_new = now.saturating_duration_since(since) >= LONGEST;
                self.absences = if is_new { 1 } else { self.absences.saturating_add(1) };
                self.serves_since = None;
            }
            _ => {}
        }
        let doublings = self.absences.checked_sub(1)?;
        let settle = SETTLE.saturating_mul(1_u32.checked_shl(doublings).unwrap_or(u32::MAX)).min(LONGEST);
        let until = self.serves_since? + settle;
        (until > now).then_some(until)
    }
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::names::label;

    use super::*;

    fn pod(uid: &str, ready: bool) -> Member {
        let labels = [(label::ENABLE_PROXY.to_owned(), "true".to_owned())].into();
        Member { uid: uid.to_owned(), ready, labels, ..Member::default() }
    }

    #[test]
    fn a_pod_that_comes_back_has_to_stay_longer_each_time() {
        let (mut comebacks, start) = (Comebacks::default(), Instant::now());
        let mut at = |seconds: u64, ready: bool| {
            let now = start + Duration::from_secs(seconds);
            let (held, due) = comebacks.follow(&[pod("a", ready), pod("b", true)], now);
            assert!(!held.contains("b") && held.is_empty() == due.is_none());
            due.map(|due| due.duration_since(start).as_secs())
        };
        assert_eq!(at(0, false), None);
        assert_eq!(at(1, true), None, "it has never been there before");
        assert_eq!(at(5, false), None);
        assert_eq!((at(6, true), at(35, true), at(36, true)), (Some(36), Some(36), None));
        assert_eq!((at(40, false), at(41, true), at(101, true)), (None, Some(101), None));
        assert_eq!((at(102, false), at(103, true)), (None, Some(223)));
        for round in 0..40 {
            assert_eq!(at(300 + 2 * round, false), None);
            at(301 + 2 * round, true);
        }
        assert_eq!(at(379, true), Some(379 + 600));
        // It stayed for as long as any has to.
        assert_eq!((at(979, true), at(980, false), at(981, true)), (None, None, Some(1011)));
    }

    #[test]
    fn another_pod_of_that_name_begins_anew() {
        let (mut comebacks, now) = (Comebacks::default(), Instant::now());
        for (uid, ready, held) in
            [("a", true, false), ("a", false, false), ("a", true, true), ("b", true, false), ("a", true, false)]
        {
            assert_eq!(!comebacks.follow(&[pod(uid, ready)], now).0.is_empty(), held, "{uid}");
        }
    }
}

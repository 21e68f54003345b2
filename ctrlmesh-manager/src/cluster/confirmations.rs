//! Remembers when this replica last confirmed the policy of each pod, and which pods it counts as lapsed.
//!
//! To confirm a pod and to count it as lapsed exclude each other. The first is recorded before a proxy hears of it. The
//! second forbids to confirm any policy from before the revocation.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Instant;

use ctrlmesh_common::policy::fence::LAPSED_AFTER;
use ctrlmesh_runtime::sync::lock;

/// By UID of the pod.
#[derive(Debug, Default)]
pub struct Confirmations(Mutex<BTreeMap<String, Confirmed>>);

#[derive(Debug, Default)]
struct Confirmed {
    at: Option<Instant>,
    /// Policies of an older version of the ShardingConfig have lapsed.
    lapsed_before: u64,
}

impl Confirmations {
    /// Records that a policy from this version of its ShardingConfig is confirmed. False: it has lapsed.
    pub fn confirm(&self, uid: &str, version: u64, now: Instant) -> bool {
        lock(&self.0).entry(uid.to_owned()).or_default().confirm(version, now)
    }

    /// When the pod lapses unless it is confirmed: where that is not after `now`, it counts as lapsed from here on.
    /// `version` is that of the ShardingConfig which revoked something. Since `since` this replica leads and knows
    /// that.
    pub fn lapse(&self, uid: &str, version: u64, since: Instant, now: Instant) -> Instant {
        lock(&self.0).entry(uid.to_owned()).or_default().lapse(version, since, now)
    }

    /// Forgets all other pods.
    pub fn keep(&self, is_there: impl Fn(&str) -> bool) {
        lock(&self.0).retain(|uid, _| is_there(uid));
    }
}

impl Confirmed {
    fn confirm(&mut self, version: u64, now: Instant) -> bool {
        let may = version >= self.lapsed_before;
        if may {
            self.at = self.at.max(Some(now));
        }
        may
    }

    fn lapse(&mut self, version: u64, since: Instant, now: Instant) -> Instant {
        if self.lapsed_before >= version {
            return now;
        }
        let at = self.at.map_or(since, |confirmed| confirmed.max(since)) + LAPSED_AFTER;
        if at <= now {
            self.lapsed_before = version;
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_pod_lapses_after_the_last_of_three_times() {
        let (start, all) = (Instant::now(), Confirmations::default());
        assert_eq!(all.lapse("a", 7, start, start), start + LAPSED_AFTER, "never confirmed here");
        assert!(all.confirm("a", 6, start + SECOND));
        assert_eq!(all.lapse("a", 7, start, start + SECOND), start + SECOND + LAPSED_AFTER);
        assert_eq!(all.lapse("a", 7, start + 2 * SECOND, start + SECOND), start + 2 * SECOND + LAPSED_AFTER);
        assert_eq!(all.lapse("b", 7, start, start), start + LAPSED_AFTER, "another pod");
    }

    #[test]
    fn what_has_lapsed_is_not_confirmed_by_an_old_policy() {
        let (start, all) = (Instant::now(), Confirmations::default());
        let end = start + LAPSED_AFTER;
        let before = end.checked_sub(SECOND).unwrap();
        assert!(all.lapse("a", 7, start, before) > before);
        assert!(all.confirm("a", 6, before), "it has not lapsed");
        assert!(all.lapse("a", 7, start, end) > end, "and does not now");
        let end = before + LAPSED_AFTER;
        assert!(all.lapse("a", 7, start, end) <= end);
        assert!(!all.confirm("a", 6, end), "it has lapsed");
        // With the policy that takes the objects away it may write again, and the rest stays taken away.
        assert!(all.confirm("a", 7, end));
        assert!(all.lapse("a", 7, start, end + SECOND) <= end + SECOND);
        assert!(all.lapse("a", 9, end, end + SECOND) > end + SECOND, "another move");
        assert!(all.confirm("b", 6, end), "another pod");
    }

    #[test]
    fn pods_that_are_gone_are_forgotten() {
        let (start, all) = (Instant::now(), Confirmations::default());
        assert!(all.lapse("a", 7, start, start + LAPSED_AFTER) <= start + LAPSED_AFTER);
        all.keep(|uid| uid == "a");
        assert!(!all.confirm("a", 6, start));
        all.keep(|uid| uid == "b");
        assert!(all.confirm("a", 6, start));
    }
}

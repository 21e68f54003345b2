//! Until when the manager's confirmation lets a pod's writes pass, where its policy lapses.
//!
//! A confirmation holds for the pod, whichever policy is in force: a later one carries it on.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ctrlmesh_common::policy::fence::{CONFIRMED_FOR, WRITES_END_WITHIN};
use ctrlmesh_runtime::boot_clock;
use ctrlmesh_runtime::sync::lock;
use tokio::time;

use super::PodName;

/// How often the clock is read while a write is under way: timers stand still while the machine is suspended.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Until when writes of one pod pass, in nanoseconds of the boot clock. The default: none passes.
#[derive(Clone, Debug, Default)]
pub struct Validity(Arc<AtomicU64>);

/// The validity of each pod.
#[derive(Clone, Debug, Default)]
pub struct Validities(Arc<Mutex<HashMap<PodName, Validity>>>);

impl Validity {
    /// Whether writes pass at this time of the boot clock.
    pub fn holds(&self, now: Duration) -> bool {
        now < self.until()
    }

    /// Completes once the writes that began before the end must have ended.
    pub async fn over(&self) {
        loop {
            let ahead = (self.until() + WRITES_END_WITHIN).saturating_sub(boot_clock::now());
            if ahead.is_zero() {
                return;
            }
            time::sleep(ahead.min(LOOK_EVERY)).await;
        }
    }

    fn until(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::SeqCst))
    }

    /// Takes a confirmation that was asked for at this time of the boot clock.
    fn confirm(&self, asked: Duration) {
        let until = u64::try_from((asked + CONFIRMED_FOR).as_nanos()).unwrap_or_default();
        self.0.fetch_max(until, Ordering::SeqCst);
    }
}

impl Validities {
    pub(super) fn of(&self, pod: &PodName) -> Validity {
        lock(&self.0).entry(pod.clone()).or_default().clone()
    }

    pub(super) fn confirm(&self, pod: &PodName, asked: Duration) {
        self.of(pod).confirm(asked);
    }

    /// Ends the validity of a pod of this name: the next one is another pod.
    pub(super) fn end(&self, pod: &PodName) {
        let mut all = lock(&self.0);
        if let Some(validity) = all.get(pod) {
            validity.0.store(0, Ordering::SeqCst);
            if Arc::strong_count(&validity.0) == 1 {
                all.remove(pod);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_confirmation_holds_from_when_it_was_asked_for() {
        let validity = Validity::default();
        let asked = 100 * SECOND;
        assert!(!validity.holds(asked), "never confirmed");
        validity.confirm(asked);
        let end = asked + CONFIRMED_FOR;
        assert!(validity.holds(asked) && validity.holds(end.saturating_sub(SECOND)) && !validity.holds(end));
        validity.confirm(asked.saturating_sub(SECOND));
        assert!(validity.holds(end.saturating_sub(SECOND)), "an answer that was late takes nothing away");
        validity.confirm(asked + SECOND);
        assert!(validity.holds(end) && !validity.holds(end + SECOND));
    }

    #[test]
    fn the_next_pod_of_a_name_begins_without_a_confirmation() {
        let (all, pod) = (Validities::default(), "ns/op-0".parse().unwrap());
        let served = all.of(&pod);
        all.confirm(&pod, SECOND);
        assert!(served.holds(SECOND) && all.of(&pod).holds(SECOND));
        all.end(&pod);
        assert!(!served.holds(SECOND));
        all.confirm(&pod, SECOND);
        assert!(served.holds(SECOND), "it is the same that is served");
        drop(served);
        all.end(&pod);
        assert!(lock(&all.0).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn writes_are_over_once_they_were_not_confirmed_for_long() {
        let validity = Validity::default();
        let now = boot_clock::now();
        let begun = now.saturating_sub(CONFIRMED_FOR);
        validity.confirm(begun.saturating_sub(WRITES_END_WITHIN));
        validity.over().await;
        validity.confirm(now + 1000 * SECOND);
        assert!(time::timeout(10 * SECOND, validity.over()).await.is_err());
    }
}

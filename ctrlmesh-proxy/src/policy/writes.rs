//! Counts a pod's writes that are under way, by slot, for each policy under which they began.
//!
//! A new policy may forbid writes that an earlier one allowed. Writes that begin under the new policy are refused.
//! Those that began before are waited for, and cut where they take too long.

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::slots::COUNT;
use ctrlmesh_request::decide::Written;
use ctrlmesh_runtime::poll_on_wake::PollOnWake;
use ctrlmesh_runtime::sync::lock;
use tokio::sync::Notify;
use tokio::time::Instant;

/// The place of writes to fenced objects whose slot is not known; those of the slots are before it.
const ANY_SLOT: usize = COUNT as usize;

/// The place of writes to objects that are not fenced.
const UNFENCED: usize = ANY_SLOT + 1;

const PLACES: usize = UNFENCED + 1;

/// Some of the places, as bits.
type Places = u64;

/// The writes of one pod.
#[derive(Debug, Default)]
pub struct Writes {
    by_policy: Mutex<Vec<Arc<WritesUnder>>>,
}

/// The writes of one pod that began under one policy.
#[derive(Debug)]
pub struct WritesUnder {
    policy: Arc<Policy>,
    under_way: [AtomicU32; PLACES],
    /// Whether somebody waits for the end of writes.
    awaited: AtomicBool,
    ended: Notify,
    /// The places whose writes are cut.
    cut: AtomicU64,
    cutting: Notify,
    /// When a later policy first forbade some of them.
    forbidden_at: OnceLock<Instant>,
}

/// Counts as under way until it is dropped.
#[derive(Debug)]
pub struct Write {
    under: Arc<WritesUnder>,
    place: usize,
}

/// Writes under way that the policy in force forbids.
#[derive(Debug)]
pub(super) struct Forbidden {
    under: Arc<WritesUnder>,
    places: Places,
    /// When they were first forbidden.
    pub(super) since: Instant,
}

impl Writes {
    /// The writes that begin under `policy`.
    pub fn under(&self, policy: &Arc<Policy>) -> Arc<WritesUnder> {
        let mut by_policy = lock(&self.by_policy);
        by_policy.retain(|one| Arc::ptr_eq(&one.policy, policy) || Arc::strong_count(one) > 1);
        if let Some(known) = by_policy.iter().find(|one| Arc::ptr_eq(&one.policy, policy)) {
            return known.clone();
        }
        let under = Arc::new(WritesUnder::new(policy.clone()));
        by_policy.push(under.clone());
        under
    }

    /// The writes under way that `now` forbids. Where it is in force already, no more of them begin.
    pub(super) fn forbidden(&self, now: &Policy) -> Vec<Forbidden> {
        let by_policy = lock(&self.by_policy);
        let forbidden = by_policy.iter().filter_map(|under| {
            let places = forbidden(&under.policy, now);
            under.has(places).then(|| Forbidden {
                under: under.clone(),
                places,
                since: *under.forbidden_at.get_or_init(Instant::now),
            })
        });
        let forbidden = forbidden.collect();
        drop(by_policy);
        forbidden
    }
}

impl WritesUnder {
    fn new(policy: Arc<Policy>) -> Self {
        Self {
            policy,
            under_way: [const { AtomicU32::new(0) }; PLACES],
            awaited: AtomicBool::new(false),
            ended: Notify::new(),
            cut: AtomicU64::new(0),
            cutting: Notify::new(),
            forbidden_at: OnceLock::new(),
        }
    }

    /// Begins a write. The caller then checks that the policy is still in force: one that was replaced before may count
    /// as having no writes.
    pub fn begin(self: &Arc<Self>, written: Written) -> Write {
        let place = match written {
            Written::Slot(slot) => usize::from(slot.number()),
            Written::AnySlot => ANY_SLOT,
            Written::Unfenced => UNFENCED,
        };
        self.under_way[place].fetch_add(1, Ordering::SeqCst);
        Write { under: self.clone(), place }
    }

    fn has(&self, places: Places) -> bool {
        let chosen = self.under_way.iter().enumerate().filter(|(place, _)| places & bit(*place) != 0);
        chosen.into_iter().any(|(_, count)| count.load(Ordering::SeqCst) > 0)
    }
}

impl Write {
    /// Whether it may be to a fenced object.
    pub fn is_fenced(&self) -> bool {
        self.place != UNFENCED
    }

    /// Does `work`, and gives it up where the write is cut first.
    pub async fn unless_cut<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut cut = PollOnWake::new(Box::pin(self.cut()));
        tokio::select! {
            biased;
            done = work => Some(done),
            () = &mut cut => None,
        }
    }

    /// Completes once the write is to be cut.
    async fn cut(&self) {
        loop {
            let cutting = self.under.cutting.notified();
            if self.under.cut.load(Ordering::SeqCst) & bit(self.place) != 0 {
                return;
            }
            cutting.await;
        }
    }
}

impl Drop for Write {
    fn drop(&mut self) {
        self.under.under_way[self.place].fetch_sub(1, Ordering::SeqCst);
        if self.under.awaited.load(Ordering::SeqCst) {
            self.under.ended.notify_waiters();
        }
    }
}

impl Forbidden {
    /// Completes once all of them have ended.
    pub(super) async fn ended(&self) {
        self.under.awaited.store(true, Ordering::SeqCst);
        loop {
            let ended = self.under.ended.notified();
            if !self.under.has(self.places) {
                return;
            }
            ended.await;
        }
    }

    pub(super) fn cut(&self) {
        self.under.cut.fetch_or(self.places, Ordering::SeqCst);
        self.under.cutting.notify_waiters();
    }
}

/// The places of writes that `before` allows, of which `after` forbids some.
fn forbidden(before: &Policy, after: &Policy) -> Places {
    match (before.is_shadow(), after.is_shadow()) {
        // A dry run stores nothing, whenever it ends.
        (true, _) => return 0,
        (false, true) => return (1 << PLACES) - 1,
        (false, false) => {}
    }
    let are_members_alike = before.member_division() == after.member_division();
    let Some(after) = after.fence() else { return 0 };
    let Some(before) = before.fence() else { return bit(UNFENCED) };
    if after.lapses && !before.lapses {
        // Those that are under way would go on when it has lapsed.
        return (1 << PLACES) - 1;
    }
    let taken = before.taken_by(after);
    let slots = taken.iter().fold(0, |places, slot| places | bit(usize::from(slot.number())));
    let any = if taken.is_empty() { 0 } else { bit(ANY_SLOT) };
    let is_alike = before.resources == after.resources && are_members_alike;
    let unfenced = if is_alike { 0 } else { bit(UNFENCED) };
    slots | any | unfenced
}

fn bit(place: usize) -> Places {
    1 << place
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use ctrlmesh_common::policy::{Fence, Mode};
    use ctrlmesh_common::resource::ResourceMatch;
    use ctrlmesh_common::slots::{NamespaceHash, Slot};

    use super::*;

    fn slot(number: i64) -> Slot {
        Slot::try_from(number).unwrap()
    }

    /// A policy of a pod that owns these slots.
    fn owning(slots: &[i64]) -> Arc<Policy> {
        let slots = slots.iter().map(|number| (slot(*number), "mine".to_owned())).collect();
        let fence = Fence { owner: Some("mine".to_owned()), slots, ..Fence::default() };
        Arc::new(Policy { fence: Some(fence), ..Policy::default() })
    }

    fn is_ready(future: impl Future) -> bool {
        pin!(future).poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn only_writes_to_slots_that_are_taken_are_waited_for() {
        let writes = Writes::default();
        let under = writes.under(&owning(&[1, 2]));
        let [taken, kept] = [1, 2].map(|number| under.begin(Written::Slot(slot(number))));
        assert!(writes.forbidden(&owning(&[1, 2, 3])).is_empty());
        let forbidden = writes.forbidden(&owning(&[2]));
        assert_eq!(forbidden.len(), 1);
        assert!(!is_ready(forbidden[0].ended()));
        drop(taken);
        assert!(is_ready(forbidden[0].ended()) && writes.forbidden(&owning(&[2])).is_empty());
        drop(kept);
        // Slot 1 is given back, and taken again.
        let again = writes.under(&owning(&[1])).begin(Written::Slot(slot(1)));
        assert!(writes.forbidden(&owning(&[1])).is_empty());
        assert_eq!(writes.forbidden(&owning(&[])).len(), 1);
        drop(again);
    }

    #[test]
    fn a_write_whose_slot_is_not_known_may_be_in_one_that_is_taken() {
        let writes = Writes::default();
        let _write = writes.under(&owning(&[1, 2])).begin(Written::AnySlot);
        assert!(writes.forbidden(&owning(&[1, 2])).is_empty());
        assert_eq!(writes.forbidden(&owning(&[2])).len(), 1);
    }

    #[test]
    fn writes_from_before_a_fence_are_waited_for() {
        let writes = Writes::default();
        let _write = writes.under(&Arc::default()).begin(Written::Unfenced);
        assert_eq!(writes.forbidden(&owning(&[1])).len(), 1);
        assert!(writes.forbidden(&Policy::default()).is_empty());
        let pass = Policy { mode: Mode::Pass, ..owning(&[1]).as_ref().clone() };
        assert!(writes.forbidden(&pass).is_empty());
        // Under a fence of other kinds, too.
        let writes = Writes::default();
        let _write = writes.under(&owning(&[1])).begin(Written::Unfenced);
        assert!(writes.forbidden(&owning(&[])).is_empty());
        let mut other = owning(&[1]).as_ref().clone();
        let pods = ResourceMatch { api_groups: vec![String::new()], resources: vec!["pods".to_owned()] };
        other.fence.as_mut().unwrap().resources.push(pods);
        assert_eq!(writes.forbidden(&other).len(), 1);
    }

    #[test]
    fn a_shadow_forbids_every_write_from_before_and_its_own_are_none() {
        let writes = Writes::default();
        let shadow = Arc::new(Policy { shadow: true, ..owning(&[1]).as_ref().clone() });
        let _write = writes.under(&owning(&[1])).begin(Written::Slot(slot(1)));
        assert_eq!(writes.forbidden(&shadow).len(), 1);
        let writes = Writes::default();
        let _dry_run = writes.under(&shadow).begin(Written::Unfenced);
        assert!(writes.forbidden(&shadow).is_empty() && writes.forbidden(&owning(&[2])).is_empty());
    }

    #[test]
    fn another_hash_forbids_every_write_from_before() {
        let writes = Writes::default();
        let _write = writes.under(&owning(&[1])).begin(Written::Slot(slot(1)));
        let mut other = owning(&[1]).as_ref().clone();
        other.fence.as_mut().unwrap().hash = NamespaceHash::Kusionstack;
        assert_eq!(writes.forbidden(&other).len(), 1);
    }

    #[test]
    fn a_cut_reaches_the_writes_that_are_forbidden_and_no_other() {
        let writes = Writes::default();
        let under = writes.under(&owning(&[1, 2]));
        let [taken, kept] = [1, 2].map(|number| under.begin(Written::Slot(slot(number))));
        let mut cut = pin!(taken.cut());
        let mut cx = Context::from_waker(Waker::noop());
        assert!(cut.as_mut().poll(&mut cx).is_pending());
        writes.forbidden(&owning(&[2]))[0].cut();
        assert!(cut.as_mut().poll(&mut cx).is_ready());
        assert!(!is_ready(kept.cut()));
    }

    #[test]
    fn policies_without_writes_are_forgotten() {
        let writes = Writes::default();
        for _ in 0..10 {
            drop(writes.under(&owning(&[1])));
        }
        assert_eq!(lock(&writes.by_policy).len(), 1);
    }
}

//! Waits, after each change of a pod's policy, until what the new policy forbids has ended.
//!
//! Then the policy is settled: no write is under way that it forbids, and no watch shows what it takes away. Only then
//! may the manager give what was taken to another pod.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ctrlmesh_common::policy::Policy;
use ctrlmesh_runtime::drain::Drain;
use tokio::sync::watch;
use tokio::time;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::loss;
use super::writes::Writes;
use super::{Current, History, PodName};

/// The settled policies of the pods that are served.
#[derive(Clone, Debug)]
pub struct SettledPolicies(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    by_pod: watch::Sender<HashMap<PodName, Entry>>,
    entries: AtomicU64,
}

#[derive(Clone, Debug)]
pub(super) struct Entry {
    number: u64,
    /// `None` until the first is settled.
    policy: Option<Arc<Policy>>,
}

/// Where a pod's settled policies are published, until it is dropped. The default publishes them nowhere.
#[derive(Debug, Default)]
pub struct Publish(Option<Published>);

#[derive(Debug)]
struct Published {
    to: SettledPolicies,
    pod: PodName,
    number: u64,
}

/// What of a pod may be under way when its policy changes.
#[derive(Clone, Debug)]
pub struct UnderWay {
    pub policy: Current,
    pub writes: Arc<Writes>,
    /// For the watches.
    pub history: Arc<History>,
}

impl Default for SettledPolicies {
    fn default() -> Self {
        let by_pod = watch::Sender::new(HashMap::new());
        Self(Arc::new(Shared { by_pod, entries: AtomicU64::new(0) }))
    }
}

impl SettledPolicies {
    /// Begins with a pod that is about to be served. From now on no policy of it is settled until that is published.
    pub(super) fn begin(&self, pod: PodName) -> Publish {
        let number = self.0.entries.fetch_add(1, Ordering::Relaxed);
        let entry = Entry { number, policy: None };
        self.0.by_pod.send_modify(|all| drop(all.insert(pod.clone(), entry)));
        Publish(Some(Published { to: self.clone(), pod, number }))
    }

    /// Whether `policy` is settled. It is where the pod is not served.
    pub(super) fn has(&self, pod: &PodName, policy: &Policy) -> bool {
        is_settled(&self.0.by_pod.borrow(), pod, policy)
    }

    /// The epoch of a served pod's settled policy; 0 before the first.
    pub(super) fn epoch(&self, pod: &PodName) -> Option<u64> {
        let by_pod = self.0.by_pod.borrow();
        by_pod.get(pod).map(|entry| entry.policy.as_ref().map_or(0, |policy| policy.epoch))
    }

    /// Changes with each policy that is settled.
    pub(super) fn changes(&self) -> watch::Receiver<HashMap<PodName, Entry>> {
        self.0.by_pod.subscribe()
    }

    /// Completes once `policy` is settled.
    pub(super) async fn wait_for(&self, pod: &PodName, policy: &Policy) {
        let mut by_pod = self.0.by_pod.subscribe();
        // The sender is here, so this does not fail.
        drop(by_pod.wait_for(|by_pod| is_settled(by_pod, pod, policy)).await);
    }
}

fn is_settled(by_pod: &HashMap<PodName, Entry>, pod: &PodName, policy: &Policy) -> bool {
    by_pod.get(pod).is_none_or(|entry| entry.policy.as_deref() == Some(policy))
}

impl Publish {
    fn publish(&self, policy: &Arc<Policy>) {
        let Some(Published { to, pod, number }) = &self.0 else { return };
        to.0.by_pod.send_modify(|all| {
            if let Some(entry) = all.get_mut(pod).filter(|entry| entry.number == *number) {
                entry.policy = Some(policy.clone());
            }
        });
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        let Self { to, pod, number } = self;
        to.0.by_pod.send_if_modified(|all| {
            let ours = all.get(pod).is_some_and(|entry| entry.number == *number);
            ours && all.remove(pod).is_some()
        });
    }
}

impl UnderWay {
    /// Settles each policy, until shutdown or until the pod is `gone`. Writes have `timeout` to end, and are then cut.
    /// Watches have as long to be led over.
    pub async fn settle(mut self, timeout: Duration, publish: Publish, drain: Drain, gone: Option<CancellationToken>) {
        let over = async {
            match &gone {
                Some(gone) => tokio::select! {
                    () = gone.cancelled() => {}
                    () = drain.started() => {}
                },
                None => drain.started().await,
            }
        };
        tokio::select! {
            () = over => {}
            () = self.follow(timeout, &publish) => {}
        }
    }

    async fn follow(&mut self, timeout: Duration, publish: &Publish) {
        let mut settled = Arc::<Policy>::default();
        let mut since = None;
        loop {
            let now = self.policy.borrow_and_update().clone();
            let begun = *since.get_or_insert_with(Instant::now);
            let ended = tokio::select! {
                () = until_allowed(&self.writes, &self.history, (&settled, &now), begun, timeout) => {
                    publish.publish(&now);
                    (settled, since) = (now, None);
                    self.policy.changed().await.is_err()
                }
                changed = self.policy.changed() => changed.is_err(),
            };
            if ended {
                // The policy's source has ended: the last one stays.
                return std::future::pending().await;
            }
        }
    }
}

/// Completes once nothing is under way that `now` forbids. `before` is the last policy of which that was true.
async fn until_allowed(
    writes: &Writes,
    history: &History,
    (before, now): (&Policy, &Policy),
    since: Instant,
    timeout: Duration,
) {
    for forbidden in writes.forbidden(now) {
        if time::timeout_at(forbidden.since + timeout, forbidden.ended()).await.is_err() {
            forbidden.cut();
            forbidden.ended().await;
        }
    }
    let takes = match (before.fence(), now.fence()) {
        (Some(before), Some(now)) => !before.taken_by(now).is_empty(),
        (Some(_), None) => now.is_shadow(),
        _ => false,
    };
    let takes = takes || loss::loses_members(before.members(), now.members());
    if takes && time::timeout_at(since + timeout, history.read_by_nobody_but(now)).await.is_err() {
        warn!(epoch = now.epoch, "some watches do not follow the policy: their clients do not read");
    }
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::policy::{Fence, Limit};
    use ctrlmesh_common::resource::ResourceKey;
    use ctrlmesh_common::selector::Selector;
    use ctrlmesh_common::slots::Slot;
    use ctrlmesh_request::decide::Written;

    use super::*;
    use crate::policy::ReadOf;

    const TIMEOUT: Duration = Duration::from_secs(5);

    /// A policy of a pod that owns these slots, and sees them.
    fn owning(epoch: u64, slots: &[i64]) -> Arc<Policy> {
        let slots = slots.iter().map(|number| Slot::try_from(*number).unwrap());
        let owners = slots.map(|slot| (slot, "mine".to_owned())).collect();
        let fence = Fence { owner: Some("mine".to_owned()), slots: owners, ..Fence::default() };
        let selector = Selector::parse(&format!("epoch={epoch}")).unwrap();
        let limits = vec![Limit { selector, ..Limit::default() }];
        Arc::new(Policy { epoch, limits, fence: Some(fence), ..Policy::default() })
    }

    struct Bed {
        policy: watch::Sender<Arc<Policy>>,
        under_way: UnderWay,
        settled: SettledPolicies,
        drain: Drain,
    }

    fn pod() -> PodName {
        "ns/op-0".parse().unwrap()
    }

    impl Bed {
        /// The first policy is settled.
        async fn new(first: &Arc<Policy>) -> Self {
            let (policy, current) = watch::channel(first.clone());
            let under_way = UnderWay { policy: current, writes: Arc::default(), history: Arc::default() };
            let (settled, drain) = (SettledPolicies::default(), Drain::default());
            let publish = settled.begin(pod());
            assert!(!settled.has(&pod(), first) && settled.epoch(&pod()) == Some(0));
            drain.spawn(under_way.clone().settle(TIMEOUT, publish, drain.clone(), None));
            settled.wait_for(&pod(), first).await;
            Self { policy, under_way, settled, drain }
        }

        /// How many seconds it takes until a policy is settled.
        async fn settles(&self, policy: &Arc<Policy>) -> u64 {
            let begun = Instant::now();
            self.policy.send_replace(policy.clone());
            self.settled.wait_for(&pod(), policy).await;
            begun.elapsed().as_secs()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_policy_settles_at_once_where_nothing_is_under_way() {
        let bed = Bed::new(&owning(1, &[1])).await;
        for (epoch, slots) in [(2, &[][..]), (3, &[1]), (4, &[2])] {
            assert_eq!(bed.settles(&owning(epoch, slots)).await, 0);
            assert_eq!(bed.settled.epoch(&pod()), Some(epoch));
        }
        assert!(bed.drain.finish(TIMEOUT).await);
        assert_eq!(bed.settled.epoch(&pod()), None, "it is served no more");
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_is_cut_at_the_timeout_despite_policy_changes() {
        let first = owning(1, &[1]);
        let bed = Bed::new(&first).await;
        let slot = Slot::try_from(1).unwrap();
        let write = bed.under_way.writes.under(&first).begin(Written::Slot(slot));
        let writing = async move { write.unless_cut(std::future::pending::<()>()).await };
        let begun = Instant::now();
        let settling = async {
            for epoch in 2..5 {
                bed.policy.send_replace(owning(epoch, &[]));
                time::sleep(TIMEOUT / 4).await;
            }
            bed.settled.wait_for(&pod(), &owning(4, &[])).await;
        };
        let (cut, ()) = tokio::join!(writing, settling);
        assert_eq!((begun.elapsed().as_secs(), cut), (TIMEOUT.as_secs(), None));
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_delays_what_takes_slots_and_nothing_else() {
        let first = owning(1, &[1, 2]);
        let bed = Bed::new(&first).await;
        let reading = bed.under_way.history.in_force(&first).read(ReadOf::resource(ResourceKey::of_host("", "pods")));
        assert_eq!(bed.settles(&owning(2, &[1, 2, 3])).await, 0);
        assert_eq!(bed.settles(&owning(3, &[1, 2])).await, TIMEOUT.as_secs());
        bed.policy.send_replace(owning(4, &[1]));
        drop(reading);
        assert_eq!(bed.settles(&owning(4, &[1])).await, 0);
    }

    #[test]
    fn a_pod_that_is_served_anew_is_not_ended_by_the_one_before() {
        let settled = SettledPolicies::default();
        let [before, after] = [(); 2].map(|()| settled.begin(pod()));
        before.publish(&owning(1, &[]));
        assert_eq!(settled.epoch(&pod()), Some(0));
        drop(before);
        after.publish(&owning(2, &[]));
        assert_eq!(settled.epoch(&pod()), Some(2));
        drop(after);
        assert_eq!(settled.epoch(&pod()), None);
    }
}

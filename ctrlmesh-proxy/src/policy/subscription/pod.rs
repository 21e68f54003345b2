//! Follows the policy of one pod among those that the manager sends.

use std::sync::Arc;

use ctrlmesh_runtime::drain::Drain;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::Subscription;
use crate::metrics::Metrics;
use crate::policy::enforce::show;
use crate::policy::settle::Publish;
use crate::policy::{
    Current, PodName, PublishGuards, PublishLock, PublishTraffic, PublishWatches, PublishWebhook, Validity,
};

/// What one pod is served by.
#[derive(Debug)]
pub struct PodSubscription {
    /// Followed until shutdown, or until the pod is gone.
    pub policy: Current,
    pub publish: Publications,
    pub validity: Validity,
}

/// Where the manager is told of one pod. The default: nowhere.
#[derive(Debug, Default)]
pub struct Publications {
    /// Its settled policies.
    pub settled: Publish,
    /// The states of its guards.
    pub guards: PublishGuards,
    /// What becomes of calls to its webhook.
    pub webhook: PublishWebhook,
    /// What its requests come to.
    pub traffic: PublishTraffic,
    /// Which kinds it watches.
    pub watches: PublishWatches,
    /// Whether it waits for its lock.
    pub lock: PublishLock,
}

/// Waits for the policy of `pod`, and follows it until shutdown. Nothing may be served before: a request that passes
/// without a policy has escaped its shard.
pub async fn policy_of(
    pod: PodName,
    mut followed: Subscription,
    metrics: &Arc<Metrics>,
    drain: &Drain,
) -> Option<PodSubscription> {
    drop(followed.policies.wait_for(|policies| policies.contains_key(&pod)).await.ok()?);
    policy_now(pod, followed, metrics, drain, &CancellationToken::new())
}

/// The policy of `pod`, where there is one, followed until shutdown or until the pod is `gone`.
pub fn policy_now(
    pod: PodName,
    followed: Subscription,
    metrics: &Arc<Metrics>,
    drain: &Drain,
    gone: &CancellationToken,
) -> Option<PodSubscription> {
    // First, so that no policy after the one that is read here is acknowledged before it is settled.
    let settled = followed.settled.begin(pod.clone());
    let publish = Publications {
        settled,
        guards: followed.reports.guards.begin(pod.clone()),
        webhook: followed.reports.webhooks.begin(pod.clone()),
        traffic: followed.reports.traffic.begin(pod.clone()),
        watches: followed.reports.watches.begin(pod.clone()),
        lock: followed.reports.locks.begin(pod.clone()),
    };
    let validity = followed.validities.of(&pod);
    let mut policies = followed.policies;
    let first = policies.borrow_and_update().get(&pod)?.policy.clone();
    let (sender, current) = watch::channel(first);
    let (shown, name) = (current.clone(), pod.to_string());
    drain.spawn(show(shown, name, metrics.clone(), drain.clone(), gone.clone()));
    let (stop, gone) = (drain.clone(), gone.clone());
    drain.spawn(async move {
        loop {
            tokio::select! {
                // Shutdown.
                () = stop.started() => return,
                // The pod is served no more.
                () = gone.cancelled() => return,
                changed = policies.changed() => if changed.is_err() { return },
            }
            let now = policies.borrow_and_update().get(&pod).map(|kept| kept.policy.clone());
            if let Some(now) = now {
                sender.send_if_modified(|current| {
                    // An equal policy is no change.
                    let differs = *current != now;
                    if differs {
                        *current = now;
                    }
                    differs
                });
            }
        }
    });
    Some(PodSubscription { policy: current, publish, validity })
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::policy::{PodPolicy, Policy};
    use tokio::task;

    use super::*;
    use crate::policy::settle::SettledPolicies;
    use crate::policy::store::PodPolicies;
    use crate::policy::{AllReports, Validities};

    #[tokio::test]
    async fn an_equal_policy_is_no_change() {
        let policies = |epoch| PodPolicies::from([(PodName::default(), pod_policy(epoch))]);
        let (sender, receiver) = watch::channel(Arc::new(policies(1)));
        let (metrics, drain) = (Metrics::new(), Drain::default());
        let gone = CancellationToken::new();
        let pod = PodName::default();
        let (_, whole) = watch::channel(true);
        let (_, servers) = watch::channel(Arc::default());
        let followed = Subscription {
            policies: receiver,
            whole,
            servers,
            settled: SettledPolicies::default(),
            reports: AllReports::default(),
            validities: Validities::default(),
        };
        let PodSubscription { policy: mut current, publish: _publish, .. } =
            policy_now(pod, followed, &metrics, &drain, &gone).unwrap();
        let first = current.borrow_and_update().clone();
        sender.send_replace(Arc::new(policies(1)));
        for _ in 0..16 {
            task::yield_now().await;
        }
        assert!(Arc::ptr_eq(&first, &current.borrow()));
        sender.send_replace(Arc::new(policies(2)));
        current.changed().await.unwrap();
        assert_eq!(current.borrow().epoch, 2);
    }

    fn pod_policy(epoch: u64) -> PodPolicy {
        PodPolicy {
            namespace: String::new(),
            name: String::new(),
            uid: String::new(),
            digest: epoch,
            operator: String::new(),
            version: 1,
            policy: Arc::new(Policy { epoch, ..Policy::default() }),
        }
    }
}

//! Confirms the policies of proxies that lapse, while this replica leads; else has the leader do it.
//!
//! The leader moves what a silent pod owned once it has not confirmed that pod for long enough. So nobody else confirms
//! anything, and the leader confirms only the policy that it wants for the pod by now. What it wants must be no older
//! than what the leader before it wrote: of each operator it asks the API server for the newest version, once.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ctrlmesh_common::wire::{MAX_KNOWN, PodId, PolicyInForce, RenewRequest, Renewed};
use ctrlmesh_runtime::sync::lock;
use tokio::sync::Semaphore;
use tokio::time;
use tonic::{Response, Status};
use tracing::debug;

use super::{Accounts, PushService};
use crate::cluster::confirmations::Confirmations;
use crate::metrics::Refused;
use crate::push::identity::Identity;
use crate::push::policy_store::{EnrolledPod, PolicyStore};
use crate::push::staleness::{StalenessCheck, StalenessError};
use crate::rules::compile::CompiledPolicy;
use crate::telemetry;

/// By operator, the version of its ShardingConfig from which policies are confirmed.
#[derive(Debug)]
pub struct OldestConfirmed {
    known: Mutex<Known>,
    /// One question at a time: all proxies ask when a leader begins.
    asking: Semaphore,
}

#[derive(Debug, Default)]
struct Known {
    /// Since when the replica led that asked.
    since: Option<time::Instant>,
    versions: BTreeMap<String, u64>,
}

impl Default for OldestConfirmed {
    fn default() -> Self {
        Self { known: Mutex::default(), asking: Semaphore::new(1) }
    }
}

impl OldestConfirmed {
    /// `since` is when this replica began to lead. What was asked before that counts no more.
    async fn of(&self, operator: &str, since: time::Instant, check: &StalenessCheck) -> Result<u64, StalenessError> {
        if let Some(known) = self.known(operator, since) {
            return Ok(known);
        }
        // It is never closed.
        let _turn = self.asking.acquire().await.map_err(|_closed| StalenessError::Late)?;
        if let Some(known) = self.known(operator, since) {
            return Ok(known);
        }
        // Nothing is confirmed of one that does not exist.
        let version = check.newest(operator).await?.unwrap_or(u64::MAX);
        if version < u64::MAX {
            lock(&self.known).insert(operator, since, version);
        }
        Ok(version)
    }

    fn known(&self, operator: &str, since: time::Instant) -> Option<u64> {
        lock(&self.known).get(operator, since)
    }
}

impl Known {
    fn get(&mut self, operator: &str, since: time::Instant) -> Option<u64> {
        if self.since != Some(since) {
            *self = Self { since: Some(since), versions: BTreeMap::new() };
        }
        self.versions.get(operator).copied()
    }

    fn insert(&mut self, operator: &str, since: time::Instant, version: u64) {
        if self.since == Some(since) {
            self.versions.insert(operator.to_owned(), version);
        }
    }
}

/// Answers a proxy, or another replica that relays for its proxies.
pub(super) async fn answer(
    push: &PushService,
    identity: &Identity,
    mut asked: RenewRequest,
) -> Result<Response<Renewed>, Status> {
    if asked.policies.len() > MAX_KNOWN {
        let status = Status::invalid_argument("renews more pods than a node has");
        return Err(push.refuse(Refused::Message, identity, status));
    }
    let is_relayed = identity.account == push.accounts.manager;
    if !is_relayed {
        let mut is_foreign = false;
        // Of a pod that is not known here it is not known either who serves it.
        asked.policies.retain(|one| {
            let pod = served_pod(&push.store, one);
            is_foreign |= pod.as_ref().is_some_and(|pod| !may_renew(pod, &push.accounts, identity));
            pod.is_some()
        });
        if is_foreign {
            let status = Status::permission_denied("renews the policy of a pod that it does not serve");
            return Err(push.refuse(Refused::Foreign, identity, status));
        }
        if !push.leadership.is_held() {
            return push.leader.renew(asked).await.map(Response::new);
        }
    }
    let mut confirmed = Vec::new();
    for one in asked.policies {
        if confirms(push, &one).await {
            confirmed.extend(one.pod);
        }
    }
    Ok(Response::new(Renewed { confirmed }))
}

/// A node's proxy renews for the pods of its node in which there is no other, a pod for itself.
fn may_renew(pod: &EnrolledPod, accounts: &Accounts, identity: &Identity) -> bool {
    if identity.account == accounts.node {
        return pod.node.is_some() && pod.node == identity.node && pod.is_served_inside() != Some(true);
    }
    pod.uid == identity.uid && pod.name == identity.pod
}

fn served_pod(store: &PolicyStore, asked: &PolicyInForce) -> Option<Arc<EnrolledPod>> {
    let pod = asked.pod.as_ref()?;
    store.find(&pod.pod_name(), &pod.uid)
}

async fn confirms(push: &PushService, asked: &PolicyInForce) -> bool {
    let (Some(pod), Some(since)) = (&asked.pod, push.leadership.since()) else { return false };
    let Some(operator) = wanted(&push.store, pod, asked.digest).and_then(|policy| policy.operator.clone()) else {
        return false;
    };
    let oldest = match push.oldest_confirmed.of(&operator, since, &push.staleness).await {
        Ok(oldest) => oldest,
        Err(error) => {
            debug!(operator, error = telemetry::chain(&error), "no policy is confirmed yet");
            return false;
        }
    };
    // Again, because the question may have taken long.
    let still_leads = push.leadership.since() == Some(since);
    let wanted = wanted(&push.store, pod, asked.digest).filter(|_| still_leads);
    wanted.is_some_and(|policy| is_confirmed(&push.confirmations, pod, &policy, oldest))
}

/// The policy that this pod shall have, where it lapses and has this digest.
fn wanted(store: &PolicyStore, pod: &PodId, digest: u64) -> Option<Arc<CompiledPolicy>> {
    let EnrolledPod { policy, .. } = &*store.find(&pod.pod_name(), &pod.uid)?;
    let lapses = |policy: &Arc<CompiledPolicy>| policy.policy.fence().is_some_and(|fence| fence.lapses);
    policy.clone().filter(|policy| policy.digest() == digest && lapses(policy))
}

fn is_confirmed(confirmations: &Confirmations, pod: &PodId, policy: &CompiledPolicy, oldest: u64) -> bool {
    policy.version >= oldest && confirmations.confirm(&pod.uid, policy.version, Instant::now())
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::policy::fence::LAPSED_AFTER;
    use ctrlmesh_common::policy::{Fence, Mode, Policy, Redirect};

    use super::*;
    use crate::push::policy_store::tests::{name, notice};

    fn policy(version: u64, fence: Option<Fence>, mode: Mode) -> CompiledPolicy {
        CompiledPolicy::new(None, Some("ns/op".to_owned()), version, Policy { mode, fence, ..Policy::default() })
    }

    fn lapsing(version: u64) -> CompiledPolicy {
        let fence = Fence { lapses: true, owner: Some(version.to_string()), ..Fence::default() };
        policy(version, Some(fence), Mode::Enforce)
    }

    fn publish(store: &PolicyStore, policy: &CompiledPolicy) {
        store.publish([EnrolledPod { policy: Some(Arc::new(policy.clone())), ..notice("a", "one", 1) }]);
    }

    fn pod(uid: &str) -> PodId {
        PodId::of(&name("a"), uid)
    }

    #[test]
    fn only_the_newest_policy_of_the_pod_is_wanted() {
        let (store, uid) = (PolicyStore::default(), "uid-of-a");
        let [old, new] = [lapsing(1), lapsing(2)];
        publish(&store, &old);
        assert!(wanted(&store, &pod(uid), old.digest()).is_some());
        publish(&store, &new);
        assert!(wanted(&store, &pod(uid), old.digest()).is_none(), "an older one");
        assert!(wanted(&store, &pod(uid), new.digest()).is_some());
        assert!(wanted(&store, &pod("other"), new.digest()).is_none(), "of another pod");
        let fence = Fence { lapses: true, ..Fence::default() };
        for lasting in [
            policy(3, Some(Fence::default()), Mode::Enforce),
            policy(3, None, Mode::Enforce),
            policy(3, Some(fence), Mode::Pass),
        ] {
            publish(&store, &lasting);
            assert!(wanted(&store, &pod(uid), lasting.digest()).is_none(), "does not lapse");
        }
    }

    #[test]
    fn a_proxy_renews_for_those_that_it_serves() {
        let accounts = Accounts { node: "sys/node".to_owned(), manager: "sys/manager".to_owned() };
        let identity = |account: &str, pod: &str, node: &str| Identity {
            pod: name(pod),
            uid: format!("uid-of-{pod}"),
            node: Some(node.to_owned()),
            account: account.to_owned(),
        };
        let store = PolicyStore::default();
        let inside = Policy { redirect: Redirect::Sidecar, ..Policy::default() };
        let inside = CompiledPolicy::new(None, Some("ns/op".to_owned()), 1, inside);
        let inside = EnrolledPod { policy: Some(Arc::new(inside)), ..notice("b", "one", 1) };
        store.publish([notice("a", "one", 1), inside]);
        let asked = |pod: &str| PolicyInForce { pod: Some(PodId::of(&name(pod), &format!("uid-of-{pod}"))), digest: 1 };
        for (identity, [a, b, unknown]) in [
            (identity("sys/node", "proxy", "one"), [true, false, false]),
            (identity("sys/node", "proxy", "two"), [false, false, false]),
            (identity("ns/op", "a", "one"), [true, false, false]),
            (identity("ns/op", "b", "one"), [false, true, false]),
            (Identity { uid: "another".to_owned(), ..identity("ns/op", "a", "one") }, [false, false, false]),
        ] {
            let may = |pod| served_pod(&store, &asked(pod)).is_some_and(|pod| may_renew(&pod, &accounts, &identity));
            let may = ["a", "b", "c"].map(may);
            assert_eq!(may, [a, b, unknown], "{identity:?}");
        }
    }

    #[test]
    fn neither_what_may_be_stale_nor_what_lapsed_is_confirmed() {
        let confirmations = Confirmations::default();
        assert!(!is_confirmed(&confirmations, &pod("u"), &lapsing(6), 7), "another leader may have written since");
        assert!(is_confirmed(&confirmations, &pod("u"), &lapsing(7), 7));
        let later = Instant::now() + LAPSED_AFTER;
        assert!(confirmations.lapse("u", 8, later, later + LAPSED_AFTER) <= later + LAPSED_AFTER);
        assert!(!is_confirmed(&confirmations, &pod("u"), &lapsing(7), 7), "it has lapsed");
        assert!(is_confirmed(&confirmations, &pod("u"), &lapsing(8), 7));
    }

    #[test]
    fn what_a_former_term_asked_counts_no_more() {
        let (oldest, since) = (OldestConfirmed::default(), time::Instant::now());
        assert_eq!(oldest.known("ns/op", since), None);
        lock(&oldest.known).insert("ns/op", since, 5);
        assert_eq!(oldest.known("ns/op", since), Some(5));
        let again = since + LAPSED_AFTER;
        assert_eq!(oldest.known("ns/op", again), None);
        lock(&oldest.known).insert("ns/op", since, 5);
        assert_eq!(oldest.known("ns/op", again), None, "an answer of the former term");
    }
}

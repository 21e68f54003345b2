//! Has the manager confirm policies that lapse.

use std::time::Duration;

use bytes::Bytes;
use ctrlmesh_common::policy::{PodPolicy, Redirect};
use ctrlmesh_common::wire::{MAX_KNOWN, PodId, PolicyInForce};
use ctrlmesh_runtime::boot_clock;
use tokio::time::{self, Instant};
use tonic::Status;
use tracing::{debug, info, warn};

use super::{Client, Subscriber};
use crate::manager_client::Connection;
use crate::policy::PodName;

/// How often a policy is confirmed. What was confirmed last holds for at least 12 s without a leader.
const EVERY: Duration = Duration::from_secs(3);

/// Between attempts where not all was confirmed.
const RETRY: Duration = Duration::from_secs(1);

/// For connecting, and for an answer. After that another replica is tried.
const WITHIN: Duration = Duration::from_secs(3);

/// The connection of the stream of policies.
#[derive(Clone, Debug)]
pub(super) struct Link {
    pub(super) connection: Connection,
    /// The manager's last review ticket, or empty.
    pub(super) ticket: Bytes,
}

impl Client {
    /// Has policies confirmed for ever, while there are some that lapse.
    pub(super) async fn renew(&self) {
        let (mut settled, mut links) = (self.settled.changes(), self.link.subscribe());
        let mut other = None;
        let mut was_confirmed = true;
        loop {
            settled.mark_unchanged();
            let lapsing = self.lapsing();
            let mut wait = None;
            if !lapsing.is_empty() {
                let all = self.renew_once(lapsing, &mut other).await;
                if all != was_confirmed {
                    log(all);
                }
                was_confirmed = all;
                wait = Some(Instant::now() + if all { EVERY } else { RETRY });
            }
            let due = async {
                match wait {
                    Some(at) => time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            let mut due = Box::pin(due);
            loop {
                tokio::select! {
                    () = &mut due => break,
                    // The senders are fields of this client.
                    _ = settled.changed() => if wait.is_none() || self.has_unconfirmed() { break },
                    _ = links.changed() => {
                        let is_new = links.borrow_and_update().is_some();
                        if is_new {
                            other = None;
                        }
                        if is_new && self.has_unconfirmed() {
                            break;
                        }
                    }
                }
            }
        }
    }

    /// The policies that lapse, of the pods whose writes pass here. One that is not settled yet is not in force alone:
    /// what it forbids may still be written.
    fn lapsing(&self) -> Vec<(PodName, PolicyInForce)> {
        let policies = self.policies.borrow().clone();
        let of_node = matches!(self.served, Subscriber::Node(_));
        let lapses = |one: &PodPolicy| one.policy.fence().is_some_and(|fence| fence.lapses);
        let is_here = |one: &PodPolicy| !of_node || one.policy.redirect == Redirect::Node;
        let lapsing = policies.iter().filter(|(pod, one)| {
            lapses(one) && is_here(one) && !one.uid.is_empty() && self.settled.has(pod, &one.policy)
        });
        let in_force =
            |pod: &PodName, one: &PodPolicy| PolicyInForce { pod: Some(PodId::of(pod, &one.uid)), digest: one.digest };
        lapsing.take(MAX_KNOWN).map(|(pod, one)| (pod.clone(), in_force(pod, one))).collect()
    }

    fn has_unconfirmed(&self) -> bool {
        let now = boot_clock::now();
        self.lapsing().iter().any(|(pod, _)| !self.validities.of(pod).holds(now))
    }

    /// Returns whether all were confirmed. `other` is a connection beside the stream's, where that does not answer.
    async fn renew_once(&self, lapsing: Vec<(PodName, PolicyInForce)>, other: &mut Option<Connection>) -> bool {
        // A confirmation holds from here on.
        let asked = boot_clock::now();
        let policies = lapsing.iter().map(|(_, policy)| policy.clone()).collect();
        match Box::pin(self.ask(policies, other)).await {
            Ok(confirmed) => {
                for pod in &confirmed {
                    self.take_confirmation(pod, asked);
                }
                let is_confirmed = |one: &PolicyInForce| one.pod.as_ref().is_some_and(|pod| confirmed.contains(pod));
                let all = lapsing.iter().all(|(_, one)| is_confirmed(one));
                // A replica that began later may not know the pods yet.
                other.take_if(|_| !all);
                all
            }
            Err(error) => {
                debug!(error = error.message(), "no policy is confirmed");
                false
            }
        }
    }

    async fn ask(&self, policies: Vec<PolicyInForce>, other: &mut Option<Connection>) -> Result<Vec<PodId>, Status> {
        let link = self.link.borrow().clone();
        let ticket = link.as_ref().map(|link| link.ticket.clone()).unwrap_or_default();
        let used = other.take();
        let is_other = used.is_some();
        let answer = match used.or_else(|| link.map(|link| link.connection)) {
            Some(mut connection) => {
                let answer = time::timeout(WITHIN, connection.renew(policies, &ticket)).await;
                let answer = answer.unwrap_or_else(|_elapsed| Err(Status::unavailable("the manager does not answer")));
                *other = Some(connection).filter(|_| is_other && answer.is_ok());
                answer
            }
            None => Err(Status::unavailable("there is no connection to the manager")),
        };
        if answer.is_err() && !is_other {
            // The Service may lead to another replica.
            let connected = time::timeout(WITHIN, Box::pin(self.manager.connect(&self.drain))).await;
            *other = connected.ok().and_then(Result::ok);
        }
        answer
    }

    fn take_confirmation(&self, id: &PodId, asked: Duration) {
        let pod = id.pod_name();
        // While the policies are borrowed, no other pod takes this one's name.
        let policies = self.policies.borrow();
        if policies.get(&pod).is_some_and(|one| one.uid == id.uid) {
            self.validities.confirm(&pod, asked);
        }
    }
}

fn log(all_confirmed: bool) {
    if all_confirmed {
        info!("the manager confirms every policy that lapses");
    } else {
        warn!("the manager does not confirm every policy that lapses: without that, writes are refused after 15 s");
    }
}

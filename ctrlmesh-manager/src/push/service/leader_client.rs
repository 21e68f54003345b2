//! Asks the leader which shard a new pod belongs to, and to confirm policies.
//!
//! Replicas of a Deployment that are created together are admitted by several managers. Only one of them can give each
//! pod another shard. The leader's answer only saves pods from being moved later. Without an answer, each replica
//! decides by what it knows itself.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ctrlmesh_common::wire::{self, RenewRequest, Renewed, ShardReply, ShardRequest};
use ctrlmesh_runtime::grpc::Connection;
use ctrlmesh_runtime::sync::lock;
use tokio::time::{self, Instant};
use tonic::{Response, Status};
use tracing::{info, warn};

use super::PushService;
use crate::rules::pod::Member;

/// The API server waits meanwhile, and so does the creator of the pod.
const PATIENCE: Duration = Duration::from_secs(1);

/// For the confirmation of policies: proxies ask again soon.
const RENEW_WITHIN: Duration = Duration::from_secs(3);

/// After a timeout, how long the leader is not asked about this namespace. Its pods wait for one another.
const BACKOFF: Duration = Duration::from_secs(5);

/// The connection to the leader, if there is one. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct LeaderClient(Arc<Mutex<Option<Arc<Connected>>>>);

#[derive(Debug)]
struct Connected {
    connection: Connection,
    backoff: NamespaceBackoff,
}

/// By namespace: until when the leader is not asked.
#[derive(Debug, Default)]
struct NamespaceBackoff(Mutex<HashMap<String, Instant>>);

/// Marks the leader as connected, until this is dropped.
#[derive(Debug)]
pub(super) struct ConnectionGuard(LeaderClient);

impl LeaderClient {
    /// The leader's shard for a pod of a Deployment. None where the leader gives none, is not connected, or is late.
    pub async fn assign_shard(&self, pod: &Member) -> Option<String> {
        let reached = lock(&self.0).clone()?;
        let namespace = &pod.name.namespace;
        if reached.backoff.lasts(namespace) {
            return None;
        }
        let request = ShardRequest {
            namespace: namespace.clone(),
            labels: pod.labels.clone(),
            replica_set: pod.owner.as_ref()?.name.clone(),
        };
        let mut connection = reached.connection.clone();
        let asked = connection.unary::<ShardRequest, ShardReply>(wire::ASSIGN_SHARD, request);
        match time::timeout(PATIENCE, Box::pin(asked)).await {
            Ok(Ok(reply)) => Some(reply.shard).filter(|shard| !shard.is_empty()),
            // An older version, or a replica that has lost the Lease.
            Ok(Err(error)) => {
                info!(namespace, error = error.message(), "shard given without the leader");
                None
            }
            Err(_elapsed) => {
                warn!(namespace, silent = ?BACKOFF, "shards given without the leader: no answer in time");
                reached.backoff.begin(namespace);
                None
            }
        }
    }

    /// Has the leader confirm the policies of this replica's proxies.
    ///
    /// # Errors
    /// Where the leader is not connected, is late, or refuses.
    pub(super) async fn renew(&self, asked: RenewRequest) -> Result<Renewed, Status> {
        let reached = lock(&self.0).clone().ok_or_else(|| Status::unavailable("no leader is connected"))?;
        let mut connection = reached.connection.clone();
        let renewing = connection.unary(wire::RENEW, asked);
        let late = |_elapsed| Status::unavailable("the leader does not answer");
        time::timeout(RENEW_WITHIN, Box::pin(renewing)).await.map_err(late)?
    }

    pub(super) fn reached(&self, connection: &Connection) -> ConnectionGuard {
        let reached = Connected { connection: connection.clone(), backoff: NamespaceBackoff::default() };
        *lock(&self.0) = Some(Arc::new(reached));
        ConnectionGuard(self.clone())
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        *lock(&self.0.0) = None;
    }
}

impl NamespaceBackoff {
    fn begin(&self, namespace: &str) {
        let now = Instant::now();
        let mut all = lock(&self.0);
        all.retain(|_, until| now < *until);
        all.insert(namespace.to_owned(), now + BACKOFF);
    }

    fn lasts(&self, namespace: &str) -> bool {
        lock(&self.0).get(namespace).is_some_and(|until| Instant::now() < *until)
    }
}

/// Answers another replica.
pub(super) async fn answer(push: &PushService, asked: ShardRequest) -> Result<Response<ShardReply>, Status> {
    let pod = Member::of_replica_set(asked.namespace, asked.labels, asked.replica_set);
    let shard = push.placement.give(pod).await.unwrap_or_default();
    Ok(Response::new(ShardReply { shard }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_silent_leader_is_spared_for_one_namespace_and_a_while() {
        let backoff = NamespaceBackoff::default();
        assert!(!backoff.lasts("a"));
        backoff.begin("a");
        assert!(backoff.lasts("a") && !backoff.lasts("b"));
        time::advance(BACKOFF / 2).await;
        assert!(backoff.lasts("a"));
        time::advance(BACKOFF / 2).await;
        assert!(!backoff.lasts("a"));
        backoff.begin("b");
        assert_eq!(lock(&backoff.0).len(), 1, "what is over is forgotten");
    }
}

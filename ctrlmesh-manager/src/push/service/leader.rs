//! How does a replica that is asked about a pod learn what the leader would answer?
//!
//! It asks it, over the connection on which it tells it what proxies say. Of pods of a Deployment that are made together,
//! some are asked about here and some there; only one replica can give each another shard. The leader's word saves pods from
//! being moved, and no more: where it does not come, each replica answers by what it knows itself.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ctrlmesh_common::wire::{Seat, Seated};
use tokio::time::{self, Instant};
use tonic::{Response, Status};
use tracing::{info, warn};

use super::Push;
use super::link::Link;
use crate::rules::pod::Member;
use crate::telemetry;

/// How long the leader may take: the API server waits meanwhile, and whoever makes the pod.
const PATIENCE: Duration = Duration::from_secs(1);

/// For how long a leader that did not answer in time is not asked about pods of that namespace, which wait for one another.
const SILENT: Duration = Duration::from_secs(5);

/// The replica that leads, for the others; clones are one.
#[derive(Clone, Debug, Default)]
pub struct Leader(Arc<Mutex<Option<Arc<Reached>>>>);

/// A leader that is reached.
#[derive(Debug)]
struct Reached {
    link: Link,
    silence: Silence,
}

/// Until when the leader is not asked about pods of a namespace.
#[derive(Debug, Default)]
struct Silence(Mutex<HashMap<String, Instant>>);

/// That the leader is reached, until this is dropped.
#[derive(Debug)]
pub(super) struct Held(Leader);

// === impl Leader ===

impl Leader {
    /// The shard that the leader gives the pod of a Deployment; none where it gives none, is not reached or does not
    /// answer in time.
    pub async fn seat(&self, pod: &Member) -> Option<String> {
        let reached = lock(&self.0).clone()?;
        let namespace = &pod.name.namespace;
        if reached.silence.lasts(namespace) {
            return None;
        }
        let seat = Seat {
            namespace: namespace.clone(),
            labels: pod.labels.clone(),
            replica_set: pod.owner.as_ref()?.name.clone(),
        };
        let mut link = reached.link.clone();
        match time::timeout(PATIENCE, Box::pin(link.seat(seat))).await {
            Ok(Ok(seated)) => Some(seated.shard).filter(|shard| !shard.is_empty()),
            // An older one, or one that does not lead any more.
            Ok(Err(error)) => {
                info!(
                    namespace,
                    error = telemetry::chain(&error),
                    "shard given without the leader"
                );
                None
            }
            Err(_elapsed) => {
                warn!(namespace, silent = ?SILENT, "shards given without the leader: no answer in time");
                reached.silence.begin(namespace);
                None
            }
        }
    }

    /// From now on it is asked over `link`.
    pub(super) fn reached(&self, link: &Link) -> Held {
        let reached = Reached { link: link.clone(), silence: Silence::default() };
        *lock(&self.0) = Some(Arc::new(reached));
        Held(self.clone())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        *lock(&self.0.0) = None;
    }
}

// === impl Silence ===

impl Silence {
    fn begin(&self, namespace: &str) {
        let now = Instant::now();
        let mut all = lock(&self.0);
        all.retain(|_, until| now < *until);
        all.insert(namespace.to_owned(), now + SILENT);
    }

    fn lasts(&self, namespace: &str) -> bool {
        lock(&self.0).get(namespace).is_some_and(|until| Instant::now() < *until)
    }
}

fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives a pod about which another replica was asked its shard.
pub(super) async fn answer(push: &Push, asked: Seat) -> Result<Response<Seated>, Status> {
    let pod = Member::of_replica_set(asked.namespace, asked.labels, asked.replica_set);
    let shard = push.seats.give(pod).await.unwrap_or_default();
    Ok(Response::new(Seated { shard }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_did_not_answer_is_asked_about_other_namespaces_and_after_a_while_about_that_one() {
        let silence = Silence::default();
        assert!(!silence.lasts("a"));
        silence.begin("a");
        assert!(silence.lasts("a") && !silence.lasts("b"));
        time::advance(SILENT / 2).await;
        assert!(silence.lasts("a"));
        time::advance(SILENT / 2).await;
        assert!(!silence.lasts("a"));
        silence.begin("b");
        assert_eq!(lock(&silence.0).len(), 1, "what is over is forgotten");
    }
}

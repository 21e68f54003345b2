//! How does a replica that is asked about a pod learn what the leader would answer?
//!
//! It asks it, over the connection on which it tells it what proxies say. Of pods of a Deployment that are made together,
//! some are asked about here and some there; only one replica can give each another shard. The leader's word saves pods from
//! being moved, and no more: where it does not come, each replica answers by what it knows itself.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ctrlmesh_common::wire::{Seat, Seated};
use tokio::sync::watch;
use tokio::time::{self, Instant};
use tonic::{Response, Status};
use tracing::{debug, warn};

use super::Push;
use super::link::Link;
use crate::pod::Member;
use crate::telemetry;

/// How long the leader may take: the API server waits meanwhile, and whoever makes the pod.
const PATIENCE: Duration = Duration::from_secs(1);

/// For how long a leader that did not answer in time is not asked: pods wait for one another.
const SILENT: Duration = Duration::from_secs(5);

/// The replica that leads, for the others; clones are one.
#[derive(Clone, Debug, Default)]
pub struct Leader(Arc<Known>);

/// What is known of the leader.
#[derive(Debug, Default)]
struct Known {
    link: watch::Sender<Option<Link>>,
    /// Until when it is not asked.
    silent: Mutex<Option<Instant>>,
}

/// That the leader is reached, until this is dropped.
#[derive(Debug)]
pub(super) struct Reached(Leader);

// === impl Leader ===

impl Leader {
    /// The shard that the leader gives the pod of a Deployment; none where it gives none, is not reached or does not
    /// answer in time.
    pub async fn seat(&self, pod: &Member) -> Option<String> {
        let mut link = self.0.link.borrow().clone()?;
        if self.is_silent() {
            return None;
        }
        let seat = Seat {
            namespace: pod.name.namespace.clone(),
            labels: pod.labels.clone(),
            replica_set: pod.maker.as_ref()?.name.clone(),
        };
        match time::timeout(PATIENCE, Box::pin(link.seat(seat))).await {
            Ok(Ok(seated)) => Some(seated.shard).filter(|shard| !shard.is_empty()),
            // An older one, or one that does not lead any more.
            Ok(Err(error)) => {
                debug!(error = telemetry::chain(&error), "the leader gives no shard");
                None
            }
            Err(_elapsed) => {
                warn!(silent = ?SILENT, "the leader does not answer: shards are given without it");
                *self.silent() = Some(Instant::now() + SILENT);
                None
            }
        }
    }

    /// From now on it is asked over `link`.
    pub(super) fn reached(&self, link: &Link) -> Reached {
        *self.silent() = None;
        self.0.link.send_replace(Some(link.clone()));
        Reached(self.clone())
    }

    fn is_silent(&self) -> bool {
        self.silent().is_some_and(|until| Instant::now() < until)
    }

    fn silent(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.0.silent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Reached {
    fn drop(&mut self) {
        self.0.0.link.send_replace(None);
    }
}

/// Gives a pod about which another replica was asked its shard, where this one leads.
pub(super) async fn answer(push: &Push, asked: Seat) -> Result<Response<Seated>, Status> {
    if !push.leadership.is_held() {
        return Err(Status::failed_precondition("does not lead"));
    }
    let pod = Member::of_replica_set(asked.namespace, asked.labels, asked.replica_set);
    let shard = push.seats.give(pod).await.unwrap_or_default();
    Ok(Response::new(Seated { shard }))
}

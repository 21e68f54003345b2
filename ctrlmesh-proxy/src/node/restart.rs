//! Restarts a replica that loses objects, where its policy asks for that.
//!
//! A policy that takes objects away comes into force only once the processes of the pod's containers are gone. So no
//! process sees an object deleted that lives on, and none keeps it in its queue. The kubelet starts the containers
//! again. The policy is acknowledged when it is in force.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ctrlmesh_common::policy::Policy;
use tokio::sync::watch;
use tokio::{task, time};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::error::NotServed;
use super::pod_list::Pod;
use crate::metrics::Metrics;
use crate::policy::{Current, History, PodName, loses};
use ctrlmesh_intercept::containers;
use ctrlmesh_runtime::drain::Drain;

/// Between two looks for processes that are left.
const LOOK: Duration = Duration::from_millis(10);

/// Processes that live on for longer are logged: they may wait for a disk.
const SLOW: Duration = Duration::from_secs(5);

/// A pod whose containers may be restarted.
pub(super) struct Restart {
    pod: PodName,
    cgroup: PathBuf,
    history: Arc<History>,
    metrics: Arc<Metrics>,
}

impl Restart {
    /// `cgroup` is that of the pod; without one, there is nothing to end.
    pub(super) fn new(pod: &Pod, cgroup: Option<PathBuf>, history: &Arc<History>, metrics: &Arc<Metrics>) -> Self {
        let (history, metrics) = (history.clone(), metrics.clone());
        Self { pod: pod.name.clone(), cgroup: cgroup.unwrap_or_default(), history, metrics }
    }

    /// Passes policies on. One that takes objects away is held back until the containers have ended.
    ///
    /// # Errors
    /// If that was left to do by the proxy before this one, and is not over.
    pub(super) fn follow(
        self,
        mut policy: Current,
        drain: &Drain,
        gone: &CancellationToken,
    ) -> Result<Current, NotServed> {
        let first = policy.borrow_and_update().clone();
        if !self.is_over_before(&first)? {
            return Err(NotServed::Ending);
        }
        let (sender, passed) = watch::channel(first);
        let (stop, gone) = (drain.clone(), gone.clone());
        drain.spawn(async move {
            tokio::select! {
                // Shutdown.
                () = stop.started() => {}
                // The pod is served no more.
                () = gone.cancelled() => {}
                () = self.pass_on(policy, sender) => {}
            }
        });
        Ok(passed)
    }

    /// Ends processes that may hold objects which `policy` takes away: a former proxy may have ended before it could.
    /// Returns whether none is left.
    fn is_over_before(&self, policy: &Policy) -> Result<bool, ctrlmesh_intercept::Error> {
        let held_more = |past: &Policy| past.restart_on_loss && loses(past, policy);
        if !policy.restart_on_loss || !self.history.has_past(held_more) {
            return Ok(true);
        }
        let is_over = containers::kill(&self.cgroup)? == 0;
        if is_over {
            self.over();
        }
        Ok(is_over)
    }

    async fn pass_on(self, mut policy: Current, sender: watch::Sender<Arc<Policy>>) {
        while policy.changed().await.is_ok() {
            let (before, mut next) = (sender.borrow().clone(), policy.borrow_and_update().clone());
            if next.restart_on_loss && loses(&before, &next) {
                self.end().await;
                // No process is left that could lose anything by the newest.
                next = policy.borrow_and_update().clone();
            }
            sender.send_replace(next);
        }
    }

    /// Ends the containers' processes, and waits until they are gone.
    async fn end(&self) {
        let (begun, mut told) = (Instant::now(), false);
        info!(pod = %self.pod, "loses objects: its containers are restarted");
        self.metrics.restarted.inc();
        loop {
            let cgroup = self.cgroup.clone();
            let left = match task::spawn_blocking(move || containers::kill(&cgroup)).await {
                Ok(Ok(0)) => break,
                Ok(Ok(left)) => format!("{left} processes are left"),
                Ok(Err(error)) => format!("{:#}", anyhow::Error::from(error)),
                Err(error) => error.to_string(),
            };
            if !told && begun.elapsed() > SLOW {
                warn!(pod = %self.pod, left, "its containers do not end; its policy waits");
                told = true;
            }
            time::sleep(LOOK).await;
        }
        self.over();
    }

    /// No process is left that holds anything.
    fn over(&self) {
        self.history.forget_readers();
        info!(pod = %self.pod, "its containers have ended");
    }
}

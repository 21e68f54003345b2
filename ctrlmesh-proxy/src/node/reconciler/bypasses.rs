//! Keeps what is dropped past the proxy as the pods are.

use std::time::{Duration, Instant};

use tracing::warn;

use super::serving::addresses;
use super::{OWNER, Reconciler};
use crate::node::bypass::BypassRules;
use crate::node::enrolled_pod::Serving;
use ctrlmesh_intercept::BypassFilter;

/// Between two looks at the addresses of pods: they rarely change.
const ADDRESSES_INTERVAL: Duration = Duration::from_secs(30);

impl Reconciler {
    /// Drops what the pods that are served send to the API server past the proxy. Until the list of pods is complete,
    /// what the process before this one has dropped is dropped on.
    pub(super) async fn follow_bypasses(&mut self) {
        let Some(guard) = self.bypass.as_mut().filter(|_| self.pod_source.is_whole()) else { return };
        let all = self.addresses_read.elapsed() >= ADDRESSES_INTERVAL;
        if all {
            self.addresses_read = Instant::now();
        }
        if all || guard.is_due() {
            for pod in self.pods.values_mut() {
                if let Some(Serving::Node(serving)) = &mut pod.serving
                    && (all || serving.addresses.is_empty())
                {
                    serving.addresses = addresses(serving.network, &serving.file);
                }
            }
        }
        let servers = self.targets.borrow().exact().collect();
        let endpoints = self.pod_source.servers().iter().copied().collect();
        guard.follow(BypassRules::of(self.pods.iter(), servers, endpoints)).await;
    }

    /// Where nothing is to be dropped any more, removes what a process before this one has dropped.
    pub(super) fn drop_nothing_unasked(&self) {
        if self.bypass.is_none()
            && let Err(error) = BypassFilter::remove(OWNER)
        {
            warn!(%error, "what pods send past the proxy may be dropped still");
        }
    }
}

//! Takes the connections of pods that are attached, and ends that.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ctrlmesh_intercept::Slot;
use ctrlmesh_intercept::listener::Namespace;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::Reconciler;
use crate::egress::{ApiServers, PodEgress, PodFiles, PodNetwork};
use crate::net::accept::PodSlot;
use crate::node::enrolled_pod::{NodeServing, Serving, SidecarServing};
use crate::node::error::NotServed;
use crate::node::inbound::{self, WebhookListener};
use crate::node::network::{self, NetworkId};
use crate::node::pod_list::{Pod, ServedBy};
use crate::node::restart::Restart;
use crate::session::ServedPod;
use crate::webhook::PodWebhook;

impl Reconciler {
    /// Attaches a pod, if it is not attached yet, and takes its connections.
    pub(super) fn serve(&mut self, pod: &Pod, found: &mut HashSet<PathBuf>) -> Result<(), NotServed> {
        let slot = match self.pods.get(&pod.name) {
            Some(enrolled) => enrolled.slot,
            None => self.enrol(pod, found)?,
        };
        let (serving, begun) = match &pod.served_by {
            ServedBy::Sidecar { container: None } => return Err(NotServed::NoSidecar),
            ServedBy::Sidecar { .. } => (Serving::Sidecar(SidecarServing::default()), Ok(())),
            ServedBy::Node => {
                let (file, network) = self.network(pod)?;
                let gone = CancellationToken::new();
                let addresses = addresses(network, &file);
                let serving = NodeServing { network, file, gone, webhook: WebhookListener::default(), addresses };
                let begun = self.begin(pod, slot, &serving);
                (Serving::Node(serving), begun)
            }
        };
        if begun.is_err() {
            self.end(slot, Some(serving));
        } else if let Some(enrolled) = self.pods.get_mut(&pod.name) {
            enrolled.serving = Some(serving);
        }
        begun
    }

    /// The network namespace of a pod that is enrolled.
    pub(super) fn network(&self, pod: &Pod) -> Result<(PathBuf, NetworkId), NotServed> {
        if let Some(file) = &pod.network {
            let id = NetworkId::of(file).map_err(NotServed::Network)?;
            return Ok((file.clone(), id));
        }
        let cgroup = self.pods.get(&pod.name).map(|enrolled| &enrolled.cgroup.path);
        let (found, unseen) = cgroup.map(|path| network::of_processes(path)).unwrap_or_default();
        // The oldest process's: a later one may have entered a namespace of its own.
        let found = found.into_iter().next().map(|(id, file)| (file, id));
        found.ok_or_else(|| unseen.map_or(NotServed::NoNetwork, NotServed::Network))
    }

    /// Takes a pod's connections: publishes its policy, accepts at its listener, then has the kernel redirect there.
    fn begin(
        &mut self,
        pod: &Pod,
        slot: Slot,
        NodeServing { network: id, file, gone, .. }: &NodeServing,
    ) -> Result<(), NotServed> {
        let subscription = self.pod_source.policy(pod, &self.metrics, &self.drain, gone)?;
        let history = pod.history(self.state.as_deref());
        let cgroup = self.pods.get(&pod.name).map(|enrolled| enrolled.cgroup.path.clone());
        let restart = Restart::new(pod, cgroup.clone(), &history, &self.metrics);
        let policy = restart.follow(subscription.policy, &self.drain, gone)?;
        let served = pod.served(policy, history, self.state.as_deref(), &self.metrics, gone);
        let files = cgroup.map_or_else(PodFiles::own, PodFiles::of_cgroup);
        let webhook =
            PodWebhook::new(pod.name.to_string(), served.policy.clone(), Some(Namespace::open(file)?), files.clone());
        let network = PodNetwork {
            namespace: Some(Namespace::open(file)?),
            files,
            api_servers: ApiServers::Redirected(self.targets.subscribe()),
        };
        let egress = PodEgress::new(served.policy.clone(), Some(network), &served.guards);
        let served = ServedPod { validity: subscription.validity, egress, webhook, ..served };
        served.settle(self.write_drain_timeout, subscription.publish, &self.drain);
        self.publish(|pods| drop(pods.insert(PodSlot(slot.get()), served)));
        let listener = self.networks.join(*id, file, slot)?;
        self.interceptor.beat(u32::from(slot.get()))?;
        self.heartbeat.join(slot);
        if let Some(listener) = listener {
            self.interceptor.listen(slot, listener)?;
        }
        // Where that fails, the pod goes on over IPv4.
        let native = Namespace::open(file).and_then(|network| self.interceptor.serve_ipv6(slot, &network));
        if let Err(error) = native {
            info!(pod = %pod.name, error = &error as &dyn std::error::Error, "no IPv6 of our own");
        }
        Ok(())
    }

    /// Stops taking a pod's connections, and ends the open ones.
    pub(super) fn end(&mut self, slot: Slot, serving: Option<Serving>) {
        self.publish(|pods| drop(pods.remove(&PodSlot(slot.get()))));
        match serving {
            Some(Serving::Node(NodeServing { network, gone, .. })) => {
                // While its connections wait for it, the pod has not left.
                if !self.networks.expected().any(|expected| expected == slot) {
                    self.heartbeat.leave(slot);
                }
                self.networks.leave(network, slot);
                gone.cancel();
            }
            Some(Serving::Sidecar(serving)) => {
                let _cancelled = serving.called.map(|called| called.gone.cancel());
            }
            None => {}
        }
    }

    pub(super) fn publish(&self, change: impl FnOnce(&mut HashMap<PodSlot, ServedPod>)) {
        self.served.send_modify(|pods| change(Arc::make_mut(pods)));
    }
}

/// The first address of each family in a network namespace; none while they are not known, or where the file is another
/// namespace's now.
pub(super) fn addresses(network: NetworkId, file: &Path) -> Vec<IpAddr> {
    if NetworkId::of(file).ok() != Some(network) {
        return Vec::new();
    }
    let namespace = Namespace::open(file).map_err(NotServed::Network);
    let mut all = namespace.and_then(|namespace| inbound::own_addresses(&namespace)).unwrap_or_default();
    // Others may be of further networks, or the pod's own invention.
    let mut families = HashSet::new();
    all.retain(|address| families.insert(address.is_ipv6()));
    all
}

//! Takes the calls to the webhooks that the pods' policies name.
//!
//! Those of pods with a sidecar, too: a proxy inside a pod can neither tell the kernel nor read the files of another
//! container.

use std::sync::Arc;

use ctrlmesh_intercept::Slot;
use ctrlmesh_intercept::listener::Namespace;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::Reconciler;
use crate::egress::PodFiles;
use crate::guard::PodGuards;
use crate::net::accept::PodSlot;
use crate::node::enrolled_pod::{CalledSidecar, Serving};
use crate::node::error::NotServed;
use crate::node::inbound::{CalledPod, WebhookListener};
use crate::node::pod_list::Pod;
use crate::policy::PodName;
use crate::session::ServedPod;
use crate::webhook::{PodWebhook, PortState};
use ctrlmesh_common::policy::Policy;
use ctrlmesh_runtime::telemetry;

impl Reconciler {
    /// Takes calls as the pods' policies say now. A pod where that fails is tried again.
    pub(super) fn follow_webhooks(&mut self) {
        self.follow_sidecars();
        let served = self.served.borrow().clone();
        for (name, pod) in &mut self.pods {
            let slot = pod.slot;
            let Some(serving) = &mut pod.serving else { continue };
            let Some(served) = served.get(&PodSlot(slot.get())) else { continue };
            let port = served.webhook.policy().webhook.as_ref().map(|webhook| webhook.port.get());
            let webhook = serving.webhook();
            // Not by its file, which may be another process's by now.
            let Some(namespace) = served.webhook.namespace().filter(|_| !webhook.listens_at(port)) else { continue };
            let (acceptor, drain) = (self.callers.clone(), self.drain.clone());
            let called = CalledPod { slot, namespace, acceptor, drain };
            match webhook.listen(&mut self.interceptor, &called, port) {
                Ok(addresses) => {
                    if !addresses.is_empty() {
                        info!(pod = %name, ?addresses, "calls to the pod's webhook are taken");
                    }
                    served.webhook.set_port(port.map_or(PortState::Unknown, PortState::Taken));
                }
                Err(error) => {
                    if let Some(port) = port {
                        served.webhook.set_port(PortState::NotTaken { port, error: telemetry::chain(&error) });
                    }
                    webhook.refuse(name, &error);
                }
            }
        }
    }

    /// Has calls to pods with sidecars answered by the policies that the manager lists now.
    fn follow_sidecars(&mut self) {
        let mut unknown = Vec::new();
        for pod in self.pods.values_mut() {
            let Some(Serving::Sidecar(serving)) = &mut pod.serving else { continue };
            let Some(policy) = self.pod_source.policy_now(&pod.pod) else { continue };
            match &serving.called {
                Some(called) => drop(called.policy.send_if_modified(|last| replace(last, policy))),
                None if policy.webhook.is_some() => unknown.push((pod.pod.clone(), pod.slot, policy)),
                None if serving.webhook.listens_at(None) => {}
                None => {
                    let passed = serving.webhook.listen_nowhere(&mut self.interceptor, pod.slot);
                    let _logged = passed.inspect_err(|error| serving.webhook.refuse(&pod.pod.name, error));
                }
            }
        }
        for (pod, slot, policy) in unknown {
            let called = self.call_sidecar(&pod, slot, policy);
            let Some(enrolled) = self.pods.get_mut(&pod.name) else { continue };
            let Some(Serving::Sidecar(serving)) = &mut enrolled.serving else { continue };
            match called {
                Ok(called) => serving.called = Some(called),
                Err(error) => serving.webhook.refuse(&pod.name, &error),
            }
        }
    }

    /// Publishes what answers calls to a pod. Nothing else of the pod's comes to this process.
    fn call_sidecar(&self, pod: &Pod, slot: Slot, policy: Arc<Policy>) -> Result<CalledSidecar, NotServed> {
        let (file, network) = self.network(pod)?;
        let cgroup = self.pods.get(&pod.name).map(|enrolled| enrolled.cgroup.path.clone());
        let files = cgroup.map_or_else(PodFiles::own, PodFiles::of_cgroup);
        let (gone, policy) = (CancellationToken::new(), watch::Sender::new(policy));
        let namespace = Some(Namespace::open(&file)?);
        let webhook = PodWebhook::new(pod.name.to_string(), policy.subscribe(), namespace, files);
        let publish = self.pod_source.publish_webhook(pod);
        self.drain.spawn(webhook.clone().report(publish, self.drain.clone(), Some(gone.clone())));
        // The sidecar guards its own connections.
        let nothing = watch::Sender::new(Arc::new(Policy::nothing())).subscribe();
        let guards = PodGuards::new(nothing.clone(), &self.metrics, None);
        let served = ServedPod { webhook, ..ServedPod::new(nothing, Arc::default(), guards, Some(gone.clone())) };
        self.publish(|pods| drop(pods.insert(PodSlot(slot.get()), served)));
        Ok(CalledSidecar { network, file, gone, policy })
    }
}

impl WebhookListener {
    /// Logs why no call is taken, once.
    fn refuse(&mut self, pod: &PodName, error: &NotServed) {
        let error = telemetry::chain(error);
        if self.refused.as_ref() != Some(&error) {
            warn!(%pod, error, "take calls to the pod's webhook");
            self.refused = Some(error);
        }
    }
}

/// Whether it was another one.
fn replace(last: &mut Arc<Policy>, policy: Arc<Policy>) -> bool {
    let is_new = !Arc::ptr_eq(last, &policy);
    *last = policy;
    is_new
}

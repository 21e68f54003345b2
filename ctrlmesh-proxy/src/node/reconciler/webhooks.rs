//! Takes the calls to the webhooks that the pods' policies name.

use tracing::{info, warn};

use super::Reconciler;
use crate::net::accept::PodSlot;
use crate::node::enrolled_pod::Serving;
use crate::node::inbound::CalledPod;
use ctrlmesh_runtime::telemetry;

impl Reconciler {
    /// Takes calls as the pods' policies say now. A pod where that fails is tried again.
    pub(super) fn follow_webhooks(&mut self) {
        let served = self.served.borrow().clone();
        for (name, pod) in &mut self.pods {
            let slot = pod.slot;
            let Some(Serving::Node(serving)) = &mut pod.serving else { continue };
            let Some(served) = served.get(&PodSlot(slot.get())) else { continue };
            let port = served.policy.borrow().webhook.as_ref().map(|webhook| webhook.port.get());
            // Not by its file, which may be another process's by now.
            let Some(namespace) = served.webhook.namespace().filter(|_| !serving.webhook.listens_at(port)) else {
                continue;
            };
            let (acceptor, drain) = (self.callers.clone(), self.drain.clone());
            let called = CalledPod { slot, namespace, acceptor, drain };
            match serving.webhook.listen(&mut self.interceptor, &called, port) {
                Ok(addresses) if addresses.is_empty() => {}
                Ok(addresses) => info!(pod = %name, ?addresses, "calls to the pod's webhook are taken"),
                Err(error) => {
                    let error = telemetry::chain(&error);
                    if serving.webhook.refused.as_ref() != Some(&error) {
                        warn!(pod = %name, error, "take calls to the pod's webhook");
                        serving.webhook.refused = Some(error);
                    }
                }
            }
        }
    }
}

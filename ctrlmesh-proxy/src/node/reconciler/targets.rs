//! Keeps what the kernel redirects of each pod as the API server's addresses and the pod's policy say.

use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::Reconciler;
use crate::net::accept::PodSlot;
use crate::node::enrolled_pod::Serving;
use crate::node::error::warn_of;
use ctrlmesh_intercept::{Attach, Targets};
use ctrlmesh_runtime::telemetry;

/// How long a connection to a port at any address is remembered after its client closed it: it may not be accepted yet.
const CLOSED_FOR: Duration = Duration::from_secs(10);

/// Between two looks for such connections.
const FORGET_INTERVAL: Duration = Duration::from_secs(5);

impl Reconciler {
    /// Replaces the API server's addresses, also of attached pods. A pod where that fails keeps its old ones.
    pub(super) fn retarget(&mut self, targets: Targets) {
        self.targets = targets;
        for (name, pod) in &mut self.pods {
            pod.attach.targets = self.targets.and_ports(&pod.ports);
            if let Err(error) = self.interceptor.attach(&pod.attach) {
                let error = telemetry::chain(&error);
                warn!(pod = %name, error, "redirect all that is the API server's");
            }
        }
    }

    /// Redirects the ports that the pods' policies name now. A pod where that fails keeps its old ones, and is tried
    /// again.
    pub(super) fn follow_ports(&mut self) {
        let served = self.served.borrow().clone();
        for (name, pod) in self.pods.iter_mut().filter(|(_, pod)| matches!(pod.serving, Some(Serving::Node(_)))) {
            let Some(policy) = served.get(&PodSlot(pod.slot.get())).map(|served| served.policy.borrow().clone()) else {
                continue;
            };
            let ports = policy.egress_ports();
            if pod.ports == ports {
                continue;
            }
            let attach = Attach { targets: self.targets.and_ports(ports), ..pod.attach.clone() };
            match self.interceptor.attach(&attach) {
                Ok(_same_slot) => {
                    info!(pod = %name, ?ports, "connections to these ports are redirected");
                    (pod.attach, pod.ports, pod.refused_ports) = (attach, ports.to_vec(), None);
                }
                Err(error) if pod.refused_ports.as_deref() != Some(ports) => {
                    let error = telemetry::chain(&error);
                    warn!(pod = %name, error, "redirect the ports that rules name");
                    pod.refused_ports = Some(ports.to_vec());
                }
                Err(_known) => {}
            }
        }
    }

    /// Forgets connections to ports at any address that are over.
    pub(super) fn forget_connections(&mut self) {
        if self.forgotten.elapsed() >= FORGET_INTERVAL {
            self.forgotten = Instant::now();
            let forgotten = self.interceptor.forget_connections_closed_for(CLOSED_FOR);
            let _warned = forgotten.inspect_err(warn_of("forget connections that are over"));
        }
    }
}

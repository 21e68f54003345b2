//! Keeps what the kernel redirects of each pod as the API server's addresses and the pod's policy say.

use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::Reconciler;
use crate::net::accept::PodSlot;
use crate::node::enrolled_pod::Serving;
use crate::node::error::warn_of;
use crate::node::pod_list::{Pod, ServedBy};
use crate::node::pod_source;
use ctrlmesh_intercept::{Attach, Interceptor, Target, Targets};
use ctrlmesh_runtime::telemetry;

/// How long a connection to a port at any address is remembered after its client closed it: it may not be accepted yet.
const CLOSED_FOR: Duration = Duration::from_secs(10);

/// Between two looks for such connections.
const FORGET_INTERVAL: Duration = Duration::from_secs(5);

impl Reconciler {
    /// Replaces the API server's addresses, also of attached pods. A pod where that fails keeps its old ones.
    pub(super) fn retarget(&mut self, targets: Targets) {
        for (name, pod) in &mut self.pods {
            pod.attach.targets = targets.and_of_pod(&pod.targets);
            if let Err(error) = self.interceptor.attach(&pod.attach) {
                let error = telemetry::chain(&error);
                warn!(pod = %name, error, "redirect all that is the API server's");
            }
        }
        self.targets.send_replace(targets);
    }

    /// Redirects what the pods' policies name now, beside the API server. A pod where that fails keeps what it had, and
    /// is tried again.
    pub(super) fn follow_targets(&mut self) {
        let served = self.served.borrow().clone();
        for (name, pod) in &mut self.pods {
            let targets = match &pod.serving {
                None => continue,
                Some(Serving::Sidecar(_)) => self.pod_source.targets(&pod.pod),
                Some(Serving::Node(_)) => match served.get(&PodSlot(pod.slot.get())) {
                    Some(served) => pod_source::targets(&served.policy.borrow()),
                    None => continue,
                },
            };
            if pod.targets == targets {
                continue;
            }
            let attach = Attach { targets: self.targets.borrow().and_of_pod(&targets), ..pod.attach.clone() };
            let answered = answer_sidecar(&mut self.interceptor, &pod.pod, &attach, &targets);
            match answered.and_then(|()| self.interceptor.attach(&attach)) {
                Ok(_same_slot) => {
                    let listed: Vec<String> = targets.iter().map(ToString::to_string).collect();
                    info!(pod = %name, targets = ?listed, "connections beside those to the API server are redirected");
                    (pod.attach, pod.targets, pod.refused) = (attach, targets, None);
                }
                Err(error) if pod.refused.as_ref() != Some(&targets) => {
                    let error = telemetry::chain(&error);
                    warn!(pod = %name, error, "redirect what the pod's policy names");
                    pod.refused = Some(targets);
                }
                Err(_known) => {}
            }
        }
    }

    /// Leaves the pod's own targets out where the kernel cannot tell its sidecar where connections were meant to go:
    /// the API server's come first. It is tried again later.
    pub(super) fn answerable(&mut self, pod: &Pod, attach: Attach, targets: Vec<Target>) -> (Attach, Vec<Target>) {
        match answer_sidecar(&mut self.interceptor, pod, &attach, &targets) {
            Ok(()) => (attach, targets),
            Err(error) => {
                warn!(pod = %pod.name, error = telemetry::chain(&error), "only the API server is redirected");
                (Attach { targets: self.targets.borrow().clone(), ..attach }, Vec::new())
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

/// Has the kernel tell a sidecar where connections to others were meant to go.
fn answer_sidecar(
    interceptor: &mut Interceptor,
    pod: &Pod,
    attach: &Attach,
    targets: &[Target],
) -> Result<(), ctrlmesh_intercept::Error> {
    let container = match &pod.served_by {
        // Its container is the one whose own connections pass.
        ServedBy::Sidecar { container: Some(_) } if !targets.is_empty() => attach.except.last(),
        _ => None,
    };
    container.map_or(Ok(()), |container| interceptor.answer_original_destination(container))
}

//! The state of a pod that is attached in the kernel.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ctrlmesh_common::policy::Policy;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::inbound::WebhookListener;
use super::network::{self, NetworkId};
use super::pod_list::Pod;
use crate::policy::PublishEnded;
use ctrlmesh_intercept::cgroup::Cgroup;
use ctrlmesh_intercept::{Attach, Slot, Target};

/// A pod that waits for less is not logged: its container is only being started.
const GRACE_PERIOD: Duration = Duration::from_secs(2);

/// A pod that the kernel knows.
pub(super) struct EnrolledPod {
    pub(super) pod: Pod,
    pub(super) cgroup: Cgroup,
    /// How it is attached.
    pub(super) attach: Attach,
    /// What is redirected beside connections to the API server.
    pub(super) targets: Vec<Target>,
    /// What could not be redirected, so that it is logged once.
    pub(super) refused: Option<Vec<Target>>,
    pub(super) slot: Slot,
    pub(super) serving: Option<Serving>,
    /// When it was enrolled, in milliseconds since 1970; and where the manager is told which containers have ended.
    pub(super) ended: (u64, PublishEnded),
}

/// A pod whose connections are taken.
pub(super) enum Serving {
    /// By this process.
    Node(NodeServing),
    /// By the proxy inside the pod. This process takes the calls to its webhook.
    Sidecar(SidecarServing),
}

/// How this process takes a pod's connections.
pub(super) struct NodeServing {
    pub(super) network: NetworkId,
    /// The file by which the network namespace was found.
    pub(super) file: PathBuf,
    pub(super) gone: CancellationToken,
    pub(super) webhook: WebhookListener,
    /// What others see connections of the pod come from; empty while that is not known.
    pub(super) addresses: Vec<IpAddr>,
}

/// How this process takes the calls to the webhook of a pod whose connections a sidecar takes.
#[derive(Default)]
pub(super) struct SidecarServing {
    pub(super) webhook: WebhookListener,
    /// Absent: it has had no webhook.
    pub(super) called: Option<CalledSidecar>,
}

/// A pod with a sidecar, and with a webhook.
pub(super) struct CalledSidecar {
    pub(super) network: NetworkId,
    /// The file by which the network namespace was found.
    pub(super) file: PathBuf,
    pub(super) gone: CancellationToken,
    /// Kept as the manager's list has it.
    pub(super) policy: watch::Sender<Arc<Policy>>,
}

/// Why a pod is not served yet, so that it is logged once.
pub(super) struct Complaint {
    text: String,
    since: Instant,
    logged: bool,
}

impl EnrolledPod {
    /// Whether its cgroup is still the one that was attached, and its network namespace the one that is listened in,
    /// as far as that can be seen.
    pub(super) fn is_current(&self) -> bool {
        is_cgroup(&self.cgroup.path, self.cgroup.id) && !self.network_changed()
    }

    /// What others see connections of the pod come from, where this process takes those to the API server.
    pub(super) fn addresses(&self) -> &[IpAddr] {
        match &self.serving {
            Some(Serving::Node(serving)) => &serving.addresses,
            _ => &[],
        }
    }

    fn network_changed(&self) -> bool {
        let Some((file, network)) = self.serving.as_ref().and_then(Serving::network) else { return false };
        if let Some(file) = &self.pod.network {
            return NetworkId::of(file).is_ok_and(|now| now != network);
        }
        // The pod's oldest process, by which it was found, may be gone, and its PID another's.
        if NetworkId::of(file).is_ok_and(|now| now == network) {
            return false;
        }
        let (now, _) = network::of_processes(&self.cgroup.path);
        now.first().is_some_and(|(oldest, _)| *oldest != network)
    }
}

impl Serving {
    pub(super) fn webhook(&mut self) -> &mut WebhookListener {
        match self {
            Self::Node(serving) => &mut serving.webhook,
            Self::Sidecar(serving) => &mut serving.webhook,
        }
    }

    /// The network namespace that this process listens in, and the file by which it was found.
    fn network(&self) -> Option<(&Path, NetworkId)> {
        match self {
            Self::Node(serving) => Some((&serving.file, serving.network)),
            Self::Sidecar(serving) => serving.called.as_ref().map(|called| (called.file.as_path(), called.network)),
        }
    }
}

impl Complaint {
    pub(super) fn new(text: String) -> Self {
        Self { text, since: Instant::now(), logged: false }
    }

    /// Whether `text` is to be logged now. True once for each text.
    pub(super) fn is_due(&mut self, text: &str) -> bool {
        if self.text != text {
            // After one was logged, the next is logged at once.
            self.logged = false;
            text.clone_into(&mut self.text);
        }
        let due = !self.logged && self.since.elapsed() >= GRACE_PERIOD;
        self.logged |= due;
        due
    }
}

fn is_cgroup(path: &Path, id: u64) -> bool {
    fs::metadata(path).is_ok_and(|folder| folder.ino() == id)
}

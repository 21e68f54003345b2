//! The state of a pod that is attached in the kernel.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::network::{self, NetworkId};
use super::pod_list::Pod;
use ctrlmesh_intercept::cgroup::Cgroup;
use ctrlmesh_intercept::{Attach, Slot};

/// What is said of a pod that waits for no longer than this is said to nobody: its container is only being started.
const PATIENCE: Duration = Duration::from_secs(2);

/// A pod that the kernel knows.
pub(super) struct EnrolledPod {
    pub(super) pod: Pod,
    pub(super) cgroup: Cgroup,
    /// How it is attached.
    pub(super) attach: Attach,
    pub(super) slot: Slot,
    pub(super) serving: Option<Serving>,
}

/// A pod whose connections are taken.
pub(super) enum Serving {
    /// By us.
    Here(Here),
    /// By the proxy inside it.
    Inside,
}

/// How we take a pod's connections.
pub(super) struct Here {
    pub(super) network: NetworkId,
    /// By what it was found.
    pub(super) file: PathBuf,
    pub(super) gone: CancellationToken,
}

/// What a pod waits for.
pub(super) struct Complaint {
    text: String,
    since: Instant,
    said: bool,
}

impl EnrolledPod {
    /// Whether its cgroup is still the one that was attached, and its network namespace the one that is listened in,
    /// as far as that can be seen.
    pub(super) fn lives(&self) -> bool {
        is_cgroup(&self.cgroup.path, self.cgroup.id) && !self.moved()
    }

    fn moved(&self) -> bool {
        let Some(Serving::Here(serving)) = &self.serving else { return false };
        if let Some(file) = &self.pod.network {
            return NetworkId::of(file).is_ok_and(|now| now != serving.network);
        }
        // The process by which it was found, the pod's oldest, may be gone, and its number another's.
        if NetworkId::of(&serving.file).is_ok_and(|now| now == serving.network) {
            return false;
        }
        let (now, _) = network::of_processes(&self.cgroup.path);
        now.first().is_some_and(|(oldest, _)| *oldest != serving.network)
    }
}

impl Complaint {
    pub(super) fn new(text: String) -> Self {
        Self { text, since: Instant::now(), said: false }
    }

    /// Whether `text` is what it says, and it is time to say so; once.
    pub(super) fn due(&mut self, text: &str) -> bool {
        if self.text != text {
            // One that was said already is followed by others at once.
            self.said = false;
            text.clone_into(&mut self.text);
        }
        let due = !self.said && self.since.elapsed() >= PATIENCE;
        self.said |= due;
        due
    }
}

fn is_cgroup(path: &Path, id: u64) -> bool {
    fs::metadata(path).is_ok_and(|folder| folder.ino() == id)
}

//! Keeps the open breakers of a pod for the next process.

use std::path::Path;

use ctrlmesh_request::guard::OpenRule;
use ctrlmesh_runtime::telemetry;
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::policy::PodName;
use crate::policy::pod_file::{FileKind, PodFile};

/// Where a pod's open breakers are kept for the next process. Tokens are not kept.
#[derive(Clone, Debug)]
pub struct GuardFile {
    file: PodFile,
    /// The pod's UID, or empty: the breakers of another pod of the same name do not count.
    uid: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredGuards {
    uid: String,
    open: Vec<OpenRule>,
}

impl GuardFile {
    /// `state` is the state folder.
    pub fn of(state: &Path, pod: Option<&PodName>, uid: &str) -> Self {
        Self { file: PodFile::of(FileKind::Guards, state, pod), uid: uid.to_owned() }
    }

    /// Where the file cannot be read, every breaker begins closed.
    pub(super) fn read(&self) -> Vec<OpenRule> {
        let stored = self.file.read::<StoredGuards>().unwrap_or_else(|error| {
            let error = telemetry::chain(&error);
            warn!(error, file = %self.file.path().display(), "circuit breakers begin closed");
            None
        });
        stored.filter(|stored| stored.uid == self.uid).map(|stored| stored.open).unwrap_or_default()
    }

    pub(super) fn write(&self, open: &[OpenRule]) {
        let stored = StoredGuards { uid: self.uid.clone(), open: open.to_vec() };
        if let Err(error) = self.file.replace(&stored) {
            let error = telemetry::chain(&error);
            warn!(error, file = %self.file.path().display(), "a restart has the circuit breakers from before");
        }
    }
}

//! Stores a pod's history for the next process.
//!
//! The file is replaced before a policy comes into force. A file that cannot be read or written makes the history
//! unknown, which is safe: clients that continue from before list again.

use std::fs;
use std::path::Path;

use ctrlmesh_common::policy::Policy;
use ctrlmesh_runtime::telemetry;
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::reads::ReadVersion;
use super::summary;
use crate::policy::PodName;
use crate::policy::pod_file::{FileKind, PodFile};

/// The file of a pod's history.
#[derive(Clone, Debug)]
pub struct HistoryFile {
    file: PodFile,
    /// The pod's UID, or empty: the history of another pod of the same name does not count.
    uid: String,
}

/// The content of the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StoredHistory {
    uid: String,
    pub(super) policies: Vec<StoredPolicy>,
    pub(super) forgotten: Option<summary::StoredSummary>,
}

/// A policy under which a client may have read.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StoredPolicy {
    pub(super) policy: Policy,
    pub(super) until: Vec<ReadVersion>,
}

impl HistoryFile {
    /// `state` is the state folder.
    pub fn of(state: &Path, pod: Option<&PodName>, uid: &str) -> Self {
        Self { file: PodFile::of(FileKind::History, state, pod), uid: uid.to_owned() }
    }

    /// `None` where there is no file, because the pod is new.
    ///
    /// # Errors
    /// The file cannot be read, which is logged.
    pub(super) fn read(&self) -> Result<Option<StoredHistory>, ()> {
        let written = self.file.read::<StoredHistory>().map_err(|error| {
            let error = telemetry::chain(&error);
            warn!(error, file = %self.file.path().display(), "watches from before are not believed");
        })?;
        Ok(written.filter(|written| written.uid == self.uid))
    }

    /// Writes the file. Where that fails, it empties the file, so that the next process reads an unknown history.
    pub(super) fn write(&self, policies: Vec<StoredPolicy>, forgotten: Option<summary::StoredSummary>) {
        let written = StoredHistory { uid: self.uid.clone(), policies, forgotten };
        let Err(error) = self.file.replace(&written) else { return };
        let (error, file) = (telemetry::chain(&error), self.file.path());
        let emptied = fs::write(file, "").is_ok();
        warn!(error, emptied, file = %file.display(), "what watches were told is not kept");
    }
}

//! Stores a pod's history for the next process.
//!
//! Each pod has one file, which is replaced whole before a policy comes into force. A file that cannot be read or
//! written makes the history unknown, which is safe: clients that continue from before list again.

use std::fs;
use std::fs::{File, Permissions};
use std::io;
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::wire;
use ctrlmesh_runtime::telemetry;
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::reads::ReadVersion;
use super::summary;
use crate::policy::PodName;

/// The folder of these files, in the state folder.
const FOLDER: &str = "histories";

/// The beginning of a file, before its checksum. The number changes with the format.
const MAGIC: &str = "ctrlmesh-history 1 ";

/// The largest file that is written, in bytes. A longer history is stored as unknown.
const MAX_FILE_BYTES: usize = 8 << 20;

/// The file of a pod that is not served is removed after this time. By then the API server has compacted the versions
/// that the pod's clients hold.
const ABANDONED: Duration = Duration::from_hours(24);

/// The file of a pod's history.
#[derive(Clone, Debug)]
pub struct HistoryFile {
    file: PathBuf,
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

#[derive(Debug, thiserror::Error)]
enum HistoryFileError {
    #[error("read or write the history")]
    Io(#[from] io::Error),
    #[error("the history is not whole")]
    Broken,
    #[error("parse the history")]
    Parse(#[from] serde_json::Error),
    #[error("the history has {bytes} bytes, at most {MAX_FILE_BYTES} are kept")]
    TooLarge { bytes: usize },
}

impl HistoryFile {
    /// `state` is the state folder.
    pub fn of(state: &Path, pod: Option<&PodName>, uid: &str) -> Self {
        // Neither name holds a `_`.
        let name = pod.map_or_else(|| "_".to_owned(), file_name);
        Self { file: state.join(FOLDER).join(name), uid: uid.to_owned() }
    }

    /// `None` where there is no file, because the pod is new.
    ///
    /// # Errors
    /// The file cannot be read, which is logged.
    pub(super) fn read(&self) -> Result<Option<StoredHistory>, ()> {
        let written = self.written().map_err(|error| {
            let error = telemetry::chain(&error);
            warn!(error, file = %self.file.display(), "watches from before are not believed");
        })?;
        Ok(written.filter(|written| written.uid == self.uid))
    }

    fn written(&self) -> Result<Option<StoredHistory>, HistoryFileError> {
        let text = match fs::read_to_string(&self.file) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let (head, content) = text.split_once('\n').ok_or(HistoryFileError::Broken)?;
        let sum = head.strip_prefix(MAGIC).ok_or(HistoryFileError::Broken)?;
        if sum != format!("{:016x}", wire::digest(content.as_bytes())) {
            return Err(HistoryFileError::Broken);
        }
        Ok(Some(serde_json::from_str(content)?))
    }

    /// Writes the file. Where that fails, it empties the file, so that the next process reads an unknown history.
    pub(super) fn write(&self, policies: Vec<StoredPolicy>, forgotten: Option<summary::StoredSummary>) {
        let written = StoredHistory { uid: self.uid.clone(), policies, forgotten };
        let Err(error) = self.replace(&written) else { return };
        let error = telemetry::chain(&error);
        let emptied = fs::write(&self.file, "").is_ok();
        warn!(error, emptied, file = %self.file.display(), "what watches were told is not kept");
    }

    /// The file's successor before the rename. No pod's name ends so.
    fn next(&self) -> PathBuf {
        let mut name = self.file.clone().into_os_string();
        name.push("._next");
        name.into()
    }

    /// A process that is killed leaves the old file or the new one. There is no fsync: no pod survives a loss of power.
    fn replace(&self, written: &StoredHistory) -> Result<(), HistoryFileError> {
        let content = serde_json::to_string(written)?;
        if content.len() > MAX_FILE_BYTES {
            return Err(HistoryFileError::TooLarge { bytes: content.len() });
        }
        let folder = self.file.parent().ok_or(HistoryFileError::Broken)?;
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        // The next process of the node may write the same file at the same time.
        let directory = File::open(folder)?;
        directory.lock()?;
        let next = self.next();
        let mut file = File::create(&next)?;
        file.set_permissions(Permissions::from_mode(0o600))?;
        write!(file, "{MAGIC}{:016x}\n{content}", wire::digest(content.as_bytes()))?;
        fs::rename(&next, &self.file)?;
        Ok(())
    }
}

/// Removes the old files of pods that are not among `served`.
pub fn remove_abandoned<'a>(state: Option<&Path>, served: impl Iterator<Item = &'a PodName>) {
    let files = state.map(|state| fs::read_dir(state.join(FOLDER)));
    let Some(Ok(files)) = files else { return };
    let served: Vec<String> = served.map(file_name).collect();
    for file in files.flatten() {
        let name = file.file_name();
        let modified = file.metadata().and_then(|metadata| metadata.modified()).ok();
        let age = modified.and_then(|modified| SystemTime::now().duration_since(modified).ok());
        let is_served = served.iter().any(|served| name == **served);
        if !is_served && age.is_some_and(|age| age > ABANDONED) {
            // It is tried again when the next pod goes.
            let _still_there = fs::remove_file(file.path());
        }
    }
}

fn file_name(pod: &PodName) -> String {
    format!("{}_{}", pod.namespace, pod.name)
}

//! What of a history outlives the process?
//!
//! One file for each pod, replaced whole before a policy comes into force, so that the next process knows what a client
//! may hold that read before. What cannot be read or written makes that past unknown, which is safe: such clients list
//! again.

use std::fs;
use std::fs::{File, Permissions};
use std::io;
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::wire;
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::reads::Known;
use super::summary;
use crate::policy::PodName;

/// The folder of these files, in the folder of what is kept.
const FOLDER: &str = "histories";

/// What a file begins with, before its checksum. The number changes with the format.
const MAGIC: &str = "ctrlmesh-history 1 ";

/// The largest file that is written, in bytes: a longer past is an unknown one.
const MAX_FILE_BYTES: usize = 8 << 20;

/// How long the file of a pod that nobody serves any more is kept: by then the API server itself knows nothing of the
/// versions that its clients hold.
const ABANDONED: Duration = Duration::from_hours(24);

/// Where a pod's history is kept.
#[derive(Clone, Debug)]
pub struct Kept {
    file: PathBuf,
    /// The pod's UID, where it is known: what is kept of another pod of its name says nothing of this one.
    uid: String,
}

/// What is written down.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Written {
    uid: String,
    pub(super) policies: Vec<WrittenPolicy>,
    pub(super) forgotten: Option<summary::Written>,
}

/// A policy under which somebody may have read.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WrittenPolicy {
    pub(super) policy: Policy,
    pub(super) until: Vec<Known>,
}

/// Why a file says nothing.
#[derive(Debug, thiserror::Error)]
enum KeptError {
    #[error("read or write the history")]
    Io(#[from] io::Error),
    #[error("the history is not whole")]
    Broken,
    #[error("parse the history")]
    Parse(#[from] serde_json::Error),
    #[error("the history has {bytes} bytes, at most {MAX_FILE_BYTES} are kept")]
    TooLarge { bytes: usize },
}

impl Kept {
    /// Of a pod, in the folder of all that is kept.
    pub fn of(state: &Path, pod: Option<&PodName>, uid: &str) -> Self {
        // Neither name holds a `_`.
        let name = pod.map_or_else(|| "_".to_owned(), file_name);
        Self { file: state.join(FOLDER).join(name), uid: uid.to_owned() }
    }

    /// What was written down; `None` where nothing was, since the pod is new.
    ///
    /// # Errors
    /// Where there is something that cannot be read.
    pub(super) fn read(&self) -> Result<Option<Written>, ()> {
        let written = self.written().map_err(|error| {
            let error = format!("{:#}", anyhow::Error::from(error));
            warn!(error, file = %self.file.display(), "watches from before are not believed");
        })?;
        Ok(written.filter(|written| written.uid == self.uid))
    }

    fn written(&self) -> Result<Option<Written>, KeptError> {
        let text = match fs::read_to_string(&self.file) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let (head, content) = text.split_once('\n').ok_or(KeptError::Broken)?;
        let sum = head.strip_prefix(MAGIC).ok_or(KeptError::Broken)?;
        if sum != format!("{:016x}", wire::digest(content.as_bytes())) {
            return Err(KeptError::Broken);
        }
        Ok(Some(serde_json::from_str(content)?))
    }

    /// Writes down what the next process is to know. Where that fails it will know that it knows nothing.
    pub(super) fn write(&self, policies: Vec<WrittenPolicy>, forgotten: Option<summary::Written>) {
        let written = Written { uid: self.uid.clone(), policies, forgotten };
        let Err(error) = self.replace(&written) else { return };
        let error = format!("{:#}", anyhow::Error::from(error));
        let emptied = fs::write(&self.file, "").is_ok();
        warn!(error, emptied, file = %self.file.display(), "what watches were told is not kept");
    }

    /// Where the next file of this pod, and of no other, is written: no name of a pod ends so.
    fn next(&self) -> PathBuf {
        let mut name = self.file.clone().into_os_string();
        name.push("._next");
        name.into()
    }

    /// A process that is killed leaves the old file or the new one. What is lost with the node's power is of no pod
    /// that goes on.
    fn replace(&self, written: &Written) -> Result<(), KeptError> {
        let content = serde_json::to_string(written)?;
        if content.len() > MAX_FILE_BYTES {
            return Err(KeptError::TooLarge { bytes: content.len() });
        }
        let folder = self.file.parent().ok_or(KeptError::Broken)?;
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        // Another process of the node may follow this one, and keep the same pod's beside it.
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

/// Removes what is kept of pods that are not among `served`, and was not touched for long.
pub fn tidy<'a>(state: Option<&Path>, served: impl Iterator<Item = &'a PodName>) {
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

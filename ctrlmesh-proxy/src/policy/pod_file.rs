//! Stores what the next process has to know of a pod.
//!
//! Each pod has one file of each kind, which begins with a checksum and is replaced whole. There is no fsync: no pod
//! survives a loss of power.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use ctrlmesh_common::wire;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::policy::PodName;

/// The largest file that is written, in bytes.
const MAX_FILE_BYTES: usize = 8 << 20;

/// The file of a pod that is not served is removed after this time. By then the API server has compacted the versions
/// that the pod's clients hold.
const ABANDONED: Duration = Duration::from_hours(24);

/// What is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileKind {
    /// The policies under which clients have read.
    History,
    /// The breakers that are open.
    Guards,
}

/// The file of one pod.
#[derive(Clone, Debug)]
pub(crate) struct PodFile {
    kind: FileKind,
    file: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum PodFileError {
    #[error("read or write the file")]
    Io(#[from] io::Error),
    #[error("the file is not whole")]
    Broken,
    #[error("parse the file")]
    Parse(#[from] serde_json::Error),
    #[error("the file would have {bytes} bytes, at most {MAX_FILE_BYTES} are kept")]
    TooLarge { bytes: usize },
}

impl FileKind {
    /// The folder of the files, in the state folder.
    fn folder(self) -> &'static str {
        match self {
            Self::History => "histories",
            Self::Guards => "guards",
        }
    }

    /// The beginning of a file, before its checksum. The number changes with the format.
    fn magic(self) -> &'static str {
        match self {
            Self::History => "ctrlmesh-history 1 ",
            Self::Guards => "ctrlmesh-guards 1 ",
        }
    }
}

impl PodFile {
    /// `state` is the state folder. Without a pod, the process serves only one.
    pub(crate) fn of(kind: FileKind, state: &Path, pod: Option<&PodName>) -> Self {
        // Neither name holds a `_`.
        let name = pod.map_or_else(|| "_".to_owned(), file_name);
        Self { kind, file: state.join(kind.folder()).join(name) }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.file
    }

    /// `None` where there is no file.
    ///
    /// # Errors
    /// The file cannot be read, or is not whole.
    pub(crate) fn read<T: DeserializeOwned>(&self) -> Result<Option<T>, PodFileError> {
        let text = match fs::read_to_string(&self.file) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let (head, content) = text.split_once('\n').ok_or(PodFileError::Broken)?;
        let sum = head.strip_prefix(self.kind.magic()).ok_or(PodFileError::Broken)?;
        if sum != format!("{:016x}", wire::digest(content.as_bytes())) {
            return Err(PodFileError::Broken);
        }
        Ok(Some(serde_json::from_str(content)?))
    }

    /// A process that is killed leaves the old file or the new one.
    ///
    /// # Errors
    /// The file cannot be written, or would be too large; the old one stays.
    pub(crate) fn replace<T: Serialize>(&self, content: &T) -> Result<(), PodFileError> {
        let content = serde_json::to_string(content)?;
        if content.len() > MAX_FILE_BYTES {
            return Err(PodFileError::TooLarge { bytes: content.len() });
        }
        let folder = self.file.parent().ok_or(PodFileError::Broken)?;
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        // The next process of the node may write the same file at the same time.
        let directory = File::open(folder)?;
        directory.lock()?;
        let next = self.next();
        let mut file = File::create(&next)?;
        file.set_permissions(Permissions::from_mode(0o600))?;
        write!(file, "{}{:016x}\n{content}", self.kind.magic(), wire::digest(content.as_bytes()))?;
        fs::rename(&next, &self.file)?;
        Ok(())
    }

    /// The file's successor before the rename. No pod's name ends so.
    fn next(&self) -> PathBuf {
        let mut name = self.file.clone().into_os_string();
        name.push("._next");
        name.into()
    }
}

/// Removes the old files of pods that are not among `served`.
pub fn remove_abandoned<'a>(state: Option<&Path>, served: impl Iterator<Item = &'a PodName>) {
    let Some(state) = state else { return };
    let served: Vec<String> = served.map(file_name).collect();
    for kind in [FileKind::History, FileKind::Guards] {
        let Ok(files) = fs::read_dir(state.join(kind.folder())) else { continue };
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
}

fn file_name(pod: &PodName) -> String {
    format!("{}_{}", pod.namespace, pod.name)
}

//! Keeps the latest policies in one file, for a start without the manager.
//!
//! The file is replaced whole, and begins with a checksum of the rest. A broken file is set aside for people to look
//! at.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use ctrlmesh_common::policy::{PodPolicy, PolicyError};
use ctrlmesh_common::wire;
use ctrlmesh_runtime::telemetry;
use serde::{Deserialize, Serialize};

use super::PodName;

/// The file's name.
const FILE: &str = "policies";

/// Where a file that broke is put.
const BROKEN: &str = "policies.broken";

/// What the file begins with, before its checksum. The number changes with the format.
const MAGIC: &str = "ctrlmesh-policies 1 ";

/// The policies of the pods that are served.
pub type PodPolicies = BTreeMap<PodName, PodPolicy>;

/// The folder of the file.
#[derive(Clone, Debug)]
pub(super) struct Store {
    folder: PathBuf,
}

/// A file that is not believed, or cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// It cannot be read.
    #[error("read what the manager said last")]
    Read(#[source] io::Error),
    /// It cannot be written.
    #[error("write what the manager said last")]
    Write(#[source] io::Error),
    /// The first line is not that of such a file.
    #[error("this is no file of policies, or one of another version")]
    Magic,
    /// The file is damaged.
    #[error("the checksum is {seen:016x}, and ought to be {expected:016x}")]
    Checksum {
        /// Of the content.
        seen: u64,
        /// In the file.
        expected: u64,
    },
    /// The file is undamaged, but does not parse.
    #[error("parse what the manager said last")]
    Parse(#[source] serde_json::Error),
    /// A policy in it cannot be applied.
    #[error("check the policy of {pod}")]
    Check {
        /// Whose.
        pod: PodName,
        /// Why.
        source: PolicyError,
    },
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Content {
    pods: Vec<PodPolicy>,
}

impl Store {
    /// Creates `folder` for its owner only, if it is missing.
    ///
    /// # Errors
    /// Where it cannot be made.
    pub(super) fn open(folder: PathBuf) -> Result<Self, StoreError> {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        made.map_err(StoreError::Write)?;
        Ok(Self { folder })
    }

    /// Empty where there is no file. A file that cannot be read is logged, and set aside.
    pub(super) fn load(&self) -> PodPolicies {
        match self.read() {
            Ok(policies) => policies,
            Err(error) => {
                let aside = self.folder.join(BROKEN);
                let moved = fs::rename(self.folder.join(FILE), &aside);
                let error = telemetry::chain(&error);
                tracing::warn!(error, aside = %aside.display(), moved = moved.is_ok(), "what the manager said last is not believed");
                PodPolicies::new()
            }
        }
    }

    /// Replaces the file.
    ///
    /// # Errors
    /// Where it cannot be written; the old one stays.
    pub(super) fn save(&self, policies: &PodPolicies) -> Result<(), StoreError> {
        let pods = policies.values().cloned().collect();
        let content = serde_json::to_string(&Content { pods });
        let content = content.map_err(|error| StoreError::Write(error.into()))?;
        let checksum = wire::digest(content.as_bytes());
        let text = format!("{MAGIC}{checksum:016x}\n{content}\n");
        replace(&self.folder, FILE, text.as_bytes()).map_err(StoreError::Write)
    }

    fn read(&self) -> Result<PodPolicies, StoreError> {
        let text = match fs::read_to_string(self.folder.join(FILE)) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(PodPolicies::new()),
            Err(error) => return Err(StoreError::Read(error)),
        };
        let (head, content) = text.split_once('\n').ok_or(StoreError::Magic)?;
        let expected = head.strip_prefix(MAGIC).ok_or(StoreError::Magic)?;
        let expected = u64::from_str_radix(expected, 16).map_err(|_unfit| StoreError::Magic)?;
        let content = content.strip_suffix('\n').unwrap_or(content);
        let seen = wire::digest(content.as_bytes());
        if seen != expected {
            return Err(StoreError::Checksum { seen, expected });
        }
        let content: Content = serde_json::from_str(content).map_err(StoreError::Parse)?;
        content.pods.into_iter().map(checked).collect()
    }
}

fn checked(pod_policy: PodPolicy) -> Result<(PodName, PodPolicy), StoreError> {
    let pod = pod_policy.pod_name();
    match pod_policy.policy.check() {
        Ok(()) => Ok((pod, pod_policy)),
        Err(source) => Err(StoreError::Check { pod, source }),
    }
}

/// Writes a file of `folder`, whole or not at all, also in a loss of power.
pub(super) fn replace(folder: &Path, name: &str, text: &[u8]) -> io::Result<()> {
    let (next, directory) = (folder.join(format!("{name}.next")), File::open(folder)?);
    // The next process of the node may write the same file at the same time.
    directory.lock()?;
    let mut options = File::options();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&next)?;
    file.write_all(text)?;
    file.sync_all()?;
    fs::rename(&next, folder.join(name))?;
    directory.sync_all()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ctrlmesh_common::policy::Policy;
    use tempfile::TempDir;

    use super::*;

    fn policies(epoch: u64) -> PodPolicies {
        let pod_policy = PodPolicy {
            namespace: "ns".to_owned(),
            name: "op-0".to_owned(),
            uid: "u".to_owned(),
            digest: epoch,
            operator: "ns/op".to_owned(),
            version: epoch,
            policy: Arc::new(Policy { epoch, ..Policy::default() }),
        };
        [(pod_policy.pod_name(), pod_policy)].into()
    }

    fn store() -> (TempDir, Store) {
        let folder = TempDir::new().unwrap();
        let store = Store::open(folder.path().join("state")).unwrap();
        (folder, store)
    }

    #[test]
    fn what_was_kept_is_known_again() {
        let (_folder, store) = store();
        assert_eq!(store.load(), PodPolicies::new());
        store.save(&policies(1)).unwrap();
        store.save(&policies(2)).unwrap();
        assert_eq!(store.load(), policies(2));
        let names: Vec<_> = fs::read_dir(&store.folder).unwrap().collect();
        assert_eq!(names.len(), 1, "{names:?}");
    }

    #[test]
    fn what_two_write_at_once_is_whole() {
        let (_folder, store) = store();
        let writes = |epochs: std::ops::Range<u64>| {
            epochs.for_each(|epoch| store.save(&policies(epoch % 2 * 1_000_000_000)).unwrap());
        };
        std::thread::scope(|scope| {
            scope.spawn(|| writes(0..100));
            scope.spawn(|| writes(1..101));
        });
        assert!(!store.load().is_empty(), "it broke");
    }

    #[test]
    fn a_file_that_broke_anywhere_is_set_aside() {
        let (_folder, store) = store();
        store.save(&policies(1)).unwrap();
        let whole = fs::read(store.folder.join(FILE)).unwrap();
        for at in 0..whole.len() - 1 {
            let mut broken = whole.clone();
            broken[at] ^= 0x01;
            fs::write(store.folder.join(FILE), &broken).unwrap();
            assert_eq!(store.load(), PodPolicies::new(), "a bit of byte {at}");
            assert_eq!(fs::read(store.folder.join(BROKEN)).unwrap(), broken);
            fs::write(store.folder.join(FILE), &whole[..at]).unwrap();
            assert_eq!(store.load(), PodPolicies::new(), "cut at byte {at}");
            assert!(!store.folder.join(FILE).exists());
        }
    }

    #[test]
    fn a_policy_that_cannot_be_applied_is_not_believed_either() {
        let (_folder, store) = store();
        let mut wrong = policies(1);
        let lock =
            ctrlmesh_common::policy::Lock { namespace: String::new(), name: "op".to_owned(), shard: "s".to_owned() };
        let policy = Policy { lock: Some(lock), ..Policy::default() };
        for one in wrong.values_mut() {
            one.policy = Arc::new(policy.clone());
        }
        store.save(&wrong).unwrap();
        assert_eq!(store.load(), PodPolicies::new());
    }
}

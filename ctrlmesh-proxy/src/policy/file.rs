//! Reads the policy from its file, and again when the file changes.

use std::fs;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::policy::{Limit, Mode, Policy, PolicyError};
use ctrlmesh_common::selector::Selector;
use tokio::sync::watch;
use tokio::time;

use super::{ShardingError, Source, sharding};
use crate::policy::file_poll::{FilePoll, POLL_INTERVAL};

/// The most that is read, in bytes: what a ConfigMap can hold, twice.
const MAX_FILE_BYTES: u64 = 2 * 1024 * 1024;

/// A file is read once it has not changed for so long: one that is written in place is incomplete for a while, and may
/// limit less than it will.
const SETTLED: Duration = Duration::from_millis(100);

/// Why a policy is refused.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file cannot be read.
    #[error("read the policy file")]
    Read(#[source] io::Error),
    /// The file is larger than any policy.
    #[error("the policy file has {bytes} bytes, at most {MAX_FILE_BYTES} are read")]
    TooLarge {
        /// Its size.
        bytes: u64,
    },
    /// The file does not parse.
    #[error("parse the policy: line {line}, column {column}")]
    Parse {
        /// From 1; 0 where the whole file is meant.
        line: u64,
        /// From 1; 0 where the whole file is meant.
        column: u64,
        /// What is wrong.
        source: Box<serde_saphyr::Error>,
    },
    /// The policy parses, but cannot be applied.
    #[error("check the policy")]
    Check(#[from] PolicyError),
    /// The policy limits nothing, without `mode: pass`. An empty or truncated file looks the same.
    #[error("the policy has neither limits nor a lock; say `mode: pass` to let everything pass")]
    Unlimited,
    /// A limit lets every object pass.
    #[error("limits[{limit}].selector has no requirement, so every shard would see all objects")]
    Everything {
        /// The index of the limit.
        limit: usize,
    },
    /// A limit lets no object pass.
    #[error(
        "the limit {selector:?} selects nothing: its requirements contradict each other, so the operator would see no object"
    )]
    Contradiction {
        /// The selector of the limit.
        selector: String,
    },
    /// No policy follows from the `ShardingConfigs`.
    #[error("find the pod's ShardingConfig")]
    Sharding(#[from] ShardingError),
}

/// Reads the policy.
///
/// # Errors
/// Where there is none, or none that can be applied.
pub fn load(source: &Source) -> Result<Policy, LoadError> {
    let file = source.file();
    let bytes = fs::metadata(file).map_err(LoadError::Read)?.len();
    if bytes > MAX_FILE_BYTES {
        return Err(LoadError::TooLarge { bytes });
    }
    let text = fs::read_to_string(file).map_err(LoadError::Read)?;
    let policy = match source {
        Source::Policy(_) => parse(&text)?,
        Source::ShardingConfig { pod, labels, .. } => sharding::policy(&text, pod, labels)?,
        Source::Shard { shard, namespace, .. } => sharding::shard(&text, shard.as_deref(), namespace)?,
    };
    if policy.passes_everything() && policy.egress.is_none() && policy.mode != Mode::Pass {
        return Err(LoadError::Unlimited);
    }
    policy.check()?;
    sensible(policy)
}

/// Refuses a policy that was written by hand, if one of its limits lets no object pass, or every object.
///
/// # Errors
/// Where a selector matches no object, or every one.
pub fn sensible(policy: Policy) -> Result<Policy, LoadError> {
    // The manager's policy for a pod without a shard selects nothing on purpose.
    let meant = |limit: &Limit| limit.selector == Selector::nothing();
    let nothing = |limit: &&Limit| !meant(limit) && !limit.selector.overlaps(&Selector::everything());
    if let Some(limit) = policy.limits.iter().find(nothing) {
        return Err(LoadError::Contradiction { selector: limit.selector.to_string() });
    }
    match policy.limits.iter().position(|limit| limit.selector.is_empty()) {
        Some(limit) => Err(LoadError::Everything { limit }),
        None => Ok(policy),
    }
}

/// Reads the policy again after each change of its file, until the last receiver is gone.
pub async fn follow(source: Source, sender: watch::Sender<Arc<Policy>>) {
    let mut watched = FilePoll::new(source.file().clone());
    let mut settling = watched.changed();
    while !sender.is_closed() {
        tokio::select! {
            // The last receiver is gone.
            () = sender.closed() => return,
            () = time::sleep(if settling { SETTLED } else { POLL_INTERVAL }) => {}
        }
        if watched.changed() {
            settling = true;
        } else if settling {
            let loaded = load(&source);
            // The file changed while it was read: read it again.
            settling = watched.changed();
            if !settling {
                take(&source, loaded, &sender);
            }
        }
    }
}

fn take(source: &Source, loaded: Result<Policy, LoadError>, sender: &watch::Sender<Arc<Policy>>) {
    match loaded {
        Err(error) => {
            let error = anyhow::Error::from(error);
            tracing::warn!(file = %source.file().display(), error = format!("{error:#}"), "policy refused, the last one stays");
        }
        Ok(policy) => {
            let changed = sender.send_if_modified(|current| {
                let differs = **current != policy;
                if differs {
                    *current = Arc::new(policy);
                }
                differs
            });
            if changed {
                tracing::info!(policy.epoch = sender.borrow().epoch, "policy changed");
            }
        }
    }
}

fn parse(text: &str) -> Result<Policy, LoadError> {
    serde_saphyr::from_str(text).map_err(|error| {
        let (line, column) = error.location().map_or((0, 0), |location| (location.line(), location.column()));
        LoadError::Parse { line, column, source: Box::new(error) }
    })
}

//! What does the file say now?

use std::fs;
use std::io;
use std::sync::Arc;

use ctrlmesh_common::policy::{Policy, PolicyError};
use tokio::sync::watch;
use tokio::time::{self, MissedTickBehavior};

use super::{ShardingError, Source, sharding};
use crate::watched::{PERIOD, Watched};

/// The most that is read, in bytes: what a ConfigMap can hold, twice.
const MAX_FILE_BYTES: u64 = 2 * 1024 * 1024;

/// A policy that is not taken.
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
    /// It is no policy.
    #[error("parse the policy: line {line}, column {column}")]
    Parse {
        /// From 1; 0 where the whole file is meant.
        line: u64,
        /// From 1; 0 where the whole file is meant.
        column: u64,
        /// What is wrong.
        #[source]
        source: Box<serde_saphyr::Error>,
    },
    /// It parses, but cannot be applied.
    #[error("check the policy")]
    Check(#[from] PolicyError),
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
        Source::Shard { shard, namespace, .. } => {
            sharding::shard(&text, shard.as_deref(), namespace)?
        }
    };
    policy.check()?;
    Ok(policy)
}

/// Reads the policy again whenever its file changes, until nobody is interested any more.
pub async fn follow(source: Source, sender: watch::Sender<Arc<Policy>>) {
    let mut ticks = time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut watched = Watched::new(source.file().clone());
    while !sender.is_closed() {
        tokio::select! {
            // The last receiver is gone.
            () = sender.closed() => return,
            _ = ticks.tick() => {}
        }
        if watched.changed() {
            take(&source, &sender);
        }
    }
}

fn take(source: &Source, sender: &watch::Sender<Arc<Policy>>) {
    match load(source) {
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
        let (line, column) =
            error.location().map_or((0, 0), |location| (location.line(), location.column()));
        LoadError::Parse { line, column, source: Box::new(error) }
    })
}

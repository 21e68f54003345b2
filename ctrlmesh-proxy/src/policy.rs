//! The policy of a pod, from a file or from the manager.
//!
//! Connections hold the receiving end of a channel, and the policy's source sends each change into it. A policy that
//! cannot be read or applied is refused, and the last good one stays.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use clap::Args;
use ctrlmesh_common::policy::Policy;
use tokio::sync::watch;

mod sharding;
pub mod file_poll;
mod file;
mod enforce;
mod followed;
mod loss;
pub(crate) mod pod_file;
mod history;
mod writes;
pub mod settle;
mod validity;
mod store;
mod api_servers;
mod pod_reports;
pub mod subscription;

pub use ctrlmesh_common::pod_name::PodName;
pub use enforce::enforce;
pub use file::{LoadError, follow, load, sensible};
pub(crate) use followed::FollowedPolicy;
pub use history::{History, HistoryExceeded, HistoryFile, InForce, PendingVersions, ReadOf, ReadResource, Reading};
pub use loss::loses;
pub use pod_file::remove_abandoned;
pub use pod_reports::{AllReports, BypassReports, EndedReports, GuardReports, LockReports};
pub use pod_reports::{
    PublishBypass, PublishEnded, PublishGuards, PublishLock, PublishTraffic, PublishWatches, PublishWebhook,
};
pub use pod_reports::{TrafficReports, WatchReports, WebhookReports};
pub(crate) use pod_reports::{until_gone, while_served};
pub use sharding::ShardingError;
pub use store::{PodPolicies, StoreError};
pub use validity::{Validities, Validity};
pub use writes::{Write, Writes, WritesUnder};

/// The policy in force, and its changes.
pub type Current = watch::Receiver<Arc<Policy>>;

/// Where the policy comes from, on the command line.
#[derive(Clone, Debug, Default, Args)]
pub struct PolicyArgs {
    /// JSON or YAML file with the policy of this pod. It is read again when it changes.
    #[arg(long, env = "CTRLMESH_PROXY_POLICY", value_name = "FILE", conflicts_with = "manager")]
    pub policy: Option<PathBuf>,
    /// YAML or JSON file with ShardingConfigs, one of which selects the pod of --pod. It is read again when it changes.
    #[arg(
        long,
        env = "CTRLMESH_PROXY_SHARDING_CONFIG",
        value_name = "FILE",
        conflicts_with_all = ["policy", "manager"],
        requires = "pod"
    )]
    pub sharding_config: Option<PathBuf>,
    /// Namespace and name of the pod that the proxy serves. Needed with --manager and --sharding-config.
    #[arg(long, env = "CTRLMESH_PROXY_POD", value_name = "NAMESPACE/NAME")]
    pub pod: Option<PodName>,
    /// A label of that pod, which a ShardingConfig may select. The label with its name in a StatefulSet is implied. May
    /// be repeated.
    #[arg(long = "pod-label", env = "CTRLMESH_PROXY_POD_LABELS", value_name = "KEY=VALUE", value_delimiter = ',')]
    pub pod_labels: Vec<PodLabel>,
}

/// A label of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodLabel {
    /// The label's key.
    pub key: String,
    /// The label's value.
    pub value: String,
}

/// A text that is no label.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not KEY=VALUE")]
pub struct PodLabelError {
    text: String,
}

/// Where the policy comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file that holds it.
    Policy(PathBuf),
    /// A file of `ShardingConfigs`, and the pod that one of them selects.
    ShardingConfig {
        /// The file.
        file: PathBuf,
        /// The pod.
        pod: PodName,
        /// Labels of the pod.
        labels: Vec<PodLabel>,
    },
    /// A file of `ShardingConfigs`, and the name of one of them.
    Shard {
        /// The file.
        file: PathBuf,
        /// Its name; `None` for the only one in the file.
        shard: Option<String>,
        /// The operator's namespace, where the `ShardingConfig` has none.
        namespace: String,
    },
}

impl PolicyArgs {
    /// `None` where no flag names a policy, and everything passes.
    pub fn source(&self) -> Option<Source> {
        if let Some(file) = &self.policy {
            return Some(Source::Policy(file.clone()));
        }
        let (file, pod) = self.sharding_config.clone().zip(self.pod.clone())?;
        Some(Source::ShardingConfig { file, pod, labels: self.pod_labels.clone() })
    }
}

impl FromStr for PodLabel {
    type Err = PodLabelError;

    fn from_str(text: &str) -> Result<Self, PodLabelError> {
        let parts = text.split_once('=').filter(|(key, _)| !key.is_empty());
        let (key, value) = parts.ok_or_else(|| PodLabelError { text: text.to_owned() })?;
        Ok(Self { key: key.to_owned(), value: value.to_owned() })
    }
}

impl Source {
    /// The file that is read.
    pub fn file(&self) -> &PathBuf {
        match self {
            Self::Policy(file) | Self::ShardingConfig { file, .. } | Self::Shard { file, .. } => file,
        }
    }
}

#[cfg(test)]
mod tests;

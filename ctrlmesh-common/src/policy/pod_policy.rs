//! The policy of one pod, with what tells it apart from others.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Policy;
use crate::pod_name::PodName;

/// The policy of one incarnation of a pod, as a proxy receives it and keeps it in its state file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodPolicy {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The pod's UID; empty if unknown.
    pub uid: String,
    /// The manager's digest of the policy's JSON.
    pub digest: u64,
    /// The ShardingConfig that sets the epoch, as `NAMESPACE/NAME`; empty if none covers the pod.
    #[serde(default)]
    pub operator: String,
    /// The resourceVersion of that ShardingConfig; 0 if unknown.
    #[serde(default)]
    pub version: u64,
    /// Shared with whatever enforces it.
    pub policy: Arc<Policy>,
}

impl PodPolicy {
    /// The pod's namespace and name.
    pub fn pod_name(&self) -> PodName {
        PodName { namespace: self.namespace.clone(), name: self.name.clone() }
    }
}

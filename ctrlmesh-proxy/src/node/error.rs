//! Errors of a node and of its pods.

use std::io;

use thiserror::Error;
use tracing::warn;

use super::pod_list::PodsError;
use crate::policy::LoadError;

/// Why a node cannot be served.
#[derive(Debug, Error)]
pub enum NodeError {
    /// The kernel does not let us.
    #[error("prepare interception")]
    Intercept(#[from] ctrlmesh_intercept::Error),
    /// The thread cannot be started.
    #[error("start the thread that beats")]
    Heartbeat(#[source] io::Error),
    /// There is no list of pods.
    #[error("read which pods to serve")]
    Pods(#[from] PodsError),
}

/// Why a pod is not served yet.
#[derive(Debug, Error)]
pub(super) enum NotServed {
    #[error("attach it in the kernel")]
    Intercept(#[from] ctrlmesh_intercept::Error),
    #[error("read its policy")]
    Policy(#[from] LoadError),
    #[error("find its network namespace")]
    Network(#[source] ctrlmesh_intercept::Error),
    #[error(
        "find its network namespace: it has no process yet, or is in the node's own (hostNetwork), where it cannot be served"
    )]
    NoNetwork,
    #[error("be told its policy")]
    Untold,
    #[error("find its addresses")]
    Addresses(#[source] io::Error),
    #[error("find its addresses: it has none yet")]
    NoAddress,
    #[error("accept calls to its webhook")]
    Accept(#[source] io::Error),
    #[error("be told which of its containers is its proxy")]
    NoSidecar,
    #[error("end its containers, which hold objects that its policy takes away")]
    Ending,
}

pub(super) fn warn_of(doing: &'static str) -> impl FnOnce(&ctrlmesh_intercept::Error) {
    move |error| warn!(error = error as &dyn std::error::Error, doing, "the kernel does not let us")
}

//! Why requests cannot be shown, and what to do about it.

use std::io;

use crate::cluster::ClusterError;
use crate::cluster::answer::Unanswered;

#[derive(Debug, thiserror::Error)]
pub(crate) enum TraceError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error("find the pod's proxy: {0}")]
    Proxy(Unanswered),
    #[error("there is no pod {name:?} in namespace {namespace:?}: does `kubectl get pods -n {namespace}` list it?")]
    NoPod { name: String, namespace: String },
    #[error("pod {name:?} in namespace {namespace:?} has ended")]
    Ended { name: String, namespace: String },
    #[error(
        "pod {name:?} in namespace {namespace:?} is not enrolled, so no proxy sees its requests: label its pods `ctrlmesh.kusionstack.io/enable-proxy=true`"
    )]
    NotEnrolled { name: String, namespace: String },
    #[error("no proxy runs on the pod's node ({node}): `ctrlmesh check` says why")]
    NoProxy { node: String },
    #[error(
        "you may not run a program in the proxy's container: that takes the rights to get and create pods/exec in namespace {namespace}"
    )]
    Forbidden { namespace: String },
    #[error("run a program in the proxy's container")]
    Exec(#[source] Box<kube::Error>),
    #[error("the program in the proxy's container failed: {reason}")]
    Failed { reason: String },
    #[error("the proxy shows nothing: {reason}")]
    Refused { reason: String },
    #[error("{shown} of {wanted} requests came in time")]
    TooFew { shown: u64, wanted: u64 },
    #[error("read what the proxy shows")]
    Line(#[from] serde_json::Error),
    #[error("read from the proxy")]
    Read(#[source] io::Error),
    #[error("print")]
    Print(#[from] io::Error),
}

impl TraceError {
    /// Whether another attempt would end alike.
    pub(super) fn is_final(&self) -> bool {
        matches!(
            self,
            Self::NotEnrolled { .. }
                | Self::Forbidden { .. }
                | Self::Refused { .. }
                | Self::TooFew { .. }
                | Self::Line(_)
                | Self::Print(_)
        )
    }
}

impl From<Unanswered> for TraceError {
    fn from(why: Unanswered) -> Self {
        Self::Proxy(why)
    }
}

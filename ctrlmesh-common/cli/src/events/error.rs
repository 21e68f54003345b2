//! Why events cannot be shown.

use std::io;

use http::StatusCode;
use kube::runtime::watcher;

use crate::cluster::ClusterError;
use crate::text::DocumentError;

/// Why events cannot be shown, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EventsError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error("read the {kind} of {place} (does `kubectl get {kind}` work there?)")]
    Read { kind: &'static str, place: String, source: kube::Error },
    #[error(
        "there is no ShardingConfig {name:?} in namespace {namespace:?}, and no event about one: \
         `ctrlmesh status -A` lists them"
    )]
    NoSuchConfig { name: String, namespace: String },
    #[error(
        "watch events.events.k8s.io of {place}: you may list them, but need the right to `watch`; \
         without --watch they are shown once"
    )]
    Watch { place: String, source: Box<watcher::Error> },
    #[error(transparent)]
    Document(#[from] DocumentError),
    #[error("print")]
    Print(#[from] io::Error),
}

impl EventsError {
    /// Whether the user has no right to it.
    pub(super) fn is_forbidden(&self) -> bool {
        matches!(self, Self::Read { source: kube::Error::Api(status), .. } if status.code == StatusCode::FORBIDDEN)
    }
}

//! Why nothing can be explained.

use std::io;

use crate::cluster::ClusterError;
use crate::cluster::labelling::LabellingError;
use crate::owner::OwnerError;
use crate::text::DocumentError;

/// Why nothing can be explained, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExplainError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error(transparent)]
    Owner(#[from] OwnerError),
    #[error(transparent)]
    Labelling(#[from] LabellingError),
    #[error("read {kind} of {place} (does `kubectl get {kind}` work there?)")]
    Read { kind: &'static str, place: String, source: kube::Error },
    #[error(
        "--for-pod {pod}: no root that divides the object has an enrolled pod of this name in its workload \
         (`ctrlmesh status -o wide` lists them; you need to list pods in the root's namespace)"
    )]
    NotOfTheWorkload { pod: String },
    #[error("--as-pod {name}: there is no such pod in namespace {namespace:?}; --as-namespace names another one")]
    NoSuchPod { name: String, namespace: String },
    #[error("--verb {verb} needs the NAME of an object: only list, watch, create and deletecollection go without")]
    NameNeeded { verb: &'static str },
    #[error("--verb {verb} takes no NAME: leave it out, or select with --field-selector metadata.name={name}")]
    NameNotAllowed { verb: &'static str, name: String },
    #[error("--{flag} is not allowed with --verb {verb}: only list, watch and deletecollection select objects")]
    NotACollection { flag: &'static str, verb: &'static str },
    #[error("--subresource needs the NAME of an object")]
    SubresourceWithoutName,
    #[error("--all-namespaces is allowed with --verb list, watch and deletecollection only, and not with {verb}")]
    AllNamespaces { verb: &'static str },
    #[error("{flag} {value:?} is not allowed: a name has no slash, and is not `.` or `..`")]
    NotAName { flag: &'static str, value: String },
    #[error(
        "--member-path {value:?} is not allowed: it begins with a slash, ends with none, and its segments are words of \
         a-z A-Z 0-9 - . _ ~ : with the member's name among them"
    )]
    NotAMemberPath { value: String },
    #[error("ask the member behind {path}")]
    Member { path: String, source: Box<OwnerError> },
    #[error(transparent)]
    Document(#[from] DocumentError),
    #[error("print")]
    Print(#[from] io::Error),
}

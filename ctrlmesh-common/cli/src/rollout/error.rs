//! Why a rollout cannot be shown or changed, and what to do about it.

use std::io;

use ctrlmesh_common::names::annotation;

use crate::cluster::ClusterError;
use crate::text::DocumentError;

#[derive(Debug, thiserror::Error)]
pub(crate) enum RolloutError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error(
        "read ShardingConfigs of namespace {namespace:?} (does `kubectl -n {namespace} get shardingconfigs` work?)"
    )]
    Read { namespace: String, source: kube::Error },
    #[error("annotate ShardingConfig {name:?} of namespace {namespace:?}: it takes the right to patch it")]
    Write { namespace: String, name: String, source: kube::Error },
    #[error("print")]
    Print(#[from] io::Error),
    #[error(transparent)]
    Document(#[from] DocumentError),
    #[error(
        "there is no ShardingConfig {name:?} in namespace {namespace:?}: `ctrlmesh rollout status -n {namespace}` lists the roots with a rollout"
    )]
    NoSuchRoot { namespace: String, name: String },
    #[error("ShardingConfig {name:?} is no root: name the root of its shards")]
    NoRoot { name: String },
    #[error("root {name:?} has no rollout: add `rollout: {{}}` to its spec.root first")]
    NoRollout { name: String },
    #[error(
        "no revision of root {namespace}/{name} has been checked in a step with shadow: see `ctrlmesh rollout status -n {namespace} {name}`"
    )]
    NoReport { namespace: String, name: String },
    #[error("root {name:?} has no status.rollout yet: its workload has no enrolled pod, or no manager leads")]
    NoStatus { name: String },
    #[error("root {name:?} tries no revision, and none has failed: change the pod template of its workload first")]
    NoTrial { name: String },
    #[error("root {name:?} tries no revision; these have failed, one of which --revision may name: {}", rejected.join(", "))]
    NameRejected { name: String, rejected: Vec<String> },
    #[error("revision {revision:?} is promoted already")]
    Promoted { revision: String },
    #[error("revision {revision:?} is neither tried nor has it failed; --revision may name one of: {}", known.join(", "))]
    UnknownRevision { revision: String, known: Vec<String> },
    #[error(
        "revision {revision:?} is not tried, so --full has nothing to skip: leave --full out, and it may be tried again"
    )]
    NotOnTrial { revision: String },
    #[error(
        "revision {revision} failed, and its pods are being replaced: wait until they are gone, and apply its template again"
    )]
    RollingBack { revision: String },
    #[error(
        "revision {revision:?} is in no step yet, because {message}: wait for phase Analysing, which `ctrlmesh rollout status` shows"
    )]
    NotStarted { revision: String, message: String },
    #[error(
        "the manager has not carried out {value:?} within {seconds} s; annotation {} stays, and counts when a manager leads: look at the manager's pods",
        annotation::ROLLOUT
    )]
    NotHandled { value: String, seconds: u64 },
}

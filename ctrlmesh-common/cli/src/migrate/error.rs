//! Why a migration does not go on, and what to do about it.

use std::io;

use super::state::Step;
use crate::cluster::ClusterError;
use crate::text::DocumentError;

#[derive(Debug, thiserror::Error)]
pub(crate) enum MigrateError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error(transparent)]
    Document(#[from] DocumentError),
    #[error("print")]
    Print(#[from] io::Error),
    #[error("read {what}: it takes the right to list them")]
    Read { what: String, source: Box<kube::Error> },
    #[error("{change}: nothing after it was done; remove the cause, and run the same command again")]
    Change { change: String, source: Box<kube::Error> },
    #[error(
        "create {object}: there is one with another content already; delete or rename that one, and run the same command again"
    )]
    Differs { object: String },
    #[error(
        "{object}: the API server dropped what was written; apply our definitions (deploy/crds), and run the same command again"
    )]
    Pruned { object: String },
    #[error(
        "{change}: somebody else changes the object all the time; stop that program, and run the same command again"
    )]
    Busy { change: String },
    #[error("read spec.selector of Deployment {deployment}")]
    Selector { deployment: String, source: serde_json::Error },
    #[error("{object} cannot be made from the record of the migration")]
    Content { object: String, source: serde_json::Error },
    #[error(
        "read the state of the migration in ConfigMap {namespace}/{name}: take `ctrlmesh` of the version that began it"
    )]
    State { namespace: String, name: &'static str, source: serde_json::Error },
    #[error("write the state of the migration into ConfigMap {namespace}/{name}; nothing after it was done")]
    Write { namespace: String, name: &'static str, source: Box<kube::Error> },
    #[error("another `ctrlmesh migrate` has written ConfigMap {namespace}/{name} meanwhile: let one of them run alone")]
    ConcurrentRun { namespace: String, name: &'static str },
    #[error(
        "the migration that has begun is of {recorded}, and not of {given}: leave --predecessor out, or undo all of it first"
    )]
    AnotherPredecessor { given: String, recorded: String },
    #[error(
        "step finish has begun, and cannot be undone: run it to its end with `ctrlmesh migrate run --until finish`"
    )]
    Finishing,
    #[error("step {} was not taken: {}", step.name(), problems.join("; "))]
    Problems { step: Step, problems: Vec<String> },
    #[error("try whether policy {policy} is enforced, by a pod in a dry run; run the same command again")]
    Probe { policy: String, source: Box<kube::Error> },
    #[error("waited {seconds} s until {what}: {reason}; run the same command again to go on")]
    Waited { seconds: u64, what: String, reason: String },
    #[error(
        "{roots} are fenced and no manager of ours leads, so their fences cannot be taken out: start the managers in {namespace} first"
    )]
    NoManager { roots: String, namespace: String },
}

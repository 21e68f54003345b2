//! The arguments of `migrate`.

use std::time::Duration;

use clap::{Args, Subcommand};
use ctrlmesh_runtime::duration;

use super::snapshot::Predecessor;
use super::state::Step;
use crate::cluster::ClusterArgs;
use crate::text::Format;

/// What `migrate` is told.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(super) command: Command,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Show what there is of the predecessor, what each step would change, and what is not carried over
    Plan(PlanArgs),
    /// Take the steps that are not done yet, all but `finish`, which has to be named
    Run(RunArgs),
    /// Take back what was done, the last step first
    Undo(UndoArgs),
}

#[derive(Args, Debug)]
pub(super) struct PlanArgs {
    /// How to print
    #[arg(short, long, value_name = "FORMAT")]
    pub(super) output: Option<Format>,
    #[command(flatten)]
    pub(super) common: CommonArgs,
}

#[derive(Args, Debug)]
pub(super) struct RunArgs {
    /// The last step to take
    #[arg(long, value_name = "STEP", default_value = "enrol")]
    pub(super) until: Step,
    #[command(flatten)]
    pub(super) changes: ChangeArgs,
}

#[derive(Args, Debug)]
pub(super) struct UndoArgs {
    /// The last step to take back
    #[arg(long, value_name = "STEP", default_value = "guard")]
    pub(super) until: Step,
    #[command(flatten)]
    pub(super) changes: ChangeArgs,
}

/// What both are told that change a cluster.
#[derive(Args, Debug)]
pub(super) struct ChangeArgs {
    /// Show what would be changed, and change nothing
    #[arg(long)]
    pub(super) dry_run: bool,
    /// How long to wait at most for each thing that a step waits for
    #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = duration::parse)]
    pub(super) timeout: Duration,
    #[command(flatten)]
    pub(super) common: CommonArgs,
}

#[derive(Args, Clone, Debug)]
pub(super) struct CommonArgs {
    /// Deployment of the predecessor's manager. With `none` there is none any more
    #[arg(long, value_name = "NAMESPACE/NAME", default_value = "ctrlmesh/ctrlmesh", value_parser = predecessor)]
    pub(super) predecessor: Predecessor,
    /// Namespace of our managers, where the state of the migration is kept, too
    #[arg(long, value_name = "NAMESPACE", default_value = "ctrlmesh-system")]
    pub(super) system_namespace: String,
    #[command(flatten)]
    pub(super) cluster: ClusterArgs,
}

#[derive(Debug, thiserror::Error)]
#[error("expected NAMESPACE/NAME of a Deployment, or none")]
struct NotADeployment;

fn predecessor(text: &str) -> Result<Predecessor, NotADeployment> {
    if text == "none" {
        return Ok(Predecessor { namespace: "ctrlmesh".to_owned(), deployment: None });
    }
    match text.split_once('/') {
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
            Ok(Predecessor { namespace: namespace.to_owned(), deployment: Some(name.to_owned()) })
        }
        _ => Err(NotADeployment),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_predecessor_is_a_deployment_or_none() {
        let kridge = predecessor("kridge/manager").unwrap();
        assert_eq!((kridge.namespace.as_str(), kridge.deployment.as_deref()), ("kridge", Some("manager")));
        assert_eq!(predecessor("none").unwrap().deployment, None);
        for wrong in ["ctrlmesh", "/a", "a/", "a/b/c"] {
            assert!(predecessor(wrong).is_err(), "{wrong}");
        }
    }
}

//! The arguments of `migrate`.

use std::time::Duration;

use clap::{Args, Subcommand};
use ctrlmesh_runtime::duration;

use super::error::MigrateError;
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
    /// Deployment of the predecessor's manager, or `none` or NAMESPACE/none where there is none any more. Default: what
    /// the migration began with, and before that ctrlmesh/ctrlmesh
    #[arg(long, value_name = "NAMESPACE/NAME", value_parser = predecessor)]
    predecessor: Option<GivenPredecessor>,
    /// Namespace of our managers, where the state of the migration is kept, too
    #[arg(long, value_name = "NAMESPACE", default_value = "ctrlmesh-system")]
    pub(super) system_namespace: String,
    #[command(flatten)]
    pub(super) cluster: ClusterArgs,
}

/// The predecessor's manager, as the user names it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct GivenPredecessor {
    /// `None`: that of the migration.
    namespace: Option<String>,
    /// `None`: it is gone.
    deployment: Option<String>,
}

impl CommonArgs {
    /// Where the predecessor's manager is. A migration keeps to the one that it began with, which may be gone by now.
    ///
    /// # Errors
    /// The user names another one.
    pub(super) fn predecessor(&self, recorded: Option<&Predecessor>) -> Result<Predecessor, MigrateError> {
        let known = recorded.cloned().unwrap_or_default();
        let Some(GivenPredecessor { namespace, deployment }) = self.predecessor.clone() else { return Ok(known) };
        let given = Predecessor { namespace: namespace.unwrap_or_else(|| known.namespace.clone()), deployment };
        let is_same = given.namespace == known.namespace
            && (given.deployment.is_none() || known.deployment.is_none() || given.deployment == known.deployment);
        match recorded {
            Some(recorded) if !is_same => {
                Err(MigrateError::AnotherPredecessor { given: given.to_string(), recorded: recorded.to_string() })
            }
            _ => Ok(given),
        }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("expected NAMESPACE/NAME of a Deployment, NAMESPACE/none, or none")]
struct NotADeployment;

fn predecessor(text: &str) -> Result<GivenPredecessor, NotADeployment> {
    let (namespace, name) = match text.split_once('/') {
        None if text == "none" => (None, text),
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
            (Some(namespace.to_owned()), name)
        }
        _ => return Err(NotADeployment),
    };
    Ok(GivenPredecessor { namespace, deployment: (name != "none").then(|| name.to_owned()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(given: Option<&str>, recorded: Option<&Predecessor>) -> Option<String> {
        let predecessor = given.map(|given| predecessor(given).unwrap());
        let (system_namespace, cluster) =
            (String::new(), ClusterArgs { namespace: None, kubeconfig: None, context: None });
        let arguments = CommonArgs { predecessor, system_namespace, cluster };
        arguments.predecessor(recorded).ok().map(|one| one.to_string())
    }

    #[test]
    fn the_predecessor_is_a_deployment_or_none() {
        assert_eq!(chosen(None, None).unwrap(), "ctrlmesh/ctrlmesh");
        for (given, wanted) in [("kridge/manager", "kridge/manager"), ("none", "ctrlmesh/none"), ("a/none", "a/none")] {
            assert_eq!(chosen(Some(given), None).unwrap(), wanted);
        }
        for wrong in ["ctrlmesh", "/a", "a/", "a/b/c"] {
            assert!(predecessor(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_migration_keeps_to_its_predecessor() {
        let recorded = Predecessor { namespace: "kridge".to_owned(), deployment: Some("manager".to_owned()) };
        for (given, wanted) in [
            (None, Some("kridge/manager")),
            (Some("kridge/manager"), Some("kridge/manager")),
            (Some("none"), Some("kridge/none")),
            (Some("kridge/none"), Some("kridge/none")),
            (Some("ctrlmesh/ctrlmesh"), None),
            (Some("kridge/other"), None),
            (Some("other/none"), None),
        ] {
            assert_eq!(chosen(given, Some(&recorded)).as_deref(), wanted, "{given:?}");
        }
    }
}

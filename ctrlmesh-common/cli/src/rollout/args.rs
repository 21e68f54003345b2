//! The arguments of `rollout`.

use clap::{ArgAction, Args, Subcommand};

use crate::cluster::ClusterArgs;
use crate::text::Format;

/// What `rollout` is told.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(super) command: Command,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Show the canary upgrade of a root: the promoted revision, the one on trial, and the last checks
    Status(StatusArgs),
    /// Show what a revision would have written in a step with shadow, and what differs from what there is
    Report(ReportArgs),
    /// Go on with the next step of a trial, or let a revision that failed be tried again
    Promote(PromoteArgs),
    /// End a trial as if it had failed: all that the revision owns goes back to the promoted one at once
    Abort(AbortArgs),
}

#[derive(Args, Debug)]
pub(super) struct StatusArgs {
    /// Name of the root ShardingConfig. Without it, all roots of the namespace that have a rollout are listed
    #[arg(value_name = "ROOT")]
    pub(super) root: Option<String>,
    /// Print `status.rollout` of the root in this format
    #[arg(short, long, value_name = "FORMAT", requires = "root")]
    pub(super) output: Option<Format>,
    #[command(flatten)]
    pub(super) cluster: ClusterArgs,
}

#[derive(Args, Debug)]
pub(super) struct ReportArgs {
    /// Name of the root ShardingConfig
    #[arg(value_name = "ROOT")]
    pub(super) root: String,
    /// Print `status.rollout.shadow` of the root in this format
    #[arg(short, long, value_name = "FORMAT")]
    pub(super) output: Option<Format>,
    #[command(flatten)]
    pub(super) cluster: ClusterArgs,
}

#[derive(Args, Debug)]
pub(super) struct PromoteArgs {
    /// Name of the root ShardingConfig
    #[arg(value_name = "ROOT")]
    pub(super) root: String,
    /// Skip the steps that are left: the revision takes over everything, pod by pod
    #[arg(long)]
    pub(super) full: bool,
    /// The revision on trial, or one that failed before. The default is the one on trial
    #[arg(long, value_name = "REVISION")]
    pub(super) revision: Option<String>,
    #[command(flatten)]
    pub(super) waiting: WaitArgs,
    #[command(flatten)]
    pub(super) cluster: ClusterArgs,
}

#[derive(Args, Debug)]
pub(super) struct AbortArgs {
    /// Name of the root ShardingConfig
    #[arg(value_name = "ROOT")]
    pub(super) root: String,
    #[command(flatten)]
    pub(super) waiting: WaitArgs,
    #[command(flatten)]
    pub(super) cluster: ClusterArgs,
}

#[derive(Args, Debug)]
pub(super) struct WaitArgs {
    /// Wait until the manager has carried the command out, 10s at most, and print how the trial stands then
    #[arg(
        long,
        value_name = "BOOL",
        action = ArgAction::Set,
        num_args = 0..=1,
        require_equals = true,
        default_value = "true",
        default_missing_value = "true"
    )]
    pub(super) wait: bool,
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        rollout: Arguments,
    }

    fn waits(line: &str) -> bool {
        match Line::try_parse_from(line.split(' ')).unwrap().rollout.command {
            Command::Abort(abort) => abort.waiting.wait,
            command => panic!("{command:?}"),
        }
    }

    #[test]
    fn a_command_waits_unless_it_is_told_not_to() {
        assert!(waits("rollout abort web"));
        assert!(waits("rollout abort web --wait -n ops"));
        assert!(!waits("rollout abort --wait=false web"));
    }

    #[test]
    fn a_format_is_for_one_root() {
        assert!(Line::try_parse_from(["rollout", "status", "-o", "json"]).is_err());
        assert!(Line::try_parse_from(["rollout", "status", "-o", "yaml", "web"]).is_ok());
    }
}

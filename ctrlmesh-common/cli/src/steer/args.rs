//! The arguments of `move`, `drain` and `rebalance`.

use std::time::Duration;

use clap::{Args, ValueEnum};
use ctrlmesh_runtime::duration;

use crate::cluster::ClusterArgs;
use crate::text::Format;

/// What `move` is told.
#[derive(Args, Debug)]
pub(crate) struct MoveArgs {
    /// Slots, such as `5` or `0-3,7`; or a namespace, which goes with all of its slot, but alone to a canary.
    /// `namespace/5` is a namespace whose name is a number
    #[arg(value_name = "SLOTS|NAMESPACE")]
    pub(super) what: String,
    /// The shard that gets it, as `ctrlmesh status ROOT` names it
    #[arg(long, value_name = "SHARD")]
    pub(super) to: String,
    #[command(flatten)]
    pub(super) writing: WriteArgs,
    #[command(flatten)]
    pub(super) cluster: ClusterArgs,
}

/// What `drain` is told.
#[derive(Args, Debug)]
pub(crate) struct DrainArgs {
    /// A pod of a root in the namespace; or a node, for the pods of all roots there. `pod/NAME` and `node/NAME` say
    /// which
    #[arg(value_name = "POD|NODE")]
    pub(super) target: String,
    #[command(flatten)]
    pub(super) writing: WriteArgs,
    #[command(flatten)]
    pub(super) cluster: ClusterArgs,
}

/// What `rebalance` is told.
#[derive(Args, Debug)]
pub(crate) struct RebalanceArgs {
    /// Name of the root ShardingConfig
    #[arg(value_name = "ROOT")]
    pub(super) root: String,
    /// What is to be even: numbers of objects, requests of the next --sample, or numbers of slots
    #[arg(long, value_name = "MEASURE", default_value = "objects")]
    pub(super) by: Measure,
    /// For how long requests are counted, with `--by requests`
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration::parse)]
    pub(super) sample: Duration,
    #[command(flatten)]
    pub(super) writing: WriteArgs,
    #[command(flatten)]
    pub(super) cluster: ClusterArgs,
}

/// What is to be even.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Measure {
    Objects,
    Requests,
    Slots,
}

#[derive(Args, Debug)]
pub(super) struct WriteArgs {
    /// Let the API server check what would be written, and write nothing
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Wait until all is with its new owner, and each proxy has its policy
    #[arg(long, conflicts_with = "dry_run")]
    pub(super) wait: bool,
    /// For how long to wait
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = duration::parse)]
    pub(super) timeout: Duration,
    /// Print in this format, for programs
    #[arg(short, long, value_name = "FORMAT")]
    pub(super) output: Option<Format>,
}

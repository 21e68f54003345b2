//! The arguments of `top`.

use std::time::Duration;

use clap::{Args, ValueEnum};
use ctrlmesh_runtime::duration;

use crate::cluster::ClusterArgs;
use crate::text::Format;

/// What `top` is told.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Name of a root, or of a shard by hand. Without one, pods of all of them are shown
    #[arg(value_name = "ROOT")]
    pub(super) root: Option<String>,
    /// One row for each of these
    #[arg(long, value_name = "WHAT", default_value = "shard")]
    pub(super) by: By,
    /// For how long requests are counted
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = duration::parse)]
    pub(super) interval: Duration,
    /// Go on, and show each interval
    #[arg(short, long)]
    pub(super) watch: bool,
    /// Pods of all namespaces
    #[arg(short = 'A', long, conflicts_with = "root")]
    pub(super) all_namespaces: bool,
    /// Print in this format, for programs
    #[arg(short, long, value_name = "FORMAT")]
    pub(super) output: Option<Format>,
    #[command(flatten)]
    pub(super) cluster: ClusterArgs,
}

/// What has a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum By {
    /// A shard, of all its pods
    Shard,
    /// A pod of an operator
    Pod,
    /// A namespace of the objects that requests are for
    Namespace,
}

//! The arguments of `events`.

use clap::Args;

use crate::cluster::ClusterArgs;
use crate::text::Output;

/// What `events` is told.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Only events about this root and its shards, or about this shard by hand
    #[arg(value_name = "ROOT")]
    pub(super) root: Option<String>,
    /// Show those of all namespaces
    #[arg(short = 'A', long, conflicts_with_all = ["root", "namespace"])]
    pub(super) all_namespaces: bool,
    /// Go on, and print each event that is new or comes again
    #[arg(short, long)]
    pub(super) watch: bool,
    /// How to print: json and yaml are for programs
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub(super) output: Output,
    #[command(flatten)]
    pub(super) cluster: ClusterArgs,
}

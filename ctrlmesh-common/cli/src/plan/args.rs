//! The arguments of `plan`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use ctrlmesh_runtime::duration;

use crate::cluster::ClusterArgs;
use crate::text::Format;

/// What `plan` is told.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// A YAML or JSON file with roots, or a folder with such files. May be repeated. Nothing of it is applied
    #[arg(short, long = "filename", value_name = "FILE", required = true)]
    pub(super) filename: Vec<PathBuf>,
    /// Count requests for this time by the proxies' metrics, and say how the load of the shards changes
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    pub(super) sample: Option<Duration>,
    /// Exit with 2 if anything would move
    #[arg(long)]
    pub(super) exit_code: bool,
    /// Print in this format, for programs
    #[arg(short, long, value_name = "FORMAT")]
    pub(super) output: Option<Format>,
    #[command(flatten)]
    pub(super) cluster: ClusterArgs,
}

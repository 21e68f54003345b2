//! The arguments of `plan`.

use std::path::PathBuf;

use clap::Args;

use crate::cluster::ClusterArgs;
use crate::text::Format;

/// What `plan` is told.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// A YAML or JSON file with roots, or a folder with such files. May be repeated. Nothing of it is applied
    #[arg(short, long = "filename", value_name = "FILE", required = true)]
    pub(super) filename: Vec<PathBuf>,
    /// Exit with 2 if anything would move
    #[arg(long)]
    pub(super) exit_code: bool,
    /// Print in this format, for programs
    #[arg(short, long, value_name = "FORMAT")]
    pub(super) output: Option<Format>,
    #[command(flatten)]
    pub(super) cluster: ClusterArgs,
}

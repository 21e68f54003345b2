//! The arguments of `version`.

use clap::Args;

use crate::cluster::ClusterArgs;
use crate::text::Format;

/// What `version` is told.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Print the version of this program only, and ask no API server
    #[arg(long)]
    pub(super) client: bool,
    /// Print in this format, for programs
    #[arg(short, long, value_name = "FORMAT")]
    pub(super) output: Option<Format>,
    #[command(flatten)]
    pub(super) cluster: ClusterArgs,
}

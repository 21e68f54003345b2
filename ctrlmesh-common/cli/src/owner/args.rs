//! The arguments of `owner`.

use clap::Args;

use crate::cluster::ClusterArgs;
use crate::text::Format;

/// What `owner` is told.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Resource of the object, as kubectl takes it: plural, singular, kind or short name, also with .VERSION.GROUP
    #[arg(value_name = "TYPE")]
    pub(super) resource: String,
    /// Name of the object
    #[arg(value_name = "NAME")]
    pub(super) name: String,
    /// Print in this format, for programs
    #[arg(short, long, value_name = "FORMAT")]
    pub(super) output: Option<Format>,
    #[command(flatten)]
    pub(super) cluster: ClusterArgs,
}

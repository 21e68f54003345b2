//! The arguments of `status`.

use clap::{Args, ValueEnum};

use crate::cluster::ClusterArgs;
use crate::text::Format;

/// What `status` is told.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Name of a root, or of a shard by hand, of which one screen is shown. Without it, all are listed, a line each
    #[arg(value_name = "NAME")]
    pub(super) name: Option<String>,
    /// List those of all namespaces
    #[arg(short = 'A', long, conflicts_with_all = ["name", "namespace"])]
    pub(super) all_namespaces: bool,
    /// How to print: wide shows each pod, json and yaml are for programs
    #[arg(short, long, value_name = "FORMAT")]
    pub(super) output: Option<Output>,
    /// Go on, and print anew whenever something has changed. The API server is asked every 2s
    #[arg(short, long)]
    pub(super) watch: bool,
    #[command(flatten)]
    pub(super) cluster: ClusterArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Output {
    Wide,
    Json,
    Yaml,
}

impl Output {
    /// `None` where it is for people.
    pub(super) fn format(self) -> Option<Format> {
        match self {
            Self::Wide => None,
            Self::Json => Some(Format::Json),
            Self::Yaml => Some(Format::Yaml),
        }
    }
}

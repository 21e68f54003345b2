//! The arguments of `check`.

use std::time::Duration;

use clap::{Args, ValueEnum};
use ctrlmesh_runtime::duration;

use crate::cluster::ClusterArgs;
use crate::text::Format;

/// What `check` is told.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Check whether ctrlmesh can be installed, and look for no installation
    #[arg(long)]
    pub(super) pre: bool,
    /// How to print: json and yaml are for programs
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub(super) output: Output,
    /// For how long to check at most
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = duration::parse)]
    pub(super) timeout: Duration,
    #[command(flatten)]
    pub(super) cluster: ClusterArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Output {
    Table,
    Json,
    Yaml,
}

impl Output {
    /// `None` where it is for people.
    pub(super) fn format(self) -> Option<Format> {
        match self {
            Self::Table => None,
            Self::Json => Some(Format::Json),
            Self::Yaml => Some(Format::Yaml),
        }
    }
}

//! The arguments of `trace`.

use std::time::Duration;

use clap::{Args, ValueEnum, value_parser};
use ctrlmesh_proxy::trace::TraceFilter;
use ctrlmesh_runtime::duration;

use crate::cluster::ClusterArgs;

/// What `trace` is told.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Name of a pod whose operator is enrolled
    #[arg(value_name = "POD")]
    pub(super) pod: String,
    /// Which requests are shown.
    #[command(flatten)]
    pub(super) filter: TraceFilter,
    /// End after so many requests. With --for, it is an error where fewer come in time
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..))]
    pub(super) count: Option<u64>,
    /// End after this time. The default is to go on until Ctrl-C, or until the pod ends
    #[arg(long = "for", value_name = "DURATION", value_parser = duration::parse)]
    pub(super) duration: Option<Duration>,
    /// Print one JSON object a line, for programs
    #[arg(short, long, value_name = "FORMAT")]
    pub(super) output: Option<Lines>,
    #[command(flatten)]
    pub(super) cluster: ClusterArgs,
}

/// A format that has a line for each request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Lines {
    Json,
}

//! The arguments of `dashboard`.

use clap::Args;

use crate::cluster::ClusterArgs;

/// What `dashboard` is told.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Show roots of all namespaces
    #[arg(short = 'A', long)]
    pub(super) all_namespaces: bool,
    /// Port on this machine's loopback address. 0: one that is free
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    pub(super) port: u16,
    /// Print the page's address only, and open no browser
    #[arg(long)]
    pub(super) no_browser: bool,
    #[command(flatten)]
    pub(super) cluster: ClusterArgs,
}

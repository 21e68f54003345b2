//! `ctrlmesh-proxy`: `sidecar` serves one pod.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use ctrlmesh_proxy::config::SidecarArgs;
use ctrlmesh_proxy::{app, telemetry};

/// Sits between an operator and its API server, and gives each replica its own share of the objects.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serves one pod, from inside it, without any privilege.
    Sidecar(Box<SidecarArgs>),
}

fn main() -> anyhow::Result<ExitCode> {
    match Cli::parse().command {
        Command::Sidecar(args) => {
            telemetry::init(args.common.log_format)?;
            let clean = app::sidecar(*args)?;
            Ok(if clean {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            })
        }
    }
}

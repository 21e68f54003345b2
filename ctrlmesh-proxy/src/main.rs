//! `ctrlmesh-proxy`: between an operator and its API server.
#![forbid(unsafe_code)]

use clap::{Parser, Subcommand};
use ctrlmesh_proxy::classify;

/// Sits between an operator and its API server.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Prints what the API server makes of each `METHOD TARGET` line on stdin, as one JSON object a line.
    Classify,
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().command {
        Command::Classify => Ok(classify::run(
            &mut std::io::stdin().lock(),
            &mut std::io::stdout().lock(),
        )?),
    }
}

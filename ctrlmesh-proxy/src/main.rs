//! `ctrlmesh-proxy`: between an operator and its API server.
#![forbid(unsafe_code)]

use clap::{Parser, Subcommand};
use ctrlmesh_proxy::{classify, intercept};

/// Sits between an operator and its API server.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Redirects the connections of a cgroup to a proxy, with eBPF.
    Intercept(intercept::command::Arguments),
    /// Prints what the API server makes of each `METHOD TARGET` line on stdin, as one JSON object a line.
    Classify,
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().command {
        Command::Intercept(arguments) => intercept::command::run(arguments),
        Command::Classify => {
            Ok(classify::run(&mut std::io::stdin().lock(), &mut std::io::stdout().lock())?)
        }
    }
}

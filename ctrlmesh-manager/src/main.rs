//! `ctrlmesh-manager`: decides who owns what.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use ctrlmesh_manager::config::RunArgs;
use ctrlmesh_manager::{app, telemetry};

mod command;

/// Decides which replica of an operator owns which objects.
#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print the CustomResourceDefinitions, or write them into a folder
    Crds(command::Crds),
    /// Print the service accounts and roles of the manager, or write them into a file
    Rights(command::Rights),
    /// Run in a cluster, beside any number of replicas
    Run(Box<RunArgs>),
}

fn main() -> Result<ExitCode> {
    match Arguments::parse().command {
        Command::Crds(crds) => crds.run(),
        Command::Rights(rights) => rights.run(),
        Command::Run(arguments) => {
            telemetry::init(arguments.log_format)?;
            let clean = app::run(*arguments)?;
            Ok(if clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
    }
}

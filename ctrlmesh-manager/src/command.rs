//! The command line of `ctrlmesh-manager`.

use std::fs;
use std::io::{Write as _, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{CommandFactory as _, Parser, Subcommand};
use ctrlmesh_runtime::telemetry;

use crate::app;
use crate::config::RunArgs;
use crate::install::{crds, rbac};

/// Decides which replica of an operator owns which objects
#[derive(Parser)]
#[command(name = "ctrlmesh-manager", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print the CustomResourceDefinitions, or write them into a folder
    Crds {
        /// Folder for one file for each definition. Without it, they are printed
        #[arg(long, value_name = "FOLDER")]
        output: Option<PathBuf>,
    },
    /// Print the service accounts and roles of the manager, or write them into a file
    Rights {
        /// File to write. Without it, they are printed
        #[arg(long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Run the manager in a cluster; any number of replicas may run beside it
    Run(Box<RunArgs>),
}

/// The command line, for pages that are generated from it.
pub fn command() -> clap::Command {
    Arguments::command()
}

/// Runs the program with the arguments of this process. It fails where something had to be cut at the end.
///
/// # Errors
/// Why the command could not start, or failed.
pub fn main() -> Result<ExitCode> {
    match Arguments::parse().command {
        Command::Crds { output: Some(folder) } => {
            crds::write(&folder).with_context(|| format!("write into {}", folder.display()))?;
        }
        Command::Crds { output: None } => {
            for definition in crds::all()? {
                writeln!(stdout(), "---\n{}", definition.yaml.trim_end())?;
            }
        }
        Command::Rights { output: Some(file) } => {
            fs::write(&file, rbac::yaml()).with_context(|| format!("write {}", file.display()))?;
        }
        Command::Rights { output: None } => write!(stdout(), "{}", rbac::yaml())?,
        Command::Run(arguments) => {
            telemetry::init(arguments.log_format)?;
            if !app::run(*arguments)? {
                return Ok(ExitCode::FAILURE);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

//! `ctrlmesh-manager`: decides who owns what.
#![forbid(unsafe_code)]

use std::io::{Write as _, stdout};
use std::path::PathBuf;
use std::process::ExitCode;
use std::{fs, io};

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use ctrlmesh_common::api::{ShardingConfig, read_sharding_configs};
use ctrlmesh_manager::{definitions, validate};

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
    Crds {
        /// The folder to write into, a file per resource; without it they are printed
        #[arg(long, value_name = "FOLDER")]
        output: Option<PathBuf>,
    },
    /// Check ShardingConfigs in files, without a cluster; exits with 1 where one would be refused
    Validate {
        /// A YAML or JSON file; may be given several times, and all are checked together
        #[arg(short, long = "filename", value_name = "FILE", required = true)]
        filename: Vec<PathBuf>,
    },
}

fn main() -> Result<ExitCode> {
    match Arguments::parse().command {
        Command::Crds { output: Some(folder) } => {
            definitions::write(&folder)
                .with_context(|| format!("write into {}", folder.display()))?;
        }
        Command::Crds { output: None } => {
            for definition in definitions::all()? {
                writeln!(stdout(), "---\n{}", definition.yaml.trim_end())?;
            }
        }
        Command::Validate { filename } => return check_files(&filename),
    }
    Ok(ExitCode::SUCCESS)
}

fn check_files(files: &[PathBuf]) -> Result<ExitCode> {
    let mut configs: Vec<ShardingConfig> = Vec::new();
    for file in files {
        let text = fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
        configs.extend(
            read_sharding_configs(&text).with_context(|| format!("parse {}", file.display()))?,
        );
    }
    let mut refused = false;
    for config in &configs {
        let report = validate::sharding_config(config, &configs, None);
        refused |= !report.errors.is_empty();
        print(config, &report)?;
    }
    Ok(if refused { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn print(config: &ShardingConfig, report: &validate::Report) -> io::Result<()> {
    let mut out = stdout().lock();
    let name = config.metadata.name.as_deref().unwrap_or("(without name)");
    let verdict = if report.errors.is_empty() { "ok" } else { "refused" };
    writeln!(out, "ShardingConfig {name}: {verdict}")?;
    report.errors.iter().try_for_each(|problem| writeln!(out, "  error: {problem}"))?;
    report.warnings.iter().try_for_each(|problem| writeln!(out, "  warning: {problem}"))
}

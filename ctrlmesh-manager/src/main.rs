//! `ctrlmesh-manager`: decides who owns what.
#![forbid(unsafe_code)]

use std::io::{Write as _, stdout};
use std::path::PathBuf;
use std::process::ExitCode;
use std::{fs, io};

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, Subcommand};
use ctrlmesh_common::names;
use ctrlmesh_manager::definitions;
use ctrlmesh_manager::validate::{self, Verdict};

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
    /// Check our resources in files, without a cluster; exits with 1 where one would be refused, or none is there
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
    let documents = files.iter().map(|file| {
        let text = fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
        let documents = serde_saphyr::from_multiple(&text)
            .with_context(|| format!("parse {}", file.display()))?;
        Ok((file.display().to_string(), documents))
    });
    let verdicts = validate::manifests(&documents.collect::<Result<Vec<_>>>()?);
    verdicts.iter().try_for_each(print)?;
    ensure!(
        verdicts.iter().any(|verdict| verdict.report.is_some()),
        "nothing to check: there is no resource of {} in these files",
        names::GROUP
    );
    let refused = verdicts.iter().any(Verdict::is_refused);
    Ok(if refused { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn print(verdict: &Verdict) -> io::Result<()> {
    let mut out = stdout().lock();
    let Verdict { kind, name, place, report } = verdict;
    let name = if name.is_empty() { "(without name)" } else { name };
    let said = match report {
        None => "passed over",
        Some(_) if verdict.is_refused() => "refused",
        Some(_) => "ok",
    };
    writeln!(out, "{kind} {name} ({place}): {said}")?;
    let Some(report) = report else { return Ok(()) };
    report.errors.iter().try_for_each(|problem| writeln!(out, "  error: {problem}"))?;
    report.warnings.iter().try_for_each(|problem| writeln!(out, "  warning: {problem}"))
}

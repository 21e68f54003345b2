//! `validate`: would the resources in these files be accepted?

use std::io::{self, Write as _, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use ctrlmesh_common::names;
use ctrlmesh_manager::validate::{self, Verdict};

use super::{read, verdict};

/// What is asked for.
#[derive(Args)]
pub(crate) struct Validate {
    /// A YAML or JSON file, or a folder of such; may be given several times, and all are checked together
    #[arg(short, long = "filename", value_name = "FILE", required = true)]
    filename: Vec<PathBuf>,
}

// === impl Validate ===

impl Validate {
    pub(crate) fn run(self) -> Result<ExitCode> {
        let parsed = |(file, text): (PathBuf, String)| {
            let documents = serde_saphyr::from_multiple(&text)
                .with_context(|| format!("parse {}", file.display()))?;
            Ok((file.display().to_string(), documents))
        };
        let files = read(&self.filename)?.into_iter().map(parsed).collect::<Result<Vec<_>>>()?;
        let verdicts = validate::manifests(&files);
        verdicts.iter().try_for_each(print)?;
        ensure!(
            verdicts.iter().any(|verdict| verdict.report.is_some()),
            "nothing to check: there is no resource of {} in these files",
            names::GROUP
        );
        Ok(verdict(verdicts.iter().any(Verdict::is_refused)))
    }
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

//! `validate`: checks our resources in files as the manager would.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write as _, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use ctrlmesh_common::names;
use ctrlmesh_manager::config::LabelArgs;
use ctrlmesh_manager::rules::shard;
use ctrlmesh_manager::rules::validate::{self, Verdict};

use crate::files::{exit_code, files};

/// What is asked for.
#[derive(Args, Debug)]
pub(crate) struct Validate {
    /// A YAML or JSON file, or a folder with such files. May be repeated; all files are checked together
    #[arg(short, long = "filename", value_name = "FILE", required = true)]
    filename: Vec<PathBuf>,
    #[command(flatten)]
    labels: LabelArgs,
}

impl Validate {
    pub(crate) fn run(self) -> Result<ExitCode> {
        let documents = files(&self.filename)?.into_iter().map(|file| {
            let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
            let documents = serde_saphyr::from_multiple(&text).with_context(|| format!("parse {}", file.display()))?;
            Ok((file.display().to_string(), documents))
        });
        let documents = documents.collect::<Result<Vec<_>>>()?;
        let labelling = self.labels.labelling()?;
        // Those of the cluster are not known here.
        let namespaces = BTreeSet::new();
        let verdicts = validate::manifests_and(&documents, &[&labelling.hash_key], &|config| {
            shard::undividable(config, &labelling, &namespaces)
        });
        verdicts.iter().try_for_each(print)?;
        ensure!(
            verdicts.iter().any(|verdict| verdict.report.is_some()),
            "nothing to check: there is no resource of {} in these files",
            names::GROUP
        );
        Ok(exit_code(verdicts.iter().any(Verdict::is_refused)))
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

//! `validate`: would these ShardingConfigs be accepted?

use std::io::{self, Write as _, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_manager::validate::{self, Report};

use super::{manifests, verdict};

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
        let configs = manifests(&self.filename)?.configs;
        let mut refused = false;
        for config in &configs {
            let report = validate::sharding_config(config, &configs, None);
            refused |= !report.errors.is_empty();
            print(config, &report)?;
        }
        Ok(verdict(refused))
    }
}

fn print(config: &ShardingConfig, report: &Report) -> io::Result<()> {
    let mut out = stdout().lock();
    let name = config.metadata.name.as_deref().unwrap_or("(without name)");
    let verdict = if report.errors.is_empty() { "ok" } else { "refused" };
    writeln!(out, "ShardingConfig {name}: {verdict}")?;
    report.errors.iter().try_for_each(|problem| writeln!(out, "  error: {problem}"))?;
    report.warnings.iter().try_for_each(|problem| writeln!(out, "  warning: {problem}"))
}

//! `crds`: the definitions of our resources.

use std::io::{Write as _, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Args;
use ctrlmesh_manager::install::crds;

/// What is asked for.
#[derive(Args)]
pub(crate) struct Crds {
    /// The folder to write into, a file per resource; without it they are printed
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
}

// === impl Crds ===

impl Crds {
    pub(crate) fn run(self) -> Result<ExitCode> {
        if let Some(folder) = self.output {
            crds::write(&folder).with_context(|| format!("write into {}", folder.display()))?;
        } else {
            for definition in crds::all()? {
                writeln!(stdout(), "---\n{}", definition.yaml.trim_end())?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

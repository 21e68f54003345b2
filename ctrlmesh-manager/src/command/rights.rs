//! `rights`: what the manager may do in a cluster.

use std::fs;
use std::io::{Write as _, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Args;
use ctrlmesh_manager::install::rbac;

/// What is asked for.
#[derive(Args)]
pub(crate) struct Rights {
    /// The file to write; without it they are printed
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

// === impl Rights ===

impl Rights {
    pub(crate) fn run(self) -> Result<ExitCode> {
        match self.output {
            Some(file) => fs::write(&file, rbac::yaml())
                .with_context(|| format!("write {}", file.display()))?,
            None => write!(stdout(), "{}", rbac::yaml())?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

//! `cargo xtask node`: starts, lists and ends real nodes.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use clap::Subcommand;

use crate::images::{self, Image};
use crate::run::{cargo, is_root};
use crate::setup::{self, Purpose, Readiness};

/// What to do with nodes.
#[derive(Clone, Debug, Subcommand)]
pub enum NodeCommand {
    /// Set up, start a Kubernetes node in namespaces of its own, and print its kubeconfig; it stays until `down`
    Up {
        /// Build these images and load them
        #[arg(long, value_name = "NAME", num_args = 0..)]
        images: Vec<Image>,
        /// Load these images, from archives
        #[arg(long, value_name = "FILE", num_args = 0..)]
        archives: Vec<PathBuf>,
    },
    /// End all nodes that `up` started
    Down,
    /// List the nodes on this machine
    Status,
    /// Print where the kubeconfig of the newest node that `up` started is
    Kubeconfig,
}

/// Does it.
///
/// # Errors
/// Where something cannot be set up, built or started.
pub fn run_command(chosen: &NodeCommand) -> Result<ExitCode> {
    let mut command = cargo(&["run", "--quiet", "--locked", "--package", "ctrlmesh-testbed", "--"]);
    match chosen {
        NodeCommand::Up { images, archives } => {
            if !is_root() {
                bail!("a node needs root: it makes namespaces, cgroups and mounts");
            }
            let theirs = [Image::PrometheusOperator, Image::PrometheusOperatorNext];
            let ours = !theirs.iter().any(|one| images.contains(one));
            let purpose = if ours { Purpose::Node } else { Purpose::Tests };
            if setup::run_setup(purpose)? == Readiness::NotReady {
                return Ok(Readiness::NotReady.into());
            }
            command.arg("up").args(images::build(images, false)?);
            for archive in archives {
                command.arg(std::path::absolute(archive)?);
            }
        }
        NodeCommand::Down => drop(command.arg("down")),
        NodeCommand::Status => drop(command.arg("status")),
        NodeCommand::Kubeconfig => drop(command.arg("kubeconfig")),
    }
    // Where it fails it has said why.
    let status = command.status().context("start cargo")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

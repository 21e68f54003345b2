//! Shows it: an ordinary operator, sharded before one's eyes.

use std::os::unix::process::CommandExt as _;
use std::path::{PathBuf, absolute};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use clap::Args;

use crate::images::{self, Image};
use crate::run::{cargo, is_root};
use crate::setup::{self, Readiness};

/// What the demo needs on a node.
const IMAGES: [Image; 2] = [Image::Proxy, Image::Manager];

/// How it is shown.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Take all steps without a terminal, print a report, and succeed only if every step held
    #[arg(long)]
    once: bool,
    /// Use this cluster instead of a node of our own; its nodes must have the images (`cargo xtask images`)
    #[arg(long, value_name = "FILE", requires = "audit_log")]
    kubeconfig: Option<PathBuf>,
    /// The audit log that the API server of that cluster writes, at level Metadata at least
    #[arg(long, value_name = "FILE", requires = "kubeconfig")]
    audit_log: Option<PathBuf>,
}

/// Sets up, builds, and becomes the demo.
///
/// # Errors
/// Where something cannot be set up or built.
pub fn run_demo(options: &Options) -> Result<ExitCode> {
    if options.kubeconfig.is_none() && !is_root() {
        bail!(
            "the demo's Kubernetes node needs root: it makes namespaces, cgroups and mounts; \
             or name a cluster that you have: --kubeconfig FILE --audit-log FILE"
        );
    }
    if setup::run_setup()? == Readiness::NotReady {
        return Ok(Readiness::NotReady.into());
    }
    let mut demo = cargo(&["run", "--quiet", "--locked", "--package", "ctrlmesh-demo", "--"]);
    if options.once {
        demo.arg("--once");
    }
    if let (Some(kubeconfig), Some(log)) = (&options.kubeconfig, &options.audit_log) {
        demo.arg("--kubeconfig").arg(absolute(kubeconfig)?).arg("--audit-log").arg(absolute(log)?);
    } else {
        demo.args(images::build_quickly(&IMAGES)?);
        demo.args(images::build(&[Image::ExampleOperator], false)?);
    }
    // In our place, so that Ctrl-C ends one process, and the shell waits for that.
    Err(demo.exec()).context("start the demo")
}

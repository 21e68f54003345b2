//! Shows it: an ordinary operator, sharded before one's eyes.

use std::os::unix::process::CommandExt as _;
use std::path::{PathBuf, absolute};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use clap::Args;

use crate::images::{self, Image};
use crate::progress::step;
use crate::room;
use crate::run::{cargo, has_cgroup2, is_root, run};
use crate::setup::{self, Readiness, kubectl};

/// What the demo needs on a node.
const IMAGES: [Image; 3] = [Image::Proxy, Image::Manager, Image::ExampleOperator];

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
    let begun = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
    let target = room::target(room::DEMO_TARGET_MB);
    // On a cluster that is there already, only kubectl is needed, and nobody has to be root.
    let readiness = if options.kubeconfig.is_some() {
        room::check(vec![target])?;
        kubectl::prepare()?
    } else {
        check_machine()?;
        room::check([vec![target, room::node()], room::tools()].concat())?;
        setup::run_setup()?
    };
    if readiness == Readiness::NotReady {
        return Ok(Readiness::NotReady.into());
    }
    let package = ["--quiet", "--locked", "--package", "ctrlmesh-demo"];
    step("build the demo; the first time takes minutes", images::ABOUT, || {
        run(cargo(&["build"]).args(package))
    })?;
    let mut demo = cargo(&["run"]);
    demo.args(package).arg("--");
    demo.arg("--begun").arg(begun.to_string());
    if options.once {
        demo.arg("--once");
    }
    if let (Some(kubeconfig), Some(log)) = (&options.kubeconfig, &options.audit_log) {
        demo.arg("--kubeconfig").arg(absolute(kubeconfig)?).arg("--audit-log").arg(absolute(log)?);
    } else {
        // Not optimised: what the tests use, so that it is built once for both.
        demo.args(images::build(&IMAGES, true)?);
    }
    // In our place, so that Ctrl-C ends one process, and the shell waits for that.
    Err(demo.exec()).context("start the demo")
}

/// What a node needs of the machine, and setup cannot give it.
fn check_machine() -> Result<()> {
    let instead = "or name a cluster that you have: --kubeconfig FILE --audit-log FILE";
    ensure!(
        is_root(),
        "the demo's Kubernetes node needs root: it makes namespaces, cgroups and mounts; {instead}"
    );
    ensure!(
        has_cgroup2(),
        "the kernel programs need a cgroup2 mount (mount -t cgroup2 none /sys/fs/cgroup/unified); {instead}"
    );
    Ok(())
}

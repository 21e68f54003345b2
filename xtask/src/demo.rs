//! `cargo xtask demo`: checks the machine, builds, and starts the demo.

use std::os::unix::process::CommandExt as _;
use std::path::{PathBuf, absolute};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};
use std::{env, io};

use anyhow::{Context as _, Result, ensure};
use clap::Args;

use crate::disk_space;
use crate::images::{self, Image};
use crate::progress::step;
use crate::run::{cargo, has_cgroup2, is_root, run};
use crate::setup::{self, Purpose, Readiness, kubectl};
use crate::supervisor::{self, OnExit};

/// What the demo needs on a node.
const IMAGES: [Image; 3] = [Image::Proxy, Image::Manager, Image::ExampleOperator];

/// The program that shows it.
const PACKAGE: [&str; 4] = ["--quiet", "--locked", "--package", "ctrlmesh-demo"];

/// How it is shown.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// End after the last step, and succeed only if every step held
    #[arg(long)]
    once: bool,
    /// Use this cluster instead of a node of our own; its nodes must have the images (`cargo xtask images`)
    #[arg(long, value_name = "FILE", requires = "audit_log")]
    kubeconfig: Option<PathBuf>,
    /// The audit log that the API server of that cluster writes, at level Metadata at least
    #[arg(long, value_name = "FILE", requires = "kubeconfig")]
    audit_log: Option<PathBuf>,
}

/// Variable that says when the command was given, in milliseconds since 1970, to those that it becomes.
const BEGUN: &str = "CTRLMESH_DEMO_BEGUN";

/// Where one can have a mount of cgroup2; the folder need not be there.
const CGROUP2: &str = "the kernel programs need a cgroup2 mount: \
    mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified";

/// Sets up and builds behind a supervisor, so that nothing is left where that is interrupted, and becomes the demo,
/// which has a supervisor of its own.
///
/// # Errors
/// Where something cannot be set up or built.
pub fn run_demo(options: &Options) -> Result<ExitCode> {
    if supervisor::is_over() {
        return Err(become_demo(options)?).context("start the demo");
    }
    if supervisor::follow() {
        return Ok(prepare(options)?.into());
    }
    let begun = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
    check(options)?;
    let mut shell = supervisor::shell(OnExit::Again)?;
    Err(shell.env(BEGUN, begun.to_string()).exec()).context("start the set-up")
}

/// What is asked before anything is done. On a cluster that is there already nobody has to be root.
fn check(options: &Options) -> Result<()> {
    let target = disk_space::target(disk_space::DEMO_TARGET_MB);
    if options.kubeconfig.is_some() {
        return disk_space::check(vec![target]);
    }
    check_machine(is_root(), has_cgroup2())?;
    disk_space::check([vec![target, disk_space::node()], disk_space::tools()].concat())
}

/// Sets up, and builds the demo and its images. On a cluster that is there already only kubectl is needed.
fn prepare(options: &Options) -> Result<Readiness> {
    let own = options.kubeconfig.is_none();
    let readiness = if own { setup::run_setup(Purpose::Node)? } else { kubectl::prepare()? };
    if readiness == Readiness::Ready {
        step("build the demo; the first time takes minutes", images::ABOUT, || run(cargo(&["build"]).args(PACKAGE)))?;
        if own {
            // Not optimised: what the tests use, so that it is built once for both.
            images::build(&IMAGES, true)?;
        }
    }
    Ok(readiness)
}

/// In our place, so that Ctrl-C ends one process, and the shell waits for that; returns only where it fails.
fn become_demo(options: &Options) -> Result<io::Error> {
    let mut demo = cargo(&["run"]);
    demo.args(PACKAGE).arg("--");
    if let Some(begun) = env::var_os(BEGUN) {
        demo.arg("--begun").arg(begun);
    }
    if options.once {
        demo.arg("--once");
    }
    if let (Some(kubeconfig), Some(log)) = (&options.kubeconfig, &options.audit_log) {
        demo.arg("--kubeconfig").arg(absolute(kubeconfig)?).arg("--audit-log").arg(absolute(log)?);
    } else {
        for image in IMAGES {
            demo.arg(images::archive(image, true).canonicalize()?);
        }
    }
    Ok(demo.env_remove(BEGUN).exec())
}

/// What a node needs of the machine, and setup cannot give it.
fn check_machine(is_root: bool, has_cgroup2: bool) -> Result<()> {
    let instead = "or name a cluster that you have: --kubeconfig FILE --audit-log FILE";
    ensure!(is_root, "the demo's Kubernetes node needs root: it makes namespaces, cgroups and mounts; {instead}");
    ensure!(has_cgroup2, "{CGROUP2}; {instead}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::run::root;

    #[test]
    fn who_is_not_root_or_has_no_cgroup2_hears_what_to_do_instead() {
        assert!(check_machine(true, true).is_ok());
        let docs = fs::read_to_string(root().join("docs/troubleshooting.md")).unwrap();
        for (is_root, has_cgroup2, wanted) in
            [(false, true, "needs root"), (false, false, "needs root"), (true, false, "cgroup2 mount")]
        {
            let said = check_machine(is_root, has_cgroup2).unwrap_err().to_string();
            assert!(said.contains(wanted) && said.contains("--kubeconfig FILE"), "{said}");
            assert!(docs.contains(wanted), "troubleshooting.md says nothing of {wanted:?}");
        }
    }

    #[test]
    fn the_docs_say_what_to_do_without_cgroup2() {
        let (said, commands) = CGROUP2.split_once(": ").unwrap();
        let docs = fs::read_to_string(root().join("docs/troubleshooting.md")).unwrap();
        let row = docs.lines().find(|line| line.contains(&format!("`{said}`"))).unwrap();
        assert!(row.contains(&format!("`{commands}`")), "{row}");
    }
}

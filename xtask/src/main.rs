//! `cargo xtask`: one subcommand for each task.
#![forbid(unsafe_code)]

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::{Parser, Subcommand};
use xtask::setup::Purpose;
use xtask::{
    bench, build_ebpf, chart, demo, docs, fuzz, images, lint, node, release, setup, test, tools, torture, user_cluster,
};

/// Builds, checks and shows ctrlmesh. A fresh clone needs only `cargo xtask test`.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Install what is missing on this machine (Debian 12, as root); else say what to install
    Setup,
    /// Build the kernel programs into target/bpf/ctrlmesh.o
    BuildEbpf,
    /// Check formatting, clippy, dependencies and documentation
    Lint(lint::Options),
    /// Set up, then run every tier of tests, and end with a table
    Test(test::Options),
    /// Write the definitions of our resources and the manager's roles into deploy/chart/files, and then as `chart`
    Crds,
    /// Write the manifests in deploy/ from the chart in deploy/chart, and the table of its values
    Chart,
    /// Write the reference pages that follow from the code into docs/reference
    Docs,
    /// Build the images that a cluster runs into target/images, without Docker
    Images(images::Options),
    /// Make all that a release publishes, publish nothing, and print what is done and what is to be done by hand
    Release(release::Options),
    /// Start, list and end real Kubernetes nodes on this machine
    #[command(subcommand)]
    Node(node::NodeCommand),
    /// Show it: an ordinary operator with three replicas on a real node, sharded while you watch
    Demo(demo::Options),
    /// Take everything out of a cluster that a demo or tests put there which could not do so themselves
    Remove {
        /// The cluster, of which ctrlmesh and the example operator go, whoever put them there
        #[arg(long, value_name = "FILE")]
        kubeconfig: PathBuf,
    },
    /// Take away what builds that were interrupted left
    #[command(hide = true)]
    Sweep,
    /// Feed raw bytes to the pure core, until something breaks or the time is over
    Fuzz(fuzz::Options),
    /// Measure, side by side with what we compare with
    Bench(bench::Options),
    /// Move shares under load while processes are paused, killed and cut off, clocks are stepped and API servers
    /// restart; audit logs are the witness (root)
    Torture(torture::Options),
}

/// The folder of this crate, when it was built.
const BUILT_IN: &str = env!("CARGO_MANIFEST_DIR");

/// Whether it was built where it is run, as far as cargo says where that is. It builds nothing again where a checkout
/// was moved or copied with its target folder, and we, and all tests, would go on with the files that are at the old
/// place.
fn is_in_place(here: Option<&OsStr>) -> bool {
    let crate_folder = here.map(Path::new).filter(|folder| folder.ends_with("xtask"));
    crate_folder.is_none_or(|folder| folder == Path::new(BUILT_IN))
}

fn main() -> Result<ExitCode> {
    ensure!(
        is_in_place(env::var_os("CARGO_MANIFEST_DIR").as_deref()),
        "this checkout was built as {BUILT_IN} and is elsewhere now, which cargo does not see: `cargo clean` once"
    );
    match Arguments::parse().command {
        Command::Setup => return Ok(setup::run_setup(Purpose::Tests)?.into()),
        Command::BuildEbpf => build_ebpf::build()?,
        Command::Lint(options) => lint::check_all(options)?,
        Command::Test(options) => return test::run_tiers(&options),
        Command::Crds => lint::write_definitions()?,
        Command::Chart => chart::write_manifests()?,
        Command::Docs => docs::write_reference()?,
        Command::Images(options) => images::run_images(&options)?,
        Command::Release(options) => return Ok(release::run_release(&options)?.into()),
        Command::Node(chosen) => return node::run_command(&chosen),
        Command::Demo(options) => return demo::run_demo(&options),
        Command::Remove { kubeconfig } => user_cluster::remove(&kubeconfig)?,
        Command::Sweep => {
            tools::sweep();
            images::sweep();
        }
        Command::Fuzz(options) => fuzz::run_targets(&options)?,
        Command::Bench(options) => bench::run_benches(&options)?,
        Command::Torture(options) => return torture::run_handovers(&options),
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkout_that_was_moved_after_it_was_built_is_seen() {
        assert!(is_in_place(None) && is_in_place(Some(BUILT_IN.as_ref())));
        assert!(!is_in_place(Some("/elsewhere/xtask".as_ref())));
        assert!(is_in_place(Some("/elsewhere/ctrlmesh-proxy".as_ref())), "who runs us there");
    }
}

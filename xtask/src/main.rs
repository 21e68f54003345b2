//! `cargo xtask`: one command per wish.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use xtask::setup::Purpose;
use xtask::{bench, build_ebpf, demo, fuzz, guest, images, lint, node, setup, test, tools};

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
    /// Check formatting, clippy, dependencies, layering and documentation
    Lint,
    /// Set up, then run every tier of tests, and end with a table
    Test(test::Options),
    /// Write the definitions of our resources into deploy/crds, and the manager's roles into deploy/manager/rbac.yaml
    Crds,
    /// Build the images that a cluster runs into target/images, without Docker
    Images(images::Options),
    /// Start, list and end real Kubernetes nodes on this machine
    #[command(subcommand)]
    Node(node::Wish),
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
}

fn main() -> Result<ExitCode> {
    match Arguments::parse().command {
        Command::Setup => return Ok(setup::run_setup(Purpose::Tests)?.into()),
        Command::BuildEbpf => build_ebpf::build()?,
        Command::Lint => lint::check_all()?,
        Command::Test(options) => return test::run_tiers(&options),
        Command::Crds => lint::write_definitions()?,
        Command::Images(options) => images::run_images(&options)?,
        Command::Node(wish) => return node::run_wish(&wish),
        Command::Demo(options) => return demo::run_demo(&options),
        Command::Remove { kubeconfig } => guest::remove(&kubeconfig)?,
        Command::Sweep => {
            tools::sweep();
            images::sweep();
        }
        Command::Fuzz(options) => fuzz::run_targets(&options)?,
        Command::Bench(options) => bench::run_benches(&options)?,
    }
    Ok(ExitCode::SUCCESS)
}

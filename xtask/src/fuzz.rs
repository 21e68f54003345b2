//! Runs the fuzz targets of `fuzz/`. The tests run the same functions, briefly and with a stable compiler.

use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use clap::Args;

use crate::run::{root, run, succeeds, with_own_toolchain};
use crate::{build_ebpf, setup, tools};

/// What to fuzz, and for how long.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Which target; without it, all of them
    #[arg(value_name = "TARGET")]
    target: Option<String>,
    /// For how many seconds each target runs
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    seconds: u32,
}

/// Runs the targets one after another; ends at the first that breaks, with the input that did it.
///
/// # Errors
/// Where a target breaks, does not exist, or cannot be built.
pub fn run_targets(options: &Options) -> Result<()> {
    let nightly = succeeds(with_own_toolchain(Command::new("rustc").args(["+nightly", "--version"])));
    ensure!(nightly, "fuzzing needs a nightly toolchain: rustup toolchain install nightly");
    let program = setup::cargo_tool("cargo-fuzz", tools::CARGO_FUZZ, "for fuzzing")?;
    // The proxy is built for release, which asks for the kernel programs.
    build_ebpf::build()?;
    let all = targets()?;
    let chosen = match &options.target {
        Some(target) => {
            ensure!(all.contains(target), "{target} is no target; there are {}", all.join(", "));
            vec![target.clone()]
        }
        None => all,
    };
    for target in chosen {
        let mut command = Command::new(&program);
        // No sanitizer: what is fuzzed has no `unsafe`, and panics are found without.
        with_own_toolchain(&mut command)
            .args(["fuzz", "run", "--features", "link", "--sanitizer", "none", &target, "--"])
            .arg(format!("-max_total_time={}", options.seconds))
            .env("RUSTUP_TOOLCHAIN", "nightly")
            .current_dir(root());
        run(&mut command)?;
    }
    Ok(())
}

/// The names of all targets.
fn targets() -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(root().join("fuzz/fuzz_targets")).context("read fuzz/fuzz_targets")? {
        names.extend(entry?.path().file_stem().map(|stem| stem.to_string_lossy().into_owned()));
    }
    names.sort();
    Ok(names)
}

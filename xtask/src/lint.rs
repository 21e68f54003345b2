//! Checks that run nothing of ours: formatting, manifests, licences, docs, clippy, dependencies.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use clap::Args;

use crate::progress::say;
use crate::run::{cargo, crates, root, run};
use crate::{chart, docs, setup, tools};

/// The main workspace.
const MANIFEST: &str = "Cargo.toml";

/// What people build by itself. Features of other crates, which the whole workspace has, may be missing then.
const BUILT_ALONE: [&str; 2] = ["ctrlmesh-demo", "ctrlmesh"];

/// The workspaces beside the main one, each with a lock file of its own.
const OTHER_WORKSPACES: [&str; 2] = ["ctrlmesh-ebpf/Cargo.toml", "fuzz/Cargo.toml"];

/// What becomes part of the kernel programs, in a crate that is under another licence.
const OF_THE_KERNEL: &str = "ctrlmesh-common/src/kernel";

/// How each file of it begins.
const KERNEL_LICENCE: &str = "// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only\n";

/// Where the checks of these two build, which are of other toolchains' flags than what runs.
const KERNEL_LINT: &str = "target/bpf-lint";
const FUZZ_LINT: &str = "target/fuzz-lint";

/// What may be left out.
#[derive(Args, Clone, Copy, Debug)]
pub struct Options {
    /// Go on where the database of advisories cannot be fetched, as without internet. Known advisories still fail
    #[arg(long)]
    without_advisories: bool,
}

/// Runs every check; the first that fails ends it.
///
/// # Errors
/// The check that failed.
pub fn check_all(options: Options) -> Result<()> {
    run(&mut cargo(&["fmt", "--all", "--check"]))?;
    for workspace in OTHER_WORKSPACES {
        run(cargo(&["fmt", "--check", "--manifest-path"]).arg(workspace))?;
        locked(workspace)?;
    }
    manifests()?;
    licences()?;
    docs::check()?;
    chart::check_values()?;
    run(&mut cargo(&["clippy", "--workspace", "--all-targets", "--locked", "--", "--deny", "warnings"]))?;
    for package in BUILT_ALONE {
        run(&mut cargo(&["check", "--quiet", "--locked", "--package", package]))?;
    }
    kernel_programs()?;
    run(&mut cargo(&[
        "clippy",
        "--locked",
        "--all-targets",
        "--target-dir",
        FUZZ_LINT,
        "--manifest-path",
        "fuzz/Cargo.toml",
        "--",
        "--deny",
        "warnings",
    ]))?;
    dependencies(options)?;
    documentation()?;
    say("lint: everything holds");
    Ok(())
}

/// Writes the definitions of our resources and what the manager may do into files of the chart, and then what follows
/// from the chart.
///
/// # Errors
/// Where they cannot be built or written.
pub fn write_definitions() -> Result<()> {
    let manager = ["run", "--quiet", "--locked", "--package", "ctrlmesh-manager", "--"];
    for what in
        [["crds", "--output", "deploy/chart/files/crds"], ["rights", "--output", "deploy/chart/files/rbac.yaml"]]
    {
        run(&mut cargo(&[&manager[..], &what[..]].concat()))?;
    }
    chart::write_manifests()
}

/// Each crate inherits the lints of the workspace, and depends on no crate that it may not depend on.
fn manifests() -> Result<()> {
    for folder in crates()? {
        let manifest = fs::read_to_string(root().join(&folder).join("Cargo.toml"))?;
        ensure!(
            manifest.contains("[lints]\nworkspace = true"),
            "{folder}/Cargo.toml must say `[lints] workspace = true`"
        );
        let refused = refused(&folder, &manifest);
        ensure!(refused.is_none(), "{folder} may not depend on {}", refused.unwrap_or_default());
    }
    Ok(())
}

/// The first dependency in the manifest that the crate may not have.
fn refused<'a>(folder: &str, manifest: &'a str) -> Option<&'a str> {
    let mut table = "";
    manifest.lines().find_map(|line| {
        table = if line.starts_with('[') { line } else { table };
        let name = line.split(['.', ' ', '=']).next()?;
        let may = match name {
            // Pure: no I/O.
            "tokio" | "hyper" => folder != "ctrlmesh-proxy/request",
            // One crate talks to the kernel; the contract crate implements aya's trait for its map types.
            "aya" if table == "[dependencies]" => ["ctrlmesh-common", "ctrlmesh-proxy/intercept"].contains(&folder),
            "xtask" | "ctrlmesh-demo" | "ctrlmesh-e2e" | "ctrlmesh-testbed" => folder.starts_with("xtask"),
            _ => true,
        };
        (!may && table.ends_with("dependencies]")).then_some(name)
    })
}

/// The manifest of the crate does not say this licence, so each file does.
fn licences() -> Result<()> {
    let module = root().join(OF_THE_KERNEL);
    let (mut files, mut folders) = (vec![module.with_extension("rs")], vec![module]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    for file in files {
        let is_said = fs::read_to_string(&file)?.starts_with(KERNEL_LICENCE);
        ensure!(is_said, "{} must begin with `{}`", file.display(), KERNEL_LICENCE.trim_end());
    }
    Ok(())
}

/// Whether the lock file of a workspace is what its manifest asks for.
fn locked(manifest: &str) -> Result<()> {
    let mut command = cargo(&["metadata", "--locked", "--format-version", "1", "--manifest-path"]);
    let output = command.arg(manifest).output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the lock file beside {manifest} is stale:\n{text}");
    Ok(())
}

/// The kernel programs are built for a target without clippy, but the machine's own can check them: nothing is linked.
/// Their assembly is a feature of nightly compilers.
fn kernel_programs() -> Result<()> {
    let mut clippy = cargo(&["clippy", "--locked", "--target-dir", KERNEL_LINT]);
    clippy.args(["--manifest-path", "ctrlmesh-ebpf/Cargo.toml", "--", "--deny", "warnings"]);
    run(clippy.env("RUSTC_BOOTSTRAP", "1"))
}

fn documentation() -> Result<()> {
    let doc = |arguments: &[&str]| {
        let mut doc = cargo(&["doc", "--no-deps", "--locked"]);
        doc.args(arguments).env("RUSTDOCFLAGS", "--deny warnings");
        doc
    };
    run(&mut doc(&["--workspace"]))?;
    let [kernel, fuzz] = OTHER_WORKSPACES;
    let kernel = ["--document-private-items", "--target-dir", KERNEL_LINT, "--manifest-path", kernel];
    run(doc(&kernel).env("RUSTC_BOOTSTRAP", "1"))?;
    run(&mut doc(&["--target-dir", FUZZ_LINT, "--manifest-path", fuzz]))
}

fn dependencies(options: Options) -> Result<()> {
    let program = setup::cargo_tool("cargo-deny", tools::CARGO_DENY, "for lint")?;
    for manifest in [MANIFEST].into_iter().chain(OTHER_WORKSPACES) {
        check_dependencies(&program, manifest, options)?;
    }
    Ok(())
}

fn check_dependencies(program: &Path, manifest: &str, options: Options) -> Result<()> {
    let deny = |checks: &[&str]| {
        let mut command = Command::new(program);
        command.args(["--locked", "--manifest-path", manifest, "--config", "deny.toml", "check"]);
        command.args(["--hide-inclusion-graph", "--allow", "license-exception-not-encountered"]);
        if manifest != MANIFEST {
            // The configuration is the main workspace's, and speaks of crates that are only there.
            command.args(["--allow", "license-not-encountered", "--allow", "unmatched-skip"]);
            command.args(["--allow", "unnecessary-skip"]);
        }
        command.args(checks).current_dir(root());
        command
    };
    run(&mut deny(&["licenses", "bans", "sources"]))?;
    // The database of advisories is a git repository of its own, which is not to be had everywhere.
    let output = deny(&["advisories"]).output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    let unreachable =
        text.contains("failed to fetch advisory database") || text.contains("failed to load advisory database");
    if !unreachable {
        ensure!(output.status.success(), "advisories of {manifest}:\n{text}");
        return Ok(());
    }
    ensure!(
        options.without_advisories,
        "advisories of {manifest}: their database cannot be fetched; --without-advisories checks the rest:\n{text}"
    );
    say(&format!("lint: advisories of {manifest} are not checked, because their database cannot be had here"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_has_no_dependency_that_breaks_its_rule() {
        let manifest = "[package]\nname = \"a\"\n\n[dependencies]\nserde = \"1\"\ntokio.workspace = true\n";
        assert_eq!(refused("ctrlmesh-proxy/request", manifest), Some("tokio"));
        assert_eq!(refused("ctrlmesh-proxy", manifest), None);
        let tests = "[dev-dependencies]\naya.workspace = true\nctrlmesh-testbed.workspace = true\n";
        assert_eq!(refused("ctrlmesh-proxy", tests), Some("ctrlmesh-testbed"));
        assert_eq!(refused("xtask/e2e", tests), None);
    }
}

//! Runs other programs, and says which.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _, stdout};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::progress::say;
use crate::tools;

/// Variables by which the cargo and rustc that run us would reach into those that we run for another toolchain.
const TOOLCHAIN_VARIABLES: [&str; 8] = [
    "CARGO",
    "CARGO_ENCODED_RUSTFLAGS",
    "CARGO_TARGET_DIR",
    "RUSTC",
    "RUSTC_WRAPPER",
    "RUSTDOC",
    "RUSTFLAGS",
    "RUSTUP_TOOLCHAIN",
];

/// The crates of the workspace.
pub(crate) const CRATES: [&str; 11] = [
    "ctrlmesh-common",
    "ctrlmesh-common/cli",
    "ctrlmesh-common/runtime",
    "ctrlmesh-manager",
    "ctrlmesh-proxy",
    "ctrlmesh-proxy/intercept",
    "ctrlmesh-proxy/request",
    "xtask",
    "xtask/demo",
    "xtask/e2e",
    "xtask/testbed",
];

/// The root of the checkout.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A cargo command in the root of the checkout, with the toolchain that the checkout pins.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command.args(arguments).current_dir(root()).env(tools::CACHE, tools::cache());
    if let Some(folder) = tools::assets() {
        command.env(tools::ASSETS, folder);
    }
    command
}

/// Removes from `command` what would tie it to the toolchain that runs us.
pub(crate) fn with_own_toolchain(command: &mut Command) -> &mut Command {
    for variable in TOOLCHAIN_VARIABLES {
        command.env_remove(variable);
    }
    command
}

/// Runs `command`, its output going where ours goes.
///
/// # Errors
/// Where it cannot be started, or fails.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    say(&format!("$ {}", shown(command)));
    let status = command.status().with_context(|| format!("start {}", shown(command)))?;
    ensure!(status.success(), "{status}: {}", shown(command));
    Ok(())
}

/// When what another program says is passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Passing {
    /// Line by line.
    AtOnce,
    /// When libtest has said all of a test binary, so that others who run at the same time do not come between.
    ByBinary,
}

/// Runs `command`, passing its standard output on; gives its lines, and whether it succeeded.
///
/// # Errors
/// Where it cannot be started.
pub(crate) fn watch(command: &mut Command, passing: Passing) -> Result<(Vec<String>, bool)> {
    say(&format!("$ {}", shown(command)));
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {}", shown(command)))?;
    // Whatever a child of a test writes: not all of it is text.
    let output = BufReader::new(child.stdout.take().context("standard output")?);
    let (mut lines, mut said) = (Vec::new(), 0);
    for line in output.split(b'\n') {
        lines.push(String::from_utf8_lossy(&line?).into_owned());
        let ends = lines.last().is_some_and(|line| line.starts_with("test result: "));
        if passing == Passing::AtOnce || ends {
            writeln!(stdout(), "{}", lines[said..].join("\n"))?;
            said = lines.len();
        }
    }
    if said < lines.len() {
        writeln!(stdout(), "{}", lines[said..].join("\n"))?;
    }
    Ok((lines, child.wait()?.success()))
}

/// Whether `command` succeeds; its output is dropped.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Whether we are root.
pub(crate) fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout == b"0\n")
}

/// Whether there is a cgroup2 file system, on which the kernel programs are attached.
pub(crate) fn has_cgroup2() -> bool {
    let mounts = fs::read_to_string(Path::new("/proc/self/mounts")).unwrap_or_default();
    mounts.lines().any(|mount| mount.split(' ').nth(2) == Some("cgroup2"))
}

/// The command as one would type it.
fn shown(command: &Command) -> String {
    let words = [command.get_program()].into_iter().chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_crates_are_the_members_of_the_workspace() {
        let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
        let members = manifest.split_once("\nmembers = [").unwrap().1.split_once(']').unwrap().0;
        let mut members: Vec<&str> = members.split('"').skip(1).step_by(2).collect();
        members.sort_unstable();
        assert_eq!(members, CRATES);
    }
}

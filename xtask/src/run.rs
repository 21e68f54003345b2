//! Runs other programs, and prints their command lines.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _, stdout};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::progress::say;
use crate::tools;

/// Variable that opens unstable features. Test binaries get it for libtest's times; a compiler must not inherit it from
/// them, or cargo builds everything anew.
pub(crate) const BOOTSTRAP: &str = "RUSTC_BOOTSTRAP";

/// Variables that the running toolchain sets, and that must not reach another one.
const TOOLCHAIN_VARIABLES: [&str; 9] = [
    "CARGO",
    "CARGO_ENCODED_RUSTFLAGS",
    "CARGO_TARGET_DIR",
    "RUSTC",
    BOOTSTRAP,
    "RUSTC_WRAPPER",
    "RUSTDOC",
    "RUSTFLAGS",
    "RUSTUP_TOOLCHAIN",
];

/// The root of the checkout.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The folders of the workspace's crates, as the root manifest lists them.
///
/// # Errors
/// The manifest cannot be read, or has no list of members.
pub(crate) fn crates() -> Result<Vec<String>> {
    let manifest = fs::read_to_string(root().join("Cargo.toml"))?;
    let (_, members) = manifest.split_once("\nmembers = [").context("Cargo.toml has no members")?;
    let (members, _) = members.split_once(']').context("the members of Cargo.toml do not end")?;
    Ok(members.split('"').skip(1).step_by(2).map(str::to_owned).collect())
}

/// A cargo command in the root of the checkout, with the toolchain that the checkout pins.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command.args(arguments).current_dir(root()).env(tools::CACHE, tools::cache());
    command.env_remove(BOOTSTRAP);
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

/// When the output of a test run is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Print {
    /// Line by line.
    Lines,
    /// Binary by binary, so that runs beside each other do not mix.
    Binaries,
}

/// Runs `command` and prints its standard output; returns its lines, and whether it succeeded.
///
/// # Errors
/// The command cannot be started.
pub(crate) fn watch(command: &mut Command, print: Print) -> Result<(Vec<String>, bool)> {
    say(&format!("$ {}", shown(command)));
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| format!("start {}", shown(command)))?;
    // Children of tests write to it, too, and not only text.
    let output = BufReader::new(child.stdout.take().context("standard output")?);
    let (mut lines, mut printed) = (Vec::new(), 0);
    for line in output.split(b'\n') {
        lines.push(String::from_utf8_lossy(&line?).into_owned());
        let is_last = lines.last().is_some_and(|line| line.starts_with("test result: "));
        if print == Print::Lines || is_last {
            writeln!(stdout(), "{}", lines[printed..].join("\n"))?;
            printed = lines.len();
        }
    }
    if printed < lines.len() {
        writeln!(stdout(), "{}", lines[printed..].join("\n"))?;
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

//! Runs kubectl with a kubeconfig.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context as _, Result, ensure};

use crate::tools;

/// How long kubectl may wait for one answer.
const ANSWER_WITHIN: &str = "--request-timeout=60s";

/// It ends before it would be worth its while to look for garbage, which it does until it has this much.
const GARBAGE: [(&str, &str); 2] = [("GOGC", "off"), ("GOMEMLIMIT", "512MiB")];

/// kubectl, as whom `kubeconfig` says: the one that we build, else the one on `$PATH`.
pub fn command(kubeconfig: &Path) -> Command {
    let program = tools::control_plane("kubectl");
    let ours = if program.is_file() { program } else { PathBuf::from("kubectl") };
    let mut command = Command::new(ours);
    command.arg("--kubeconfig").arg(kubeconfig).arg(ANSWER_WITHIN).envs(GARBAGE);
    command
}

/// What a command says, given something to read.
///
/// # Errors
/// Where it cannot be started, or fails; the error shows what it said.
pub fn answer(command: &mut Command, input: &str) -> Result<String> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {}", command.get_program().display()))?;
    let mut stdin = child.stdin.take().context("standard input")?;
    let output = thread::scope(|scope| {
        // Where it does not read, its exit status says why.
        scope.spawn(move || drop(stdin.write_all(input.as_bytes())));
        child.wait_with_output()
    })?;
    let said = String::from_utf8_lossy(&output.stderr);
    let arguments: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
    ensure!(output.status.success(), "{}: {}: {said}", arguments.join(" "), output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

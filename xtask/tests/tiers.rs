//! `cargo xtask test` with a tier that cannot run.

use std::os::unix::fs::symlink;
use std::process::Command;
use std::{env, fs, io};

use xtask::tools;

/// What the guard of a run starts, and nothing that a tier could be run with.
const PROGRAMS: [&str; 6] = ["env", "id", "kill", "setsid", "sh", "sleep"];

/// How a run ended, the rows of its table, and its last line.
type RunResult = (Option<i32>, Vec<String>, String);

/// Runs the control-plane tier on a machine without Go.
fn control_plane_tier_without_go(strict: bool) -> io::Result<RunResult> {
    let folder = tempfile::tempdir()?;
    let [home, path, tools] = ["home", "path", "tools"].map(|name| folder.path().join(name));
    for made in [&home, &path] {
        fs::create_dir(made)?;
    }
    for name in PROGRAMS {
        let folders = env::var_os("PATH").unwrap_or_default();
        let mut found = env::split_paths(&folders).map(|folder| folder.join(name));
        let found = found.find(|program| program.is_file()).ok_or(io::ErrorKind::NotFound)?;
        symlink(found, path.join(name))?;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.args(["test", "--tier", "control-plane"]).env_clear();
    command.env("PATH", &path).env("HOME", &home).env(tools::CACHE, &tools);
    if strict {
        command.env("CI", "true");
    }
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut lines = said.lines().skip_while(|line| !line.starts_with("tier "));
    assert!(lines.next().is_some(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let rows = lines.by_ref().take_while(|line| !line.is_empty()).map(words).collect();
    Ok((output.status.code(), rows, lines.last().unwrap_or_default().to_owned()))
}

#[test]
fn a_tier_that_cannot_run_is_reported_and_fails_in_ci() {
    for (strict, code, verdict) in [(false, 0, "ok. 0 passed; 0 failed;"), (true, 1, "FAILED. 0 passed; 1 failed;")] {
        let (ended, rows, last) = control_plane_tier_without_go(strict).unwrap();
        // The one that was named, and no other.
        assert_eq!(rows, ["control-plane 0 0 0 all 0 needs Go"]);
        assert!(last.starts_with(&format!("test result: {verdict}")), "{last}");
        assert_eq!(ended, Some(code), "CI={strict}");
    }
}

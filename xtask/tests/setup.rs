//! `cargo xtask setup` on machines that lack something.

use std::fs;
use std::io::{self, Write as _, stdout};
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use xtask::tools;

fn setup() -> Command {
    xtask("setup")
}

fn xtask(subcommand: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.arg(subcommand);
    command
}

/// Sets up with these programs on the path and no others, where nothing may be installed: what it lists, and all that
/// it says.
fn refused(programs: &[(&str, &str)]) -> io::Result<(Vec<String>, String)> {
    let (code, said) = ended(setup(), programs)?;
    assert_eq!(code, Some(2), "{said}");
    let item = |line: &str| line.strip_prefix("  ")?.split("  ").next().map(str::to_owned);
    Ok((said.lines().filter_map(item).collect(), said))
}

/// How it ends, and what it says, with these programs on the path and no others. Nothing may have been built.
fn ended(mut command: Command, programs: &[(&str, &str)]) -> io::Result<(Option<i32>, String)> {
    let folder = tempfile::tempdir()?;
    let [home, path, tools] = ["home", "path", "tools"].map(|name| folder.path().join(name));
    for made in [&home, &path] {
        fs::create_dir(made)?;
    }
    for (name, script) in programs {
        fs::write(path.join(name), format!("#!/bin/sh\n{script}\n"))?;
        fs::set_permissions(path.join(name), fs::Permissions::from_mode(0o755))?;
    }
    command.env_clear().env("PATH", &path).env("HOME", &home).env(tools::CACHE, &tools);
    let output = command.output()?;
    let said = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat();
    assert!(!tools.exists() && fs::read_dir(&home)?.next().is_none(), "{said}");
    Ok((output.status.code(), said))
}

#[test]
fn the_demo_asks_who_is_there_before_it_does_anything() {
    let (code, said) = ended(xtask("demo"), &[("id", "echo 1000")]).unwrap();
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("needs root") && said.contains("--kubeconfig FILE"), "{said}");
}

#[test]
fn the_whole_list_comes_before_anything_is_built() {
    // Without apt-get it is no Debian, whoever asks.
    let (listed, said) = refused(&[]).unwrap();
    // What lies in /usr/sbin is found whatever the path says.
    for needed in ["nightly Rust", "Go"] {
        assert!(listed.iter().any(|one| one == needed), "{needed}: {said}");
    }
    assert!(said.contains("On Debian 12: apt-get install "), "{said}");
}

#[test]
fn who_is_not_root_is_told_what_root_would_install() {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    if !["ID=debian", "VERSION_ID=\"12\""].iter().all(|line| release.lines().any(|one| one == *line)) {
        writeln!(stdout(), "skipped: who_is_not_root_is_told_what_root_would_install: this is not Debian 12").unwrap();
        return;
    }
    // Were it run, the status would not be that of a list.
    let programs = [("apt-get", "exit 7"), ("id", "echo 1000")];
    let (listed, said) = refused(&programs).unwrap();
    // No dpkg says what is there, so this is asked for whatever this machine has.
    for needed in ["llvm-22-dev", "rustc-web", "Go"] {
        assert!(listed.iter().any(|one| one == needed), "{needed}: {said}");
    }
    assert!(!listed.iter().any(|one| one == "nightly Rust"), "{said}");
    assert!(said.contains("only as root and on Debian 12"), "{said}");
}

//! `cargo xtask setup` on machines that lack something, and on one that lacks nothing.

use std::collections::BTreeMap;
use std::io::{self, Write as _, stdout};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{env, fs};

use xtask::tools;

fn setup() -> Command {
    xtask("setup")
}

fn xtask(subcommand: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.arg(subcommand);
    command
}

fn said(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat()
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
    let said = said(&output);
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

/// The programs that are in place, by tool and version, with what changes when one is written or replaced: inode, and
/// seconds and nanoseconds of its time. What another checkout puts together meanwhile is none of them yet.
fn programs(cache: &Path) -> io::Result<BTreeMap<PathBuf, (u64, i64, i64)>> {
    let mut all = BTreeMap::new();
    for tool in entries(cache)? {
        for version in entries(&tool)? {
            for program in entries(&version)? {
                let meta = fs::symlink_metadata(&program)?;
                all.insert(program, (meta.ino(), meta.mtime(), meta.mtime_nsec()));
            }
        }
    }
    Ok(all)
}

fn entries(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let paths: io::Result<Vec<PathBuf>> = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect();
    let is_in_place = |path: &PathBuf| path.file_name().is_some_and(|name| !name.to_string_lossy().starts_with('.'));
    Ok(paths?.into_iter().filter(is_in_place).collect())
}

#[test]
fn a_machine_that_is_ready_is_left_as_it_is() {
    let skipped = |why: &str| {
        let name = "a_machine_that_is_ready_is_left_as_it_is";
        writeln!(stdout(), "skipped: {name}: {why}").unwrap();
    };
    // Whoever calls it by hand may not have set up, and is not to find things installed.
    if env::var_os("CTRLMESH_TEST_GUARD").is_none() {
        return skipped("only `cargo xtask test` has set up before");
    }
    let before = programs(&tools::cache()).unwrap();
    let output = setup().output().unwrap();
    let said = said(&output);
    let lacks = ["KUBEBUILDER_ASSETS", "I can install it only as root and on Debian 12"];
    // Where every tier has to run, the machine has been made ready.
    let strict = env::var("CI").is_ok_and(|value| value == "true");
    if !strict && output.status.code() == Some(2) && lacks.iter().any(|one| said.contains(one)) {
        return skipped("this machine is not ready");
    }
    assert!(output.status.success() && said.contains("everything is there"), "{said}");
    for work in ["missing:", "install Debian", "once per machine", "build h2spec"] {
        assert!(!said.contains(work), "{said}");
    }
    let after = programs(&tools::cache()).unwrap();
    assert!(!before.is_empty());
    for (program, meta) in before {
        assert_eq!(after.get(&program), Some(&meta), "{}: {said}", program.display());
    }
}

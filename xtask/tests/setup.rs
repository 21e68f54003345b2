//! What does a machine say on which something is missing, and what does it do where nothing is?

use std::collections::BTreeMap;
use std::io::{self, Write as _, stdout};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{env, fs};

use xtask::tools;

fn setup() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.arg("setup");
    command
}

fn said(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat()
}

#[test]
fn where_nothing_may_be_installed_the_whole_list_comes_before_anything_is_built() {
    let folder = tempfile::tempdir().unwrap();
    let [home, path, tools] = ["home", "path", "tools"].map(|name| folder.path().join(name));
    for made in [&home, &path] {
        fs::create_dir(made).unwrap();
    }
    // Without apt-get it is no Debian, whoever asks.
    let mut command = setup();
    command.env_clear().env("PATH", &path).env("HOME", &home).env(tools::CACHE, &tools);
    let output = command.output().unwrap();
    let said = said(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    let listed: Vec<&str> =
        said.lines().filter_map(|line| line.strip_prefix("  ")?.split("  ").next()).collect();
    // What lies in /usr/sbin is found whatever the path says.
    for needed in ["nightly Rust", "Go"] {
        assert!(listed.contains(&needed), "{needed}: {said}");
    }
    assert!(said.contains("On Debian 12: apt-get install "), "{said}");
    assert!(!tools.exists() && fs::read_dir(&home).unwrap().next().is_none(), "{said}");
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
    let paths: io::Result<Vec<PathBuf>> =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect();
    let is_in_place = |path: &PathBuf| {
        path.file_name().is_some_and(|name| !name.to_string_lossy().starts_with('.'))
    };
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
    if output.status.code() == Some(2) && lacks.iter().any(|one| said.contains(one)) {
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

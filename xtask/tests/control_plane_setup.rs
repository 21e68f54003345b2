//! `cargo xtask setup` on a machine that lacks nothing: the control-plane tier has set up everything before.

use std::collections::BTreeMap;
use std::io::{self, Write as _, stdout};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use xtask::tools;

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
    let output = Command::new(env!("CARGO_BIN_EXE_xtask")).arg("setup").output().unwrap();
    let said = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat();
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

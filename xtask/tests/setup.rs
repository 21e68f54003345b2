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
    for needed in ["curl", "g++", "gcc", "procps", "python3", "util-linux", "nightly Rust", "Go"] {
        assert!(listed.contains(&needed), "{needed}: {said}");
    }
    assert!(said.contains("On Debian 12: apt-get install "), "{said}");
    assert!(!tools.exists() && fs::read_dir(&home).unwrap().next().is_none(), "{said}");
}

#[test]
fn programs_of_another_release_are_refused_and_none_is_written_beside_them() {
    let folder = tempfile::tempdir().unwrap();
    let [assets, tools] = ["assets", "tools"].map(|name| folder.path().join(name));
    fs::create_dir(&assets).unwrap();
    fs::write(assets.join("etcd"), "").unwrap();
    let mut command = setup();
    command.env_clear().env("PATH", "").env("HOME", folder.path()).env(tools::CACHE, &tools);
    let output = command.env(tools::ASSETS, &assets).output().unwrap();
    let said = said(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    let problem = format!("kube-apiserver is not in KUBEBUILDER_ASSETS={}", assets.display());
    assert!(said.contains(&problem), "{said}");
    assert_eq!(files(&assets).unwrap().into_keys().collect::<Vec<_>>(), [assets.join("etcd")]);
}

/// Every file, with what changes when it is written or replaced: inode, and seconds and nanoseconds of its time.
fn files(folder: &Path) -> io::Result<BTreeMap<PathBuf, (u64, i64, i64)>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let meta = fs::symlink_metadata(&path)?;
        if meta.is_dir() {
            all.extend(files(&path)?);
        } else {
            all.insert(path, (meta.ino(), meta.mtime(), meta.mtime_nsec()));
        }
    }
    Ok(all)
}

#[test]
fn a_machine_that_is_ready_is_left_as_it_is() {
    // Whoever calls it by hand may not have set up, and is not to find things installed.
    if env::var_os("CTRLMESH_TEST_GUARD").is_none() {
        let name = "a_machine_that_is_ready_is_left_as_it_is";
        writeln!(stdout(), "skipped: {name}: only `cargo xtask test` has set up before").unwrap();
        return;
    }
    let before = files(&tools::cache()).unwrap();
    let output = setup().output().unwrap();
    let said = said(&output);
    assert!(output.status.success() && said.contains("everything is there"), "{said}");
    assert!(!said.contains("missing:") && !said.contains("build "), "{said}");
    assert!(!before.is_empty() && files(&tools::cache()).unwrap() == before, "{said}");
}

//! The demo is ended from outside, at any moment: nothing of it is left.

use std::collections::BTreeSet;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use std::{env, fs, thread};

use anyhow::{Context as _, Result, ensure};
use xtask::images::{self, Image};

/// The variable that the demo gives all that it starts.
const MARK: &str = "CTRLMESH_DEMO";

/// Over what time the moments are spread: the node is up after 15 s or so, and the first steps follow.
const SPREAD: Duration = Duration::from_mins(1);

/// The processes that carry the mark of the demo whose guard is `guard`.
fn marked(guard: u32) -> BTreeSet<u32> {
    let wanted = format!("{MARK}={guard}");
    let carries = |process: &u32| {
        let variables = fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
        variables.split(|byte| *byte == 0).any(|one| one == wanted.as_bytes())
    };
    processes().filter(carries).collect()
}

fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// What is named after one of these processes: folders, cgroups, network devices, mounts, processes in those cgroups.
fn named_after(keepers: &BTreeSet<u32>) -> Vec<String> {
    let prefixes: Vec<String> = keepers
        .iter()
        .flat_map(|one| [format!("ctrlmesh-node-{one}-"), format!("ctrlmesh-testbed-{one}-")])
        .collect();
    let ours = |text: &str| prefixes.iter().any(|prefix| text.contains(prefix));
    let listed = |folder: &Path| -> Vec<PathBuf> {
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
    };
    let top = listed(Path::new("/sys/fs/cgroup"));
    let below = top.iter().filter(|path| path.is_dir()).flat_map(|path| listed(path));
    let paths = listed(&env::temp_dir()).into_iter().chain(top.clone()).chain(below);
    let mut found: Vec<String> = paths.map(|path| path.display().to_string()).collect();
    found.retain(|path| ours(path));
    let devices = keepers.iter().map(|one| format!("/sys/class/net/ctrlm{one}"));
    found.extend(devices.filter(|device| Path::new(device).exists()));
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    found.extend(mounts.lines().filter(|line| ours(line)).map(str::to_owned));
    let cgroups = processes().map(|one| {
        let text = fs::read_to_string(format!("/proc/{one}/cgroup")).unwrap_or_default();
        (one, text)
    });
    found.extend(cgroups.filter(|(_, text)| ours(text)).map(|(one, _)| format!("process {one}")));
    found
}

#[test]
fn the_demo_that_is_interrupted_at_any_moment_leaves_nothing() -> Result<()> {
    let mut archives = images::build(&[Image::Proxy, Image::Manager], true)?;
    archives.extend(images::build(&[Image::ExampleOperator], false)?);
    let full = env::var_os("CTRLMESH_TEST_FULL").is_some();
    let moments: u32 = if full { 20 } else { 4 };
    let mut deepest = 0;
    for moment in 1..=moments {
        let mut demo = Command::new(env!("CARGO_BIN_EXE_ctrlmesh-demo"))
            .args(&archives)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        thread::sleep(SPREAD * moment / moments);
        ensure!(demo.try_wait()?.is_none(), "it has ended by itself");
        let started = marked(demo.id());
        let there = named_after(&started).len();
        deepest = deepest.max(there);
        // As a terminal does: to all of its process group.
        let group = format!("-{}", demo.id());
        let status = Command::new("kill").args(["-INT", "--", &group]).status()?;
        ensure!(status.success(), "kill");
        let status = demo.wait()?;
        ensure!(status.code() == Some(130), "{status}");
        let left = marked(demo.id());
        ensure!(left.is_empty(), "processes {left:?} are left, moment {moment}");
        let left = named_after(&started);
        ensure!(left.is_empty(), "of {there}, left at moment {moment}: {left:#?}");
    }
    ensure!(
        deepest > 10,
        "only {deepest} things were ever there: the test looks at the wrong ones"
    );
    Ok(())
}

#[test]
fn the_demo_ends_with_its_guard() -> Result<()> {
    let mut demo = Command::new(env!("CARGO_BIN_EXE_ctrlmesh-demo"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let mark = demo.id();
    while marked(mark).is_empty() {
        ensure!(demo.try_wait()?.is_none(), "it has ended by itself");
    }
    demo.kill().context("kill the guard")?;
    demo.wait()?;
    let deadline = std::time::Instant::now() + Duration::from_mins(1);
    while !marked(mark).is_empty() {
        ensure!(std::time::Instant::now() < deadline, "{:?} go on", marked(mark));
        thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

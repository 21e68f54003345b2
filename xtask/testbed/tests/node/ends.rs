//! Cleanup of a node that ended, or whose harness was killed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{env, fs, thread};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_testbed::{Cluster, ExistingNode, Node, Options, State};

use crate::starter::Starter;
use crate::{pod, until};

/// Tells a child of this very binary to start a node; see [`starts_a_node_for_its_parent`].
const ROLE: &str = "CTRLMESH_NODE_CHILD";

/// Settings of the whole machine that a kubelet changes.
const SETTINGS: [&str; 6] = [
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
];

#[test]
fn two_nodes_at_once_do_not_meet_and_leave_nothing() -> Result<()> {
    let settings = settings()?;
    let (one, other) = thread::scope(|scope| {
        let other = scope.spawn(|| Node::start(&Options::default()));
        (Node::start(&Options::default()), other.join().unwrap())
    });
    let nodes = [one?, other?].map(Cluster::of);
    let mut left = Vec::new();
    for cluster in &nodes {
        let node = cluster.node().context("a node")?;
        left.push(Traces::of(node.folder()));
        ensure!(!left[left.len() - 1].found()?.is_empty(), "what is left is not seen");
        // The same names in both, and each has its own.
        cluster.case("same", |space| {
            space.apply(&pod("web", "serve"))?;
            space.wait("pod/web", "condition=Ready")
        })?;
    }
    let addresses = nodes.each_ref().map(|cluster| cluster.node().map(|node| node.control_plane().url().to_owned()));
    ensure!(addresses[0] != addresses[1], "{addresses:?}");
    drop(nodes);
    for traces in left {
        let found = traces.found()?;
        ensure!(found.is_empty(), "left: {found:?}");
    }
    assert_eq!(settings, self::settings()?, "a node changed the machine's settings");
    Ok(())
}

#[test]
fn nothing_is_left_when_the_harness_is_killed() -> Result<()> {
    let mut child = start()?;
    let folder = child.folder()?;
    let traces = Traces::of(&folder);
    child.0.kill()?;
    child.0.wait()?;
    until("everything to go", || Ok(traces.found()?.is_empty().then_some(())))
        .with_context(|| format!("left: {:?}", traces.found()))
}

#[test]
fn what_a_killed_keeper_left_is_swept_by_the_next_node() -> Result<()> {
    let mut child = start()?;
    let folder = child.folder()?;
    let traces = Traces::of(&folder);
    // The harness and the shell that would clean up after it, at once.
    let supervisor = supervisor(&folder).context("who keeps it")?.to_string();
    ensure!(Command::new("kill").args(["-KILL", &supervisor, &child.0.id().to_string()]).status()?.success());
    child.0.wait()?;
    // A killed process is there for a moment; and a node of another test may sweep what it leaves.
    until("the supervisor to be gone", || {
        let found = ExistingNode::all()?.into_iter().find(|node| node.folder() == folder);
        Ok(found.is_none_or(|node| node.state() == State::Left).then_some(()))
    })?;
    drop(Node::start(&Options::default())?);
    let found = traces.found()?;
    ensure!(found.is_empty(), "left: {found:?}");
    Ok(())
}

#[test]
fn nothing_is_left_of_a_harness_killed_while_its_node_starts() -> Result<()> {
    for wait in [0, 20, 60, 150, 400, 1500] {
        let mut child = start()?;
        let its = || {
            let mut all = ExistingNode::all()?.into_iter();
            Ok(all.find(|node| parent(supervisor(node.folder())) == Some(child.0.id())))
        };
        let folder = until("the folder", its)?.folder().to_owned();
        // Not a wait for something: a moment of the start, whichever it is.
        thread::sleep(Duration::from_millis(wait));
        child.0.kill()?;
        child.0.wait()?;
        let traces = Traces::of(&folder);
        until("everything to go", || Ok(traces.found()?.is_empty().then_some(())))
            .with_context(|| format!("after {wait} ms, left: {:?}", traces.found()))?;
    }
    Ok(())
}

/// The part of the child in the tests above; by itself it does nothing.
#[test]
fn starts_a_node_for_its_parent() -> Result<()> {
    if env::var_os(ROLE).is_none() {
        return Ok(());
    }
    let node = Node::start(&Options::default())?;
    println!("folder={}", node.folder().display());
    loop {
        thread::park();
    }
}

fn start() -> Result<Starter> {
    Starter::start("ends::starts_a_node_for_its_parent", (ROLE, "1"))
}

/// The shell that keeps the node of this folder, which is named after it.
fn supervisor(folder: &Path) -> Option<u32> {
    folder.file_name()?.to_str()?.split('-').nth(2)?.parse().ok()
}

/// Who started a process.
fn parent(process: Option<u32>) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{}/status", process?)).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

/// What a node can leave behind.
pub(crate) struct Traces {
    folder: PathBuf,
    /// Its network device on this machine.
    device: Option<String>,
}

impl Traces {
    pub(crate) fn of(folder: &Path) -> Self {
        let device = fs::read_to_string(folder.join("device")).unwrap_or_default();
        let device = device.split(' ').next().filter(|name| !name.is_empty()).map(str::to_owned);
        Self { folder: folder.to_owned(), device }
    }

    /// What there is of the node: processes, mounts, network devices and namespaces, cgroups, files.
    pub(crate) fn found(&self) -> Result<Vec<String>> {
        let name = self.folder.file_name().and_then(|name| name.to_str()).context("a name")?;
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc")? {
            let process = entry?.path();
            let Ok(command) = fs::read_to_string(process.join("cmdline")) else { continue };
            let cgroup = fs::read_to_string(process.join("cgroup")).unwrap_or_default();
            if command.contains(name) || cgroup.contains(name) {
                found.push(format!("process {} {}", process.display(), command.replace('\0', " ")));
            }
        }
        if fs::read_to_string("/proc/self/mountinfo")?.contains(name) {
            found.push("a mount".to_owned());
        }
        if let Some(device) = &self.device
            && Path::new("/sys/class/net").join(device).exists()
        {
            found.push(format!("device {device}"));
        }
        for hierarchy in fs::read_dir("/sys/fs/cgroup")? {
            let cgroup = hierarchy?.path().join(name);
            if cgroup.exists() {
                found.push(format!("cgroup {}", cgroup.display()));
            }
        }
        if self.folder.exists() {
            found.push(format!("folder {}", self.folder.display()));
        }
        Ok(found)
    }
}

fn settings() -> Result<BTreeMap<&'static str, String>> {
    SETTINGS.iter().map(|name| Ok((*name, fs::read_to_string(Path::new("/proc/sys").join(name))?))).collect()
}

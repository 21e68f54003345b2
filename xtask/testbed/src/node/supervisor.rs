//! Makes and ends a node's namespaces, folder and cgroups.
//!
//! A shell reads from a pipe, as for every program of the bed. When the pipe closes, the shell ends the node. The
//! node's first process reads the same pipe, so it ends even if the shell was killed. The next node that starts removes
//! the files and cgroups that then stay.

use std::io::{self, BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use crate::supervise::{self, GARBAGE, started};

/// What the names of all nodes' folders begin with; the rest is the process that keeps it, and when that was started.
const PREFIX: &str = "ctrlmesh-node-";

/// How often we look whether a node was ended.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How long it may take until a node that is booted again has a first process.
const BOOTED_WITHIN: Duration = Duration::from_secs(30);

/// The network namespace of whoever looks.
pub(crate) const OWN_NETWORK: &str = "/proc/self/ns/net";

/// Functions of the shell that end a node.
const TEARDOWN: &str = include_str!("teardown.sh");

/// What the shell does.
const KEEP: &str = include_str!("keep.sh");

/// What runs the node's first process.
const BOOT: &str = include_str!("boot.sh");

/// What the node's first process does.
const INIT: &str = include_str!("init.sh");

/// What makes one node differ from others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeSpec<'a> {
    /// What the cluster calls it.
    pub(crate) name: &'a str,
    /// What the addresses of its wire begin with: two numbers.
    pub(crate) wires: &'a str,
    /// The same of its pods.
    pub(crate) pods: &'a str,
    /// The network namespace that its wire leads to, as a file.
    pub(crate) network: &'a Path,
}

/// A node without programs: namespaces, a folder, cgroups. They end, at the latest, with this process.
#[derive(Debug)]
pub(crate) struct Supervisor {
    shell: Child,
    folder: PathBuf,
}

impl Supervisor {
    /// Makes a node, whose first process will run these programs when their configuration is in the folder.
    ///
    /// # Errors
    /// Where the shell cannot be started, or cannot make the folder.
    pub(crate) fn start(spec: NodeSpec<'_>, kubelet: &Path, kube_proxy: &Path) -> io::Result<Self> {
        let mut shell = shell(KEEP)
            .arg(env::temp_dir())
            .args([BOOT, INIT])
            .args([spec.network, kubelet, kube_proxy])
            .args([spec.name, spec.wires, spec.pods])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()?;
        let mut said = String::new();
        if let Some(output) = shell.stdout.take() {
            BufReader::new(output).read_line(&mut said)?;
        }
        let folder = PathBuf::from(said.trim_end());
        let this = Self { shell, folder };
        if this.folder.is_dir() { Ok(this) } else { Err(io::Error::other("make the folder of a node")) }
    }

    /// The node's folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Whether the node's first process is there, which it is from a moment after the start on.
    pub(crate) fn runs(&self) -> bool {
        first_process(&self.folder).is_some()
    }

    /// Kills the node's first process, and with it everything on the node; waits until there is another.
    ///
    /// # Errors
    /// Where there is none, or no other comes.
    pub(crate) fn reboot(&self) -> io::Result<()> {
        let gone = || io::Error::other("the node's first process is gone");
        let before = first_process(&self.folder).ok_or_else(gone)?;
        fs::write(self.folder.join("reboot"), [])?;
        let status = Command::new("kill").args(["-KILL", &before.to_string()]).status()?;
        let deadline = Instant::now() + BOOTED_WITHIN;
        while status.success() && Instant::now() < deadline {
            if first_process(&self.folder).is_some_and(|now| now != before) {
                return Ok(());
            }
            thread::sleep(LOOK_EVERY);
        }
        Err(gone())
    }

    /// Waits until somebody ends the node.
    ///
    /// # Errors
    /// Where the shell that keeps it cannot be waited for.
    pub(crate) fn wait_for_end(&mut self) -> io::Result<()> {
        // `Child::wait` would close the pipe first, which ends the node.
        while self.shell.try_wait()?.is_none() {
            thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        supervise::end(&mut self.shell);
    }
}

/// The folders of all nodes on this machine, of whoever's.
///
/// # Errors
/// Where the folder for temporary files cannot be read.
pub(crate) fn folders() -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(env::temp_dir())? {
        let path = entry?.path();
        if supervisor(&path).is_some() && path.is_dir() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Ends what is left of nodes that nobody keeps any more; gives their folders.
///
/// # Errors
/// Where something of one cannot be removed.
pub(crate) fn sweep() -> io::Result<Vec<PathBuf>> {
    let left: Vec<PathBuf> = folders()?.into_iter().filter(|folder| !is_kept(folder)).collect();
    for folder in &left {
        let output = shell("teardown \"$1\"").arg(folder).output()?;
        // Another sweep may have been at it at the same time.
        if !output.status.success() && folder.exists() {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(io::Error::other(format!("sweep {}: {said}", folder.display())));
        }
    }
    Ok(left)
}

/// Tells the shell that keeps a node to end it.
///
/// # Errors
/// Where it cannot be told.
pub(crate) fn end(folder: &Path) -> io::Result<()> {
    let Some((pid, _)) = supervisor(folder).filter(|_| is_kept(folder)) else { return Ok(()) };
    let status = Command::new("kill").args(["-TERM", &pid.to_string()]).status()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("kill {pid}: {status}"))) }
}

/// Whether the process that keeps the node is there.
pub(crate) fn is_kept(folder: &Path) -> bool {
    supervisor(folder).is_some_and(|(pid, start)| started(pid) == Some(start))
}

/// The first process of a node, if it is there.
pub(crate) fn first_process(folder: &Path) -> Option<u32> {
    live_process(&folder.join("init"))
}

/// The process that a file names, and is known by its start time, if it is there.
pub(crate) fn live_process(file: &Path) -> Option<u32> {
    let text = fs::read_to_string(file).ok()?;
    identity(&text).filter(|_| is_live(&text)).map(|(pid, _)| pid)
}

/// Whether the process is there that is named by `<pid> <start>`.
pub(crate) fn is_live(text: &str) -> bool {
    identity(text).is_some_and(|(pid, start)| started(pid) == Some(start))
}

fn identity(text: &str) -> Option<(u32, u64)> {
    let (pid, start) = text.trim_end().split_once(' ')?;
    Some((pid.parse().ok()?, start.parse().ok()?))
}

/// The process that keeps the node of this folder, and when it was started.
fn supervisor(folder: &Path) -> Option<(u32, u64)> {
    let (pid, start) = folder.file_name()?.to_str()?.strip_prefix(PREFIX)?.split_once('-')?;
    Some((pid.parse().ok()?, start.parse().ok()?))
}

/// A shell that knows how to end a node.
fn shell(script: &str) -> Command {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("{TEARDOWN}\n{script}")).arg("sh").envs(GARBAGE);
    shell
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_goes_though_nobody_heard_that_it_was_made() {
        let home = tempfile::tempdir().unwrap();
        let (nobody, output) = io::pipe().unwrap();
        drop(nobody);
        let mut keep = shell(KEEP);
        keep.arg(home.path()).args(["exit", "exit", OWN_NETWORK]).stdin(Stdio::null()).stdout(output);
        let status = keep.status();
        assert!(status.is_ok());
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_process_is_known_by_its_start_and_a_dead_one_is_not() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let name = format!("{} {}\n", child.id(), started(child.id()).unwrap());
        assert!(is_live(&name));
        assert!(!is_live(&format!("{} 1", child.id())), "another process of the same number");
        child.kill().unwrap();
        // Not yet waited for: a zombie.
        while is_live(&name) {}
        child.wait().unwrap();
    }

    #[test]
    fn the_name_of_a_folder_says_who_keeps_it() {
        assert_eq!(supervisor(Path::new("/tmp/ctrlmesh-node-12-345")), Some((12, 345)));
        assert_eq!(supervisor(Path::new("/tmp/ctrlmesh-node-up-12.log")), None);
        assert_eq!(supervisor(Path::new("/tmp/ctrlmesh-testbed-12-0")), None);
    }
}

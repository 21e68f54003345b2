//! Ends the processes of a pod's containers, so that the kubelet starts these anew.
//!
//! The pod's sandbox stays: without it, the kubelet would make the pod's network anew. A container is the sandbox where
//! its only process has the name that runtimes give to it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::Error;

/// Names of the process of a sandbox: of Kubernetes' own image, and of `OpenShift`'s.
const SANDBOXES: [&str; 2] = ["pause", "pod"];

/// Sends SIGKILL to the processes in the cgroup of `pod` and below it, but for those of the sandbox. Returns how many
/// there were; none once all are gone.
///
/// # Errors
/// If a process cannot be killed.
pub fn kill(pod: &Path) -> Result<usize, Error> {
    let mut found = 0;
    for container in containers(pod) {
        let processes: Vec<(PathBuf, i32)> = processes(&container);
        if is_sandbox(&processes) {
            continue;
        }
        for (folder, process) in processes {
            found += usize::from(kill_one(&folder, process).map_err(Error::file("kill the processes of", &folder))?);
        }
    }
    Ok(found)
}

/// The pod's own folder, alone, and each folder in it with everything below.
fn containers(pod: &Path) -> Vec<Vec<PathBuf>> {
    let mut containers = vec![vec![pod.to_owned()]];
    for container in folders(pod) {
        let mut all = vec![container];
        let mut next = 0;
        while let Some(folder) = all.get(next) {
            let below = folders(folder);
            all.extend(below);
            next += 1;
        }
        containers.push(all);
    }
    containers
}

fn folders(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.map(|entry| entry.path()).collect()
}

/// The processes in these folders, each with its folder. A folder may go meanwhile.
fn processes(folders: &[PathBuf]) -> Vec<(PathBuf, i32)> {
    let listed = |folder: &PathBuf| {
        let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
        let numbers: Vec<i32> = text.lines().filter_map(|number| number.parse().ok()).collect();
        numbers.into_iter().map(|number| (folder.clone(), number)).collect::<Vec<_>>()
    };
    folders.iter().flat_map(listed).collect()
}

fn is_sandbox(processes: &[(PathBuf, i32)]) -> bool {
    let [(_, only)] = processes else { return false };
    let name = fs::read_to_string(format!("/proc/{only}/comm")).unwrap_or_default();
    SANDBOXES.contains(&name.trim_end())
}

/// Returns whether the process was there.
fn kill_one(folder: &Path, process: i32) -> io::Result<bool> {
    let Some(pid) = Pid::from_raw(process) else {
        // So the kernel writes a process of another PID namespace.
        return Err(io::Error::other("they are in a PID namespace that cannot be seen from here"));
    };
    let process_fd = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process_fd) => process_fd,
        Err(Errno::SRCH) => return Ok(false),
        Err(error) => return Err(error.into()),
    };
    // The number may have become another process's before it was opened.
    if !processes(&[folder.to_owned()]).iter().any(|(_, now)| *now == process) {
        return Ok(false);
    }
    match pidfd_send_signal(&process_fd, Signal::KILL) {
        Ok(()) => Ok(true),
        Err(Errno::SRCH) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

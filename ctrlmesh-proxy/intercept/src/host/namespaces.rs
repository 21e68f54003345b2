//! Finds the network namespaces of the processes in a cgroup.

use std::collections::{BTreeMap, HashSet};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::{fs, io};

use nix::errno::Errno;

use crate::Error;
use crate::host::privilege;

/// Network namespaces of the processes in a cgroup.
#[derive(Debug, Default)]
pub struct Namespaces {
    /// Each by its inode and a path by which it can be opened for as long as the process lives, the oldest one in it.
    /// That of the oldest of all is the first: a pod begins in its own, and what comes later may have made another for
    /// itself, as sandboxes of browsers do.
    pub found: Vec<(u64, PathBuf)>,
    /// Why there may be others.
    pub unseen: Option<Error>,
}

/// What is seen of processes: by when they began and their number, the namespace of each.
#[derive(Default)]
struct Processes {
    seen: BTreeMap<(u64, u32), (u64, PathBuf)>,
    unseen: Option<Error>,
}

/// Network namespaces of the processes in a cgroup and below it.
pub fn of(cgroup: &Path) -> Namespaces {
    let Processes { seen, unseen } = Processes::of(cgroup);
    let mut known = HashSet::new();
    let found = seen.into_values().filter(|(inode, _)| known.insert(*inode)).collect();
    Namespaces { found, unseen }
}

/// Folders `/proc/PID` of the processes in a cgroup and below it, as far as they can be seen, the oldest first.
pub fn processes(cgroup: &Path) -> Vec<PathBuf> {
    let seen = Processes::of(cgroup).seen;
    seen.into_keys().map(|(_, number)| process(number)).collect()
}

fn process(number: u32) -> PathBuf {
    Path::new("/proc").join(number.to_string())
}

impl Namespaces {
    /// Whether the one with this inode is among them.
    pub(crate) fn has(&self, inode: u64) -> bool {
        self.found.iter().any(|(found, _)| *found == inode)
    }
}

impl Processes {
    fn of(cgroup: &Path) -> Self {
        let mut processes = Self::default();
        let mut folders = vec![cgroup.to_owned()];
        while let Some(folder) = folders.pop() {
            // A folder may go while we look, and one of threads lists no processes; those are listed above.
            let listed = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
            for number in listed.lines().filter_map(|number| number.parse().ok()) {
                processes.add(&folder, number);
            }
            let below = fs::read_dir(&folder).into_iter().flatten().flatten();
            let below = below.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            folders.extend(below.map(|entry| entry.path()));
        }
        processes
    }

    fn add(&mut self, folder: &Path, number: u32) {
        // So the kernel writes a process that has no number here.
        if number == 0 {
            self.unseen = Some(Error::OtherPids(folder.to_owned()));
            return;
        }
        let process = process(number);
        let path = process.join("ns/net");
        match fs::metadata(&path) {
            Ok(namespace) => {
                let began = fs::read_to_string(process.join("stat")).ok();
                // One that ends while we look is nobody's oldest.
                let began = began.as_deref().and_then(began_at).unwrap_or(u64::MAX);
                self.seen.insert((began, number), (namespace.ino(), path));
            }
            // It ended while we looked: then it has no namespace any more.
            Err(error) if gone(&error) => {}
            Err(error) => {
                let error = privilege::explain_process("find network namespace", &path, error);
                self.unseen = Some(error);
            }
        }
    }
}

/// When a process began, in ticks since the machine did, by its `/proc/PID/stat` (`proc(5)`, field 22).
fn began_at(stat: &str) -> Option<u64> {
    // The second field is the program's name, with whatever is in it.
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_whitespace().nth(19)?.parse().ok()
}

/// Whether an error of `/proc` says that there is no such process.
fn gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(Errno::ESRCH as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn when_a_process_began_is_read_whatever_it_is_called() {
        let fields: Vec<String> = (3..=52).map(|field| field.to_string()).collect();
        for name in ["pause", "a b", ") 1 (", ""] {
            assert_eq!(began_at(&format!("7 ({name}) {}\n", fields.join(" "))), Some(22));
        }
        assert_eq!(began_at("7 (pause) S 1"), None);
    }
}

//! Removes everything that a test made, also a test that was killed.

use std::path::Path;
use std::process::Command;
use std::time::Instant;
use std::{fs, thread};

use ctrlmesh_intercept::cgroup::Hierarchy;

use super::wait::PATIENCE;
use super::{PINS, PREFIX};

/// Removes what earlier runs left that did not end well.
pub(super) fn sweep() {
    let mount = Hierarchy::find().unwrap();
    for folder in [mount.mount(), Path::new("/run/netns"), Path::new(PINS)] {
        let Ok(entries) = fs::read_dir(folder) else {
            continue;
        };
        for name in entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
            let Some((pid, _)) = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-')) else {
                continue;
            };
            if !Path::new("/proc").join(pid).exists() {
                remove(&name);
            }
        }
    }
}

/// Ends the processes of a test and removes everything under its name; what is not there was removed already.
pub(super) fn remove(name: &str) {
    let cgroup = Hierarchy::find().unwrap().mount().join(name);
    drop(fs::write(cgroup.join("cgroup.kill"), "1"));
    let start = Instant::now();
    while cgroup.exists() && start.elapsed() < PATIENCE {
        remove_cgroups(&cgroup);
        thread::yield_now();
    }
    let namespaces = fs::read_dir("/run/netns").into_iter().flatten().flatten();
    for namespace in
        namespaces.filter_map(|entry| entry.file_name().into_string().ok()).filter(|found| found.starts_with(name))
    {
        let suffix = &namespace[name.len()..];
        if suffix.is_empty() || !suffix.starts_with(|first: char| first.is_ascii_digit()) {
            drop(Command::new("ip").args(["netns", "del", &namespace]).output());
        }
    }
    drop(fs::remove_dir_all(Path::new(PINS).join(name)));
}

fn remove_cgroups(cgroup: &Path) {
    let below = fs::read_dir(cgroup).into_iter().flatten().flatten();
    for folder in below.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        remove_cgroups(&folder.path());
    }
    // Busy until its processes are gone: the caller comes back.
    drop(fs::remove_dir(cgroup));
}

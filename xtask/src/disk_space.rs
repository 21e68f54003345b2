//! Checks before anything is built whether the disks have the space that will be needed.

use std::collections::BTreeMap;
use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Result, bail};

use crate::run::root;
use crate::tools;

/// What each folder takes when everything is there, in MB, as measured and rounded up: what Go and we build once per
/// machine, and what the demo, unit tests, or all tests, have cargo build.
const TOOLS_MB: u64 = 1300;
const GO_MODULES_MB: u64 = 1600;
pub(crate) const GO_BUILDS_MB: u64 = 5800;
pub(crate) const DEMO_TARGET_MB: u64 = 3000;
pub(crate) const UNIT_TARGET_MB: u64 = 3000;
pub(crate) const TESTS_TARGET_MB: u64 = 10_500;

/// How much a node takes, in MB: images, what is unpacked of them, logs.
const NODE_MB: u64 = 2000;

/// A folder that is written, and how much will be written there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DiskUse {
    what: &'static str,
    /// Set to another folder, it is written there.
    variable: &'static str,
    folder: PathBuf,
    /// How much more will be written there.
    needed_mb: u64,
}

/// The mount of a folder, and how much is free there.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Disk {
    mount: String,
    free_mb: u64,
}

/// What cargo writes, `whole_mb` in all.
pub(crate) fn target(whole_mb: u64) -> DiskUse {
    let folder = env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let folder = folder.unwrap_or_else(|| root().join("target"));
    DiskUse::growing("the target folder", "CARGO_TARGET_DIR", folder, whole_mb)
}

/// What is built once per machine: the tools, and what Go keeps of them.
pub(crate) fn tools() -> Vec<DiskUse> {
    let mut uses = vec![DiskUse::growing("the tools' folder", tools::CACHE, tools::cache(), TOOLS_MB)];
    let asked = Command::new("go").args(["env", "GOMODCACHE", "GOCACHE"]).output();
    let output = asked.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let output = output.unwrap_or_default();
    let folders = output.lines().map(PathBuf::from);
    let kept = [("Go's modules", "GOMODCACHE", GO_MODULES_MB), ("what Go has built", "GOCACHE", GO_BUILDS_MB)];
    // Where everything is built, nothing more comes.
    if !tools::control_plane("kube-apiserver").is_file() {
        let go = kept.into_iter().zip(folders);
        uses.extend(go.map(|((what, variable, mb), at)| DiskUse::growing(what, variable, at, mb)));
    }
    uses
}

/// What a node writes.
pub(crate) fn node() -> DiskUse {
    let folder = env::temp_dir();
    DiskUse { what: "the node's folder", variable: "TMPDIR", folder, needed_mb: NODE_MB }
}

/// Refuses disks that have less than all their folders need. Those that df does not know are passed over.
///
/// # Errors
/// The disk has too little; the error names its folders, what each needs, and what is free.
pub(crate) fn check(uses: Vec<DiskUse>) -> Result<()> {
    let found = uses.into_iter().filter_map(|usage| Some((disk(&usage.folder)?, usage)));
    match shortage(&found.collect::<Vec<_>>()) {
        Some(problem) => bail!(problem),
        None => Ok(()),
    }
}

impl DiskUse {
    /// One that has `whole_mb` when everything is there.
    fn growing(what: &'static str, variable: &'static str, folder: PathBuf, whole_mb: u64) -> Self {
        let needed_mb = whole_mb.saturating_sub(used_mb(&folder));
        Self { what, variable, folder, needed_mb }
    }
}

/// What is wrong with the first disk that has too little.
fn shortage(found: &[(Disk, DiskUse)]) -> Option<String> {
    let mut disks: BTreeMap<&str, (u64, Vec<&DiskUse>)> = BTreeMap::new();
    for (disk, usage) in found.iter().filter(|(_, usage)| usage.needed_mb > 0) {
        disks.entry(&disk.mount).or_insert((disk.free_mb, Vec::new())).1.push(usage);
    }
    let needed = |uses: &[&DiskUse]| uses.iter().map(|usage| usage.needed_mb).sum::<u64>();
    let (mount, (free, uses)) = disks.into_iter().find(|(_, (free, uses))| *free < needed(uses))?;
    let each = uses.iter().map(|usage| {
        let DiskUse { what, folder, needed_mb, variable } = usage;
        format!("{what} {} needs {needed_mb} MB (elsewhere: {variable})", folder.display())
    });
    Some(format!(
        "no room on {mount}, where {free} MB are free and {} MB are needed: {}",
        needed(&uses),
        each.collect::<Vec<_>>().join(", ")
    ))
}

/// The disk that a folder is on, or will be on.
fn disk(folder: &Path) -> Option<Disk> {
    let there = folder.ancestors().find(|folder| folder.is_dir())?;
    let arguments = ["--output=avail,target", "--block-size=1000000"];
    let output = output(Command::new("df").args(arguments).arg(there))?;
    let (free, mount) = output.lines().last()?.trim().split_once(' ')?;
    Some(Disk { mount: mount.trim().to_owned(), free_mb: free.parse().ok()? })
}

/// How many MB a folder has; none where it is not there.
fn used_mb(folder: &Path) -> u64 {
    let arguments = ["--summarize", "--block-size=1000000"];
    let output = output(Command::new("du").args(arguments).arg(folder)).unwrap_or_default();
    output.split_whitespace().next().and_then(|mb| mb.parse().ok()).unwrap_or_default()
}

fn output(command: &mut Command) -> Option<String> {
    let output = command.stderr(Stdio::null()).output().ok()?;
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(what: &'static str, needed_mb: u64) -> DiskUse {
        DiskUse { what, variable: "SOME", folder: PathBuf::from("/x").join(what), needed_mb }
    }

    #[test]
    fn what_is_on_one_disk_is_added_up_and_each_place_is_named() {
        let disk = |mount: &str, free_mb| Disk { mount: mount.to_owned(), free_mb };
        let uses = |free| {
            vec![
                (disk("/", free), usage("a", 600)),
                (disk("/b", 10_000), usage("b", 2000)),
                (disk("/", free), usage("c", 500)),
                (disk("/full", 0), usage("d", 0)),
            ]
        };
        assert_eq!(shortage(&uses(1100)), None);
        let problem = shortage(&uses(1099)).unwrap();
        assert_eq!(
            problem,
            "no room on /, where 1099 MB are free and 1100 MB are needed: a /x/a needs 600 MB (elsewhere: SOME), \
             c /x/c needs 500 MB (elsewhere: SOME)"
        );
    }

    #[test]
    fn a_missing_folder_is_on_the_disk_of_its_parent() {
        let above = disk(&env::temp_dir()).unwrap();
        assert_eq!(disk(&env::temp_dir().join("no/such/folder")).unwrap().mount, above.mount);
        assert_eq!(used_mb(Path::new("/no/such/folder")), 0);
        let grown = DiskUse::growing("a", "SOME", PathBuf::from("/no/such/folder"), 7);
        assert_eq!(grown.needed_mb, 7);
    }

    #[test]
    fn a_place_that_needs_more_than_any_disk_has_is_refused() {
        let endless = DiskUse { needed_mb: u64::MAX, ..node() };
        let error = check(vec![endless]).unwrap_err().to_string();
        assert!(error.contains("the node's folder") && error.contains("TMPDIR"), "{error}");
        assert!(check(vec![DiskUse { needed_mb: 0, ..node() }]).is_ok());
    }
}

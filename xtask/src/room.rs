//! Is there room for what is built and run? Asked before anything is, of each place that is written.

use std::collections::BTreeMap;
use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Result, bail};

use crate::run::root;
use crate::tools;

/// What a place takes when everything is there, in MB, as measured and rounded up: what Go and we build once per machine,
/// and what the demo, unit tests, or all tests, have cargo build.
const TOOLS_MB: u64 = 700;
const GO_MODULES_MB: u64 = 1500;
pub(crate) const GO_BUILDS_MB: u64 = 4500;
pub(crate) const DEMO_TARGET_MB: u64 = 3000;
pub(crate) const UNIT_TARGET_MB: u64 = 3000;
pub(crate) const TESTS_TARGET_MB: u64 = 10_500;

/// How much a node takes, in MB: images, what is unpacked of them, logs.
const NODE_MB: u64 = 2000;

/// A place that is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    what: &'static str,
    /// Set to another folder, it is written there.
    variable: &'static str,
    folder: PathBuf,
    /// How much more will be written there.
    needed_mb: u64,
}

/// Where a place is, and how much is free there.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Disk {
    mount: String,
    free_mb: u64,
}

/// What cargo writes, `whole_mb` in all.
pub(crate) fn target(whole_mb: u64) -> Place {
    let folder = env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let folder = folder.unwrap_or_else(|| root().join("target"));
    Place::growing("the target folder", "CARGO_TARGET_DIR", folder, whole_mb)
}

/// What is built once per machine: the tools, and what Go keeps of them.
pub(crate) fn tools() -> Vec<Place> {
    let mut places =
        vec![Place::growing("the tools' folder", tools::CACHE, tools::cache(), TOOLS_MB)];
    let asked = Command::new("go").args(["env", "GOMODCACHE", "GOCACHE"]).output();
    let said = asked.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let said = said.unwrap_or_default();
    let folders = said.lines().map(PathBuf::from);
    let kept = [
        ("Go's modules", "GOMODCACHE", GO_MODULES_MB),
        ("what Go has built", "GOCACHE", GO_BUILDS_MB),
    ];
    // Where everything is built, nothing more comes.
    if !tools::control_plane("kube-apiserver").is_file() {
        let go = kept.into_iter().zip(folders);
        places.extend(go.map(|((what, variable, mb), at)| Place::growing(what, variable, at, mb)));
    }
    places
}

/// What a node writes.
pub(crate) fn node() -> Place {
    let folder = env::temp_dir();
    Place { what: "the node's folder", variable: "TMPDIR", folder, needed_mb: NODE_MB }
}

/// Refuses places on disks that have less than is needed there in all; those that df says nothing of are passed over.
///
/// # Errors
/// Which places those are, what each needs, and what is free.
pub(crate) fn check(places: Vec<Place>) -> Result<()> {
    let found = places.into_iter().filter_map(|place| Some((disk(&place.folder)?, place)));
    match short(&found.collect::<Vec<_>>()) {
        Some(problem) => bail!(problem),
        None => Ok(()),
    }
}

// === impl Place ===

impl Place {
    /// One that has `whole_mb` when everything is there.
    fn growing(what: &'static str, variable: &'static str, folder: PathBuf, whole_mb: u64) -> Self {
        let needed_mb = whole_mb.saturating_sub(taken_mb(&folder));
        Self { what, variable, folder, needed_mb }
    }
}

/// What is wrong with the first disk that has too little.
fn short(found: &[(Disk, Place)]) -> Option<String> {
    let mut disks: BTreeMap<&str, (u64, Vec<&Place>)> = BTreeMap::new();
    for (disk, place) in found.iter().filter(|(_, place)| place.needed_mb > 0) {
        disks.entry(&disk.mount).or_insert((disk.free_mb, Vec::new())).1.push(place);
    }
    let needed = |places: &[&Place]| places.iter().map(|place| place.needed_mb).sum::<u64>();
    let (mount, (free, places)) =
        disks.into_iter().find(|(_, (free, places))| *free < needed(places))?;
    let each = places.iter().map(|place| {
        let Place { what, folder, needed_mb, variable } = place;
        format!("{what} {} needs {needed_mb} MB (elsewhere: {variable})", folder.display())
    });
    Some(format!(
        "no room on {mount}, where {free} MB are free and {} MB are needed: {}",
        needed(&places),
        each.collect::<Vec<_>>().join(", ")
    ))
}

/// The disk that a folder is on, or will be on.
fn disk(folder: &Path) -> Option<Disk> {
    let there = folder.ancestors().find(|folder| folder.is_dir())?;
    let arguments = ["--output=avail,target", "--block-size=1000000"];
    let said = said(Command::new("df").args(arguments).arg(there))?;
    let (free, mount) = said.lines().last()?.trim().split_once(' ')?;
    Some(Disk { mount: mount.trim().to_owned(), free_mb: free.parse().ok()? })
}

/// How many MB a folder has; none where it is not there.
fn taken_mb(folder: &Path) -> u64 {
    let arguments = ["--summarize", "--block-size=1000000"];
    let said = said(Command::new("du").args(arguments).arg(folder)).unwrap_or_default();
    said.split_whitespace().next().and_then(|mb| mb.parse().ok()).unwrap_or_default()
}

fn said(command: &mut Command) -> Option<String> {
    let output = command.stderr(Stdio::null()).output().ok()?;
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(what: &'static str, needed_mb: u64) -> Place {
        Place { what, variable: "SOME", folder: PathBuf::from("/x").join(what), needed_mb }
    }

    #[test]
    fn what_is_on_one_disk_is_added_up_and_each_place_is_named() {
        let disk = |mount: &str, free_mb| Disk { mount: mount.to_owned(), free_mb };
        let places = |free| {
            vec![
                (disk("/", free), place("a", 600)),
                (disk("/b", 10_000), place("b", 2000)),
                (disk("/", free), place("c", 500)),
                (disk("/full", 0), place("d", 0)),
            ]
        };
        assert_eq!(short(&places(1100)), None);
        let problem = short(&places(1099)).unwrap();
        assert_eq!(
            problem,
            "no room on /, where 1099 MB are free and 1100 MB are needed: a /x/a needs 600 MB (elsewhere: SOME), \
             c /x/c needs 500 MB (elsewhere: SOME)"
        );
    }

    #[test]
    fn the_room_of_a_folder_that_is_not_there_yet_is_that_of_the_one_above() {
        let above = disk(&env::temp_dir()).unwrap();
        assert_eq!(disk(&env::temp_dir().join("no/such/folder")).unwrap().mount, above.mount);
        assert_eq!(taken_mb(Path::new("/no/such/folder")), 0);
        let grown = Place::growing("a", "SOME", PathBuf::from("/no/such/folder"), 7);
        assert_eq!(grown.needed_mb, 7);
    }

    #[test]
    fn a_place_that_needs_more_than_any_disk_has_is_refused() {
        let endless = Place { needed_mb: u64::MAX, ..node() };
        let error = check(vec![endless]).unwrap_err().to_string();
        assert!(error.contains("the node's folder") && error.contains("TMPDIR"), "{error}");
        assert!(check(vec![Place { needed_mb: 0, ..node() }]).is_ok());
    }
}

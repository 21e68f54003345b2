//! Finds the crates that are linked into a program, as cargo resolves them for that program and platform.
//!
//! `cargo tree` decides features as the build does. Tools that read `cargo metadata`, such as cargo-cyclonedx, see what
//! the features of all members of the workspace, and of their tests, would link: `aya` in the manager, `ring` in the
//! command, which have neither.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context as _, Result, ensure};

use crate::run::{cargo, root};
use crate::source::said;

/// What cargo prints of each crate.
const FORMAT: &str = "|{p}|{l}|{r}";

/// A crate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Crate {
    /// An SPDX expression; empty where the crate says none.
    pub(crate) licence: String,
    /// A URL; empty where the crate says none.
    pub(crate) repository: String,
    /// SHA-256 of its package; absent where it is of this checkout, and not of crates.io.
    pub(crate) sha256: Option<String>,
}

/// The crates of a program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Crates {
    /// The program's own.
    pub(crate) root: Id,
    pub(crate) all: BTreeMap<Id, Crate>,
    /// What each links directly.
    pub(crate) links: BTreeMap<Id, BTreeSet<Id>>,
}

/// Name and version.
pub(crate) type Id = (String, String);

impl Crates {
    /// Of a package of the workspace with this manifest, a path in the checkout, built for a target.
    ///
    /// # Errors
    /// Where cargo fails, or a crate is not in the lock file.
    pub(crate) fn of(manifest: &str, package: &str, target: &str) -> Result<Self> {
        let mut tree = cargo(&["tree", "--locked", "--manifest-path", manifest, "--package", package]);
        tree.args(["--target", target, "--edges", "normal,no-proc-macro", "--prefix", "depth", "--format", FORMAT]);
        let lock = root().join(manifest).with_file_name("Cargo.lock");
        let lock = fs::read_to_string(&lock).with_context(|| format!("read {}", lock.display()))?;
        Self::parse(&said(&mut tree)?, &checksums(&lock))
    }

    fn parse(tree: &str, checksums: &BTreeMap<Id, String>) -> Result<Self> {
        let mut crates = Self::default();
        // Those above the one at hand.
        let mut above: Vec<Id> = Vec::new();
        for line in tree.lines() {
            let what = || format!("a line of cargo tree that a release does not understand: {line}");
            let (depth, one) = line.split_once('|').with_context(what)?;
            let depth: usize = depth.parse().with_context(what)?;
            let mut fields = one.strip_suffix(" (*)").unwrap_or(one).split('|');
            let mut field = || fields.next().map(str::trim).with_context(what);
            let (package, licence, repository) = (field()?, field()?, field()?);
            let mut words = package.split(' ');
            let (name, version) = (words.next().with_context(what)?, words.next().with_context(what)?);
            let id = (name.to_owned(), version.trim_start_matches('v').to_owned());
            above.truncate(depth);
            ensure!(above.len() == depth, what());
            match above.last() {
                Some(parent) => drop(crates.links.entry(parent.clone()).or_default().insert(id.clone())),
                None => crates.root = id.clone(),
            }
            // Ours have the folder after them.
            let (is_ours, sha256) = (package.contains(" (/"), checksums.get(&id).cloned());
            ensure!(is_ours != sha256.is_some(), "{name} {} is neither ours nor of crates.io", id.1);
            let one = Crate {
                // As crates wrote it before they used SPDX.
                licence: licence.replace('/', " OR "),
                repository: repository.to_owned(),
                sha256,
            };
            crates.all.insert(id.clone(), one);
            above.push(id);
        }
        Ok(crates)
    }
}

/// The checksums in a lock file.
fn checksums(lock: &str) -> BTreeMap<Id, String> {
    let package = |text: &str| {
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "))?;
            Some(line.trim_matches('"').to_owned())
        };
        Some(((field("name")?, field("version")?), field("checksum")?))
    };
    lock.split("[[package]]\n").filter_map(package).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::Platform;

    #[test]
    fn crates_and_what_they_link_are_read_from_the_tree() {
        let lock = "version = 4\n\n[[package]]\nname = \"b\"\nversion = \"2.0.0\"\nchecksum = \"12\"\n\n\
            [[package]]\nname = \"c\"\nversion = \"3.0.0\"\nchecksum = \"34\"\ndependencies = [\n \"b\",\n]\n";
        let tree = "0|a v1.0.0 (/x/a)|MIT|\n1|c v3.0.0|MIT/Apache-2.0|https://c\n2|b v2.0.0||\n1|b v2.0.0|| (*)\n";
        let crates = Crates::parse(tree, &checksums(lock)).unwrap();
        let id = |name: &str, version: &str| (name.to_owned(), version.to_owned());
        let (a, b, c) = (id("a", "1.0.0"), id("b", "2.0.0"), id("c", "3.0.0"));
        assert_eq!(crates.root, a);
        assert_eq!(crates.links[&a], BTreeSet::from([b.clone(), c.clone()]));
        assert_eq!(crates.links[&c], BTreeSet::from([b.clone()]));
        assert!(crates.all[&a].sha256.is_none());
        assert_eq!(crates.all[&b].sha256.as_deref(), Some("12"));
        assert_eq!(
            (crates.all[&c].licence.as_str(), crates.all[&c].repository.as_str()),
            ("MIT OR Apache-2.0", "https://c")
        );
    }

    #[test]
    fn a_crate_of_neither_place_is_refused() {
        let error = Crates::parse("0|a v1.0.0 (https://git)|MIT|\n", &BTreeMap::new()).unwrap_err().to_string();
        assert!(error.contains("neither ours nor of crates.io"), "{error}");
    }

    #[test]
    fn every_crate_that_is_linked_says_its_licence() {
        let target = Platform::of_machine().unwrap().target();
        let crates = Crates::of("Cargo.toml", "xtask", target).unwrap();
        let names: Vec<&str> = crates.all.keys().map(|(name, _)| name.as_str()).collect();
        assert!(names.contains(&"clap") && names.contains(&"anyhow"), "{names:?}");
        for not_linked in ["clap_derive", "syn", "tempfile"] {
            assert!(!names.contains(&not_linked), "{not_linked} runs in the compiler or in tests only");
        }
        assert!(crates.all.values().all(|one| !one.licence.is_empty()));
    }
}

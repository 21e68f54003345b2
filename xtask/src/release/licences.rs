//! Gathers the licence texts of all that the programs have in them from others: who passes a program on has to pass
//! these on, too.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::archive::sums;
use super::crates::{Crate, Crates, Id};
use super::programs::IMAGES;
use super::{KERNEL, MANIFEST, VERSION};
use crate::platform::Platform;
use crate::run::{cargo, root};
use crate::source::said;

/// Where they are in an image and in an archive of programs.
pub(super) const FOLDER: &str = "licenses";

/// Ours.
const OWN: &str = "LICENSE";

/// Those of crates.
const CRATES: &str = "THIRD-PARTY.txt";

/// Those of Rust's standard library, as they come with the compiler, each with its name here. The first one names the
/// others, and has the texts of crates in it.
const STANDARD_LIBRARY: [(&str, &str); 4] = [
    ("COPYRIGHT-library.html", "rust-standard-library.html"),
    ("licenses/MIT.txt", "rust-standard-library-MIT.txt"),
    ("licenses/Apache-2.0.txt", "rust-standard-library-Apache-2.0.txt"),
    ("licenses/Unicode-3.0.txt", "rust-standard-library-Unicode-3.0.txt"),
];

/// How the names of files with such texts begin, in capitals.
const NAMES: [&str; 6] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];

/// Texts, each with the crates that it is of.
type Texts = BTreeMap<String, BTreeSet<Id>>;

/// Writes them into a new folder: ours, and those of what is linked into any program for a platform.
///
/// # Errors
/// Where the text of a crate is not to be had, or a file cannot be written.
pub(super) fn write(platform: Platform, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    let own = fs::read_to_string(root().join(OWN))?;
    fs::write(folder.join(OWN), &own)?;
    let (mut crates, mut folders) = (BTreeMap::new(), folders_of(MANIFEST, platform.target())?);
    for image in IMAGES {
        crates.extend(Crates::of(MANIFEST, image.program(), platform.target())?.all);
    }
    let (manifest, package, target) = KERNEL;
    crates.extend(Crates::of(manifest, package, target)?.all);
    folders.extend(folders_of(manifest, target)?);
    crates.retain(|_, one| one.sha256.is_some());
    fs::write(folder.join(CRATES), document(&crates, &texts(&crates, &folders, &own)?))?;
    let sysroot = said(Command::new("rustc").args(["--print", "sysroot"]).current_dir(root()))?;
    for (from, name) in STANDARD_LIBRARY {
        let from = Path::new(&sysroot).join("share/doc/rust").join(from);
        fs::copy(&from, folder.join(name)).with_context(|| format!("copy {}", from.display()))?;
    }
    Ok(())
}

/// Copies them to where `files`, those of an image or an archive, have them.
///
/// # Errors
/// Where a file cannot be read or written.
pub(super) fn add(folder: &Path, files: &Path) -> Result<()> {
    let into = files.join(FOLDER);
    fs::create_dir_all(&into)?;
    for (name, _) in sums(folder)? {
        fs::copy(folder.join(&name), into.join(&name))?;
    }
    Ok(())
}

/// The folders of all crates that a manifest's lock file has for a target.
fn folders_of(manifest: &str, target: &str) -> Result<BTreeMap<Id, PathBuf>> {
    let mut metadata = cargo(&["metadata", "--locked", "--format-version", "1", "--manifest-path", manifest]);
    let metadata: Value = serde_json::from_str(&said(metadata.args(["--filter-platform", target]))?)?;
    let folder = |package: &Value| {
        let field = |name: &str| package[name].as_str().map(str::to_owned);
        let folder = PathBuf::from(field("manifest_path")?).parent()?.to_owned();
        Some(((field("name")?, field("version")?), folder))
    };
    Ok(metadata["packages"].as_array().into_iter().flatten().filter_map(folder).collect())
}

/// The texts of these crates. One that comes without has those of its repository; where there are none, either, the
/// Apache licence is the same for all, and is `own`.
fn texts(crates: &BTreeMap<Id, Crate>, folders: &BTreeMap<Id, PathBuf>, own: &str) -> Result<Texts> {
    let (mut texts, mut of_repository) = (Texts::new(), BTreeMap::<&str, BTreeSet<String>>::new());
    let mut without = Vec::new();
    for (id, one) in crates {
        let folder = folders.get(id).with_context(|| format!("cargo metadata does not name {} {}", id.0, id.1))?;
        let found = found_in(folder)?;
        if found.is_empty() {
            without.push((id, one));
        }
        of_repository.entry(repository(one)).or_default().extend(found.iter().cloned());
        for text in found {
            texts.entry(text).or_default().insert(id.clone());
        }
    }
    for (id, one) in without {
        let siblings =
            of_repository.get(repository(one)).filter(|texts| !texts.is_empty() && !one.repository.is_empty());
        let others = || one.licence.split(" OR ").any(|name| name == "Apache-2.0").then(|| [tidy(own)].into());
        let (name, version) = id;
        let found = siblings.cloned().or_else(others);
        let found: BTreeSet<String> =
            found.with_context(|| format!("{name} {version} ({}) has no text of its licence", one.licence))?;
        for text in found {
            texts.entry(text).or_default().insert(id.clone());
        }
    }
    Ok(texts)
}

/// Without the folder in it that some crates name.
fn repository(one: &Crate) -> &str {
    one.repository.split("/tree/").next().unwrap_or_default().trim_end_matches('/').trim_end_matches(".git")
}

/// All texts in a folder and those below it: C code that a crate brings has its own.
fn found_in(folder: &Path) -> Result<BTreeSet<String>> {
    let (mut found, mut due) = (BTreeSet::new(), vec![folder.to_owned()]);
    while let Some(folder) = due.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("list {}", folder.display()))? {
            let (entry, path) = entry.map(|entry| (entry.file_name(), entry.path()))?;
            let name = entry.to_string_lossy().to_uppercase();
            if path.is_dir() {
                due.push(path);
            } else if NAMES.iter().any(|begin| name.starts_with(begin)) {
                let bytes = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
                let text = tidy(&String::from_utf8_lossy(&bytes));
                found.extend((!text.is_empty()).then_some(text));
            }
        }
    }
    Ok(found)
}

/// The same text in the same bytes.
fn tidy(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    lines.join("\n").trim_matches('\n').to_owned()
}

/// Lists the crates, and gives each text once.
fn document(crates: &BTreeMap<Id, Crate>, texts: &Texts) -> String {
    let mut document = format!(
        "The programs of ctrlmesh {VERSION} have these crates in them. Each is under the licence named beside it; the \
         texts follow.\n\n"
    );
    document.extend(crates.iter().map(|((name, version), one)| format!("{name} {version}: {}\n", one.licence)));
    document.extend(texts.iter().map(|(text, of)| {
        let names: Vec<String> = of.iter().map(|(name, version)| format!("{name} {version}")).collect();
        format!("\n{}\nOf {}\n\n{text}\n", "=".repeat(80), names.join(", "))
    }));
    document
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(name: &str) -> Id {
        (name.to_owned(), "1.0.0".to_owned())
    }

    fn of(licence: &str, repository: &str) -> Crate {
        let sha256 = Some("12".to_owned());
        Crate { licence: licence.to_owned(), repository: repository.to_owned(), sha256 }
    }

    /// Names of files, and what is in them.
    type Files<'a> = &'a [(&'a str, &'a str)];

    /// The crates, each with the files in its folder.
    fn texts_of(crates: &[(&str, Crate, Files<'_>)]) -> Result<Vec<(String, Vec<String>)>> {
        let parent = tempfile::tempdir()?;
        let mut folders = BTreeMap::new();
        for (name, _, files) in crates {
            let folder = parent.path().join(name);
            fs::create_dir(&folder)?;
            for (file, text) in *files {
                fs::create_dir_all(folder.join(file).parent().context("a folder")?)?;
                fs::write(folder.join(file), text)?;
            }
            folders.insert(id(name), folder);
        }
        let crates = crates.iter().map(|(name, one, _)| (id(name), one.clone())).collect();
        let texts = texts(&crates, &folders, "apache\n")?;
        let names = |of: BTreeSet<Id>| of.into_iter().map(|(name, _)| name).collect();
        Ok(texts.into_iter().map(|(text, of)| (text, names(of))).collect())
    }

    #[test]
    fn each_text_is_there_once_with_all_crates_that_it_is_of() {
        let found = texts_of(&[
            ("a", of("MIT", "https://a"), &[("LICENSE-MIT", "mit\r\n"), ("src/lib.rs", "code")]),
            ("b", of("MIT", "https://b"), &[("license", "mit  "), ("src/c/COPYING", "isc")]),
            ("c", of("MIT", "https://b/tree/main/c"), &[]),
            ("d", of("Apache-2.0", "https://d"), &[]),
            ("e", of("MIT OR Apache-2.0", ""), &[]),
        ]);
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let wanted = [("apache", names(&["d", "e"])), ("isc", names(&["b", "c"])), ("mit", names(&["a", "b", "c"]))];
        assert_eq!(found.unwrap(), wanted.map(|(text, of)| (text.to_owned(), of)));
    }

    #[test]
    fn a_crate_whose_text_is_not_to_be_had_is_named() {
        let error = texts_of(&[("a", of("MIT", ""), &[]), ("b", of("MIT", ""), &[("LICENSE", "mit")])]).unwrap_err();
        assert_eq!(error.to_string(), "a 1.0.0 (MIT) has no text of its licence");
    }

    #[test]
    fn the_texts_of_all_that_is_linked_are_to_be_had() {
        let folder = tempfile::tempdir().unwrap();
        write(Platform::of_machine().unwrap(), folder.path()).unwrap();
        let (texts, own) = (folder.path().join(CRATES), folder.path().join(OWN));
        let texts = fs::read_to_string(texts).unwrap();
        for linked in ["\ntokio 1.", "\naya-ebpf 0.", "\nkube 5."] {
            assert!(texts.contains(linked), "{linked:?} is missing");
        }
        assert!(texts.contains(&tidy(&fs::read_to_string(own).unwrap())), "the Apache licence is missing");
        let files = tempfile::tempdir().unwrap();
        add(folder.path(), files.path()).unwrap();
        assert_eq!(sums(&files.path().join(FOLDER)).unwrap(), sums(folder.path()).unwrap());
        assert_eq!(sums(folder.path()).unwrap().len(), 2 + STANDARD_LIBRARY.len());
    }
}

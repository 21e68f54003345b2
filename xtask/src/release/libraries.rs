//! Fetches the C library of images from Debian, in its newest version, and finds what a program needs of it.
//!
//! What is installed on the machine that builds does not get into an image: it may be of another processor, and lag
//! behind Debian's mends, as Debian's own cross compilers do.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::oci;
use crate::platform::Platform;
use crate::progress::step;
use crate::run::run;
use crate::source::said;

/// Debian's packages with the libraries, and their licences: Debian writes these for people, and not by their names in
/// SPDX.
const PACKAGES: [(&str, &str); 2] =
    [("libc6", "LGPL-2.1-or-later"), ("libgcc-s1", "GPL-3.0-or-later WITH GCC-exception-3.1")];

/// Of these, images have nothing but texts of licences.
const WITH_TEXTS: [&str; 2] = ["gcc-12-base", "base-files"];

/// Who holds the rights in the libraries, and under what licences.
const COPYRIGHTS: [&str; 2] = ["usr/share/doc/libc6/copyright", "usr/share/doc/libgcc-s1/copyright"];

/// The texts of the licences by which the libraries may be passed on, in all versions.
const TEXTS: [&str; 5] = ["GPL-2", "GPL-3", "LGPL-2", "LGPL-2.1", "LGPL-3"];

/// A package of Debian.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    /// Of its library; none where it only has texts.
    pub(crate) licence: Option<&'static str>,
    pub(crate) platform: Platform,
    /// SHA-256 of its file.
    pub(crate) sha256: String,
}

/// The packages of a platform, unpacked.
#[derive(Debug)]
pub(crate) struct Libraries {
    pub(crate) packages: Vec<Package>,
    folder: PathBuf,
    platform: Platform,
}

impl Package {
    /// Its name among all packages of the world.
    pub(crate) fn purl(&self) -> String {
        let version = self.version.replace('+', "%2B").replace(':', "%3A");
        format!("pkg:deb/debian/{}@{version}?arch={}&distro=bookworm", self.name, self.platform.name())
    }
}

/// Fetches the packages of a platform into a folder. Nothing on the machine is changed, and nobody has to be root.
///
/// # Errors
/// Where Debian cannot be reached.
pub(crate) fn fetch(platform: Platform, folder: &Path) -> Result<()> {
    let state = folder.join("apt");
    for inside in ["state/lists/partial", "cache/archives/partial"] {
        fs::create_dir_all(state.join(inside))?;
    }
    let apt = |arguments: &[&str]| {
        let mut apt = Command::new("apt-get");
        for (name, value) in [("APT::Architecture", platform.name()), ("APT::Architectures", platform.name())] {
            apt.arg("-o").arg(format!("{name}={value}"));
        }
        // As if nothing were installed; and apt's own user may not write into folders of ours.
        apt.args(["-o", "Dir::State::status=/dev/null", "-o", "APT::Sandbox::User=root"]);
        apt.arg("-o").arg(format!("Dir::State={}", state.join("state").display()));
        apt.arg("-o").arg(format!("Dir::Cache={}", state.join("cache").display()));
        run(apt.arg("-qq").args(arguments).current_dir(folder))
    };
    step(&format!("fetch Debian's C library for {}", platform.name()), Duration::from_secs(10), || {
        apt(&["update"])?;
        apt(&[&["download"], &PACKAGES.map(|(name, _)| name)[..], &WITH_TEXTS].concat())
    })?;
    Ok(fs::remove_dir_all(state)?)
}

impl Libraries {
    /// Unpacks the packages that lie in a folder into another.
    ///
    /// # Errors
    /// Where one is not there, or is for another platform.
    pub(crate) fn unpack(platform: Platform, from: &Path, into: &Path) -> Result<Self> {
        let (mut packages, files) = (Vec::new(), archives(from)?);
        fs::create_dir_all(into)?;
        let libraries = PACKAGES.map(|(name, licence)| (name, Some(licence)));
        for (name, licence) in libraries.into_iter().chain(WITH_TEXTS.map(|name| (name, None))) {
            let prefix = format!("{name}_");
            let is_it =
                |file: &&PathBuf| file.file_name().is_some_and(|file| file.to_string_lossy().starts_with(&prefix));
            let file = files.iter().find(is_it);
            let file = file.with_context(|| format!("{} has no package {name}", from.display()))?;
            let field = |field: &str| said(Command::new("dpkg-deb").arg("--field").arg(file).arg(field));
            let built_for = field("Architecture")?;
            ensure!(built_for == platform.name(), "{} is for {built_for}", file.display());
            run(Command::new("dpkg-deb").arg("--extract").arg(file).arg(into))?;
            let version = field("Version")?;
            let sha256 = oci::sha256(file)?;
            packages.push(Package { name: name.to_owned(), version, licence, platform, sha256 });
        }
        Ok(Self { packages, folder: into.to_owned(), platform })
    }

    /// Copies what `program` needs, and the loader that finds it, to where it looks for them in `files`; gives the
    /// path of the loader there.
    ///
    /// # Errors
    /// Where it needs a library that the packages do not have.
    pub(crate) fn add(&self, program: &Path, files: &Path) -> Result<PathBuf> {
        let loader = interpreter(&readelf("--program-headers", program)?)?;
        let loader_file = loader.file_name().context("the name of the loader")?.to_string_lossy().into_owned();
        let at = Path::new("lib").join(self.platform.gnu());
        let (mut due, mut done) = (needed(&readelf("--dynamic", program)?), BTreeSet::from([loader_file.clone()]));
        while let Some(library) = due.pop() {
            if !done.insert(library.clone()) {
                continue;
            }
            let from = self.folder.join(&at).join(&library);
            ensure!(from.is_file(), "{} needs {library}, which no package of the release has", program.display());
            due.extend(needed(&readelf("--dynamic", &from)?));
            copy(&from, &files.join(&at).join(&library))?;
        }
        let loader = files.join(loader.strip_prefix("/").context("a loader without a path")?);
        copy(&self.folder.join(at).join(loader_file), &loader)?;
        Ok(loader)
    }

    /// Copies the licences of the libraries to where Debian has them.
    ///
    /// # Errors
    /// Where the packages do not have them.
    pub(crate) fn add_licences(&self, files: &Path) -> Result<()> {
        let texts = TEXTS.map(|name| format!("usr/share/common-licenses/{name}"));
        let mut all = COPYRIGHTS.into_iter().chain(texts.iter().map(String::as_str));
        all.try_for_each(|path| copy(&self.folder.join(path), &files.join(path)))
    }
}

fn archives(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    Ok(paths.into_iter().filter(|path| path.extension().is_some_and(|end| end == "deb")).collect())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to.parent().context("the folder of a library")?)?;
    fs::copy(from, to).with_context(|| format!("copy {}", from.display()))?;
    Ok(())
}

/// It reads programs of all processors.
fn readelf(what: &str, program: &Path) -> Result<String> {
    said(Command::new("readelf").args(["--wide", what]).arg(program).env("LC_ALL", "C"))
}

/// The libraries in what readelf says.
fn needed(text: &str) -> Vec<String> {
    let lines = text.lines().filter(|line| line.contains("(NEEDED)"));
    lines.filter_map(|line| Some(line.split_once('[')?.1.trim_end_matches(']').to_owned())).collect()
}

/// The loader in it.
fn interpreter(text: &str) -> Result<PathBuf> {
    let after = text.split_once("program interpreter: ").context("the program names no loader")?.1;
    Ok(PathBuf::from(after.split(']').next().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_names_its_loader_and_its_libraries() {
        let program = std::env::current_exe().unwrap();
        let loader = interpreter(&readelf("--program-headers", &program).unwrap()).unwrap();
        assert!(loader.is_file() && loader.to_string_lossy().contains("ld-linux"), "{}", loader.display());
        let needed = needed(&readelf("--dynamic", &program).unwrap());
        assert!(needed.contains(&"libc.so.6".to_owned()), "{needed:?}");
        assert!(interpreter("nothing").is_err());
    }

    #[test]
    fn a_library_that_no_package_has_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let (packages, platform) = (Vec::new(), Platform::of_machine().unwrap());
        let libraries = Libraries { packages, folder: folder.path().join("none"), platform };
        let error = libraries.add(&std::env::current_exe().unwrap(), folder.path()).unwrap_err().to_string();
        assert!(error.contains("which no package of the release has"), "{error}");
    }

    #[test]
    fn the_sign_for_a_space_in_urls_is_escaped_in_a_version() {
        let (name, version) = ("libc6".to_owned(), "2.36-9+deb12u14".to_owned());
        let package = Package { name, version, licence: None, platform: Platform::Arm64, sha256: String::new() };
        assert_eq!(package.purl(), "pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?arch=arm64&distro=bookworm");
    }
}

//! Packs the programs of a platform, and writes the checksums of all files.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, ensure};

use super::programs::Program;
use crate::oci;
use crate::platform::Platform;
use crate::run::root;
use crate::source::Source;

/// The file that lists the checksums.
pub(crate) const SUMS: &str = "SHA256SUMS";

/// Packs the programs of a platform, with our licence and the folder of all texts of licences, into `NAME.tar.gz`, in
/// which they are in the folder `NAME`.
///
/// # Errors
/// Where a file cannot be written.
pub(crate) fn pack(
    platform: Platform,
    programs: &[Program],
    licences: &Path,
    source: &Source,
    scratch: &Path,
    out: &Path,
) -> Result<()> {
    let name = format!("ctrlmesh-{}-linux-{}", env!("CARGO_PKG_VERSION"), platform.name());
    let parent = scratch.join("programs").join(platform.name());
    let folder = parent.join(&name);
    fs::create_dir_all(&folder)?;
    for program in programs.iter().filter(|program| program.platform == platform) {
        fs::copy(program.path(), folder.join(program.image.program()))?;
    }
    fs::copy(root().join("LICENSE"), folder.join("LICENSE"))?;
    super::licences::add(licences, &folder)?;
    let tar = scratch.join("programs.tar");
    oci::tar(&parent, &tar, source.seconds)?;
    oci::gzip(&tar, &out.join(format!("{name}.tar.gz")))
}

/// The files of a folder, with the SHA-256 of each, by name.
///
/// # Errors
/// Where one cannot be read.
pub(crate) fn sums(folder: &Path) -> Result<Vec<(String, String)>> {
    let mut sums = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let path = entry?.path();
        ensure!(path.is_file(), "{} is no file", path.display());
        let name = path.file_name().context("the name of a file")?.to_string_lossy().into_owned();
        sums.push((name, oci::sha256(&path)?));
    }
    sums.sort();
    Ok(sums)
}

/// Writes the checksums of all files of a folder, for `sha256sum --check`, and gives all files this time.
///
/// # Errors
/// Where a file cannot be read or written.
pub(crate) fn write_sums(folder: &Path, source: &Source) -> Result<()> {
    let lines = sums(folder)?.into_iter().map(|(name, sha256)| format!("{sha256}  {name}\n"));
    fs::write(folder.join(SUMS), lines.collect::<String>())?;
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(source.seconds);
    for entry in fs::read_dir(folder)? {
        File::options().write(true).open(entry?.path())?.set_modified(time)?;
    }
    Ok(())
}

/// The names of files that two folders do not have in common, or not with the same bytes.
///
/// # Errors
/// Where one cannot be read.
pub(crate) fn differences(one: &Path, another: &Path) -> Result<Vec<String>> {
    let (one, another) = (sums(one)?, sums(another)?);
    let only = |these: &[(String, String)], those: &[(String, String)]| -> Vec<String> {
        these.iter().filter(|file| !those.contains(file)).map(|(name, _)| name.clone()).collect()
    };
    let mut names = [only(&one, &another), only(&another, &one)].concat();
    names.sort();
    names.dedup();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::images::Image;

    /// Packs a program in a new folder; gives the folder, and the bytes of the archive.
    fn packed(text: &str) -> (tempfile::TempDir, Vec<u8>) {
        let folder = tempfile::tempdir().unwrap();
        let [files, licences, out] = ["files", "texts", "out"].map(|name| folder.path().join(name));
        for folder in [&files, &licences, &out] {
            fs::create_dir(folder).unwrap();
        }
        fs::write(files.join("ctrlmesh"), text).unwrap();
        fs::write(licences.join("THIRD-PARTY.txt"), "theirs").unwrap();
        let program = Program { image: Image::Cli, platform: Platform::Arm64, files, is_tried: false };
        let source = Source::new("c0ffee", 1_700_000_000).unwrap();
        pack(Platform::Arm64, &[program], &licences, &source, folder.path(), &out).unwrap();
        write_sums(&out, &source).unwrap();
        let name = format!("ctrlmesh-{}-linux-arm64.tar.gz", env!("CARGO_PKG_VERSION"));
        let bytes = fs::read(out.join(name)).unwrap();
        (folder, bytes)
    }

    #[test]
    fn programs_packed_in_another_folder_are_the_same_bytes() {
        let ((one, bytes), (another, again), (third, others)) = (packed("a"), packed("a"), packed("b"));
        assert!(bytes == again && bytes != others);
        let [one, another, third] = [one, another, third].map(|folder| (folder.path().join("out"), folder));
        assert_eq!(differences(&one.0, &another.0).unwrap(), Vec::<String>::new());
        let archive = format!("ctrlmesh-{}-linux-arm64.tar.gz", env!("CARGO_PKG_VERSION"));
        assert_eq!(differences(&one.0, &third.0).unwrap(), [SUMS.to_owned(), archive]);
    }

    #[test]
    fn the_checksums_are_those_that_sha256sum_checks() {
        let (folder, _) = packed("a");
        let out = folder.path().join("out");
        let check =
            || Command::new("sha256sum").args(["--check", "--strict", SUMS]).current_dir(&out).output().unwrap();
        assert!(check().status.success());
        let archive = fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().path());
        let archive = archive.into_iter().find(|path| path.extension().is_some()).unwrap();
        fs::write(archive, "other bytes").unwrap();
        assert!(!check().status.success());
    }
}

//! Builds a release a second time, from a clone in another folder, and compares the bytes.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};

use super::archive;
use crate::platform::Platform;
use crate::progress::step;
use crate::run::{root, run, with_own_toolchain};
use crate::source::Source;
use crate::tools;

/// How long the second build takes for each platform.
const ABOUT: Duration = Duration::from_mins(15);

/// Compares a release in `out` with one that is built from a clone; `libraries` is the folder of Debian's packages,
/// which both have.
///
/// # Errors
/// Where the clone cannot be built, or files differ: the error names them.
pub(super) fn compare(
    source: &Source,
    platforms: &[Platform],
    libraries: &Path,
    builder: &str,
    scratch: &Path,
    out: &Path,
) -> Result<()> {
    // Elsewhere, and with a longer name than any checkout is likely to have.
    let clone = scratch.join("the-same-commit-in-another-folder");
    let origin = root().canonicalize()?;
    run(Command::new("git").args(["clone", "--quiet", "--no-checkout"]).arg(origin).arg(&clone))?;
    run(Command::new("git").args(["checkout", "--quiet", "--detach", &source.commit]).current_dir(&clone))?;
    let second = clone.join("target/dist/second");
    let mut release = Command::new("cargo");
    with_own_toolchain(&mut release);
    release.args(["xtask", "release", "--dry-run", "--builder", builder, "--libraries"]).arg(libraries);
    release.arg("--out").arg(&second).args(platforms.iter().map(|platform| format!("--platform={}", platform.name())));
    release.current_dir(&clone).env(tools::CACHE, tools::cache()).env("SOURCE_DATE_EPOCH", source.seconds.to_string());
    let about = ABOUT * u32::try_from(platforms.len()).unwrap_or(1);
    step("build the same commit in another folder", about, || run(&mut release))?;
    let differences = archive::differences(out, &second)?;
    ensure!(
        differences.is_empty(),
        "a build in another folder gave other bytes of {}; both are there: {} and {}",
        differences.join(", "),
        out.display(),
        second.display()
    );
    Ok(fs::remove_dir_all(clone)?)
}

//! A wall clock for each process, which is stepped without that of the machine.
//!
//! What asks the C library has it: our programs, and Java. Go asks the kernel, so the clock of what is written in Go
//! stays right.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

const SOURCE: &str = "tests/control_plane_ownership/clock.c";

/// The library that is preloaded.
#[derive(Clone)]
pub(crate) struct Library(PathBuf);

/// The clock of a process.
#[derive(Clone)]
pub(crate) struct Clock {
    library: PathBuf,
    /// By how many seconds it is wrong.
    file: PathBuf,
}

impl Library {
    pub(crate) fn build(folder: &Path) -> Result<Self> {
        let (source, library) = (Path::new(env!("CARGO_MANIFEST_DIR")).join(SOURCE), folder.join("clock.so"));
        let mut gcc = Command::new("gcc");
        gcc.args(["-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o"]).arg(&library).arg(source);
        ensure!(gcc.status().context("start gcc")?.success(), "gcc of the clock");
        Ok(Self(library))
    }

    /// A clock that is right; `file` is its own.
    pub(crate) fn clock(&self, file: PathBuf) -> Result<Clock> {
        fs::write(&file, 0_i64.to_ne_bytes())?;
        Ok(Clock { library: self.0.clone(), file })
    }
}

impl Clock {
    /// What a process is told that has it.
    pub(crate) fn environment(&self) -> [(&'static str, &Path); 2] {
        [("LD_PRELOAD", &self.library), ("CTRLMESH_TEST_CLOCK", &self.file)]
    }

    /// Makes it wrong by so many seconds, from now on.
    pub(crate) fn step(&self, seconds: i64) -> Result<()> {
        // In place: the process has it mapped.
        let file = OpenOptions::new().write(true).open(&self.file)?;
        Ok(file.write_all_at(&seconds.to_ne_bytes(), 0)?)
    }
}

#[test]
fn a_clock_is_stepped_for_its_process_only() -> Result<()> {
    const STEP: i64 = 100_000;
    let folder = tempfile::tempdir()?;
    let clock = Library::build(folder.path())?.clock(folder.path().join("clock"))?;
    let says = || -> Result<i64> {
        let output = Command::new("date").arg("+%s").envs(clock.environment()).output()?;
        Ok(String::from_utf8(output.stdout)?.trim().parse()?)
    };
    let now = || jiff::Timestamp::now().as_second();
    for wrong_by in [0, STEP, -STEP, 0] {
        clock.step(wrong_by)?;
        let (before, said, after) = (now(), says()?, now());
        ensure!((before..=after).contains(&(said - wrong_by)), "{wrong_by}: {said}, and it is {after}");
    }
    Ok(())
}

//! Shows in which functions the proxy spends its time, by samples of `perf`.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::sys::signal;
use nix::sys::signal::Signal;
use nix::unistd::Pid;

/// How many samples a second are taken of each thread.
const SAMPLES_PER_SECOND: u32 = 4999;

/// How many functions are shown.
const SHOWN: usize = 10;

/// Samples one process until it is asked what it saw.
pub(crate) struct Profile {
    perf: Child,
    samples: PathBuf,
}

impl Profile {
    /// Begins; nothing where `perf` is not installed.
    pub(crate) fn begin(dir: &Path, pid: u32) -> Option<Self> {
        let samples = dir.join(format!("{pid}.perf"));
        let perf = Command::new("perf")
            .args(["record", "--event", "cpu-clock", "--call-graph", "fp", "--freq"])
            .arg(SAMPLES_PER_SECOND.to_string())
            .args(["--pid", &pid.to_string(), "--output"])
            .arg(&samples)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        Some(Self { perf, samples })
    }

    /// Ends; the functions that cost most, as `12.34%  name`.
    pub(crate) fn end(mut self) -> Vec<String> {
        let pid = Pid::from_raw(i32::try_from(self.perf.id()).unwrap());
        signal::kill(pid, Signal::SIGINT).unwrap();
        self.perf.wait().unwrap();
        let report = Command::new("perf")
            .args(["report", "--stdio", "--no-children", "--call-graph", "none", "--sort"])
            .args(["symbol", "--input"])
            .arg(&self.samples)
            .output()
            .unwrap();
        let text = String::from_utf8(report.stdout).unwrap();
        let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
        lines.take(SHOWN).map(named).collect()
    }
}

/// A line of perf's report without the columns that it fills up with blanks.
fn named(line: &str) -> String {
    line.trim().trim_end_matches(['-', ' ']).to_owned()
}

//! Says what a release is made from: a commit of the checkout, and its time.

use std::env;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::run::root;

/// Variable that names the time of what is built, in seconds since 1970, where it is not that of the commit.
const EPOCH: &str = "SOURCE_DATE_EPOCH";

/// A commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Its whole hash.
    pub commit: String,
    /// Its time, in seconds since 1970.
    pub seconds: u64,
    /// The same, as `2026-01-31T12:00:00Z`.
    pub time: String,
}

impl Source {
    /// A commit of this hash and time, in seconds since 1970.
    ///
    /// # Errors
    /// Where nobody can say what date that is.
    pub fn new(commit: &str, seconds: u64) -> Result<Self> {
        let mut date = Command::new("date");
        let time = said(date.args(["--utc", "--date", &format!("@{seconds}"), "+%Y-%m-%dT%H:%M:%SZ"]))?;
        Ok(Self { commit: commit.to_owned(), seconds, time })
    }

    /// That of the checkout, in which nothing may be that was not committed: a release of it could not be built again.
    ///
    /// # Errors
    /// Where something is, or git does not know.
    pub(crate) fn of_checkout() -> Result<Self> {
        let changes = git(&root(), &["status", "--porcelain"])?;
        ensure!(changes.is_empty(), "a release is made from a commit; commit or stash these first:\n{changes}");
        let commit = git(&root(), &["rev-parse", "HEAD"])?;
        let seconds = match env::var(EPOCH) {
            Ok(seconds) => seconds,
            Err(_) => git(&root(), &["show", "--no-patch", "--format=%ct", "HEAD"])?,
        };
        let seconds = seconds.parse().with_context(|| format!("{EPOCH}={seconds} is no number of seconds"))?;
        Self::new(&commit, seconds)
    }
}

/// What git says of a checkout.
///
/// # Errors
/// Where it fails; the error has what it says.
pub(crate) fn git(folder: &Path, arguments: &[&str]) -> Result<String> {
    said(Command::new("git").arg("-C").arg(folder).args(arguments))
}

/// What a program prints, without the spaces around it.
///
/// # Errors
/// Where it cannot be started, or fails.
pub(crate) fn said(command: &mut Command) -> Result<String> {
    let name = command.get_program().display().to_string();
    let output = command.output().with_context(|| format!("start {name}"))?;
    ensure!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_commit_is_said_in_utc() {
        let source = Source::new("c0ffee", 1_700_000_000).unwrap();
        assert_eq!(source.time, "2023-11-14T22:13:20Z");
    }

    #[test]
    fn what_a_program_complains_of_is_in_the_error() {
        let error = said(Command::new("sh").args(["-c", "echo no such thing >&2; exit 3"])).unwrap_err().to_string();
        assert_eq!(error, "sh: no such thing\n");
    }
}

//! Explains why the kernel refused: a missing capability, or a missing feature.

use std::error::Error as StdError;
use std::path::Path;
use std::{fmt, fs, io};

use ctrlmesh_runtime::telemetry::chain;
use nix::errno::Errno;
use nix::unistd;

use crate::Error;
use crate::host::feature::{self, Feature};

/// What loading and attaching takes: bit in `CapEff` and name.
const NEEDED: [(u32, &str); 3] = [(12, "CAP_NET_ADMIN"), (38, "CAP_PERFMON"), (39, "CAP_BPF")];

/// `CAP_PERFMON` and `CAP_BPF`, which were part of `CAP_SYS_ADMIN`.
const SPLIT: [u32; 2] = [38, 39];

/// What entering another network namespace takes besides.
const NAMESPACE: (u32, &str) = (21, "CAP_SYS_ADMIN");

/// What finding the network namespace of another user's process takes, or of one with capabilities that we lack.
const PROCESS: (u32, &str) = (19, "CAP_SYS_PTRACE");

/// Capabilities that the process lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing(Vec<&'static str>);

impl Missing {
    pub(crate) fn none(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("nothing it knows of: a security module or a seccomp profile may forbid it");
        }
        f.write_str(&self.0.join(", "))
    }
}

/// Turns a refusal into the error that names the missing capability; anything else goes through `other`.
pub(crate) fn explain<E: StdError + Send + Sync + 'static>(
    doing: impl Into<String>,
    error: E,
    other: impl FnOnce(E) -> Error,
) -> Error {
    if let Some(Feature { name, since }) = feature::missing(&chain(&error)) {
        return Error::Kernel { feature: name, since, running: running(), source: Box::new(error) };
    }
    if !denied(&error) {
        return other(error);
    }
    lacking(doing, error, &NEEDED)
}

/// The same for entering a network namespace.
pub(crate) fn explain_namespace(
    doing: impl Into<String>,
    error: io::Error,
    other: impl FnOnce(io::Error) -> Error,
) -> Error {
    if denied(&error) { lacking(doing, error, &[NAMESPACE]) } else { other(error) }
}

/// The same for finding the network namespace at `path`, which may be a process's.
pub(crate) fn explain_process(doing: &'static str, path: &Path, error: io::Error) -> Error {
    if denied(&error) && path.starts_with("/proc") {
        return lacking(format!("{doing} {}", path.display()), error, &[PROCESS]);
    }
    Error::file(doing, path)(error)
}

/// The same for a pin or a folder of pins. Where its owner alone has access, no capability that we want would give it.
pub(crate) fn explain_pin<E: StdError + Send + Sync + 'static>(
    doing: &str,
    path: &Path,
    error: E,
    other: impl FnOnce(E) -> Error,
) -> Error {
    let closed = io_error(&error).and_then(io::Error::raw_os_error) == Some(Errno::EACCES as i32);
    if closed && !unistd::geteuid().is_root() {
        let (doing, path) = (doing.to_owned(), path.to_owned());
        return Error::Private { doing, path, source: Box::new(error) };
    }
    explain(format!("{doing} {}", path.display()), error, other)
}

/// Which of the `needed` capabilities this process lacks, and what came of it.
fn lacking<E: StdError + Send + Sync + 'static>(
    doing: impl Into<String>,
    error: E,
    needed: &[(u32, &'static str)],
) -> Error {
    let effective = fs::read_to_string("/proc/self/status").map(|status| effective(&status)).unwrap_or_default();
    let missing = missing(effective, needed);
    Error::Capability { doing: doing.into(), missing, source: Box::new(error) }
}

/// Whether the system refused for want of permission.
fn denied(error: &(dyn StdError + 'static)) -> bool {
    io_error(error).is_some_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
}

/// What the system said, at the end of a chain of errors.
fn io_error<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a io::Error> {
    let mut at = Some(error);
    while let Some(error) = at {
        if let Some(io) = error.downcast_ref() {
            return Some(io);
        }
        at = error.source();
    }
    None
}

fn missing(effective: u64, needed: &[(u32, &'static str)]) -> Missing {
    let has = |bit: u32| effective & (1 << bit) != 0;
    // CAP_SYS_ADMIN does for those that were split from it.
    let given = |bit: u32| has(bit) || SPLIT.contains(&bit) && has(NAMESPACE.0);
    Missing(needed.iter().filter(|(bit, _)| !given(*bit)).map(|&(_, name)| name).collect())
}

fn effective(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or_default()
}

fn running() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease").map(|text| text.trim().to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_missing_capabilities_are_named() {
        assert_eq!(missing(1 << 39, &NEEDED).to_string(), "CAP_NET_ADMIN, CAP_PERFMON");
        assert_eq!(missing(effective("Name:\tx\nCapEff:\t000000c000001000\n"), &NEEDED), Missing(vec![]));
    }

    #[test]
    fn what_sys_admin_does_for_is_not_missing() {
        assert_eq!(missing(1 << 21, &NEEDED).to_string(), "CAP_NET_ADMIN");
        assert_eq!(missing(1 << 21, &[PROCESS]).to_string(), "CAP_SYS_PTRACE");
        assert_eq!(missing(1 << 21 | 1 << 12, &NEEDED), Missing(vec![]));
    }

    #[test]
    fn a_refusal_with_every_capability_points_elsewhere() {
        assert!(missing(u64::MAX, &NEEDED).to_string().contains("seccomp"));
    }

    #[test]
    fn a_refusal_is_found_at_the_end_of_the_chain() {
        #[derive(Debug, thiserror::Error)]
        #[error("outer")]
        struct Outer(#[source] io::Error);
        assert!(denied(&Outer(io::ErrorKind::PermissionDenied.into())));
        assert!(!denied(&Outer(io::ErrorKind::NotFound.into())));
    }
}

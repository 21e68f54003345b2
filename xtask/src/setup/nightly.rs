//! Checks whether a nightly toolchain builds the kernel programs, and what it lacks.

use crate::build_ebpf;

/// A nightly toolchain with what it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Nightly {
    /// There is none that builds the kernel programs.
    Absent,
    /// There is one; whether it builds them was not tried.
    Untried,
    /// There is one, and it builds them.
    Builds,
}

impl Nightly {
    /// Looks for one. It is tried at once where packages can be installed if it fails.
    pub(super) fn find(may_install: bool) -> Self {
        match may_install {
            true if build_ebpf::nightly_builds() => Self::Builds,
            false if build_ebpf::has_nightly() => Self::Untried,
            _ => Self::Absent,
        }
    }
}

/// Whether a nightly toolchain is to be built with, and the packages that are missing. One that was not tried is tried
/// where all else is there (`enough` is what makes it needless), so that the list still comes before anything is built.
pub(super) fn lacking<P>(
    nightly: Nightly,
    enough: bool,
    missing: impl Fn(bool) -> Vec<P>,
    builds: impl FnOnce() -> bool,
) -> (bool, Vec<P>) {
    let packages = missing(nightly != Nightly::Absent);
    if nightly == Nightly::Untried && !enough && packages.is_empty() && !builds() {
        return (false, missing(false));
    }
    (nightly != Nightly::Absent, packages)
}

#[cfg(test)]
mod tests {
    use super::Nightly::{Absent, Builds, Untried};
    use super::*;

    #[test]
    fn a_nightly_that_does_not_build_does_not_count_as_ready() {
        let lacks = |nightly, enough, others: &[&'static str], builds: Option<bool>| {
            let missing = |nightly: bool| {
                let ebpf: &[&str] = if nightly { &[] } else { &["ebpf"] };
                [others, ebpf].concat()
            };
            lacking(nightly, enough, missing, || builds.expect("not to be tried"))
        };
        assert_eq!(lacks(Untried, false, &[], Some(false)), (false, vec!["ebpf"]));
        assert_eq!(lacks(Untried, false, &[], Some(true)), (true, vec![]));
        assert_eq!(lacks(Untried, false, &["gcc"], None), (true, vec!["gcc"]), "the list is first");
        assert_eq!(lacks(Untried, true, &[], None), (true, vec![]), "the other one builds, or no Go");
        assert_eq!(lacks(Builds, false, &[], None), (true, vec![]));
        assert_eq!(lacks(Absent, false, &["gcc"], None), (false, vec!["gcc", "ebpf"]));
    }
}

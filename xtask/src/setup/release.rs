//! Installs what only a release needs: what builds for other machines, and what runs their programs here.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};

use super::packages::{self, Need};
use super::{Plan, Purpose, Readiness, helm};
use crate::platform::Platform;
use crate::progress::{say, step};
use crate::run::{root, run};
use crate::source::said;
use crate::{build_ebpf, tools};

/// What each release needs.
const OF_EACH: [Need; 4] = [
    ("binutils", "a release: what its programs need of the C library", "readelf"),
    ("dpkg", "a release: the C library of its images", "dpkg-deb"),
    ("git", "a release: the commit that it is made from", "git"),
    ("gzip", "a release: its archives", "gzip"),
];

/// Makes this machine ready for a release for these platforms.
///
/// # Errors
/// Where something cannot be installed or built.
pub(crate) fn for_release(platforms: &[Platform]) -> Result<Readiness> {
    let needs: Vec<Need> = needs(platforms).into_iter().filter(|need| !packages::is_there(need)).collect();
    if !needs.is_empty() {
        if !packages::may_install() {
            packages::say_what_to_install(&needs, None);
            return Ok(Readiness::NotReady);
        }
        packages::install(&needs)?;
    }
    if !build_ebpf::has_toolchain() {
        let Some(plan) = Plan::of(Purpose::Node) else { return Ok(Readiness::NotReady) };
        plan.install()?;
    }
    for platform in platforms {
        add_target(*platform)?;
    }
    helm::prepare(&[tools::HELM_4])
}

fn needs(platforms: &[Platform]) -> Vec<Need> {
    let foreign = platforms.iter().filter(|platform| platform.is_foreign());
    let of_foreign = foreign.flat_map(|platform| {
        let [compiler, library] = platform.cross_packages();
        let emulator = ("qemu-user-static", "a release: whether programs for another machine run", platform.emulator());
        let why = "a release: programs for another machine";
        [(compiler, why, ""), (library, why, ""), emulator]
    });
    OF_EACH.into_iter().chain(of_foreign).collect()
}

/// Sees to it that the compiler of the checkout has the standard library of a platform.
fn add_target(platform: Platform) -> Result<()> {
    let target = platform.target();
    let sysroot = said(Command::new("rustc").args(["--print", "sysroot"]).current_dir(root()))?;
    if PathBuf::from(sysroot).join("lib/rustlib").join(target).join("lib").is_dir() {
        return Ok(());
    }
    ensure!(
        tools::on_path("rustup"),
        "the compiler has no standard library for {target}: install it as you installed the compiler"
    );
    say(&format!("missing: Rust's standard library for {target}"));
    step("install it", Duration::from_secs(20), || {
        run(Command::new("rustup").args(["target", "add", target]).current_dir(root()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_another_machines_programs_need_another_compiler() {
        let here = Platform::of_machine().unwrap();
        let other = Platform::ALL.into_iter().find(|platform| platform.is_foreign()).unwrap();
        assert_eq!(needs(&[here]), OF_EACH);
        let both = needs(&[here, other]);
        for package in other.cross_packages().into_iter().chain(["qemu-user-static"]) {
            assert!(both.iter().any(|(name, ..)| *name == package), "{package}: {both:?}");
        }
    }
}

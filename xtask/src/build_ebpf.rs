//! Builds the kernel programs, with the first toolchain that is there.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context as _, Result, bail};

use crate::run::{root, run, with_own_toolchain};
use crate::tools;

/// Debian's compiler, which fits Debian's LLVM.
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";

/// Builds the kernel programs into `target/bpf/ctrlmesh.o`, where the proxy looks for them.
///
/// # Errors
/// Where no toolchain is there, or it fails.
pub fn build() -> Result<()> {
    let (crate_folder, object) =
        (root().join("ctrlmesh-ebpf"), root().join("target/bpf/ctrlmesh.o"));
    let mut command = if let Some(toolchain) = nightly() {
        let mut command = Command::new("cargo");
        with_own_toolchain(&mut command).arg(format!("+{toolchain}"));
        command
    } else if has_debian_source() && has_linker() {
        let mut command = Command::new("cargo");
        // Debian's compiler is a stable one; this lets it build `core` as a nightly one does.
        with_own_toolchain(&mut command).env("RUSTC", DEBIAN_RUSTC).env("RUSTC_BOOTSTRAP", "1");
        command
    } else {
        bail!(
            "no toolchain for the kernel programs. Either\n  \
             rustup toolchain install nightly --component rust-src, and bpf-linker on your PATH; or, on Debian 12,\n  \
             apt-get install rustc-web rust-web-src llvm-22-dev libpolly-22-dev libzstd-dev, and `cargo xtask setup`"
        )
    };
    let linker = tools::bpf_linker();
    let folder = linker.parent().context("the folder of bpf-linker")?;
    let path = env::var("PATH").unwrap_or_default();
    command
        .args([
            "build",
            "--quiet",
            "--release",
            "--locked",
            "-Z",
            "build-std=core",
            "--target",
            "bpfel-unknown-none",
        ])
        .env("PATH", format!("{}:{path}", folder.display()))
        .current_dir(&crate_folder);
    run(&mut command)?;
    place(&crate_folder.join("target/bpfel-unknown-none/release/ctrlmesh"), &object)
}

/// A nightly toolchain that has the source of `core`, where bpf-linker is on `$PATH`.
pub fn nightly() -> Option<String> {
    if !tools::on_path("bpf-linker") {
        return None;
    }
    let mut command = Command::new("rustc");
    let output =
        with_own_toolchain(&mut command).args(["+nightly", "--print", "sysroot"]).output().ok()?;
    let sysroot = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    sysroot.join("lib/rustlib/src/rust/library/core").is_dir().then(|| "nightly".to_owned())
}

/// Whether there is a toolchain to build with.
pub fn has_toolchain() -> bool {
    nightly().is_some() || has_debian_source() && has_linker()
}

/// Whether a linker is there, on `$PATH` or in our cache.
pub fn has_linker() -> bool {
    nightly().is_some() || tools::bpf_linker().is_file()
}

fn has_debian_source() -> bool {
    Path::new(DEBIAN_RUSTC).is_file()
        && Path::new("/usr/lib/rustlib/src/rust/library/core").is_dir()
}

/// Copies only what has changed, so that the proxy is not built again for nothing.
fn place(built: &Path, object: &Path) -> Result<()> {
    let bytes = fs::read(built).with_context(|| format!("read {}", built.display()))?;
    if fs::read(object).is_ok_and(|there| there == bytes) {
        return Ok(());
    }
    let folder = object.parent().context("the folder of the object")?;
    fs::create_dir_all(folder)?;
    let staged = object.with_extension("o.new");
    fs::write(&staged, bytes)?;
    Ok(fs::rename(&staged, object)?)
}

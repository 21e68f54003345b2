//! Builds the kernel programs, with the first toolchain that is there.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{env, fs};

use anyhow::{Context as _, Result, bail, ensure};

use crate::paths::Paths;
use crate::progress::{say, step};
use crate::run::{root, run, with_own_toolchain};
use crate::tools;

/// What a person can install.
pub(crate) const HINT: &str = "Either\n  \
    rustup toolchain install nightly --component rust-src, and on your PATH bpf-linker built for its LLVM; or, on Debian 12,\n  \
    apt-get install rustc-web rust-web-src llvm-22-dev libpolly-22-dev libzstd-dev, and `cargo xtask setup`";

/// Debian's compiler, which fits Debian's LLVM.
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";

/// How long the first build takes on two cores, `core` with it.
const ABOUT: Duration = Duration::from_mins(2);

/// What the kernel runs, on a machine that is little-endian.
const TARGET: &str = "bpfel-unknown-none";

/// A toolchain that can build for the kernel: what it is called, and its cargo.
struct Toolchain {
    name: &'static str,
    cargo: Command,
}

/// Builds the kernel programs into `target/bpf/ctrlmesh.o`, where the proxy looks for them, with the first toolchain
/// that can.
///
/// # Errors
/// Where no toolchain is there, or none can.
pub fn build() -> Result<()> {
    first(toolchains(), |toolchain| build_with(toolchain, &crate_folder()))?;
    let built = crate_folder().join("target").join(TARGET).join("release/ctrlmesh");
    place(&built, &root().join("target/bpf/ctrlmesh.o"))
}

fn crate_folder() -> PathBuf {
    root().join("ctrlmesh-ebpf")
}

/// Tries one after the other, and says which failed, and why, before it goes on.
fn first(toolchains: Vec<Toolchain>, build: impl Fn(Toolchain) -> Result<()>) -> Result<()> {
    let mut failure = None;
    for toolchain in toolchains {
        let name = toolchain.name;
        if let Some(error) = failure.take() {
            say(&format!("{error:#}\ntrying {name}"));
        }
        match build(toolchain) {
            Ok(()) => return Ok(()),
            Err(error) => {
                failure = Some(error.context(format!("{name} did not build the kernel programs")));
            }
        }
    }
    match failure {
        Some(error) => {
            bail!("{error:#}\nno other toolchain for the kernel programs is there. {HINT}")
        }
        None => bail!("no toolchain for the kernel programs. {HINT}"),
    }
}

/// Those that are there, the usual one first.
fn toolchains() -> Vec<Toolchain> {
    let mut toolchains: Vec<Toolchain> = nightly().into_iter().collect();
    let linker = tools::bpf_linker();
    if let Some(folder) = linker.parent().filter(|_| has_debian()) {
        let path = env::var("PATH").unwrap_or_default();
        let mut cargo = Command::new("cargo");
        // Debian's compiler is a stable one; this lets it build `core` as a nightly one does. The linker is the one
        // that was built with the same LLVM.
        with_own_toolchain(&mut cargo)
            .env("RUSTC", DEBIAN_RUSTC)
            .env("RUSTC_BOOTSTRAP", "1")
            .env("PATH", format!("{}:{path}", folder.display()));
        toolchains.push(Toolchain { name: "Debian's rustc-web", cargo });
    }
    toolchains
}

fn build_with(toolchain: Toolchain, crate_folder: &Path) -> Result<()> {
    let mut command = toolchain.cargo;
    command
        .args([
            "build",
            "--quiet",
            "--release",
            "--locked",
            "-Z",
            "build-std=core",
            "--target",
            TARGET,
            "--target-dir",
            "target",
        ])
        .current_dir(crate_folder);
    Paths::of(&crate_folder.canonicalize()?.join("target"))?.keep_out_of(TARGET, &mut command);
    step("build the kernel programs; the first time takes minutes", ABOUT, || run(&mut command))
}

/// A nightly toolchain that has the source of `core`, where bpf-linker is on `$PATH`.
fn nightly() -> Option<Toolchain> {
    if !tools::on_path("bpf-linker") {
        return None;
    }
    let mut command = Command::new("rustc");
    let output = with_own_toolchain(&mut command).args(["+nightly", "--print", "sysroot"]).output().ok()?;
    let sysroot = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    sysroot.join("lib/rustlib/src/rust/library/core").is_dir().then(|| {
        let mut cargo = Command::new("cargo");
        with_own_toolchain(&mut cargo).arg("+nightly");
        Toolchain { name: "the nightly toolchain", cargo }
    })
}

/// Whether there is a toolchain to build with.
pub fn has_toolchain() -> bool {
    !toolchains().is_empty()
}

/// Whether a nightly toolchain is there with what it needs; it has not been tried.
pub fn has_nightly() -> bool {
    nightly().is_some()
}

/// Whether a nightly toolchain is there and builds the kernel programs. One that does not is said to, with its error:
/// then the other toolchain has to be made ready.
pub fn nightly_builds() -> bool {
    let Some(toolchain) = nightly() else { return false };
    match build_with(toolchain, &crate_folder()) {
        Ok(()) => true,
        Err(error) => {
            say(&format!("the nightly toolchain does not build the kernel programs: {error:#}"));
            false
        }
    }
}

/// Whether Debian's toolchain is there, with the linker that was built for it.
pub fn has_debian() -> bool {
    tools::bpf_linker().is_file()
        && Path::new(DEBIAN_RUSTC).is_file()
        && Path::new("/usr/lib/rustlib/src/rust/library/core").is_dir()
}

/// Copies only what has changed, so that the proxy is not built again for nothing.
fn place(built: &Path, object: &Path) -> Result<()> {
    let bytes = fs::read(built).with_context(|| format!("read {}", built.display()))?;
    // The name of a section. Without these types no map or program can be looked into, and some maps cannot be made.
    let has_types = bytes.windows(5).any(|bytes| bytes == b".BTF\0");
    ensure!(has_types, "{} has no BTF; the linker must be asked for it", built.display());
    if fs::read(object).is_ok_and(|there| there == bytes) {
        return Ok(());
    }
    let folder = object.parent().context("the folder of the object")?;
    fs::create_dir_all(folder)?;
    let staged = tools::staged(object);
    fs::write(&staged, bytes)?;
    Ok(fs::rename(&staged, object)?)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    fn toolchain(name: &'static str) -> Toolchain {
        Toolchain { name, cargo: Command::new("true") }
    }

    #[test]
    fn where_the_first_toolchain_fails_the_next_is_tried() {
        let tried = RefCell::new(Vec::new());
        let built = first(vec![toolchain("a"), toolchain("b"), toolchain("c")], |toolchain| {
            tried.borrow_mut().push(toolchain.name);
            if toolchain.name == "b" { Ok(()) } else { bail!("no linker") }
        });
        assert!(built.is_ok());
        assert_eq!(*tried.borrow(), ["a", "b"]);
    }

    #[test]
    fn an_object_without_types_takes_no_place() {
        let folder = env::temp_dir().join(format!("ctrlmesh-place-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (built, object) = (folder.join("built"), folder.join("object"));
        fs::write(&built, b"\x7fELF .text\0").unwrap();
        let refused = place(&built, &object).unwrap_err().to_string();
        fs::write(&built, b"\x7fELF .text\0.BTF\0").unwrap();
        place(&built, &object).unwrap();
        let placed = fs::read(&object).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        assert!(refused.contains("has no BTF"), "{refused}");
        assert!(placed.ends_with(b".BTF\0"));
    }

    #[test]
    fn where_none_can_it_is_said_what_to_install_for_either() {
        let failed = first(vec![toolchain("a")], |_| bail!("no linker")).unwrap_err().to_string();
        assert!(failed.starts_with("a did not build the kernel programs: no linker"), "{failed}");
        let none = first(Vec::new(), |_| Ok(())).unwrap_err().to_string();
        for said in [failed, none] {
            assert!(said.contains("rustup toolchain install nightly --component rust-src"), "{said}");
            assert!(said.contains("apt-get install rustc-web"), "{said}");
        }
    }
}

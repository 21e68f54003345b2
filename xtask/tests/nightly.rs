//! The toolchain that builds the kernel programs where a nightly one is installed.

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;
use std::{fs, io};

use xtask::tools;

/// In the place of rustup's programs: a nightly toolchain with the source of `core` below `$0`, whose cargo builds
/// nothing, and says what it was asked for.
const RUSTC: &str = r#"case $* in
*sysroot) echo "$(dirname "$0")/../sysroot" ;;
-vV) echo commit-hash: 0 ;;
esac"#;
const CARGO: &str = r#"echo "asked: $*, $RUSTC" >&2
exit 3"#;

fn write(program: &Path, script: &str) -> io::Result<()> {
    fs::write(program, format!("#!/bin/sh\n{script}\n"))?;
    fs::set_permissions(program, fs::Permissions::from_mode(0o755))
}

/// What `cargo xtask build-ebpf` says where rustup has such a toolchain, and bpf-linker is on the path or not.
fn said(linker: bool) -> io::Result<String> {
    let folder = tempfile::tempdir()?;
    let [path, core, tools] =
        ["bin", "sysroot/lib/rustlib/src/rust/library/core", "tools"].map(|name| folder.path().join(name));
    for made in [&path, &core, &tools] {
        fs::create_dir_all(made)?;
    }
    for name in ["dirname", "sh"] {
        symlink(Path::new("/bin").join(name), path.join(name))?;
    }
    write(&path.join("rustc"), RUSTC)?;
    write(&path.join("cargo"), CARGO)?;
    if linker {
        write(&path.join("bpf-linker"), "exit 3")?;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.arg("build-ebpf").env_clear().env("HOME", folder.path()).env(tools::CACHE, &tools);
    let output = command.env("PATH", &path).output()?;
    assert_eq!(output.status.code(), Some(1), "nothing was built");
    Ok([&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat())
}

#[test]
fn a_nightly_with_rust_src_and_bpf_linker_is_tried_first() {
    let with = said(true).unwrap();
    let asked = with.lines().find(|line| line.starts_with("asked: ")).unwrap_or_default();
    assert!(asked.starts_with("asked: +nightly build "), "{with}");
    assert!(asked.contains(" -Z build-std=core --target bpfel-unknown-none "), "{with}");
    assert!(asked.ends_with(", "), "its own compiler: {with}");
    assert!(with.contains("the nightly toolchain did not build the kernel programs"), "{with}");
    assert!(with.contains("rustup toolchain install nightly --component rust-src"), "{with}");

    let without = said(false).unwrap();
    assert!(!without.contains("asked: "), "{without}");
    assert!(without.contains("no toolchain for the kernel programs"), "{without}");
}

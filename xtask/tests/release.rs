//! `cargo xtask release` where it may not go on.

use std::io;
use std::process::Command;

fn release(arguments: &[&str]) -> io::Result<(Option<i32>, String)> {
    let output = Command::new(env!("CARGO_BIN_EXE_xtask")).arg("release").args(arguments).output()?;
    let said = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat();
    Ok((output.status.code(), said))
}

#[test]
fn without_dry_run_nothing_is_built_or_published() {
    let (code, said) = release(&[]).unwrap();
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("publishes nothing") && said.contains("give --dry-run"), "{said}");
    assert!(!said.contains("==>"), "{said}");
}

#[test]
fn platforms_that_nobody_builds_for_are_refused() {
    let (code, said) = release(&["--dry-run", "--platform", "riscv64"]).unwrap();
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("amd64") && said.contains("arm64"), "{said}");
}

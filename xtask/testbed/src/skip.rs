//! Marks a test as skipped, which libtest cannot do, and says whether counts are full.

use std::env;
use std::io::{self, Write as _, stdout};

/// Says that a test does not run, and why, in the words that `cargo xtask test` counts.
///
/// # Errors
/// Where nobody hears it.
pub fn skipped(test: &str, why: &str) -> io::Result<()> {
    // Not by a macro that libtest keeps back where a test passes.
    writeln!(stdout(), "skipped: {test}: {why}")
}

/// Whether counts are full, as `cargo xtask test --full` asks by `CTRLMESH_TEST_FULL`.
pub fn is_full() -> bool {
    env::var_os("CTRLMESH_TEST_FULL").is_some()
}

//! Marks a test as skipped, which libtest cannot do.

use std::io::{self, Write as _, stdout};

/// Says that a test does not run, and why, in the words that `cargo xtask test` counts.
///
/// # Errors
/// Where nobody hears it.
pub fn skipped(test: &str, why: &str) -> io::Result<()> {
    // Not by a macro that libtest keeps back where a test passes.
    writeln!(stdout(), "skipped: {test}: {why}")
}

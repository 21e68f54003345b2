//! Prints long steps, with their expected and their measured time.

use std::io::{Write as _, stderr};
use std::time::{Duration, Instant};

use anyhow::Result;

/// Prints a line on standard error.
pub(crate) fn say(text: &str) {
    // Where nobody can read it, the work goes on.
    drop(writeln!(stderr(), "{text}"));
}

/// Does what takes about as long as `about` on two cores.
///
/// # Errors
/// Those of `work`.
pub(crate) fn step<T>(what: &str, about: Duration, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    say(&format!("==> {what} (about {})", spoken(about)));
    let done = work()?;
    say(&format!("    {what}: done in {}", spoken(start.elapsed())));
    Ok(done)
}

/// A time in minutes and seconds.
fn spoken(time: Duration) -> String {
    let seconds = time.as_secs();
    match (seconds / 60, seconds % 60) {
        (0, seconds) => format!("{seconds} s"),
        (minutes, 0) => format!("{minutes} min"),
        (minutes, seconds) => format!("{minutes} min {seconds} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_said_in_minutes_and_seconds() {
        let spoken = [5, 60, 95].map(|seconds| spoken(Duration::from_secs(seconds)));
        assert_eq!(spoken, ["5 s", "1 min", "1 min 35 s"]);
    }
}

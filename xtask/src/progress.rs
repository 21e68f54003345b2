//! Says what takes long, before how long that may be, and meanwhile how far it is.

use std::io::{IsTerminal as _, Write as _, stderr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;

/// How wide a bar is, and how often it is painted.
const BAR: usize = 24;
const PAINT_EVERY: Duration = Duration::from_millis(500);

/// Takes a painted line away.
const ERASE: &str = "\r\x1b[K";

/// Says something to the person who waits.
pub(crate) fn say(text: &str) {
    // Where nobody can hear it, the work goes on.
    drop(writeln!(stderr(), "{text}"));
}

/// Does what takes long, about as long as `about` on two cores; on a terminal a bar is painted below what it prints.
///
/// # Errors
/// Those of `work`.
pub(crate) fn step(what: &str, about: Duration, work: impl FnOnce() -> Result<()>) -> Result<()> {
    let start = Instant::now();
    say(&format!("==> {what} (about {})", spoken(about)));
    let over = AtomicBool::new(false);
    let result = thread::scope(|scope| {
        let painter = stderr().is_terminal().then(|| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    paint(&line(start.elapsed(), about));
                    thread::park_timeout(PAINT_EVERY);
                }
                paint(ERASE);
            })
        });
        let result = work();
        over.store(true, Ordering::Relaxed);
        if let Some(painter) = painter {
            painter.thread().unpark();
        }
        result
    });
    if result.is_ok() {
        say(&format!("    done in {}", spoken(start.elapsed())));
    }
    result
}

/// A bar of `width` signs that says how far something is whose length is only estimated: `done` is 1 when the estimate is
/// over. It is never full before the end.
pub fn bar(done: f64, width: usize) -> String {
    // Nine tenths when the estimate is over, and on from there ever more slowly.
    let part = if done < 1.0 { done * 0.9 } else { 1.0 - 0.1 / done };
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "between 0 and the width of a line"
    )]
    let full = (part.clamp(0.0, 1.0) * width as f64) as usize;
    format!("[{}{}]", "#".repeat(full), ".".repeat(width - full))
}

/// A time as one says it.
pub fn spoken(time: Duration) -> String {
    let seconds = time.as_secs();
    match (seconds / 60, seconds % 60) {
        (0, seconds) => format!("{seconds} s"),
        (minutes, 0) => format!("{minutes} min"),
        (minutes, seconds) => format!("{minutes} min {seconds} s"),
    }
}

fn line(taken: Duration, about: Duration) -> String {
    let bar = bar(taken.as_secs_f64() / about.as_secs_f64().max(1.0), BAR);
    format!("{ERASE}    {bar} {} of about {}", spoken(taken), spoken(about))
}

fn paint(text: &str) {
    let mut out = stderr().lock();
    // As above.
    drop(out.write_all(text.as_bytes()).and_then(|()| out.flush()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_grows_and_is_full_only_at_the_end() {
        assert_eq!(bar(0.0, 10), "[..........]");
        assert_eq!(bar(0.5, 10), "[####......]");
        assert_eq!(bar(30.0, 10), "[#########.]");
    }

    #[test]
    fn times_are_said_in_minutes_and_seconds() {
        let spoken = [5, 60, 95].map(|seconds| spoken(Duration::from_secs(seconds)));
        assert_eq!(spoken, ["5 s", "1 min", "1 min 35 s"]);
        let shown = line(Duration::from_secs(30), Duration::from_mins(1));
        assert!(shown.ends_with("] 30 s of about 1 min"), "{shown}");
    }
}

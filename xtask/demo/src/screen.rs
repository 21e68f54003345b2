//! Prints for a person: lines that stay, and below them, on a terminal, something that is painted anew all the time.
//!
//! Plain escape sequences: up, erase, and no wrapping, so that a painted line is one line on any width.

use std::io::{IsTerminal as _, Write as _, stdout};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use ctrlmesh_runtime::sync::lock;
use xtask::progress;

/// How often what is painted is painted anew.
const PAINT_EVERY: Duration = Duration::from_millis(250);

/// What has a terminal cut long lines off, and wrap them.
const CLIP: &str = "\x1b[?7l";
const WRAP: &str = "\x1b[?7h";

/// How wide a bar is.
const BAR: usize = 24;

/// Where it is printed.
#[derive(Debug)]
pub struct Screen {
    terminal: bool,
    canvas: Mutex<Canvas>,
}

/// Has a terminal wrap lines again, as whoever painted there and was killed amid it may not have done.
pub fn restore() {
    if stdout().is_terminal() {
        write(WRAP);
    }
}

/// What is painted below the lines that stay.
#[derive(Debug, Default)]
struct Canvas {
    painted: String,
}

// === impl Screen ===

impl Screen {
    /// Standard output; nothing is painted where that is no terminal, or `live` says that nobody looks.
    pub fn stdout(live: bool) -> Self {
        Self { terminal: live && stdout().is_terminal(), canvas: Mutex::default() }
    }

    /// Prints lines that stay.
    pub fn say(&self, text: &str) {
        self.canvas().say(text);
    }

    /// Paints `text` in place of what was painted before.
    pub fn paint(&self, text: &str) {
        if self.terminal {
            self.canvas().paint(text);
        }
    }

    /// Does `work`; meanwhile `picture` is painted.
    pub fn during<T>(&self, picture: impl Fn() -> String + Sync, work: impl FnOnce() -> T) -> T {
        if !self.terminal {
            return work();
        }
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let painter = scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    self.paint(&picture());
                    thread::park_timeout(PAINT_EVERY);
                }
            });
            let result = work();
            over.store(true, Ordering::Relaxed);
            painter.thread().unpark();
            result
        })
    }

    /// Does what takes about as long as `estimate`, with a bar; says before how long that may be, and after how long it was.
    ///
    /// # Errors
    /// Those of `work`.
    pub fn phase<T, E>(
        &self,
        what: &str,
        estimate: Duration,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let start = Instant::now();
        let about = estimate.as_secs();
        if !self.terminal {
            self.say(&format!("==> {what} (about {about} s)"));
        }
        let picture = || {
            let taken = start.elapsed();
            let bar = progress::bar(taken.as_secs_f64() / estimate.as_secs_f64(), BAR);
            format!("    {bar} {what}: {} s of about {about} s\n", taken.as_secs())
        };
        let result = self.during(picture, work);
        self.paint("");
        let end = if result.is_ok() { "" } else { "failed after " };
        self.say(&format!("    {what}: {end}{:.1} s", start.elapsed().as_secs_f64()));
        result
    }

    fn canvas(&self) -> MutexGuard<'_, Canvas> {
        lock(&self.canvas)
    }
}

// === impl Canvas ===

impl Canvas {
    fn say(&self, text: &str) {
        write(&format!("{}{text}\n{}", erase(&self.painted), clipped(&self.painted)));
    }

    fn paint(&mut self, text: &str) {
        write(&format!("{}{}", erase(&self.painted), clipped(text)));
        text.clone_into(&mut self.painted);
    }
}

fn write(text: &str) {
    let mut out = stdout().lock();
    // Where nobody can see it, the work goes on.
    drop(out.write_all(text.as_bytes()).and_then(|()| out.flush()));
}

/// What takes away what was painted: the cursor is below it.
fn erase(painted: &str) -> String {
    match painted.lines().count() {
        0 => String::new(),
        lines => format!("\x1b[{lines}A\x1b[J"),
    }
}

fn clipped(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("{CLIP}{text}{WRAP}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_lines_are_erased_as_were_painted() {
        assert_eq!(erase(""), "");
        assert_eq!(erase("a\nb\n"), "\x1b[2A\x1b[J");
        assert!(clipped("a\n").starts_with("\x1b[?7l"));
    }
}

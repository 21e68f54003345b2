//! Waits for a state, with a deadline.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

/// How long is waited from one look to the next, at least and at most: as long as the look took. Where it is kubectl
/// that looks, it would keep a processor busy that what is waited for needs.
const SHORTEST: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(1);

/// Waits for something to be there, for at most a minute.
///
/// # Errors
/// Where it cannot be looked, or nothing comes.
pub fn until<T>(what: &str, look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    until_within(Duration::from_mins(1), what, look)
}

/// Waits for something to be there, for at most so long.
///
/// # Errors
/// Where it cannot be looked, or nothing comes.
pub fn until_within<T>(most: Duration, what: &str, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + most;
    loop {
        let began = Instant::now();
        if let Some(found) = look()? {
            return Ok(found);
        }
        ensure!(Instant::now() < deadline, "waited in vain for {what}");
        thread::sleep(began.elapsed().clamp(SHORTEST, LONGEST));
    }
}

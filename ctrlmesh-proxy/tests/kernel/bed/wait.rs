//! Waits for what comes about by itself.

use std::time::{Duration, Instant};
use std::{fs, thread};

use super::ClientReport;

/// How long anything may take before the test gives up; nothing waits that long when it works.
pub(super) const PATIENCE: Duration = Duration::from_mins(1);

/// Connects until the client sees what it should.
pub(crate) fn until_seen(what: &str, connect: impl Fn() -> ClientReport, expected: impl Fn(&ClientReport) -> bool) {
    let start = Instant::now();
    loop {
        let seen = connect();
        if expected(&seen) {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "waited too long until {what}: {seen:?}");
    }
}

/// Waits until a process waits for the lock of a folder.
pub(crate) fn waits_for_lock(pid: u32) {
    let pid = pid.to_string();
    until("it waits for the lock", || {
        let locks = fs::read_to_string("/proc/locks").unwrap();
        locks
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>())
            .any(|lock| lock.contains(&"->") && lock.contains(&"FLOCK") && lock.contains(&pid.as_str()))
    });
}

/// Waits for a condition.
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "waited too long until {what}");
        thread::yield_now();
    }
}

//! Ends the processes that the command leaves running in its cgroup.
//!
//! They are asked to, while the proxy still serves, and killed where that takes too long.

use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::unistd::Pid;
use tracing::warn;

/// How long it may take to end by itself: perhaps it was asked to by the command.
const MOMENT: Duration = Duration::from_secs(1);

/// How long it may take to end when it is asked to.
const GRACE: Duration = Duration::from_secs(3);

/// How long the kernel may take to end it.
const KILLED: Duration = Duration::from_secs(5);

/// How often is looked.
const STEP: Duration = Duration::from_millis(10);

/// Ends `processes`, by signals that `send` sends to all of them; where there are none, nobody waits.
pub(crate) fn end(processes: impl Fn() -> Vec<Pid>, send: impl Fn(Signal)) {
    if are_gone_within(MOMENT, &processes) {
        return;
    }
    warn!("the command left {} processes, which end with it", processes().len());
    for (signal, time) in [(Signal::SIGTERM, GRACE), (Signal::SIGKILL, KILLED)] {
        send(signal);
        if are_gone_within(time, &processes) {
            return;
        }
    }
}

fn are_gone_within(time: Duration, processes: impl Fn() -> Vec<Pid>) -> bool {
    let deadline = Instant::now() + time;
    while !processes().is_empty() {
        if Instant::now() > deadline {
            return false;
        }
        thread::sleep(STEP);
    }
    true
}

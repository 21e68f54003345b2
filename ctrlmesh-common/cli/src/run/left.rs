//! How does what the command leaves running end?
//!
//! It is asked to, while there still is a proxy through which it can say good-bye, and killed where it takes too long.
//! Whoever is told the same goes by what they know it by: its cgroup, or the command's process group.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{self, Signal};
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
pub(super) fn end(processes: impl Fn() -> Vec<Pid>, send: impl Fn(Signal)) {
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

/// Ends what is in a process group; its leader has ended, but is still to be waited for: until then nobody else can get
/// the group's number.
pub(super) fn end_group(leader: Pid) {
    let send = |signal| {
        let _gone = signal::killpg(leader, signal);
    };
    end(|| members(leader), send);
}

/// Who is in a process group and has not ended. Whoever has may be there for long, where nobody buries them.
fn members(group: Pid) -> Vec<Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    processes.map(Pid::from_raw).filter(|process| group_of(*process) == Some(group)).collect()
}

/// The group of a process that has not ended.
fn group_of(process: Pid) -> Option<Pid> {
    let text = fs::read(format!("/proc/{process}/stat")).ok()?;
    // The name before it, in brackets, may be anything.
    let end = text.iter().rposition(|byte| *byte == b')')?;
    let mut fields = str::from_utf8(&text[end + 1..]).ok()?.split_whitespace();
    let state = fields.next()?;
    let group = fields.nth(1)?.parse().ok().map(Pid::from_raw);
    group.filter(|_| !matches!(state, "Z" | "X"))
}

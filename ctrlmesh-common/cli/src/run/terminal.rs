//! Whose is the terminal?
//!
//! The command has a process group of its own, so that Ctrl-C reaches it once and not by way of us as well. Where we are
//! in the foreground, the command is put there; where it stops, so do we, so that the shell takes over.

use std::fs;
use std::fs::File;
use std::io::{self, IsTerminal as _};
use std::os::unix::fs::FileTypeExt as _;

use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{self, Pid};

/// The terminal that controls this process.
#[derive(Debug)]
pub(super) struct Terminal(File);

// === impl Terminal ===

impl Terminal {
    /// The terminal, if there is one.
    pub(super) fn open() -> Option<Self> {
        File::options().read(true).write(true).open("/dev/tty").ok().map(Self)
    }

    /// Whether this process's group is in the foreground.
    pub(super) fn is_ours(&self) -> bool {
        self.is_of(unistd::getpgrp())
    }

    /// Whether a group is in the foreground.
    pub(super) fn is_of(&self, group: Pid) -> bool {
        unistd::tcgetpgrp(&self.0) == Ok(group)
    }

    /// Puts a group into the foreground. Not being there itself must not stop whoever does this.
    pub(super) fn give(&self, group: Pid) {
        let mut stops = SigSet::empty();
        stops.add(Signal::SIGTTOU);
        let _blocked = stops.thread_block();
        // The terminal may be gone by now.
        let _gone = unistd::tcsetpgrp(&self.0, group);
    }
}

/// Whether a shell takes over when our process group stops: somebody of our session, outside the group, who is the
/// parent of somebody in it. The kernel asks the same before it lets Ctrl-Z stop anybody.
pub(super) fn is_watched() -> bool {
    let (group, session) = (unistd::getpgrp(), unistd::getsid(None));
    let mut parent = unistd::getppid();
    while unistd::getpgid(Some(parent)) == Ok(group) {
        let Some(next) = parent_of(parent) else { return false };
        parent = next;
    }
    parent.as_raw() > 0 && unistd::getsid(Some(parent)) == session
}

fn parent_of(process: Pid) -> Option<Pid> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    line.trim().parse().ok().map(Pid::from_raw).filter(|parent| parent.as_raw() > 0)
}

/// Whether the command reads the terminal from the start. In a pipeline another program may be the one that does, so
/// there the command gets it when it asks.
pub(super) fn is_wanted() -> bool {
    io::stdin().is_terminal() && !is_pipe("/dev/stdout")
}

fn is_pipe(path: &str) -> bool {
    fs::metadata(path).is_ok_and(|about| about.file_type().is_fifo())
}

//! How is the command started, told what we are told, and waited for?

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use nix::errno::Errno;
use nix::sys::signal;
use nix::sys::signal::Signal;
use nix::sys::wait::{self, Id, WaitPidFlag, WaitStatus};
use nix::unistd::Pid;

use super::SIGNALLED;
use super::child::Preparation;
use super::left;
use super::signals::Event;
use super::terminal::{self, Terminal};

/// The command, running.
#[derive(Debug)]
pub(super) struct Supervised {
    /// The process, and its group.
    pid: Pid,
    terminal: Option<Terminal>,
    /// It was given the terminal, and gets it again whenever we have it.
    has_terminal: bool,
}

/// How the command is to be started.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) command: Vec<OsString>,
    /// Variables that it sees otherwise than we do; those without a value not at all.
    pub(super) variables: Vec<(&'static str, Option<OsString>)>,
    pub(super) preparation: Preparation,
}

// === impl Supervised ===

impl Supervised {
    /// Starts the command.
    pub(super) fn start(mut plan: Plan) -> io::Result<Self> {
        let terminal = Terminal::open();
        let has_terminal =
            terminal::is_wanted() && terminal.as_ref().is_some_and(Terminal::is_ours);
        plan.preparation.foreground = has_terminal;
        // This program again, whatever its file is called by now: it becomes the command.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("ctrlmesh").args(plan.preparation.arguments()).args(plan.command);
        for (name, value) in plan.variables {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let child = command.process_group(0).spawn()?;
        let pid = Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?);
        Ok(Self { pid, terminal, has_terminal })
    }

    /// Does what an event asks for; the command's exit code once it has ended.
    pub(super) fn handle(&mut self, event: &Event) -> Option<i32> {
        match event {
            Event::Child => self.look(),
            Event::Signal { signal: Signal::SIGCONT, .. } => {
                self.resume();
                None
            }
            Event::Signal { signal, from_terminal } => {
                // Whoever sends one of the terminal's own means what a terminal does: `go run` waits for its program to hear it.
                let to_all = *from_terminal || matches!(signal, Signal::SIGINT | Signal::SIGQUIT);
                send(if to_all { group(self.pid) } else { self.pid }, *signal);
                None
            }
            Event::Proxy(_) | Event::Resolved(_) => None,
        }
    }

    /// Takes every news of the command. Its end is only looked at: until it is waited for, its process group cannot become
    /// another's.
    fn look(&mut self) -> Option<i32> {
        loop {
            match self.news(WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) {
                Ok(WaitStatus::Exited(_, code)) => return Some(self.ended(code)),
                Ok(WaitStatus::Signaled(_, signal, _)) => {
                    return Some(self.ended(SIGNALLED + signal as i32));
                }
                // By a real-time signal, whose number nix does not say.
                Err(Errno::EINVAL) => return Some(self.ended(SIGNALLED)),
                _ => {}
            }
            match self.news(WaitPidFlag::WSTOPPED) {
                Ok(WaitStatus::Stopped(_, signal)) => self.stopped(signal),
                _ => return None,
            }
        }
    }

    fn news(&self, flags: WaitPidFlag) -> Result<WaitStatus, Errno> {
        wait::waitid(Id::Pid(self.pid), flags | WaitPidFlag::WNOHANG)
    }

    /// Ends what the command, which has ended, left running in its process group.
    pub(super) fn sweep(self) {
        left::end_group(self.pid);
        let _waited = wait::waitpid(self.pid, Some(WaitPidFlag::WNOHANG));
    }

    fn ended(&self, code: i32) -> i32 {
        if let Some(terminal) = self.terminal.as_ref().filter(|it| it.is_of(self.pid)) {
            terminal.give(nix::unistd::getpgrp());
        }
        code
    }

    /// The command stopped: it wants the terminal and can have it, or whoever is at the terminal wants it to pause.
    fn stopped(&mut self, signal: Signal) {
        let Some(terminal) = &self.terminal else { return };
        let asks = matches!(signal, Signal::SIGTTIN | Signal::SIGTTOU);
        if asks && terminal.is_ours() {
            self.has_terminal = true;
            return self.resume();
        }
        if !asks && signal != Signal::SIGTSTP {
            return;
        }
        if !terminal::is_watched() {
            // Nobody would ever wake us.
            return self.resume();
        }
        if terminal.is_of(self.pid) {
            terminal.give(nix::unistd::getpgrp());
        }
        // The shell sees its job stop, whoever else is part of it, and wakes it when it goes on.
        send(Pid::from_raw(0), Signal::SIGSTOP);
    }

    /// Goes on after a pause, in the foreground if we are there.
    fn resume(&self) {
        let ours = self.terminal.as_ref().filter(|terminal| terminal.is_ours());
        if let Some(terminal) = ours.filter(|_| self.has_terminal) {
            terminal.give(self.pid);
        }
        send(group(self.pid), Signal::SIGCONT);
    }
}

fn send(to: Pid, signal: Signal) {
    // It may have ended already: then it is about to be noticed.
    let _ended = signal::kill(to, signal);
}

/// Everybody in the group of this process.
fn group(leader: Pid) -> Pid {
    Pid::from_raw(-leader.as_raw())
}

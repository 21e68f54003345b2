//! Starts the command, forwards signals to it, and waits for its end.
//!
//! The command stays in this process group, as it would with `env` or `nice`. What a terminal sends to the group
//! reaches it without us.

pub(crate) mod child;
pub(crate) mod program;

use std::ffi::OsString;
use std::io;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus};

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;

use crate::run::OWN_FAILURE;
use crate::run::SIGNALLED;
use crate::run::command::child::Preparation;
use crate::run::signals::{self, Event, Events};

/// The command, running.
#[derive(Debug)]
pub(crate) struct RunningCommand(Child);

/// How the command is to be started.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) command: Vec<OsString>,
    /// Variables to set, and those without a value to remove.
    pub(crate) variables: Vec<(&'static str, Option<OsString>)>,
    pub(crate) preparation: Preparation,
}

impl RunningCommand {
    /// Starts the process that becomes the command. It waits for [`Event::Started`] before it does.
    pub(crate) fn start(plan: Plan, events: &Events) -> io::Result<Self> {
        // This program again, whatever its file is called by now: it becomes the command.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("ctrlmesh").args(plan.preparation.arguments()).args(plan.command);
        for (name, value) in plan.variables {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let running = command.spawn().map(Self)?;
        events.command_started();
        Ok(running)
    }

    /// Handles an event; the command's exit code once it has ended.
    pub(crate) fn handle(&mut self, event: &Event) -> Option<i32> {
        match event {
            Event::Child => self.0.try_wait().transpose()?.map_or(Some(OWN_FAILURE.into()), code),
            Event::Signal { signal, reached_command: false } => {
                self.send(*signal);
                None
            }
            Event::Started => {
                self.send(signals::START);
                None
            }
            Event::Signal { .. } | Event::Proxy(_) | Event::Resolved(_) => None,
        }
    }

    fn send(&self, signal: Signal) {
        let pid = i32::try_from(self.0.id()).map(Pid::from_raw);
        // It may have ended already: then its end is about to be noticed.
        let _ended = pid.map(|pid| signal::kill(pid, signal));
    }
}

/// As shells say it.
fn code(status: ExitStatus) -> Option<i32> {
    status.code().or_else(|| Some(SIGNALLED + status.signal()?))
}

//! Delivers signals, the command's end and news of the proxy by one channel.
//!
//! Signals are read from a descriptor and interrupt nothing. Dispositions stay as they were inherited, so that the
//! command inherits them (`nohup`).

use std::io;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::sync::mpsc;
use std::thread;

use nix::errno::Errno;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::SignalFd;

use crate::run::OWN_FAILURE;
use crate::run::SIGNALLED;
use crate::run::error::RunError;

/// What the kernel says of a signal that a terminal sends, not a process.
const SENT_BY_KERNEL: i32 = 0x80;

/// Signals that are forwarded to the command.
const FORWARDED: [Signal; 7] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGWINCH,
];

/// Signals that end a process that does not handle them.
const ENDING: [Signal; 4] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM];

/// What happened.
#[derive(Debug)]
pub(crate) enum Event {
    /// A signal for the command.
    Signal {
        signal: Signal,
        /// A terminal sent it, to a whole process group.
        from_terminal: bool,
    },
    /// A child has stopped, continued or ended.
    Child,
    /// The proxy serves, or cannot.
    Proxy(Result<(), Box<RunError>>),
    /// The API server's name leads here, or cannot be looked up.
    Resolved(io::Result<Vec<SocketAddr>>),
}

/// Where events come out, and a way in for more.
#[derive(Debug)]
pub(crate) struct Events {
    pub(crate) receiver: mpsc::Receiver<Event>,
    pub(crate) sender: mpsc::Sender<Event>,
}

impl Events {
    /// The next event; the exit code, where that is a signal which ends a process.
    pub(crate) fn next(&self) -> ControlFlow<i32, Event> {
        match self.receiver.recv() {
            Ok(Event::Signal { signal, .. }) if ends(signal) => ControlFlow::Break(SIGNALLED + signal as i32),
            Ok(event) => ControlFlow::Continue(event),
            // We hold a sender ourselves.
            Err(_) => ControlFlow::Break(i32::from(OWN_FAILURE)),
        }
    }
}

/// Begins to read signals. To be called before any other thread is there.
pub(crate) fn events() -> Result<Events, Errno> {
    blocked().thread_block()?;
    let signals = SignalFd::new(&blocked())?;
    let (sender, receiver) = mpsc::channel();
    let to = sender.clone();
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || read(&signals, &to))
        .map_err(|error: io::Error| Errno::from_raw(error.raw_os_error().unwrap_or_default()))?;
    Ok(Events { receiver, sender })
}

/// Undoes in a child what [`events`] did to signals: a command would inherit it.
pub(crate) fn release() -> Result<(), Errno> {
    blocked().thread_unblock()
}

/// Whether a signal is meant to end whoever gets it.
fn ends(signal: Signal) -> bool {
    ENDING.contains(&signal)
}

fn blocked() -> SigSet {
    FORWARDED.into_iter().chain([Signal::SIGCHLD]).collect()
}

fn read(signals: &SignalFd, to: &mpsc::Sender<Event>) {
    while let Ok(Some(info)) = signals.read_signal() {
        let number = i32::try_from(info.ssi_signo).unwrap_or_default();
        let event = match Signal::try_from(number) {
            Ok(Signal::SIGCHLD) => Event::Child,
            Ok(signal) => Event::Signal { signal, from_terminal: info.ssi_code == SENT_BY_KERNEL },
            Err(_) => continue,
        };
        if to.send(event).is_err() {
            return;
        }
    }
}

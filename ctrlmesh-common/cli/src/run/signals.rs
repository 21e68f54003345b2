//! Delivers signals, the command's end and news of the proxy by one channel.
//!
//! Signals are read from a descriptor and interrupt nothing. Dispositions stay as they were inherited, so that the
//! command inherits them (`nohup`).

use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, mpsc};
use std::{fs, io, thread};

use ctrlmesh_runtime::sync::lock;
use nix::errno::Errno;
use nix::poll::{self, PollFd, PollFlags, PollTimeout};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

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
        /// The command got it, too: a terminal sent it to the whole process group after the command had been started.
        reached_command: bool,
    },
    /// The command's process was started; every signal that came before is delivered before this event.
    Started,
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
    reader: Arc<Reader>,
}

/// Reads signals and sends them on as events.
#[derive(Debug)]
struct Reader {
    signals: SignalFd,
    /// Whether the command's process was started. Held while signals are read and sent.
    started: Mutex<bool>,
    events: mpsc::Sender<Event>,
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

    /// Says that the command's process was started. What a terminal sent before has not reached the command.
    pub(crate) fn command_started(&self) {
        let mut started = lock(&self.reader.started);
        let _ended = self.reader.send_pending(false);
        *started = true;
        drop(started);
        // We hold the receiver ourselves.
        let _sent = self.sender.send(Event::Started);
    }
}

impl Reader {
    /// Sends signals as they come, until nobody listens.
    fn follow(&self) {
        loop {
            let mut readable = [PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
            if !matches!(poll::poll(&mut readable, PollTimeout::NONE), Ok(_) | Err(Errno::EINTR)) {
                return;
            }
            let started = lock(&self.started);
            if self.send_pending(*started).is_err() {
                return;
            }
        }
    }

    /// Sends the signals that are pending now.
    fn send_pending(&self, started: bool) -> Result<(), mpsc::SendError<Event>> {
        while let Ok(Some(info)) = self.signals.read_signal() {
            let number = i32::try_from(info.ssi_signo).unwrap_or_default();
            let event = match Signal::try_from(number) {
                Ok(Signal::SIGCHLD) => Event::Child,
                Ok(signal) => Event::Signal { signal, reached_command: started && info.ssi_code == SENT_BY_KERNEL },
                Err(_) => continue,
            };
            self.events.send(event)?;
        }
        Ok(())
    }
}

/// Begins to read signals. To be called before any other thread is there.
pub(crate) fn events() -> Result<Events, Errno> {
    blocked().thread_block()?;
    let signals = SignalFd::with_flags(&blocked(), SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
    let (sender, receiver) = mpsc::channel();
    let reader = Arc::new(Reader { signals, started: Mutex::new(false), events: sender.clone() });
    let following = reader.clone();
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || following.follow())
        .map_err(|error: io::Error| Errno::from_raw(error.raw_os_error().unwrap_or_default()))?;
    Ok(Events { receiver, sender, reader })
}

/// Lets the command's process go on; see [`wait_for_start`].
pub(crate) const START: Signal = Signal::SIGCHLD;

/// Waits, in the command's process, until the parent has forwarded what came before that process was there. Signals
/// stay pending meanwhile: one that the terminal sent, too, comes once.
pub(crate) fn wait_for_start() -> Result<(), Errno> {
    let mut set = SigSet::empty();
    set.add(START);
    set.wait().map(drop)
}

/// Undoes in a child what [`events`] did to signals: a command would inherit it.
pub(crate) fn release() -> Result<(), Errno> {
    blocked().thread_unblock()
}

/// Whether a signal ends this process, unless the process handles it.
fn ends(signal: Signal) -> bool {
    ENDING.contains(&signal) && !is_ignored(signal)
}

/// Whether this process was started with a signal ignored, as by `nohup` or in a shell's background.
fn is_ignored(signal: Signal) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default();
    mask >> (signal as i32 - 1) & 1 == 1
}

fn blocked() -> SigSet {
    FORWARDED.into_iter().chain([Signal::SIGCHLD]).collect()
}

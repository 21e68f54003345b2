//! Waits for SIGTERM or SIGINT.

use std::io;

use tokio::signal::unix::{self, Signal, SignalKind};

#[derive(Debug)]
pub struct Termination {
    terminate: Signal,
    interrupt: Signal,
}

impl Termination {
    /// Takes both signals over from here on, so that neither ends the process by itself.
    ///
    /// # Errors
    /// If the operating system does not deliver signals.
    pub fn listen() -> io::Result<Self> {
        Ok(Self {
            terminate: unix::signal(SignalKind::terminate())?,
            interrupt: unix::signal(SignalKind::interrupt())?,
        })
    }

    /// Completes at the next signal.
    pub async fn requested(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

//! Who is let in, and until when must it have proved itself?
//!
//! Every connection is TLS. Of those that have not proved themselves yet there are few at once, fewer from one address,
//! and each has little time: who holds ten thousand connections open and says nothing keeps nobody else out.

use std::collections::HashMap;
use std::future::Future;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::time;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tracing::debug;

use crate::drain::Drain;
use crate::metrics::{Refusals, Refused};
use crate::telemetry;

/// How long TLS may take.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// How long to wait when the process has no file descriptor left for a connection.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);

/// How many there may be.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections.
    pub connections: usize,
    /// Connections that have not proved themselves.
    pub unproven: usize,
    /// The same, from one address.
    pub unproven_of_one: usize,
}

/// A place where connections are accepted.
#[derive(Clone, Debug)]
pub struct Listen {
    limits: Limits,
    state: Arc<State>,
    refusals: Refusals,
}

#[derive(Debug, Default)]
struct State {
    connections: AtomicUsize,
    unproven: Mutex<HashMap<IpAddr, usize>>,
}

/// A connection's right to be there; it ends with this.
#[derive(Debug)]
pub struct Admission {
    state: Arc<State>,
    address: IpAddr,
    proven: AtomicBool,
}

// === impl Listen ===

impl Listen {
    /// Nobody is there yet.
    pub fn new(limits: Limits, refusals: Refusals) -> Self {
        Self { limits, state: Arc::default(), refusals }
    }

    /// Accepts connections until shutdown, and hands each to `serve` after its TLS handshake.
    pub async fn run<S, F>(self, listener: TcpListener, tls: TlsAcceptor, drain: Drain, serve: S)
    where
        S: Fn(TlsStream<TcpStream>, Arc<Admission>) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        loop {
            let accepted = tokio::select! {
                () = drain.started() => return,
                accepted = listener.accept() => accepted,
            };
            let Ok((stream, peer)) = accepted else {
                time::sleep(EXHAUSTED_PAUSE).await;
                continue;
            };
            let Some(admission) = self.admit(peer.ip()) else {
                self.refusals.count(Refused::TooMany);
                continue;
            };
            let (tls, serve, refusals) = (tls.clone(), serve.clone(), self.refusals.clone());
            drain.spawn(async move {
                if let Some(stream) = handshake(stream, &tls, &refusals).await {
                    serve(stream, Arc::new(admission)).await;
                }
            });
        }
    }

    fn admit(&self, address: IpAddr) -> Option<Admission> {
        let state = &self.state;
        if state.connections.load(Ordering::Relaxed) >= self.limits.connections {
            return None;
        }
        let mut unproven = state.unproven.lock().unwrap_or_else(PoisonError::into_inner);
        let all: usize = unproven.values().sum();
        let of_one = unproven.get(&address).copied().unwrap_or_default();
        if all >= self.limits.unproven || of_one >= self.limits.unproven_of_one {
            return None;
        }
        unproven.insert(address, of_one + 1);
        drop(unproven);
        state.connections.fetch_add(1, Ordering::Relaxed);
        Some(Admission { state: state.clone(), address, proven: AtomicBool::new(false) })
    }
}

async fn handshake(
    stream: TcpStream,
    tls: &TlsAcceptor,
    refusals: &Refusals,
) -> Option<TlsStream<TcpStream>> {
    // An answer that waits for more to send would only be late.
    if stream.set_nodelay(true).is_err() {
        return None;
    }
    match time::timeout(HANDSHAKE, tls.accept(stream)).await {
        Ok(Ok(stream)) => Some(stream),
        Ok(Err(error)) => {
            debug!(error = telemetry::chain(&error), "TLS failed");
            refusals.count(Refused::Tls);
            None
        }
        Err(_elapsed) => {
            refusals.count(Refused::Slow);
            None
        }
    }
}

// === impl Admission ===

impl Admission {
    /// The connection has proved itself.
    pub fn prove(&self) {
        if !self.proven.swap(true, Ordering::Relaxed) {
            self.state.proved(self.address);
        }
    }

    /// Whether it has.
    pub fn is_proven(&self) -> bool {
        self.proven.load(Ordering::Relaxed)
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        if !self.is_proven() {
            self.state.proved(self.address);
        }
        self.state.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

// === impl State ===

impl State {
    /// One less of `address` that has not.
    fn proved(&self, address: IpAddr) {
        let mut unproven = self.unproven.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = unproven.get_mut(&address) {
            *count -= 1;
            if *count == 0 {
                unproven.remove(&address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn who_has_not_proved_itself_keeps_nobody_else_out() {
        let limits = Limits { connections: 6, unproven: 4, unproven_of_one: 2 };
        let listen = Listen::new(limits, Refusals::register(&mut Registry::default()));
        let [attacker, proxy]: [IpAddr; 2] = [[192, 0, 2, 1].into(), [192, 0, 2, 2].into()];
        let held: Vec<_> = std::iter::from_fn(|| listen.admit(attacker)).take(9).collect();
        assert_eq!(held.len(), 2);
        let honest = listen.admit(proxy).unwrap();
        honest.prove();
        honest.prove();
        let more: Vec<_> = std::iter::from_fn(|| listen.admit(proxy)).take(9).collect();
        assert_eq!(more.len(), 2, "four in all have not");
        drop(held);
        more[0].prove();
        let rest: Vec<_> = std::iter::from_fn(|| listen.admit(attacker)).take(9).collect();
        assert_eq!(rest.len(), 2);
        assert!(listen.admit(proxy).is_some(), "the sixth");
        drop((honest, more, rest));
        assert!(listen.state.unproven.lock().unwrap().is_empty());
        assert_eq!(listen.state.connections.load(Ordering::Relaxed), 0);
    }
}

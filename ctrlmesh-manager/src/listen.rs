//! Accepts TLS connections, and limits how many there are.
//!
//! Unproven connections, those without an authenticated call, are few: in all, from one address, and for a short time.
//! So a client that opens ten thousand silent connections keeps nobody out.
//!
//! Connections that come together wait before any work is spent on them. When there is no room, the address with the
//! most connections loses its oldest one to an address with fewer. That holds for proven ones, too: the API server
//! proves nothing when it calls our webhooks, and must not be shut out. One pod has few connections, whatever it
//! proves.

use std::future::Future;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use ctrlmesh_runtime::sync::lock;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::time;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::drain::Drain;
use crate::metrics::{Refusals, Refused};
use crate::telemetry;

mod connection_table;

use connection_table::ConnectionTable;

const HANDSHAKE: Duration = Duration::from_secs(5);

/// Pause when the process has no free file descriptor.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub connections: usize,
    /// Connections without an authenticated call.
    pub unproven: usize,
    /// Unproven connections of one address.
    pub unproven_of_one: usize,
}

#[derive(Clone, Debug)]
pub struct Listener {
    limits: Limits,
    state: Arc<State>,
    refusals: Refusals,
}

#[derive(Debug, Default)]
struct State {
    table: Mutex<ConnectionTable>,
    /// Notified when an unproven connection was proven or has ended.
    freed: Notify,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NoRoom {
    /// There are as many unproven connections as allowed, and no address has more than one: this connection waits,
    /// and so do those behind it in the kernel's queue.
    Wait,
    /// The address has too many connections already.
    Refuse,
}

/// The permit of one connection; dropping it frees the place.
#[derive(Debug)]
pub struct ConnectionPermit {
    state: Arc<State>,
    address: IpAddr,
    number: u64,
    leave: CancellationToken,
    pod: Mutex<Option<String>>,
}

impl Listener {
    pub fn new(limits: Limits, refusals: Refusals) -> Self {
        Self { limits, state: Arc::default(), refusals }
    }

    /// Accepts connections until the drain starts. Each goes to `serve` after its TLS handshake.
    pub async fn run<S, F>(self, listener: TcpListener, tls: TlsAcceptor, drain: Drain, serve: S)
    where
        S: Fn(TlsStream<TcpStream>, Arc<ConnectionPermit>) -> F + Clone + Send + Sync + 'static,
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
            let admitted = tokio::select! {
                () = drain.started() => return,
                admitted = self.admit(peer.ip()) => admitted,
            };
            let Some(permit) = admitted else {
                self.refusals.count(Refused::TooMany);
                continue;
            };
            let (tls, serve, refusals) = (tls.clone(), serve.clone(), self.refusals.clone());
            drain.spawn(async move {
                let leave = permit.leave.clone();
                let served = async {
                    let handshake = Box::pin(handshake(stream, &tls, &refusals));
                    if let Some(stream) = handshake.await {
                        serve(stream, Arc::new(permit)).await;
                    }
                };
                tokio::select! {
                    () = served => {}
                    // Its place went to another connection.
                    () = leave.cancelled() => refusals.count(Refused::TooMany),
                }
            });
        }
    }

    /// Admits a connection, at once or when there is room.
    async fn admit(&self, address: IpAddr) -> Option<ConnectionPermit> {
        let wait = time::sleep(HANDSHAKE);
        let mut wait = pin!(wait);
        loop {
            // Registered before the check, so that no release is missed.
            let freed = self.state.freed.notified();
            match self.try_admit(address) {
                Ok(permit) => return Some(permit),
                Err(NoRoom::Refuse) => return None,
                Err(NoRoom::Wait) => {}
            }
            tokio::select! {
                () = freed => {}
                () = &mut wait => return None,
            }
        }
    }

    fn try_admit(&self, address: IpAddr) -> Result<ConnectionPermit, NoRoom> {
        let mut table = self.state.lock();
        let own = table.count(address, true);
        if own >= self.limits.unproven_of_one {
            return Err(NoRoom::Refuse);
        }
        if table.total(true) >= self.limits.unproven && !table.give_way(address, true) {
            return Err(if own == 0 { NoRoom::Wait } else { NoRoom::Refuse });
        }
        if table.total(false) >= self.limits.connections && !table.give_way(address, false) {
            return Err(NoRoom::Refuse);
        }
        let (number, leave) = table.take(address);
        drop(table);
        let (state, pod) = (self.state.clone(), Mutex::default());
        Ok(ConnectionPermit { state, address, number, leave, pod })
    }
}

async fn handshake(stream: TcpStream, tls: &TlsAcceptor, refusals: &Refusals) -> Option<TlsStream<TcpStream>> {
    // Nagle's algorithm would only delay answers.
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

impl ConnectionPermit {
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// Marks the connection as proven.
    pub fn prove(&self) {
        self.state.lock().prove(self.address, self.number);
        self.state.freed.notify_one();
    }

    /// Marks the connection as that of the pod with this UID. False where the pod has too many connections.
    pub fn prove_pod(&self, uid: &str) -> bool {
        let mut pod = lock(&self.pod);
        if pod.is_none() {
            if !self.state.lock().take_one_of(uid) {
                return false;
            }
            *pod = Some(uid.to_owned());
        }
        drop(pod);
        self.prove();
        true
    }

    pub fn is_proven(&self) -> bool {
        self.state.lock().is_proven(self.address, self.number)
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let pod = lock(&self.pod).take();
        let mut table = self.state.lock();
        drop(table.remove(self.address, self.number));
        if let Some(pod) = pod {
            table.give_back_one_of(&pod);
        }
        drop(table);
        self.state.freed.notify_one();
    }
}

impl State {
    fn lock(&self) -> MutexGuard<'_, ConnectionTable> {
        lock(&self.table)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use prometheus_client::registry::Registry;
    use tokio::time::Instant;

    use super::*;

    fn listen(limits: Limits) -> Listener {
        Listener::new(limits, Refusals::register(&mut Registry::default()))
    }

    fn address(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    fn is_empty(listen: &Listener) -> bool {
        listen.state.lock().is_empty()
    }

    #[test]
    fn unproven_connections_keep_nobody_else_out() {
        let listen = listen(Limits { connections: 6, unproven: 4, unproven_of_one: 2 });
        let [attacker, proxy] = [address(1), address(2)];
        let held: Vec<_> = std::iter::from_fn(|| listen.try_admit(attacker).ok()).take(9).collect();
        assert_eq!(held.len(), 2);
        let honest = listen.try_admit(proxy).unwrap();
        honest.prove();
        honest.prove();
        let more: Vec<_> = std::iter::from_fn(|| listen.try_admit(proxy).ok()).take(9).collect();
        assert_eq!(more.len(), 2, "four in all have not");
        drop(held);
        more[0].prove();
        let rest: Vec<_> = std::iter::from_fn(|| listen.try_admit(attacker).ok()).take(9).collect();
        assert_eq!(rest.len(), 2);
        assert!(listen.try_admit(proxy).is_ok(), "the sixth");
        drop((honest, more, rest));
        assert!(is_empty(&listen));
    }

    #[test]
    fn the_address_with_most_connections_gives_way() {
        let listen = listen(Limits { connections: 6, unproven: 4, unproven_of_one: 4 });
        let enter = |last| {
            let permit = listen.try_admit(address(last)).ok()?;
            permit.prove();
            Some(permit)
        };
        let greedy: Vec<_> = std::iter::from_fn(|| enter(1)).take(9).collect();
        assert_eq!(greedy.len(), 6, "as long as nobody else asks, it may have all");
        let honest: Vec<_> = std::iter::from_fn(|| enter(2)).take(9).collect();
        assert_eq!(honest.len(), 3, "as many as the other one");
        let cut: Vec<bool> = greedy.iter().map(|one| one.leave.is_cancelled()).collect();
        assert_eq!(cut, [true, true, true, false, false, false]);
        assert!(honest.iter().all(|one| !one.leave.is_cancelled()));
        drop((greedy, honest));
        assert!(is_empty(&listen));
        let silent: Vec<_> = std::iter::from_fn(|| listen.try_admit(address(1)).ok()).take(9).collect();
        let honest = listen.try_admit(address(2)).unwrap();
        assert!(silent[0].leave.is_cancelled() && !honest.leave.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn connections_wait_for_room_in_their_turn() {
        let listen = listen(Limits { connections: 9, unproven: 2, unproven_of_one: 2 });
        let [first, second] = [1, 2].map(|last| listen.try_admit(address(last)).unwrap());
        assert_eq!(listen.try_admit(address(1)).err(), Some(NoRoom::Refuse));
        {
            let mut third = pin!(listen.admit(address(3)));
            assert!(third.as_mut().now_or_never().is_none());
            first.prove();
            let third = third.await.unwrap();
            let mut fourth = pin!(listen.admit(address(4)));
            assert!(fourth.as_mut().now_or_never().is_none());
            drop(third);
            assert!(fourth.await.is_some());
        }
        let _fifth = listen.try_admit(address(5)).unwrap();
        let begun = Instant::now();
        assert!(listen.admit(address(6)).await.is_none(), "nobody waits longer than a client does");
        assert_eq!(begun.elapsed(), HANDSHAKE);
        drop((first, second));
        assert!(listen.admit(address(6)).await.is_some());
    }

    #[test]
    fn one_pod_has_few_connections_whatever_it_proves() {
        let listen = listen(Limits { connections: 100, unproven: 100, unproven_of_one: 100 });
        let enter = |pod: &str| {
            let permit = listen.try_admit(address(1)).unwrap();
            permit.prove_pod(pod).then_some(permit)
        };
        let many: Vec<_> = std::iter::from_fn(|| enter("a")).take(50).collect();
        assert_eq!(many.len(), connection_table::MOST_OF_ONE);
        assert!(many[0].prove_pod("a"), "each has proved itself once and for all");
        let other = enter("b").unwrap();
        drop(many);
        assert!(enter("a").is_some());
        drop(other);
        assert!(is_empty(&listen));
    }
}

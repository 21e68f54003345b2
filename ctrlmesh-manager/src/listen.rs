//! Who is let in, and until when must it have proved itself?
//!
//! Every connection is TLS. Of those that have not proved themselves yet there are few at once, fewer from one address,
//! and each has little time: who holds ten thousand connections open and says nothing keeps nobody else out. Ten thousand
//! that come back together wait for their turn instead, before anything is spent on them: what is begun is to be ended in
//! time. Where there is no room, the address that has the most gives way to the one that has fewer, proven or not: the API server proves
//! nothing when it calls our webhooks, and neither may anybody else shut it out. One pod has few connections, whatever
//! it proves.

use std::future::Future;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

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

mod places;

use places::Places;

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
    places: Mutex<Places>,
    /// Told when one that had not proved itself has, or has gone.
    freed: Notify,
}

/// Why a connection is not let in now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Full {
    /// As many as may be have not proved themselves, none of them of an address that has more: it waits for its turn, and
    /// those behind it in the kernel's queue.
    Waits,
    /// It would be one more of those that keep others out.
    Yields,
}

/// A connection's right to be there; it ends with this.
#[derive(Debug)]
pub struct Admission {
    state: Arc<State>,
    address: IpAddr,
    number: u64,
    leave: CancellationToken,
    pod: Mutex<Option<String>>,
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
            let admitted = tokio::select! {
                () = drain.started() => return,
                admitted = self.admit(peer.ip()) => admitted,
            };
            let Some(admission) = admitted else {
                self.refusals.count(Refused::TooMany);
                continue;
            };
            let (tls, serve, refusals) = (tls.clone(), serve.clone(), self.refusals.clone());
            drain.spawn(async move {
                let leave = admission.leave.clone();
                let served = async {
                    let handshake = Box::pin(handshake(stream, &tls, &refusals));
                    if let Some(stream) = handshake.await {
                        serve(stream, Arc::new(admission)).await;
                    }
                };
                tokio::select! {
                    () = served => {}
                    // It gives way to another.
                    () = leave.cancelled() => refusals.count(Refused::TooMany),
                }
            });
        }
    }

    /// Lets a connection in, at once or when there is room.
    async fn admit(&self, address: IpAddr) -> Option<Admission> {
        let wait = time::sleep(HANDSHAKE);
        let mut wait = pin!(wait);
        loop {
            // Before it is looked: what is free from then on is not overlooked.
            let freed = self.state.freed.notified();
            match self.try_admit(address) {
                Ok(admission) => return Some(admission),
                Err(Full::Yields) => return None,
                Err(Full::Waits) => {}
            }
            tokio::select! {
                () = freed => {}
                () = &mut wait => return None,
            }
        }
    }

    fn try_admit(&self, address: IpAddr) -> Result<Admission, Full> {
        let mut places = self.state.lock();
        let own = places.count(address, true);
        if own >= self.limits.unproven_of_one {
            return Err(Full::Yields);
        }
        if places.total(true) >= self.limits.unproven && !places.give_way(address, true) {
            return Err(if own == 0 { Full::Waits } else { Full::Yields });
        }
        if places.total(false) >= self.limits.connections && !places.give_way(address, false) {
            return Err(Full::Yields);
        }
        let (number, leave) = places.take(address);
        drop(places);
        let (state, pod) = (self.state.clone(), Mutex::default());
        Ok(Admission { state, address, number, leave, pod })
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
    /// From where it comes.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// The connection has proved itself, as far as anybody can here.
    pub fn prove(&self) {
        self.state.lock().prove(self.address, self.number);
        self.state.freed.notify_one();
    }

    /// The connection has proved that it is that of the pod with this UID; false where the pod has too many.
    pub fn prove_pod(&self, uid: &str) -> bool {
        let mut pod = self.pod.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// Whether it has proved itself.
    pub fn is_proven(&self) -> bool {
        self.state.lock().is_proven(self.address, self.number)
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        let pod = self.pod.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let mut places = self.state.lock();
        drop(places.remove(self.address, self.number));
        if let Some(pod) = pod {
            places.give_back_one_of(&pod);
        }
        drop(places);
        self.state.freed.notify_one();
    }
}

// === impl State ===

impl State {
    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use prometheus_client::registry::Registry;
    use tokio::time::Instant;

    use super::*;

    fn listen(limits: Limits) -> Listen {
        Listen::new(limits, Refusals::register(&mut Registry::default()))
    }

    fn address(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    fn is_empty(listen: &Listen) -> bool {
        listen.state.lock().is_empty()
    }

    #[test]
    fn who_has_not_proved_itself_keeps_nobody_else_out() {
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
    fn where_there_is_no_room_the_address_that_has_most_gives_way() {
        let listen = listen(Limits { connections: 6, unproven: 4, unproven_of_one: 4 });
        let enter = |last| {
            let admission = listen.try_admit(address(last)).ok()?;
            admission.prove();
            Some(admission)
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
        let silent: Vec<_> =
            std::iter::from_fn(|| listen.try_admit(address(1)).ok()).take(9).collect();
        let honest = listen.try_admit(address(2)).unwrap();
        assert!(silent[0].leave.is_cancelled() && !honest.leave.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn those_that_come_together_wait_for_their_turn_and_who_has_one_does_not() {
        let listen = listen(Limits { connections: 9, unproven: 2, unproven_of_one: 2 });
        let [first, second] = [1, 2].map(|last| listen.try_admit(address(last)).unwrap());
        assert_eq!(listen.try_admit(address(1)).err(), Some(Full::Yields));
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
            let admission = listen.try_admit(address(1)).unwrap();
            admission.prove_pod(pod).then_some(admission)
        };
        let many: Vec<_> = std::iter::from_fn(|| enter("a")).take(50).collect();
        assert_eq!(many.len(), places::MOST_OF_ONE);
        assert!(many[0].prove_pod("a"), "each has proved itself once and for all");
        let other = enter("b").unwrap();
        drop(many);
        assert!(enter("a").is_some());
        drop(other);
        assert!(is_empty(&listen));
    }
}

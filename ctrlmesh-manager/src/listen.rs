//! Who is let in, and until when must it have proved itself?
//!
//! Every connection is TLS. Of those that have not proved themselves yet there are few at once, fewer from one address,
//! and each has little time: who holds ten thousand connections open and says nothing keeps nobody else out. Where there
//! is no room, the address that has the most gives way to the one that has fewer, proven or not: the API server proves
//! nothing when it calls our webhooks, and neither may anybody else shut it out. One pod has few connections, whatever
//! it proves.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::time;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::drain::Drain;
use crate::metrics::{Refusals, Refused};
use crate::telemetry;

/// How long TLS may take.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// How long to wait when the process has no file descriptor left for a connection.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);

/// How many connections one pod may have: one, while it comes back another one, and some that have not been found dead.
const MOST_OF_ONE: usize = 8;

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
struct State(Mutex<Places>);

#[derive(Debug, Default)]
struct Places {
    last: u64,
    connections: usize,
    unproven: usize,
    by_address: HashMap<IpAddr, OfOne>,
    by_pod: HashMap<String, usize>,
}

/// The connections from one address, in the order in which they came.
#[derive(Debug, Default)]
struct OfOne {
    places: BTreeMap<u64, Place>,
    unproven: usize,
}

/// One connection.
#[derive(Debug)]
struct Place {
    proven: bool,
    leave: CancellationToken,
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
            let Some(admission) = self.admit(peer.ip()) else {
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

    fn admit(&self, address: IpAddr) -> Option<Admission> {
        let mut places = self.state.lock();
        if places.count(address, true) >= self.limits.unproven_of_one {
            return None;
        }
        if places.unproven >= self.limits.unproven && !places.give_way(address, true)
            || places.connections >= self.limits.connections && !places.give_way(address, false)
        {
            return None;
        }
        let leave = CancellationToken::new();
        places.last += 1;
        let number = places.last;
        places.connections += 1;
        places.unproven += 1;
        let of_one = places.by_address.entry(address).or_default();
        of_one.unproven += 1;
        of_one.places.insert(number, Place { proven: false, leave: leave.clone() });
        drop(places);
        let (state, pod) = (self.state.clone(), Mutex::default());
        Some(Admission { state, address, number, leave, pod })
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
        if let Some(pod) = pod
            && let Some(count) = places.by_pod.get_mut(&pod)
        {
            *count -= 1;
            if *count == 0 {
                places.by_pod.remove(&pod);
            }
        }
    }
}

// === impl State ===

impl State {
    fn lock(&self) -> MutexGuard<'_, Places> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Places ===

impl Places {
    /// How many `address` has; of those that are not proven only, if so asked.
    fn count(&self, address: IpAddr, unproven: bool) -> usize {
        self.by_address.get(&address).map_or(0, |of_one| of_one.count(unproven))
    }

    fn is_proven(&self, address: IpAddr, number: u64) -> bool {
        let place = self.by_address.get(&address).and_then(|of_one| of_one.places.get(&number));
        place.is_some_and(|place| place.proven)
    }

    /// Marks the place as that of one who has proved himself, if it is still his.
    fn prove(&mut self, address: IpAddr, number: u64) {
        let Some(of_one) = self.by_address.get_mut(&address) else { return };
        if let Some(place) = of_one.places.get_mut(&number).filter(|place| !place.proven) {
            place.proven = true;
            of_one.unproven -= 1;
            self.unproven -= 1;
        }
    }

    /// Counts one more connection of the pod, where it may have one.
    fn take_one_of(&mut self, pod: &str) -> bool {
        let count = self.by_pod.entry(pod.to_owned()).or_default();
        let room = *count < MOST_OF_ONE;
        *count += usize::from(room);
        room
    }

    /// Takes the oldest place of the address that has the most, where that is more than `address` would have with it.
    fn give_way(&mut self, address: IpAddr, unproven: bool) -> bool {
        let counts = self.by_address.iter().map(|(one, of_one)| (of_one.count(unproven), *one));
        let most = counts.max().filter(|(most, _)| *most > self.count(address, unproven) + 1);
        let Some((_, greedy)) = most else { return false };
        let mut of_one = self.by_address[&greedy].places.iter();
        let oldest = of_one.find(|(_, place)| !(unproven && place.proven)).map(|(one, _)| *one);
        let place = oldest.and_then(|number| self.remove(greedy, number));
        place.is_some_and(|place| {
            place.leave.cancel();
            true
        })
    }

    fn remove(&mut self, address: IpAddr, number: u64) -> Option<Place> {
        let of_one = self.by_address.get_mut(&address)?;
        let place = of_one.places.remove(&number)?;
        of_one.unproven -= usize::from(!place.proven);
        if of_one.places.is_empty() {
            self.by_address.remove(&address);
        }
        self.connections -= 1;
        self.unproven -= usize::from(!place.proven);
        Some(place)
    }
}

// === impl OfOne ===

impl OfOne {
    /// How many there are; of those that are not proven only, if so asked.
    fn count(&self, unproven: bool) -> usize {
        if unproven { self.unproven } else { self.places.len() }
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;

    fn listen(limits: Limits) -> Listen {
        Listen::new(limits, Refusals::register(&mut Registry::default()))
    }

    fn address(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    fn is_empty(listen: &Listen) -> bool {
        let places = listen.state.lock();
        places.connections == 0
            && places.unproven == 0
            && places.by_address.is_empty()
            && places.by_pod.is_empty()
    }

    #[test]
    fn who_has_not_proved_itself_keeps_nobody_else_out() {
        let listen = listen(Limits { connections: 6, unproven: 4, unproven_of_one: 2 });
        let [attacker, proxy] = [address(1), address(2)];
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
        assert!(is_empty(&listen));
    }

    #[test]
    fn where_there_is_no_room_the_address_that_has_most_gives_way() {
        let listen = listen(Limits { connections: 6, unproven: 4, unproven_of_one: 4 });
        let enter = |last| {
            let admission = listen.admit(address(last))?;
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
        let silent: Vec<_> = std::iter::from_fn(|| listen.admit(address(1))).take(9).collect();
        let honest = listen.admit(address(2)).unwrap();
        assert!(silent[0].leave.is_cancelled() && !honest.leave.is_cancelled());
    }

    #[test]
    fn one_pod_has_few_connections_whatever_it_proves() {
        let listen = listen(Limits { connections: 100, unproven: 100, unproven_of_one: 100 });
        let enter = |pod: &str| {
            let admission = listen.admit(address(1)).unwrap();
            admission.prove_pod(pod).then_some(admission)
        };
        let many: Vec<_> = std::iter::from_fn(|| enter("a")).take(50).collect();
        assert_eq!(many.len(), MOST_OF_ONE);
        assert!(many[0].prove_pod("a"), "each has proved itself once and for all");
        let other = enter("b").unwrap();
        drop(many);
        assert!(enter("a").is_some());
        drop(other);
        assert!(is_empty(&listen));
    }
}

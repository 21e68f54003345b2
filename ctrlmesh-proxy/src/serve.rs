//! How is one client connection served, from its first byte to its last?

mod dated;
mod exchange;
mod headers;
mod held;
mod http1;
mod http2;
mod items;
mod lock;
mod looked;
mod refuse;
mod renaming;
mod reply;
mod splice;
mod turn;
mod unread;
mod upgraded;
mod view;
mod waits;
mod watch;

use std::collections::HashMap;
use std::future;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustls::ServerConfig;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::sync::watch::Receiver;
use tokio::time;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::accept::{Accepted, Place, PodSlot};
use crate::body::Unread;
use crate::drain::Drain;
use crate::metrics::{ClientError, Metrics, Open};
use crate::policy::{Current, History};
use crate::seldom::Seldom;
use crate::serve::held::Room;
use crate::serve::view::View;
use crate::tls;
use crate::tls::stream::ServerStream;
use crate::tunnel;
use crate::upstream::{Address, Dialer, Target, Upstream};

/// The first byte of a TLS record that begins a handshake.
const TLS_HANDSHAKE: u8 = 22;

/// What one thread serves its connections with.
#[derive(Debug)]
pub struct Server {
    /// How operators are answered: with HTTP/2 or HTTP/1.1, as they like.
    pub tls: Arc<ServerConfig>,
    /// The same for an API server that speaks no HTTP/2.
    pub tls_http1: Arc<ServerConfig>,
    /// Opens the connections to the API server.
    pub dialer: Rc<Dialer>,
    /// The API server, where the connection itself does not say.
    pub target: Option<Target>,
    /// What the pods may see.
    pub policies: Policies,
    /// How long a client may take from connecting to the end of its first request's head.
    pub header_timeout: Duration,
    /// How long the API server may take to answer.
    pub response_timeout: Duration,
    /// Where things are counted.
    pub metrics: Arc<Metrics>,
    /// Ends the connections at shutdown.
    pub drain: Drain,
}

/// The policies of the pods whose connections are served.
#[derive(Clone, Debug)]
pub enum Policies {
    /// One pod's: the sidecar's.
    One(Served),
    /// Each pod's own, by the slot that the kernel gave it; a pod that is not here is not served.
    BySlot(Receiver<Arc<HashMap<PodSlot, Served>>>),
}

/// A pod that is served.
#[derive(Clone, Debug)]
pub struct Served {
    /// What it may see.
    pub policy: Current,
    /// What it could see before.
    pub history: Arc<History>,
    /// Cancelled once the pod is served no more: its connections end then.
    pub gone: Option<CancellationToken>,
}

/// What the requests of one client connection share.
#[derive(Debug)]
struct Session {
    server: Rc<Server>,
    upstream: Upstream,
    policy: View,
    gone: Option<CancellationToken>,
    /// Notified when the client is to open its next connection elsewhere.
    leaving: Rc<Notify>,
    counted: Counted,
}

/// A connection on which the client speaks HTTP, to its end: one a connection, of either protocol.
type Serving = Pin<Box<dyn Future<Output = ()>>>;

/// A connection of a client in the count of all, for as long as anything of it goes on: a tunnel outlives its HTTP.
#[derive(Debug)]
struct Counted {
    _open: Open,
    _place: Place,
    /// What is held of its bodies whole.
    room: Room,
    /// What of them waits to be written.
    unread: Rc<Unread>,
}

// === impl Server ===

impl Server {
    /// Serves one connection to its end.
    pub async fn serve(self: Rc<Self>, accepted: Accepted) {
        let Accepted { stream, client, origin, place } = accepted;
        let room = Room::of(origin.pod);
        let unread = Unread::new(place.backlog().clone());
        let counted = Counted { _open: self.metrics.connection(), _place: place, room, unread };
        debug!(client.addr = %client, pod = ?origin.pod, "connected");
        if let Ok(stream) = TcpStream::from_std(stream) {
            let target = origin.destination.map(Target::from).or_else(|| self.target.clone());
            match target.zip(self.policies.of(origin.pod)) {
                Some((target, served)) => {
                    let gone = served.gone.clone();
                    let beginning = Box::pin(self.clone().begin(stream, target, served, counted));
                    // What lasts is not asked by way of what came before it.
                    let serving = async {
                        if let Some(serving) = beginning.await {
                            serving.await;
                        }
                    };
                    unless_gone(gone.as_ref(), serving).await;
                }
                None => self.metrics.client_error(ClientError::NoDestination),
            }
        }
        debug!(client.addr = %client, "disconnected");
    }

    /// Looks what the client speaks, and gives what speaks it; what is not TLS passes here, to its end.
    async fn begin(
        self: Rc<Self>,
        stream: TcpStream,
        target: Target,
        served: Served,
        counted: Counted,
    ) -> Option<Serving> {
        let deadline = Instant::now() + self.header_timeout;
        let mut first = [0];
        match self.in_time(deadline, stream.peek(&mut first)).await? {
            Ok(1) if first[0] == TLS_HANDSHAKE => {
                self.terminate(stream, target, served, counted, deadline).await
            }
            Ok(1) => {
                self.pass(stream, &target.address, served.policy, deadline).await;
                drop(counted);
                None
            }
            // Gone before it said anything.
            Ok(_) | Err(_) => None,
        }
    }

    /// Ends TLS; gives what speaks the protocol that the client chose.
    async fn terminate(
        self: Rc<Self>,
        stream: TcpStream,
        target: Target,
        served: Served,
        counted: Counted,
        deadline: Instant,
    ) -> Option<Serving> {
        let http1_only = self.dialer.http1_only.contains(&target.address);
        let config = if http1_only { &self.tls_http1 } else { &self.tls };
        let handshake = Box::pin(handshake(config.clone(), stream));
        let stream = match self.in_time(deadline, handshake).await? {
            Ok(stream) => stream,
            Err(error) => {
                debug!(error = &error as &dyn std::error::Error, "TLS with a client failed");
                self.metrics.client_error(ClientError::Tls);
                return None;
            }
        };
        let http2 = stream.protocol() == Some(tls::ALPN_HTTP2);
        let leaving = Rc::<Notify>::default();
        let (dialer, unread) = (self.dialer.clone(), counted.unread.clone());
        let upstream = Upstream::new(http2, dialer, target, leaving.clone(), unread);
        let Served { policy, history, gone } = served;
        let policy = View::of(policy, history);
        let session = Rc::new(Session { server: self, upstream, policy, gone, leaving, counted });
        Some(if http2 {
            Box::pin(http2::serve(session, stream, deadline))
        } else {
            Box::pin(http1::serve(session, stream, deadline))
        })
    }

    /// Passes what is not TLS to where it wanted to go, as long as the policy lets everything pass.
    ///
    /// What the API server makes of such bytes is not known here: a TLS alert, an `SSLv2` hello or a PROXY line may stand
    /// before an ordinary handshake, in which nobody would apply the policy.
    async fn pass(
        &self,
        stream: TcpStream,
        destination: &Address,
        mut policy: Current,
        deadline: Instant,
    ) {
        if !policy.borrow_and_update().passes_everything() {
            self.metrics.client_error(ClientError::NotTls);
            return drop(self.in_time(deadline, refuse::not_tls(stream)).await);
        }
        let open = self.metrics.tunnel();
        let limited = async {
            if policy.wait_for(|policy| !policy.passes_everything()).await.is_err() {
                // Nobody changes it any more.
                future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = limited => self.metrics.client_error(ClientError::NotTls),
            () = self.opaque(stream, destination) => {}
        }
        drop(open);
    }

    async fn opaque(&self, stream: TcpStream, destination: &Address) {
        match self.dialer.connect(destination).await {
            Ok(upstream) => {
                if let Err(error) = tunnel::opaque(stream, upstream).await {
                    debug!(error = &error as &dyn std::error::Error, "opaque connection broke");
                }
            }
            Err(error) => {
                debug!(error = &error as &dyn std::error::Error, "opaque connection refused");
            }
        }
    }

    /// What `work` gives, unless the client is too slow for it.
    async fn in_time<T>(&self, deadline: Instant, work: impl Future<Output = T>) -> Option<T> {
        let done = time::timeout_at(deadline, work).await.ok();
        if done.is_none() {
            self.metrics.client_error(ClientError::Slow);
        }
        done
    }
}

// === impl Policies ===

impl Policies {
    /// The pod that a connection comes from, if it is served.
    fn of(&self, pod: Option<PodSlot>) -> Option<Served> {
        match (self, pod) {
            (Policies::One(served), _) => Some(served.clone()),
            (Policies::BySlot(pods), Some(pod)) => pods.borrow().get(&pod).cloned(),
            (Policies::BySlot(_), None) => None,
        }
    }
}

/// Does `work` to its end, or to the end of the pod that it is done for.
async fn unless_gone(gone: Option<&CancellationToken>, work: impl Future<Output = ()>) {
    match gone {
        Some(gone) => {
            let mut gone = Seldom::new(Box::pin(gone.cancelled()));
            tokio::select! {
                biased;
                () = &mut gone => {}
                () = work => {}
            }
        }
        None => work.await,
    }
}

async fn handshake(config: Arc<ServerConfig>, stream: TcpStream) -> io::Result<ServerStream> {
    TlsAcceptor::from(config).accept(stream).await.map(ServerStream::from)
}

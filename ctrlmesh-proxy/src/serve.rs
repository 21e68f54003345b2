//! Serves one client connection, from its first byte to its last.

pub mod explain;
mod headers;
mod target;
mod wait_time;
mod lock_list;
mod lock;
mod shaping;
mod reply;
mod refuse;
mod websocket;
mod shadow;
mod idle_connection;
mod version_check;
mod failure;
mod observer;
mod admission;
mod pending;
mod stale;
mod write;
mod prepare;
mod exchange;
mod tap;
mod http1;
mod http2;
mod egress;
mod webhook;

use std::cell::Cell;
use std::future;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use ctrlmesh_runtime::poll_on_wake::PollOnWake;
use rustls::ServerConfig;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::metrics::ClientError;
use crate::net::accept::{AcceptedConnection, Origin, Purpose};
use crate::net::body::UnreadBytes;
use crate::net::tls;
use crate::net::tls::stream::ServerStream;
use crate::net::tunnel;
use crate::policy::Current;
use crate::session::collect_budget::CollectBudget;
use crate::session::policy_view::PolicyView;
use crate::session::{ConnectionResources, ServedPod, Server, Session};
use crate::upstream::{Address, Target, Upstream};

/// The first byte of a TLS record that begins a handshake.
const TLS_HANDSHAKE: u8 = 22;

/// The task that serves a client's HTTP connection to its end.
type Serving = Pin<Box<dyn Future<Output = ()>>>;

impl Server {
    /// Serves one connection to its end.
    pub async fn serve(self: Rc<Self>, accepted: AcceptedConnection) {
        let AcceptedConnection { stream, client, origin, guard } = accepted;
        let collect = CollectBudget::new(origin.pod);
        let unread = UnreadBytes::new(guard.budget().clone());
        let resources = ConnectionResources {
            _open: self.metrics.connection(),
            _guard: guard,
            collect,
            unread,
            given_up: Cell::default(),
        };
        debug!(client.addr = %client, pod = ?origin.pod, "connected");
        if let Ok(stream) = TcpStream::from_std(stream) {
            match self.policies.of(origin.pod) {
                Some(served) => {
                    let gone = served.gone.clone();
                    let serving = Box::pin(self.clone().serve_pod(stream, origin, served, resources));
                    unless_gone(gone.as_ref(), serving).await;
                }
                None => self.metrics.client_error(ClientError::NoDestination),
            }
        }
        debug!(client.addr = %client, "disconnected");
    }

    async fn serve_pod(
        self: Rc<Self>,
        stream: TcpStream,
        origin: Origin,
        served: ServedPod,
        resources: ConnectionResources,
    ) {
        match (origin.purpose, origin.destination) {
            (Purpose::ForwardProxy, _) => Box::pin(self.serve_forward(stream, served, resources)).await,
            (Purpose::OtherServer, Some(to)) => Box::pin(self.serve_egress(stream, to, served, resources)).await,
            (Purpose::Webhook, Some(to)) => Box::pin(self.serve_webhook(stream, to, served, resources)).await,
            (Purpose::ApiServer, destination) => match destination.map(Target::from).or_else(|| self.target.clone()) {
                Some(target) => self.serve_api(stream, target, served, resources).await,
                None => self.metrics.client_error(ClientError::NoDestination),
            },
            (Purpose::OtherServer | Purpose::Webhook, None) => self.metrics.client_error(ClientError::NoDestination),
        }
    }

    /// Serves a client of the API server.
    async fn serve_api(
        self: Rc<Self>,
        stream: TcpStream,
        target: Target,
        served: ServedPod,
        resources: ConnectionResources,
    ) {
        // So that the connection is not polled through the future of its beginning.
        let beginning = Box::pin(self.begin(stream, target, served, resources));
        if let Some(serving) = beginning.await {
            serving.await;
        }
    }

    /// Detects the client's protocol. TLS gives a task to run; anything else passes here, to its end.
    async fn begin(
        self: Rc<Self>,
        stream: TcpStream,
        target: Target,
        served: ServedPod,
        resources: ConnectionResources,
    ) -> Option<Serving> {
        let deadline = Instant::now() + self.header_timeout;
        let mut first = [0];
        match self.in_time(deadline, stream.peek(&mut first)).await? {
            Ok(1) if first[0] == TLS_HANDSHAKE => self.terminate(stream, target, served, resources, deadline).await,
            Ok(1) => {
                self.pass(stream, &target.address, served.policy, deadline).await;
                drop(resources);
                None
            }
            // The client left without a byte.
            Ok(_) | Err(_) => None,
        }
    }

    /// Terminates TLS, and returns the task for the protocol that the client chose.
    async fn terminate(
        self: Rc<Self>,
        stream: TcpStream,
        target: Target,
        served: ServedPod,
        resources: ConnectionResources,
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
        let (dialer, unread) = (self.dialer.clone(), resources.unread.clone());
        let span = self.tracer.as_ref().map(|tracer| {
            let ago = self.header_timeout.saturating_sub(deadline.saturating_duration_since(Instant::now()));
            tracer.begin_connection(ago, http2, served.requests.pod(), served.policy.borrow().shard())
        });
        let upstream = Upstream::new(http2, dialer, target, leaving.clone(), unread, span.clone());
        let session = Rc::new(Session {
            server: self,
            upstream,
            guards: served.guards.clone(),
            faults: served.faults.clone(),
            traffic: served.traffic.clone(),
            lock: served.own_lock.connection(),
            requests: served.requests.clone(),
            gone: served.gone.clone(),
            policy: PolicyView::new(served),
            leaving,
            span,
            resources,
        });
        Some(if http2 {
            Box::pin(http2::serve(session, stream, deadline))
        } else {
            Box::pin(http1::serve(session, stream, deadline))
        })
    }

    /// Passes a connection without TLS to its destination, as long as the policy lets everything pass.
    ///
    /// A TLS alert, an `SSLv2` hello or a PROXY line may stand before an ordinary handshake, to which nobody would
    /// apply the policy.
    async fn pass(&self, stream: TcpStream, destination: &Address, mut policy: Current, deadline: Instant) {
        if !policy.borrow_and_update().passes_everything() {
            self.metrics.client_error(ClientError::NotTls);
            return drop(self.in_time(deadline, refuse::not_tls(stream)).await);
        }
        let open = self.metrics.tunnel();
        let limited = async {
            if policy.wait_for(|policy| !policy.passes_everything()).await.is_err() {
                // The policy's source has ended.
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

    /// `None`, and counted, where the client misses the deadline.
    async fn in_time<T>(&self, deadline: Instant, work: impl Future<Output = T>) -> Option<T> {
        let done = time::timeout_at(deadline, work).await.ok();
        if done.is_none() {
            self.metrics.client_error(ClientError::Slow);
        }
        done
    }
}

/// Runs `work` until it ends or its pod is gone, which gives `None`.
async fn unless_gone<T>(gone: Option<&CancellationToken>, work: impl Future<Output = T>) -> Option<T> {
    match gone {
        Some(gone) => {
            let mut gone = PollOnWake::new(Box::pin(gone.cancelled()));
            tokio::select! {
                biased;
                () = &mut gone => None,
                done = work => Some(done),
            }
        }
        None => Some(work.await),
    }
}

async fn handshake(config: Arc<ServerConfig>, stream: TcpStream) -> io::Result<ServerStream> {
    TlsAcceptor::from(config).accept(stream).await.map(ServerStream::from)
}

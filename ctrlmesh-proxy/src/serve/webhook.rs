//! Answers calls to a pod's admission webhook.
//!
//! TLS ends here, with the operator's own certificate. A review of an object that another shard owns goes to a pod of
//! that shard, straight to its proxy. All else goes to the pod's own server. A proxy that is called by another one,
//! which the name in its TLS hello tells, asks nobody further. So a review takes one hop at most.
//!
//! The caller's connection ends when the pod's own server has ended a connection and takes none any more, as without
//! us. Were it left open until the pod's network is gone, the caller would not learn of its end, and its next review
//! would wait in vain.

mod body;
mod upstream;

use std::cell::RefCell;
use std::collections::HashMap;
use std::future;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ctrlmesh_common::api::parse_duration;
use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::policy::webhook::{OnUnowned, Peer};
use ctrlmesh_request::review::{Answerer, Review};
use http::{Method, Request, Response, Uri, header};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use thiserror::Error;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time;
use tokio::time::Instant;
use tokio::time::error::Elapsed;
use tokio_rustls::TlsAcceptor;
use tracing::{debug, info};

use self::body::{Body, HeldReview};
use self::upstream::{Answer, NOT_REACHED, Unanswered, Upstream};
use crate::metrics::{ClientError, WebhookRoute};
use crate::net::tunnel;
use crate::policy::{Current, History};
use crate::serve::egress::http::{http1_builder, run};
use crate::serve::{TLS_HANDSHAKE, headers};
use crate::session::{ConnectionResources, ServedPod, Server, WebhookTls};
use crate::webhook::{PEER_NAME, PodWebhook};

/// Where a request does not say how long its answer is waited for: the API server's default.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest that an API server waits.
const MAX_TIMEOUT: Duration = Duration::from_secs(30);

/// For opening a connection to another proxy. A pod of a node that is gone counts as ready for a while.
const PEER_DEADLINE: Duration = Duration::from_secs(1);

/// The largest head of a call.
const MAX_HEAD_BYTES: usize = 64 << 10;

/// Between two calls, and for the head of one. An API server closes idle connections after 90 s.
const IDLE_TIMEOUT: Duration = Duration::from_mins(2);

/// The calls of one client connection. They come one after the other.
struct Calls {
    server: Rc<Server>,
    webhook: Arc<PodWebhook>,
    history: Arc<History>,
    tls: WebhookTls,
    resources: ConnectionResources,
    /// The address that was called, which is the pod's.
    address: SocketAddr,
    /// By which the client called.
    name: Option<ServerName<'static>>,
    /// Whether another proxy calls.
    is_peer: bool,
    local: Upstream,
    /// Notified when a connection to the pod's own server has ended, or there is none.
    local_ended: Rc<Notify>,
    /// The pod that answers for each other shard, by the shard's name.
    peers: RefCell<HashMap<String, (SocketAddr, Rc<Upstream>)>>,
}

/// Why a call ends without an answer, and its connection with it.
#[derive(Debug, Error)]
enum CallError {
    #[error("read a call")]
    Read(#[from] hyper::Error),
    #[error("read a call before nobody waits for its answer any more")]
    Slow(#[from] Elapsed),
}

/// How a call was answered.
struct Answered {
    route: WebhookRoute,
    answer: Result<Answer, Unanswered>,
}

impl Server {
    /// Serves a client's connection to the webhook at `address` to its end.
    pub(super) async fn serve_webhook(
        self: Rc<Self>,
        stream: TcpStream,
        address: SocketAddr,
        served: ServedPod,
        resources: ConnectionResources,
    ) {
        let deadline = Instant::now() + self.header_timeout;
        let ServedPod { webhook, history, .. } = served;
        let mut first = [0];
        let Some(Ok(1)) = self.in_time(deadline, stream.peek(&mut first)).await else { return };
        let tls = match &self.webhooks {
            Some(tls) if first[0] == TLS_HANDSHAKE => webhook.tls(&self.tls.cert_resolver).await.zip(Some(tls.clone())),
            _ => None,
        };
        let Some((presented, tls)) = tls else {
            self.metrics.webhooks.passed();
            return self.pass_to_operator(stream, address, &webhook).await;
        };
        let handshake = Box::pin(TlsAcceptor::from(presented).accept(stream));
        let stream = match self.in_time(deadline, handshake).await {
            Some(Ok(stream)) => stream,
            Some(Err(error)) => {
                debug!(error = &error as &dyn std::error::Error, "TLS with a caller of a webhook failed");
                return self.metrics.client_error(ClientError::Tls);
            }
            None => return,
        };
        let name = stream.get_ref().1.server_name();
        let is_peer = name == Some(PEER_NAME);
        let name = name.filter(|_| !is_peer).and_then(|name| ServerName::try_from(name.to_owned()).ok());
        let (local, local_ended, peers) = <(Upstream, Rc<Notify>, RefCell<_>)>::default();
        let drain = self.drain.clone();
        let calls =
            Calls { server: self, webhook, history, tls, resources, address, name, is_peer, local, local_ended, peers };
        let calls = Rc::new(calls);
        let called = calls.clone();
        let service = service_fn(move |request| Box::pin(calls.clone().call(request)));
        let mut builder = http1_builder();
        // A caller that leaves ends its call, as without us.
        builder.half_close(false).max_buf_size(MAX_HEAD_BYTES).header_read_timeout(IDLE_TIMEOUT);
        let connection = builder.serve_connection(TokioIo::new(stream), service);
        let closing = Box::pin(async move {
            tokio::select! {
                () = drain.started() => {}
                () = called.server_gone() => {}
            }
        });
        if let Err(error) = run(connection, http1::Connection::graceful_shutdown, closing).await {
            debug!(error = &error as &dyn std::error::Error, "connection of a caller of a webhook broke");
        }
    }

    /// Passes a connection of which nothing can be read, so that its client gets what the operator says.
    async fn pass_to_operator(&self, stream: TcpStream, address: SocketAddr, webhook: &PodWebhook) {
        let open = self.metrics.tunnel();
        let passed = match webhook.connect(address, self.dialer.deadline).await {
            Ok(upstream) => tunnel::opaque(stream, upstream).await.map_err(|error| error.to_string()),
            Err(error) => {
                // As where nobody listens.
                drop(stream.set_zero_linger());
                Err(error.to_string())
            }
        };
        if let Err(error) = passed {
            debug!(%error, "connection to a webhook broke");
        }
        drop(open);
    }
}

impl Calls {
    async fn call(
        self: Rc<Self>,
        request: Request<Incoming>,
    ) -> Result<Response<Either<Incoming, Full<Bytes>>>, CallError> {
        let (begun, path) = (Instant::now(), request.uri().path().to_owned());
        let Answered { route, answer } = Box::pin(self.answer(request)).await?;
        if let Ok(answer) = &answer {
            self.server.metrics.webhooks.added(route, begun.elapsed().saturating_sub(answer.took));
        }
        let response = answer
            .map_or_else(|unanswered| unanswered.response(self.is_peer), |answer| answer.response.map(Either::Left));
        info!(target: "access", webhook = path, route = route.name(), status = response.status().as_u16());
        self.server.metrics.webhooks.answered(route, response.status());
        if !self.local.is_open() {
            self.local_ended.notify_one();
        }
        Ok(response)
    }

    /// Completes once the pod's own server takes no connections any more, after it has ended one, or was never called.
    async fn server_gone(&self) {
        loop {
            self.local_ended.notified().await;
            if self.local.is_open() {
                continue;
            }
            let Ok(connection) = self.open_local().await else { return };
            if !self.local.is_open() {
                self.local.keep(connection);
            }
        }
    }

    async fn open_local(&self) -> io::Result<upstream::Sender> {
        let stream = self.webhook.connect(self.address, self.server.dialer.deadline).await?;
        let name = self.name.clone().unwrap_or_else(|| self.address.ip().into());
        upstream::open(stream, self.tls.own.clone(), name, &self.server, &self.local_ended).await
    }

    async fn answer(&self, mut request: Request<Incoming>) -> Result<Answered, CallError> {
        headers::strip(request.headers_mut());
        request.headers_mut().remove(header::EXPECT);
        let begun = Instant::now();
        if request.method() != Method::POST {
            return Ok(self.locally(WebhookRoute::Local, request.map(Body::from)).await);
        }
        let allowed = timeout(request.uri());
        let held = match time::timeout(allowed, HeldReview::read(request, self.resources.unread.budget())).await?? {
            Ok(held) => held,
            Err(streamed) => return Ok(self.unowned(streamed, Unanswered::Unread).await),
        };
        // A proxy that is asked answers before the one that asks gives up.
        let until = begun + allowed / if self.is_peer { 4 } else { 2 };
        Ok(match Review::parse(&held.body) {
            Some(review) => self.route(&review, &held, until).await,
            None => self.locally(WebhookRoute::Local, held.request()).await,
        })
    }

    /// Has the owner of the object answer. Where the object is moving, its new owner is waited for.
    async fn route(&self, review: &Review, held: &HeldReview, until: Instant) -> Answered {
        let mut policies = self.webhook.policies();
        loop {
            let policy = policies.borrow_and_update().clone();
            let Some(webhook) = &policy.webhook else {
                return self.locally(WebhookRoute::Local, held.request()).await;
            };
            match review.answerer(&policy, webhook) {
                Answerer::Own => {
                    tokio::select! {
                        () = self.webhook.cached(&policy, &self.history, until) => {}
                        Ok(()) = policies.changed() => continue,
                    }
                    let answered = self.locally(WebhookRoute::Local, held.request()).await;
                    // A cache that loses the object has answered otherwise.
                    if is_own(&policies.borrow(), review) {
                        return answered;
                    }
                    continue;
                }
                Answerer::Local => return self.locally(WebhookRoute::Local, held.request()).await,
                Answerer::Owner(peer) if !self.is_peer => {
                    tokio::select! {
                        answered = self.ask_owner(peer, webhook.port.get(), held, until) => return answered,
                        () = reassigned(&mut policies, review, peer) => continue,
                    }
                }
                Answerer::Unowned if !self.is_peer => break,
                // The table of the proxy that asks may be newer.
                Answerer::Moving | Answerer::Owner(_) | Answerer::Unowned => {
                    if policy.fence.is_none() || self.webhook.waits_in_vain(&policy) {
                        break;
                    }
                }
            }
            let waits_since = Instant::now();
            if !matches!(time::timeout_at(until, policies.changed()).await, Ok(Ok(()))) {
                self.webhook.record_wait(&policy, waits_since.elapsed());
                break;
            }
        }
        self.unowned(held.request(), Unanswered::Unowned).await
    }

    async fn ask_owner(&self, peer: &Peer, port: u16, held: &HeldReview, until: Instant) -> Answered {
        match self.ask(peer, port, held, until).await {
            Some(answer) => Answered { route: WebhookRoute::Owner, answer },
            None => self.unowned(held.request(), Unanswered::Away { shard: peer.shard.clone() }).await,
        }
    }

    /// A review whose owner cannot be asked.
    async fn unowned(&self, review: Request<Body>, reason: Unanswered) -> Answered {
        if self.is_peer {
            return self.locally(WebhookRoute::Local, review).await;
        }
        let policy = self.webhook.policy();
        let on_unowned = policy.webhook.as_ref().map(|webhook| webhook.on_unowned).unwrap_or_default();
        debug!(error = &reason as &dyn std::error::Error, ?on_unowned, "a webhook is asked of what others own");
        match on_unowned {
            OnUnowned::Local => self.locally(WebhookRoute::Fallback, review).await,
            OnUnowned::Fail => Answered { route: WebhookRoute::Refused, answer: Err(reason) },
        }
    }

    async fn locally(&self, route: WebhookRoute, request: Request<Body>) -> Answered {
        let open = async || self.open_local().await;
        let answered = time::timeout(MAX_TIMEOUT, upstream::send(&self.local, request, open)).await;
        Answered { route, answer: answered.unwrap_or(Err(Unanswered::Late)) }
    }

    /// Asks a pod of the owner; `None` where none has begun to answer, or none has answered in time.
    async fn ask(
        &self,
        peer: &Peer,
        port: u16,
        held: &HeldReview,
        until: Instant,
    ) -> Option<Result<Answer, Unanswered>> {
        let trust = self.tls.peers.as_ref()?;
        for (address, upstream) in self.candidates(peer, port) {
            let opened = async || {
                let stream = TcpStream::connect(address).await?;
                let name = ServerName::try_from(PEER_NAME).map_err(io::Error::other)?;
                upstream::open(stream, trust.client().http1, name, &self.server, &Rc::default()).await
            };
            let open = async || time::timeout(PEER_DEADLINE, opened()).await.map_err(io::Error::from).flatten();
            match time::timeout_at(until, upstream::send(&upstream, held.request(), open)).await {
                Ok(Err(Unanswered::Connect(error))) => {
                    let (peer, error) = (&peer.shard, &error as &dyn std::error::Error);
                    info!(peer, upstream.addr = %address, error, "a shard's webhook is not reached");
                }
                Ok(Ok(answer)) if answer.response.status() == NOT_REACHED => {
                    info!(peer = peer.shard, upstream.addr = %address, "the pod of a shard's webhook is not reached");
                }
                Ok(answered) => {
                    self.peers.borrow_mut().insert(peer.shard.clone(), (address, upstream));
                    return Some(answered);
                }
                Err(_elapsed) => {
                    debug!(peer = peer.shard, upstream.addr = %address, "a shard's webhook does not answer in time");
                    return None;
                }
            }
        }
        None
    }

    /// The pods of a shard, the one that answered last before the others.
    fn candidates(&self, peer: &Peer, port: u16) -> Vec<(SocketAddr, Rc<Upstream>)> {
        let mut addresses: Vec<SocketAddr> = peer.addresses.iter().map(|ip| SocketAddr::new(*ip, port)).collect();
        fastrand::shuffle(&mut addresses);
        let last = self.peers.borrow_mut().remove(&peer.shard).filter(|(address, _)| addresses.contains(address));
        addresses.retain(|address| last.as_ref().is_none_or(|(last, _)| last != address));
        last.into_iter().chain(addresses.into_iter().map(|address| (address, Rc::default()))).collect()
    }
}

/// Whether a policy has its own pod answer.
fn is_own(policy: &Policy, review: &Review) -> bool {
    policy
        .webhook
        .as_ref()
        .is_none_or(|webhook| matches!(review.answerer(policy, webhook), Answerer::Local | Answerer::Own))
}

/// Completes once a table gives the object to another owner than `peer`.
async fn reassigned(policies: &mut Current, review: &Review, peer: &Peer) {
    while policies.changed().await.is_ok() {
        let policy = policies.borrow_and_update().clone();
        let owner = policy.webhook.as_ref().map(|webhook| review.answerer(&policy, webhook));
        if !matches!(owner, Some(Answerer::Owner(now)) if now.shard == peer.shard) {
            return;
        }
    }
    future::pending::<()>().await;
}

/// How long the answer is waited for, which the API server writes into the query.
fn timeout(uri: &Uri) -> Duration {
    let query = uri.query().unwrap_or_default();
    let named = query.split('&').find_map(|pair| parse_duration(pair.strip_prefix("timeout=")?));
    named.filter(|timeout| !timeout.is_zero()).unwrap_or(DEFAULT_TIMEOUT).min(MAX_TIMEOUT)
}

//! Serves policies and certificates to proxies over gRPC.
//!
//! Each call carries the token of a pod. It is answered for that pod or, for the service account of node proxies, for
//! the pods of that node. Other requests are refused before anything is looked up.

mod review_schedule;
mod signing_quota;
mod catch_up;
mod codec;
mod hello;
mod leader_client;
mod latest_connections;
mod relay;
mod renew;
mod session;
mod sign;
mod delivery;

use codec::SmallCodec;
pub use latest_connections::LatestConnections;
pub use leader_client::LeaderClient;
pub use relay::ReceiptRelay;
pub use renew::OldestConfirmed;
pub use review_schedule::ReviewSchedule;
pub use signing_quota::SigningQuota;

use std::convert::Infallible;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ctrlmesh_common::wire::{
    self, Receipts, Relayed, RenewRequest, Renewed, Report, ShardReply, ShardRequest, SignRequest, Signed, Update,
};
use ctrlmesh_runtime::grpc::KEEP_ALIVE;
use data_encoding::BASE64_NOPAD;
use http::{HeaderMap, Request, Response, header};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::net::TcpStream;
use tokio::time;
use tokio_rustls::server::TlsStream;
use tonic::body::Body;
use tonic::server::{ClientStreamingService, Grpc, StreamingService, UnaryService};
use tonic::{Status, Streaming};
use tonic_prost::ProstCodec;
use tracing::{debug, info, warn};

use crate::admission::placement::Placement;
use crate::ca::store::CaStore;
use crate::cluster::confirmations::Confirmations;
use crate::drain::Drain;
use crate::leader::lease::Leadership;
use crate::listen::ConnectionPermit;
use crate::metrics::{self, Refusals, Refused};
use crate::push::bypass_events::BypassEvents;
use crate::push::identity::{Identity, IdentityError, ReviewedIdentity, Reviewer, TicketKey};
use crate::push::policy_store::PolicyStore;
use crate::push::staleness::StalenessCheck;
use crate::telemetry;

/// Until a connection has made its first authenticated call.
const PROVE: Duration = Duration::from_secs(10);

/// Concurrent calls of one connection: to follow, to sign, and room for calls that are ending.
const MAX_CALLS: u32 = 8;

/// Bytes of the headers of one call: mostly the token.
const MAX_HEAD_BYTES: u32 = 16 * 1024;

/// Bytes that may wait to be sent on one connection.
const MAX_SEND_BYTES: usize = 64 * 1024;

/// Service accounts with more rights than a pod has for itself.
#[derive(Clone, Debug)]
pub struct Accounts {
    /// `NAMESPACE/NAME`.
    pub node: String,
    /// `NAMESPACE/NAME`.
    pub manager: String,
}

#[derive(Clone, Debug)]
pub struct PushMetrics {
    clients: Gauge,
    policies: Counter,
    applied: Counter,
    refused: Counter,
    signed: Counter,
}

pub struct PushService {
    pub store: Arc<PolicyStore>,
    /// For proxies that may know more than this replica.
    pub staleness: StalenessCheck,
    pub reviewer: Reviewer,
    pub ca_store: Arc<CaStore>,
    pub accounts: Accounts,
    /// Only the leader takes the receipts of other replicas.
    pub leadership: Leadership,
    /// Of policies that lapse, by this replica while it leads.
    pub confirmations: Arc<Confirmations>,
    pub oldest_confirmed: OldestConfirmed,
    /// Confirms them while another replica leads.
    pub leader: LeaderClient,
    pub placement: Arc<Placement>,
    pub bypasses: BypassEvents,
    pub refusals: Refusals,
    pub metrics: PushMetrics,
    pub drain: Drain,
    pub latest_connections: LatestConnections,
    pub signing_quota: SigningQuota,
    pub review_schedule: ReviewSchedule,
}

struct Call {
    push: Arc<PushService>,
    proven: ReviewedIdentity,
    token: Arc<str>,
}

type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

type Answering<T> = Pin<Box<dyn Future<Output = Result<tonic::Response<T>, Status>> + Send>>;

impl PushMetrics {
    pub fn register(to: &mut Registry) -> Self {
        Self {
            clients: metrics::gauge(to, "push_clients", "Proxies that follow their policies"),
            policies: metrics::counter(to, "push_policies", "Policies sent to proxies"),
            applied: metrics::counter(to, "push_applied", "Policies that proxies put in force"),
            refused: metrics::counter(to, "push_refused", "Policies that proxies refused"),
            signed: metrics::counter(to, "certificates_signed", "Certificates signed for proxies"),
        }
    }
}

impl PushService {
    pub fn serve(
        self: Arc<Self>,
        stream: TlsStream<TcpStream>,
        permit: Arc<ConnectionPermit>,
    ) -> impl Future<Output = ()> + Send + 'static {
        let service = {
            let (push, permit) = (self.clone(), permit.clone());
            // Boxed: its memory is freed when the body begins, and a follower's body has no end.
            service_fn(move |request| -> Answer { Box::pin(push.clone().answer(request, permit.clone())) })
        };
        let connection = http2::Builder::new(self.drain.clone())
            .timer(TokioTimer::new())
            .keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE)
            .max_concurrent_streams(MAX_CALLS)
            .max_header_list_size(MAX_HEAD_BYTES)
            .max_send_buf_size(MAX_SEND_BYTES)
            .serve_connection(TokioIo::new(stream), service);
        let mut connection = Box::pin(connection);
        async move {
            let late = async {
                time::sleep(PROVE).await;
                if permit.is_proven() {
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                ended = connection.as_mut() => if let Err(error) = ended {
                    debug!(error = telemetry::chain(&error), "connection of a proxy broke");
                },
                // No authenticated call in time.
                () = late => self.refusals.count(Refused::Slow),
                () = self.drain.started() => {
                    connection.as_mut().graceful_shutdown();
                    drop(connection.await);
                }
            }
        }
    }

    async fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
        permit: Arc<ConnectionPermit>,
    ) -> Result<Response<Body>, Infallible> {
        let path = request.uri().path().to_owned();
        let identified = self.identify(request.headers(), &path, permit.address()).await;
        let (proven, token) = match identified {
            Ok(known) => known,
            Err(status) => return Ok(status.into_http()),
        };
        if !permit.prove_pod(&proven.identity.uid) {
            let status = Status::resource_exhausted("too many connections of one pod");
            return Ok(self.refuse(Refused::TooMany, &proven.identity, status).into_http());
        }
        // Checked before the body is read.
        if let Err(status) = self.may_ask(&path, &proven.identity) {
            return Ok(status.into_http());
        }
        let call = Call { push: self, proven, token };
        let response = match path.as_str() {
            wire::FOLLOW => {
                let codec = SmallCodec::<Update, Report>::default();
                let mut grpc = Grpc::new(codec).max_decoding_message_size(wire::MAX_REPORT_BYTES);
                grpc.streaming(call, request).await
            }
            wire::SIGN => {
                let codec = ProstCodec::<Signed, SignRequest>::default();
                let mut grpc = Grpc::new(codec).max_decoding_message_size(wire::MAX_REPORT_BYTES);
                grpc.unary(call, request).await
            }
            wire::RENEW => {
                let codec = ProstCodec::<Renewed, RenewRequest>::default();
                let mut grpc = Grpc::new(codec).max_decoding_message_size(wire::MAX_REPORT_BYTES);
                grpc.unary(call, request).await
            }
            wire::RELAY => {
                let codec = ProstCodec::<Relayed, Receipts>::default();
                let mut grpc = Grpc::new(codec).max_decoding_message_size(wire::MAX_UPDATE_BYTES);
                grpc.client_streaming(call, request).await
            }
            wire::ASSIGN_SHARD => {
                let codec = ProstCodec::<ShardReply, ShardRequest>::default();
                let mut grpc = Grpc::new(codec).max_decoding_message_size(wire::MAX_REPORT_BYTES);
                grpc.unary(call, request).await
            }
            _ => Status::unimplemented("no such call").into_http(),
        };
        Ok(response)
    }

    /// Calls between replicas are for managers only, and only the leader answers them.
    fn may_ask(&self, path: &str, identity: &Identity) -> Result<(), Status> {
        let is_manager = identity.account == self.accounts.manager;
        let is_between_replicas =
            [wire::RELAY, wire::ASSIGN_SHARD].contains(&path) || is_manager && path == wire::RENEW;
        if !is_between_replicas {
            return Ok(());
        }
        if !is_manager {
            let status = Status::permission_denied("only a manager may ask this");
            return Err(self.refuse(Refused::Foreign, identity, status));
        }
        let leads = self.leadership.is_held();
        leads.then_some(()).ok_or_else(|| Status::failed_precondition("does not lead"))
    }

    async fn identify(
        &self,
        headers: &HeaderMap,
        path: &str,
        address: IpAddr,
    ) -> Result<(ReviewedIdentity, Arc<str>), Status> {
        let token = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.strip_prefix("Bearer "));
        let Some(token) = token else {
            self.refusals.count(Refused::NoToken);
            return Err(Status::unauthenticated("a service-account token is needed"));
        };
        // A certificate is valid for a day, so signing needs a fresh review.
        let may_show = [wire::FOLLOW, wire::RENEW].contains(&path);
        let by_ticket = || {
            let ticket = may_show.then(|| ticket_in(headers)).flatten()?;
            self.ticket_key().read(token, &ticket, SystemTime::now())
        };
        let proven = self.reviewer.identify(token, address, by_ticket).await;
        let proven = proven.map_err(|error| self.unknown(&error))?;
        Ok((proven, Arc::from(token)))
    }

    /// Every replica can read its tickets: the key follows from the manager's CA key.
    fn ticket_key(&self) -> TicketKey {
        TicketKey::by(self.ca_store.current().manager.current.key())
    }

    fn unknown(&self, error: &IdentityError) -> Status {
        self.refusals.count(error.reason());
        let text = telemetry::chain(error);
        match error.reason() {
            Refused::Unavailable => {
                warn!(error = text, "a proxy's token could not be reviewed");
                Status::unavailable("the token cannot be reviewed now")
            }
            Refused::TooMany => Status::resource_exhausted(text),
            _ => Status::unauthenticated(text),
        }
    }

    /// Counts the refusal, and logs it.
    fn refuse(&self, reason: Refused, identity: &Identity, status: Status) -> Status {
        self.refusals.count(reason);
        info!(pod = %identity.pod, reason = ?reason, error = status.message(), "refused");
        status
    }
}

impl StreamingService<Report> for Call {
    type Response = Update;
    type ResponseStream = session::Updates;
    type Future = Answering<Self::ResponseStream>;

    fn call(&mut self, request: tonic::Request<Streaming<Report>>) -> Self::Future {
        let (push, proven, token) = (self.push.clone(), self.proven.clone(), self.token.clone());
        Box::pin(session::follow(push, proven, token, request.into_inner()))
    }
}

impl UnaryService<SignRequest> for Call {
    type Response = Signed;
    type Future = Answering<Signed>;

    fn call(&mut self, request: tonic::Request<SignRequest>) -> Self::Future {
        let (push, identity) = (self.push.clone(), self.proven.identity.clone());
        Box::pin(async move { sign::answer(&push, &identity, request.into_inner()).await })
    }
}

impl UnaryService<RenewRequest> for Call {
    type Response = Renewed;
    type Future = Answering<Renewed>;

    fn call(&mut self, request: tonic::Request<RenewRequest>) -> Self::Future {
        let (push, identity) = (self.push.clone(), self.proven.identity.clone());
        Box::pin(async move { renew::answer(&push, &identity, request.into_inner()).await })
    }
}

impl ClientStreamingService<Receipts> for Call {
    type Response = Relayed;
    type Future = Answering<Relayed>;

    fn call(&mut self, request: tonic::Request<Streaming<Receipts>>) -> Self::Future {
        let (push, identity) = (self.push.clone(), self.proven.identity.clone());
        Box::pin(relay::take(push, identity, request.into_inner()))
    }
}

impl UnaryService<ShardRequest> for Call {
    type Response = ShardReply;
    type Future = Answering<ShardReply>;

    fn call(&mut self, request: tonic::Request<ShardRequest>) -> Self::Future {
        let push = self.push.clone();
        Box::pin(async move { leader_client::answer(&push, request.into_inner()).await })
    }
}

/// The review ticket in the headers, with or without base64 padding.
fn ticket_in(headers: &HeaderMap) -> Option<Vec<u8>> {
    let value = headers.get(wire::REVIEW_TICKET)?.to_str().ok()?.trim_end_matches('=');
    BASE64_NOPAD.decode(value.as_bytes()).ok()
}

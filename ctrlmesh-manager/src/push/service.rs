//! How are proxies told their policies?
//!
//! Over gRPC, on connections of their own: each call carries the token of a pod, and is answered with what concerns
//! that pod, or, for the node proxies' own service account, the pods of that node. Who asks for anything else is refused
//! before anything is looked up.

mod again;
mod allowance;
mod catch_up;
mod codec;
mod hello;
mod leader;
mod link;
mod newest;
mod relay;
mod session;
mod sign;
mod told;

pub use again::Again;
pub use allowance::Allowance;
use codec::SmallCodec;
pub use leader::Leader;
pub use newest::Newest;
pub use relay::Relay;

use std::convert::Infallible;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ctrlmesh_common::wire::{
    self, Receipts, Relayed, Report, Seat, Seated, SignRequest, Signed, Update,
};
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

use crate::admission::placement::Seats;
use crate::ca::store::Vault;
use crate::drain::Drain;
use crate::leader::lease::Leadership;
use crate::listen::Admission;
use crate::metrics::{self, Refusals, Refused};
use crate::push::identity::{Identity, IdentityError, Proven, Reviewer, Vouching};
use crate::push::policy_store::Board;
use crate::push::staleness::Doubts;
use crate::telemetry;

/// How long a connection may take to prove itself.
const PROVE: Duration = Duration::from_secs(10);

/// How often a silent connection is asked whether it is still there, and how long it may take to say so.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Calls that one connection may have at once: one to follow, one to sign, and room for one that is being ended.
const MAX_CALLS: u32 = 8;

/// Largest head of a call: a token, mostly.
const MAX_HEAD_BYTES: u32 = 16 * 1024;

/// How much may wait to be sent on one connection.
const MAX_SEND_BYTES: usize = 64 * 1024;

/// Who may ask for more than its own pod.
#[derive(Clone, Debug)]
pub struct Accounts {
    /// The service account of node proxies, as `NAMESPACE/NAME`.
    pub node: String,
    /// The manager's own.
    pub manager: String,
}

/// What is counted.
#[derive(Clone, Debug)]
pub struct PushMetrics {
    clients: Gauge,
    policies: Counter,
    applied: Counter,
    refused: Counter,
    signed: Counter,
}

/// Tells proxies their policies.
pub struct Push {
    /// What to tell.
    pub board: Arc<Board>,
    /// Asks the API server where a proxy may know more.
    pub doubts: Doubts,
    /// Finds out who asks.
    pub reviewer: Reviewer,
    /// Signs certificates.
    pub vault: Arc<Vault>,
    /// Who may ask for more.
    pub accounts: Accounts,
    /// Whether what other replicas heard is taken here.
    pub leadership: Leadership,
    /// Gives pods their shards.
    pub seats: Arc<Seats>,
    /// Counts who is refused.
    pub refusals: Refusals,
    /// Counts the rest.
    pub metrics: PushMetrics,
    /// Ends with it.
    pub drain: Drain,
    /// Who is connected.
    pub newest: Newest,
    /// Who has been signed for, and how often.
    pub signatures: Allowance,
    /// When tokens are reviewed again.
    pub again: Again,
}

/// One call.
struct Call {
    push: Arc<Push>,
    proven: Proven,
    token: Arc<str>,
}

/// What becomes of one call.
type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

type Answering<T> = Pin<Box<dyn Future<Output = Result<tonic::Response<T>, Status>> + Send>>;

// === impl PushMetrics ===

impl PushMetrics {
    /// Registers all.
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

// === impl Push ===

impl Push {
    /// Serves one connection until it ends.
    pub fn serve(
        self: Arc<Self>,
        stream: TlsStream<TcpStream>,
        admission: Arc<Admission>,
    ) -> impl Future<Output = ()> + Send + 'static {
        let service = {
            let (push, admission) = (self.clone(), admission.clone());
            // Apart: what an answer took is given back when its body begins, and that of a proxy that follows has no end.
            service_fn(move |request| -> Answer {
                Box::pin(push.clone().answer(request, admission.clone()))
            })
        };
        let connection = http2::Builder::new(Tasks(self.drain.clone()))
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
                if admission.is_proven() {
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                ended = connection.as_mut() => if let Err(error) = ended {
                    debug!(error = telemetry::chain(&error), "connection of a proxy broke");
                },
                // It has not proved itself in time.
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
        admission: Arc<Admission>,
    ) -> Result<Response<Body>, Infallible> {
        let path = request.uri().path().to_owned();
        let identified = self.identify(request.headers(), &path, admission.address()).await;
        let (proven, token) = match identified {
            Ok(known) => known,
            Err(status) => return Ok(status.into_http()),
        };
        if !admission.prove_pod(&proven.identity.uid) {
            let status = Status::resource_exhausted("too many connections of one pod");
            return Ok(self.refuse(Refused::TooMany, &proven.identity, status).into_http());
        }
        // Before anything that it sends is read.
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
            wire::RELAY => {
                let codec = ProstCodec::<Relayed, Receipts>::default();
                let mut grpc = Grpc::new(codec).max_decoding_message_size(wire::MAX_UPDATE_BYTES);
                grpc.client_streaming(call, request).await
            }
            wire::SEAT => {
                let codec = ProstCodec::<Seated, Seat>::default();
                let mut grpc = Grpc::new(codec).max_decoding_message_size(wire::MAX_REPORT_BYTES);
                grpc.unary(call, request).await
            }
            _ => Status::unimplemented("no such call").into_http(),
        };
        Ok(response)
    }

    /// Of replicas, what no other may ask, and only the one that leads answers.
    fn may_ask(&self, path: &str, identity: &Identity) -> Result<(), Status> {
        if ![wire::RELAY, wire::SEAT].contains(&path) {
            return Ok(());
        }
        if identity.account != self.accounts.manager {
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
    ) -> Result<(Proven, Arc<str>), Status> {
        let token = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.strip_prefix("Bearer "));
        let Some(token) = token else {
            self.refusals.count(Refused::NoToken);
            return Err(Status::unauthenticated("a service-account token is needed"));
        };
        // A certificate is good for a day: for one the API server is asked.
        let may_show = path == wire::FOLLOW;
        let vouched = || {
            let voucher = may_show.then(|| shown(headers)).flatten()?;
            self.vouching().read(token, &voucher, SystemTime::now())
        };
        let proven = self.reviewer.identify(token, address, vouched).await;
        let proven = proven.map_err(|error| self.unknown(&error))?;
        Ok((proven, Arc::from(token)))
    }

    /// Gives vouchers that every replica can read: by the key of the authority that speaks for the manager.
    fn vouching(&self) -> Vouching {
        Vouching::by(self.vault.current().manager.current.key())
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

    /// Refuses, and counts it.
    fn refuse(&self, reason: Refused, identity: &Identity, status: Status) -> Status {
        self.refusals.count(reason);
        info!(pod = %identity.pod, reason = ?reason, error = status.message(), "refused");
        status
    }
}

// === impl Call ===

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

impl ClientStreamingService<Receipts> for Call {
    type Response = Relayed;
    type Future = Answering<Relayed>;

    fn call(&mut self, request: tonic::Request<Streaming<Receipts>>) -> Self::Future {
        let (push, identity) = (self.push.clone(), self.proven.identity.clone());
        Box::pin(relay::take(push, identity, request.into_inner()))
    }
}

impl UnaryService<Seat> for Call {
    type Response = Seated;
    type Future = Answering<Seated>;

    fn call(&mut self, request: tonic::Request<Seat>) -> Self::Future {
        let push = self.push.clone();
        Box::pin(async move { leader::answer(&push, request.into_inner()).await })
    }
}

/// The voucher that is shown; its padding may be there or not, as gRPC has it.
fn shown(headers: &HeaderMap) -> Option<Vec<u8>> {
    let value = headers.get(wire::VOUCHER)?.to_str().ok()?.trim_end_matches('=');
    BASE64_NOPAD.decode(value.as_bytes()).ok()
}

/// Runs the parts of a connection.
#[derive(Clone, Debug)]
struct Tasks(Drain);

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for Tasks {
    fn execute(&self, task: F) {
        self.0.spawn(task);
    }
}

//! Serves the admission webhooks over HTTPS.
//!
//! Speaks HTTP/2 and HTTP/1.1. The path selects the handler of an `AdmissionReview`. A review that is unreadable or
//! late is an error to the API server, which then follows its failure policy. Callers are not authenticated. So the
//! memory for concurrent reviews is limited, in all and for each address.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::fmt;
use std::net::IpAddr;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use ctrlmesh_runtime::sync::lock;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Body as _, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use kube::core::DynamicObject;
use kube::core::admission::{AdmissionRequest, AdmissionResponse, AdmissionReview};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time;
use tokio_rustls::server::TlsStream;
use tracing::{debug, warn};

use crate::drain::Drain;
use crate::listen::ConnectionPermit;
use crate::telemetry;

/// An object and its old version, each as large as etcd allows, in JSON.
const MAX_REVIEW_BYTES: usize = 7 * 1024 * 1024;

/// Bytes of concurrent reviews: four of the largest, or thousands of the usual ones.
const MAX_MEMORY_BYTES: usize = 4 * MAX_REVIEW_BYTES;

/// Bytes of concurrent reviews from one address.
const MAX_MEMORY_BYTES_OF_ONE: usize = MAX_REVIEW_BYTES + 1024 * 1024;

/// What a review counts for at least.
const LEAST_REVIEW_BYTES: usize = 4 * 1024;

/// Concurrent reviews of one connection.
const MAX_REVIEWS: u32 = 128;

const ARRIVE: Duration = Duration::from_secs(10);

/// Until the first request, and in HTTP/1.1 between two.
const IDLE: Duration = Duration::from_secs(90);

pub type Handler = Arc<dyn Fn(AdmissionRequest<DynamicObject>) -> BoxFuture<'static, AdmissionResponse> + Send + Sync>;

#[derive(Clone)]
pub struct Route {
    /// The path, such as `/validate`.
    pub path: &'static str,
    /// Must be less than the timeout in the webhook configuration.
    pub deadline: Duration,
    pub handler: Handler,
}

#[derive(Clone, Debug, Default)]
pub struct WebhookMetrics(Family<Labels, Counter>);

pub struct Webhook {
    pub routes: BTreeMap<&'static str, Route>,
    pub metrics: WebhookMetrics,
    pub drain: Drain,
    pub memory: ReviewMemory,
}

/// Limits the memory for concurrent reviews.
#[derive(Debug)]
pub struct ReviewMemory {
    all: Arc<Semaphore>,
    by_address: Mutex<HashMap<IpAddr, Arc<Semaphore>>>,
}

/// Frees its share when dropped.
type Share = [OwnedSemaphorePermit; 2];

#[derive(Clone, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct Labels {
    path: &'static str,
    outcome: &'static str,
}

#[derive(Debug, thiserror::Error)]
enum ReviewError {
    #[error("nobody answers at this path")]
    Path,
    #[error("only POST")]
    Method,
    #[error("the review did not arrive in time")]
    Slow,
    #[error("the review is larger than {MAX_REVIEW_BYTES} bytes, or did not arrive whole")]
    Body,
    #[error("this is no AdmissionReview")]
    Malformed(#[source] serde_json::Error),
    #[error("this AdmissionReview asks nothing")]
    Empty,
    #[error("no answer within {within:?}")]
    Late { within: Duration },
    #[error("the answer cannot be given; the manager's log says why")]
    Panicked,
}

impl WebhookMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let this = Self::default();
        let help = "Admission reviews by path and outcome: allowed, denied, or failed to be answered";
        registry.register("webhook_reviews", help, this.0.clone());
        this
    }

    /// Shows zeros for a path: the first failure is seen to be one more than before only if there was a zero before.
    pub fn begin(&self, path: &'static str) {
        for outcome in ["allowed", "denied", "failed"] {
            drop(self.0.get_or_create_owned(&Labels { path, outcome }));
        }
    }

    fn count(&self, path: &'static str, outcome: &'static str) {
        self.0.get_or_create_owned(&Labels { path, outcome }).inc();
    }
}

impl Default for ReviewMemory {
    fn default() -> Self {
        Self { all: Arc::new(Semaphore::new(MAX_MEMORY_BYTES)), by_address: Mutex::default() }
    }
}

impl ReviewMemory {
    async fn take(&self, address: IpAddr, bytes: usize) -> Option<Share> {
        let of_one = {
            let mut by_address = lock(&self.by_address);
            by_address.retain(|_, one| Arc::strong_count(one) > 1);
            let of_one = by_address.entry(address);
            of_one.or_insert_with(|| Arc::new(Semaphore::new(MAX_MEMORY_BYTES_OF_ONE))).clone()
        };
        let bytes = bytes.clamp(LEAST_REVIEW_BYTES, MAX_REVIEW_BYTES);
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        // The address's own share first: whoever waits for that holds nothing of the common one.
        let of_one = of_one.acquire_many_owned(bytes).await.ok()?;
        let of_all = self.all.clone().acquire_many_owned(bytes).await.ok()?;
        Some([of_one, of_all])
    }
}

impl Webhook {
    pub async fn serve(self: Arc<Self>, stream: TlsStream<TcpStream>, permit: Arc<ConnectionPermit>) {
        let service = {
            let (webhook, permit) = (self.clone(), permit.clone());
            service_fn(move |request| {
                // The API server does not authenticate, so any request proves the connection.
                permit.prove();
                webhook.clone().respond(request, permit.address())
            })
        };
        let mut builder = auto::Builder::new(self.drain.clone());
        builder.http1().timer(TokioTimer::new()).header_read_timeout(IDLE);
        builder.http2().timer(TokioTimer::new()).keep_alive_interval(IDLE).max_concurrent_streams(MAX_REVIEWS);
        let connection = builder.serve_connection(TokioIo::new(stream), service);
        let mut connection = std::pin::pin!(connection);
        let late = async {
            time::sleep(IDLE).await;
            if permit.is_proven() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            ended = connection.as_mut() => if let Err(error) = ended {
                debug!(error = %error, "connection of the API server broke");
            },
            // No request in time.
            () = late => {}
            () = self.drain.started() => {
                connection.as_mut().graceful_shutdown();
                drop(connection.await);
            }
        }
    }

    async fn respond(
        self: Arc<Self>,
        request: Request<Incoming>,
        address: IpAddr,
    ) -> Result<Response<Full<Bytes>>, Infallible> {
        let route = self.routes.get(request.uri().path());
        let path = route.map_or("other", |route| route.path);
        let answered = match route {
            Some(route) => self.answer(route, request, address).await,
            None => Err(ReviewError::Path),
        };
        Ok(match answered {
            Ok(response) => {
                self.metrics.count(path, if response.allowed { "allowed" } else { "denied" });
                json(&response.into_review())
            }
            Err(error) => {
                self.metrics.count(path, "failed");
                warn!(path, error = telemetry::chain(&error), "admission review not answered");
                error.response()
            }
        })
    }

    async fn answer(
        &self,
        route: &Route,
        request: Request<Incoming>,
        address: IpAddr,
    ) -> Result<AdmissionResponse, ReviewError> {
        if request.method() != Method::POST {
            return Err(ReviewError::Method);
        }
        let bytes = request.body().size_hint().exact();
        let bytes = bytes.map_or(MAX_REVIEW_BYTES, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        if bytes > MAX_REVIEW_BYTES {
            return Err(ReviewError::Body);
        }
        let arrived = async {
            let taken = self.memory.take(address, bytes).await.ok_or(ReviewError::Slow)?;
            let body = Limited::new(request.into_body(), MAX_REVIEW_BYTES).collect().await;
            Ok((body.map_err(|_broken| ReviewError::Body)?.to_bytes(), taken))
        };
        let arrived = time::timeout(ARRIVE, arrived).await.map_err(|_elapsed| ReviewError::Slow)?;
        let (body, _taken) = arrived?;
        let review: AdmissionReview<DynamicObject> = serde_json::from_slice(&body).map_err(ReviewError::Malformed)?;
        let question: AdmissionRequest<DynamicObject> = review.try_into().map_err(|_nothing| ReviewError::Empty)?;
        let answer = AssertUnwindSafe((route.handler)(question)).catch_unwind();
        let answer = time::timeout(route.deadline, answer).await;
        let answer = answer.map_err(|_elapsed| ReviewError::Late { within: route.deadline })?;
        answer.map_err(|_panic| ReviewError::Panicked)
    }
}

fn json(review: &AdmissionReview<DynamicObject>) -> Response<Full<Bytes>> {
    // What was parsed from JSON serializes again.
    let body = serde_json::to_vec(review).unwrap_or_default();
    let mut response = Response::new(Full::new(body.into()));
    let kind = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

impl ReviewError {
    fn response(&self) -> Response<Full<Bytes>> {
        let mut response = Response::new(Full::new(format!("{self}\n").into()));
        *response.status_mut() = match self {
            Self::Path => StatusCode::NOT_FOUND,
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::Slow => StatusCode::REQUEST_TIMEOUT,
            Self::Body => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Malformed(_) | Self::Empty => StatusCode::BAD_REQUEST,
            Self::Late { .. } | Self::Panicked => StatusCode::INTERNAL_SERVER_ERROR,
        };
        response
    }
}

impl fmt::Debug for Route {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Route").field("path", &self.path).field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn concurrent_reviews_are_limited_in_all_and_by_address() {
        let room = ReviewMemory::default();
        let take = async |last: u8| {
            let taken = room.take([192, 0, 2, last].into(), MAX_REVIEW_BYTES);
            time::timeout(Duration::from_millis(50), taken).await.ok().flatten()
        };
        let first = take(1).await.unwrap();
        assert!(take(1).await.is_none(), "one address has but a part");
        let small = room.take([192, 0, 2, 1].into(), 1).await.unwrap();
        assert!(take(2).await.is_some(), "and another one its own");
        let others = [take(2).await, take(3).await, take(4).await];
        assert_eq!(others.iter().flatten().count(), 2, "no more than that of all");
        drop((first, small));
        assert!(take(5).await.is_some());
        drop(others);
        drop(take(6).await);
        assert_eq!(room.all.available_permits(), MAX_MEMORY_BYTES);
        assert!(room.by_address.lock().unwrap().len() <= 1, "who asks nothing is forgotten");
    }
}

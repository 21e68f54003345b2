//! How do the API server's questions reach those who answer them?
//!
//! HTTPS, HTTP/2 or HTTP/1.1. What is asked is an `AdmissionReview`; who answers is found by the path. What cannot be read,
//! or is not answered in time, is an error to the API server, which then does as its configuration says. Nobody has to
//! prove who it is, so what is asked at once takes so much memory and no more, of which no address has more than a part.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::net::IpAddr;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
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
use crate::listen::Admission;
use crate::telemetry;

/// Largest review that is read, in bytes: an object and what it was before, each as large as etcd takes one, in JSON.
const MAX_REVIEW_BYTES: usize = 7 * 1024 * 1024;

/// How much of reviews is kept at once, in bytes: four of the largest, or thousands of the usual.
const KEPT_BYTES: usize = 4 * MAX_REVIEW_BYTES;

/// The same, for those from one address.
const KEPT_BYTES_OF_ONE: usize = MAX_REVIEW_BYTES + 1024 * 1024;

/// What a review takes at least, in bytes.
const LEAST_REVIEW_BYTES: usize = 4 * 1024;

/// How many questions one connection may ask at once.
const MAX_QUESTIONS: u32 = 128;

/// How long a review may take to arrive.
const ARRIVE: Duration = Duration::from_secs(10);

/// How long a connection may say nothing before its first request, and HTTP/1.1 between two.
const IDLE: Duration = Duration::from_secs(90);

/// Answers one question.
pub type Handler = Arc<
    dyn Fn(AdmissionRequest<DynamicObject>) -> BoxFuture<'static, AdmissionResponse> + Send + Sync,
>;

/// Who answers at a path.
#[derive(Clone)]
pub struct Route {
    /// The path, such as `/validate`.
    pub path: &'static str,
    /// How long the answer may take; the API server waits for the time that its configuration says, so less than that.
    pub deadline: Duration,
    /// Who answers.
    pub handler: Handler,
}

/// What was asked, and how it went.
#[derive(Clone, Debug, Default)]
pub struct WebhookMetrics(Family<Labels, Counter>);

/// Answers the API server's questions.
pub struct Webhook {
    /// By path, who answers.
    pub routes: BTreeMap<&'static str, Route>,
    /// Counts.
    pub metrics: WebhookMetrics,
    /// Ends with it.
    pub drain: Drain,
    /// For what is asked at once.
    pub room: Room,
}

/// Room for what is asked at once.
#[derive(Debug)]
pub struct Room {
    all: Arc<Semaphore>,
    by_address: Mutex<HashMap<IpAddr, Arc<Semaphore>>>,
}

/// Some room, until this is dropped.
type Taken = [OwnedSemaphorePermit; 2];

#[derive(Clone, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct Labels {
    path: &'static str,
    outcome: &'static str,
}

/// A question that is not answered.
#[derive(Debug, thiserror::Error)]
enum Unanswered {
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

// === impl WebhookMetrics ===

impl WebhookMetrics {
    /// Registers all.
    pub fn register(registry: &mut Registry) -> Self {
        let this = Self::default();
        let help =
            "Admission reviews by path and outcome: allowed, denied, or failed to be answered";
        registry.register("webhook_reviews", help, this.0.clone());
        this
    }

    fn count(&self, path: &'static str, outcome: &'static str) {
        self.0.get_or_create_owned(&Labels { path, outcome }).inc();
    }
}

// === impl Room ===

impl Default for Room {
    fn default() -> Self {
        Self { all: Arc::new(Semaphore::new(KEPT_BYTES)), by_address: Mutex::default() }
    }
}

impl Room {
    /// Waits for room for so many bytes from `address`.
    async fn take(&self, address: IpAddr, bytes: usize) -> Option<Taken> {
        let of_one = {
            let mut by_address = self.by_address.lock().unwrap_or_else(PoisonError::into_inner);
            by_address.retain(|_, one| Arc::strong_count(one) > 1);
            let of_one = by_address.entry(address);
            of_one.or_insert_with(|| Arc::new(Semaphore::new(KEPT_BYTES_OF_ONE))).clone()
        };
        let bytes = bytes.clamp(LEAST_REVIEW_BYTES, MAX_REVIEW_BYTES);
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        // First its own: who waits there takes nothing of the others'.
        let of_one = of_one.acquire_many_owned(bytes).await.ok()?;
        let of_all = self.all.clone().acquire_many_owned(bytes).await.ok()?;
        Some([of_one, of_all])
    }
}

// === impl Webhook ===

impl Webhook {
    /// Serves one connection until it ends.
    pub async fn serve(self: Arc<Self>, stream: TlsStream<TcpStream>, admission: Arc<Admission>) {
        let service = {
            let (webhook, admission) = (self.clone(), admission.clone());
            service_fn(move |request| {
                // The API server does not say who it is: whoever asks at all may stay.
                admission.prove();
                webhook.clone().respond(request, admission.address())
            })
        };
        let mut builder = auto::Builder::new(Tasks(self.drain.clone()));
        builder.http1().timer(TokioTimer::new()).header_read_timeout(IDLE);
        builder
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(IDLE)
            .max_concurrent_streams(MAX_QUESTIONS);
        let connection = builder.serve_connection(TokioIo::new(stream), service);
        let mut connection = std::pin::pin!(connection);
        let late = async {
            time::sleep(IDLE).await;
            if admission.is_proven() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            ended = connection.as_mut() => if let Err(error) = ended {
                debug!(error = %error, "connection of the API server broke");
            },
            // It asks nothing.
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
            None => Err(Unanswered::Path),
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
    ) -> Result<AdmissionResponse, Unanswered> {
        if request.method() != Method::POST {
            return Err(Unanswered::Method);
        }
        let bytes = request.body().size_hint().exact();
        let bytes =
            bytes.map_or(MAX_REVIEW_BYTES, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        if bytes > MAX_REVIEW_BYTES {
            return Err(Unanswered::Body);
        }
        let arrived = async {
            let taken = self.room.take(address, bytes).await.ok_or(Unanswered::Slow)?;
            let body = Limited::new(request.into_body(), MAX_REVIEW_BYTES).collect().await;
            Ok((body.map_err(|_broken| Unanswered::Body)?.to_bytes(), taken))
        };
        let arrived = time::timeout(ARRIVE, arrived).await.map_err(|_elapsed| Unanswered::Slow)?;
        let (body, _taken) = arrived?;
        let review: AdmissionReview<DynamicObject> =
            serde_json::from_slice(&body).map_err(Unanswered::Malformed)?;
        // That it is of this version goes into the answer.
        let question: AdmissionRequest<DynamicObject> =
            review.try_into().map_err(|_nothing| Unanswered::Empty)?;
        let answer = AssertUnwindSafe((route.handler)(question)).catch_unwind();
        let answer = time::timeout(route.deadline, answer).await;
        let answer = answer.map_err(|_elapsed| Unanswered::Late { within: route.deadline })?;
        answer.map_err(|_panic| Unanswered::Panicked)
    }
}

fn json(review: &AdmissionReview<DynamicObject>) -> Response<Full<Bytes>> {
    // What came as JSON goes back as JSON.
    let body = serde_json::to_vec(review).unwrap_or_default();
    let mut response = Response::new(Full::new(body.into()));
    let kind = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

// === impl Unanswered ===

impl Unanswered {
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

// === impl Route ===

impl fmt::Debug for Route {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Route")
            .field("path", &self.path)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

/// Runs the parts of a connection.
#[derive(Clone, Debug)]
struct Tasks(Drain);

impl<F> hyper::rt::Executor<F> for Tasks
where
    F: Future + Send + 'static,
{
    fn execute(&self, task: F) {
        self.0.spawn(async move { drop(task.await) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_asked_at_once_takes_so_much_room_and_one_address_only_a_part() {
        let room = Room::default();
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
        assert_eq!(room.all.available_permits(), KEPT_BYTES);
        assert!(room.by_address.lock().unwrap().len() <= 1, "who asks nothing is forgotten");
    }
}

//! How do the kubelet and Prometheus see the manager?

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::encoding::text as openmetrics;
use prometheus_client::registry::Registry;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time;
use tracing::debug;

use crate::drain::Drain;
use crate::readiness::Readiness;
use crate::telemetry;

/// How many connections are served at once: a kubelet, a Prometheus, and a few people.
const MAX_CONNECTIONS: usize = 64;

/// How long a connection may take to ask, or idle.
const IDLE: Duration = Duration::from_secs(30);

/// How long to wait when the process has no file descriptor left for a connection.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);

/// What the format of the metrics page is called.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What the pages show.
#[derive(Clone, Debug)]
pub enum Page {
    /// `/healthz`, `/livez` and `/readyz`.
    Probes {
        /// What is still awaited.
        readiness: Readiness,
        /// Not ready once it has begun.
        drain: Drain,
    },
    /// `/metrics`.
    Metrics(Arc<Registry>),
}

impl Page {
    /// Serves until it is dropped: it is to be seen while the process drains.
    pub async fn run(self, listener: TcpListener) {
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => match accepted {
                    Ok((stream, _)) => drop(connections.spawn(self.clone().serve(stream))),
                    Err(_) => time::sleep(EXHAUSTED_PAUSE).await,
                },
                // One ended.
                Some(_) = connections.join_next() => {}
            }
        }
    }

    async fn serve(self, stream: TcpStream) {
        let service = service_fn(move |request| {
            let answered = Ok::<_, Infallible>(self.answer(&request));
            async move { answered }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(IDLE)
            .serve_connection(TokioIo::new(stream), service);
        if let Err(error) = connection.await {
            debug!(error = telemetry::chain(&error), "admin connection broke");
        }
    }

    fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        if ![Method::GET, Method::HEAD].contains(request.method()) {
            return text(StatusCode::METHOD_NOT_ALLOWED, "only GET\n".to_owned());
        }
        match (self, request.uri().path()) {
            (Self::Probes { .. }, "/healthz" | "/livez") => text(StatusCode::OK, "ok\n".to_owned()),
            (Self::Probes { readiness, drain }, "/readyz") => ready(readiness, drain),
            (Self::Metrics(registry), "/metrics") => page(registry),
            _ => text(StatusCode::NOT_FOUND, "not here\n".to_owned()),
        }
    }
}

fn ready(readiness: &Readiness, drain: &Drain) -> Response<Full<Bytes>> {
    if drain.has_started() {
        return text(StatusCode::SERVICE_UNAVAILABLE, "draining\n".to_owned());
    }
    let waiting_for = readiness.waiting_for();
    if waiting_for.is_empty() {
        return text(StatusCode::OK, "ok\n".to_owned());
    }
    text(StatusCode::SERVICE_UNAVAILABLE, format!("waiting for {}\n", waiting_for.join(", ")))
}

fn page(registry: &Registry) -> Response<Full<Bytes>> {
    let mut page = String::new();
    if openmetrics::encode(&mut page, registry).is_err() {
        return text(StatusCode::INTERNAL_SERVER_ERROR, "metrics cannot be written\n".to_owned());
    }
    let mut response = text(StatusCode::OK, page);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(OPENMETRICS));
    response
}

fn text(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response
}

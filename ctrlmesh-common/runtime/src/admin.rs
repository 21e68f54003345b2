//! Shows the kubelet's probes and Prometheus' metrics over HTTP.

use std::convert::Infallible;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::path::Path;
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
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::task::JoinSet;
use tokio::time;
use tracing::debug;

use crate::drain::Drain;
use crate::readiness::Readiness;
use crate::telemetry;

/// Connections served at once: a kubelet, a Prometheus, and a few people.
const MAX_CONNECTIONS: usize = 64;

/// How long a connection may take to send a request, or idle.
const IDLE: Duration = Duration::from_secs(30);

/// The pause when the process has no file descriptor left for a connection.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);

const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
const MAX_ANSWER_BYTES: u64 = 64 * 1024;

/// The content type of the metrics page.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The pages of one listener.
#[derive(Clone, Debug, Default)]
pub struct Admin {
    pub probes: Option<Probes>,
    /// Shown as `/metrics`.
    pub metrics: Option<Arc<Registry>>,
}

/// The state behind `/healthz`, `/livez` and `/readyz`.
#[derive(Clone, Debug)]
pub struct Probes {
    pub readiness: Readiness,
    /// The process is not ready once this has started.
    pub drain: Drain,
}

impl Admin {
    /// Serves until the future is dropped: the pages stay while the process drains.
    pub async fn run<S>(self, accept: impl AsyncFn() -> io::Result<S>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        // Not on the drain: it would wait for a probe's idle connection.
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                accepted = accept(), if connections.len() < MAX_CONNECTIONS => match accepted {
                    Ok(stream) => drop(connections.spawn(self.clone().serve(stream))),
                    Err(_) => time::sleep(EXHAUSTED_PAUSE).await,
                },
                // One ended.
                Some(_) = connections.join_next() => {}
            }
        }
    }

    /// [`Admin::run`] for a TCP listener.
    pub async fn run_at(self, listener: TcpListener) {
        self.run(async || Ok(listener.accept().await?.0)).await;
    }

    async fn serve(self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
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
        match (request.uri().path(), &self.probes, &self.metrics) {
            ("/healthz" | "/livez", Some(_), _) => text(StatusCode::OK, "ok\n".to_owned()),
            ("/readyz", Some(probes), _) => probes.readyz(),
            ("/metrics", _, Some(registry)) => metrics(registry),
            _ => text(StatusCode::NOT_FOUND, self.directions()),
        }
    }

    fn directions(&self) -> String {
        let probes = self.probes.iter().flat_map(|_| ["/healthz", "/readyz"]);
        let pages: Vec<&str> = probes.chain(self.metrics.iter().map(|_| "/metrics")).collect();
        format!("try {}\n", pages.join(" or "))
    }
}

impl Probes {
    fn readyz(&self) -> Response<Full<Bytes>> {
        if self.drain.has_started() {
            return text(StatusCode::SERVICE_UNAVAILABLE, "draining\n".to_owned());
        }
        let waiting_for = self.readiness.waiting_for();
        if waiting_for.is_empty() {
            return text(StatusCode::OK, "ok\n".to_owned());
        }
        text(StatusCode::SERVICE_UNAVAILABLE, format!("waiting for {}\n", waiting_for.join(", ")))
    }
}

fn metrics(registry: &Registry) -> Response<Full<Bytes>> {
    let mut page = String::new();
    if openmetrics::encode(&mut page, registry).is_err() {
        return text(StatusCode::INTERNAL_SERVER_ERROR, "metrics cannot be written\n".to_owned());
    }
    let mut response = text(StatusCode::OK, page);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(OPENMETRICS));
    response
}

/// Listens at a socket file, for probes inside the same container. Replaces the file of an earlier process.
///
/// # Errors
/// If the file cannot be removed or created.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    UnixListener::bind(path)
}

/// Reads a page of the process that listens at `socket`, as a probe of the kubelet.
///
/// # Errors
/// If nobody answers, or not with 200; then the error is the answer's text.
pub fn probe(socket: &Path, page: &str) -> io::Result<String> {
    let mut stream = std::os::unix::net::UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PROBE_TIMEOUT))?;
    stream.set_write_timeout(Some(PROBE_TIMEOUT))?;
    write!(stream, "GET {page} HTTP/1.1\r\nhost: probe\r\nconnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.take(MAX_ANSWER_BYTES).read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    if head.starts_with("HTTP/1.1 200 ") {
        return Ok(body.to_owned());
    }
    Err(io::Error::other(body.trim_end().to_owned()))
}

fn text(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response
}

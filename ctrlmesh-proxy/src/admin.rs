//! How do the kubelet and Prometheus see the proxy?

use std::convert::Infallible;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixListener;
use tokio::task::JoinSet;
use tokio::time;
use tracing::debug;

use crate::drain::Drain;
use crate::metrics::Metrics;
use crate::readiness::Readiness;

/// How many connections are served at once: a kubelet, a Prometheus, and a few people.
const MAX_CONNECTIONS: usize = 64;

/// How long a connection may take to ask, or idle.
const IDLE: Duration = Duration::from_secs(30);

/// How long to wait when the process has no file descriptor left for a connection.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);

/// How long a probe waits for its answer, and the most that it reads of it, in bytes.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);
const MAX_ANSWER_BYTES: u64 = 64 * 1024;

/// What the format of the metrics page is called.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What the pages show.
#[derive(Clone, Debug)]
pub struct Admin {
    /// Behind `/metrics`.
    pub metrics: Arc<Metrics>,
    /// Behind `/readyz`.
    pub readiness: Readiness,
    /// Not ready once it has begun.
    pub drain: Drain,
}

impl Admin {
    /// Serves what is accepted until it is dropped: it is to be seen while the process drains.
    pub async fn run<S>(self, accept: impl AsyncFn() -> io::Result<S>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
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
            debug!(error = &error as &dyn std::error::Error, "admin connection broke");
        }
    }

    fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        if ![Method::GET, Method::HEAD].contains(request.method()) {
            return text(StatusCode::METHOD_NOT_ALLOWED, "only GET\n".to_owned());
        }
        match request.uri().path() {
            "/healthz" | "/livez" => text(StatusCode::OK, "ok\n".to_owned()),
            "/readyz" => self.readyz(),
            "/metrics" => self.page(),
            _ => text(StatusCode::NOT_FOUND, "try /healthz, /readyz or /metrics\n".to_owned()),
        }
    }

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

    fn page(&self) -> Response<Full<Bytes>> {
        let Ok(page) = self.metrics.render() else {
            return text(
                StatusCode::INTERNAL_SERVER_ERROR,
                "metrics cannot be written\n".to_owned(),
            );
        };
        let mut response = text(StatusCode::OK, page);
        response
            .headers_mut()
            .insert(header::CONTENT_TYPE, http::HeaderValue::from_static(OPENMETRICS));
        response
    }
}

/// Listens at a file for those who are in the same container; one that a process before left is replaced.
///
/// # Errors
/// Where there can be no such file.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    UnixListener::bind(path)
}

/// Asks the process that listens at `socket` for a page, as a probe of the kubelet; gives what it says where all is well.
///
/// # Errors
/// Where nobody answers, or all is not well; the error says what was said.
pub fn probe(socket: &Path, page: &str) -> io::Result<String> {
    let mut stream = std::os::unix::net::UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(ANSWERED_WITHIN))?;
    stream.set_write_timeout(Some(ANSWERED_WITHIN))?;
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
    let plain = http::HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response
}

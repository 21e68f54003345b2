//! How do the kubelet and Prometheus see the proxy?

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time;
use tracing::debug;

use crate::drain::Drain;
use crate::metrics::Metrics;
use crate::readiness::Readiness;

/// How many connections are served at once: a kubelet, a Prometheus, and a few people.
const MAX_CONNECTIONS: usize = 64;

/// How long a connection may take to ask, or idle.
const IDLE: Duration = Duration::from_secs(30);

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
    /// Serves until the process ends: it is to be seen while it drains.
    pub async fn run(self, listener: TcpListener) {
        let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            let Ok(place) = places.clone().acquire_owned().await else {
                return;
            };
            match listener.accept().await {
                Ok((stream, _)) => {
                    let admin = self.clone();
                    self.drain.spawn(async move {
                        admin.serve(stream).await;
                        drop(place);
                    });
                }
                Err(_) => time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    async fn serve(self, stream: TcpStream) {
        let drain = self.drain.clone();
        let service = service_fn(move |request| {
            let answered = Ok::<_, Infallible>(self.answer(&request));
            async move { answered }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(IDLE)
            .serve_connection(TokioIo::new(stream), service);
        let mut connection = std::pin::pin!(connection);
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            // Shutdown: no further request on this connection.
            () = drain.started() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = ended {
            debug!(
                error = &error as &dyn std::error::Error,
                "admin connection broke"
            );
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
            _ => text(
                StatusCode::NOT_FOUND,
                "try /healthz, /readyz or /metrics\n".to_owned(),
            ),
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
        text(
            StatusCode::SERVICE_UNAVAILABLE,
            format!("waiting for {}\n", waiting_for.join(", ")),
        )
    }

    fn page(&self) -> Response<Full<Bytes>> {
        let Ok(page) = self.metrics.render() else {
            return text(
                StatusCode::INTERNAL_SERVER_ERROR,
                "metrics cannot be written\n".to_owned(),
            );
        };
        let mut response = text(StatusCode::OK, page);
        response.headers_mut().insert(
            header::CONTENT_TYPE,
            http::HeaderValue::from_static(OPENMETRICS),
        );
        response
    }
}

fn text(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let plain = http::HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response
}

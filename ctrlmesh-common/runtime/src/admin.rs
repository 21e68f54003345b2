//! Shows the kubelet's probes and Prometheus' metrics over HTTP.

use std::convert::Infallible;
use std::fs;
use std::future::Future;
use std::io::{self, Read as _, Write as _};
use std::net::IpAddr;
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
use tokio::task::{AbortHandle, JoinSet};
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

/// Those that are served.
#[derive(Debug, Default)]
struct Connections {
    tasks: JoinSet<()>,
    /// With the address that they come from, in the order in which they came.
    open: Vec<(Option<IpAddr>, AbortHandle)>,
}

impl Admin {
    /// Serves until the future is dropped: the pages stay while the process drains.
    ///
    /// `accept` gives a stream, and the address that it comes from, if it has one. Where there are too many
    /// connections, the oldest of the address with the most of them ends: nobody keeps a kubelet out.
    pub async fn run<S>(self, accept: impl AsyncFn() -> io::Result<(S, Option<IpAddr>)>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        // Not on the drain: it would wait for a probe's idle connection.
        let mut connections = Connections::default();
        loop {
            tokio::select! {
                accepted = accept() => match accepted {
                    Ok((stream, from)) => connections.add(from, self.clone().serve(stream)),
                    Err(_) => time::sleep(EXHAUSTED_PAUSE).await,
                },
                Some(_) = connections.tasks.join_next() => connections.forget_ended(),
            }
        }
    }

    /// [`Admin::run`] for a TCP listener.
    pub async fn run_at(self, listener: TcpListener) {
        let accept = async || {
            let (stream, from) = listener.accept().await?;
            Ok((stream, Some(from.ip())))
        };
        self.run(accept).await;
    }

    /// [`Admin::run`] for a Unix socket.
    pub async fn run_on(self, listener: UnixListener) {
        self.run(async || Ok((listener.accept().await?.0, None))).await;
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

impl Connections {
    fn add(&mut self, from: Option<IpAddr>, serving: impl Future<Output = ()> + Send + 'static) {
        self.forget_ended();
        if self.open.len() >= MAX_CONNECTIONS {
            let of_address = |from: &Option<IpAddr>| self.open.iter().filter(|(one, _)| one == from).count();
            let most = self.open.iter().map(|(from, _)| of_address(from)).max();
            let oldest = self.open.iter().position(|(from, _)| Some(of_address(from)) == most);
            if let Some((_, task)) = oldest.map(|at| self.open.remove(at)) {
                task.abort();
            }
        }
        let task = self.tasks.spawn(serving);
        self.open.push((from, task));
    }

    fn forget_ended(&mut self) {
        self.open.retain(|(_, task)| !task.is_finished());
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

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpSocket, TcpStream};

    use super::*;

    async fn connect(from: [u8; 4], to: SocketAddr) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from((from, 0))).unwrap();
        socket.connect(to).await.unwrap()
    }

    /// Asks on a connection that stays. Whether there is an answer.
    async fn ask(stream: &mut TcpStream) -> bool {
        let mut answer = Vec::new();
        if stream.write_all(b"GET /livez HTTP/1.1\r\nhost: probe\r\n\r\n").await.is_err() {
            return false;
        }
        while !answer.ends_with(b"ok\n") {
            if !stream.read_buf(&mut answer).await.is_ok_and(|read| read > 0) {
                return false;
            }
        }
        answer.starts_with(b"HTTP/1.1 200 OK\r\n")
    }

    const KUBELET: [u8; 4] = [127, 0, 0, 1];
    const GREEDY: [u8; 4] = [127, 0, 0, 2];

    async fn crowd(address: SocketAddr) {
        let mut kept = connect(KUBELET, address).await;
        assert!(ask(&mut kept).await);
        let mut greedy = Vec::new();
        for _ in 0..2 * MAX_CONNECTIONS {
            let mut one = connect(GREEDY, address).await;
            assert!(ask(&mut one).await);
            greedy.push(one);
        }
        let mut probe = connect(KUBELET, address).await;
        assert!(ask(&mut probe).await);
        assert!(ask(&mut kept).await, "it is not the greediest");
        assert!(!ask(&mut greedy[0]).await, "the oldest has ended");
        assert!(ask(greedy.last_mut().unwrap()).await);
    }

    #[tokio::test]
    async fn who_has_the_most_connections_gives_way() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let probes = Some(Probes { readiness: Readiness::default(), drain: Drain::default() });
        tokio::select! {
            () = Admin { probes, metrics: None }.run_at(listener) => panic!("it serves no more"),
            () = crowd(address) => {}
        }
    }
}

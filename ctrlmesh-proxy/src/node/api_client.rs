//! The proxy's own requests to the API server.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;

use crate::net::tls::trust::Trust;
use crate::upstream::Target;

/// The most that is read of an answer, or of an event, in bytes.
pub(super) const MAX_BYTES: usize = 1024 * 1024;

/// An API server, and the service account for requests to it.
#[derive(Clone, Debug)]
pub struct ApiClient {
    pub target: Target,
    /// Verifies the API server.
    pub trust: Arc<Trust>,
    /// A file with the service account's token.
    pub token: PathBuf,
}

impl ApiClient {
    /// Gets a path, and reads the whole answer.
    pub(super) async fn get(&self, path: &str) -> anyhow::Result<(StatusCode, Bytes)> {
        self.with(path, "application/json", whole).await
    }

    /// Patches a path by a body of `content_type`, and reads the whole answer.
    pub(super) async fn patch(
        &self,
        path: &str,
        content_type: &'static str,
        body: Bytes,
    ) -> anyhow::Result<(StatusCode, Bytes)> {
        let request = Request::builder().method(Method::PATCH).uri(path).header(header::CONTENT_TYPE, content_type);
        self.send(request.body(Full::new(body))?, whole).await
    }

    /// Gets a path, and passes the answer on as it comes.
    pub(super) async fn with<T>(
        &self,
        path: &str,
        accept: &str,
        answered: impl AsyncFnOnce(Response<Incoming>) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let request = Request::get(path).header(header::ACCEPT, accept);
        self.send(request.body(Full::default())?, answered).await
    }

    async fn send<T>(
        &self,
        mut request: Request<Full<Bytes>>,
        answered: impl AsyncFnOnce(Response<Incoming>) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let stream = Box::pin(self.target.reach(&self.trust)).await?;
        let (mut send, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let token = std::fs::read_to_string(&self.token).context("read our token")?;
        let headers = request.headers_mut();
        headers.insert(header::HOST, HeaderValue::from_static("kubernetes.default.svc"));
        headers.insert(header::AUTHORIZATION, format!("Bearer {}", token.trim()).parse()?);
        let answered = async { answered(send.send_request(request).await?).await };
        tokio::select! {
            biased;
            answered = answered => answered,
            ended = connection => Err(anyhow::anyhow!("the connection ended: {ended:?}")),
        }
    }
}

async fn whole(response: Response<Incoming>) -> anyhow::Result<(StatusCode, Bytes)> {
    let status = response.status();
    let body = Limited::new(response.into_body(), MAX_BYTES).collect().await;
    let body = body.map_err(|error| anyhow::anyhow!("read the answer: {error}"))?;
    Ok((status, body.to_bytes()))
}

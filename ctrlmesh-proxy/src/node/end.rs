//! Is this process ended for another in its place, or is ctrlmesh removed?
//!
//! An update must let nothing pass, so what is attached stays attached and refuses until the next process serves it. When
//! the DaemonSet or its namespace goes, nobody will: then the pods are let go of. The API server is asked which of both
//! it is; where it does not answer, it counts as an update. Where it no longer knows our account, it is the end: that was
//! made with the DaemonSet and goes with it. An operator that is let go of wrongly does not escape its shard, for it does
//! not believe the API server's own certificate.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time;
use tokio_rustls::TlsConnector;
use tracing::{info, warn};

use crate::tls::trust::Trust;
use crate::upstream::{Address, Target};

/// How long the API server may take: pods that are let go of have their connections refused for so long.
const DEADLINE: Duration = Duration::from_secs(5);

/// The most that is read of an answer, in bytes.
const MAX_BYTES: usize = 1024 * 1024;

/// Who can say which it is.
#[derive(Clone, Debug)]
pub struct End {
    /// The API server.
    pub target: Target,
    /// Whom to believe to be it.
    pub trust: Arc<Trust>,
    /// Our account's token, made out to it.
    pub token: PathBuf,
    /// The namespace of our DaemonSet.
    pub namespace: String,
    /// Its name.
    pub daemon_set: String,
}

// === impl End ===

impl End {
    /// Whether ctrlmesh is removed.
    pub(super) async fn is_for_good(&self) -> bool {
        match time::timeout(DEADLINE, Box::pin(self.ask())).await {
            Ok(Ok(gone)) => {
                info!(gone, "asked whether we are removed");
                gone
            }
            Ok(Err(error)) => {
                let error = format!("{error:#}");
                warn!(error, "not known whether we are removed; what is attached stays");
                false
            }
            Err(_elapsed) => {
                warn!("the API server does not say whether we are removed; what is attached stays");
                false
            }
        }
    }

    async fn ask(&self) -> anyhow::Result<bool> {
        self.trust.refresh();
        let Self { namespace, daemon_set, .. } = self;
        let paths = [
            format!("/api/v1/namespaces/{namespace}"),
            format!("/apis/apps/v1/namespaces/{namespace}/daemonsets/{daemon_set}"),
        ];
        for path in paths {
            let (status, body) = self.get(&path).await.with_context(|| format!("get {path}"))?;
            if is_gone(status, &body).with_context(|| format!("{path}: {status}"))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    async fn get(&self, path: &str) -> anyhow::Result<(StatusCode, Bytes)> {
        let stream = match &self.target.address {
            Address::Socket(address) => TcpStream::connect(address).await?,
            Address::Host(host, port) => TcpStream::connect((host.as_str(), *port)).await?,
        };
        let tls = TlsConnector::from(self.trust.client().http1);
        let stream = Box::pin(tls.connect(self.target.name.clone(), stream)).await?;
        let (mut send, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let token = std::fs::read_to_string(&self.token).context("read our token")?;
        let request = Request::get(path)
            .header(header::HOST, "kubernetes.default.svc")
            .header(header::ACCEPT, "application/json")
            .header(header::AUTHORIZATION, format!("Bearer {}", token.trim()))
            .body(Empty::<Bytes>::new())?;
        let answered = async {
            let response = send.send_request(request).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_BYTES).collect().await;
            let body = body.map_err(|error| anyhow::anyhow!("read the answer: {error}"))?;
            anyhow::Ok((status, body.to_bytes()))
        };
        tokio::select! {
            answered = answered => answered,
            ended = connection => Err(anyhow::anyhow!("the connection ended: {ended:?}")),
        }
    }
}

/// Whether an object is gone or about to go; nothing where the answer does not say so.
fn is_gone(status: StatusCode, body: &[u8]) -> Option<bool> {
    match status {
        StatusCode::OK => {
            let object: Value = serde_json::from_slice(body).ok()?;
            let name = &object["metadata"]["name"];
            name.is_string().then(|| object["metadata"]["deletionTimestamp"].is_string())
        }
        StatusCode::NOT_FOUND | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Some(true),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_to_stay_is_not_gone_and_an_answer_that_says_nothing_says_nothing() {
        let there = br#"{"metadata": {"name": "a"}}"#;
        let going = br#"{"metadata": {"name": "a", "deletionTimestamp": "2026-01-01T00:00:00Z"}}"#;
        assert_eq!(is_gone(StatusCode::OK, there), Some(false));
        assert_eq!(is_gone(StatusCode::OK, going), Some(true));
        for gone in [404, 401, 403] {
            assert_eq!(is_gone(StatusCode::from_u16(gone).unwrap(), b""), Some(true));
        }
        assert_eq!(is_gone(StatusCode::OK, b"{}"), None);
        assert_eq!(is_gone(StatusCode::OK, b"<html>"), None);
        for unknown in [429, 500, 503] {
            assert_eq!(is_gone(StatusCode::from_u16(unknown).unwrap(), there), None);
        }
    }
}

//! Runs `ctrlmesh-proxy trace` in the proxy's container, and reads its lines.

use ctrlmesh_proxy::trace::{TraceFilter, TraceLine};
use http::StatusCode;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{AttachParams, AttachedProcess};
use kube::client::UpgradeConnectionError;
use kube::{Api, Client, Error};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader, Lines};

use super::error::TraceError;
use super::proxy_of_pod::ProxyContainer;
use crate::text;

/// The program in the proxy's image.
const PATH: &str = "/ctrlmesh-proxy";

/// Of what the program says when it fails, the beginning is shown. It is held until the program has ended.
const MAX_ERROR_BYTES: usize = 64 << 10;

/// The program as it runs. It ends with its input, which ends when this is dropped.
pub(super) struct Program {
    /// Holds the connection.
    process: AttachedProcess,
    lines: Lines<BufReader<Box<dyn AsyncRead + Unpin>>>,
    errors: Box<dyn AsyncRead + Unpin>,
    has_answered: bool,
    _input: Box<dyn Send>,
}

impl Program {
    /// # Errors
    /// If it cannot be run there.
    pub(super) async fn start(
        client: &Client,
        proxy: &ProxyContainer,
        pod: Option<&str>,
        filter: &TraceFilter,
    ) -> Result<Self, TraceError> {
        let pods: Api<Pod> = Api::namespaced(client.clone(), &proxy.namespace);
        let attach =
            AttachParams::default().container(proxy.container).stdin(true).max_stderr_buf_size(MAX_ERROR_BYTES);
        let command = command(pod, filter);
        let mut process = pods.exec(&proxy.pod, command, &attach).await.map_err(|error| failed(proxy, error))?;
        let (output, errors, input) = (process.stdout(), process.stderr(), process.stdin());
        let reader = |stream: Option<_>| -> Box<dyn AsyncRead + Unpin> {
            match stream {
                Some(stream) => Box::new(stream),
                None => Box::new(tokio::io::empty()),
            }
        };
        let lines = BufReader::new(reader(output)).lines();
        Ok(Self { process, lines, errors: reader(errors), has_answered: false, _input: Box::new(input) })
    }

    /// Whether the proxy has said anything, if only that it is there.
    pub(super) fn has_answered(&self) -> bool {
        self.has_answered
    }

    /// The next line that says something. `None`: the proxy has ended.
    ///
    /// # Errors
    /// If the program failed, or says what is no such line.
    pub(super) async fn next(&mut self) -> Result<Option<TraceLine>, TraceError> {
        while let Some(line) = self.lines.next_line().await.map_err(TraceError::Read)? {
            self.has_answered = true;
            if !line.is_empty() {
                return Ok(Some(serde_json::from_str(&line)?));
            }
        }
        let mut errors = String::new();
        self.errors.read_to_string(&mut errors).await.map_err(TraceError::Read)?;
        let status = match self.process.take_status() {
            Some(status) => status.await,
            None => None,
        };
        let Some(status) = status.filter(|status| status.status.as_deref() == Some("Failure")) else { return Ok(None) };
        let reason = if errors.trim().is_empty() { status.message.unwrap_or_default() } else { errors };
        Err(TraceError::Failed { reason: text::line(&reason) })
    }
}

fn command(pod: Option<&str>, filter: &TraceFilter) -> Vec<String> {
    let mut command = vec![PATH.to_owned(), "trace".to_owned()];
    command.extend(pod.map(|pod| format!("--pod={pod}")));
    command.extend(filter.arguments());
    command
}

fn failed(proxy: &ProxyContainer, error: Error) -> TraceError {
    let is_forbidden = match &error {
        Error::Api(status) => status.code == StatusCode::FORBIDDEN,
        Error::UpgradeConnection(UpgradeConnectionError::ProtocolSwitch(status)) => *status == StatusCode::FORBIDDEN,
        _ => false,
    };
    if is_forbidden {
        return TraceError::Forbidden { namespace: proxy.namespace.clone() };
    }
    TraceError::Exec(Box::new(error))
}

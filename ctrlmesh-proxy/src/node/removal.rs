//! Finds out whether ctrlmesh is removed, and then takes everything out of the kernel.
//!
//! During an update nothing may pass, so pods stay attached, and the kernel refuses connections that no process serves.
//! When the DaemonSet or its namespace is deleted, no process will follow, and the pods are released. The API server
//! tells which of both it is: only a 404 or a deletion timestamp of these two objects counts. A 401 or 403 proves
//! nothing. The service account may be deleted before this process is stopped: with its namespace, or by Helm right
//! after the DaemonSet. So both are watched from the start, and a deletion is seen while the account still may.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use http::StatusCode;
use http_body_util::BodyExt as _;
use serde_json::Value;
use tokio::time::{self, Instant};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::api_client::{ApiClient, MAX_BYTES};
use super::reconciler::OWNER;
use crate::policy::PodName;
use ctrlmesh_intercept::Options;
use ctrlmesh_runtime::drain::Drain;

/// For an answer of the API server.
const DEADLINE: Duration = Duration::from_secs(5);

/// Before an object is watched again: the API server may be restarting.
const WATCH_RETRY: Duration = Duration::from_secs(5);

/// The timeout of a watch that the API server gets.
const WATCH_SECONDS: u32 = 300;

/// A watch that lasts longer is given up: the API server may be gone without closing the connection.
const WATCH_DEADLINE: Duration = Duration::from_secs(330);

/// Only an object's metadata is needed.
const METADATA: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";

/// Asks the API server whether ctrlmesh is removed.
#[derive(Clone, Debug)]
pub struct RemovalCheck {
    api: ApiClient,
    daemon_set: PodName,
    /// Whether a watch saw the deletion of [`Watched::Namespace`] or [`Watched::DaemonSet`].
    going: Arc<[AtomicBool; 2]>,
}

/// What is watched, and its place in [`RemovalCheck::going`].
#[derive(Clone, Copy, Debug)]
enum Watched {
    Namespace,
    DaemonSet,
}

/// Takes ctrlmesh out of the kernel when it is removed.
#[derive(Clone, Debug)]
pub struct Removal {
    /// Folder of the kernel's pins.
    pub pins: PathBuf,
    /// Tells whether ctrlmesh is removed; without it, another process always follows.
    pub end: Option<RemovalCheck>,
}

impl Removal {
    /// Whether ctrlmesh is removed.
    pub async fn is_due(&self) -> bool {
        match &self.end {
            Some(end) => end.is_for_good().await,
            None => false,
        }
    }

    /// Takes everything out of the kernel.
    pub fn carry_out(&self) {
        let options = Options { pins: self.pins.clone(), ..Options::new(OWNER) };
        match ctrlmesh_intercept::uninstall(&options, false) {
            Ok(()) => info!("everything is taken out of the kernel"),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                warn!(error, "not everything could be taken out of the kernel");
            }
        }
    }

    /// Does both, for a process that serves no pods.
    pub async fn if_due(&self) {
        if self.is_due().await {
            self.carry_out();
        }
    }

    /// Waits until the process is `asked` to leave, and then returns whether removal is due.
    pub(super) async fn once_asked(self, asked: CancellationToken) -> bool {
        asked.cancelled().await;
        self.is_due().await
    }
}

impl RemovalCheck {
    /// For a DaemonSet.
    pub fn new(api: ApiClient, daemon_set: PodName) -> Self {
        Self { api, daemon_set, going: Arc::default() }
    }

    /// Watches the namespace and the DaemonSet until shutdown.
    pub async fn watch(self, drain: Drain) {
        tokio::select! {
            () = drain.started() => {}
            () = self.watch_forever(Watched::Namespace) => {}
            () = self.watch_forever(Watched::DaemonSet) => {}
        }
    }

    async fn watch_forever(&self, watched: Watched) {
        loop {
            let begun = Instant::now();
            let ended = time::timeout(WATCH_DEADLINE, Box::pin(self.watch_once(watched))).await;
            if let Err(error) = ended.map_err(anyhow::Error::from).flatten() {
                let error = format!("{error:#}");
                debug!(?watched, error, "not watched for a moment");
                time::sleep(WATCH_RETRY).await;
            } else if begun.elapsed() < WATCH_RETRY {
                // An API server that ends each watch at once is not asked in a loop.
                time::sleep(WATCH_RETRY).await;
            }
        }
    }

    async fn is_for_good(&self) -> bool {
        let asked = time::timeout(DEADLINE, Box::pin(self.ask())).await;
        let asked = asked.map_err(anyhow::Error::from).flatten();
        match asked {
            Ok(gone) => {
                info!(gone, "asked whether we are removed");
                gone
            }
            Err(error) => {
                let gone = self.going.iter().any(|going| going.load(Ordering::Relaxed));
                let error = format!("{error:#}");
                warn!(error, gone, "the API server does not say whether we are removed");
                gone
            }
        }
    }

    async fn ask(&self) -> anyhow::Result<bool> {
        let PodName { namespace, name } = &self.daemon_set;
        let set = format!("/apis/apps/v1/namespaces/{namespace}/daemonsets/{name}");
        let paths = [(format!("/api/v1/namespaces/{namespace}"), namespace), (set, name)];
        let mut unknown = None;
        for (path, name) in paths {
            let (status, body) = self.api.get(&path).await.with_context(|| format!("get {path}"))?;
            match is_gone(status, &body, name) {
                Some(true) => return Ok(true),
                Some(false) => {}
                None => unknown = Some(format!("{path}: {status}")),
            }
        }
        match unknown {
            Some(unknown) => Err(anyhow::Error::msg(unknown)),
            None => Ok(false),
        }
    }

    async fn watch_once(&self, watched: Watched) -> anyhow::Result<()> {
        let PodName { namespace, name } = &self.daemon_set;
        let (all, name) = match watched {
            Watched::Namespace => ("/api/v1/namespaces".to_owned(), namespace),
            Watched::DaemonSet => (format!("/apis/apps/v1/namespaces/{namespace}/daemonsets"), name),
        };
        let path = format!("{all}?watch=true&fieldSelector=metadata.name%3D{name}&timeoutSeconds={WATCH_SECONDS}");
        self.api
            .with(&path, METADATA, async |response| {
                let (status, mut body) = (response.status(), response.into_body());
                ensure!(status.is_success(), "watch {name}: {status}");
                let mut bytes = Vec::new();
                while let Some(frame) = body.frame().await {
                    bytes.extend(frame?.into_data().unwrap_or_default());
                    while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
                        let event: Vec<u8> = bytes.drain(..=end).collect();
                        if let Some(going) = is_going(&event, name) {
                            self.going[watched as usize].store(going, Ordering::Relaxed);
                        }
                    }
                    ensure!(bytes.len() <= MAX_BYTES, "an event of more than {MAX_BYTES} bytes");
                }
                Ok(())
            })
            .await
    }
}

/// Whether an object is deleted or being deleted; `None` where the answer is not about this object.
fn is_gone(status: StatusCode, body: &[u8], name: &str) -> Option<bool> {
    let object: Value = serde_json::from_slice(body).ok()?;
    match status {
        StatusCode::OK => {
            let metadata = &object["metadata"];
            (metadata["name"] == name).then(|| metadata["deletionTimestamp"].is_string())
        }
        StatusCode::NOT_FOUND => {
            let its = object["reason"] == "NotFound" && object["details"]["name"] == name;
            its.then_some(true)
        }
        _ => None,
    }
}

/// Whether an object is being deleted, by an event; `None` where the event is not about this object.
fn is_going(event: &[u8], name: &str) -> Option<bool> {
    let event: Value = serde_json::from_slice(event).ok()?;
    let metadata = &event["object"]["metadata"];
    if metadata["name"] != name {
        return None;
    }
    Some(event["type"] == "DELETED" || metadata["deletionTimestamp"].is_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const THERE: &str = r#"{"metadata": {"name": "a"}}"#;
    const GOING: &str = r#"{"metadata": {"name": "a", "deletionTimestamp": "2026-01-01T00:00:00Z"}}"#;

    fn gone(status: u16, body: &str) -> Option<bool> {
        is_gone(StatusCode::from_u16(status).unwrap(), body.as_bytes(), "a")
    }

    #[test]
    fn only_what_is_said_of_the_object_itself_is_believed() {
        assert_eq!(gone(200, THERE), Some(false));
        assert_eq!(gone(200, GOING), Some(true));
        let missing = r#"{"kind": "Status", "reason": "NotFound", "details": {"name": "a"}}"#;
        assert_eq!(gone(404, missing), Some(true));
        // A kind that is not served, a load balancer, another object.
        assert_eq!(gone(404, r#"{"kind": "Status", "reason": "NotFound", "details": {}}"#), None);
        assert_eq!(gone(404, "default backend - 404"), None);
        assert_eq!(gone(200, "{}"), None);
        assert_eq!(gone(200, r#"{"metadata": {"name": "b"}}"#), None);
        // An account that is not known, or may see nothing any more, is no proof.
        for unknown in [401, 403, 429, 500, 503] {
            assert_eq!(gone(unknown, missing), None);
            assert_eq!(gone(unknown, GOING), None);
        }
    }

    #[test]
    fn an_event_says_whether_the_object_goes() {
        let going = |kind: &str, object: &str| {
            let event = format!(r#"{{"type": "{kind}", "object": {object}}}"#);
            is_going(event.as_bytes(), "a")
        };
        assert_eq!(going("ADDED", THERE), Some(false));
        assert_eq!(going("MODIFIED", GOING), Some(true));
        assert_eq!(going("DELETED", THERE), Some(true));
        assert_eq!(going("ERROR", r#"{"kind": "Status", "code": 410}"#), None);
    }
}

//! Says on the Node whether pods that are enrolled can be served there.
//!
//! The label keeps pods to such nodes (a preference that the manager gives them), and the taint, where the node was
//! registered with it, keeps all pods away until the proxy serves. The account may patch its own Node only, and there
//! only these two (`ValidatingAdmissionPolicy` `ctrlmesh-node`).

use std::time::Duration;

use anyhow::{Context as _, bail};
use ctrlmesh_common::names::{NOT_READY_TAINT, label};
use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::readiness::Readiness;
use http::StatusCode;
use serde_json::{Value, json};
use tokio::time;
use tracing::{debug, warn};

use super::api_client::ApiClient;

/// For all that is asked of the API server at once.
const DEADLINE: Duration = Duration::from_secs(5);

/// Between attempts. The API server may be restarting, or the rights may not be there yet.
const RETRY: Duration = Duration::from_secs(5);

/// Between two times that it is said. Where nothing is new, the API server stores nothing.
const AGAIN: Duration = Duration::from_mins(5);

/// Between looks at whether the process is ready.
const READY_POLL: Duration = Duration::from_millis(100);

/// Writes to the Node of this process.
#[derive(Clone, Debug)]
pub struct Announcement {
    api: ApiClient,
    node: String,
}

impl Announcement {
    /// For the Node of this name.
    pub fn new(api: ApiClient, node: String) -> Self {
        Self { api, node }
    }

    /// Says, once the process is ready, that pods are served, and says so again and again until shutdown: a Node may be
    /// registered anew, and a process that failed to follow this one may have said otherwise.
    pub async fn once_ready(self, readiness: Readiness, drain: Drain) {
        let announced = async {
            while !readiness.waiting_for().is_empty() {
                time::sleep(READY_POLL).await;
            }
            loop {
                let said = self.say(true).await;
                time::sleep(if said { AGAIN } else { RETRY }).await;
            }
        };
        tokio::select! {
            () = drain.started() => {}
            () = announced => {}
        }
    }

    /// Says that the node's kernel does not let us serve pods. Tried once: the process ends with its error.
    pub async fn refused_by_kernel(&self) {
        self.say(false).await;
    }

    /// Returns whether the Node says so now.
    async fn say(&self, served: bool) -> bool {
        let said = time::timeout(DEADLINE, Box::pin(self.write(served))).await;
        match said.map_err(anyhow::Error::from).flatten() {
            Ok(()) => {
                debug!(node = self.node, served, "the Node says whether pods are served");
                true
            }
            Err(error) => {
                let error = format!("{error:#}");
                warn!(node = self.node, served, error, "the Node does not say yet whether pods are served");
                false
            }
        }
    }

    async fn write(&self, served: bool) -> anyhow::Result<()> {
        let label = json!({"metadata": {"labels": {label::EBPF: served.to_string()}}});
        let node = self.patch("application/merge-patch+json", &label).await.context("label the Node")?;
        if served && let Some(patch) = without_taint(&node) {
            self.patch("application/json-patch+json", &patch).await.context("take the taint away")?;
        }
        Ok(())
    }

    async fn patch(&self, content_type: &'static str, change: &Value) -> anyhow::Result<Value> {
        let path = format!("/api/v1/nodes/{}", self.node);
        let (status, body) = self.api.patch(&path, content_type, change.to_string().into()).await?;
        if status != StatusCode::OK {
            let answer: Value = serde_json::from_slice(&body).unwrap_or_default();
            bail!("patch {path}: {status}: {}", answer["message"].as_str().unwrap_or_default());
        }
        serde_json::from_slice(&body).context("read the Node")
    }
}

/// The JSON patch (RFC 6902) that takes our taint away; `None` where the Node has none. It fails where somebody else
/// has changed the list meanwhile: taints are one atomic list, that a merge patch would write whole.
fn without_taint(node: &Value) -> Option<Value> {
    let taints = node["spec"]["taints"].as_array()?;
    let kept: Vec<&Value> = taints.iter().filter(|taint| taint["key"] != NOT_READY_TAINT).collect();
    let path = "/spec/taints";
    (kept.len() < taints.len())
        .then(|| json!([{"op": "test", "path": path, "value": taints}, {"op": "replace", "path": path, "value": kept}]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_taint_alone_is_taken_away() {
        let other = json!({"key": "example.com/other", "effect": "NoExecute"});
        let ours = |effect: &str| json!({"key": NOT_READY_TAINT, "effect": effect});
        let all = json!([ours("NoSchedule"), other, ours("NoExecute")]);
        let patch = without_taint(&json!({"spec": {"taints": all}})).unwrap();
        assert_eq!(patch[0], json!({"op": "test", "path": "/spec/taints", "value": all}));
        assert_eq!(patch[1], json!({"op": "replace", "path": "/spec/taints", "value": [other]}));
        assert_eq!(without_taint(&json!({"spec": {"taints": [other]}})), None);
        assert_eq!(without_taint(&json!({"spec": {}})), None);
    }
}

//! Clients of the bed's API server: as its administrator, or as a pod.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Namespace, Pod, ServiceAccount};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, PostParams};
use kube::{Client, ResourceExt as _};
use serde_json::json;

use crate::access;
use crate::control_plane::ControlPlane;

/// How long [`retry`] goes on.
const RETRY_FOR: Duration = Duration::from_mins(2);

/// The identity of a pod.
#[derive(Clone, Debug)]
pub struct BoundToken {
    /// A service-account token that is bound to the pod.
    pub token: String,
    /// The pod's UID.
    pub pod_uid: String,
}

impl ControlPlane {
    /// A client that is a member of `system:masters`. It belongs to the runtime that it is made in.
    ///
    /// # Errors
    /// Where the kubeconfig cannot be read.
    pub async fn client(&self) -> Result<Client> {
        access::client(&self.kubeconfig()).await
    }

    /// The same, at the API server of this number, from 0.
    ///
    /// # Errors
    /// Where the kubeconfig cannot be read.
    pub async fn client_of(&self, number: usize) -> Result<Client> {
        access::client(&self.kubeconfig_of(number)).await
    }

    /// Makes a namespace called `<prefix>-<random>`, so that tests do not meet.
    ///
    /// # Errors
    /// Where the API server refuses it.
    pub async fn namespace(&self, prefix: &str) -> Result<String> {
        let namespace = Namespace {
            metadata: ObjectMeta { generate_name: Some(format!("{prefix}-")), ..ObjectMeta::default() },
            ..Namespace::default()
        };
        let made = Api::all(self.client().await?).create(&PostParams::default(), &namespace).await?;
        Ok(made.name_any())
    }

    /// Makes a pod and its service account, and a token that is bound to the pod.
    ///
    /// The pod is an object only: nothing runs it here.
    ///
    /// # Errors
    /// Where the API server refuses one of them.
    pub async fn pod_token(&self, namespace: &str, pod: &str, audiences: &[&str]) -> Result<BoundToken> {
        let client = self.client().await?;
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
        let account = serde_json::from_value(json!({"metadata": {"name": pod}}))?;
        accounts.create(&PostParams::default(), &account).await.context("create the service account")?;
        let pods: Api<Pod> = Api::namespaced(client, namespace);
        let spec = json!({
            "metadata": {"name": pod},
            "spec": {"serviceAccountName": pod, "containers": [{"name": "operator", "image": "none"}]},
        });
        let made =
            pods.create(&PostParams::default(), &serde_json::from_value(spec)?).await.context("create the pod")?;
        let pod_uid = made.uid().context("a pod without UID")?;
        let request = TokenRequest {
            spec: Some(TokenRequestSpec {
                audiences: Some(audiences.iter().map(ToString::to_string).collect()),
                bound_object_ref: Some(BoundObjectReference {
                    api_version: Some("v1".to_owned()),
                    kind: Some("Pod".to_owned()),
                    name: Some(pod.to_owned()),
                    uid: Some(pod_uid.clone()),
                }),
                ..TokenRequestSpec::default()
            }),
            ..TokenRequest::default()
        };
        let answer = accounts.create_token_request(pod, &PostParams::default(), &request).await?;
        let token = answer.status.and_then(|status| status.token).context("a token request without token")?;
        Ok(BoundToken { token, pod_uid })
    }
}

/// Repeats `attempt` until it succeeds, for at most two minutes: for what the API server does in its own time,
/// such as serving a resource whose definition has just been created.
///
/// # Errors
/// The last error, when the time is over.
pub async fn retry<T, E, F>(mut attempt: impl FnMut() -> F) -> Result<T, E>
where
    F: Future<Output = Result<T, E>>,
{
    let deadline = Instant::now() + RETRY_FOR;
    loop {
        match attempt().await {
            Err(_) if Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            result => return result,
        }
    }
}

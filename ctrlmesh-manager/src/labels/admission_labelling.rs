//! Who labels an object before anybody can see it?
//!
//! The API server itself, by a policy, where it serves such and has a namespace to copy from; for all else it asks our
//! webhook. The leader keeps what is wanted and takes away what is not.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding, MutatingWebhookConfiguration,
    WebhookClientConfig,
};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::core::GroupVersion;
use kube::{Api, Client, Resource as _, discovery};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Kind, POLICY, binding, policy, webhook};
use crate::rules::label_scheme::Scheme;

const FIELD_MANAGER: &str = "ctrlmesh-manager";

/// Keeps what labels at once.
#[derive(Clone)]
pub struct AdmissionLabelling {
    pub client: Client,
    pub namespace: String,
    pub scheme: Arc<Scheme>,
    /// Where the API server asks our webhook, but for whom it believes there.
    pub asked: WebhookClientConfig,
    /// Whom it believes, in PEM, at this moment.
    pub believed: Arc<dyn Fn() -> String + Send + Sync>,
}

// === impl AdmissionLabelling ===

impl AdmissionLabelling {
    /// Writes what has to be there for `kinds`.
    pub(super) async fn keep(&self, kinds: &BTreeMap<String, Kind>) -> kube::Result<()> {
        let group = GroupVersion::gv("admissionregistration.k8s.io", "v1");
        let group = discovery::pinned_group(&self.client, &group).await?;
        let by_itself = group.recommended_kind("MutatingAdmissionPolicy").is_some();
        if by_itself {
            Box::pin(self.keep_policy(kinds)).await?;
        }
        let asked = WebhookClientConfig {
            ca_bundle: Some(ByteString((self.believed)().into_bytes())),
            ..self.asked.clone()
        };
        let wanted = webhook(kinds, by_itself, &self.namespace, asked);
        let webhooks: Api<MutatingWebhookConfiguration> = Api::all(self.client.clone());
        match wanted {
            Some(mut wanted) => {
                wanted.metadata.owner_references = self.owner().await?;
                apply(&webhooks, &wanted).await
            }
            None => remove(&webhooks).await,
        }
    }

    /// What it goes with: the manager's namespace.
    async fn owner(&self) -> kube::Result<Option<Vec<OwnerReference>>> {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let owner = namespaces.get(&self.namespace).await?.owner_ref(&());
        Ok(owner.map(|owner| vec![owner]))
    }

    async fn keep_policy(&self, kinds: &BTreeMap<String, Kind>) -> kube::Result<()> {
        let policies: Api<MutatingAdmissionPolicy> = Api::all(self.client.clone());
        let bindings: Api<MutatingAdmissionPolicyBinding> = Api::all(self.client.clone());
        if let Some(mut policy) = policy(kinds, &self.scheme) {
            let mut binding = binding();
            let owner = self.owner().await?;
            policy.metadata.owner_references.clone_from(&owner);
            binding.metadata.owner_references = owner;
            apply(&policies, &policy).await?;
            apply(&bindings, &binding).await
        } else {
            remove(&bindings).await?;
            remove(&policies).await
        }
    }
}

impl fmt::Debug for AdmissionLabelling {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("AdmissionLabelling").field("asked", &self.asked).finish_non_exhaustive()
    }
}

async fn apply<K>(api: &Api<K>, wanted: &K) -> kube::Result<()>
where
    K: Clone + fmt::Debug + DeserializeOwned + Serialize,
{
    let params = PatchParams::apply(FIELD_MANAGER).force();
    api.patch(POLICY, &params, &Patch::Apply(wanted)).await.map(drop)
}

async fn remove<K: Clone + fmt::Debug + DeserializeOwned>(api: &Api<K>) -> kube::Result<()> {
    match api.get_opt(POLICY).await? {
        Some(_) => match api.delete(POLICY, &DeleteParams::default()).await {
            // Somebody else was first.
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            removed => removed.map(drop),
        },
        None => Ok(()),
    }
}

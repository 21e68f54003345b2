//! Configures labelling at admission.
//!
//! A policy in the API server labels where it is served and can copy from a namespace. Our webhook labels the rest. The
//! leader writes both, and removes them when they are not needed.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding, MutatingWebhookConfiguration, WebhookClientConfig,
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

#[derive(Clone)]
pub struct AdmissionLabelling {
    pub client: Client,
    pub namespace: String,
    pub scheme: Arc<Scheme>,
    /// How the API server reaches our webhook, without CA.
    pub webhook_client: WebhookClientConfig,
    /// The current trust bundle, in PEM.
    pub trust_bundle: Arc<dyn Fn() -> String + Send + Sync>,
}

impl AdmissionLabelling {
    /// Writes the configuration for `kinds`.
    pub(super) async fn keep(&self, kinds: &BTreeMap<String, Kind>) -> kube::Result<()> {
        let group = GroupVersion::gv("admissionregistration.k8s.io", "v1");
        let group = discovery::pinned_group(&self.client, &group).await?;
        let by_itself = group.recommended_kind("MutatingAdmissionPolicy").is_some();
        if by_itself {
            Box::pin(self.keep_policy(kinds)).await?;
        }
        let client = WebhookClientConfig {
            ca_bundle: Some(ByteString((self.trust_bundle)().into_bytes())),
            ..self.webhook_client.clone()
        };
        let wanted = webhook(kinds, by_itself, &self.namespace, client);
        let webhooks: Api<MutatingWebhookConfiguration> = Api::all(self.client.clone());
        match wanted {
            Some(mut wanted) => {
                wanted.metadata.owner_references = self.owner().await?;
                apply(&webhooks, &wanted).await
            }
            None => remove(&webhooks).await,
        }
    }

    /// The manager's namespace: the configuration is deleted with it.
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
        out.debug_struct("AdmissionLabelling").field("webhook_client", &self.webhook_client).finish_non_exhaustive()
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
            // Another client was first.
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            removed => removed.map(drop),
        },
        None => Ok(()),
    }
}

//! State that the parts of a running manager share.

use std::sync::Arc;

use k8s_openapi::api::admissionregistration::v1::WebhookClientConfig;
use kube::{Client, Config};
use tokio::sync::watch;

use crate::admission::placement::Placement;
use crate::ca::store::CaStore;
use crate::ca::trust_bundle::TrustBundle;
use crate::cluster::confirmations::Confirmations;
use crate::cluster::plan::Plan;
use crate::config::RunArgs;
use crate::drain::Drain;
use crate::leader::lease::Leadership;
use crate::ownership::fence_state::States;
use crate::push::policy_store::PolicyStore;
use crate::push::service::LeaderClient;
use crate::readiness::Readiness;
use crate::rules::shard::Labelling;

#[derive(Clone)]
pub struct Context {
    pub args: Arc<RunArgs>,
    pub labelling: Labelling,
    pub client: Client,
    /// That of the client.
    pub api_config: Config,
    pub store: Arc<PolicyStore>,
    /// The plan of the stored policies.
    pub published: watch::Sender<Option<Arc<Plan>>>,
    pub placement: Arc<Placement>,
    /// What the fences of roots have been shown to enforce.
    pub fences: watch::Sender<Arc<States>>,
    pub leadership: Leadership,
    pub leader: LeaderClient,
    /// Of policies that lapse.
    pub confirmations: Arc<Confirmations>,
    pub ca_store: Arc<CaStore>,
    pub trust_bundle: Arc<TrustBundle>,
    /// How the API server reaches our webhooks, without path and CA.
    pub webhook_client: WebhookClientConfig,
    /// The port for proxies.
    pub grpc: u16,
    pub readiness: Readiness,
    pub drain: Drain,
}

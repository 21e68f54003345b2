//! What do all parts of a running manager share?

use std::sync::Arc;

use k8s_openapi::api::admissionregistration::v1::WebhookClientConfig;
use kube::Client;
use tokio::sync::watch;

use crate::admission::placement::Seats;
use crate::ca::store::Vault;
use crate::ca::trust_bundle::Roots;
use crate::cluster::plan::Plan;
use crate::config::RunArgs;
use crate::drain::Drain;
use crate::leader::lease::Leadership;
use crate::push::policy_store::Board;
use crate::push::service::Leader;
use crate::readiness::Readiness;
use crate::rules::shard::Labelling;

/// What all parts of a running manager share.
#[derive(Clone)]
pub struct Context {
    /// What the manager was told.
    pub args: Arc<RunArgs>,
    /// How objects are to be labelled.
    pub wanted: Labelling,
    /// The API server.
    pub client: Client,
    /// What pods are to be told.
    pub board: Arc<Board>,
    /// The plan from which that follows, set once it is posted.
    pub posted: watch::Sender<Option<Arc<Plan>>>,
    /// Gives pods their shards, as that says.
    pub seats: Arc<Seats>,
    /// Whether this replica writes.
    pub leadership: Leadership,
    /// The replica that does, where it is another.
    pub leader: Leader,
    /// The certificate authorities.
    pub vault: Arc<Vault>,
    /// Who believes them.
    pub roots: Arc<Roots>,
    /// Where the API server asks our webhooks, but for the path and for whom it believes there.
    pub asked: WebhookClientConfig,
    /// The port at which proxies are told.
    pub grpc: u16,
    /// What is still awaited.
    pub readiness: Readiness,
    /// Ends with it.
    pub drain: Drain,
}

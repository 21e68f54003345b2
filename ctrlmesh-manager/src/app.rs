//! Builds the process `ctrlmesh-manager run` from its parts.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_runtime::admin::{Admin, Probes};
use ctrlmesh_runtime::listen::{ListenError, listen};
use ctrlmesh_runtime::termination::Termination;
use k8s_openapi::api::admissionregistration::v1::{ServiceReference, WebhookClientConfig};
use kube::{Client, Config};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use rustls::crypto::aws_lc_rs;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio::sync::watch;
use tokio::time;
use tokio_rustls::TlsAcceptor;
use tracing::{info, warn};

use crate::admission::placement::Placement;
use crate::admission::webhook::{ReviewMemory, Route, Webhook, WebhookMetrics};
use crate::ca::cluster_ca::ClusterCa;
use crate::ca::recovery::LeaseWatch;
use crate::ca::serving::{self, ServingError};
use crate::ca::store::{AuthoritySettings, CaStore, CaStoreError};
use crate::ca::trust_bundle::TrustBundle;
use crate::config::{RunArgs, SameKeysError};
use crate::drain::Drain;
use crate::leader::lease::{self, Candidate};
use crate::listen::{Limits, Listener};
use crate::metrics::{self, PREFIX, Refusals};
use crate::ownership::fence_state::FenceStates;
use crate::push::bypass_events::BypassEvents;
use crate::push::identity::Reviewer;
use crate::push::service::{
    Accounts, LatestConnections, LeaderClient, OldestConfirmed, PushMetrics, PushService, ReceiptRelay, ReviewSchedule,
    SigningQuota,
};
use crate::push::staleness::StalenessCheck;
use crate::readiness::Readiness;
use crate::rules::shard::Labelling;
use crate::telemetry;
use crate::tls::{self, Presented};

pub mod api_client;
pub mod context;
mod controllers;
mod ca_expiry;
mod connection_limits;

use api_client::ReachError;
use ca_expiry::CaExpiry;
use context::Context;
use controllers::ControllerMetrics;

/// Pause between attempts to reach the API server at start.
const RETRY: Duration = Duration::from_secs(1);

/// Each API server holds a few connections.
const WEBHOOK_LIMITS: Limits = Limits { connections: 1024, unproven: 512, unproven_of_one: 128 };

#[derive(Debug, Error)]
pub enum AppError {
    #[error(transparent)]
    Reach(#[from] ReachError),
    #[error(transparent)]
    Labels(#[from] SameKeysError),
    #[error("open the certificate authorities")]
    CaStore(#[from] CaStoreError),
    #[error("prepare the manager's certificate")]
    Serving(#[from] ServingError),
    #[error("set up TLS")]
    Library(#[from] rustls::Error),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("start the runtime")]
    Runtime(#[source] io::Error),
}

struct Metrics {
    registry: Arc<Registry>,
    refusals: Refusals,
    push: PushMetrics,
    webhook: WebhookMetrics,
    controllers: ControllerMetrics,
    reviewer: Reviewer,
    leader: Gauge,
    fences_unproved: Gauge,
    ca_write_failures: Counter,
    ca_expiry: CaExpiry,
}

/// What the parts of the manager are built from.
struct Startup {
    args: RunArgs,
    labelling: Labelling,
    client: Client,
    api_config: Config,
    background: Client,
    cluster_ca: ClusterCa,
    metrics: Metrics,
    readiness: Readiness,
    drain: Drain,
}

/// Runs until SIGTERM or SIGINT. Returns whether everything ended in time.
///
/// # Errors
/// Where it cannot start.
pub fn run(args: RunArgs) -> Result<bool, AppError> {
    // Fails only if it is installed already.
    drop(aws_lc_rs::default_provider().install_default());
    let runtime = Builder::new_multi_thread().enable_all().build().map_err(AppError::Runtime)?;
    runtime.block_on(Box::pin(serve(args)))
}

async fn serve(args: RunArgs) -> Result<bool, AppError> {
    let labelling = args.labels.labelling()?;
    let config = api_client::config(&args).await?;
    let cluster_ca = ClusterCa::of(&config);
    let client = api_client::client(config.clone())?;
    let background = api_client::client(api_client::background(config.clone(), &args))?;
    let drain = Drain::default();
    let readiness = Readiness::default();
    let starting = readiness.block("certificates");
    let metrics = Metrics::new(&client);
    let probes = Probes { readiness: readiness.clone(), drain: drain.clone() };
    let probes = Admin { probes: Some(probes), metrics: None };
    let probes = probes.run_at(listen("probes", args.listen_probes)?);
    let pages = Admin { probes: None, metrics: Some(metrics.registry.clone()) };
    let pages = pages.run_at(listen("metrics", args.listen_metrics)?);
    let startup = Startup {
        args: args.clone(),
        labelling,
        client,
        api_config: config,
        background,
        cluster_ca,
        metrics,
        readiness,
        drain: drain.clone(),
    };
    let work = async {
        let mut stop = Termination::listen().map_err(AppError::Runtime)?;
        let started = tokio::select! {
            started = startup.run() => started?,
            () = stop.requested() => return Ok(true),
        };
        drop(starting);
        info!(namespace = started.args.namespace, "ready");
        stop.requested().await;
        info!(deadline = ?args.drain_timeout, "draining");
        let clean = drain.finish(args.drain_timeout).await;
        info!(clean, "drained");
        Ok(clean)
    };
    tokio::select! {
        done = work => done,
        // Probes and metrics are served until the process ends.
        () = probes => Ok(true),
        () = pages => Ok(true),
    }
}

impl Startup {
    async fn run(self) -> Result<Context, AppError> {
        let grpc_listener = listen("proxies", self.args.listen_grpc)?;
        let webhook_listener = listen("webhooks", self.args.listen_webhook)?;
        let ca_store = Arc::new(open(&self.client, &self.args).await?);
        let presented = serving::first(&ca_store, &self.args.names())?;
        let grpc = grpc_listener.local_addr().map_err(AppError::Runtime)?;
        let webhook = webhook_listener.local_addr().map_err(AppError::Runtime)?;
        let metrics = self.metrics;
        let reachable = self.args.grpc_address.map_or(grpc, |address| address.at(grpc.port()));
        let candidate = Candidate {
            lease: self.args.service.clone(),
            identity: identity(&self.args),
            address: reachable.to_string(),
            leader: metrics.leader,
            readiness: self.readiness.clone(),
        };
        let namespace = &self.args.namespace;
        let leadership = lease::campaign(self.client.clone(), namespace, candidate, &self.drain);
        let bundle = TrustBundle::new(self.client.clone(), ca_store.clone(), self.cluster_ca, namespace.clone());
        let published = watch::Sender::new(None);
        let context = Context {
            store: Arc::default(),
            placement: Arc::new(Placement::new(published.subscribe())),
            published,
            leader: LeaderClient::default(),
            confirmations: Arc::default(),
            webhook_client: webhook_client(&self.args, webhook.port()),
            trust_bundle: Arc::new(bundle),
            grpc: grpc.port(),
            args: Arc::new(self.args),
            fences: watch::Sender::default(),
            labelling: self.labelling,
            client: self.client,
            api_config: self.api_config,
            leadership,
            ca_store,
            readiness: self.readiness,
            drain: self.drain,
        };
        keep_certificates(&context, &presented, metrics.ca_write_failures);
        context.drain.spawn_until_started(metrics.ca_expiry.follow(context.ca_store.changes()));
        relay_receipts(&context);
        context.drain.spawn_until_started(count_unproved(context.fences.subscribe(), metrics.fences_unproved));
        let refusals = metrics.refusals;
        let serving = Serving { context: &context, presented: &presented, refusals };
        serving.proxies(grpc_listener, metrics.push, metrics.reviewer)?;
        let routes = controllers::start(&context, self.background, metrics.controllers);
        serving.webhooks(webhook_listener, metrics.webhook, routes)?;
        Ok(context)
    }
}

fn keep_certificates(context: &Context, presented: &Arc<Presented>, write_failures: Counter) {
    let drain = &context.drain;
    let (ca_store, leadership) = (context.ca_store.clone(), context.leadership.clone());
    drain.spawn_until_started(ca_store.follow(leadership.clone(), write_failures));
    let (ca_store, names) = (context.ca_store.clone(), context.args.names());
    drain.spawn_until_started(serving::follow(ca_store, names, presented.clone()));
    let namespaces = context.store.namespaces();
    drain.spawn_until_started(context.trust_bundle.clone().follow(leadership, namespaces));
}

/// Counts the fences that are not proved. Where the API server has none, nothing can be.
async fn count_unproved(mut fences: FenceStates, gauge: Gauge) {
    loop {
        let unproved = fences.borrow_and_update().values().filter(|state| state.is_missing()).count();
        gauge.set(i64::try_from(unproved).unwrap_or(i64::MAX));
        if fences.changed().await.is_err() {
            return;
        }
    }
}

/// Relays receipts to the leader, where this replica has a token.
fn relay_receipts(context: &Context) {
    let Some(token) = context.args.token.clone() else {
        return warn!(
            "without --token this replica cannot tell the leader what its proxies say, nor ask it for shards of pods"
        );
    };
    let relay = ReceiptRelay {
        store: context.store.clone(),
        leadership: context.leadership.clone(),
        leader: context.leader.clone(),
        ca_store: context.ca_store.clone(),
        name: context.args.service_name(),
        token,
        drain: context.drain.clone(),
    };
    context.drain.spawn_until_started(relay.run());
}

/// Starts the TLS servers.
struct Serving<'a> {
    context: &'a Context,
    presented: &'a Arc<Presented>,
    refusals: Refusals,
}

impl Serving<'_> {
    fn proxies(&self, listener: TcpListener, metrics: PushMetrics, reviewer: Reviewer) -> Result<(), AppError> {
        let (context, args) = (self.context, &self.context.args);
        let (client, own) = (context.client.clone(), args.namespace.clone());
        let push = Arc::new(PushService {
            store: context.store.clone(),
            bypasses: BypassEvents::start(client.clone(), &context.drain),
            staleness: StalenessCheck::new(client, own, context.published.subscribe()),
            reviewer,
            ca_store: context.ca_store.clone(),
            accounts: Accounts { node: args.node_account.clone(), manager: args.account.clone() },
            leadership: context.leadership.clone(),
            confirmations: context.confirmations.clone(),
            oldest_confirmed: OldestConfirmed::default(),
            leader: context.leader.clone(),
            placement: context.placement.clone(),
            refusals: self.refusals.clone(),
            metrics,
            drain: context.drain.clone(),
            latest_connections: LatestConnections::default(),
            signing_quota: SigningQuota::default(),
            review_schedule: ReviewSchedule::default(),
        });
        let limits = connection_limits::limits(args.max_proxies, connection_limits::open_files());
        let tls = self.acceptor(&[tls::ALPN_HTTP2])?;
        let serve = move |stream, permit| push.clone().serve(stream, permit);
        let server = Listener::new(limits, self.refusals.clone());
        context.drain.spawn(server.run(listener, tls, context.drain.clone(), serve));
        Ok(())
    }

    fn webhooks(&self, listener: TcpListener, metrics: WebhookMetrics, routes: Vec<Route>) -> Result<(), AppError> {
        let routes: BTreeMap<_, _> = routes.into_iter().map(|route| (route.path, route)).collect();
        for path in routes.keys() {
            metrics.begin(path);
        }
        let (drain, memory) = (self.context.drain.clone(), ReviewMemory::default());
        let webhook = Arc::new(Webhook { routes, metrics, drain: drain.clone(), memory });
        let tls = self.acceptor(&[tls::ALPN_HTTP2, tls::ALPN_HTTP1])?;
        let serve = move |stream, permit| webhook.clone().serve(stream, permit);
        let server = Listener::new(WEBHOOK_LIMITS, self.refusals.clone());
        self.context.drain.spawn(server.run(listener, tls, drain, serve));
        Ok(())
    }

    fn acceptor(&self, protocols: &[&[u8]]) -> Result<TlsAcceptor, AppError> {
        Ok(TlsAcceptor::from(Arc::new(tls::server(self.presented.clone(), protocols)?)))
    }
}

/// How the API server reaches our webhooks, without path and CA.
fn webhook_client(args: &RunArgs, port: u16) -> WebhookClientConfig {
    let service = || ServiceReference {
        namespace: args.namespace.clone(),
        name: args.service.clone(),
        ..ServiceReference::default()
    };
    let host = args.webhook_host.as_ref();
    WebhookClientConfig {
        url: host.map(|host| format!("https://{host}:{port}")),
        service: host.is_none().then(service),
        ca_bundle: None,
    }
}

/// Opens the CA store, as soon as the API server answers.
async fn open(client: &Client, args: &RunArgs) -> Result<CaStore, CaStoreError> {
    let mut lease_watch = LeaseWatch::of(args.service.clone());
    loop {
        let settings = AuthoritySettings {
            api_server: args.api_server_name.clone(),
            manager: args.names(),
            validity: args.ca_validity,
        };
        let opened = CaStore::open(client.clone(), &args.namespace, settings, &mut lease_watch);
        match Box::pin(opened).await {
            Err(error) if error.may_pass() => {
                warn!(error = telemetry::chain(&error), "waiting for the API server");
                time::sleep(RETRY).await;
            }
            opened => return opened,
        }
    }
}

/// The pod's name, and a part that is unique to this process.
fn identity(args: &RunArgs) -> String {
    use std::hash::{BuildHasher as _, RandomState};

    format!("{}_{:016x}", args.replica(), RandomState::new().hash_one(std::process::id()))
}

impl Metrics {
    fn new(client: &Client) -> Self {
        let mut registry = Registry::with_prefix(PREFIX);
        let to = &mut registry;
        let counted = Self {
            refusals: Refusals::register(to),
            push: PushMetrics::register(to),
            webhook: WebhookMetrics::register(to),
            controllers: ControllerMetrics::register(to),
            reviewer: Reviewer::new(client.clone(), to),
            leader: metrics::gauge(to, "leader", "1 where this replica writes"),
            fences_unproved: metrics::gauge(
                to,
                "fences_unproved",
                "Roots with a fence in the API server that some endpoint has not shown to enforce; 0 on replicas that do not lead",
            ),
            ca_write_failures: metrics::counter(
                to,
                "ca_write_failures",
                "How often the certificate authorities could not be written by this replica while it led; after some it gives its Lease up",
            ),
            ca_expiry: CaExpiry::register(to),
            registry: Arc::default(),
        };
        Self { registry: Arc::new(registry), ..counted }
    }
}

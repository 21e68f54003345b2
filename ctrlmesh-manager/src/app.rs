//! Builds the process `ctrlmesh-manager run` from its parts.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_runtime::admin::{Admin, Probes};
use ctrlmesh_runtime::listen::{ListenError, listen};
use ctrlmesh_runtime::termination::Termination;
use k8s_openapi::api::admissionregistration::v1::{ServiceReference, WebhookClientConfig};
use kube::Client;
use prometheus_client::metrics::counter::Counter;
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
use crate::labels::LabelMetrics;
use crate::labels::migration::MigrationMetrics;
use crate::leader::lease::{self, Candidate};
use crate::listen::{Limits, Listener};
use crate::metrics::{self, PREFIX, Refusals};
use crate::push::identity::Reviewer;
use crate::push::service::{
    Accounts, LatestConnections, LeaderClient, PushMetrics, PushService, ReceiptRelay,
    ReviewSchedule, SigningQuota,
};
use crate::push::staleness::StalenessCheck;
use crate::readiness::Readiness;
use crate::rules::shard::Labelling;
use crate::telemetry;
use crate::tls::{self, Presented};

pub mod api_client;
pub mod context;
mod controllers;
mod connection_limits;

use api_client::ReachError;
use context::Context;

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
    labels: (LabelMetrics, MigrationMetrics),
    reviewer: Reviewer,
    leader: prometheus_client::metrics::gauge::Gauge,
    unwritten: Counter,
}

struct Listeners {
    grpc: TcpListener,
    webhook: TcpListener,
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
    let wanted = args.labels.labelling()?;
    let config = api_client::config(&args).await?;
    let cluster = ClusterCa::of(&config);
    let client = api_client::client(config.clone())?;
    let background = api_client::client(api_client::background(config, &args))?;
    let drain = Drain::default();
    let readiness = Readiness::default();
    let starting = readiness.block("certificates");
    let counted = Metrics::new(&client);
    let probes = Probes { readiness: readiness.clone(), drain: drain.clone() };
    let probes = Admin { probes: Some(probes), metrics: None };
    let probes = probes.run_at(listen("probes", args.listen_probes)?);
    let metrics = Admin { probes: None, metrics: Some(counted.registry.clone()) };
    let metrics = metrics.run_at(listen("metrics", args.listen_metrics)?);
    let work = async {
        let mut stop = Termination::listen().map_err(AppError::Runtime)?;
        let started = tokio::select! {
            started = start((args.clone(), wanted), (client, background), cluster, counted, readiness, drain.clone()) => started?,
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
        () = metrics => Ok(true),
    }
}

async fn start(
    (args, wanted): (RunArgs, Labelling),
    (client, background): (Client, Client),
    cluster: ClusterCa,
    counted: Metrics,
    readiness: Readiness,
    drain: Drain,
) -> Result<Context, AppError> {
    let listeners = Listeners {
        grpc: listen("proxies", args.listen_grpc)?,
        webhook: listen("webhooks", args.listen_webhook)?,
    };
    let ca_store = Arc::new(open(&client, &args).await?);
    let presented = serving::first(&ca_store, &args.names())?;
    let listens = listeners.grpc.local_addr().map_err(AppError::Runtime)?;
    let grpc = args.grpc_address.map_or(listens, |reachable| reachable.at(listens.port()));
    let candidate = Candidate {
        lease: args.service.clone(),
        identity: identity(&args),
        address: grpc.to_string(),
        leader: counted.leader.clone(),
        readiness: readiness.clone(),
    };
    let leadership = lease::campaign(client.clone(), &args.namespace, candidate, &drain);
    let posted = watch::Sender::new(None);
    let context = Context {
        store: Arc::default(),
        placement: Arc::new(Placement::new(posted.subscribe())),
        posted,
        leader: LeaderClient::default(),
        asked: asked(&args, listeners.webhook.local_addr().map_err(AppError::Runtime)?.port()),
        trust_bundle: Arc::new(TrustBundle::new(client.clone(), ca_store.clone(), cluster)),
        grpc: listens.port(),
        args: Arc::new(args),
        wanted,
        client,
        leadership,
        ca_store,
        readiness,
        drain,
    };
    keep_certificates(&context, &presented, counted.unwritten);
    tell_leader(&context);
    let told = (counted.refusals.clone(), counted.push, counted.reviewer);
    serve_proxies(&context, &presented, listeners.grpc, told)?;
    serve_webhooks(
        &context,
        &presented,
        listeners.webhook,
        counted.refusals,
        counted.webhook,
        controllers::start(&context, background, counted.labels),
    )?;
    Ok(context)
}

fn keep_certificates(context: &Context, presented: &Arc<Presented>, unwritten: Counter) {
    let drain = &context.drain;
    let (ca_store, leadership) = (context.ca_store.clone(), context.leadership.clone());
    drain.spawn_until_started(ca_store.follow(leadership.clone(), unwritten));
    let (ca_store, names) = (context.ca_store.clone(), context.args.names());
    drain.spawn_until_started(serving::follow(ca_store, names, presented.clone()));
    let namespaces = context.store.namespaces();
    // Node proxies run in our own namespace.
    let own = context.args.namespace.clone();
    drain.spawn_until_started(context.trust_bundle.clone().follow(leadership, namespaces, own));
}

/// Relays receipts to the leader, where this replica has a token.
fn tell_leader(context: &Context) {
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

fn serve_proxies(
    context: &Context,
    presented: &Arc<Presented>,
    listener: TcpListener,
    (refusals, metrics, reviewer): (Refusals, PushMetrics, Reviewer),
) -> Result<(), AppError> {
    let args = &context.args;
    let (client, own) = (context.client.clone(), args.namespace.clone());
    let push = Arc::new(PushService {
        store: context.store.clone(),
        staleness: StalenessCheck::new(client, own, context.posted.subscribe()),
        reviewer,
        ca_store: context.ca_store.clone(),
        accounts: Accounts { node: args.node_account.clone(), manager: args.account.clone() },
        leadership: context.leadership.clone(),
        placement: context.placement.clone(),
        refusals: refusals.clone(),
        metrics,
        drain: context.drain.clone(),
        latest_connections: LatestConnections::default(),
        signing_quota: SigningQuota::default(),
        review_schedule: ReviewSchedule::default(),
    });
    let limits = connection_limits::limits(args.max_proxies, connection_limits::open_files());
    let tls = acceptor(presented, &[tls::ALPN_HTTP2])?;
    let serve = move |stream, admission| push.clone().serve(stream, admission);
    let listen = Listener::new(limits, refusals);
    context.drain.spawn(listen.run(listener, tls, context.drain.clone(), serve));
    Ok(())
}

fn serve_webhooks(
    context: &Context,
    presented: &Arc<Presented>,
    listener: TcpListener,
    refusals: Refusals,
    metrics: WebhookMetrics,
    routes: Vec<Route>,
) -> Result<(), AppError> {
    let routes: BTreeMap<_, _> = routes.into_iter().map(|route| (route.path, route)).collect();
    let (drain, room) = (context.drain.clone(), ReviewMemory::default());
    let webhook = Arc::new(Webhook { routes, metrics, drain, room });
    let tls = acceptor(presented, &[tls::ALPN_HTTP2, tls::ALPN_HTTP1])?;
    let serve = move |stream, admission| webhook.clone().serve(stream, admission);
    let listen = Listener::new(WEBHOOK_LIMITS, refusals);
    context.drain.spawn(listen.run(listener, tls, context.drain.clone(), serve));
    Ok(())
}

fn acceptor(presented: &Arc<Presented>, protocols: &[&[u8]]) -> Result<TlsAcceptor, AppError> {
    Ok(TlsAcceptor::from(Arc::new(tls::server(presented.clone(), protocols)?)))
}

fn asked(args: &RunArgs, port: u16) -> WebhookClientConfig {
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
        let wanted = AuthoritySettings {
            api_server: args.api_server_name.clone(),
            manager: args.names(),
            validity: args.ca_validity,
        };
        match Box::pin(CaStore::open(client.clone(), &args.namespace, wanted, &mut lease_watch))
            .await
        {
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

// === impl Metrics ===

impl Metrics {
    fn new(client: &Client) -> Self {
        let mut registry = Registry::with_prefix(PREFIX);
        let to = &mut registry;
        let counted = Self {
            refusals: Refusals::register(to),
            push: PushMetrics::register(to),
            webhook: WebhookMetrics::register(to),
            labels: (LabelMetrics::register(to), MigrationMetrics::register(to)),
            reviewer: Reviewer::new(client.clone(), to),
            leader: metrics::gauge(to, "leader", "1 where this replica writes"),
            unwritten: metrics::counter(
                to,
                "ca_write_failures",
                "How often the certificate authorities could not be written by this replica while it led; after some it gives its Lease up",
            ),
            registry: Arc::default(),
        };
        Self { registry: Arc::new(registry), ..counted }
    }
}

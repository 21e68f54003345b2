//! A manager's gRPC server inside the test, which decides what proxies receive.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fs, future::Future};

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::policy::{Limit, Policy, Redirect};
use ctrlmesh_common::resource::ResourceMatch;
use ctrlmesh_common::selector::Selector;
use ctrlmesh_common::wire::{Hello, PodId, Traffic};
use ctrlmesh_manager::admission::placement::Placement;
use ctrlmesh_manager::ca::authority::Names;
use ctrlmesh_manager::ca::recovery::LeaseWatch;
use ctrlmesh_manager::ca::serving;
use ctrlmesh_manager::ca::store::{AuthoritySettings, CaStore, CaStoreError};
use ctrlmesh_manager::cluster::cache::Snapshot;
use ctrlmesh_manager::cluster::plan::Plan;
use ctrlmesh_manager::drain::Drain;
use ctrlmesh_manager::leader::lease::{self, Candidate, Leadership};
use ctrlmesh_manager::listen::{Limits, Listener};
use ctrlmesh_manager::metrics::{PREFIX, Refusals};
use ctrlmesh_manager::push::bypass_events::BypassEvents;
use ctrlmesh_manager::push::identity::Reviewer;
use ctrlmesh_manager::push::policy_store::{EnrolledPod, PolicyStore, Receipt};
use ctrlmesh_manager::push::service::{
    Accounts, LatestConnections, LeaderClient, OldestConfirmed, PushMetrics, PushService, ReceiptRelay, ReviewSchedule,
    SigningQuota,
};
use ctrlmesh_manager::push::staleness::StalenessCheck;
use ctrlmesh_manager::readiness::Readiness;
use ctrlmesh_manager::rules::compile::CompiledPolicy;
use ctrlmesh_manager::rules::pod::{Member, PodName};
use ctrlmesh_manager::rules::shared::Shared;
use ctrlmesh_manager::tls;
use ctrlmesh_proxy::manager_client::{Connection, Endpoint};
use ctrlmesh_runtime::grpc::GrpcError;
use ctrlmesh_testbed::{ControlPlane, retry};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use prometheus_client::encoding::text;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time;
use tokio_rustls::TlsAcceptor;
use tonic::Status;

use crate::process::ProxySettings;
use crate::stream::Stream;
use crate::token::{self, TestPod};

/// How long a condition may take to come true before a test fails: generous, because nothing waits for it in vain.
pub(crate) const PATIENCE: Duration = Duration::from_mins(5);

pub(crate) const AUDIENCE: &str = "ctrlmesh";

/// Connections that have not proved themselves, from one address.
pub(crate) const UNPROVEN_OF_ONE: usize = 64;

pub(crate) struct Bed {
    pub(crate) plane: &'static ControlPlane,
    pub(crate) client: Client,
    pub(crate) namespace: String,
    pub(crate) store: Arc<PolicyStore>,
    pub(crate) ca_store: Arc<CaStore>,
    pub(crate) address: SocketAddr,
    pub(crate) folder: TempDir,
    registry: Registry,
    leadership: Leadership,
    published: watch::Sender<Option<Arc<Plan>>>,
    /// Gives pods their shards, as that says.
    pub(crate) placement: Arc<Placement>,
    pub(crate) review_schedule: ReviewSchedule,
    /// What serves; taken when it is stopped.
    drain: Drain,
}

/// The authorities of `namespace`.
pub(crate) async fn opened(client: &Client, namespace: &str) -> Result<CaStore, CaStoreError> {
    let wanted = AuthoritySettings {
        api_server: Vec::new(),
        manager: Names::of(["127.0.0.1"]),
        validity: Duration::from_hours(24),
    };
    CaStore::open(client.clone(), namespace, wanted, &mut LeaseWatch::of("push".to_owned())).await
}

impl Bed {
    pub(crate) async fn new() -> Self {
        let plane = ControlPlane::shared();
        let client = plane.client().await.unwrap();
        let namespace = plane.namespace("push").await.unwrap();
        // An API server that has just started does not know its own address yet.
        let ca_store = Arc::new(retry(|| opened(&client, &namespace)).await.unwrap());
        let (store, registry) = (Arc::<PolicyStore>::default(), Registry::with_prefix(PREFIX));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let folder = TempDir::new().unwrap();
        let drain = Drain::default();
        let this = candidate("this", &address.to_string());
        let leadership = lease::campaign(client.clone(), &namespace, this, &drain);
        let published = watch::Sender::new(Some(Arc::default()));
        let mut bed = Self {
            plane,
            client,
            namespace,
            store,
            ca_store,
            address,
            folder,
            registry,
            leadership,
            placement: Arc::new(Placement::new(published.subscribe())),
            published,
            review_schedule: ReviewSchedule::default(),
            drain,
        };
        fs::write(bed.path("manager.crt"), bed.ca_store.current().manager.bundle()).unwrap();
        fs::write(bed.path("mesh.crt"), bed.ca_store.current().mesh.bundle_of(&bed.namespace).unwrap()).unwrap();
        bed.serve(listener);
        bed
    }

    /// Serves anew, at the same address, with a store on which nothing was published.
    pub(crate) async fn restart(&mut self) {
        self.stop().await;
        self.drain = Drain::default();
        self.store = Arc::default();
        let this = candidate("this", &self.address.to_string());
        let client = self.client.clone();
        self.leadership = lease::campaign(client, &self.namespace, this, &self.drain);
        let listener = eventually("the address to be free", async || TcpListener::bind(self.address).await.ok());
        let listener = listener.await;
        self.serve(listener);
    }

    /// Cuts everything off.
    pub(crate) async fn stop(&mut self) {
        self.drain.clone().finish(Duration::ZERO).await;
    }

    fn serve(&mut self, listener: TcpListener) {
        self.registry = Registry::with_prefix(PREFIX);
        let refusals = Refusals::register(&mut self.registry);
        let push = Arc::new(PushService {
            store: self.store.clone(),
            staleness: StalenessCheck::new(
                self.client.clone(),
                "ctrlmesh-system".to_owned(),
                self.published.subscribe(),
            ),
            reviewer: Reviewer::new(self.client.clone(), &mut self.registry),
            ca_store: self.ca_store.clone(),
            accounts: Accounts {
                node: format!("{}/node", self.namespace),
                manager: format!("{}/manager", self.namespace),
            },
            leadership: self.leadership.clone(),
            confirmations: Arc::default(),
            oldest_confirmed: OldestConfirmed::default(),
            leader: LeaderClient::default(),
            placement: self.placement.clone(),
            bypasses: BypassEvents::start(self.client.clone(), &self.drain),
            refusals: refusals.clone(),
            metrics: PushMetrics::register(&mut self.registry),
            drain: self.drain.clone(),
            latest_connections: LatestConnections::default(),
            signing_quota: SigningQuota::default(),
            review_schedule: self.review_schedule,
        });
        let presented = serving::first(&self.ca_store, &Names::of(["127.0.0.1"])).unwrap();
        let tls = TlsAcceptor::from(Arc::new(tls::server(presented, &[tls::ALPN_HTTP2]).unwrap()));
        let limits = Limits { connections: 10_000, unproven: 512, unproven_of_one: UNPROVEN_OF_ONE };
        let serve = move |stream, admission| push.clone().serve(stream, admission);
        let listen = Listener::new(limits, refusals);
        self.drain.spawn(listen.run(listener, tls, self.drain.clone(), serve));
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn settings(&self) -> ProxySettings {
        ProxySettings {
            url: self.plane.url().to_owned(),
            ca: self.plane.ca().to_owned(),
            manager: self.address,
            folder: self.folder.path().to_owned(),
        }
    }

    pub(crate) async fn pod(&self, name: &str, node: &str) -> TestPod {
        token::pod(&self.client, &self.namespace, name, "operator", node).await
    }

    /// The pod of a node proxy.
    pub(crate) async fn node_pod(&self, node: &str) -> TestPod {
        token::pod(&self.client, &self.namespace, &format!("proxy-{node}"), "node", node).await
    }

    /// How the manager is reached with `token`.
    pub(crate) fn manager(&self, token: &str) -> Endpoint {
        let file = TempDir::new_in(self.folder.path()).unwrap().keep().join("token");
        fs::write(&file, token).unwrap();
        Endpoint {
            address: self.address.to_string().parse().unwrap(),
            service_ip: None,
            ca: self.path("manager.crt"),
            token: file,
            state: self.path("state"),
        }
    }

    /// Says hello with `token`.
    pub(crate) async fn follow(&self, token: &str, hello: Hello) -> Result<Stream, Status> {
        self.follow_with(token, hello, &[]).await
    }

    /// The same, with what a manager gave before.
    pub(crate) async fn follow_with(&self, token: &str, hello: Hello, ticket: &[u8]) -> Result<Stream, Status> {
        Stream::begin(self.connect(token).await.unwrap(), hello, ticket).await
    }

    pub(crate) async fn connect(&self, token: &str) -> Result<Connection, GrpcError> {
        // What it is made of ends when the link is dropped.
        self.manager(token).connect(&Drain::default()).await
    }

    /// Publishes policies of pods of a node.
    pub(crate) fn publish(&self, notices: &[(&TestPod, &str, Policy)]) {
        self.store.publish(notices_of(notices));
    }

    /// Says that what is published follows from the pod as the API server has it, and from this ShardingConfig.
    pub(crate) async fn sees(&self, pod: Option<&TestPod>, config: Option<&ShardingConfig>) {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let mut members = Vec::new();
        if let Some(pod) = pod {
            members.push(Member::from(&pods.get(&pod.name).await.unwrap()).into());
        }
        let configs = config.cloned().map(Shared::from).into_iter().collect();
        let snapshot = Arc::new(Snapshot { members, configs, ..Snapshot::default() });
        self.published.send_replace(Some(Arc::new(Plan { snapshot, ..Plan::default() })));
    }

    /// The store of another replica, which tells this one, as soon as this one leads; and how it asks it.
    pub(crate) async fn other_replica(&self, token: &Path) -> (Arc<PolicyStore>, LeaderClient) {
        eventually("this one to lead", async || self.leadership.is_held().then_some(())).await;
        let (store, leader) = (Arc::<PolicyStore>::default(), LeaderClient::default());
        let candidate = candidate("other", "127.0.0.1:1");
        let (client, drain) = (self.client.clone(), &self.drain);
        let relay = ReceiptRelay {
            store: store.clone(),
            leadership: lease::campaign(client, &self.namespace, candidate, drain),
            leader: leader.clone(),
            ca_store: self.ca_store.clone(),
            name: "127.0.0.1".to_owned(),
            token: token.to_owned(),
            drain: drain.clone(),
        };
        drain.spawn(relay.run());
        (store, leader)
    }

    /// What the pod's requests have come to.
    pub(crate) fn traffic(&self, pod: &TestPod) -> Option<Traffic> {
        let name = PodName { namespace: pod.namespace.clone(), name: pod.name.clone() };
        self.store.traffic().newest().remove(&name).map(|one| one.state)
    }

    /// What the pod's proxy said last.
    pub(crate) fn receipt(&self, pod: &TestPod) -> Option<Receipt> {
        let name = PodName { namespace: pod.namespace.clone(), name: pod.name.clone() };
        self.store.receipts().remove(&name)
    }

    /// Whether this one writes.
    pub(crate) fn leadership(&self) -> Leadership {
        self.leadership.clone()
    }

    /// Runs something for as long as it serves.
    pub(crate) fn run(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.drain.spawn_until_started(task);
    }

    /// How many were refused for that reason.
    pub(crate) fn refused(&self, reason: &str) -> u64 {
        self.metric(&format!("refused_total{{reason=\"{reason}\"}}"))
    }

    /// What a metric says.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        let mut page = String::new();
        text::encode(&mut page, &self.registry).unwrap();
        let start = format!("ctrlmesh_manager_{name} ");
        let value = page.lines().find_map(|line| line.strip_prefix(&start));
        value.unwrap_or_else(|| panic!("{page}")).parse().unwrap()
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        // Nothing waits for it: the runtime of the test ends with it.
        let drain = self.drain.clone();
        drop(tokio::spawn(drain.finish(Duration::ZERO)));
    }
}

pub(crate) fn of_pod(pod: &TestPod) -> Hello {
    let id = PodId { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: String::new() };
    Hello { pod: Some(id), ..Hello::default() }
}

pub(crate) fn of_node(node: &str) -> Hello {
    Hello { node: node.to_owned(), ..Hello::default() }
}

/// The ShardingConfig that speaks of the pod.
pub(crate) fn operator_of(pod: &TestPod) -> String {
    format!("{}/op", pod.namespace)
}

/// What is published of pods, each on a node. The version of what says so is the epoch.
pub(crate) fn notices_of(notices: &[(&TestPod, &str, Policy)]) -> Vec<EnrolledPod> {
    let compiled = |pod: &TestPod, policy: &Policy| {
        let shard = Some("op-0".to_owned());
        Arc::new(CompiledPolicy::new(shard, Some(operator_of(pod)), policy.epoch, policy.clone()))
    };
    let notices = notices.iter().map(|(pod, node, policy)| EnrolledPod {
        name: PodName { namespace: pod.namespace.clone(), name: pod.name.clone() },
        uid: pod.uid.clone(),
        node: Some((*node).to_owned()),
        policy: Some(compiled(pod, policy)),
    });
    notices.collect()
}

pub(crate) fn candidate(identity: &str, address: &str) -> Candidate {
    Candidate {
        readiness: Readiness::default(),
        lease: "push".to_owned(),
        identity: identity.to_owned(),
        address: address.to_owned(),
        leader: Gauge::default(),
    }
}

/// A policy that shows only the `ConfigMaps` that `selector` matches.
pub(crate) fn policy(epoch: u64, selector: &str) -> Policy {
    let resources = ResourceMatch { api_groups: vec![String::new()], resources: vec!["configmaps".to_owned()] };
    let limit =
        Limit { relate_resources: vec![resources], selector: Selector::parse(selector).unwrap(), changed_at: None };
    Policy { epoch, limits: vec![limit], ..Policy::default() }
}

/// The same, for a pod with a proxy inside.
pub(crate) fn inside(policy: Policy) -> Policy {
    Policy { redirect: Redirect::Nowhere, ..policy }
}

/// What `work` gives; the test fails when it takes too long.
pub(crate) async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    time::timeout(PATIENCE, work).await.unwrap_or_else(|_elapsed| panic!("waited in vain for {what}"))
}

/// What `attempt` gives as soon as it gives something. Nothing if it takes too long.
pub(crate) async fn patiently<T>(mut attempt: impl AsyncFnMut() -> Option<T>) -> Option<T> {
    let poll = async {
        loop {
            if let Some(value) = attempt().await {
                return value;
            }
            time::sleep(Duration::from_millis(100)).await;
        }
    };
    time::timeout(PATIENCE, poll).await.ok()
}

/// Does the same; the test fails when it takes too long.
pub(crate) async fn eventually<T>(what: &str, attempt: impl AsyncFnMut() -> Option<T>) -> T {
    patiently(attempt).await.unwrap_or_else(|| panic!("waited in vain for {what}"))
}

/// Waits until `condition` holds.
pub(crate) async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    eventually(what, async || condition().then_some(())).await;
}

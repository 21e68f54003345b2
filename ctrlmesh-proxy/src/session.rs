//! What the requests of one client connection share.

pub(crate) mod collect_budget;
pub(crate) mod own_lock;
pub(crate) mod policy_view;

use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustls::{ClientConfig, ServerConfig};
use tokio::sync::Notify;
use tokio::sync::watch::Receiver;
use tokio_util::sync::CancellationToken;

use crate::egress::{PodEgress, PodFiles};
use crate::fault::PodFaults;
use crate::guard::PodGuards;
use crate::metrics::{Metrics, Open, PodRequests};
use crate::net::accept::{ConnectionGuard, PodSlot};
use crate::net::body::UnreadBytes;
use crate::net::tls::trust::Trust;
use crate::policy::settle::UnderWay;
use crate::policy::subscription::Publications;
use crate::policy::{Current, History, Validity, Writes};
use crate::session::collect_budget::CollectBudget;
use crate::session::own_lock::{LockConnection, OwnLock};
use crate::session::policy_view::PolicyView;
use crate::spans::{ConnectionSpan, Tracer};
use crate::trace::Listeners;
use crate::traffic::PodTraffic;
use crate::upstream::{Dialer, Target, Upstream};
use crate::webhook::PodWebhook;
use ctrlmesh_runtime::drain::Drain;

/// What one thread serves its connections with.
#[derive(Debug)]
pub struct Server {
    /// TLS towards operators, with HTTP/2 and HTTP/1.1.
    pub tls: Arc<ServerConfig>,
    /// TLS towards operators whose API server speaks HTTP/1.1 only.
    pub tls_http1: Arc<ServerConfig>,
    /// `None` where no calls to webhooks are taken.
    pub webhooks: Option<WebhookTls>,
    pub dialer: Rc<Dialer>,
    /// The API server; `None` where it is the original destination of each connection.
    pub target: Option<Target>,
    pub policies: Policies,
    /// The time from a client's connecting to the end of its first request's head.
    pub header_timeout: Duration,
    /// The time that the API server may take to answer.
    pub response_timeout: Duration,
    pub metrics: Arc<Metrics>,
    /// `None` where no spans are made.
    pub tracer: Option<Tracer>,
    /// Those who follow requests now.
    pub listeners: Arc<Listeners>,
    pub drain: Drain,
}

/// TLS towards those who answer calls to webhooks.
#[derive(Clone, Debug)]
pub struct WebhookTls {
    /// Towards the pod's own server.
    pub own: Arc<ClientConfig>,
    /// The certificate authorities of other proxies. `None`: none is called.
    pub peers: Option<Arc<Trust>>,
}

/// The policies of the pods whose connections are served.
#[derive(Clone, Debug)]
pub enum Policies {
    /// The sidecar's only pod.
    One(ServedPod),
    /// The pods of a node, by the slot that the kernel gave each. Connections of other pods are not served.
    BySlot(Receiver<Arc<HashMap<PodSlot, ServedPod>>>),
}

/// A pod that is served.
#[derive(Clone, Debug)]
pub struct ServedPod {
    pub policy: Current,
    /// The policies before that.
    pub history: Arc<History>,
    /// The writes that are under way.
    pub writes: Arc<Writes>,
    /// Until when writes pass, where the policy lapses.
    pub validity: Validity,
    pub guards: Arc<PodGuards>,
    pub faults: Arc<PodFaults>,
    pub traffic: Arc<PodTraffic>,
    /// As metrics count its requests.
    pub requests: Arc<PodRequests>,
    pub egress: Arc<PodEgress>,
    pub webhook: Arc<PodWebhook>,
    pub own_lock: Arc<OwnLock>,
    /// Cancelled once the pod is served no more; its connections end then.
    pub gone: Option<CancellationToken>,
}

/// One client connection, as its requests see it.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) server: Rc<Server>,
    pub(crate) upstream: Upstream,
    pub(crate) policy: PolicyView,
    pub(crate) guards: Arc<PodGuards>,
    pub(crate) faults: Arc<PodFaults>,
    pub(crate) traffic: Arc<PodTraffic>,
    pub(crate) lock: LockConnection,
    pub(crate) requests: Arc<PodRequests>,
    pub(crate) gone: Option<CancellationToken>,
    /// Notified when the client is to open its next connection elsewhere.
    pub(crate) leaving: Rc<Notify>,
    /// `None` where no spans are made.
    pub(crate) span: Option<Rc<ConnectionSpan>>,
    pub(crate) resources: ConnectionResources,
}

/// The counts and budgets that a client's connection takes from, until everything on it has ended: a tunnel outlives
/// its HTTP.
#[derive(Debug)]
pub(crate) struct ConnectionResources {
    pub(crate) _open: Open,
    pub(crate) _guard: ConnectionGuard,
    /// For bodies that are read whole.
    pub(crate) collect: CollectBudget,
    /// For bytes that wait to be written.
    pub(crate) unread: Rc<UnreadBytes>,
    /// How many writes go on that the client gave up.
    pub(crate) given_up: Cell<usize>,
}

impl ServedPod {
    pub fn new(
        policy: Current,
        history: Arc<History>,
        guards: Arc<PodGuards>,
        gone: Option<CancellationToken>,
    ) -> Self {
        let faults = PodFaults::new(policy.clone(), guards.metrics());
        let egress = PodEgress::new(policy.clone(), None, &guards);
        let webhook = PodWebhook::new(String::new(), policy.clone(), None, PodFiles::own());
        Self {
            policy,
            history,
            writes: Arc::default(),
            validity: Validity::default(),
            guards,
            faults,
            traffic: Arc::default(),
            requests: Arc::default(),
            egress,
            webhook,
            own_lock: Arc::default(),
            gone,
        }
    }

    /// Settles each policy, follows its guards, and reports on its webhook, its requests and its lock, as long as the
    /// pod is served. Writes that a new policy forbids have `timeout` to end.
    pub fn settle(&self, timeout: Duration, publish: Publications, drain: &Drain) {
        let Self { policy, history, writes, guards, traffic, webhook, own_lock, gone, .. } = self.clone();
        drain.spawn(guards.follow(publish.guards, drain.clone(), gone.clone()));
        drain.spawn(webhook.report(publish.webhook, drain.clone(), gone.clone()));
        let watched = traffic.watched.clone();
        drain.spawn(watched.report(policy.clone(), publish.watches, drain.clone(), gone.clone()));
        drain.spawn(traffic.report(policy.clone(), publish.traffic, drain.clone(), gone.clone()));
        drain.spawn(own_lock.report(publish.lock, drain.clone(), gone.clone()));
        let under_way = UnderWay { policy, writes, history };
        drain.spawn(under_way.settle(timeout, publish.settled, drain.clone(), gone));
    }
}

impl Policies {
    /// The pod that a connection comes from, if it is served.
    pub(crate) fn of(&self, pod: Option<PodSlot>) -> Option<ServedPod> {
        match (self, pod) {
            (Policies::One(served), _) => Some(served.clone()),
            (Policies::BySlot(pods), Some(pod)) => pods.borrow().get(&pod).cloned(),
            (Policies::BySlot(_), None) => None,
        }
    }
}

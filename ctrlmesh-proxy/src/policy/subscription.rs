//! Follows the manager's policies, for one pod or for all pods of a node.
//!
//! There is one stream as long as the proxy lives. When it ends, another begins after a random wait, so that ten
//! thousand proxies do not reconnect together. A policy from the manager is put in force, stored in a file, and
//! acknowledged. One that cannot be put in force is refused with the reason, and the last good one stays. Without the
//! manager, the stored policies are in force.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::wire::{Content, Hello, MAX_KNOWN, PodId, PolicySummary, Report, Update, Verdict};
use ctrlmesh_runtime::jitter::random;
use tokio::sync::{Mutex, mpsc, watch};
use tokio::{task, time};
use tokio_stream::wrappers::ReceiverStream;
use tracing::{info, warn};

use super::api_servers::Servers;
use super::settle::SettledPolicies;
use super::store::{PodPolicies, Store};
use super::{AllReports, PodName, StoreError, Validities};
use crate::manager_client::Endpoint;
use crate::metrics::{ManagerMetrics, Metrics};
use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::grpc::GrpcError;
use ctrlmesh_runtime::telemetry;

mod apply;
mod pod;
mod pod_reports;
mod renew;

use apply::apply;
pub use pod::{PodSubscription, Publications, policy_now, policy_of};
use renew::Link;

/// The longest wait before the first attempt after a stream has ended.
const FIRST_WAIT: Duration = Duration::from_secs(2);

/// The longest wait before any attempt: a manager that is back has all proxies back this much later.
const LONGEST_WAIT: Duration = Duration::from_secs(8);

/// The shortest wait.
const SHORTEST_WAIT: Duration = Duration::from_millis(100);

/// Between attempts to store policies that could not be stored.
const SAVE_RETRY: Duration = Duration::from_secs(10);

/// Verdicts that may wait to be sent: those of one message.
const VERDICT_QUEUE: usize = 64;

/// Whose policies the proxy asks for.
#[derive(Clone, Debug)]
pub enum Subscriber {
    /// A sidecar's pod.
    Pod(PodName),
    /// All pods of a node.
    Node(String),
}

/// The client side of the stream.
#[derive(Debug)]
pub struct Client {
    manager: Endpoint,
    served: Subscriber,
    store: Store,
    policies: watch::Sender<Arc<PodPolicies>>,
    /// Whether the policies are still to be stored.
    unsaved: Mutex<bool>,
    whole: watch::Sender<bool>,
    settled: SettledPolicies,
    reports: AllReports,
    validities: Validities,
    /// While there is a stream.
    link: watch::Sender<Option<Link>>,
    servers: Servers,
    metrics: ManagerMetrics,
    drain: Drain,
}

/// The manager's policies, as they change.
#[derive(Clone, Debug)]
pub struct Subscription {
    /// A pod that is missing has no policy yet.
    pub policies: watch::Receiver<Arc<PodPolicies>>,
    /// Whether the manager has sent everything once. Before that, it may know of more pods.
    pub whole: watch::Receiver<bool>,
    /// The API server's addresses beside the configured ones; the manager tells them.
    pub servers: watch::Receiver<Arc<[SocketAddr]>>,
    /// A policy is acknowledged once it is settled.
    pub settled: SettledPolicies,
    /// What the manager is told of pods.
    pub reports: AllReports,
    /// Until when policies that lapse let writes pass.
    pub validities: Validities,
}

/// Why a stream ended.
#[derive(Debug, thiserror::Error)]
enum StreamEnd {
    #[error("connect to the manager")]
    Connect(#[from] GrpcError),
    #[error("the manager says: {} ({:?})", .0.message(), .0.code())]
    Status(#[from] tonic::Status),
    #[error("the manager ended the stream")]
    Over,
}

/// Begins with the stored policies, and follows the manager until shutdown.
///
/// # Errors
/// Where policies cannot be stored.
pub fn follow(
    manager: Endpoint,
    served: Subscriber,
    metrics: &Metrics,
    drain: &Drain,
) -> Result<Subscription, StoreError> {
    let store = Store::open(manager.state.clone())?;
    let mut kept = store.load();
    if let Subscriber::Pod(pod) = &served {
        // The file may hold the policy of another pod.
        kept.retain(|other, _| other == pod);
    }
    for (pod, kept) in &kept {
        info!(%pod, epoch = kept.policy.epoch, "begins with the policy that was kept");
    }
    let (policies, current) = watch::channel(Arc::new(kept));
    let (whole, is_whole) = watch::channel(false);
    let servers = Servers::open(&manager.state);
    let (settled, reports, validities) = (SettledPolicies::default(), AllReports::default(), Validities::default());
    let followed = Subscription {
        policies: current,
        whole: is_whole,
        servers: servers.follow(),
        settled: settled.clone(),
        reports: reports.clone(),
        validities: validities.clone(),
    };
    let client = Client {
        manager,
        served,
        store,
        policies,
        unsaved: Mutex::new(false),
        whole,
        settled,
        reports,
        validities,
        link: watch::Sender::new(None),
        servers,
        metrics: metrics.manager.clone(),
        drain: drain.clone(),
    };
    let stop = drain.clone();
    drain.spawn(async move {
        tokio::select! {
            // Shutdown.
            () = stop.started() => {}
            () = client.run() => {}
            () = client.save_again() => {}
            () = client.renew() => {}
        }
    });
    Ok(followed)
}

/// A random wait, at most `wait` more than the shortest, so that proxies do not reconnect together.
fn pause(wait: Duration) -> Duration {
    SHORTEST_WAIT + random(wait)
}

impl Client {
    async fn run(&self) {
        let mut wait = FIRST_WAIT;
        // Sent beside the token, so that a manager that has just started need not have the token reviewed.
        let mut ticket = Bytes::new();
        loop {
            let ended = self.run_once(&mut wait, &mut ticket).await;
            self.metrics.connected.set(0);
            self.link.send_replace(None);
            let pause = pause(wait);
            warn!(
                error = telemetry::chain(&ended),
                retry = ?pause,
                "the manager is away; the last policy stays"
            );
            time::sleep(pause).await;
            wait = (wait * 2).min(LONGEST_WAIT);
        }
    }

    /// One stream, until it ends.
    async fn run_once(&self, wait: &mut Duration, ticket: &mut Bytes) -> StreamEnd {
        match self.stream(wait, ticket).await {
            Ok(()) => StreamEnd::Over,
            Err(ended) => ended,
        }
    }

    async fn stream(&self, wait: &mut Duration, ticket: &mut Bytes) -> Result<(), StreamEnd> {
        let mut link = self.manager.connect(&self.drain).await?;
        let (reports, outbound) = mpsc::channel(VERDICT_QUEUE);
        // The queue is empty, so this does not fail.
        drop(reports.try_send(Report { content: Some(Content::Hello(self.hello())) }));
        let mut updates = link.follow(ReceiverStream::new(outbound), ticket).await?;
        self.link.send_replace(Some(Link { connection: link, ticket: ticket.clone() }));
        let (mut is_whole, mut takes_states) = (false, false);
        while let Some(update) = updates.message().await? {
            if self.metrics.connected.get() == 0 {
                info!("the manager is there");
                self.metrics.connected.set(1);
                *wait = FIRST_WAIT;
            }
            self.metrics.message_received(SystemTime::now());
            if !update.ticket.is_empty() {
                // A copy, so that the message's buffer is freed.
                *ticket = Bytes::copy_from_slice(&update.ticket);
                self.link.send_modify(|link| link.iter_mut().for_each(|link| link.ticket = ticket.clone()));
            }
            // Before the policies, so that new pods are redirected from these addresses, too.
            self.servers.take(&update.servers).await;
            let more = update.more;
            takes_states |= update.guard_reports;
            let verdicts = self.take(update).await;
            if !more && !std::mem::replace(&mut is_whole, true) {
                self.whole.send_if_modified(|whole| !std::mem::replace(whole, true));
                if takes_states {
                    self.report_states(&reports);
                }
            }
            for verdict in verdicts {
                match self.unsettled(&verdict) {
                    Some(policy) => self.acknowledge_later(verdict, policy, reports.clone()),
                    None if reports.send(report(verdict)).await.is_err() => return Ok(()),
                    None => {}
                }
            }
        }
        Ok(())
    }

    fn hello(&self) -> Hello {
        let policies = self.policies.borrow().clone();
        // To name a policy here acknowledges it.
        let settled = policies.iter().filter(|(pod, kept)| self.settled.has(pod, &kept.policy));
        let known = settled.take(MAX_KNOWN).map(|(pod, kept)| PolicySummary {
            pod: Some(PodId::of(pod, &kept.uid)),
            digest: kept.digest,
            epoch: kept.policy.epoch,
            operator: kept.operator.clone(),
            version: kept.version,
            webhook: self.reports.webhooks.of(pod).map(|state| (*state).clone()),
        });
        let (node, pod) = match &self.served {
            Subscriber::Pod(pod) => (String::new(), Some(PodId::of(pod, ""))),
            Subscriber::Node(node) => (node.clone(), None),
        };
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Hello { node, pod, version, known: known.collect() }
    }

    /// The policy that a verdict accepts, where it is not settled yet.
    fn unsettled(&self, verdict: &Verdict) -> Option<Arc<Policy>> {
        let pod = verdict.pod.as_ref()?.pod_name();
        let accepted = self.policies.borrow().get(&pod).map(|kept| kept.policy.clone());
        accepted.filter(|policy| verdict.refused.is_empty() && !self.settled.has(&pod, policy))
    }

    /// Sends the verdict once the policy is settled, unless another one of the pod comes before.
    fn acknowledge_later(&self, verdict: Verdict, policy: Arc<Policy>, reports: mpsc::Sender<Report>) {
        let (settled, mut policies) = (self.settled.clone(), self.policies.subscribe());
        let pod = verdict.pod.as_ref().map(PodId::pod_name).unwrap_or_default();
        self.drain.spawn_until_started(async move {
            let replaced =
                |policies: &Arc<PodPolicies>| policies.get(&pod).is_none_or(|kept| !Arc::ptr_eq(&kept.policy, &policy));
            tokio::select! {
                biased;
                () = async { drop(policies.wait_for(replaced).await) } => return,
                // The stream has ended: the next one says it.
                () = reports.closed() => return,
                () = settled.wait_for(&pod, &policy) => {}
            }
            // Fails where the stream has ended meanwhile.
            drop(reports.send(report(verdict)).await);
        });
    }

    /// Puts an update in force, stores it, and returns the verdicts.
    async fn take(&self, update: Update) -> Vec<Verdict> {
        let before = self.policies.borrow().clone();
        let (after, mut verdicts) = apply(&before, update, matches!(self.served, Subscriber::Node(_)));
        for verdict in verdicts.iter_mut().filter(|verdict| !verdict.refused.is_empty()) {
            self.metrics.refused.inc();
            // The policy that stays may not be settled yet.
            let settled = verdict.pod.as_ref().and_then(|pod| self.settled.epoch(&pod.pod_name()));
            verdict.epoch = settled.unwrap_or(verdict.epoch);
            warn!(reason = verdict.refused, "policy refused, the last one stays");
        }
        let changed = after != *before;
        if changed {
            let same = |pod: &PodName, uid: &String| after.get(pod).is_some_and(|now| now.uid == *uid);
            let ended = before.iter().filter(|(pod, one)| !same(pod, &one.uid)).map(|(pod, _)| pod);
            let ended: Vec<&PodName> = ended.collect();
            self.policies.send_replace(Arc::new(after));
            for pod in ended {
                self.validities.end(pod);
            }
        }
        self.save(changed).await;
        verdicts
    }

    /// Stores the policies, if they `changed` or could not be stored before. One call at a time, so that an older state
    /// never replaces a newer one.
    async fn save(&self, changed: bool) {
        let mut unsaved = self.unsaved.lock().await;
        *unsaved |= changed;
        if !*unsaved {
            return;
        }
        let (store, policies) = (self.store.clone(), self.policies.borrow().clone());
        // A disk may take its time.
        let saved = task::spawn_blocking(move || store.save(&policies)).await;
        *unsaved = !matches!(saved, Ok(Ok(())));
        drop(unsaved);
        if let Ok(Err(error)) = saved {
            let error = telemetry::chain(&error);
            warn!(
                error,
                "policy in force, but not kept: a restart without the manager has the one before; tried again"
            );
        }
    }

    /// Stores what could not be stored at once. The manager may send nothing else for long.
    async fn save_again(&self) {
        loop {
            time::sleep(SAVE_RETRY).await;
            self.save(false).await;
        }
    }
}

fn report(verdict: Verdict) -> Report {
    Report { content: Some(Content::Verdict(verdict)) }
}

#[cfg(test)]
mod tests {
    use super::apply::tests::{entry, epochs, update};
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn policies_that_could_not_be_stored_are_stored_later() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().to_owned();
        let path = || state.join("none");
        let address = "127.0.0.1:1".parse().unwrap();
        let manager = Endpoint { address, service_ip: None, ca: path(), token: path(), state: state.clone() };
        let client = Client {
            store: Store::open(state.clone()).unwrap(),
            manager,
            served: Subscriber::Node("n".to_owned()),
            policies: watch::Sender::new(Arc::default()),
            unsaved: Mutex::new(false),
            whole: watch::Sender::new(false),
            settled: SettledPolicies::default(),
            reports: AllReports::default(),
            validities: Validities::default(),
            link: watch::Sender::new(None),
            servers: Servers::open(&state),
            metrics: Metrics::new().manager.clone(),
            drain: Drain::default(),
        };
        // A folder in the place of the file cannot be replaced.
        let file = state.join("policies");
        std::fs::create_dir(&file).unwrap();
        client.take(update(&[entry("a", "u", r#"{"epoch": 3}"#)])).await;
        assert!(file.is_dir());
        std::fs::remove_dir(&file).unwrap();
        let kept = async {
            while !file.exists() {
                time::sleep(SHORTEST_WAIT).await;
            }
        };
        let kept = async {
            tokio::select! {
                () = client.save_again() => {}
                () = kept => {}
            }
        };
        time::timeout(Duration::from_hours(1), kept).await.unwrap();
        assert_eq!(epochs(&client.store.load()), [("a", 3)]);
        assert!(!*client.unsaved.lock().await);
        // Stored policies are not written again.
        std::fs::remove_file(&file).unwrap();
        client.take(update(&[])).await;
        assert!(!file.exists());
    }

    #[test]
    fn waits_differ() {
        let waits: std::collections::HashSet<_> = (0..50).map(|_| pause(FIRST_WAIT)).collect();
        let within = SHORTEST_WAIT..SHORTEST_WAIT + FIRST_WAIT;
        assert!(waits.len() > 25 && waits.iter().all(|wait| within.contains(wait)));
    }
}

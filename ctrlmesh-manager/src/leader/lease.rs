//! Elects the replica that writes, by a Lease.
//!
//! The holder renews the Lease every two seconds. Each write names the version that was read, so only one of
//! several candidates wins. A candidate takes the Lease over if it saw no new version for the Lease's
//! duration.
//!
//! Replicas do not compare clocks: each counts from when it first saw a version. The holder stops two seconds
//! before another can begin, by a clock that runs while a process is stopped, and one that runs while the machine is
//! suspended.
//!
//! A deleted Lease is free only after its holder had time to notice. A holder that cannot do its work steps
//! down, and pauses until each other replica had a turn.

use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_runtime::boot_clock;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::PostParams;
use kube::{Api, Client};
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::{Notify, watch};
use tokio::time::{self, Instant};
use tracing::{debug, info};

use crate::drain::Drain;
use crate::readiness::Readiness;
use crate::telemetry;

const LEASE_DURATION: Duration = Duration::from_secs(8);

/// The holder stops this long after the last renewal.
const RENEW_DEADLINE: Duration = Duration::from_secs(6);

const RETRY_PERIOD: Duration = Duration::from_secs(2);

/// Limit for one call to the API server.
const DEADLINE: Duration = Duration::from_secs(2);

/// A candidate that never saw the Lease waits this long before it creates one. A holder that reaches the API
/// server has created it again by then.
const ABSENCE_GRACE: Duration = Duration::from_secs(4);

/// After this pause, every other replica has tried at least once, and a Lease that could not be released has
/// expired.
const STEP_DOWN_PAUSE: Duration = Duration::from_secs(10);

// When a holder is killed, another leads within 15 s: it saw the last version up to a period late, checks up
// to a period after the expiry, and one check may fail.
const _: () = assert!(LEASE_DURATION.as_secs() + 2 * RETRY_PERIOD.as_secs() + DEADLINE.as_secs() < 15);

const RELEASE_RETRY: Duration = Duration::from_millis(200);

/// Annotation with the address of the holder's gRPC server, for the other replicas.
const ADDRESS: &str = "ctrlmesh.kusionstack.io/grpc-address";

#[derive(Clone, Debug)]
pub struct Candidate {
    pub lease: String,
    /// Unique for each replica and each start.
    pub identity: String,
    /// Of this replica's gRPC server.
    pub address: String,
    /// 1 while this replica leads.
    pub leader: Gauge,
    /// A replica becomes a candidate only when it is ready: one whose cache is not synced would hold the
    /// Lease and write nothing.
    pub readiness: Readiness,
}

/// This replica's view of the election.
#[derive(Clone, Debug)]
pub struct Leadership {
    state: watch::Receiver<State>,
    step_down: Arc<Notify>,
}

#[derive(Clone, Debug, Default)]
struct State {
    /// Until when this replica holds the Lease.
    until: Option<Instant>,
    /// The same by the clock that goes on while the machine is suspended.
    until_boot: Duration,
    /// Since when it holds the Lease.
    since: Option<Instant>,
    /// gRPC address of the leader, if it is another replica.
    other: Option<Arc<str>>,
}

/// When an attempt began, by two clocks.
#[derive(Clone, Copy)]
struct Begun {
    at: Instant,
    boot: Duration,
}

struct ObservedLease {
    version: String,
    at: Instant,
}

struct Election {
    candidate: Candidate,
    leases: Api<Lease>,
    observed: Option<ObservedLease>,
    absence: Absence,
    state: watch::Sender<State>,
    step_down: Arc<Notify>,
    paused_until: Option<Instant>,
}

/// Since when the Lease is missing.
#[derive(Debug, Default)]
struct Absence(Option<Instant>);

impl Leadership {
    /// Whether this replica may write now.
    pub fn is_held(&self) -> bool {
        self.state.borrow().is_held()
    }

    /// Since when this replica leads without a break, if it does.
    pub fn since(&self) -> Option<Instant> {
        let since = self.state.borrow().since;
        since.filter(|_| self.is_held())
    }

    pub async fn acquired(&mut self) {
        while !self.is_held() {
            if self.state.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    pub async fn lost(&mut self) {
        while self.is_held() {
            if self.state.changed().await.is_err() {
                return;
            }
        }
    }

    /// Begins `lead` each time that this replica begins to lead, and ends it when another one does. Calls `ended` after
    /// each.
    pub async fn while_held<Lead: Future<Output = ()>>(mut self, lead: impl Fn() -> Lead, ended: impl Fn()) {
        loop {
            self.acquired().await;
            tokio::select! {
                () = lead() => {}
                () = self.lost() => {}
            }
            ended();
        }
    }

    /// gRPC address of the leader, if it is another replica.
    pub fn other(&self) -> Option<Arc<str>> {
        self.state.borrow().other.clone()
    }

    /// Releases the Lease, so that another replica can try.
    pub fn step_down(&self) {
        if self.is_held() {
            self.step_down.notify_one();
        }
    }

    pub async fn changed(&mut self) {
        if self.state.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Takes part in the election until shutdown, and releases the Lease then.
pub fn campaign(client: Client, namespace: &str, candidate: Candidate, drain: &Drain) -> Leadership {
    let (state, leadership) = watch::channel(State::default());
    let leases = Api::namespaced(client, namespace);
    let step_down = Arc::<Notify>::default();
    let election = Election {
        candidate,
        leases,
        observed: None,
        absence: Absence::default(),
        state,
        step_down: Arc::clone(&step_down),
        paused_until: None,
    };
    drain.spawn(election.run(drain.clone()));
    Leadership { state: leadership, step_down }
}

impl State {
    fn is_held(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() < until) && boot_clock::now() < self.until_boot
    }
}

impl Election {
    async fn run(mut self, drain: Drain) {
        let mut ticks = time::interval(RETRY_PERIOD);
        let step_down = Arc::clone(&self.step_down);
        loop {
            let until = self.state.borrow().until;
            let lapse = async {
                match until {
                    Some(until) => time::sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // A lapse comes before a renewal.
                biased;
                () = drain.started() => return self.resign().await,
                // It was not renewed in time.
                () = lapse => self.follow(None),
                () = step_down.notified() => {
                    self.resign().await;
                    self.paused_until = Some(Instant::now() + STEP_DOWN_PAUSE);
                }
                _ = ticks.tick() => self.try_once().await,
            }
        }
    }

    async fn try_once(&mut self) {
        // Not beyond the lapse: the gauge must never show two leaders.
        let deadline = Instant::now() + DEADLINE;
        let deadline = self.state.borrow().until.map_or(deadline, |until| until.min(deadline));
        match time::timeout_at(deadline, self.attempt()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => debug!(error = telemetry::chain(&error), "lease not reached"),
            Err(_elapsed) => debug!("lease not reached in time"),
        }
    }

    /// Renews or acquires the Lease, or finds that another replica holds it.
    async fn attempt(&mut self) -> Result<(), kube::Error> {
        let begun = Begun { at: Instant::now(), boot: boot_clock::now() };
        let Some(lease) = self.leases.get_opt(&self.candidate.lease).await? else {
            let ours = self.state.borrow().until.is_some_and(|until| begun.at < until);
            let is_over = self.absence.is_over(self.observed.is_some(), Instant::now());
            if !(ours || is_over && self.is_ready() && !self.is_paused()) {
                return Ok(());
            }
            let mut lease = Lease::default();
            lease.metadata.name = Some(self.candidate.lease.clone());
            self.sign(&mut lease);
            let made = self.leases.create(&PostParams::default(), &lease).await;
            return self.on_written(begun, made);
        };
        self.absence = Absence::default();
        let leads = self.state.borrow().until.is_some();
        if self.can_acquire(&lease) && (leads || self.is_ready() && !self.is_paused()) {
            let mut mine = lease;
            self.sign(&mut mine);
            let name = self.candidate.lease.clone();
            let taken = self.leases.replace(&name, &PostParams::default(), &mine).await;
            return self.on_written(begun, taken);
        }
        let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_ref());
        let address = lease.metadata.annotations.as_ref().and_then(|all| all.get(ADDRESS));
        // A released Lease still has the address of its former holder. A Lease that this replica failed to
        // release is not another's.
        let is_other = |holder: &String| !holder.is_empty() && *holder != self.candidate.identity;
        let address = address.filter(|_| holder.is_some_and(is_other));
        self.follow(address.map(|address| Arc::from(address.as_str())));
        Ok(())
    }

    fn is_ready(&self) -> bool {
        self.candidate.readiness.waiting_for().is_empty()
    }

    fn is_paused(&self) -> bool {
        self.paused_until.is_some_and(|until| Instant::now() < until)
    }

    /// Whether the Lease is ours, free or expired.
    fn can_acquire(&mut self, lease: &Lease) -> bool {
        let version = lease.metadata.resource_version.clone().unwrap_or_default();
        let now = Instant::now();
        let observed = match &self.observed {
            Some(observed) if observed.version == version => observed.at,
            _ => {
                self.observed = Some(ObservedLease { version, at: now });
                now
            }
        };
        let spec = lease.spec.as_ref();
        let holder = spec.and_then(|spec| spec.holder_identity.as_deref()).unwrap_or_default();
        let seconds = spec.and_then(|spec| spec.lease_duration_seconds);
        let lasts = seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let lasts = lasts.map_or(LEASE_DURATION, Duration::from_secs);
        holder.is_empty() || holder == self.candidate.identity || now >= observed + lasts
    }

    fn sign(&self, lease: &mut Lease) {
        let now = MicroTime(Timestamp::now());
        let spec = lease.spec.get_or_insert_default();
        if spec.holder_identity.as_deref() != Some(&self.candidate.identity) {
            spec.lease_transitions = Some(spec.lease_transitions.map_or(0, |count| count + 1));
            spec.acquire_time = Some(now.clone());
            spec.holder_identity = Some(self.candidate.identity.clone());
        }
        spec.lease_duration_seconds = i32::try_from(LEASE_DURATION.as_secs()).ok();
        spec.renew_time = Some(now);
        let annotations = lease.metadata.annotations.get_or_insert_default();
        annotations.insert(ADDRESS.to_owned(), self.candidate.address.clone());
    }

    fn on_written(&mut self, begun: Begun, written: Result<Lease, kube::Error>) -> Result<(), kube::Error> {
        match written {
            Ok(lease) => {
                let version = lease.metadata.resource_version.unwrap_or_default();
                self.observed = Some(ObservedLease { version, at: begun.at });
                let before = self.state.borrow().clone();
                let since = before.since.filter(|_| before.is_held()).unwrap_or_else(Instant::now);
                if before.until.is_none() {
                    info!(identity = self.candidate.identity, "leads from now on");
                    self.candidate.leader.set(1);
                }
                let (until, until_boot) = (Some(begun.at + RENEW_DEADLINE), begun.boot + RENEW_DEADLINE);
                self.state.send_replace(State { until, until_boot, since: Some(since), other: None });
                Ok(())
            }
            // Another replica was faster.
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn follow(&mut self, other: Option<Arc<str>>) {
        let led = self.state.borrow().until.is_some();
        if led {
            info!(identity = self.candidate.identity, "does not lead any more");
            self.candidate.leader.set(0);
        }
        if led || self.state.borrow().other != other {
            self.state.send_replace(State { other, ..State::default() });
        }
    }

    /// Releases the Lease, so that others need not wait for its expiry. Tries until the Lease has expired, or
    /// until the API server refuses.
    async fn resign(&mut self) {
        let led = self.state.borrow().until.is_some();
        self.follow(None);
        if !led {
            return;
        }
        let over = Instant::now() + LEASE_DURATION;
        while Instant::now() < over {
            match time::timeout(DEADLINE, self.release()).await {
                Ok(Ok(())) => return debug!("lease given back"),
                // When the installation is removed, our rights may go before we do.
                Ok(Err(kube::Error::Api(status))) if matches!(status.code, 401 | 403) => {
                    return debug!(%status, "lease not given back");
                }
                Ok(Err(error)) => debug!(error = telemetry::chain(&error), "lease not given back"),
                Err(_elapsed) => debug!("lease not given back in time"),
            }
            time::sleep(RELEASE_RETRY).await;
        }
    }

    async fn release(&self) -> Result<(), kube::Error> {
        let name = &self.candidate.lease;
        let Some(mut lease) = self.leases.get_opt(name).await? else { return Ok(()) };
        let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
        if spec.holder_identity.as_deref() == Some(&self.candidate.identity) {
            spec.holder_identity = None;
            self.leases.replace(name, &PostParams::default(), &lease).await?;
        }
        Ok(())
    }
}

impl Absence {
    /// Records that the Lease is missing; returns whether no replica can still believe it holds the Lease. If
    /// it was `observed` before, a holder may be cut off and unaware.
    fn is_over(&mut self, observed: bool, now: Instant) -> bool {
        now >= *self.0.get_or_insert(now) + if observed { LEASE_DURATION } else { ABSENCE_GRACE }
    }
}

#[cfg(test)]
mod tests;

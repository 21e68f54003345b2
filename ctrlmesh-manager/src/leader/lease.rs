//! Which replica writes?
//!
//! The one that holds a Lease. It renews it every two seconds, each time on the version that it read; a replica that
//! sees no new version for the time of the Lease takes it over, again on the version that it read, so that of several
//! one wins. Clocks are not compared: each replica counts from when it saw a version for the first time. The holder
//! stops being one two seconds before another could begin, by a clock that goes on while a process is stopped. A Lease
//! that somebody has deleted is nobody's only when its holder has had the time to notice. A holder that cannot do what the
//! others wait for gives it back, and asks for it again only when each of them has had a turn to take it.

use std::sync::Arc;
use std::time::Duration;

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

/// How long a Lease lasts after it was renewed.
const LEASE_DURATION: Duration = Duration::from_secs(8);

/// How long the holder believes to hold it after it was renewed.
const RENEW_DEADLINE: Duration = Duration::from_secs(6);

/// How often it is renewed, or looked at.
const RETRY_PERIOD: Duration = Duration::from_secs(2);

/// How long the API server may take.
const DEADLINE: Duration = Duration::from_secs(2);

/// How long a Lease that this replica has never observed has to be missing: a holder that can reach the API server has made it
/// anew by then.
const ABSENCE_GRACE: Duration = Duration::from_secs(4);

/// For how long a replica that has given the Lease up does not ask for it: the others look every two seconds, and a Lease
/// that could not be given back in [`LEASE_DURATION`] is nobody's by then.
const STEP_DOWN_PAUSE: Duration = Duration::from_secs(10);

// Where a holder is killed another leads within 15 seconds: it has observed the last version up to a period late, looks up to a
// period after that is over, and one of its looks may fail.
const _: () =
    assert!(LEASE_DURATION.as_secs() + 2 * RETRY_PERIOD.as_secs() + DEADLINE.as_secs() < 15);

/// How soon it is tried again to give the Lease back.
const RELEASE_RETRY: Duration = Duration::from_millis(200);

/// The annotation with the address at which the holder's gRPC is reached by the other replicas.
const ADDRESS: &str = "ctrlmesh.kusionstack.io/grpc-address";

/// Who asks for a Lease.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The Lease's name.
    pub lease: String,
    /// Who asks; no other replica may call itself so, nor the same one after a restart.
    pub identity: String,
    /// Where its gRPC is reached.
    pub address: String,
    /// 1 where it holds the Lease.
    pub leader: Gauge,
    /// What it still waits for: one that has not observed everything once would hold the Lease and write nothing.
    pub readiness: Readiness,
}

/// Whether this replica writes.
#[derive(Clone, Debug)]
pub struct Leadership {
    state: watch::Receiver<State>,
    /// That it is to be another's turn.
    step_down: Arc<Notify>,
}

/// What is known of the Lease.
#[derive(Clone, Debug, Default)]
struct State {
    /// Until when this replica holds it.
    until: Option<Instant>,
    /// Where the holder, if it is another, is reached.
    other: Option<Arc<str>>,
}

/// The Lease as it was last observed.
struct ObservedLease {
    version: String,
    at: Instant,
}

/// Takes part in the election.
struct Election {
    candidate: Candidate,
    leases: Api<Lease>,
    observed: Option<ObservedLease>,
    absence: Absence,
    state: watch::Sender<State>,
    step_down: Arc<Notify>,
    /// Until when it is the others' turn.
    paused_until: Option<Instant>,
}

/// Since when the Lease is not there.
#[derive(Debug, Default)]
struct Absence(Option<Instant>);

// === impl Leadership ===

impl Leadership {
    /// Whether this replica may write, at this very moment.
    pub fn is_held(&self) -> bool {
        self.state.borrow().until.is_some_and(|until| Instant::now() < until)
    }

    /// Waits until this replica may write.
    pub async fn acquired(&mut self) {
        while !self.is_held() {
            if self.state.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// Waits until it may not write.
    pub async fn lost(&mut self) {
        while self.is_held() {
            if self.state.changed().await.is_err() {
                return;
            }
        }
    }

    /// Where the replica that writes is reached, if it is another one.
    pub fn other(&self) -> Option<Arc<str>> {
        self.state.borrow().other.clone()
    }

    /// Gives the Lease up, if this replica holds it, so that another one may try what this one cannot do.
    pub fn step_down(&self) {
        if self.is_held() {
            self.step_down.notify_one();
        }
    }

    /// Waits until something about it changed.
    pub async fn changed(&mut self) {
        if self.state.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Takes part in the election until shutdown, when the Lease is given back.
pub fn campaign(
    client: Client,
    namespace: &str,
    candidate: Candidate,
    drain: &Drain,
) -> Leadership {
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

// === impl Election ===

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
                // What is over comes before what might be.
                biased;
                () = drain.started() => return self.resign().await,
                // It could not be renewed.
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
        // Not longer than it is held: whoever looks at the gauge is not to be told that two lead.
        let deadline = Instant::now() + DEADLINE;
        let deadline = self.state.borrow().until.map_or(deadline, |until| until.min(deadline));
        match time::timeout_at(deadline, self.attempt()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => debug!(error = telemetry::chain(&error), "lease not reached"),
            Err(_elapsed) => debug!("lease not reached in time"),
        }
    }

    /// Renews the Lease, takes it over, or sees that another holds it.
    async fn attempt(&mut self) -> Result<(), kube::Error> {
        let begun = Instant::now();
        let Some(lease) = self.leases.get_opt(&self.candidate.lease).await? else {
            let ours = self.state.borrow().until.is_some_and(|until| begun < until);
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
        // Of one that was given back it says who held it; one that is given up and was not given back is not another's.
        let is_other = |holder: &String| !holder.is_empty() && *holder != self.candidate.identity;
        let address = address.filter(|_| holder.is_some_and(is_other));
        self.follow(address.map(|address| Arc::from(address.as_str())));
        Ok(())
    }

    fn is_ready(&self) -> bool {
        self.candidate.readiness.waiting_for().is_empty()
    }

    /// Whether it is the others' turn.
    fn is_paused(&self) -> bool {
        self.paused_until.is_some_and(|until| Instant::now() < until)
    }

    /// Whether it is ours, nobody's, or has not been renewed for as long as it lasts.
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

    /// Makes it ours.
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

    fn on_written(
        &mut self,
        begun: Instant,
        written: Result<Lease, kube::Error>,
    ) -> Result<(), kube::Error> {
        match written {
            Ok(lease) => {
                let version = lease.metadata.resource_version.unwrap_or_default();
                self.observed = Some(ObservedLease { version, at: begun });
                let until = Some(begun + RENEW_DEADLINE);
                if self.state.borrow().until.is_none() {
                    info!(identity = self.candidate.identity, "leads from now on");
                    self.candidate.leader.set(1);
                }
                self.state.send_replace(State { until, other: None });
                Ok(())
            }
            // Another was faster.
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
            self.state.send_replace(State { until: None, other });
        }
    }

    /// Gives the Lease back, so that another need not wait until it ends; tries for as long as it lasts, or until that is
    /// refused.
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
                // Where everything is removed, our rights may go before we do.
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

// === impl Absence ===

impl Absence {
    /// Takes that the Lease is not there; returns whether nobody can believe to hold it any more. Of one that was `observed`
    /// there was a holder, which may not reach the API server, and so not notice.
    fn is_over(&mut self, observed: bool, now: Instant) -> bool {
        now >= *self.0.get_or_insert(now) + if observed { LEASE_DURATION } else { ABSENCE_GRACE }
    }
}

#[cfg(test)]
mod tests;

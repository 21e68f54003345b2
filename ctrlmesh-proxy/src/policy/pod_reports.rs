//! The states of pods, on their way to the manager: what guards have done, whether calls to webhooks are taken, what
//! requests come to, which kinds are watched, what was sent past the proxy, which containers have ended, and who waits
//! for its lock.
//!
//! Each pod that is served publishes its states here. The stream to the manager sends what changed.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ctrlmesh_common::wire::{Bypass, Ended, GuardState, LockState, Traffic, Watched, WebhookState};
use ctrlmesh_runtime::drain::Drain;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::PodName;

/// The newest state of each pod that is served and has one.
pub(crate) type StatesByPod<S> = HashMap<PodName, PodState<S>>;

/// The states of the guards of all pods.
pub type GuardReports = PodReports<[GuardState]>;

/// What becomes of the calls to the webhooks of all pods.
pub type WebhookReports = PodReports<WebhookState>;

/// What the requests of all pods come to.
pub type TrafficReports = PodReports<Traffic>;

/// Which kinds all pods watch.
pub type WatchReports = PodReports<Watched>;

/// What all pods have sent past their proxy.
pub type BypassReports = PodReports<Bypass>;

/// Which containers of all pods have ended.
pub type EndedReports = PodReports<Ended>;

/// Which pods wait for their lock.
pub type LockReports = PodReports<LockState>;

/// Where the guards of one pod publish their states.
pub type PublishGuards = PublishState<[GuardState]>;

/// Where the webhook of one pod publishes its state.
pub type PublishWebhook = PublishState<WebhookState>;

/// Where the counts of one pod's requests are published.
pub type PublishTraffic = PublishState<Traffic>;

/// Where it is published which kinds one pod watches.
pub type PublishWatches = PublishState<Watched>;

/// Where it is published what one pod has sent past its proxy.
pub type PublishBypass = PublishState<Bypass>;

/// Where it is published which containers of one pod have ended.
pub type PublishEnded = PublishState<Ended>;

/// Where it is published whether one pod waits for its lock.
pub type PublishLock = PublishState<LockState>;

/// Everything that is reported of all pods.
#[derive(Clone, Debug, Default)]
pub struct AllReports {
    /// What guards have done.
    pub guards: GuardReports,
    /// Whether calls to webhooks are taken.
    pub webhooks: WebhookReports,
    /// What requests come to.
    pub traffic: TrafficReports,
    /// Which kinds are watched.
    pub watches: WatchReports,
    /// What was sent past the proxy.
    pub bypass: BypassReports,
    /// Which containers have ended.
    pub ended: EndedReports,
    /// Which pods wait for their lock.
    pub locks: LockReports,
}

/// Publishes until shutdown, or until the pod is `gone`.
pub(crate) async fn while_served(
    publishing: impl Future<Output = ()>,
    drain: &Drain,
    gone: Option<&CancellationToken>,
) {
    tokio::select! {
        () = drain.started() => {}
        () = until_gone(gone) => {}
        () = publishing => {}
    }
}

/// Completes once the pod is `gone`; never, where nothing says so.
pub(crate) async fn until_gone(gone: Option<&CancellationToken>) {
    match gone {
        Some(gone) => gone.cancelled().await,
        None => std::future::pending().await,
    }
}

/// The state of one pod.
#[derive(Debug)]
pub(crate) struct PodState<S: ?Sized> {
    number: u64,
    pub(crate) state: Arc<S>,
}

/// The states of all pods.
#[derive(Debug)]
pub struct PodReports<S: ?Sized>(Arc<Shared<S>>);

#[derive(Debug)]
struct Shared<S: ?Sized> {
    by_pod: watch::Sender<StatesByPod<S>>,
    publishers: AtomicU64,
}

/// Where one pod publishes its state, until it is dropped. The default publishes it nowhere.
#[derive(Debug)]
pub struct PublishState<S: ?Sized>(Option<Publisher<S>>);

#[derive(Debug)]
struct Publisher<S: ?Sized> {
    to: PodReports<S>,
    pod: PodName,
    number: u64,
}

impl<S: ?Sized> Clone for PodState<S> {
    fn clone(&self) -> Self {
        Self { number: self.number, state: self.state.clone() }
    }
}

impl<S: ?Sized> Clone for PodReports<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S: ?Sized> Default for PodReports<S> {
    fn default() -> Self {
        let by_pod = watch::Sender::new(HashMap::new());
        Self(Arc::new(Shared { by_pod, publishers: AtomicU64::new(0) }))
    }
}

impl<S: ?Sized> PodReports<S> {
    /// For a pod that is about to be served.
    pub fn begin(&self, pod: PodName) -> PublishState<S> {
        let number = self.0.publishers.fetch_add(1, Ordering::Relaxed);
        PublishState(Some(Publisher { to: self.clone(), pod, number }))
    }

    pub(crate) fn changes(&self) -> watch::Receiver<StatesByPod<S>> {
        self.0.by_pod.subscribe()
    }

    /// The newest state of a pod, if it has one.
    pub(crate) fn of(&self, pod: &PodName) -> Option<Arc<S>> {
        self.0.by_pod.borrow().get(pod).map(|pod| pod.state.clone())
    }
}

impl<S: ?Sized> Default for PublishState<S> {
    fn default() -> Self {
        Self(None)
    }
}

impl<S: ?Sized + PartialEq> PublishState<S> {
    /// Replaces the state. `None`: the pod has none, as one without guards.
    pub(crate) fn publish(&self, state: Option<Arc<S>>) {
        let Some(Publisher { to, pod, number }) = &self.0 else { return };
        to.0.by_pod.send_if_modified(|all| {
            if all.get(pod).is_some_and(|later| later.number > *number) {
                return false;
            }
            let Some(state) = state else { return all.remove(pod).is_some() };
            let known = all.get(pod).filter(|before| *before.state == *state).map(|before| before.state.clone());
            let is_new = known.is_none();
            all.insert(pod.clone(), PodState { number: *number, state: known.unwrap_or(state) });
            is_new
        });
    }
}

impl<S: ?Sized> Drop for Publisher<S> {
    fn drop(&mut self) {
        let Self { to, pod, number } = self;
        to.0.by_pod.send_if_modified(|all| {
            // The pod may be served anew already.
            let is_ours = all.get(pod).is_some_and(|one| one.number == *number);
            is_ours && all.remove(pod).is_some()
        });
    }
}

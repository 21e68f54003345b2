//! Keeps what the proxies report of pods, per replica that got it: what requests have come to, which kinds are watched,
//! which containers have ended, and which pods wait for their lock.
//!
//! The first two change all the time. So none of them wakes anybody who waits for receipts.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use ctrlmesh_common::names::MAX_SUBDOMAIN_BYTES;
use ctrlmesh_common::slots::COUNT;
use ctrlmesh_common::wire::{
    Ended, FIRST_WRITE_BOUNDS, LockState, MAX_ENDED, MAX_SHADOW_DIFFERENCES, MAX_SHADOW_FIELD_BYTES, MAX_SHADOW_FIELDS,
    MAX_WATCHED_KINDS, MAX_WATCHED_NAMESPACES, Traffic, Watched,
};
use ctrlmesh_runtime::sync::lock;
use tokio::sync::watch;

use super::by_replica::{self, ByReplica, OfPod};
use crate::rules::pod::PodName;

/// Longest ID of a container that is kept.
const MAX_ID_BYTES: usize = 128;

/// Longest verb that is kept.
const MAX_VERB_BYTES: usize = 32;

/// What the proxy of a pod reported last.
#[derive(Clone, Debug, PartialEq)]
pub struct Reported<S> {
    /// Of the pod.
    pub uid: String,
    pub state: S,
}

/// What the requests of a pod to the API server have come to.
pub type PodTraffic = Reported<Traffic>;

/// Which kinds a pod watches.
pub type PodWatches = Reported<Watched>;

/// A state that a proxy reports again and again.
pub trait ProxyState {
    /// When the proxy began, in milliseconds since 1970, and how far it is.
    fn progress(&self) -> (u64, u64);

    /// As much of it as is kept: a proxy inside a pod may say anything.
    #[must_use]
    fn bounded(self) -> Self;
}

/// The reports on all pods.
#[derive(Debug)]
pub struct Reports<S> {
    by_pod: Mutex<ByReplica<StoredReport<S>>>,
    changed: watch::Sender<u64>,
}

#[derive(Debug)]
struct StoredReport<S> {
    of: Reported<S>,
    /// UID of the proxy's pod: during a handover there are two.
    by: Arc<str>,
    connected: bool,
}

impl ProxyState for Traffic {
    fn progress(&self) -> (u64, u64) {
        (self.since, self.requests)
    }

    /// The counts with a report on a shadow that is no longer than the status of a root takes.
    fn bounded(mut self) -> Self {
        let clip = |text: &mut String, longest| text.truncate(text.floor_char_boundary(longest));
        self.first_writes.truncate(FIRST_WRITE_BOUNDS.len());
        self.slots.truncate(usize::from(COUNT));
        let shadow = self.shadow.iter_mut();
        for one in shadow.flat_map(|shadow| {
            shadow.differences.truncate(MAX_SHADOW_DIFFERENCES);
            &mut shadow.differences
        }) {
            clip(&mut one.verb, MAX_VERB_BYTES);
            clip(&mut one.resource, MAX_SHADOW_FIELD_BYTES);
            clip(&mut one.namespace, MAX_SUBDOMAIN_BYTES);
            clip(&mut one.name, MAX_SUBDOMAIN_BYTES);
            one.fields.truncate(MAX_SHADOW_FIELDS);
            one.fields.iter_mut().for_each(|field| clip(field, MAX_SHADOW_FIELD_BYTES));
        }
        self
    }
}

impl ProxyState for Watched {
    fn progress(&self) -> (u64, u64) {
        (self.since, 0)
    }

    fn bounded(mut self) -> Self {
        self.kinds.truncate(MAX_WATCHED_KINDS);
        self.kinds.retain(|kind| kind.group.len().max(kind.resource.len()) <= MAX_SUBDOMAIN_BYTES);
        let mut room = MAX_WATCHED_NAMESPACES;
        for kind in &mut self.kinds {
            kind.more |= kind.namespaces.len() > room;
            kind.namespaces.truncate(room);
            kind.namespaces.retain(|namespace| namespace.len() <= MAX_SUBDOMAIN_BYTES);
            room -= kind.namespaces.len();
        }
        self
    }
}

impl ProxyState for Ended {
    fn progress(&self) -> (u64, u64) {
        (self.since, 0)
    }

    fn bounded(mut self) -> Self {
        self.containers.truncate(MAX_ENDED);
        self.containers.retain(|id| id.len() <= MAX_ID_BYTES);
        self
    }
}

impl ProxyState for LockState {
    fn progress(&self) -> (u64, u64) {
        (self.since, self.changes)
    }

    fn bounded(self) -> Self {
        self
    }
}

impl<S> Default for Reports<S> {
    fn default() -> Self {
        Self { by_pod: Mutex::default(), changed: watch::Sender::new(0) }
    }
}

impl<S: ProxyState + Clone> Reports<S> {
    /// Of each pod, by the proxy that serves it, or else by the last one that did.
    pub fn newest(&self) -> BTreeMap<PodName, Reported<S>> {
        self.newest_if(|_| true)
    }

    /// The same of pods whose proxy is connected.
    pub fn connected(&self) -> BTreeMap<PodName, Reported<S>> {
        self.newest_if(|one| one.connected)
    }

    fn newest_if(&self, counts: impl Fn(&StoredReport<S>) -> bool) -> BTreeMap<PodName, Reported<S>> {
        let by_pod = lock(&self.by_pod);
        let newest = |(pod, all): (&PodName, &OfPod<StoredReport<S>>)| {
            let newest = all.values().max_by_key(|one| weight(one)).filter(|one| counts(one))?;
            Some((pod.clone(), newest.of.clone()))
        };
        by_pod.iter().filter_map(newest).collect()
    }

    /// What proxies reported to this replica.
    pub fn here(&self) -> BTreeMap<PodName, Reported<S>> {
        let by_pod = lock(&self.by_pod);
        let here = |(pod, all): (&PodName, &OfPod<StoredReport<S>>)| Some((pod.clone(), all.get(&None)?.of.clone()));
        by_pod.iter().filter_map(here).collect()
    }

    /// Changes with every report.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Takes what the proxy `by` reported to replica `at` of the pod with this UID; none: this one. Without a state,
    /// the proxy says nothing of the pod any more.
    pub(super) fn receive(&self, at: Option<&Arc<str>>, (pod, uid): (&PodName, &str), by: &Arc<str>, state: Option<S>) {
        match state {
            None => self.forget(at, pod, by),
            Some(state) => self.take(at, pod, by, Reported { uid: uid.to_owned(), state: state.bounded() }),
        }
    }

    /// Takes what the proxy `by` reported to replica `at`; none: this one.
    pub(super) fn take(&self, at: Option<&Arc<str>>, pod: &PodName, by: &Arc<str>, of: Reported<S>) {
        let mut by_pod = lock(&self.by_pod);
        let of_pod = by_pod.entry(pod.clone()).or_default();
        let reported = StoredReport { of, by: by.clone(), connected: true };
        let serves_later = |other: &StoredReport<S>| other.by != *by && weight(other) > weight(&reported);
        if of_pod.get(&at.cloned()).is_some_and(serves_later) {
            // The successor connected before the old proxy left.
            return;
        }
        of_pod.insert(at.cloned(), reported);
        forget_older(of_pod);
        drop(by_pod);
        self.change();
    }

    /// The proxy `by` does not count the pod's requests any more, unless another one has counted since.
    pub(super) fn forget(&self, at: Option<&Arc<str>>, pod: &PodName, by: &str) {
        self.retain(|one, replica, said| one != pod || *replica != at.cloned() || *said.by != *by);
    }

    /// The proxy `by` left this replica: its reports stay until there are others.
    pub(super) fn left(&self, pod: &PodName, by: &str) {
        if let Some(reported) = lock(&self.by_pod).get_mut(pod).and_then(|of_pod| of_pod.get_mut(&None))
            && *reported.by == *by
        {
            reported.connected = false;
        }
        self.change();
    }

    /// Replica `at` is gone, and so its proxies.
    pub(super) fn lose(&self, at: &Arc<str>) {
        let at = Some(at.clone());
        for of_pod in lock(&self.by_pod).values_mut() {
            if let Some(reported) = of_pod.get_mut(&at) {
                reported.connected = false;
                forget_older(of_pod);
            }
        }
        self.change();
    }

    /// Keeps the reports on pods of which they are still asked for, by name and UID.
    pub(super) fn keep(&self, asks: impl Fn(&PodName, &str) -> bool) {
        self.retain(|pod, _, reported| asks(pod, &reported.of.uid));
    }

    fn retain(&self, counts: impl Fn(&PodName, &Option<Arc<str>>, &StoredReport<S>) -> bool) {
        if by_replica::retain(&mut lock(&self.by_pod), counts) {
            self.change();
        }
    }

    fn change(&self) {
        self.changed.send_modify(|count| *count = count.wrapping_add(1));
    }
}

/// The report of a connected proxy wins, then that of the proxy that began later, then the one that is further on.
fn weight<S: ProxyState>(said: &StoredReport<S>) -> (bool, u64, u64) {
    let (since, further) = said.of.state.progress();
    (said.connected, since, further)
}

/// Drops outdated reports of other replicas: otherwise each replica that comes and goes would leave some behind.
fn forget_older<S: ProxyState>(of_pod: &mut OfPod<StoredReport<S>>) {
    let newest = of_pod.values().map(weight).max();
    of_pod.retain(|at, one| at.is_none() || one.connected || Some(weight(one)) == newest);
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::wire::{Shadow, ShadowDifference};

    use super::super::tests::name;
    use super::*;

    fn counted(since: u64, requests: u64) -> PodTraffic {
        let traffic = Traffic { since, requests, ..Traffic::default() };
        Reported { uid: "uid-of-a".to_owned(), state: traffic }
    }

    #[test]
    fn the_counts_of_the_proxy_that_began_last_win() {
        let reports = Reports::<Traffic>::default();
        let (old, new): (Arc<str>, Arc<str>) = (Arc::from("old"), Arc::from("new"));
        let newest = || reports.newest().remove(&name("a")).map(|one| (one.state.since, one.state.requests));
        reports.take(None, &name("a"), &old, counted(5, 100));
        reports.take(None, &name("a"), &new, counted(6, 0));
        reports.take(None, &name("a"), &old, counted(5, 101));
        assert_eq!(newest(), Some((6, 0)), "the old proxy is draining");
        reports.forget(None, &name("a"), "old");
        reports.left(&name("a"), "old");
        assert_eq!(newest(), Some((6, 0)));
        assert!(reports.connected().contains_key(&name("a")));
        reports.left(&name("a"), "new");
        assert_eq!(newest(), Some((6, 0)), "nobody has counted since");
        assert!(reports.connected().is_empty());
        // The node's clock was set back.
        reports.take(None, &name("a"), &Arc::from("newer"), counted(4, 1));
        assert_eq!(newest(), Some((4, 1)));
        reports.forget(None, &name("a"), "newer");
        assert_eq!(newest(), None);
    }

    #[test]
    fn a_report_on_a_shadow_is_bounded() {
        let long = || "é".repeat(10_000);
        let difference = || ShadowDifference {
            verb: long(),
            resource: long(),
            namespace: long(),
            name: long(),
            fields: vec![long(); 100],
        };
        let shadow = Shadow { differences: (0..100).map(|_| difference()).collect(), ..Shadow::default() };
        let traffic = Traffic { shadow: Some(shadow), ..Traffic::default() }.bounded();
        let differences = traffic.shadow.unwrap().differences;
        assert_eq!((differences.len(), differences[0].fields.len()), (MAX_SHADOW_DIFFERENCES, MAX_SHADOW_FIELDS));
        let bytes = [&differences[0].verb, &differences[0].name, &differences[0].fields[0]].map(String::len);
        assert_eq!(bytes, [32, 252, 512]);
        let other = Traffic { requests: 7, ..Traffic::default() };
        assert_eq!(other.clone().bounded(), other);
    }

    #[test]
    fn former_replicas_leave_the_newest_counts_behind() {
        let reports = Reports::<Traffic>::default();
        let (proxy, there, other): (Arc<str>, Arc<str>, Arc<str>) =
            (Arc::from("proxy"), Arc::from("there"), Arc::from("other"));
        let newest = || reports.newest().remove(&name("a")).map(|one| one.state.requests);
        reports.take(Some(&there), &name("a"), &there, counted(5, 100));
        assert!(newest() == Some(100) && reports.here().is_empty());
        reports.lose(&there);
        assert_eq!(newest(), Some(100));
        // Its proxy has come back elsewhere.
        reports.take(Some(&other), &name("a"), &other, counted(5, 110));
        assert_eq!((newest(), reports.by_pod.lock().unwrap()[&name("a")].len()), (Some(110), 1));
        reports.take(None, &name("a"), &proxy, counted(5, 120));
        assert_eq!((newest(), reports.here().len()), (Some(120), 1));
        let changes = reports.changes();
        reports.keep(|pod, uid| *pod == name("a") && uid == "another");
        assert!(newest().is_none() && changes.has_changed().unwrap());
    }
}

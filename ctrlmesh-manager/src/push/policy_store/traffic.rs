//! Keeps what the requests of each pod have come to, per replica that got it.
//!
//! These counts decide nothing by themselves, and change all the time. So they wake nobody who waits for receipts.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use ctrlmesh_common::names::MAX_SUBDOMAIN_BYTES;
use ctrlmesh_common::wire::{
    FIRST_WRITE_BOUNDS, MAX_SHADOW_DIFFERENCES, MAX_SHADOW_FIELD_BYTES, MAX_SHADOW_FIELDS, Traffic,
};
use ctrlmesh_runtime::sync::lock;
use tokio::sync::watch;

use super::by_replica::{self, ByReplica, OfPod};
use crate::rules::pod::PodName;

/// Longest verb that is kept.
const MAX_VERB_BYTES: usize = 32;

/// What the requests of a pod to the API server have come to, as its proxy reported last.
#[derive(Clone, Debug, PartialEq)]
pub struct PodTraffic {
    /// Of the pod.
    pub uid: String,
    pub traffic: Traffic,
}

#[derive(Debug)]
pub(super) struct TrafficReports {
    by_pod: Mutex<ByReplica<ReportedTraffic>>,
    changed: watch::Sender<u64>,
}

#[derive(Debug)]
struct ReportedTraffic {
    of: PodTraffic,
    /// UID of the proxy's pod: during a handover there are two.
    by: Arc<str>,
    connected: bool,
}

impl Default for TrafficReports {
    fn default() -> Self {
        Self { by_pod: Mutex::default(), changed: watch::Sender::new(0) }
    }
}

impl TrafficReports {
    pub(super) fn newest(&self) -> BTreeMap<PodName, PodTraffic> {
        let by_pod = lock(&self.by_pod);
        let newest = |(pod, all): (&PodName, &OfPod<ReportedTraffic>)| {
            let newest = all.values().max_by_key(|one| weight(one))?;
            Some((pod.clone(), newest.of.clone()))
        };
        by_pod.iter().filter_map(newest).collect()
    }

    pub(super) fn here(&self) -> BTreeMap<PodName, PodTraffic> {
        let by_pod = lock(&self.by_pod);
        let here = |(pod, all): (&PodName, &OfPod<ReportedTraffic>)| Some((pod.clone(), all.get(&None)?.of.clone()));
        by_pod.iter().filter_map(here).collect()
    }

    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Takes what the proxy `by` reported to replica `at`; none: this one.
    pub(super) fn take(&self, at: Option<&Arc<str>>, pod: &PodName, by: &Arc<str>, of: PodTraffic) {
        let mut by_pod = lock(&self.by_pod);
        let of_pod = by_pod.entry(pod.clone()).or_default();
        let reported = ReportedTraffic { of, by: by.clone(), connected: true };
        let serves_later = |other: &ReportedTraffic| other.by != *by && weight(other) > weight(&reported);
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

    /// The proxy `by` left this replica: its counts stay until there are others.
    pub(super) fn left(&self, pod: &PodName, by: &str) {
        if let Some(reported) = lock(&self.by_pod).get_mut(pod).and_then(|of_pod| of_pod.get_mut(&None))
            && *reported.by == *by
        {
            reported.connected = false;
        }
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
    }

    /// Keeps the counts of pods of which they are still asked for, by name and UID.
    pub(super) fn keep(&self, asks: impl Fn(&PodName, &str) -> bool) {
        self.retain(|pod, _, reported| asks(pod, &reported.of.uid));
    }

    fn retain(&self, counts: impl Fn(&PodName, &Option<Arc<str>>, &ReportedTraffic) -> bool) {
        if by_replica::retain(&mut lock(&self.by_pod), counts) {
            self.change();
        }
    }

    fn change(&self) {
        self.changed.send_modify(|count| *count = count.wrapping_add(1));
    }
}

/// The counts of a connected proxy win, then those of the proxy that began later, then those that are further on.
fn weight(reported: &ReportedTraffic) -> (bool, u64, u64) {
    let traffic = &reported.of.traffic;
    (reported.connected, traffic.since, traffic.requests)
}

/// The counts with a report on a shadow that is no longer than the status of a root takes: a proxy inside a pod may say
/// anything.
pub(super) fn bounded(mut traffic: Traffic) -> Traffic {
    let clip = |text: &mut String, longest| text.truncate(text.floor_char_boundary(longest));
    traffic.first_writes.truncate(FIRST_WRITE_BOUNDS.len());
    let shadow = traffic.shadow.iter_mut();
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
    traffic
}

/// Drops outdated counts of other replicas: otherwise each replica that comes and goes would leave some behind.
fn forget_older(of_pod: &mut OfPod<ReportedTraffic>) {
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
        PodTraffic { uid: "uid-of-a".to_owned(), traffic }
    }

    #[test]
    fn the_counts_of_the_proxy_that_began_last_win() {
        let reports = TrafficReports::default();
        let (old, new): (Arc<str>, Arc<str>) = (Arc::from("old"), Arc::from("new"));
        let newest = || reports.newest().remove(&name("a")).map(|one| (one.traffic.since, one.traffic.requests));
        reports.take(None, &name("a"), &old, counted(5, 100));
        reports.take(None, &name("a"), &new, counted(6, 0));
        reports.take(None, &name("a"), &old, counted(5, 101));
        assert_eq!(newest(), Some((6, 0)), "the old proxy is draining");
        reports.forget(None, &name("a"), "old");
        reports.left(&name("a"), "old");
        assert_eq!(newest(), Some((6, 0)));
        reports.left(&name("a"), "new");
        assert_eq!(newest(), Some((6, 0)), "nobody has counted since");
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
        let traffic = bounded(Traffic { shadow: Some(shadow), ..Traffic::default() });
        let differences = traffic.shadow.unwrap().differences;
        assert_eq!((differences.len(), differences[0].fields.len()), (MAX_SHADOW_DIFFERENCES, MAX_SHADOW_FIELDS));
        let bytes = [&differences[0].verb, &differences[0].name, &differences[0].fields[0]].map(String::len);
        assert_eq!(bytes, [32, 252, 512]);
        let other = Traffic { requests: 7, ..Traffic::default() };
        assert_eq!(bounded(other.clone()), other);
    }

    #[test]
    fn former_replicas_leave_the_newest_counts_behind() {
        let reports = TrafficReports::default();
        let (proxy, there, other): (Arc<str>, Arc<str>, Arc<str>) =
            (Arc::from("proxy"), Arc::from("there"), Arc::from("other"));
        let newest = || reports.newest().remove(&name("a")).map(|one| one.traffic.requests);
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

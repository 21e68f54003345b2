//! Gathers what is proved about the pods of an operator, as [`handover`](ctrlmesh_common::handover) takes it.
//!
//! Pure: times are values. An acknowledgement is by UID, so that of a pod that was replaced counts for nobody.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use ctrlmesh_common::handover::{Evidence, PodEvidence, Server};
use ctrlmesh_common::ownership::Ownership;
use jiff::Timestamp;

/// How long a pod may still write after it vanished without having been seen to end. The API server remembers a
/// reviewed token for 10 s (`AuthenticationConfig`, `cacheTTL`); two more are for what is under way.
pub const GONE_AFTER: Duration = Duration::from_secs(12);

/// By `NAMESPACE/NAME` of the root.
pub type Evidences = BTreeMap<String, RootEvidence>;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct RootEvidence {
    /// Of the root; empty where it has none.
    pub uid: String,
    /// `revoked.epoch` of the table in question; 0 where it takes nothing away. What lapsed, lapsed for this one only.
    pub revoked_epoch: u64,
    pub evidence: Evidence,
    /// For people: by UID of pods that have not lapsed yet, when they do unless their proxies are confirmed.
    pub lapses_at: BTreeMap<String, Timestamp>,
}

/// What is known at one moment about the pods of one root.
#[derive(Clone, Copy, Debug)]
pub struct Observed<'a> {
    pub server: Server,
    /// UIDs of pods that were seen to end.
    pub stopped: &'a BTreeSet<String>,
    /// UIDs of pods that do not exist any more, and since when.
    pub missing_since: &'a BTreeMap<String, Instant>,
    /// By UID, the epoch that the pod's proxy has in force.
    pub acknowledged: &'a BTreeMap<String, u64>,
    /// Since when the present `revoked.epoch` is known.
    pub revoked_since: Option<Instant>,
    /// How long an acknowledgement is waited for where the API server fences.
    pub acknowledge_within: Duration,
    /// By UID, when pods lapse of which only the proxies fence. A pod that is missing never does.
    pub lapses_at: &'a BTreeMap<String, Instant>,
}

/// The UIDs of all pods that `table` names.
pub fn uids(table: &Ownership) -> impl Iterator<Item = &String> {
    let revoked = table.revoked.iter().flat_map(|revoked| revoked.pod_uids.keys());
    table.pod_uids.keys().chain(revoked)
}

/// Also when the evidence changes next by the passing of time alone.
pub fn gather(table: &Ownership, observed: Observed<'_>, now: Instant) -> (RootEvidence, Option<Instant>) {
    let revoked_epoch = table.revoked.as_ref().map_or(0, |revoked| revoked.epoch);
    // Without the API server's fence, silence is a proof only where policies lapse.
    let is_fenced = matches!(observed.server, Server::Enforces(epoch) if epoch >= revoked_epoch);
    let bound = observed.revoked_since.filter(|_| is_fenced && revoked_epoch > 0);
    let bound = bound.map(|since| since + observed.acknowledge_within);
    let mut due: Option<Instant> = None;
    let mut is_over = |at: Option<Instant>| {
        let ahead = at.filter(|at| *at > now);
        due = [due, ahead].into_iter().flatten().min();
        at.is_some() && ahead.is_none()
    };
    let lapsed = is_over(bound);
    let pods = uids(table).map(|uid| {
        let missing = observed.missing_since.get(uid).map(|since| *since + GONE_AFTER);
        let gone = observed.stopped.contains(uid) || is_over(missing);
        let acknowledged = observed.acknowledged.get(uid).copied();
        let lapsed = is_over(observed.lapses_at.get(uid).copied()) || lapsed;
        (uid.clone(), PodEvidence { acknowledged, gone, lapsed })
    });
    let evidence = Evidence { server: observed.server, pods: pods.collect() };
    (RootEvidence { revoked_epoch, evidence, ..RootEvidence::default() }, due)
}

/// The evidence for the present table. What was gathered for another one proves only which pods are gone, and what the
/// API server and the proxies enforce: epochs of one operator never shrink.
///
/// Where nothing was gathered for the root with this UID, `server` is what is known of the API server.
pub fn counted(gathered: Option<&RootEvidence>, uid: &str, table: &Ownership, server: Server) -> Evidence {
    let Some(gathered) = gathered.filter(|gathered| gathered.uid == uid) else {
        return Evidence { server, pods: BTreeMap::new() };
    };
    let revoked_epoch = table.revoked.as_ref().map_or(0, |revoked| revoked.epoch);
    let mut evidence = gathered.evidence.clone();
    if gathered.revoked_epoch != revoked_epoch {
        evidence.pods.values_mut().for_each(|pod| pod.lapsed = false);
    }
    evidence
}

/// Nothing is proved.
#[cfg(test)]
pub fn nothing() -> Evidence {
    Evidence { server: Server::None, pods: BTreeMap::new() }
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::ownership::Revoked;

    use super::*;

    const WITHIN: Duration = Duration::from_secs(5);

    /// Pods `a` and `b`; something was taken from `a` in epoch 7.
    fn table() -> Ownership {
        let revoked =
            Revoked { epoch: 7, slots: [(3.try_into().unwrap(), "x".to_owned())].into(), ..Revoked::default() };
        Ownership {
            epoch: 7,
            pod_uids: [("a".to_owned(), "x".to_owned()), ("b".to_owned(), "y".to_owned())].into(),
            revoked: Some(revoked),
            ..Ownership::default()
        }
    }

    struct Case {
        server: Server,
        stopped: BTreeSet<String>,
        missing_since: BTreeMap<String, Instant>,
        revoked_since: Option<Instant>,
        lapses_at: BTreeMap<String, Instant>,
    }

    impl Case {
        fn gather(&self, now: Instant) -> (RootEvidence, Option<Instant>) {
            let acknowledged = [("a".to_owned(), 6)].into();
            let observed = Observed {
                server: self.server,
                stopped: &self.stopped,
                missing_since: &self.missing_since,
                acknowledged: &acknowledged,
                revoked_since: self.revoked_since,
                acknowledge_within: WITHIN,
                lapses_at: &self.lapses_at,
            };
            gather(&table(), observed, now)
        }
    }

    fn case(server: Server) -> Case {
        Case {
            server,
            stopped: BTreeSet::new(),
            missing_since: BTreeMap::new(),
            revoked_since: None,
            lapses_at: BTreeMap::new(),
        }
    }

    #[test]
    fn a_pod_seen_to_end_is_gone_at_once_another_in_time() {
        let start = Instant::now();
        let mut case = case(Server::None);
        case.stopped.insert("a".to_owned());
        case.missing_since.insert("b".to_owned(), start);
        let gone = |now| {
            let (found, due) = case.gather(now);
            (found.evidence.pods.values().map(|pod| pod.gone).collect::<Vec<_>>(), due)
        };
        let end = start + GONE_AFTER;
        assert_eq!(gone(start), (vec![true, false], Some(end)));
        assert_eq!(gone(end), (vec![true, true], None));
    }

    #[test]
    fn silence_lapses_only_where_the_api_server_fences() {
        let start = Instant::now();
        for (server, lapses) in [(Server::None, false), (Server::Enforces(6), false), (Server::Enforces(7), true)] {
            let case = Case { revoked_since: Some(start), ..case(server) };
            let (before, due) = case.gather(start);
            assert!(before.evidence.pods.values().all(|pod| !pod.lapsed));
            assert_eq!(due, lapses.then(|| start + WITHIN), "{server:?}");
            let (after, due) = case.gather(start + WITHIN);
            assert!(after.evidence.pods.values().all(|pod| pod.lapsed == lapses), "{server:?}");
            assert_eq!((due, after.evidence.pods["a"].acknowledged), (None, Some(6)));
        }
    }

    #[test]
    fn a_pod_whose_policy_lapses_has_lapsed_in_time_alone() {
        let (start, mut case) = (Instant::now(), case(Server::None));
        case.lapses_at.insert("a".to_owned(), start + WITHIN);
        let lapsed = |now| {
            let (found, due) = case.gather(now);
            (found.evidence.pods.values().map(|pod| pod.lapsed).collect::<Vec<_>>(), due)
        };
        assert_eq!(lapsed(start), (vec![false, false], Some(start + WITHIN)));
        assert_eq!(lapsed(start + WITHIN), (vec![true, false], None));
    }

    #[test]
    fn what_lapsed_for_one_epoch_has_not_for_the_next() {
        let start = Instant::now();
        let case = Case { revoked_since: Some(start), ..case(Server::Enforces(9)) };
        let (found, _) = case.gather(start + WITHIN);
        let lapsed = |table: &Ownership| counted(Some(&found), "", table, Server::None).pods["a"].lapsed;
        let mut later = table();
        assert!(lapsed(&later));
        later.revoked.as_mut().unwrap().epoch = 8;
        assert!(!lapsed(&later));
        assert_eq!(
            counted(None, "", &later, Server::Enforces(0)),
            Evidence { server: Server::Enforces(0), pods: [].into() }
        );
        assert_eq!(counted(Some(&found), "later", &later, Server::None).pods, [].into(), "another root of this name");
    }
}

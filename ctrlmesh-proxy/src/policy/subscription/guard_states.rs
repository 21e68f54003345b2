//! Reports to the manager what guards have done.

use std::sync::Arc;

use ctrlmesh_common::wire::{Content, GuardReport, GuardState, PodId, Report};
use tokio::sync::mpsc;

use super::Client;
use crate::policy::PodName;
use crate::policy::guard_reports::StatesByPod;
use crate::policy::store::PodPolicies;

impl Client {
    /// Reports the states of all guards, and then each change, until the stream ends.
    pub(super) fn report_guards(&self, reports: mpsc::Sender<Report>) {
        let (mut guards, policies) = (self.guards.changes(), self.policies.subscribe());
        self.drain.spawn_until_started(async move {
            let mut sent = StatesByPod::new();
            loop {
                let now = guards.borrow_and_update().clone();
                let news = unreported(&mut sent, now, &policies.borrow());
                for report in news {
                    if reports.send(report).await.is_err() {
                        return;
                    }
                }
                tokio::select! {
                    () = reports.closed() => return,
                    changed = guards.changed() => if changed.is_err() { return },
                }
            }
        });
    }
}

/// What is not in `sent` yet, of pods that the manager has sent policies of. A pod that has no guards any more is
/// reported once.
fn unreported(sent: &mut StatesByPod, now: StatesByPod, policies: &PodPolicies) -> Vec<Report> {
    let report = |pod: &PodName, states: &[GuardState]| {
        let kept = policies.get(pod)?;
        let report = GuardReport { pod: Some(PodId::of(pod, &kept.uid)), states: states.to_vec() };
        Some(Report { content: Some(Content::Guards(report)) })
    };
    let without = sent.extract_if(|pod, _| !now.contains_key(pod));
    let mut all: Vec<Report> = without.filter_map(|(pod, _)| report(&pod, &[])).collect();
    for (pod, now) in now {
        let is_known = sent.get(&pod).is_some_and(|before| Arc::ptr_eq(&before.states, &now.states));
        if let Some(report) = report(&pod, &now.states).filter(|_| !is_known) {
            all.push(report);
            sent.insert(pod, now);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::policy::PodPolicy;

    use super::*;
    use crate::policy::GuardReports;

    fn kept(pod: &PodName) -> PodPolicy {
        PodPolicy {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: "u".to_owned(),
            digest: 1,
            operator: String::new(),
            version: 0,
            policy: Arc::default(),
        }
    }

    #[test]
    fn each_change_is_reported_once_and_only_of_known_pods() {
        let reports = GuardReports::default();
        let pods = ["ops/a", "ops/b"].map(|name| name.parse::<PodName>().unwrap());
        let publishing = pods.clone().map(|pod| reports.begin(pod));
        let changes = reports.changes();
        let policies = PodPolicies::from([(pods[0].clone(), kept(&pods[0]))]);
        let mut sent = StatesByPod::new();
        let mut count = || unreported(&mut sent, changes.borrow().clone(), &policies).len();
        let state = |refused| vec![GuardState { refused, ..GuardState::default() }];
        for one in &publishing {
            one.publish(Vec::new());
        }
        assert_eq!(count(), 0, "a pod without rules has nothing to report");
        for one in &publishing {
            one.publish(state(1));
        }
        assert_eq!((count(), count()), (1, 0));
        publishing[0].publish(state(1));
        assert_eq!(count(), 0);
        publishing[0].publish(state(2));
        assert_eq!(count(), 1);
        publishing[0].publish(Vec::new());
        assert_eq!((count(), count()), (1, 0), "the rules are gone");
        // It is served anew before the former one ends.
        let anew = reports.begin(pods[0].clone());
        anew.publish(state(3));
        drop(publishing);
        assert_eq!(count(), 1);
        drop(anew);
        assert!(changes.borrow().is_empty());
    }
}

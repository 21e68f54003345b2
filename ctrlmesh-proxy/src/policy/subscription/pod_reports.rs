//! Reports to the manager what guards have done, whether calls to webhooks are taken, what requests come to, which
//! kinds are watched, what was sent past the proxy, which containers have ended, and which pods wait for their lock.

use std::sync::Arc;

use ctrlmesh_common::wire::{
    Bypass, BypassReport, Content, Ended, EndedReport, GuardReport, GuardState, LockReport, LockState, PodId, Report,
    Traffic, TrafficReport, WatchReport, Watched, WebhookReport, WebhookState,
};
use tokio::sync::mpsc;

use super::Client;
use crate::policy::PodName;
use crate::policy::pod_reports::{PodReports, StatesByPod};
use crate::policy::store::PodPolicies;

/// What a report says of a pod; `None`: it has no state any more.
type ContentOf<S> = fn(PodId, Option<&S>) -> Content;

impl Client {
    /// Reports the states of all pods, and then each change, until the stream ends.
    pub(super) fn report_states(&self, reports: &mpsc::Sender<Report>) {
        self.report(&self.reports.guards, guard_report, reports.clone());
        self.report(&self.reports.webhooks, webhook_report, reports.clone());
        self.report(&self.reports.traffic, traffic_report, reports.clone());
        self.report(&self.reports.watches, watch_report, reports.clone());
        self.report(&self.reports.bypass, bypass_report, reports.clone());
        self.report(&self.reports.ended, ended_report, reports.clone());
        self.report(&self.reports.locks, lock_report, reports.clone());
    }

    fn report<S: ?Sized + Send + Sync + 'static>(
        &self,
        states: &PodReports<S>,
        content: ContentOf<S>,
        reports: mpsc::Sender<Report>,
    ) {
        let (mut states, policies) = (states.changes(), self.policies.subscribe());
        self.drain.spawn_until_started(async move {
            let mut sent = StatesByPod::new();
            loop {
                let now = states.borrow_and_update().clone();
                let news = unreported(&mut sent, now, &policies.borrow(), content);
                for report in news {
                    if reports.send(report).await.is_err() {
                        return;
                    }
                }
                tokio::select! {
                    () = reports.closed() => return,
                    changed = states.changed() => if changed.is_err() { return },
                }
            }
        });
    }
}

fn guard_report(pod: PodId, states: Option<&[GuardState]>) -> Content {
    Content::Guards(GuardReport { pod: Some(pod), states: states.map(<[_]>::to_vec).unwrap_or_default() })
}

fn webhook_report(pod: PodId, state: Option<&WebhookState>) -> Content {
    Content::Webhook(WebhookReport { pod: Some(pod), state: state.cloned() })
}

fn traffic_report(pod: PodId, traffic: Option<&Traffic>) -> Content {
    Content::Traffic(TrafficReport { pod: Some(pod), traffic: traffic.cloned() })
}

fn watch_report(pod: PodId, watched: Option<&Watched>) -> Content {
    Content::Watches(WatchReport { pod: Some(pod), watched: watched.cloned() })
}

fn bypass_report(pod: PodId, bypass: Option<&Bypass>) -> Content {
    Content::Bypass(BypassReport { pod: Some(pod), bypass: bypass.copied() })
}

fn ended_report(pod: PodId, ended: Option<&Ended>) -> Content {
    Content::Ended(EndedReport { pod: Some(pod), ended: ended.cloned() })
}

fn lock_report(pod: PodId, lock: Option<&LockState>) -> Content {
    Content::Lock(LockReport { pod: Some(pod), lock: lock.copied() })
}

/// What is not in `sent` yet, of pods that the manager has sent policies of. A pod that has no state any more is
/// reported once.
fn unreported<S: ?Sized>(
    sent: &mut StatesByPod<S>,
    now: StatesByPod<S>,
    policies: &PodPolicies,
    content: ContentOf<S>,
) -> Vec<Report> {
    let report = |pod: &PodName, state: Option<&S>| {
        let kept = policies.get(pod)?;
        Some(Report { content: Some(content(PodId::of(pod, &kept.uid), state)) })
    };
    let without = sent.extract_if(|pod, _| !now.contains_key(pod));
    let mut all: Vec<Report> = without.filter_map(|(pod, _)| report(&pod, None)).collect();
    for (pod, now) in now {
        let is_known = sent.get(&pod).is_some_and(|before| Arc::ptr_eq(&before.state, &now.state));
        if let Some(report) = report(&pod, Some(&now.state)).filter(|_| !is_known) {
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
    use crate::policy::{GuardReports, WebhookReports};

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
        let mut count = || unreported(&mut sent, changes.borrow().clone(), &policies, guard_report).len();
        let state = |refused| Some(Arc::from([GuardState { refused, ..GuardState::default() }]));
        for one in &publishing {
            one.publish(None);
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
        publishing[0].publish(None);
        assert_eq!((count(), count()), (1, 0), "the rules are gone");
        // It is served anew before the former one ends.
        let anew = reports.begin(pods[0].clone());
        anew.publish(state(3));
        drop(publishing);
        assert_eq!(count(), 1);
        drop(anew);
        assert!(changes.borrow().is_empty());
    }

    #[test]
    fn a_webhook_is_reported_until_the_pod_has_none() {
        let (reports, pod) = (WebhookReports::default(), "ops/a".parse::<PodName>().unwrap());
        let (publish, changes) = (reports.begin(pod.clone()), reports.changes());
        let policies = PodPolicies::from([(pod.clone(), kept(&pod))]);
        let mut sent = StatesByPod::new();
        let mut said = || {
            let news = unreported(&mut sent, changes.borrow().clone(), &policies, webhook_report);
            let of = |report: Report| match report.content {
                Some(Content::Webhook(WebhookReport { state, pod: Some(id) })) if id.uid == "u" => state,
                other => panic!("{other:?}"),
            };
            news.into_iter().map(of).collect::<Vec<_>>()
        };
        let pending = WebhookState { port_taken: true, error: "none".to_owned(), ..WebhookState::default() };
        let routed = WebhookState { port_taken: true, certificate_read: true, ..WebhookState::default() };
        for state in [&pending, &routed] {
            for _ in 0..2 {
                publish.publish(Some(Arc::new(state.clone())));
            }
            assert_eq!(said(), [Some(state.clone())]);
            assert_eq!(reports.of(&pod).as_deref(), Some(state));
        }
        publish.publish(None);
        assert_eq!((said(), said()), (vec![None], Vec::new()));
    }
}

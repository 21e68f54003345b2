//! Takes what proxies report of pods.

use std::sync::Arc;

use ctrlmesh_common::wire::{
    BypassReport, Content, EndedReport, LockReport, PodId, Report, TrafficReport, WatchReport,
};
use tonic::Status;

use super::Session;
use crate::metrics::Refused;
use crate::push::policy_store::{Reader, Subject};
use crate::push::service::PushService;
use crate::push::service::delivery::TooMany;
use crate::rules::pod::PodName;

impl Session {
    /// Takes a report on one pod. What a newer proxy reports beside is passed over.
    pub(super) fn take_report(&mut self, report: Report) -> Result<(), Status> {
        let of = match &report.content {
            Some(Content::Hello(_)) => {
                let status = Status::invalid_argument("only the first report is a hello");
                return Err(self.push.refuse(Refused::Message, &self.proven.identity, status));
            }
            Some(content) => subject(content).cloned().unwrap_or_default(),
            None => return Ok(()),
        };
        let pod = of.pod_name();
        let delivery = self.delivered.get_mut(&pod);
        let Some(delivery) = delivery.filter(|delivery| of.uid.is_empty() || of.uid == delivery.uid) else {
            // States decide nothing. The proxy may have kept a policy that cannot be compiled now.
            if self.gone.has(&of) || !matches!(report.content, Some(Content::Verdict(_))) {
                return Ok(());
            }
            let status = Status::permission_denied("the report is on a pod of which the proxy was sent no policy");
            return Err(self.push.refuse(Refused::Foreign, &self.proven.identity, status));
        };
        let taken = match report.content {
            Some(Content::Verdict(verdict)) => delivery.take_verdict(verdict, &pod, &self.push),
            Some(Content::Guards(guards)) => delivery.take_guards(guards.states),
            Some(Content::Webhook(webhook)) => delivery.take_webhook(webhook.state),
            Some(state) => delivery.count_state_report().map(|()| {
                let (pod, inside) = ((&pod, delivery.uid.as_str()), delivery.inside);
                take_state(&self.push, Reporter { by: &self.by, reader: &self.reader, inside }, pod, state);
                false
            }),
            None => Ok(false),
        };
        let refuse = |TooMany| {
            let status = Status::resource_exhausted("too many reports on one pod");
            self.push.refuse(Refused::Message, &self.proven.identity, status)
        };
        if taken.map_err(refuse)? {
            self.receipt(&pod, true);
        }
        Ok(())
    }
}

/// The proxy that reports on a pod.
#[derive(Clone, Copy)]
struct Reporter<'a> {
    by: &'a Arc<str>,
    reader: &'a Reader,
    /// Whether the pod has a proxy inside.
    inside: bool,
}

/// Takes what decides nothing by itself. `of` are name and UID of the pod.
fn take_state(push: &PushService, Reporter { by, reader, inside }: Reporter<'_>, of: (&PodName, &str), state: Content) {
    let (counts, store) = (reader.speaks_for(inside), &push.store);
    match state {
        Content::Traffic(TrafficReport { traffic, .. }) if counts => store.receive_traffic(None, of, by, traffic),
        Content::Watches(WatchReport { watched, .. }) if counts => {
            store.receive_state(store.watches(), None, of, by, watched);
        }
        Content::Lock(LockReport { lock, .. }) if counts => {
            store.receive_state(store.locks(), None, of, by, lock);
        }
        // Of a pod with a proxy inside, nothing is dropped.
        Content::Bypass(BypassReport { bypass: Some(bypass), .. }) if counts => {
            push.bypasses.tell(of.0, of.1, bypass.packets);
        }
        // A proxy inside a pod does not see the processes of other containers. So of its pod, too, the node says it.
        Content::Ended(EndedReport { ended, .. }) if matches!(reader.subject(), Subject::Node(_)) => {
            store.receive_state(store.ended(), None, of, by, ended);
        }
        _ => {}
    }
}

/// The pod that a report is on.
fn subject(content: &Content) -> Option<&PodId> {
    match content {
        Content::Hello(_) => None,
        Content::Verdict(verdict) => verdict.pod.as_ref(),
        Content::Guards(guards) => guards.pod.as_ref(),
        Content::Webhook(webhook) => webhook.pod.as_ref(),
        Content::Traffic(traffic) => traffic.pod.as_ref(),
        Content::Watches(watches) => watches.pod.as_ref(),
        Content::Bypass(bypass) => bypass.pod.as_ref(),
        Content::Ended(ended) => ended.pod.as_ref(),
        Content::Lock(lock) => lock.pod.as_ref(),
    }
}

//! Takes what proxies report of pods.

use ctrlmesh_common::wire::{BypassReport, Content, PodId, Report, TrafficReport, WatchReport};
use tonic::Status;

use super::Session;
use crate::metrics::Refused;
use crate::push::service::delivery::TooMany;

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
            Some(Content::Traffic(TrafficReport { traffic, .. })) => delivery.count_state_report().map(|()| {
                if self.reader.speaks_for(delivery.inside) {
                    self.push.store.receive_traffic(None, (&pod, &delivery.uid), &self.by, traffic);
                }
                false
            }),
            Some(Content::Watches(WatchReport { watched, .. })) => delivery.count_state_report().map(|()| {
                if self.reader.speaks_for(delivery.inside) {
                    self.push.store.receive_watches(None, (&pod, &delivery.uid), &self.by, watched);
                }
                false
            }),
            Some(Content::Bypass(BypassReport { bypass, .. })) => delivery.count_state_report().map(|()| {
                // Of a pod with a proxy inside, nothing is dropped.
                if let Some(bypass) = bypass.filter(|_| self.reader.speaks_for(delivery.inside)) {
                    self.push.bypasses.tell(&pod, &delivery.uid, bypass.packets);
                }
                false
            }),
            _ => Ok(false),
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
    }
}

//! The condition `WebhookRouted`: whether the calls to the operator's webhook reach the proxies, which read them.

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::wire::WebhookState;

use super::{StatusInputs, as_before};
use crate::cluster::plan::Plan;
use crate::rules::compile::{self, CompiledPolicy};
use crate::rules::object_name::full_name;
use crate::rules::pod::Member;
use crate::status::finding::{Finding, finding, listed};

pub(super) const WEBHOOK_ROUTED: &str = "WebhookRouted";

/// The ShardingConfig that the condition is of.
pub(super) struct OfWebhook<'a> {
    pub(super) config: &'a ShardingConfig,
    /// `NAMESPACE/NAME` of its root, or of itself.
    pub(super) operator: &'a str,
    /// The name of the shard. `None`: it is a root, and the condition is of all its shards.
    pub(super) shard: Option<&'a str>,
    pub(super) pods: &'a [(&'a Member, &'a CompiledPolicy)],
}

/// A pod whose proxy is connected, and what that says.
type Reported<'a> = (&'a Member, Option<&'a WebhookState>);

impl OfWebhook<'_> {
    /// `None` where the operator has no webhook.
    pub(super) fn finding(&self, plan: &Plan, inputs: StatusInputs<'_>) -> Option<Finding> {
        let webhook = self.config.spec.webhook.as_ref()?;
        if self.config.spec.root.as_ref().is_some_and(|root| root.disable == Some(true)) {
            return Some(finding(false, "Disabled", "the root is switched off; each of its shards has this condition"));
        }
        let staying: Vec<&Member> = self.pods.iter().map(|(pod, _)| *pod).filter(|pod| !pod.terminating).collect();
        if staying.is_empty() {
            return Some(finding(false, "NoPods", "no pod is enrolled"));
        }
        let connected: Vec<Reported<'_>> = staying
            .iter()
            .filter_map(|pod| Some((*pod, inputs.contacts.get(&pod.name).filter(|contact| contact.connected)?)))
            .map(|(pod, contact)| (pod, contact.webhook.as_ref()))
            .collect();
        let found = not_intercepted(&staying)
            .or_else(|| self.no_room(plan))
            .or_else(|| port_not_taken(webhook.port, &connected))
            .or_else(|| no_certificate(&connected))
            .or_else(|| self.pending(&connected, inputs));
        Some(found.unwrap_or_else(|| {
            let count = connected.len();
            finding(true, "Routed", format!("every proxy that is connected, {count} of {count}, routes reviews"))
        }))
    }

    fn no_room(&self, plan: &Plan) -> Option<Finding> {
        // A shard of a root that is switched off stands alone.
        let own = full_name(&self.config.metadata);
        let mut operators = [self.operator, &own].into_iter();
        let of = |operator| compile::webhook_without_room(&plan.compiled.troubles, operator, self.shard);
        let trouble = operators.find_map(of)?;
        Some(finding(false, "NoRoom", &*trouble.message))
    }

    /// A new leader has not heard from each proxy yet.
    fn pending(&self, connected: &[Reported<'_>], inputs: StatusInputs<'_>) -> Option<Finding> {
        let message = if connected.is_empty() {
            "no proxy of the pods is connected".to_owned()
        } else {
            let silent = names(connected.iter().filter(|(_, state)| state.is_none()));
            if silent.is_empty() {
                return None;
            }
            let pods = listed(&silent, ", ");
            format!("no node proxy has said whether it takes calls to pod {pods}; an older one never does: replace it")
        };
        let status = self.config.status.as_ref().filter(|_| inputs.new_leader);
        let before = status.and_then(|status| as_before(&status.conditions, WEBHOOK_ROUTED));
        Some(before.unwrap_or_else(|| finding(false, "Pending", message)))
    }
}

fn not_intercepted(pods: &[&Member]) -> Option<Finding> {
    let outside = pods.iter().filter(|pod| !pod.redirect.takes_calls());
    let outside: Vec<String> = outside.map(|pod| pod.name.name.clone()).collect();
    let message = || {
        let pods = listed(&outside, ", ");
        format!("pod {pods} is called past the proxy inside it, and answers what it is asked: take interception ebpf")
    };
    (!outside.is_empty()).then(|| finding(false, "NotIntercepted", message()))
}

fn port_not_taken(port: i32, connected: &[Reported<'_>]) -> Option<Finding> {
    let is_open = |(_, state): &&Reported<'_>| state.is_some_and(|state| !state.port_taken);
    let (pods, error) = of_pods(connected.iter().filter(is_open))?;
    let message =
        format!("pod {pods} is called past its proxy, which cannot take port {port} and tries again: cannot {error}");
    Some(finding(false, "PortNotTaken", message))
}

fn no_certificate(connected: &[Reported<'_>]) -> Option<Finding> {
    let is_without =
        |(_, state): &&Reported<'_>| state.is_some_and(|state| state.port_taken && !state.certificate_read);
    let (pods, error) = of_pods(connected.iter().filter(is_without))?;
    let message = format!(
        "calls to pod {pods} pass unread until there is a certificate: {error}; compare spec.webhook.certDir, certName and keyName with what the operator writes"
    );
    Some(finding(false, "NoCertificate", message))
}

/// The names of some pods, and what the proxy of the first one says.
fn of_pods<'a>(pods: impl Iterator<Item = &'a Reported<'a>> + Clone) -> Option<(String, &'a str)> {
    let (_, state) = pods.clone().next()?;
    let error = state.map_or("", |state| state.error.as_str());
    Some((listed(&names(pods), ", "), error))
}

fn names<'a>(pods: impl Iterator<Item = &'a Reported<'a>>) -> Vec<String> {
    pods.map(|(pod, _)| pod.name.name.clone()).collect()
}

#[cfg(test)]
mod tests;

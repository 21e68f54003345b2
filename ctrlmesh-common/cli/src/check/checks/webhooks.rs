//! Checks that the API server can ask the managers, and that they answer.

mod configuration;

use ctrlmesh_common::names::annotation;
use ctrlmesh_manager::install::rbac;
use ctrlmesh_manager::labels::POLICY;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::ResourceExt as _;

use self::configuration::{Configuration, published};
use super::super::dry_run::DryRun;
use super::super::expected::EXEMPT;
use super::super::finding::{Finding, Group};
use super::super::pages;
use super::super::snapshot::{Installed, Webhooks};
use crate::text::{counted, cut, line};

/// The webhooks in `deploy/`.
const VALIDATE: &str = "validate.ctrlmesh.kusionstack.io";

/// Of what the API server says, in characters.
const MESSAGE_WIDTH: usize = 300;

pub(super) fn check(installed: &Installed) -> Vec<Finding> {
    let webhooks = &installed.webhooks;
    let group = Group::Webhooks;
    let published = published(installed);
    let mut findings = group.of("validate", &webhooks.validating, |live| {
        let clients = live.as_ref().map(|live| live.webhooks.iter().flatten());
        let clients = clients.map(|hooks| hooks.map(|hook| &hook.client_config).collect());
        let (kind, name) = ("ValidatingWebhookConfiguration", rbac::WEBHOOKS);
        vec![Configuration { check: "validate", kind, name, clients }.finding(published.as_ref())]
    });
    for (check, name, answer) in
        [("inject", rbac::WEBHOOKS, &webhooks.mutating), ("label", POLICY, &webhooks.labelling)]
    {
        findings.extend(group.of(check, answer, |live| {
            let clients = live.as_ref().map(|live| live.webhooks.iter().flatten());
            let clients = clients.map(|hooks| hooks.map(|hook| &hook.client_config).collect());
            let kind = "MutatingWebhookConfiguration";
            vec![Configuration { check, kind, name, clients }.finding(published.as_ref())]
        }));
    }
    findings.extend(group.of("service", &webhooks.slices, |slices| vec![service(slices)]));
    findings.extend(validated(webhooks));
    findings.push(injected(webhooks));
    findings
}

fn service(slices: &[EndpointSlice]) -> Finding {
    let group = Group::Webhooks;
    let ready = slices.iter().flat_map(|slice| slice.endpoints.iter().flatten());
    let is_ready = |endpoint: &&k8s_openapi::api::discovery::v1::Endpoint| {
        endpoint.conditions.as_ref().and_then(|one| one.ready).unwrap_or(true)
    };
    match ready.filter(is_ready).count() {
        0 => {
            let found = "Service ctrlmesh-manager has no ready endpoint";
            let advice = format!("see why no manager is ready: {}", pages::TROUBLESHOOTING);
            group.failed("service", found, advice)
        }
        number => group.ok("service", format!("Service ctrlmesh-manager has {}", counted(number, "ready endpoint"))),
    }
}

/// The dry runs of our own kinds.
fn validated(webhooks: &Webhooks) -> Vec<Finding> {
    let (group, check) = (Group::Webhooks, "validation answers");
    let unclear = |dry_run: &DryRun| outcome(check, dry_run, &webhooks.namespace);
    match (&webhooks.invalid, &webhooks.valid) {
        (DryRun::Denied { webhook, .. }, DryRun::Admitted { .. }) if webhook == VALIDATE => {
            vec![group.ok(check, "a dry run: a valid object is admitted, and an invalid one refused by the managers")]
        }
        (DryRun::Denied { webhook, .. }, valid) if webhook == VALIDATE => vec![unclear(valid)],
        (DryRun::Admitted { .. }, _) => {
            let found = "a dry run: an invalid object is admitted, so no manager is asked";
            let advice = format!("apply `deploy/webhooks.yaml` again: {}", pages::INSTALL);
            vec![group.failed(check, found, advice)]
        }
        (invalid, _) => vec![unclear(invalid)],
    }
}

/// The dry run of an enrolled pod.
fn injected(webhooks: &Webhooks) -> Finding {
    let (group, check) = (Group::Webhooks, "injection answers");
    let DryRun::Admitted { object } = &webhooks.pod else { return outcome(check, &webhooks.pod, &webhooks.namespace) };
    if object.annotations().get(annotation::INJECTED).is_some_and(|value| value == "true") {
        return group.ok(check, "a dry run: an enrolled pod is admitted and changed");
    }
    let found = "a dry run: an enrolled pod is admitted unchanged, so no manager is asked";
    group.failed(check, found, format!("apply `deploy/webhooks.yaml` again: {}", pages::INSTALL))
}

/// What a dry run says that did not come to the managers' answer.
fn outcome(check: &'static str, dry_run: &DryRun, namespace: &str) -> Finding {
    let group = Group::Webhooks;
    match dry_run {
        DryRun::NotAsked => {
            let found = format!("no webhook is asked about namespace {namespace}");
            group.skipped(check, found, "name another namespace for the dry runs with `--namespace`")
        }
        DryRun::Denied { webhook, message } if webhook.ends_with("ctrlmesh.kusionstack.io") => {
            let found = format!("the managers refuse a valid object: {}", cut(&line(message), MESSAGE_WIDTH));
            group.failed(check, found, format!("look at the logs of the managers: {}", pages::WEBHOOK))
        }
        DryRun::NotCalled { webhook, message } if webhook.ends_with("ctrlmesh.kusionstack.io") => {
            let advice = format!(
                "see to configurations and Service first; then let the API server reach the managers at TCP 9443: {}",
                pages::WEBHOOK
            );
            group.failed(check, cut(&line(message), MESSAGE_WIDTH), advice)
        }
        DryRun::NotCalled { message, .. } => {
            group.skipped(check, line(message), "another webhook is away: check again once it answers")
        }
        DryRun::Denied { message, .. } | DryRun::Refused { message } => {
            let found = format!("namespace {namespace} does not take the dry run: {}", line(message));
            group.skipped(check, found, "name another namespace for the dry runs with `--namespace`")
        }
        DryRun::Unanswered(why) => group.unanswered(check, why),
        DryRun::Admitted { .. } => group.ok(check, "the dry run is admitted"),
    }
}

/// Whether the webhooks are asked about a namespace.
pub(in super::super) fn asks_about(namespace: &str) -> bool {
    !EXEMPT.contains(&namespace)
}

#[cfg(test)]
mod tests;

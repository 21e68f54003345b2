//! The webhook configuration for objects that the API server cannot label by itself.
//!
//! Beside a policy these are namespaces, whose hash CEL cannot compute, and cluster-scoped objects. Without a policy
//! they are all objects.
//!
//! A failing webhook does not block writes, and its timeout is short: the watches label what was missed. `kube-system`
//! and the manager's namespace are excluded, so that a cluster without a manager can start.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhook, MutatingWebhookConfiguration, RuleWithOperations, WebhookClientConfig,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};

use super::policy::metadata;
use super::{Kind, Scope};

/// An answer takes microseconds.
const TIMEOUT_SECONDS: i32 = 2;

/// The configuration for `kinds` and namespaces; none where no kind is listed.
///
/// `beside_policy`: a policy labels namespaced objects. `own`: the manager's namespace.
pub fn webhook(
    kinds: &BTreeMap<String, Kind>,
    beside_policy: bool,
    own: &str,
    client: WebhookClientConfig,
) -> Option<MutatingWebhookConfiguration> {
    if kinds.is_empty() {
        return None;
    }
    let mut resources: BTreeMap<(&str, &str, Scope), BTreeSet<&str>> = BTreeMap::new();
    let asked = |kind: &&Kind| !(beside_policy && kind.scope == Scope::Namespaced);
    for Kind { resource, scope } in kinds.values().filter(asked) {
        let group = (resource.group.as_str(), resource.version.as_str(), *scope);
        resources.entry(group).or_default().insert(&resource.plural);
    }
    resources.entry(("", "v1", Scope::Namespace)).or_default().insert("namespaces");
    let texts = |texts: &[&str]| Some(texts.iter().map(|text| (*text).to_owned()).collect());
    let rules = resources.into_iter().map(|((group, version, scope), plurals)| {
        let scope = if scope == Scope::Namespaced { "Namespaced" } else { "Cluster" };
        RuleWithOperations {
            api_groups: texts(&[group]),
            api_versions: texts(&[version]),
            operations: texts(&["CREATE", "UPDATE"]),
            resources: Some(plurals.into_iter().map(str::to_owned).collect()),
            scope: Some(scope.to_owned()),
        }
    });
    let elsewhere = LabelSelectorRequirement {
        key: "kubernetes.io/metadata.name".to_owned(),
        operator: "NotIn".to_owned(),
        values: texts(&["kube-system", own]),
    };
    let hook = MutatingWebhook {
        name: "label.ctrlmesh.kusionstack.io".to_owned(),
        admission_review_versions: vec!["v1".to_owned()],
        side_effects: "None".to_owned(),
        failure_policy: Some("Ignore".to_owned()),
        reinvocation_policy: Some("IfNeeded".to_owned()),
        match_policy: Some("Equivalent".to_owned()),
        timeout_seconds: Some(TIMEOUT_SECONDS),
        client_config: client,
        namespace_selector: Some(LabelSelector { match_expressions: Some(vec![elsewhere]), match_labels: None }),
        rules: Some(rules.collect()),
        ..MutatingWebhook::default()
    };
    Some(MutatingWebhookConfiguration { metadata: metadata(), webhooks: Some(vec![hook]) })
}

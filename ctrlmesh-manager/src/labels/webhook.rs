//! How is written what the API server is to ask us about, because it cannot label it by itself?
//!
//! Where it serves a policy, that is namespaces, whose hash CEL cannot compute, and objects of cluster scope: what is
//! created in a new namespace has labels to copy then. Where it serves none, it is everything.
//!
//! Whoever writes goes on where we do not answer, and does not wait for long: the watches label what was missed. What is in
//! `kube-system` and in our own namespace is not asked about: a cluster whose manager is gone can start.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhook, MutatingWebhookConfiguration, RuleWithOperations, WebhookClientConfig,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};

use super::policy::metadata;
use super::{Kind, Scope};

/// How long the API server waits for an answer, in seconds: it takes microseconds.
const TIMEOUT_SECONDS: i32 = 2;

/// The configuration for `kinds`, and namespaces; none where nothing is listed.
///
/// `beside_policy` is whether a policy labels what is in namespaces, `own` the manager's namespace, `client` where it is
/// asked.
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
        namespace_selector: Some(LabelSelector {
            match_expressions: Some(vec![elsewhere]),
            match_labels: None,
        }),
        rules: Some(rules.collect()),
        ..MutatingWebhook::default()
    };
    Some(MutatingWebhookConfiguration { metadata: metadata(), webhooks: Some(vec![hook]) })
}

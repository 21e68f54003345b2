//! The `MutatingAdmissionPolicy` with which the API server labels objects.
//!
//! It copies the labels of the namespace, which has the hash because CEL cannot compute it. So an object is labelled
//! before anybody sees it. Cluster-scoped objects have no namespace to copy from: the webhook labels these, and
//! namespaces.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::admissionregistration::v1::{
    ApplyConfiguration, MatchCondition, MatchResources, MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding,
    MutatingAdmissionPolicyBindingSpec, MutatingAdmissionPolicySpec, Mutation, NamedRuleWithOperations,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement, ObjectMeta};

use super::{Kind, Scope};
use crate::rules::label_scheme::Scheme;

/// Name of the policy, its binding and the webhook configuration.
pub const POLICY: &str = "ctrlmesh-labels";

/// None where no namespaced kind is listed.
pub fn policy(kinds: &BTreeMap<String, Kind>, scheme: &Scheme) -> Option<MutatingAdmissionPolicy> {
    let mut resources: BTreeMap<(&str, &str), BTreeSet<&str>> = BTreeMap::new();
    for Kind { resource, .. } in kinds.values().filter(|kind| kind.scope == Scope::Namespaced) {
        let group = (resource.group.as_str(), resource.version.as_str());
        resources.entry(group).or_default().insert(&resource.plural);
    }
    let texts = |texts: &[&str]| Some(texts.iter().map(|text| (*text).to_owned()).collect());
    let rules = resources.into_iter().map(|((group, version), plurals)| NamedRuleWithOperations {
        api_groups: texts(&[group]),
        api_versions: texts(&[version]),
        operations: texts(&["CREATE", "UPDATE"]),
        resources: Some(plurals.into_iter().map(str::to_owned).collect()),
        scope: Some("Namespaced".to_owned()),
        resource_names: None,
    });
    let rules: Vec<_> = rules.collect();
    if rules.is_empty() {
        return None;
    }
    let spec = MutatingAdmissionPolicySpec {
        failure_policy: Some("Ignore".to_owned()),
        reinvocation_policy: Some("IfNeeded".to_owned()),
        match_constraints: Some(MatchResources {
            match_policy: Some("Equivalent".to_owned()),
            // Match conditions cannot see the namespace.
            namespace_selector: Some(LabelSelector {
                match_expressions: Some(vec![LabelSelectorRequirement {
                    key: scheme.in_force.hash_key.clone(),
                    operator: "Exists".to_owned(),
                    values: None,
                }]),
                match_labels: None,
            }),
            resource_rules: Some(rules),
            ..MatchResources::default()
        }),
        match_conditions: Some(vec![MatchCondition {
            name: "is-not-terminating".to_owned(),
            expression: "!has(object.metadata.deletionTimestamp)".to_owned(),
        }]),
        mutations: Some(vec![Mutation {
            patch_type: "ApplyConfiguration".to_owned(),
            apply_configuration: Some(ApplyConfiguration { expression: Some(expression(scheme)) }),
            json_patch: None,
        }]),
        ..MutatingAdmissionPolicySpec::default()
    };
    Some(MutatingAdmissionPolicy { metadata: metadata(), spec: Some(spec) })
}

pub fn binding() -> MutatingAdmissionPolicyBinding {
    let spec = MutatingAdmissionPolicyBindingSpec {
        policy_name: Some(POLICY.to_owned()),
        ..MutatingAdmissionPolicyBindingSpec::default()
    };
    MutatingAdmissionPolicyBinding { metadata: metadata(), spec: Some(spec) }
}

/// Label keys cannot contain a quote. The namespace has the label in force, by the selector above. Labels of a
/// migration may be missing, so they are optional.
fn expression(scheme: &Scheme) -> String {
    let mut labels = BTreeMap::new();
    for labelling in scheme.carried() {
        let key = &labelling.hash_key;
        let hash = format!("?\"{key}\": namespaceObject.metadata.labels[?\"{key}\"]");
        let namespace = format!("\"{}\": request.namespace", labelling.namespace_key);
        let control = format!("\"{}\": \"true\"", labelling.control_key);
        labels.extend(labelling.keys().into_iter().zip([hash, namespace, control]));
    }
    let labels: Vec<String> = labels.into_values().collect();
    format!("Object{{metadata: Object.metadata{{labels: {{{}}}}}}}", labels.join(", "))
}

pub(super) fn metadata() -> ObjectMeta {
    let labels = [("app.kubernetes.io/part-of".to_owned(), "ctrlmesh".to_owned())];
    ObjectMeta { name: Some(POLICY.to_owned()), labels: Some(labels.into()), ..ObjectMeta::default() }
}

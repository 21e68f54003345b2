//! The parts that every admission policy of the manager has.
//!
//! Every field is set that the API server would set by itself, so that what is read back is equal.

use k8s_openapi::api::admissionregistration::v1::{
    MatchResources, NamedRuleWithOperations, ParamKind, ParamRef, ValidatingAdmissionPolicyBindingSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

/// Stands for every group, version, resource or scope.
pub(super) const ALL: &str = "*";

/// The kind of the parameter: a `ConfigMap`.
pub(super) fn param_kind() -> ParamKind {
    ParamKind { api_version: Some("v1".to_owned()), kind: Some("ConfigMap".to_owned()) }
}

/// Binds the policy called `name` to the `ConfigMap` of that name in namespace `home`. While there is none, everybody
/// passes.
pub(super) fn binding_spec(name: &str, home: &str) -> ValidatingAdmissionPolicyBindingSpec {
    ValidatingAdmissionPolicyBindingSpec {
        policy_name: name.to_owned(),
        param_ref: Some(ParamRef {
            name: Some(name.to_owned()),
            namespace: Some(home.to_owned()),
            parameter_not_found_action: Some("Allow".to_owned()),
            selector: None,
        }),
        validation_actions: vec!["Deny".to_owned()],
        match_resources: None,
    }
}

/// Matches what one of `rules` does and none of `excluded`, in every namespace.
pub(super) fn matching(rules: Vec<NamedRuleWithOperations>, excluded: Vec<NamedRuleWithOperations>) -> MatchResources {
    MatchResources {
        match_policy: Some("Equivalent".to_owned()),
        namespace_selector: Some(LabelSelector::default()),
        object_selector: Some(LabelSelector::default()),
        resource_rules: Some(rules),
        exclude_resource_rules: (!excluded.is_empty()).then_some(excluded),
    }
}

/// Matches these resources in every version and scope.
pub(super) fn rule(groups: Vec<String>, resources: Vec<String>, operations: &[&str]) -> NamedRuleWithOperations {
    NamedRuleWithOperations {
        api_groups: Some(groups),
        api_versions: Some(vec![ALL.to_owned()]),
        operations: Some(operations.iter().map(|one| (*one).to_owned()).collect()),
        resources: Some(resources),
        resource_names: None,
        scope: Some(ALL.to_owned()),
    }
}

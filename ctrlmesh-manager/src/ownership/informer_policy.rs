//! Builds the policy that keeps the informer of the API servers for the tables of fences running.
//!
//! An API server starts an informer for `ConfigMap` parameters with the first policy that has such, and stops it with
//! the last one. It cannot start that informer again (`plugin/policy/generic/policy_source.go` of Kubernetes 1.36: the
//! shared factory remembers that it was started). Then no fence made later is enforced, until the API server restarts.
//! So this policy stays once a root was fenced. It matches nothing.

use ctrlmesh_common::names::{GROUP, VERSION};
use k8s_openapi::api::admissionregistration::v1::{
    MatchResources, NamedRuleWithOperations, ParamKind, ParamRef, ValidatingAdmissionPolicy,
    ValidatingAdmissionPolicyBinding, ValidatingAdmissionPolicyBindingSpec, ValidatingAdmissionPolicySpec, Validation,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};

/// Of the policy and its binding. The names of fences go on with a dot.
pub const NAME: &str = "ctrlmesh-fence";

/// A resource that is not there.
const NO_RESOURCE: &str = "fences";

/// The policy and its binding. An API server counts a policy only where it has a binding. The manager is in namespace
/// `home`.
pub fn objects(home: &str) -> (ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding) {
    let metadata = || ObjectMeta { name: Some(NAME.to_owned()), ..ObjectMeta::default() };
    let policy = ValidatingAdmissionPolicy { metadata: metadata(), spec: Some(policy_spec()), status: None };
    let param_ref = ParamRef {
        name: Some(NAME.to_owned()),
        namespace: Some(home.to_owned()),
        parameter_not_found_action: Some("Allow".to_owned()),
        selector: None,
    };
    let spec = ValidatingAdmissionPolicyBindingSpec {
        policy_name: NAME.to_owned(),
        param_ref: Some(param_ref),
        validation_actions: vec!["Deny".to_owned()],
        match_resources: None,
    };
    (policy, ValidatingAdmissionPolicyBinding { metadata: metadata(), spec })
}

/// Every field is set that the API server would set by itself, so that what is read back is equal.
fn policy_spec() -> ValidatingAdmissionPolicySpec {
    let rule = NamedRuleWithOperations {
        api_groups: Some(vec![GROUP.to_owned()]),
        api_versions: Some(vec![VERSION.to_owned()]),
        operations: Some(vec!["CREATE".to_owned()]),
        resource_names: None,
        resources: Some(vec![NO_RESOURCE.to_owned()]),
        scope: Some("*".to_owned()),
    };
    ValidatingAdmissionPolicySpec {
        failure_policy: Some("Ignore".to_owned()),
        param_kind: Some(ParamKind { api_version: Some("v1".to_owned()), kind: Some("ConfigMap".to_owned()) }),
        match_constraints: Some(MatchResources {
            match_policy: Some("Equivalent".to_owned()),
            namespace_selector: Some(LabelSelector::default()),
            object_selector: Some(LabelSelector::default()),
            resource_rules: Some(vec![rule]),
            exclude_resource_rules: None,
        }),
        validations: Some(vec![Validation { expression: "true".to_owned(), ..Validation::default() }]),
        match_conditions: None,
        variables: None,
        audit_annotations: None,
    }
}

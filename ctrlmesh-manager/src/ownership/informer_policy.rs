//! Builds the policy that keeps the informer of the API servers for the tables of fences running.
//!
//! An API server starts an informer for `ConfigMap` parameters with the first policy that has such, and stops it with
//! the last one. It cannot start that informer again (`plugin/policy/generic/policy_source.go` of Kubernetes 1.36: the
//! shared factory remembers that it was started). Then no fence made later is enforced, until the API server restarts.
//! So this policy stays once a root was fenced, also when ctrlmesh is removed. It matches nothing.

use ctrlmesh_common::names::{GROUP, VERSION};
use k8s_openapi::api::admissionregistration::v1::{
    NamedRuleWithOperations, ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
    ValidatingAdmissionPolicySpec, Validation,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::admission_policy;
use super::fence_names::PREFIX;

/// Of the policy and its binding. The names of fences go on with a dot.
pub const NAME: &str = PREFIX;

/// A resource that is not there.
const NO_RESOURCE: &str = "fences";

/// The policy and its binding. An API server counts a policy only where it has a binding. The manager is in namespace
/// `home`.
pub fn objects(home: &str) -> (ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding) {
    let metadata = || ObjectMeta { name: Some(NAME.to_owned()), ..ObjectMeta::default() };
    let policy = ValidatingAdmissionPolicy { metadata: metadata(), spec: Some(policy_spec()), status: None };
    let spec = admission_policy::binding_spec(NAME, home);
    (policy, ValidatingAdmissionPolicyBinding { metadata: metadata(), spec })
}

fn policy_spec() -> ValidatingAdmissionPolicySpec {
    let rule = NamedRuleWithOperations {
        api_versions: Some(vec![VERSION.to_owned()]),
        ..admission_policy::rule(vec![GROUP.to_owned()], vec![NO_RESOURCE.to_owned()], &["CREATE"])
    };
    ValidatingAdmissionPolicySpec {
        failure_policy: Some("Ignore".to_owned()),
        param_kind: Some(admission_policy::param_kind()),
        match_constraints: Some(admission_policy::matching(vec![rule], Vec::new())),
        validations: Some(vec![Validation { expression: "true".to_owned(), ..Validation::default() }]),
        match_conditions: None,
        variables: None,
        audit_annotations: None,
    }
}

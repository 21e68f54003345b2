//! The objects that an installation of this version has, and the objects of the dry runs.
//!
//! Pure.

use ctrlmesh_common::api::documents;
use ctrlmesh_common::names::{GROUP, VERSION, label};
use ctrlmesh_manager::install::rbac;
use kube::api::DynamicObject;
use serde_json::{Value, json};

/// Accounts, roles and bindings of the node proxies, as they are installed.
const OF_NODE_PROXIES: &str = include_str!("../../../../deploy/node/account.yaml");

/// What the dry runs' objects are called; the API server adds some letters.
const NAME: &str = "ctrlmesh-check-";

/// Namespaces that no webhook is asked about.
pub(super) const EXEMPT: [&str; 2] = ["kube-system", rbac::NAMESPACE];

/// The accounts, roles and bindings of managers and node proxies.
///
/// # Panics
/// Never: tests read the same text.
#[expect(clippy::expect_used, reason = "the text is part of the program")]
pub(super) fn rights() -> Vec<DynamicObject> {
    let managers = rbac::yaml();
    let all = documents(&managers).chain(documents(OF_NODE_PROXIES));
    all.map(|text| serde_saphyr::from_str(&text).expect("a manifest of ours is an object")).collect()
}

/// A CircuitBreaker that selects no pod. The managers refuse one that is not `valid`, and nobody else does.
pub(super) fn breaker(namespace: &str, valid: bool) -> Value {
    let rule = json!({"name": "check", "interceptType": "Blacklist", "contentType": "Normal",
        "contents": ["not a URL"], "methods": ["*"]});
    let rules = if valid { json!([]) } else { json!([rule]) };
    json!({"apiVersion": format!("{GROUP}/{VERSION}"), "kind": "CircuitBreaker",
        "metadata": {"generateName": NAME, "namespace": namespace},
        "spec": {"selector": {"matchLabels": {"app.kubernetes.io/name": "ctrlmesh-check"}},
            "trafficInterceptRules": rules}})
}

/// An enrolled pod that the strictest of Kubernetes' pod security standards admits.
pub(super) fn pod(namespace: &str) -> Value {
    let resources = json!({"cpu": "1m", "memory": "1Mi"});
    json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"generateName": NAME, "namespace": namespace, "labels": {label::ENABLE_PROXY: "true"}},
        "spec": {
            "securityContext": {"runAsNonRoot": true, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{"name": "check", "image": "ctrlmesh.dev/check",
                "resources": {"requests": resources, "limits": resources},
                "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}}}]}})
}

#[cfg(test)]
mod tests {
    use ctrlmesh_manager::rules::validate::{Verdict, manifests};

    use super::*;

    #[test]
    fn every_right_of_the_installation_is_read() {
        let all = rights();
        let count = |kind: &str| all.iter().filter(|one| one.types.as_ref().is_some_and(|it| it.kind == kind)).count();
        assert_eq!(["ServiceAccount", "ClusterRole", "ClusterRoleBinding"].map(count), [3, 5, 5]);
        assert_eq!(["Role", "RoleBinding"].map(count), [4, 4]);
    }

    #[test]
    fn only_the_managers_refuse_the_invalid_object() {
        let verdict = |object: Value| manifests(&[("check".to_owned(), vec![object])]).remove(0);
        let valid: Verdict = verdict(breaker("ops", true));
        assert!(!valid.is_refused() && valid.report.is_some(), "{valid:?}");
        let invalid = verdict(breaker("ops", false)).report.unwrap();
        let said: Vec<String> = invalid.errors.iter().map(ToString::to_string).collect();
        assert!(said.len() == 1 && said[0].starts_with("spec.trafficInterceptRules[0].contents[0]"), "{said:?}");
    }
}

//! The rights that commands and an installation need.
//!
//! Pure.

use std::fmt;

use ctrlmesh_common::names::GROUP;
use ctrlmesh_manager::install::rbac;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SelfSubjectAccessReviewSpec};

use crate::cluster::resource_name;

/// A right of the user, and what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Right {
    pub(super) verb: &'static str,
    pub(super) group: &'static str,
    pub(super) resource: &'static str,
    /// `None`: in all namespaces, or of cluster scope.
    pub(super) namespace: Option<&'static str>,
    /// A command that needs it.
    pub(super) purpose: &'static str,
}

/// What `status`, `owner` and `plan` need. The check of each part says itself which right it lacks.
pub(super) const OF_COMMANDS: [Right; 4] = [
    everywhere("list", GROUP, "shardingconfigs", "`ctrlmesh status -A`"),
    everywhere("list", GROUP, "circuitbreakers", "`ctrlmesh status -A`"),
    everywhere("get", GROUP, "managerstates", "`ctrlmesh owner`"),
    everywhere("list", "", "namespaces", "`ctrlmesh plan`"),
];

/// What `kubectl apply -k deploy/` creates.
pub(super) const OF_INSTALLATION: [Right; 17] = [
    everywhere("create", "", "namespaces", INSTALLATION),
    everywhere("create", "apiextensions.k8s.io", "customresourcedefinitions", INSTALLATION),
    everywhere("create", RBAC, "clusterroles", INSTALLATION),
    everywhere("create", RBAC, "clusterrolebindings", INSTALLATION),
    everywhere("create", ADMISSION, "validatingwebhookconfigurations", INSTALLATION),
    everywhere("create", ADMISSION, "mutatingwebhookconfigurations", INSTALLATION),
    everywhere("create", ADMISSION, "validatingadmissionpolicies", INSTALLATION),
    everywhere("create", ADMISSION, "validatingadmissionpolicybindings", INSTALLATION),
    everywhere("create", "flowcontrol.apiserver.k8s.io", "flowschemas", INSTALLATION),
    everywhere("create", "flowcontrol.apiserver.k8s.io", "prioritylevelconfigurations", INSTALLATION),
    own("", "serviceaccounts"),
    own("", "services"),
    own("", "resourcequotas"),
    own("apps", "deployments"),
    own("apps", "daemonsets"),
    own("policy", "poddisruptionbudgets"),
    own("networking.k8s.io", "networkpolicies"),
];

const INSTALLATION: &str = "`kubectl apply -k deploy/`";

const RBAC: &str = "rbac.authorization.k8s.io";

const ADMISSION: &str = "admissionregistration.k8s.io";

const fn everywhere(verb: &'static str, group: &'static str, resource: &'static str, purpose: &'static str) -> Right {
    Right { verb, group, resource, namespace: None, purpose }
}

/// To create something in the managers' namespace.
const fn own(group: &'static str, resource: &'static str) -> Right {
    Right { namespace: Some(rbac::NAMESPACE), ..everywhere("create", group, resource, INSTALLATION) }
}

impl Right {
    /// The question to the API server whether the user has it.
    pub(super) fn review(&self) -> SelfSubjectAccessReviewSpec {
        let attributes = ResourceAttributes {
            verb: Some(self.verb.to_owned()),
            group: Some(self.group.to_owned()),
            resource: Some(self.resource.to_owned()),
            namespace: self.namespace.map(str::to_owned),
            ..ResourceAttributes::default()
        };
        SelfSubjectAccessReviewSpec { resource_attributes: Some(attributes), ..SelfSubjectAccessReviewSpec::default() }
    }
}

impl fmt::Display for Right {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} {}", self.verb, resource_name(self.group, self.resource))?;
        self.namespace.map_or(Ok(()), |namespace| write!(out, " in namespace {namespace}"))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn an_installation_needs_the_right_to_create_each_kind_in_deploy() {
        let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
        let mut kinds = BTreeSet::new();
        for folder in [deploy.clone(), deploy.join("manager"), deploy.join("node")] {
            for file in fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()) {
                let is_list = file.file_name().is_some_and(|name| name == "kustomization.yaml");
                if file.extension().is_some_and(|extension| extension == "yaml") && !is_list {
                    let text = fs::read_to_string(file).unwrap();
                    kinds.extend(text.lines().filter_map(|line| line.strip_prefix("kind: ")).map(str::to_lowercase));
                }
            }
        }
        // The right to create bindings and roles of a namespace follows from that of cluster scope.
        for kind in kinds.iter().filter(|kind| !["role", "rolebinding"].contains(&kind.as_str())) {
            let plural = kind.strip_suffix('y').map_or_else(|| format!("{kind}s"), |stem| format!("{stem}ies"));
            let is_listed = OF_INSTALLATION.iter().any(|right| right.resource == plural);
            assert!(is_listed, "{kind}");
        }
    }

    #[test]
    fn a_right_is_written_as_kubectl_takes_it() {
        assert_eq!(OF_COMMANDS[0].to_string(), "list shardingconfigs.ctrlmesh.kusionstack.io");
        assert_eq!(own("apps", "deployments").to_string(), "create deployments.apps in namespace ctrlmesh-system");
    }
}

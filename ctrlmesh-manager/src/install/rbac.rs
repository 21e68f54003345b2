//! The rights of the managers, as a table from which `deploy/chart/files/rbac.yaml` is generated.
//!
//! A test against a real API server compares the table with the requests of the managers: nothing is refused,
//! and nothing is granted that is never used.

use ctrlmesh_common::names::{self, api_server, label, resource_list, root_ca};

use crate::labels::POLICY;

pub const NAMESPACE: &str = "ctrlmesh-system";

/// Also the name of the managers' Service and Lease.
pub const ACCOUNT: &str = "ctrlmesh-manager";

/// The account that labels existing objects.
pub const BACKGROUND: &str = "ctrlmesh-manager-background";

/// An aggregated role: whoever lists a kind adds the right to label it.
pub const LABELS: &str = "ctrlmesh-manager-labels";

/// Rights of [`ACCOUNT`] that only rollouts need. They may be left out where no versions are tried.
pub const ROLLOUTS: &str = "ctrlmesh-manager-rollouts";

/// Name of the webhook configurations in `deploy/`.
pub const WEBHOOKS: &str = "ctrlmesh";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Purpose; a comment in the YAML.
    pub why: &'static str,
    pub group: &'static str,
    pub resources: &'static [&'static str],
    /// Empty: all objects.
    pub names: &'static [&'static str],
    pub verbs: &'static [&'static str],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    Cluster,
    Namespace(&'static str),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Role {
    pub name: &'static str,
    /// Whom it is bound to.
    pub account: &'static str,
    pub scope: Scope,
    pub rules: &'static [Rule],
}

/// All rights but those that [`LABELS`] aggregates.
pub const ROLES: [Role; 6] = [
    of(ACCOUNT, Scope::Cluster, &CLUSTER),
    Role { name: ROLLOUTS, ..of(ACCOUNT, Scope::Cluster, &OF_ROLLOUTS) },
    of(ACCOUNT, Scope::Namespace(NAMESPACE), &OWN),
    of(ACCOUNT, Scope::Namespace(api_server::NAMESPACE), &OF_API_SERVER),
    of(BACKGROUND, Scope::Cluster, &BACKGROUND_CLUSTER),
    of(BACKGROUND, Scope::Namespace(NAMESPACE), &BACKGROUND_OWN),
];

/// The rights to put pod templates back, and to say that pods are Ready. They are a role of their own, because whoever
/// has them can run any pod: it is to be bound only where versions are tried.
const OF_ROLLOUTS: [Rule; 4] = [
    rule(
        "Where a new version of an operator failed, put the earlier pod template of its workload back,",
        "apps",
        &["statefulsets", "deployments"],
        &["get", "patch"],
    ),
    rule("read that template,", "apps", &["replicasets", "controllerrevisions"], &["get"]),
    rule("and delete pods of the failed version, which StatefulSets would not replace.", "", &["pods"], &["delete"]),
    rule("Tell workloads whether the version of a pod is promoted.", "", &["pods/status"], &["patch"]),
];

const CLUSTER: [Rule; 24] = [
    rule("Authenticate proxies.", "authentication.k8s.io", &["tokenreviews"], &["create"]),
    rule(
        "Find enrolled pods, label them with their shard, and say which of them a Deployment should remove first.",
        "",
        &["pods"],
        &["list", "watch", "patch"],
    ),
    rule(
        "Read the first ordinal of StatefulSets, and the service accounts and update strategies of operators.",
        "apps",
        &["statefulsets", "deployments"],
        &["list", "watch"],
    ),
    rule(
        "Write the shards of roots, and ask by a dry run what the API server fences.",
        names::GROUP,
        &["shardingconfigs"],
        &["list", "watch", "create", "patch", "delete"],
    ),
    Rule {
        names: &["*"],
        ..rule(
            "Have the API server read ConfigMaps as parameters of fences. No object has this name, so that none is readable.",
            "",
            &["configmaps"],
            &["get"],
        )
    },
    rule(
        "Write the fences in the API server. Their names are those of roots.",
        "admissionregistration.k8s.io",
        &["validatingadmissionpolicies", "validatingadmissionpolicybindings"],
        &["list", "watch", "create", "update", "delete"],
    ),
    rule(
        "Read the limits and faults of operators.",
        names::GROUP,
        &["circuitbreakers", "faultinjections"],
        &["list", "watch"],
    ),
    rule("Write what they do.", names::GROUP, &["circuitbreakers/status", "faultinjections/status"], &["update"]),
    rule("Write epochs and conditions.", names::GROUP, &["shardingconfigs/status"], &["update"]),
    rule(
        "Own shards by their root, where OwnerReferencesPermissionEnforcement is on.",
        names::GROUP,
        &["shardingconfigs/finalizers"],
        &["update"],
    ),
    rule("Create the ManagerState,", names::GROUP, &["managerstates"], &["create"]),
    Rule {
        names: &[names::MANAGER_STATE],
        ..rule("read it,", names::GROUP, &["managerstates"], &["get", "list", "watch"])
    },
    Rule {
        names: &[names::MANAGER_STATE],
        ..rule(
            "and write its status: the replicas, and the labels in force.",
            names::GROUP,
            &["managerstates/status"],
            &["update"],
        )
    },
    rule("Send events.", "events.k8s.io", &["events"], &["create", "patch"]),
    rule("Watch namespaces.", "", &["namespaces"], &["list", "watch"]),
    rule("Watch which kinds there are.", "apiextensions.k8s.io", &["customresourcedefinitions"], &["list", "watch"]),
    rule("Know which nodes cannot serve pods.", "", &["nodes"], &["list", "watch"]),
    rule("Know which pods have a kernel of their own.", "node.k8s.io", &["runtimeclasses"], &["list", "watch"]),
    Rule {
        names: &[POLICY],
        ..rule(
            "Label new objects by an admission policy.",
            "admissionregistration.k8s.io",
            &["mutatingadmissionpolicies", "mutatingadmissionpolicybindings"],
            &["get", "create", "patch", "delete"],
        )
    },
    Rule {
        names: &[root_ca::MESH],
        ..rule("Publish the trust bundle.", "", &["configmaps"], &["list", "watch", "create", "patch"])
    },
    rule(
        "Find webhook configurations that call the managers.",
        "admissionregistration.k8s.io",
        &["validatingwebhookconfigurations", "mutatingwebhookconfigurations"],
        &["list"],
    ),
    Rule {
        names: &[WEBHOOKS],
        ..rule(
            "Update their trust bundle,",
            "admissionregistration.k8s.io",
            &["validatingwebhookconfigurations"],
            &["update"],
        )
    },
    Rule {
        names: &[WEBHOOKS, POLICY],
        ..rule(
            "also in the configuration of the labelling webhook.",
            "admissionregistration.k8s.io",
            &["mutatingwebhookconfigurations"],
            &["update"],
        )
    },
    Rule {
        names: &[POLICY],
        ..rule(
            "Label new objects by a webhook, where the API server has no admission policies.",
            "admissionregistration.k8s.io",
            &["mutatingwebhookconfigurations"],
            &["get", "create", "patch", "delete"],
        )
    },
];

const OWN: [Rule; 8] = [
    rule("Create the leader election's Lease.", "coordination.k8s.io", &["leases"], &["create"]),
    Rule { names: &[ACCOUNT], ..rule("Renew it.", "coordination.k8s.io", &["leases"], &["get", "update"]) },
    rule("Create the Secret of the certificate authorities.", "", &["secrets"], &["create"]),
    Rule { names: &[names::CA_SECRET], ..rule("Read and rotate it.", "", &["secrets"], &["get", "update"]) },
    Rule {
        names: &[BACKGROUND],
        ..rule("Label existing objects as another account.", "", &["serviceaccounts"], &["impersonate"])
    },
    Rule {
        names: &[NAMESPACE],
        ..rule(
            "Own the admission policy by the namespace, so that it is deleted with it.",
            "",
            &["namespaces"],
            &["get"],
        )
    },
    rule("List the replicas.", "discovery.k8s.io", &["endpointslices"], &["list"]),
    rule(
        "Write the ownership tables that fences in the API server read.",
        "",
        &["configmaps"],
        &["get", "create", "update", "delete"],
    ),
];

const OF_API_SERVER: [Rule; 2] = [
    Rule {
        names: &[api_server::SERVICE],
        ..rule("Read the API server's names, for its certificate from the mesh's CA.", "", &["services"], &["get"])
    },
    rule("Find its addresses.", "discovery.k8s.io", &["endpointslices"], &["list"]),
];

const BACKGROUND_CLUSTER: [Rule; 4] = [
    rule("Label namespaces. The rights for objects are in ctrlmesh-manager-labels.", "", &["namespaces"], &["patch"]),
    rule(
        "Ask which objects it may label, to name the rights that are missing.",
        "authorization.k8s.io",
        &["selfsubjectaccessreviews"],
        &["create"],
    ),
    rule("Watch which kinds there are.", "apiextensions.k8s.io", &["customresourcedefinitions"], &["list", "watch"]),
    rule("Send events.", "events.k8s.io", &["events"], &["create", "patch"]),
];

const BACKGROUND_OWN: [Rule; 1] = [Rule {
    names: &[resource_list::NAME],
    ..rule("Read the list of labelled kinds.", "", &["configmaps"], &["get", "list", "watch"])
}];

const fn of(account: &'static str, scope: Scope, rules: &'static [Rule]) -> Role {
    Role { name: account, account, scope, rules }
}

const fn rule(
    why: &'static str,
    group: &'static str,
    resources: &'static [&'static str],
    verbs: &'static [&'static str],
) -> Rule {
    Rule { why, group, resources, names: &[], verbs }
}

pub fn yaml() -> String {
    let mut text =
        "# Written by `cargo xtask crds`; do not edit. The table is in ctrlmesh-manager/src/install/rbac.rs.\n"
            .to_owned();
    let background =
        "# Labels existing objects. It is an account of its own, because flow schemas assign priorities by account.\n";
    let mut documents =
        vec![account(ACCOUNT, "", ""), account(BACKGROUND, background, "automountServiceAccountToken: false\n")];
    for role in &ROLES {
        documents.push(role_yaml(role));
        documents.push(binding(role.name, role.account, role.scope));
    }
    documents.push(aggregated_role());
    documents.push(binding(LABELS, BACKGROUND, Scope::Cluster));
    text.push_str(&documents.join("---\n"));
    text
}

fn account(name: &str, comment: &str, more: &str) -> String {
    let metadata = metadata(name, Scope::Namespace(NAMESPACE));
    format!("{comment}apiVersion: v1\nkind: ServiceAccount\n{metadata}{more}")
}

fn role_yaml(role: &Role) -> String {
    let rules: String = role.rules.iter().map(rule_yaml).collect();
    format!("{}rules:\n{rules}", head(role.scope.kind(), role.name, role.scope))
}

fn rule_yaml(Rule { why, group, resources, names, verbs }: &Rule) -> String {
    let group = if group.is_empty() { "\"\"" } else { group };
    let resources = resources.join(", ");
    let names = match names {
        [] => String::new(),
        // A bare asterisk is an alias in YAML.
        ["*"] => "  resourceNames: [\"*\"]\n".to_owned(),
        names => format!("  resourceNames: [{}]\n", names.join(", ")),
    };
    let verbs = verbs.join(", ");
    format!("# {why}\n- apiGroups: [{group}]\n  resources: [{resources}]\n{names}  verbs: [{verbs}]\n")
}

/// The role without rules of its own.
fn aggregated_role() -> String {
    let comment = "# Aggregates the rights to label objects. For each kind that a root names (spec.root.resourceSelector) or that\n# ConfigMap ctrlmesh-sharding-resource lists, create a ClusterRole with the label below and the verbs list, watch\n# and patch.\n";
    let head = head(Scope::Cluster.kind(), LABELS, Scope::Cluster);
    format!(
        "{comment}{head}aggregationRule:\n  clusterRoleSelectors:\n  - matchLabels:\n      {}: \"true\"\n",
        label::AGGREGATE_TO_LABELS
    )
}

fn binding(role: &str, account: &str, scope: Scope) -> String {
    let kind = scope.kind();
    let head = head(&format!("{kind}Binding"), role, scope);
    format!(
        "{head}roleRef:\n  apiGroup: rbac.authorization.k8s.io\n  kind: {kind}\n  name: {role}\nsubjects:\n- kind: ServiceAccount\n  name: {account}\n  namespace: {NAMESPACE}\n"
    )
}

fn head(kind: &str, name: &str, scope: Scope) -> String {
    format!("apiVersion: rbac.authorization.k8s.io/v1\nkind: {kind}\n{}", metadata(name, scope))
}

fn metadata(name: &str, scope: Scope) -> String {
    let namespace = match scope {
        Scope::Cluster => String::new(),
        Scope::Namespace(namespace) => format!("  namespace: {namespace}\n"),
    };
    format!("metadata:\n  name: {name}\n{namespace}  labels:\n    app.kubernetes.io/part-of: ctrlmesh\n")
}

impl Scope {
    fn kind(self) -> &'static str {
        match self {
            Self::Cluster => "ClusterRole",
            Self::Namespace(_) => "Role",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn the_file_of_the_chart_is_that_of_the_table() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/chart/files/rbac.yaml");
        let there = fs::read_to_string(file).unwrap_or_default();
        assert!(there == yaml(), "rbac.yaml is stale: run `cargo xtask crds`");
    }

    #[test]
    fn nothing_is_granted_twice_or_wholesale() {
        for Role { name, rules, .. } in &ROLES {
            let all = rules.iter().flat_map(|rule| {
                let resources = rule.resources.iter();
                resources.flat_map(move |resource| {
                    rule.verbs.iter().map(move |verb| (rule.group, *resource, *verb, rule.names))
                })
            });
            let mut all: Vec<_> = all.collect();
            assert!(all.iter().all(|(group, resource, verb, _)| ![*group, *resource, *verb].contains(&"*")));
            let count = all.len();
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len(), count, "{name}");
        }
    }
}

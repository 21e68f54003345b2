//! What may the managers do in a cluster, and what for?
//!
//! One table, from which `deploy/manager/rbac.yaml` is written. What stands in it a test against a real API server compares
//! with what the managers ask for: nothing is refused, and nothing is granted that is never asked for.

use ctrlmesh_common::names::{self, api_server, resource_list, root_ca};

use crate::labels::POLICY;

/// The namespace of the managers.
pub const NAMESPACE: &str = "ctrlmesh-system";

/// The service account of the managers; also the name of their Service, and so of their Lease.
pub const ACCOUNT: &str = "ctrlmesh-manager";

/// The service account as which labels are put right.
pub const BACKGROUND: &str = "ctrlmesh-manager-background";

/// The role that takes up others, of whoever lists kinds.
pub const LABELS: &str = "ctrlmesh-manager-labels";

/// The name of the webhook configurations in `deploy/`.
const WEBHOOKS: &str = "ctrlmesh";

/// Something that may be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Right {
    /// What for.
    pub why: &'static str,
    /// The API group.
    pub group: &'static str,
    /// The resources, or subresources.
    pub resources: &'static [&'static str],
    /// Only the objects called so; empty: all.
    pub names: &'static [&'static str],
    /// What may be done.
    pub verbs: &'static [&'static str],
}

/// Where something may be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Everywhere.
    Cluster,
    /// In one namespace.
    Namespace(&'static str),
}

/// What one account may do in one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Role {
    /// The account, after which the role is called.
    pub account: &'static str,
    /// Where.
    pub place: Place,
    /// What.
    pub rights: &'static [Right],
}

/// Everything that the managers may do, but for what `LABELS` takes up.
pub const ROLES: [Role; 5] = [
    Role { account: ACCOUNT, place: Place::Cluster, rights: &CLUSTER },
    Role { account: ACCOUNT, place: Place::Namespace(NAMESPACE), rights: &OWN },
    Role {
        account: ACCOUNT,
        place: Place::Namespace(api_server::NAMESPACE),
        rights: &OF_API_SERVER,
    },
    Role { account: BACKGROUND, place: Place::Cluster, rights: &BACKGROUND_CLUSTER },
    Role { account: BACKGROUND, place: Place::Namespace(NAMESPACE), rights: &BACKGROUND_OWN },
];

const CLUSTER: [Right; 18] = [
    right("Who is it that asks?", "authentication.k8s.io", &["tokenreviews"], &["create"]),
    right(
        "Which pods are enrolled, and which shard is each of?",
        "",
        &["pods"],
        &["list", "watch", "patch"],
    ),
    right(
        "The first ordinal of the pods of a StatefulSet.",
        "apps",
        &["statefulsets"],
        &["list", "watch"],
    ),
    right(
        "The shards of roots.",
        names::GROUP,
        &["shardingconfigs"],
        &["list", "watch", "create", "patch", "delete"],
    ),
    right("Their epochs.", names::GROUP, &["shardingconfigs/status"], &["update"]),
    right(
        "What a shard's reference to its root needs where that is enforced.",
        names::GROUP,
        &["shardingconfigs/finalizers"],
        &["update"],
    ),
    right(
        "Where the managers are, and by which labels objects are shared out: made by name,",
        names::GROUP,
        &["managerstates"],
        &["create"],
    ),
    Right {
        names: &[names::MANAGER_STATE],
        ..right("read by it,", names::GROUP, &["managerstates"], &["get", "list", "watch"])
    },
    Right {
        names: &[names::MANAGER_STATE],
        ..right("and written.", names::GROUP, &["managerstates/status"], &["update"])
    },
    right("What people should hear of.", "events.k8s.io", &["events"], &["create", "patch"]),
    right("Which namespaces there are.", "", &["namespaces"], &["list", "watch"]),
    right(
        "Which kinds there are.",
        "apiextensions.k8s.io",
        &["customresourcedefinitions"],
        &["list", "watch"],
    ),
    Right {
        names: &[POLICY],
        ..right(
            "What labels at once.",
            "admissionregistration.k8s.io",
            &["mutatingadmissionpolicies", "mutatingadmissionpolicybindings"],
            &["get", "create", "patch", "delete"],
        )
    },
    Right {
        names: &[root_ca::MESH],
        ..right("Whom to believe.", "", &["configmaps"], &["list", "watch", "create", "patch"])
    },
    right(
        "Who asks us, and whom it believes.",
        "admissionregistration.k8s.io",
        &["validatingwebhookconfigurations", "mutatingwebhookconfigurations"],
        &["list"],
    ),
    Right {
        names: &[WEBHOOKS],
        ..right(
            "The same, exchanged,",
            "admissionregistration.k8s.io",
            &["validatingwebhookconfigurations"],
            &["update"],
        )
    },
    Right {
        names: &[WEBHOOKS, POLICY],
        ..right(
            "also where what labels at once is asked.",
            "admissionregistration.k8s.io",
            &["mutatingwebhookconfigurations"],
            &["update"],
        )
    },
    Right {
        names: &[POLICY],
        ..right(
            "Where the API server cannot label new objects by itself, it asks us.",
            "admissionregistration.k8s.io",
            &["mutatingwebhookconfigurations"],
            &["get", "create", "patch", "delete"],
        )
    },
];

const OWN: [Right; 7] = [
    right("Who writes.", "coordination.k8s.io", &["leases"], &["create"]),
    Right {
        names: &[ACCOUNT],
        ..right("The same, renewed.", "coordination.k8s.io", &["leases"], &["get", "update"])
    },
    right("The certificate authorities.", "", &["secrets"], &["create"]),
    Right {
        names: &[names::CA_SECRET],
        ..right("The same, read and exchanged.", "", &["secrets"], &["get", "update"])
    },
    Right {
        names: &[BACKGROUND],
        ..right(
            "To put labels right as another account.",
            "",
            &["serviceaccounts"],
            &["impersonate"],
        )
    },
    Right {
        names: &[NAMESPACE],
        ..right(
            "Who owns what labels at once: everything goes with the namespace.",
            "",
            &["namespaces"],
            &["get"],
        )
    },
    right("Which replicas there are.", "discovery.k8s.io", &["endpointslices"], &["list"]),
];

const OF_API_SERVER: [Right; 2] = [
    Right {
        names: &[api_server::SERVICE],
        ..right(
            "What the API server is called, for which the mesh's authority may speak.",
            "",
            &["services"],
            &["get"],
        )
    },
    right("Where it is.", "discovery.k8s.io", &["endpointslices"], &["list"]),
];

const BACKGROUND_CLUSTER: [Right; 3] = [
    right(
        "Labels on namespaces; those on objects are in ctrlmesh-manager-labels.",
        "",
        &["namespaces"],
        &["patch"],
    ),
    right(
        "Which kinds there are.",
        "apiextensions.k8s.io",
        &["customresourcedefinitions"],
        &["list", "watch"],
    ),
    right("What people should hear of.", "events.k8s.io", &["events"], &["create", "patch"]),
];

const BACKGROUND_OWN: [Right; 1] = [Right {
    names: &[resource_list::NAME],
    ..right("Which kinds are labelled.", "", &["configmaps"], &["get", "list", "watch"])
}];

const fn right(
    why: &'static str,
    group: &'static str,
    resources: &'static [&'static str],
    verbs: &'static [&'static str],
) -> Right {
    Right { why, group, resources, names: &[], verbs }
}

/// The accounts, roles and bindings as they are applied.
pub fn yaml() -> String {
    let mut text = "# Written by `cargo xtask crds`; do not edit. The table is in ctrlmesh-manager/src/install/rbac.rs.\n".to_owned();
    let background = "# As whom the manager puts labels right: the API server's flow schemas tell requests by who makes them.\n";
    let mut documents = vec![
        account(ACCOUNT, "", ""),
        account(BACKGROUND, background, "automountServiceAccountToken: false\n"),
    ];
    for role in &ROLES {
        documents.push(rules(role));
        documents.push(binding(role.account, role.account, role.place));
    }
    documents.push(taken_up());
    documents.push(binding(LABELS, BACKGROUND, Place::Cluster));
    text.push_str(&documents.join("---\n"));
    text
}

fn account(name: &str, comment: &str, more: &str) -> String {
    let metadata = metadata(name, Place::Namespace(NAMESPACE));
    format!("{comment}apiVersion: v1\nkind: ServiceAccount\n{metadata}{more}")
}

fn rules(role: &Role) -> String {
    let rules: String = role.rights.iter().map(rule).collect();
    format!("{}rules:\n{rules}", head(role.place.kind(), role.account, role.place))
}

fn rule(Right { why, group, resources, names, verbs }: &Right) -> String {
    let group = if group.is_empty() { "\"\"" } else { group };
    let resources = resources.join(", ");
    let names = match names {
        [] => String::new(),
        names => format!("  resourceNames: [{}]\n", names.join(", ")),
    };
    let verbs = verbs.join(", ");
    format!(
        "# {why}\n- apiGroups: [{group}]\n  resources: [{resources}]\n{names}  verbs: [{verbs}]\n"
    )
}

/// The role without rules of its own.
fn taken_up() -> String {
    let comment = "# Which objects it may label: none, but for those of ClusterRoles with the label below. Whoever lists a kind in ConfigMap\n# ctrlmesh-sharding-resource makes such a ClusterRole for it: list, watch, patch.\n";
    let head = head(Place::Cluster.kind(), LABELS, Place::Cluster);
    format!(
        "{comment}{head}aggregationRule:\n  clusterRoleSelectors:\n  - matchLabels:\n      {}/aggregate-to-labels: \"true\"\nrules: []\n",
        names::GROUP
    )
}

fn binding(role: &str, account: &str, place: Place) -> String {
    let kind = place.kind();
    let head = head(&format!("{kind}Binding"), role, place);
    format!(
        "{head}roleRef:\n  apiGroup: rbac.authorization.k8s.io\n  kind: {kind}\n  name: {role}\nsubjects:\n- kind: ServiceAccount\n  name: {account}\n  namespace: {NAMESPACE}\n"
    )
}

fn head(kind: &str, name: &str, place: Place) -> String {
    format!("apiVersion: rbac.authorization.k8s.io/v1\nkind: {kind}\n{}", metadata(name, place))
}

fn metadata(name: &str, place: Place) -> String {
    let namespace = match place {
        Place::Cluster => String::new(),
        Place::Namespace(namespace) => format!("  namespace: {namespace}\n"),
    };
    format!(
        "metadata:\n  name: {name}\n{namespace}  labels:\n    app.kubernetes.io/part-of: ctrlmesh\n"
    )
}

// === impl Place ===

impl Place {
    /// What a role there is.
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
    fn the_file_in_deploy_is_that_of_the_table() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/manager/rbac.yaml");
        let there = fs::read_to_string(file).unwrap_or_default();
        assert!(there == yaml(), "rbac.yaml is stale: run `cargo xtask crds`");
    }

    #[test]
    fn nothing_is_granted_twice_or_wholesale() {
        for Role { account, rights, .. } in &ROLES {
            let all = rights.iter().flat_map(|right| {
                let resources = right.resources.iter();
                resources.flat_map(move |resource| {
                    right.verbs.iter().map(move |verb| (right.group, *resource, *verb, right.names))
                })
            });
            let mut all: Vec<_> = all.collect();
            assert!(
                all.iter()
                    .all(|(group, resource, verb, _)| ![*group, *resource, *verb].contains(&"*"))
            );
            let count = all.len();
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len(), count, "{account}");
        }
    }
}

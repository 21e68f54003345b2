//! `ManagerState`: where the managers are, and by which labels objects are shared out.
//!
//! The addresses are for people and for other programs; ours do not need them. The labels are the managers' memory:
//! flags say which labels are wanted, and this object says which are in force, across restarts.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Nothing is asked for: the manager writes the status of the one object `ctrlmesh-manager`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, CustomResource, KubeSchema)]
#[kube(
    group = "ctrlmesh.kusionstack.io",
    version = "v1alpha1",
    kind = "ManagerState",
    category = "ctrlmesh",
    status = "ManagerStateStatus",
    no_spec,
    derive = "PartialEq",
    derive = "Default",
    doc = "Where the managers are, and by which labels objects are shared out. There is one object, ctrlmesh-manager, and the manager writes it.",
    validation = Rule::new("self.metadata.name == 'ctrlmesh-manager'").message("metadata.name: must be ctrlmesh-manager; there is one ManagerState"),
    printcolumn(name = "Namespace", type_ = "string", json_path = ".status.namespace"),
    printcolumn(
        name = "Leader",
        type_ = "string",
        json_path = ".status.endpoints[?(@.leader==true)].name"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
pub struct ManagerStateSpec {
    /// Nothing. Default: absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spec: Option<NoSpec>,
}

/// Nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NoSpec {}

/// What the leader observed. Absent until one has.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ManagerStateStatus {
    /// The namespace that the managers run in. Absent until it is first written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Each manager. Absent or empty: none was seen.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub endpoints: Vec<ManagerEndpoint>,
    /// Where the managers listen. Absent until it is first written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ports: Option<ManagerPorts>,
    /// When this status was last written. Absent until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update_timestamp: Option<Time>,
    /// By which labels objects are shared out. Absent until a leader has written it: then what the managers were told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<LabelsStatus>,
    /// `Relabelled`: whether every object carries the labels that the managers were told, and no others of theirs.
    /// Absent until it is first written.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// By which labels objects are shared out, also while other ones take their place.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LabelsStatus {
    /// Those that shards go by.
    pub in_force: LabelKeys,
    /// Those that objects are given besides, until all have them; then they are in force. Absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<LabelKeys>,
    /// Those that were in force before, which objects keep until every proxy has let go of them. Absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub former: Option<LabelKeys>,
    /// Keys of labels that nobody goes by any more, and that are taken from objects. Absent or empty: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "set"))]
    pub leftover: Vec<String>,
}

/// The three labels of an object, and how a namespace becomes a hash.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LabelKeys {
    /// Key of the label with the hash of the object's namespace.
    pub sharding_hash: String,
    /// Key of the label with the object's namespace.
    pub namespace: String,
    /// Key of the label that says that the object is given to shards.
    pub control: String,
    /// How a namespace becomes a hash: fnv1a or kusionstack.
    #[schemars(extend("enum" = ["fnv1a", "kusionstack"]))]
    pub hash: String,
}

/// One manager.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ManagerEndpoint {
    /// The pod's name.
    pub name: String,
    /// The pod's address.
    #[serde(rename = "podIP")]
    pub pod_ip: String,
    /// Whether it leads.
    pub leader: bool,
}

/// TCP ports of the managers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ManagerPorts {
    /// The TCP port of the leader's gRPC. Absent: the leader has none of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grpc_leader_election_port: Option<i32>,
    /// The TCP port of every manager's gRPC. Absent: 8071.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grpc_non_leader_election_port: Option<i32>,
}

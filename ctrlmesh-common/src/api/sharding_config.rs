//! `ShardingConfig`: which pods of an operator own which objects.

mod auto;
mod status;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use self::auto::{Auto, Balance, Elastic, LONGEST_SETTLE};
pub use self::status::{PodStatus, RootStatus, ShardingConfigStatus};
use super::{LabelSelector, Rollout, Webhook, rules};
use crate::resource::ResourceMatch;

/// A shard of an operator, or, with `root`, the rule that makes all its shards.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, CustomResource, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[kube(
    group = "ctrlmesh.kusionstack.io",
    version = "v1alpha1",
    kind = "ShardingConfig",
    shortname = "shard",
    category = "ctrlmesh",
    namespaced,
    status = "ShardingConfigStatus",
    derive = "PartialEq",
    doc = "A shard of an operator, some of its pods and a share of the objects; or, with root, the rule that makes all its shards.",
    validation = Rule::new("!has(self.spec.controller) || size(self.spec.controller.leaderElectionName) + size(self.metadata.name) <= 250")
        .message("spec.controller.leaderElectionName: together with metadata.name at most 250 characters, because the shard's own lock is called <leaderElectionName>---<name>"),
    validation = Rule::new("size(self.metadata.name) <= 63")
        .message("metadata.name: at most 63 characters, because pods carry it as a label"),
    printcolumn(name = "Root", type_ = "boolean", json_path = ".status.isRoot", description = "Whether it makes shards"),
    printcolumn(name = "Shards", type_ = "string", json_path = ".status.root.childShardingConfigs", description = "The shards of a root"),
    printcolumn(name = "Epoch", type_ = "integer", json_path = ".status.epoch", description = "Grows with every change of ownership"),
    printcolumn(name = "Accepted", type_ = "string", json_path = ".status.conditions[?(@.type==\"Accepted\")].status"),
    printcolumn(name = "Programmed", type_ = "string", json_path = ".status.conditions[?(@.type==\"Programmed\")].status"),
    printcolumn(name = "Settled", type_ = "string", json_path = ".status.conditions[?(@.type==\"Settled\")].status", description = "Of a root: whether no ownership is on its way"),
    printcolumn(name = "Degraded", type_ = "string", json_path = ".status.conditions[?(@.type==\"Degraded\")].status"),
    printcolumn(name = "Webhook", type_ = "string", priority = 1, json_path = ".status.conditions[?(@.type==\"WebhookRouted\")].status", description = "Whether reviews of the operator's webhook are routed"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(
    validation = Rule::new("has(self.root) || has(self.selector)")
        .message("selector: is required, unless root is set"),
    validation = Rule::new("has(self.root) || has(self.limits) && size(self.limits) > 0")
        .message("limits: at least one is required, unless root is set"),
    validation = Rule::new("has(self.root) || !has(self.selector) || has(self.selector.matchLabels) && size(self.selector.matchLabels) > 0 || has(self.selector.matchExpressions) && size(self.selector.matchExpressions) > 0")
        .message(rules::HAS_REQUIREMENT_MESSAGE).field_path(".selector"),
    validation = Rule::new("has(self.root) || !has(self.limits) || size(self.limits) < 2 || self.limits.all(limit, has(limit.relateResources) && size(limit.relateResources) > 0 || has(limit.objectSelector) && has(limit.objectSelector.relateResources) && size(limit.objectSelector.relateResources) > 0)")
        .message("limits: one without relateResources covers every resource, so it must be the only one").field_path(".limits"),
    validation = Rule::new("has(self.selector) == has(oldSelf.selector)")
        .message("selector: is immutable; it can be neither added nor removed. Delete the ShardingConfig and create another"),
    validation = Rule::new("has(self.root) == has(oldSelf.root)")
        .message("root: can be neither added nor removed. Delete the ShardingConfig and create another")
)]
pub struct ShardingConfigSpec {
    /// Which pods, of this namespace, belong to the shard. Required unless `root` is set. A root owns no pods itself:
    /// there it is absent, or ignored. Immutable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(
        validation = Rule::new("self == oldSelf").message("is immutable. Delete the ShardingConfig and create another")
    )]
    pub selector: Option<LabelSelector>,
    /// The operator's controllers. Absent: the operator does no leader election, or all shards share its lock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub controller: Option<Controller>,
    /// The operator's admission webhook. Absent: it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub webhook: Option<Webhook>,
    /// Whether the operator may ask the API server to proxy requests to pods, services and nodes. What answers there
    /// may be another API server, or a kubelet: they know nothing of shards. Absent: it may not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_proxy: Option<bool>,
    /// The member clusters that the operator reaches behind paths of the API server. What stands behind such a path
    /// is a request to the member. Absent or empty: such paths are as any other. Of a shard; a root has its own
    /// `clusters`. At most 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub clusters: Vec<Clusters>,
    /// Which members of `clusters` are the shard's: those whose names have these hashes, `"0"` to `"31"`. It sees
    /// nothing of the others, and writes nothing there. Absent: all members. Of a shard; in a root ignored. At most 32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), inner(length(max = 2)), extend("x-kubernetes-list-type" = "atomic"))]
    pub cluster_hashes: Option<Vec<String>>,
    /// The share of objects: each limit restricts some resources to the objects that its selector matches. A resource
    /// may be covered by one limit only. Required unless `root` is set; absent or empty there, and not used. At most
    /// 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub limits: Vec<Limit>,
    /// Makes this a root: it owns nothing itself, and its shards are made and kept by the manager. Absent: this is a
    /// shard. Can be neither added nor removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<Root>,
}

/// Member clusters that an operator reaches in one way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Clusters {
    /// A path of the API server, with `{cluster}` in the place of the member's name, such as
    /// `/apis/cluster.karmada.io/v1alpha1/clusters/{cluster}/proxy`. Whole segments may be `{namespace}`, once, and
    /// `*`, for anything. Below `/apis` it goes through subresource `proxy`, and none is below `/api`. No two paths may
    /// overlap. Immutable.
    #[schemars(length(min = 1, max = 512), regex(pattern = r"^(/[^/]+)+$"))]
    pub path: String,
}

/// What the shards of a root divide. With `Cluster`, each member of `clusters` has one shard, by the hash of its name.
/// The others see nothing of it, and write nothing there. That needs `clusters`, and `fence: Proxy`, because no API
/// server fences what is in a member. With `Namespace`, every shard sees and writes all of every member. Immutable.
/// Default `Namespace`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Unit {
    /// Objects, by their namespaces.
    #[default]
    Namespace,
    /// Member clusters, by their names, and objects of the API server itself as with `Namespace`.
    Cluster,
}

/// The controllers of an operator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Controller {
    /// The name of the operator's leader-election lock (Lease, `ConfigMap` or Endpoints) in the pod's namespace. Each
    /// shard gets a lock of its own, `<leaderElectionName>---<ShardingConfig name>`.
    #[schemars(
        length(min = 1, max = 200),
        regex(pattern = rules::SUBDOMAIN)
    )]
    pub leader_election_name: String,
}

/// Restricts some resources to the objects that a selector matches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.selector) != has(self.objectSelector)")
        .message("selector: exactly one of selector and objectSelector (Kridge's spelling) is required"),
    validation = Rule::new("!(has(self.objectSelector) && has(self.relateResources))")
        .message("relateResources: must stand inside objectSelector where objectSelector is used")
)]
pub struct Limit {
    /// Which resources are restricted. Absent or empty: every resource. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub relate_resources: Vec<RelatedResources>,
    /// Which objects of them the shard may see. Required, with at least one requirement; absent only where
    /// `objectSelector` is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new(rules::HAS_REQUIREMENT)
        .message("must have at least one requirement in matchLabels or matchExpressions; without one the limit limits nothing"))]
    pub selector: Option<LabelSelector>,
    /// Kridge's spelling of the two fields above. Absent in new manifests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object_selector: Option<ObjectSelector>,
}

/// Kridge's spelling of a limit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ObjectSelector {
    /// Which resources are restricted. Absent or empty: every resource. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub relate_resources: Vec<RelatedResources>,
    /// Which objects of them the shard may see. Required, with at least one requirement.
    #[x_kube(validation = Rule::new(rules::HAS_REQUIREMENT)
        .message("must have at least one requirement in matchLabels or matchExpressions; without one the limit limits nothing"))]
    pub selector: LabelSelector,
}

/// Some resources of some API groups. The version does not count, and a subresource counts as its resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("size(self.apiGroups) == 1 || !('*' in self.apiGroups)").message("apiGroups: \"*\" is allowed only alone"),
    validation = Rule::new("size(self.resources) == 1 || !('*' in self.resources)").message("resources: \"*\" is allowed only alone")
)]
pub struct RelatedResources {
    /// API groups; `""` is the core group, `["*"]` is every group. 1 to 64.
    #[schemars(length(min = 1, max = 64), inner(length(max = 253), regex(pattern = rules::API_GROUP)), extend("x-kubernetes-list-type" = "set"))]
    pub api_groups: Vec<String>,
    /// Resources in their plural, lower-case form; `["*"]` is every resource. A subresource such as
    /// `deployments/status` is refused: it belongs to its object, and is limited with `deployments`. 1 to 64.
    #[schemars(length(min = 1, max = 64), inner(length(max = 63), regex(pattern = r"^(\*|[a-z]([-a-z0-9]*[a-z0-9])?)$")), extend("x-kubernetes-list-type" = "set"))]
    pub resources: Vec<String>,
}

/// The rule by which a root makes its shards.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.targetStatefulSet) != has(self.targetDeployment)")
        .message("targetStatefulSet: exactly one of targetStatefulSet and targetDeployment is required"),
    validation = Rule::new("has(self.disable) && self.disable || has(self.auto) != (has(self.manual) && size(self.manual) > 0)")
        .message("auto: exactly one of auto and manual is required, unless disable is true"),
    validation = Rule::new("!has(self.auto) || self.auto.shardingSize + (has(self.canary) && has(self.canary.inShardHash) ? size(self.canary.inShardHash) : 0) <= 32")
        .message("auto.shardingSize: at most the number of hashes that canary.inShardHash leaves of 32"),
    validation = Rule::new("!has(self.rollout) || !has(self.fence) || self.fence != 'Off'")
        .message("rollout: needs fence Server or Proxy; without a fence, what moves could have two writers"),
    validation = Rule::new("!has(self.auto) || !has(self.auto.elastic) && has(self.auto.everyShardReplicas) || !has(self.fence) || self.fence != 'Off'")
        .message("auto.elastic: needs fence Server or Proxy; without a fence, what moves could have two writers. Write everyShardReplicas instead"),
    validation = Rule::new("!has(self.auto) || !has(self.auto.balance) || self.auto.balance != 'Load' || !has(self.fence) || self.fence != 'Off'")
        .message("auto.balance: Load needs fence Server or Proxy; without a fence, what moves could have two writers"),
    validation = Rule::new("!has(self.auto) || !has(self.auto.elastic) && has(self.auto.everyShardReplicas) || !has(self.onLoss) || self.onLoss != 'Restart'")
        .message("auto.elastic: is not allowed with onLoss Restart; each pod that comes would restart others, which would lose their share by that. Write everyShardReplicas instead"),
    validation = Rule::new(rules::EVERYTHING_LAST).message("rollout.steps: only the last step may say 100 percent"),
    validation = Rule::new(rules::SHADOW_FIRST).message("rollout.steps: only the first step may say shadow"),
    validation = Rule::new(rules::EVERY_SLOT_ONCE)
        .message("manual: every hash \"0\" to \"31\" must be in exactly one shard's hashes, or in canary.inShardHash")
)]
pub struct Root {
    /// Stops making and changing shards; those that are there stay as they are. Default false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disable: Option<bool>,
    /// What the names of the shards begin with: `<prefix>-0-canary`, `<prefix>-<id>-normal`, and with `rollout`
    /// `<prefix>-<id>-second`, too. At most 53 characters, because pods carry the whole name as a label.
    #[schemars(length(min = 1, max = 53), regex(pattern = rules::SUBDOMAIN))]
    pub prefix: String,
    /// The `StatefulSet`, in this namespace, whose pods are divided among the shards, by ordinal. Absent
    /// where `targetDeployment` is there; exactly one of the two is required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = rules::SUBDOMAIN))]
    pub target_stateful_set: Option<String>,
    /// The Deployment, in this namespace, whose pods are divided among the shards, as they are admitted.
    /// Absent where `targetStatefulSet` is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = rules::SUBDOMAIN))]
    pub target_deployment: Option<String>,
    /// A first shard of chosen namespaces and hashes, for a new version. Absent: no canary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub canary: Option<Canary>,
    /// Divides what the canary leaves evenly. Absent where `manual` is there; exactly one of the two is required,
    /// unless `disable` is true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto: Option<Auto>,
    /// Divides what the canary leaves as written here. Every hash must be in exactly one shard. Absent or empty where
    /// `auto` is there. At most 32.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["id"]))]
    pub manual: Vec<Manual>,
    /// Which resources the shards divide. Absent or empty: every resource. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub resource_selector: Vec<ResourceSelector>,
    /// The member clusters that the operator reaches behind paths of the API server, for all shards. Immutable. Absent
    /// or empty: such paths are as any other. At most 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub clusters: Vec<Clusters>,
    /// Absent: `Namespace`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<Unit>,
    /// Absent: `Server`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<FenceMode>,
    /// Absent: `Splice`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_loss: Option<OnLoss>,
    /// How a new version of the operator is tried. Absent: it owns what its pods' shards own from the start. Needs the
    /// fence `Server` or `Proxy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<Rollout>,
}

impl Root {
    /// Whether only shards with a ready pod own hashes.
    pub fn is_elastic(&self) -> bool {
        self.auto.as_ref().is_some_and(Auto::is_elastic)
    }

    /// Whether its shares are elastic, and kept even by load.
    pub fn balances_by_load(&self) -> bool {
        self.auto.as_ref().is_some_and(Auto::balances_by_load)
    }

    /// Whether its shards divide member clusters.
    pub fn divides_clusters(&self) -> bool {
        self.unit == Some(Unit::Cluster)
    }

    /// Who refuses writes, where the root says so and where it does not.
    pub fn fence_mode(&self) -> FenceMode {
        self.fence.unwrap_or(FenceMode::Server)
    }
}

/// What happens to a replica that loses objects: with `Splice` its watches show them as deleted, with `Restart` the
/// node's proxy restarts its containers instead. A proxy inside the pod cannot restart, and splices. Default `Splice`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OnLoss {
    /// It sees them deleted.
    Splice,
    /// Its containers are restarted.
    Restart,
}

/// Who refuses writes to objects that a pod's shard does not own: `Off` nobody, `Proxy` the pod's proxy, `Server` also
/// the API server itself, where it can (Kubernetes 1.30 or newer). Default `Server`. In YAML write `"Off"` with quotes.
/// Where only the proxy does, it refuses all of these writes while it reaches no manager for more than 15 s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum FenceMode {
    /// Nobody.
    Off,
    /// The pod's proxy.
    Proxy,
    /// The pod's proxy, and the API server itself.
    Server,
}

/// Some resources that the shards of a root divide.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResourceSelector {
    /// Which resources are divided. Absent or empty: every resource. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub relate_resources: Vec<RelatedResources>,
    /// Which objects of them any shard may see at all. Absent: all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<LabelSelector>,
}

/// The canary shard: its objects are those in `inNamespaces` or in `inShardHash`; the others get exactly the rest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.inNamespaces) && size(self.inNamespaces) > 0 || has(self.inShardHash) && size(self.inShardHash) > 0")
        .message("inNamespaces: at least one namespace, or one hash in inShardHash, is required; the canary would own nothing")
)]
pub struct Canary {
    /// How many pods the canary has, 1 to 1000: of a StatefulSet those with the ordinals 0 to `replicas` - 1, of a
    /// Deployment as many as are given to it when they are admitted.
    #[schemars(range(min = 1, max = 1000))]
    pub replicas: i32,
    /// Namespaces that the canary owns. Absent or empty: none by name; then `inShardHash` is required. At most 1024.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024), inner(length(min = 1, max = 63), regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")), extend("x-kubernetes-list-type" = "set"))]
    pub in_namespaces: Vec<String>,
    /// Hashes of namespaces, "0" to "31", that the canary owns. Absent or empty: none; then `inNamespaces` is required.
    /// At most 32.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(max = 2), regex(pattern = rules::SLOT)), extend("x-kubernetes-list-type" = "set"))]
    pub in_shard_hash: Vec<String>,
}

/// One shard, as written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Manual {
    /// The shard's number, 1 to 32; its name is `<prefix>-<id>-normal`.
    #[schemars(range(min = 1, max = 32))]
    pub id: i32,
    /// Hashes of namespaces, "0" to "31", that the shard owns. At most 32; with none, its pods have nothing to do.
    #[schemars(length(max = 32), inner(length(max = 2), regex(pattern = rules::SLOT)), extend("x-kubernetes-list-type" = "set"))]
    pub hashes: Vec<String>,
    /// How many pods the shard has, 1 to 1000. Default 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000))]
    pub replicas: Option<i32>,
}

impl Limit {
    /// The resources that it restricts; none means every resource. Reads either spelling.
    pub fn resources(&self) -> &[RelatedResources] {
        self.object_selector.as_ref().map_or(&self.relate_resources, |nested| &nested.relate_resources)
    }

    /// Whether it is written in our spelling and in Kridge's at once, which the schema refuses.
    pub fn is_in_both_spellings(&self) -> bool {
        self.object_selector.is_some() && (self.selector.is_some() || !self.relate_resources.is_empty())
    }

    /// The objects of them that the shard may see. Reads either spelling.
    pub fn objects(&self) -> Option<&LabelSelector> {
        self.selector.as_ref().or(self.object_selector.as_ref().map(|nested| &nested.selector))
    }
}

impl From<&RelatedResources> for ResourceMatch {
    fn from(resources: &RelatedResources) -> Self {
        Self { api_groups: resources.api_groups.clone(), resources: resources.resources.clone() }
    }
}

//! Shares that the manager divides: how many there are, and what is kept even between them.

use std::time::Duration;

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::api::{parse_duration, rules};

/// The `settle` of shares that do not say so.
const DEFAULT_SETTLE: Duration = Duration::from_secs(30);

/// For how long a pod that was away has to be ready at most.
pub const LONGEST_SETTLE: Duration = Duration::from_mins(10);

/// Even shares.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.elastic) || !has(self.everyShardReplicas) || self.everyShardReplicas == 1")
        .message("everyShardReplicas: with elastic, each shard has one pod; others take over when it is away"),
    validation = Rule::new("!has(self.balance) || self.balance != 'Load' || has(self.elastic) || !has(self.everyShardReplicas)")
        .message("balance: Load is allowed only where the shares are elastic; leave everyShardReplicas out, or write Count")
)]
pub struct Auto {
    /// Into how many shards the hashes are divided, 1 to 32; their sizes differ by at most one hash. With `elastic`
    /// into how many at most.
    #[schemars(range(min = 1, max = 32))]
    pub sharding_size: i32,
    /// How many pods each shard has, 1 to 1000: one works, the others stand by. Absent: one, and the shares are
    /// `elastic`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000))]
    pub every_shard_replicas: Option<i32>,
    /// The shares follow the pods: only shards with a ready pod own hashes. Absent: each shard keeps its share while it
    /// has no ready pod, unless `everyShardReplicas` is absent, too. Needs the fence `Server` or `Proxy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub elastic: Option<Elastic>,
    /// What is kept even between the shares: `Count` the number of hashes, `Load` the requests for their objects.
    /// Absent: `Count`. `Load` needs shares that are elastic, and the fence `Server` or `Proxy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balance: Option<Balance>,
}

/// What is kept even between elastic shares: `Count` the number of hashes, `Load` the requests for the objects of the
/// hashes, as the proxies count them. Default `Count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Balance {
    /// Sizes differ by at most one hash.
    Count,
    /// Busy hashes move away from the busiest share, a few at a time.
    Load,
}

/// Shares that follow the pods.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Elastic {
    /// How long a pod that was away has to be ready before it gets hashes again, 0s to 10m; twice as long after each
    /// further time, but 10 minutes at most. Absent: 30s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new(rules::SETTLE).message(rules::SETTLE_MESSAGE))]
    #[schemars(length(max = 32))]
    pub settle: Option<String>,
}

impl Auto {
    /// How many pods each shard has.
    pub fn replicas(&self) -> i32 {
        self.every_shard_replicas.unwrap_or(1)
    }

    /// Whether only shards with a ready pod own hashes.
    pub fn is_elastic(&self) -> bool {
        self.elastic.is_some() || self.every_shard_replicas.is_none()
    }

    /// Whether elastic shares are kept even by load.
    pub fn balances_by_load(&self) -> bool {
        self.is_elastic() && self.balance == Some(Balance::Load)
    }

    /// How long a pod of elastic shares has to be ready that was away once.
    pub fn settle(&self) -> Duration {
        let settle = self.elastic.as_ref().and_then(|elastic| elastic.settle.as_deref());
        settle.and_then(parse_duration).unwrap_or(DEFAULT_SETTLE)
    }
}

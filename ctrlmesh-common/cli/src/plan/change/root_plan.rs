//! What applying one root would do, as it is shown.

use ctrlmesh_common::ownership::{Ownership, UNSHARDED};
use ctrlmesh_common::policy::fence::LAPSED_AFTER;
use ctrlmesh_common::share;
use ctrlmesh_common::slots::Slot;
use serde::Serialize;

use crate::status::shards::owned;

/// What applying one root would do.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RootPlan {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) workload: String,
    /// Whether the cluster does not have it yet.
    pub(crate) is_new: bool,
    /// Whether it would be switched off: nothing moves, and its shards stay as they are.
    pub(crate) is_off: bool,
    /// Whether those of its normal shards that have a ready pod divide all that its normal shards own here.
    pub(crate) is_elastic: bool,
    pub(crate) shards: Vec<ShardPlan>,
    pub(crate) moves: Vec<Move>,
    /// How many times as many objects as the mean the shard with the most owns. Absent: there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) imbalance_before: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) imbalance_after: Option<f64>,
    /// The same of requests. Absent: they were not counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) load_imbalance_before: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) load_imbalance_after: Option<f64>,
    /// Pods whose containers are restarted, because the root has `onLoss: Restart` and they lose objects.
    pub(crate) restarted_pods: Vec<String>,
    /// Pods that lose or gain something: each of their open watches is led over by three reads.
    pub(crate) changed_pods: Vec<String>,
    /// How long that takes as a rule, from the write on. Absent: nothing moves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) expected_seconds: Option<f64>,
    /// Pods that lose something, and whose proxies have not acknowledged the newest epoch. While one of them does not
    /// answer, a move takes up to [`LAPSED_AFTER`].
    pub(crate) late_pods: Vec<String>,
    /// Shards that gain something and have no pod. With a fence, it stays with its owner until one serves.
    pub(crate) without_pods: Vec<String>,
    /// Resources that the root selects otherwise than before, and how.
    pub(crate) selection: Vec<String>,
    /// Slots that are not with their shard yet, whether the root changes or not.
    pub(crate) pending: Vec<Slot>,
}

/// What one shard owns before and after.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ShardPlan {
    pub(crate) name: String,
    pub(crate) before: Owned,
    pub(crate) after: Owned,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Owned {
    pub(crate) slots: Vec<Slot>,
    /// Whatever their slot.
    pub(crate) namespaces: Vec<String>,
    pub(crate) objects: u64,
    /// For these objects. Absent: they were not counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) requests_per_second: Option<f64>,
}

/// What goes from one owner to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Move {
    /// Absent: nobody owns it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) from: Option<String>,
    /// Absent: nobody will.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) to: Option<String>,
    pub(crate) slots: Vec<Slot>,
    pub(crate) namespaces: Vec<String>,
    pub(crate) objects: u64,
}

impl RootPlan {
    /// How long moving takes at most where a proxy does not answer, in seconds.
    pub(crate) fn longest_seconds() -> u64 {
        LAPSED_AFTER.as_secs()
    }

    /// Whether applying it changes who owns anything.
    pub(crate) fn moves_anything(&self) -> bool {
        !self.moves.is_empty() || !self.selection.is_empty()
    }

    pub(crate) fn objects(&self) -> u64 {
        self.shards.iter().map(|shard| shard.after.objects).sum()
    }
}

impl Owned {
    pub(super) fn of(shard: &str, table: &Ownership) -> Self {
        let (slots, namespaces) = owned(shard, table);
        Self { slots, namespaces, ..Self::default() }
    }

    fn is_empty(&self) -> bool {
        self.slots.is_empty() && self.namespaces.is_empty()
    }
}

pub(super) fn imbalance(
    shards: &[ShardPlan],
    side: impl Fn(&ShardPlan) -> &Owned,
    of: impl Fn(&Owned) -> u64,
) -> Option<f64> {
    let shards = shards.iter().filter(|shard| shard.name != UNSHARDED);
    share::imbalance(shards.map(side).filter(|owned| !owned.is_empty()).map(of))
}

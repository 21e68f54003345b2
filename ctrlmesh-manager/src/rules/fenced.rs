//! Says which roots are fenced, and when a fence may go.

use ctrlmesh_common::api::{FenceMode, Root, ShardingConfig};
use ctrlmesh_common::names::{OWNERSHIP_FINALIZER, annotation};
use ctrlmesh_common::ownership::{Ownership, UNSHARDED};

/// Whether the API server fences what `rule` divides. It does not while the root is switched off.
pub fn is_server_fenced(rule: &Root) -> bool {
    rule.fence_mode() == FenceMode::Server && rule.disable != Some(true)
}

/// Whether anybody fences what `rule` divides. What moves is then taken away first, and given once that is proved.
pub fn is_fenced(rule: &Root) -> bool {
    rule.fence_mode() != FenceMode::Off && rule.disable != Some(true)
}

/// Whether `root` is being deleted, and is kept until its shards own nothing.
pub fn is_handing_back(root: &ShardingConfig) -> bool {
    let kept = root.metadata.finalizers.iter().flatten().any(|one| one == OWNERSHIP_FINALIZER);
    kept && root.metadata.deletion_timestamp.is_some() && root.spec.root.as_ref().is_some_and(is_fenced)
}

/// Whether the fence of a root that is being deleted may go: what its shards owned is handed back, no pod is left that
/// could write, or nobody wants to wait for that.
pub fn may_lose_fence(root: &ShardingConfig) -> bool {
    let annotations = root.metadata.annotations.as_ref();
    let skips = annotations.and_then(|all| all.get(annotation::SKIP_HANDBACK)).is_some_and(|value| value == "true");
    let is_fenced = root.spec.root.as_ref().is_some_and(is_fenced);
    let table = root.status.as_ref().and_then(|status| status.ownership.as_ref());
    skips || !is_fenced || table.is_none_or(is_handed_back)
}

fn is_handed_back(table: &Ownership) -> bool {
    let mut owners = table.slots.values().chain(table.namespaces.values());
    let has_writer = !table.pod_uids.is_empty() || table.revoked.iter().any(|revoked| !revoked.pod_uids.is_empty());
    !has_writer || table.revoked.is_none() && owners.all(|owner| owner == UNSHARDED)
}

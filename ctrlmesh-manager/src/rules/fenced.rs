//! Says which roots are fenced, and when a fence may go.

use ctrlmesh_common::api::{FenceMode, Root, ShardingConfig};
use ctrlmesh_common::names::{OWNERSHIP_FINALIZER, annotation};
use ctrlmesh_common::ownership::{Ownership, UNSHARDED};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

/// Whether the API server fences what `rule` divides. It does not while the root is switched off.
pub fn is_server_fenced(rule: &Root) -> bool {
    rule.fence_mode() == FenceMode::Server && rule.disable != Some(true)
}

/// Whether anybody fences what `rule` divides. What moves is then taken away first, and given once that is proved.
pub fn is_fenced(rule: &Root) -> bool {
    rule.fence_mode() != FenceMode::Off && rule.disable != Some(true)
}

/// Condition of a root that says what the API server fences, and its reason where that has no fence.
pub const FENCED: &str = "Fenced";
pub const UNSUPPORTED: &str = "Unsupported";

/// Whether nobody but the proxies fences what `root` divides, so that their policies have to be confirmed. Of the API
/// server it goes by what the leader wrote: all replicas give out the same policies, and a new leader changes none.
pub fn lapses(root: &ShardingConfig) -> bool {
    let Some(rule) = root.spec.root.as_ref().filter(|rule| is_fenced(rule)) else { return false };
    let conditions = root.status.iter().flat_map(|status| &status.conditions);
    let is_unsupported = |one: &Condition| one.type_ == FENCED && one.status == "False" && one.reason == UNSUPPORTED;
    match rule.fence_mode() {
        FenceMode::Proxy => true,
        FenceMode::Server => conditions.into_iter().any(is_unsupported),
        FenceMode::Off => false,
    }
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

#[cfg(test)]
mod tests {
    use ctrlmesh_common::api::{ShardingConfigSpec, ShardingConfigStatus};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;

    fn root(fence: FenceMode, condition: Option<(&str, &str)>) -> ShardingConfig {
        let root = Some(Root { fence: Some(fence), ..Root::default() });
        let mut root = ShardingConfig::new("op", ShardingConfigSpec { root, ..ShardingConfigSpec::default() });
        let condition = condition.map(|(status, reason)| Condition {
            type_: FENCED.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message: String::new(),
            last_transition_time: Time(jiff::Timestamp::UNIX_EPOCH),
            observed_generation: None,
        });
        let conditions = condition.into_iter().collect();
        root.status = Some(ShardingConfigStatus { conditions, ..ShardingConfigStatus::default() });
        root
    }

    #[test]
    fn policies_lapse_where_nobody_but_the_proxies_fences() {
        for (fence, condition, expected) in [
            (FenceMode::Proxy, None, true),
            (FenceMode::Off, None, false),
            (FenceMode::Server, None, false),
            (FenceMode::Server, Some(("False", "Pending")), false),
            (FenceMode::Server, Some(("True", "Enforced")), false),
            (FenceMode::Server, Some(("False", UNSUPPORTED)), true),
            (FenceMode::Off, Some(("False", UNSUPPORTED)), false),
        ] {
            assert_eq!(lapses(&root(fence, condition)), expected, "{fence:?} {condition:?}");
        }
        let mut disabled = root(FenceMode::Proxy, None);
        disabled.spec.root.as_mut().unwrap().disable = Some(true);
        assert!(!lapses(&disabled));
    }
}

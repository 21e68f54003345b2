//! Keeps a root that is fenced, until its shards own nothing and the fence in the API server is gone.

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::OWNERSHIP_FINALIZER;

use super::{Write, is_leaving};
use crate::cluster::plan::{Changed, Plan};
use crate::ownership::fence_state::{States, is_gone};
use crate::rules::fenced::{is_fenced, is_server_fenced, may_lose_fence};
use crate::rules::object_name::full_name;

pub(super) fn writes(plan: &Plan, within: &Changed, fences: &States) -> Vec<Write> {
    let write = |root: &ShardingConfig| {
        let finalizers = wanted(root, is_gone(fences, &full_name(&root.metadata)))?;
        Some(Write::Finalizers { config: Box::new(root.clone()), finalizers })
    };
    plan.snapshot.roots_in(within).filter_map(write).collect()
}

/// The finalizers that `root` should have, if it has others. The fence of a root goes first: without the root, it would
/// refuse every write.
fn wanted(root: &ShardingConfig, is_fence_gone: bool) -> Option<Vec<String>> {
    let rule = root.spec.root.as_ref();
    let is_fence_gone = is_fence_gone || !rule.is_some_and(is_server_fenced);
    let present = root.metadata.finalizers.clone().unwrap_or_default();
    let is_kept = present.iter().any(|one| one == OWNERSHIP_FINALIZER);
    let stays = rule.is_some_and(is_fenced) && !(is_leaving(root) && may_lose_fence(root) && is_fence_gone);
    match (is_kept, stays) {
        // A root that is being deleted takes no finalizer.
        (false, true) if !is_leaving(root) => {
            Some(present.into_iter().chain([OWNERSHIP_FINALIZER.to_owned()]).collect())
        }
        (true, false) => Some(present.into_iter().filter(|one| one != OWNERSHIP_FINALIZER).collect()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::names::annotation;
    use jiff::Timestamp;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;

    fn root(fence: &str, table: &str) -> ShardingConfig {
        let text = format!(
            "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {{name: op, namespace: ops, finalizers: [other]}}\n\
             spec: {{root: {{prefix: r, fence: {fence}, targetStatefulSet: op, auto: {{shardingSize: 1, everyShardReplicas: 1}}}}}}\nstatus: {{ownership: {table}}}\n"
        );
        serde_saphyr::from_str(&text).unwrap()
    }

    fn kept(mut root: ShardingConfig, is_leaving: bool) -> ShardingConfig {
        root.metadata.finalizers = Some(vec!["other".to_owned(), OWNERSHIP_FINALIZER.to_owned()]);
        root.metadata.deletion_timestamp = is_leaving.then_some(Time(Timestamp::UNIX_EPOCH));
        root
    }

    const OWNED: &str = "{epoch: 3, podUids: {a: r-1-normal}, slots: {'1': r-1-normal}}";
    const MOVING: &str = "{epoch: 4, podUids: {a: r-1-normal}, revoked: {epoch: 4, slots: {'1': r-1-normal}}}";
    const HANDED_BACK: &str = "{epoch: 5, podUids: {a: r-1-normal}, slots: {'1': unsharded}}";

    #[test]
    fn a_fenced_root_is_kept_until_all_is_handed_back() {
        let both = Some(vec!["other".to_owned(), OWNERSHIP_FINALIZER.to_owned()]);
        let other = Some(vec!["other".to_owned()]);
        assert_eq!(wanted(&root("Server", OWNED), false), both);
        assert_eq!(wanted(&root("Proxy", OWNED), false), both);
        assert_eq!(wanted(&root("'Off'", OWNED), false), None);
        assert_eq!(wanted(&kept(root("Server", OWNED), false), true), None);
        for table in [OWNED, MOVING] {
            assert_eq!(wanted(&kept(root("Server", table), true), true), None, "{table}");
        }
        assert_eq!(wanted(&kept(root("Server", HANDED_BACK), true), false), None, "its fence first");
        assert_eq!(wanted(&kept(root("Server", HANDED_BACK), true), true), other);
        let nobody = "{epoch: 3, slots: {'1': r-1-normal}}";
        assert_eq!(wanted(&kept(root("Server", nobody), true), true), other, "no pod is left");
        assert_eq!(wanted(&kept(root("Proxy", OWNED), true), false), None);
        assert_eq!(wanted(&kept(root("Proxy", HANDED_BACK), true), false), other, "no fence in the API server");
        assert_eq!(wanted(&kept(root("'Off'", OWNED), false), false), other);
        assert_eq!(wanted(&kept(root("'Off'", OWNED), true), false), other);
    }

    #[test]
    fn an_annotation_lets_a_root_go_without_a_handback() {
        let mut root = kept(root("Server", OWNED), true);
        assert!(!may_lose_fence(&root));
        root.metadata.annotations = Some([(annotation::SKIP_HANDBACK.to_owned(), "true".to_owned())].into());
        assert!(may_lose_fence(&root) && wanted(&root, false).is_none());
        assert_eq!(wanted(&root, true), Some(vec!["other".to_owned()]));
    }
}

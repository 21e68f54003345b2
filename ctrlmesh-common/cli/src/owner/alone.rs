//! Says which shards that stand alone see an object: shards by hand, and those of a root that is switched off.
//!
//! Pure. No table divides for them: each sees what the selectors of its limits match.

use ctrlmesh_common::api::{Limit, ShardingConfig};
use ctrlmesh_common::resource::ResourceMatch;
use ctrlmesh_common::selector::Selector;
use ctrlmesh_manager::rules::shard::is_made_by;
use kube::ResourceExt as _;
use serde::Serialize;

use super::object::Object;
use crate::status::shards::{LimitOverview, PodOverview, pods};

/// What one shard says of an object whose resource it limits.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LoneShard {
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// The root that made it, and is switched off. Absent: it is a shard by hand.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) root: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) epoch: Option<i64>,
    /// Whether every limit on the resource selects the object by its labels.
    pub(crate) selected: bool,
    /// The limits on the resource.
    pub(crate) limits: Vec<LimitOverview>,
    pub(crate) pods: Vec<PodOverview>,
}

/// The shards among `configs` that stand alone, and limit the resource of the object.
pub(crate) fn shards(object: &Object, configs: &[ShardingConfig]) -> Vec<LoneShard> {
    let roots: Vec<&ShardingConfig> = configs.iter().filter(|config| config.spec.root.is_some()).collect();
    let of = |shard: &ShardingConfig| {
        let root = roots.iter().find(|root| is_made_by(root, shard));
        let rule = root.and_then(|root| root.spec.root.as_ref());
        if rule.is_some_and(|rule| rule.disable != Some(true)) {
            return None;
        }
        LoneShard::of(shard, root.map(|root| root.name_any()), object)
    };
    configs.iter().filter(|config| config.spec.root.is_none()).filter_map(of).collect()
}

impl LoneShard {
    /// `None`: it does not limit the resource, and so sees all of it.
    fn of(shard: &ShardingConfig, root: Option<String>, object: &Object) -> Option<Self> {
        let limits: Vec<&Limit> = shard.spec.limits.iter().filter(|limit| covers(limit, object)).collect();
        if limits.is_empty() {
            return None;
        }
        let epoch = shard.status.as_ref().and_then(|status| status.epoch);
        Some(Self {
            namespace: shard.namespace().unwrap_or_default(),
            name: shard.name_any(),
            root,
            epoch,
            selected: limits.iter().all(|limit| selects(limit, object)),
            limits: limits.into_iter().map(LimitOverview::of).collect(),
            pods: pods(shard, epoch),
        })
    }
}

fn covers(limit: &Limit, object: &Object) -> bool {
    let mut resources = limit.resources().iter().map(ResourceMatch::from);
    limit.resources().is_empty() || resources.any(|one| one.covers(&object.group, &object.resource))
}

fn selects(limit: &Limit, object: &Object) -> bool {
    let selector = limit.objects().map(Selector::try_from);
    selector.is_some_and(|selector| selector.is_ok_and(|selector| selector.matches(&object.labels)))
}

#[cfg(test)]
mod tests;

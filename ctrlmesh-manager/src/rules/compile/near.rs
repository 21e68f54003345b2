//! Finds ShardingConfigs and pods by their namespace: an operator has to do with no other.
//!
//! Without it, each root would look at the whole cluster.

use std::collections::BTreeMap;

use ctrlmesh_common::api::ShardingConfig;

use super::World;
use crate::rules::object_name::namespace;
use crate::rules::pod::Member;
use crate::rules::shared::each;

/// What is in each namespace.
#[derive(Debug, Default)]
pub(super) struct Near<'a>(BTreeMap<&'a str, Namespace<'a>>);

/// What is in a namespace.
#[derive(Debug, Default)]
pub(super) struct Namespace<'a> {
    pub(super) configs: Vec<&'a ShardingConfig>,
    pub(super) enrolled: Vec<&'a Member>,
    /// Pods that are not enrolled; none where it is not known of all.
    pub(super) unenrolled: Option<Vec<&'a Member>>,
}

static NOTHING: Namespace<'static> = Namespace { configs: Vec::new(), enrolled: Vec::new(), unenrolled: None };

impl<'a> Near<'a> {
    pub(super) fn of(world: World<'a>) -> Self {
        let mut this = Self::default();
        for config in world.configs {
            this.0.entry(namespace(&config.metadata)).or_default().configs.push(config);
        }
        for (name, pods) in world.unenrolled {
            this.0.entry(name).or_default().unenrolled = Some(each(pods).collect());
        }
        for pod in world.members {
            let near = this.0.entry(&pod.name.namespace).or_default();
            if pod.enrolled() {
                near.enrolled.push(pod);
            } else if let Some(unenrolled) = &mut near.unenrolled {
                unenrolled.push(pod);
            }
        }
        this
    }

    pub(super) fn to(&self, config: &ShardingConfig) -> &Namespace<'a> {
        self.0.get(namespace(&config.metadata)).unwrap_or(&NOTHING)
    }
}

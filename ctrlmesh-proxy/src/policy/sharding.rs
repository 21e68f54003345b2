//! Derives the policy of a pod or shard from `ShardingConfigs` in a file.

use ctrlmesh_common::api::{self, ReadError, ShardingConfig};
use ctrlmesh_common::names::label;
use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::selector::{Labels, RequirementError, Selector};
use ctrlmesh_common::share::{self, ShareError};

use super::{PodLabel, PodName};

/// `ShardingConfigs` from which no policy follows.
#[derive(Debug, thiserror::Error)]
pub enum ShardingError {
    /// The file cannot be read.
    #[error("read the ShardingConfigs")]
    Read(#[from] ReadError),
    /// No `ShardingConfig` selects the pod.
    #[error("no ShardingConfig of namespace {namespace:?} selects the pod {pod:?} by the labels that are known of it")]
    None {
        /// The pod's namespace.
        namespace: String,
        /// The pod's name.
        pod: String,
    },
    /// More than one selects it.
    #[error("two ShardingConfigs select the pod: {one:?} and {other:?}")]
    Several {
        /// The first.
        one: String,
        /// The second.
        other: String,
    },
    /// No `ShardingConfig` has the name, or there are several and none is named.
    #[error("which shard: --shard must name one of those in the file ({known})")]
    Which {
        /// Their names.
        known: String,
    },
    /// The file holds no shard.
    #[error(
        "the file holds no ShardingConfig that limits anything; of a root, take the shards that the manager made of it"
    )]
    NoShard,
    /// The selector of a `ShardingConfig` is malformed.
    #[error("ShardingConfig {name:?}: spec.selector")]
    Selector {
        /// The `ShardingConfig`.
        name: String,
        /// What is wrong.
        source: RequirementError,
    },
    /// A limit of the `ShardingConfig` is wrong, or there is none.
    #[error("ShardingConfig {name:?}")]
    Limit {
        /// The `ShardingConfig`.
        name: String,
        /// What is wrong.
        source: ShareError,
    },
}

/// The policy of `pod`, from the text of a file.
pub(super) fn policy(text: &str, pod: &PodName, labels: &[PodLabel]) -> Result<Policy, ShardingError> {
    let configs = api::read_sharding_configs(text)?;
    let labels = known(pod, labels);
    let mut chosen: Option<&ShardingConfig> = None;
    for config in configs.iter().filter(|config| config.metadata.namespace.as_deref() == Some(&pod.namespace)) {
        if selects(config, &labels)? {
            if let Some(one) = chosen {
                return Err(ShardingError::Several { one: name(one), other: name(config) });
            }
            chosen = Some(config);
        }
    }
    let none = || ShardingError::None { namespace: pod.namespace.clone(), pod: pod.name.clone() };
    compiled(chosen.ok_or_else(none)?, &pod.namespace)
}

/// The policy of the shard with this name, or of the only one, from the text of a file.
pub(super) fn shard(text: &str, wanted: Option<&str>, namespace: &str) -> Result<Policy, ShardingError> {
    let configs = api::read_sharding_configs(text)?;
    let shards: Vec<_> = configs.iter().filter(|config| config.spec.root.is_none()).collect();
    let mut matching = shards.iter().filter(|config| wanted.is_none_or(|it| it == name(config)));
    let config = match (matching.next(), matching.next()) {
        _ if shards.is_empty() => return Err(ShardingError::NoShard),
        (Some(config), None) => config,
        _ => {
            let known: Vec<String> = shards.iter().map(|config| name(config)).collect();
            return Err(ShardingError::Which { known: known.join(", ") });
        }
    };
    compiled(config, config.metadata.namespace.as_deref().unwrap_or(namespace))
}

/// The given labels, and the pod's name in a StatefulSet.
fn known(pod: &PodName, labels: &[PodLabel]) -> Labels {
    let given = labels.iter().map(|label| (label.key.clone(), label.value.clone()));
    let mut known: Labels = given.collect();
    known.entry(label::STATEFULSET_POD_NAME.to_owned()).or_insert_with(|| pod.name.clone());
    known
}

/// Whether a `ShardingConfig` is the pod's; a root is nobody's.
fn selects(config: &ShardingConfig, labels: &Labels) -> Result<bool, ShardingError> {
    let Some(selector) = config.spec.selector.as_ref().filter(|_| config.spec.root.is_none()) else {
        return Ok(false);
    };
    let selector =
        Selector::try_from(selector).map_err(|source| ShardingError::Selector { name: name(config), source })?;
    Ok(!selector.is_empty() && selector.matches(labels))
}

fn compiled(config: &ShardingConfig, namespace: &str) -> Result<Policy, ShardingError> {
    let policy =
        share::policy(config, namespace).map_err(|source| ShardingError::Limit { name: name(config), source })?;
    let status = config.status.as_ref().and_then(|status| status.epoch);
    let epoch = status.or(config.metadata.generation).and_then(|epoch| u64::try_from(epoch).ok());
    Ok(Policy { epoch: epoch.unwrap_or_default(), ..policy })
}

fn name(config: &ShardingConfig) -> String {
    config.metadata.name.clone().unwrap_or_default()
}

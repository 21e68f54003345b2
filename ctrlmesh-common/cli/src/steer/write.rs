//! Writes how a root divides, and waits until all is with its owner.

use std::time::Duration;

use ctrlmesh_common::api::ShardingConfig;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Error};
use serde_json::{Value, json};
use tokio::time::{self, Instant};

use super::error::{SteerError, names};

/// Who has written it, as `managedFields` shows it.
pub(super) const FIELD_MANAGER: &str = "ctrlmesh-steer";

/// Between two looks at the status of a root.
const PERIOD: Duration = Duration::from_millis(250);

/// Conditions that say that each share is with its owner, and that each proxy has its policy.
const AWAITED: [&str; 2] = ["Settled", "Programmed"];

/// HTTP status of a request that the user has no right to.
const FORBIDDEN: u16 = 403;

/// HTTP status of a write whose resource version is not the newest.
const CONFLICT: u16 = 409;

/// Writes the merge patch into the root as it was read. With `dry_run`, the API server checks it and writes nothing.
///
/// # Errors
/// It is refused, or somebody has changed the root since.
pub(super) async fn write(
    client: &Client,
    root: &ShardingConfig,
    patch: &Value,
    dry_run: bool,
) -> Result<ShardingConfig, SteerError> {
    let (namespace, name) = names(root);
    let params = PatchParams { dry_run, field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
    let api: Api<ShardingConfig> = Api::namespaced(client.clone(), &namespace);
    let (mut patch, mut version) = (patch.clone(), root.metadata.resource_version.clone());
    loop {
        patch["metadata"] = json!({"resourceVersion": version});
        let source = match api.patch(&name, &params, &Patch::Merge(&patch)).await {
            Ok(written) => return Ok(written),
            Err(Error::Api(status)) if status.code == CONFLICT => match api.get(&name).await {
                // Only times in its status are newer.
                Ok(now) if decides_as(&now, root) && now.metadata.resource_version != version => {
                    version = now.metadata.resource_version;
                    continue;
                }
                Ok(_) => return Err(SteerError::Changed { namespace, name }),
                Err(source) => source,
            },
            Err(source) => source,
        };
        let is_forbidden = matches!(&source, Error::Api(status) if status.code == FORBIDDEN);
        let source = Box::new(source);
        return Err(if is_forbidden {
            SteerError::Forbidden { namespace, name, source }
        } else {
            SteerError::Write { namespace, name, source }
        });
    }
}

/// Whether what was decided for one holds for the other.
fn decides_as(now: &ShardingConfig, before: &ShardingConfig) -> bool {
    let status = |root: &ShardingConfig| root.status.clone().map(|status| (status.ownership, status.rollout));
    now.metadata.generation == before.metadata.generation
        && now.metadata.uid == before.metadata.uid
        && status(now) == status(before)
}

/// Waits until the manager has divided what was written, and every share is with its owner.
///
/// # Errors
/// That is not so at the `end`.
pub(super) async fn settled(client: &Client, written: &ShardingConfig, end: Instant) -> Result<(), SteerError> {
    let (namespace, name) = names(written);
    let api: Api<ShardingConfig> = Api::namespaced(client.clone(), &namespace);
    let begun = Instant::now();
    loop {
        // The API server may be away for a while.
        let message = match api.get(&name).await {
            Ok(root) => match unsettled(&root, written.metadata.generation) {
                None => return Ok(()),
                Some(message) => message,
            },
            Err(error) => error.to_string(),
        };
        if Instant::now() >= end {
            return Err(SteerError::NotSettled { namespace, name, seconds: begun.elapsed().as_secs(), message });
        }
        time::sleep(PERIOD).await;
    }
}

/// What the root waits for. `None`: nothing of this generation, or of a newer one.
fn unsettled(root: &ShardingConfig, generation: Option<i64>) -> Option<String> {
    let status = root.status.as_ref();
    if status.and_then(|status| status.observed_generation) < generation {
        return Some("no manager has read it yet".to_owned());
    }
    let conditions: Vec<_> = status.into_iter().flat_map(|status| &status.conditions).collect();
    let mut missing = AWAITED.into_iter().filter_map(|kind| match conditions.iter().find(|one| one.type_ == kind) {
        None => Some(format!("there is no condition {kind} yet")),
        Some(one) if one.status == "True" && one.observed_generation >= generation => None,
        Some(one) => Some(one.message.clone()),
    });
    missing.next()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(generation: i64, status: &str) -> ShardingConfig {
        let condition = |kind: &str| {
            json!({"type": kind, "status": status, "reason": "r", "message": format!("{kind}: no"),
            "observedGeneration": generation, "lastTransitionTime": "2026-01-01T00:00:00Z"})
        };
        let root = json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
            "metadata": {"name": "web"}, "spec": {},
            "status": {"observedGeneration": generation, "conditions": AWAITED.map(condition)}});
        serde_json::from_value(root).unwrap()
    }

    #[test]
    fn a_status_of_an_older_generation_does_not_count() {
        assert_eq!(unsettled(&root(2, "True"), Some(3)).as_deref(), Some("no manager has read it yet"));
        assert_eq!(unsettled(&root(3, "True"), Some(3)), None);
        assert_eq!(unsettled(&root(4, "True"), Some(3)), None);
    }

    #[test]
    fn what_the_root_waits_for_is_named() {
        assert_eq!(unsettled(&root(3, "False"), Some(3)).as_deref(), Some("Settled: no"));
    }
}

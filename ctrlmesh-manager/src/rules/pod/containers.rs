//! Reads what a pod's status says of its containers.

use ctrlmesh_common::names::sidecar;
use k8s_openapi::api::core::v1;

/// Those of the proxy's own container do not count.
pub(super) fn restarts(status: &v1::PodStatus) -> u32 {
    let containers = status.container_statuses.iter().flatten().filter(|one| one.name != sidecar::CONTAINER);
    containers.map(|one| u32::try_from(one.restart_count).unwrap_or_default()).fold(0, u32::saturating_add)
}

/// The phase alone does not count: of a lost node, a controller sets it while the containers may still run. A pod that
/// is being deleted is not started again, so there the end of all containers counts.
pub(super) fn has_stopped(status: &v1::PodStatus, is_deleted: bool) -> bool {
    let ended = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
    let all = [&status.init_container_statuses, &status.container_statuses, &status.ephemeral_container_statuses];
    let containers: Vec<_> =
        all.into_iter().flatten().flatten().map(|container| container.state.clone().unwrap_or_default()).collect();
    let runs = containers.iter().any(|state| state.running.is_some());
    let terminated = !containers.is_empty() && containers.iter().all(|state| state.terminated.is_some());
    !runs && (ended || is_deleted && terminated)
}

/// ID of the sidecar's container, without the runtime's prefix.
pub(super) fn sidecar_id(status: &v1::PodStatus) -> Option<String> {
    let mut statuses = status.init_container_statuses.iter().flatten();
    container_id(statuses.find(|container| container.name == sidecar::CONTAINER)?)
}

/// IDs of the others, as the kubelet has said last.
pub(super) fn container_ids(status: &v1::PodStatus) -> Vec<String> {
    let containers = status.container_statuses.iter().flatten().filter(|one| one.name != sidecar::CONTAINER);
    containers.filter_map(container_id).collect()
}

/// Without the runtime's prefix.
fn container_id(status: &v1::ContainerStatus) -> Option<String> {
    let (_, id) = status.container_id.as_deref()?.split_once("://")?;
    Some(id.to_owned())
}

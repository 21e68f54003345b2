//! Says which images the pods of one part of ctrlmesh run.
//!
//! Pure.

use std::collections::BTreeMap;

use ctrlmesh_common::names::{label, sidecar};
use k8s_openapi::api::core::v1::{Container, Pod};
use serde::Serialize;

use super::image;

/// Labels of the managers' pods.
pub(crate) const MANAGERS: &str = "app.kubernetes.io/name=ctrlmesh-manager";

/// Labels of the node proxies' pods.
pub(crate) const NODE_PROXIES: &str = "app.kubernetes.io/name=ctrlmesh-node";

/// The manager's container.
pub(crate) const MANAGER: &str = "manager";

/// The node proxy's container.
pub(crate) const NODE_PROXY: &str = "proxy";

/// The sidecar's container.
pub(crate) const SIDECAR: &str = sidecar::CONTAINER;

/// Pods that run the same image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Part {
    pub(crate) image: String,
    /// The image's tag. Absent: the image has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) version: Option<String>,
    /// How many pods run it.
    pub(crate) pods: usize,
}

/// The labels of enrolled pods.
pub(crate) fn enrolled() -> String {
    format!("{}=true", label::ENABLE_PROXY)
}

/// The images of the containers with this name, by the image.
pub(crate) fn parts<'a>(pods: impl IntoIterator<Item = &'a Pod>, container: &str) -> Vec<Part> {
    let mut images: BTreeMap<&str, usize> = BTreeMap::new();
    for image in pods.into_iter().filter_map(|pod| image_of(pod, container)) {
        *images.entry(image).or_default() += 1;
    }
    let part = |(image, pods): (&str, usize)| Part {
        image: image.to_owned(),
        version: image::tag(image).map(str::to_owned),
        pods,
    };
    images.into_iter().map(part).collect()
}

/// The image of a pod's container with this name. `None`: it has none, or the pod has ended.
pub(crate) fn image_of<'a>(pod: &'a Pod, container: &str) -> Option<&'a str> {
    if has_ended(pod) {
        return None;
    }
    let named = |one: &&'a Container| one.name == container;
    containers(pod).find(named)?.image.as_deref()
}

/// Whether a pod says that it is ready.
pub(crate) fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|one| one.type_ == "Ready" && one.status == "True")
}

/// Whether all containers of a pod have ended for good.
pub(crate) fn has_ended(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// All containers; a native sidecar is an init container.
fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    let spec = pod.spec.iter();
    spec.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn pods_are_counted_by_the_image_of_one_container() {
        let pod = |image: &str, phase: &str| -> Pod {
            let spec = json!({"containers": [{"name": "operator", "image": "other:1"}],
                "initContainers": [{"name": "ctrlmesh-proxy", "image": image}]});
            serde_json::from_value(json!({"metadata": {}, "spec": spec, "status": {"phase": phase}})).unwrap()
        };
        let pods = [pod("p:2", "Running"), pod("p:1", "Running"), pod("p:2", "Pending"), pod("p:3", "Failed")];
        let part = |image: &str, version: &str, pods| Part {
            image: image.to_owned(),
            version: Some(version.to_owned()),
            pods,
        };
        assert_eq!(parts(&pods, SIDECAR), [part("p:1", "1", 1), part("p:2", "2", 2)]);
        assert_eq!(parts(&pods, "nobody"), []);
    }
}

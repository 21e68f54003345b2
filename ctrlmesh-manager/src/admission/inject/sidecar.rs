//! Adds the proxy to a pod as a native sidecar.

use std::collections::BTreeMap;

use ctrlmesh_common::names::{FIRST_PROCESS_VARIABLE, TOKEN_AUDIENCE, TRACE_SOCKET_VARIABLE, port, root_ca, sidecar};
use ctrlmesh_runtime::traces::{ENDPOINT_VARIABLE, RATIO_VARIABLE};
use k8s_openapi::api::core::v1::{
    Capabilities, ConfigMapProjection, Container, ContainerPort, EmptyDirVolumeSource, EnvVar, EnvVarSource,
    HTTPGetAction, KeyToPath, ObjectFieldSelector, PodSpec, Probe, ProjectedVolumeSource, ResourceFieldSelector,
    ResourceRequirements, SeccompProfile, SecurityContext, ServiceAccountTokenProjection, Volume, VolumeMount,
    VolumeProjection,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::{CONTAINER, Interception, Refusal, SidecarSettings, containers};

/// The volume with the proxy's token and CAs.
pub(super) const VOLUME: &str = sidecar::VOLUME;

/// The volume with the proxy's last policy.
const STATE: &str = "ctrlmesh-state";

const FOLDER: &str = "/var/run/ctrlmesh";

const STATE_FOLDER: &str = "/var/lib/ctrlmesh";

/// User and group of the proxy. No image has it for its own, so that no other container of the pod has it, either: that
/// of distroless images is 65532.
const USER: i64 = 54_410;

/// Lifetime of the token for the manager. The kubelet renews it.
const TOKEN_SECONDS: i64 = 3600;

/// How long the proxy may take to be ready. Without the manager, it starts from its last policy.
const START_SECONDS: i32 = 120;

/// A container like the proxy's is ours only where a proxy is `wanted`, because it is replaced there.
///
/// # Errors
/// Where a part of the pod has a name that the proxy needs, or could read what is the proxy's alone.
pub(super) fn check(spec: &PodSpec, wanted: bool) -> Result<(), Refusal> {
    for (field, shared) in [("shareProcessNamespace", spec.share_process_namespace), ("hostPID", spec.host_pid)] {
        if wanted && shared == Some(true) {
            return Err(Refusal::ProcessNamespace { field });
        }
    }
    if spec.containers.iter().any(|container| container.name == CONTAINER) {
        return Err(Refusal::Container { field: "containers" });
    }
    let mut init = spec.init_containers.iter().flatten();
    let is_taken = |container: &Container| container.name == CONTAINER && !(wanted && is_ours(container));
    if init.any(is_taken) {
        return Err(Refusal::Container { field: "initContainers" });
    }
    let ours = [knowledge(), state()];
    let mut taken = spec
        .volumes
        .iter()
        .flatten()
        .filter(|volume| ours.iter().any(|ours| ours.name == volume.name && ours != *volume));
    if let Some(volume) = taken.next() {
        return Err(Refusal::Volume { name: volume.name.clone() });
    }
    for container in containers(spec).filter(|container| container.name != CONTAINER) {
        check_mounts(&container.name, container.volume_mounts.as_deref())?;
    }
    Ok(())
}

/// # Errors
/// Where an ephemeral container could read what is the proxy's alone. The pod's own containers were checked when it was
/// created.
pub(super) fn check_ephemeral(spec: &PodSpec) -> Result<(), Refusal> {
    for container in spec.ephemeral_containers.iter().flatten() {
        if container.target_container_name.as_deref() == Some(CONTAINER) {
            return Err(Refusal::Target { container: container.name.clone() });
        }
        check_mounts(&container.name, container.volume_mounts.as_deref())?;
    }
    Ok(())
}

fn check_mounts(container: &str, mounts: Option<&[VolumeMount]>) -> Result<(), Refusal> {
    let mut mounts = mounts.into_iter().flatten();
    match mounts.find(|mount| [VOLUME, STATE].contains(&mount.name.as_str())) {
        Some(mount) => Err(Refusal::Mount { container: container.to_owned(), name: mount.name.clone() }),
        None => Ok(()),
    }
}

/// Whether [`add`] added it, perhaps in another version of the manager.
fn is_ours(container: &Container) -> bool {
    let mut mounts = container.volume_mounts.iter().flatten();
    container.restart_policy.as_deref() == Some("Always")
        && container.args.iter().flatten().next().is_some_and(|first| first == "sidecar")
        && mounts.any(|mount| mount.name == VOLUME && mount.mount_path == FOLDER)
}

/// Adds the proxy as the first init container, or replaces it.
pub(super) fn add(
    spec: &mut PodSpec,
    settings: &SidecarSettings,
    resources: Option<ResourceRequirements>,
    interception: Interception,
) {
    let proxy = container(settings, resources.unwrap_or_else(default_resources), interception);
    let containers = spec.init_containers.get_or_insert_default();
    containers.retain(|container| container.name != CONTAINER);
    containers.insert(0, proxy);
    let volumes = spec.volumes.get_or_insert_default();
    for volume in [knowledge(), state()] {
        // An existing one is equal.
        if !volumes.contains(&volume) {
            volumes.push(volume);
        }
    }
}

fn container(settings: &SidecarSettings, resources: ResourceRequirements, interception: Interception) -> Container {
    let mut listen = format!("127.0.0.1:{}", port::PROXY_API);
    if interception == Interception::Env {
        // Some clients ignore the variables and dial the Service's name.
        listen.push_str(",127.0.0.1:443");
    }
    let mut args = vec![
        "sidecar".to_owned(),
        format!("--listen={listen}"),
        format!("--manager={}", settings.manager),
        format!("--manager-ca={FOLDER}/{}", root_ca::MANAGER_KEY),
        format!("--token={FOLDER}/token"),
        "--pod=$(POD_NAMESPACE)/$(POD_NAME)".to_owned(),
        format!("--state-dir={STATE_FOLDER}"),
        format!("--upstream-ca={FOLDER}/cluster-ca.crt"),
    ];
    if interception == Interception::Ebpf {
        // The node's proxy has the kernel redirect connections to this port.
        args.push(format!("{}={}", sidecar::REDIRECTED, port::PROXY_REDIRECTED));
    }
    let mount = |name: &str, path: &str, read_only: bool| VolumeMount {
        name: name.to_owned(),
        mount_path: path.to_owned(),
        read_only: read_only.then_some(true),
        ..VolumeMount::default()
    };
    Container {
        name: CONTAINER.to_owned(),
        image: Some(settings.image.clone()),
        image_pull_policy: Some(settings.pull_policy.clone()),
        args: Some(args),
        env: Some(environment(settings, &resources)),
        ports: Some(vec![ContainerPort {
            name: Some("ctrlmesh-admin".to_owned()),
            container_port: port::PROXY_ADMIN.into(),
            protocol: Some("TCP".to_owned()),
            ..ContainerPort::default()
        }]),
        // Makes it a sidecar: later containers start when its startup probe has succeeded.
        restart_policy: Some("Always".to_owned()),
        startup_probe: Some(probe("/readyz", 1, START_SECONDS)),
        readiness_probe: Some(probe("/readyz", 5, 3)),
        // Restarts a proxy that hangs. Its liveness does not depend on the manager.
        liveness_probe: Some(probe("/livez", 10, 6)),
        resources: Some(resources),
        security_context: Some(unprivileged()),
        volume_mounts: Some(vec![mount(VOLUME, FOLDER, true), mount(STATE, STATE_FOLDER, false)]),
        ..Container::default()
    }
}

/// The proxy's variables: its pod, how much memory it may use, where it shows its requests, that no other process of
/// the container serves, and where its spans go.
fn environment(settings: &SidecarSettings, resources: &ResourceRequirements) -> Vec<EnvVar> {
    let own = [of_pod("POD_NAME", "metadata.name"), of_pod("POD_NAMESPACE", "metadata.namespace")];
    let limit = resources.limits.as_ref().and_then(|limits| limits.get("memory"));
    let memory = limit.map(|_limit| EnvVar {
        name: "CTRLMESH_PROXY_MEMORY_LIMIT".to_owned(),
        value_from: Some(EnvVarSource {
            resource_field_ref: Some(ResourceFieldSelector {
                resource: "limits.memory".to_owned(),
                // As the API server defaults it, so that a second review finds no difference.
                divisor: Some(Quantity("1".to_owned())),
                container_name: None,
            }),
            ..EnvVarSource::default()
        }),
        ..EnvVar::default()
    });
    let text = |name: &str, value: String| EnvVar { name: name.to_owned(), value: Some(value), value_from: None };
    let traces = settings.traces.as_ref().map(|(collector, ratio)| {
        [text(ENDPOINT_VARIABLE, collector.to_string()), text(RATIO_VARIABLE, ratio.to_string())]
    });
    let socket = text(TRACE_SOCKET_VARIABLE, format!("{STATE_FOLDER}/trace"));
    let first = text(FIRST_PROCESS_VARIABLE, "true".to_owned());
    own.into_iter().chain(memory).chain([socket, first]).chain(traces.into_iter().flatten()).collect()
}

/// `period` is in seconds.
fn probe(page: &str, period: i32, failures: i32) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(page.to_owned()),
            port: IntOrString::Int(port::PROXY_ADMIN.into()),
            scheme: Some("HTTP".to_owned()),
            ..HTTPGetAction::default()
        }),
        period_seconds: Some(period),
        failure_threshold: Some(failures),
        timeout_seconds: Some(period.min(5)),
        success_threshold: Some(1),
        ..Probe::default()
    }
}

fn unprivileged() -> SecurityContext {
    SecurityContext {
        allow_privilege_escalation: Some(false),
        capabilities: Some(Capabilities { drop: Some(vec!["ALL".to_owned()]), add: None }),
        privileged: Some(false),
        read_only_root_filesystem: Some(true),
        run_as_non_root: Some(true),
        run_as_user: Some(USER),
        run_as_group: Some(USER),
        seccomp_profile: Some(SeccompProfile { type_: "RuntimeDefault".to_owned(), localhost_profile: None }),
        ..SecurityContext::default()
    }
}

/// For the proxy of one operator, with room for bursts.
fn default_resources() -> ResourceRequirements {
    let quantities = |pairs: &[(&str, &str)]| {
        let pairs = pairs.iter().map(|(name, value)| ((*name).to_owned(), Quantity((*value).to_owned())));
        Some(pairs.collect::<BTreeMap<_, _>>())
    };
    ResourceRequirements {
        requests: quantities(&[("cpu", "10m"), ("memory", "32Mi")]),
        limits: quantities(&[("memory", "512Mi")]),
        claims: None,
    }
}

fn knowledge() -> Volume {
    let config_map = |name: &str, key: &str, path: &str| VolumeProjection {
        config_map: Some(ConfigMapProjection {
            name: name.to_owned(),
            items: Some(vec![item(key, path)]),
            optional: None,
        }),
        ..VolumeProjection::default()
    };
    let token = VolumeProjection {
        service_account_token: Some(ServiceAccountTokenProjection {
            audience: Some(TOKEN_AUDIENCE.to_owned()),
            expiration_seconds: Some(TOKEN_SECONDS),
            path: "token".to_owned(),
        }),
        ..VolumeProjection::default()
    };
    Volume {
        name: VOLUME.to_owned(),
        projected: Some(ProjectedVolumeSource {
            // Readable by the proxy's user.
            default_mode: Some(0o444),
            sources: Some(vec![
                token,
                config_map(root_ca::CLUSTER, root_ca::KEY, "cluster-ca.crt"),
                config_map(root_ca::MESH, root_ca::MANAGER_KEY, root_ca::MANAGER_KEY),
            ]),
        }),
        ..Volume::default()
    }
}

fn state() -> Volume {
    let size_limit = Some(Quantity("16Mi".to_owned()));
    let empty_dir = Some(EmptyDirVolumeSource { size_limit, ..EmptyDirVolumeSource::default() });
    Volume { name: STATE.to_owned(), empty_dir, ..Volume::default() }
}

pub(super) fn item(key: &str, path: &str) -> KeyToPath {
    KeyToPath { key: key.to_owned(), path: path.to_owned(), mode: None }
}

fn of_pod(name: &str, field: &str) -> EnvVar {
    let field_ref = ObjectFieldSelector { api_version: Some("v1".to_owned()), field_path: field.to_owned() };
    EnvVar {
        name: name.to_owned(),
        value: None,
        value_from: Some(EnvVarSource { field_ref: Some(field_ref), ..EnvVarSource::default() }),
    }
}

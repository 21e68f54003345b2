//! Directs the operator's connections to the sidecar by variables or a kubeconfig, without the kernel.

use ctrlmesh_common::names::{annotation, fake_kubeconfig, label, port};
use k8s_openapi::api::core::v1::{
    DownwardAPIVolumeFile, DownwardAPIVolumeSource, HostAlias, ObjectFieldSelector, Pod, PodSpec, Sysctl, Volume,
    VolumeMount,
};

use super::trust::{self, SERVICE_ACCOUNT};
use super::{Interception, Refusal, operators, set_variable};

const SIDECAR: &str = "127.0.0.1";

/// Names of the API server's Service, for clients that ignore the variables.
const NAMES: [&str; 4] =
    ["kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "kubernetes.default", "kubernetes"];

/// Lets the sidecar listen at port 443 without privilege. Kubernetes counts it as safe.
const UNPRIVILEGED_PORTS: &str = "net.ipv4.ip_unprivileged_port_start";

const VOLUME: &str = "ctrlmesh-kubeconfig";

const FILE: &str = "kubeconfig";

const HTTPS: u16 = 443;

/// With one dash or two.
const ARGUMENT: &str = "kubeconfig";

///
/// # Errors
/// Where a part of the pod is in the way.
pub(super) fn check(spec: &PodSpec, interception: Interception) -> Result<(), Refusal> {
    let ours = volume();
    let mut volumes = spec.volumes.iter().flatten();
    if volumes.any(|volume| volume.name == VOLUME && *volume != ours) {
        return Err(Refusal::Volume { name: VOLUME.to_owned() });
    }
    // The API server adds the token before it calls webhooks.
    if interception == Interception::Kubeconfig && !trust::has_account(spec) {
        return Err(Refusal::NoToken);
    }
    let security = spec.security_context.iter();
    let mut sysctls = security.flat_map(|security| security.sysctls.iter().flatten());
    let ports = sysctls.find(|sysctl| sysctl.name == UNPRIVILEGED_PORTS);
    match ports.filter(|_| interception == Interception::Env) {
        Some(ports) if ports.value.trim().parse().map_or(true, |first: u16| first > HTTPS) => {
            Err(Refusal::Ports { value: ports.value.clone() })
        }
        _ => Ok(()),
    }
}

/// Makes the containers of `pod` dial the sidecar.
pub(super) fn apply(pod: &mut Pod, interception: Interception) {
    let flagged = |key: &str| {
        let labels = pod.metadata.labels.as_ref();
        labels.and_then(|labels| labels.get(key)).is_some_and(|value| value == "true")
    };
    let argument = !flagged(label::DISABLE_FAKE_KUBECONFIG_ARG);
    let variable = !flagged(label::DISABLE_FAKE_KUBECONFIG_ENV);
    let spec = pod.spec.get_or_insert_default();
    match interception {
        Interception::Ebpf => {}
        Interception::Env => by_variables(spec),
        Interception::Kubeconfig => {
            by_kubeconfig(spec, argument, variable);
            let annotations = pod.metadata.annotations.get_or_insert_default();
            annotations.insert(annotation::KUBECONFIG.to_owned(), kubeconfig());
        }
    }
}

fn by_variables(spec: &mut PodSpec) {
    for container in operators(spec) {
        let port = port::PROXY_API.to_string();
        set_variable(container, "KUBERNETES_SERVICE_PORT", &port);
        set_variable(container, "KUBERNETES_SERVICE_HOST", SIDECAR);
    }
    let aliases = spec.host_aliases.get_or_insert_default();
    // The pod's own alias would win over ours.
    for alias in aliases.iter_mut() {
        alias.hostnames.iter_mut().for_each(|names| names.retain(|name| !NAMES.contains(&name.as_str())));
    }
    aliases.retain(|alias| alias.hostnames.as_ref().is_none_or(|names| !names.is_empty()));
    let hostnames = Some(NAMES.map(str::to_owned).into());
    aliases.push(HostAlias { ip: SIDECAR.to_owned(), hostnames });
    let security = spec.security_context.get_or_insert_default();
    let sysctls = security.sysctls.get_or_insert_default();
    if !sysctls.iter().any(|sysctl| sysctl.name == UNPRIVILEGED_PORTS) {
        sysctls.push(Sysctl { name: UNPRIVILEGED_PORTS.to_owned(), value: "0".to_owned() });
    }
}

fn by_kubeconfig(spec: &mut PodSpec, argument: bool, variable: bool) {
    let path = format!("{}/{FILE}", fake_kubeconfig::FOLDER);
    for container in operators(spec) {
        let mounts = container.volume_mounts.get_or_insert_default();
        mounts.retain(|mount| mount.name != VOLUME && mount.mount_path != fake_kubeconfig::FOLDER);
        mounts.push(VolumeMount {
            name: VOLUME.to_owned(),
            mount_path: fake_kubeconfig::FOLDER.to_owned(),
            read_only: Some(true),
            ..VolumeMount::default()
        });
        if variable {
            set_variable(container, "KUBECONFIG", &path);
        }
    }
    if argument {
        by_argument(spec, &format!("--{ARGUMENT}={path}"));
    }
    let (volumes, ours) = (spec.volumes.get_or_insert_default(), volume());
    if !volumes.contains(&ours) {
        volumes.push(ours);
    }
}

/// Replaces every `--kubeconfig` argument by `ours`, and adds it to containers with arguments, init containers
/// excepted.
fn by_argument(spec: &mut PodSpec, ours: &str) {
    for container in &mut spec.containers {
        // Without arguments, the image's own apply; adding one would replace them.
        if let Some(arguments) = container.args.as_mut().filter(|all| !all.is_empty()) {
            arguments.push(ours.to_owned());
        }
    }
    for container in operators(spec) {
        for arguments in [&mut container.command, &mut container.args].into_iter().flatten() {
            let left = without_kubeconfig(arguments);
            if left.len() < arguments.len() {
                *arguments = left;
                arguments.push(ours.to_owned());
            }
        }
    }
}

/// The arguments without `--kubeconfig`, in one word or two.
fn without_kubeconfig(arguments: &[String]) -> Vec<String> {
    let mut left = Vec::new();
    let mut all = arguments.iter();
    while let Some(argument) = all.next() {
        let name = argument.strip_prefix("--").or_else(|| argument.strip_prefix('-'));
        match name.and_then(|name| name.strip_prefix(ARGUMENT)) {
            // The value is the next word.
            Some("") => drop(all.next()),
            Some(value) if value.starts_with('=') => {}
            _ => left.push(argument.clone()),
        }
    }
    left
}

fn volume() -> Volume {
    let field_path = format!("metadata.annotations['{}']", annotation::KUBECONFIG);
    Volume {
        name: VOLUME.to_owned(),
        downward_api: Some(DownwardAPIVolumeSource {
            default_mode: Some(0o444),
            items: Some(vec![DownwardAPIVolumeFile {
                path: FILE.to_owned(),
                field_ref: Some(ObjectFieldSelector { api_version: Some("v1".to_owned()), field_path }),
                ..DownwardAPIVolumeFile::default()
            }]),
        }),
        ..Volume::default()
    }
}

/// Holds no secret: the token is the pod's own file.
fn kubeconfig() -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: ctrlmesh\n\
         contexts: [{{name: ctrlmesh, context: {{cluster: ctrlmesh, user: pod}}}}]\n\
         clusters: [{{name: ctrlmesh, cluster: {{server: \"https://{SIDECAR}:{}\", certificate-authority: {SERVICE_ACCOUNT}/ca.crt}}}}]\n\
         users: [{{name: pod, user: {{tokenFile: {SERVICE_ACCOUNT}/token}}}}]\n",
        port::PROXY_API
    )
}

//! Changes an operator's pod so that it reaches the API server through its proxy only.
//!
//! Pure and idempotent. There is no init container and no privilege. In mode `ebpf` the node's proxy serves the pod,
//! and only its trust changes: volumes with the API server's CA get the mesh's instead. In the modes `env` and
//! `kubeconfig`, or on request, it also gets a sidecar. That is its first init container, so that all others start
//! behind it.
//!
//! A pod that visibly gets the API server's CA in another way is refused. The content of Secrets and other `ConfigMaps`
//! is unknown here: whoever puts the CA there lets the operator past its shard.

use ctrlmesh_common::names::{self, annotation, label, sidecar as proxy};
use ctrlmesh_runtime::traces::{CollectorUrl, TraceRatio};
use k8s_openapi::api::core::v1::{Container, EnvVar, Pod, PodReadinessGate, PodSpec, ResourceRequirements};
use serde::Deserialize;

mod affinity;
mod capabilities;
mod runtime;
mod sidecar;
mod trust;
mod redirect;

/// No other container of the pod may have this name.
pub const CONTAINER: &str = proxy::CONTAINER;

#[derive(Clone, Debug, PartialEq)]
pub struct SidecarSettings {
    pub image: String,
    /// `Always`, `IfNotPresent` or `Never`.
    pub pull_policy: String,
    /// The manager's gRPC, as `HOST:PORT`.
    pub manager: String,
    /// The collector that takes spans, and the share of traces to record. `None`: no spans are made.
    pub traces: Option<(CollectorUrl, TraceRatio)>,
}

/// How an operator's connections reach the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interception {
    /// The kernel redirects connections.
    Ebpf,
    /// The variables `KUBERNETES_SERVICE_*` name the sidecar.
    Env,
    Kubeconfig,
}

#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error(
        "spec.hostNetwork: a pod in its node's network cannot be told from others there, and its proxy would serve them all; remove hostNetwork, or the label {}",
        label::ENABLE_PROXY
    )]
    HostNetwork,
    #[error("metadata.annotations[{}]: {value:?} is none of auto, ebpf, env, kubeconfig", annotation::INTERCEPTION)]
    Interception { value: String },
    #[error(
        "spec.runtimeClassName: the node's kernel does not see connections of pods of runtime class {class:?}, which has another kernel: annotate the pod {}: env or kubeconfig, or auto, which chooses env",
        annotation::INTERCEPTION
    )]
    Runtime { class: String },
    #[error("metadata.annotations[{annotation}]: {source}")]
    Annotation { annotation: &'static str, source: serde_json::Error },
    #[error("metadata.annotations[{}]: the pod has no container {name:?}", annotation::ENV_INJECT)]
    NoContainer { name: String },
    #[error("spec.{field}: {CONTAINER:?} is the name of the proxy's container; rename yours")]
    Container { field: &'static str },
    #[error(
        "spec.{field}: the pod's containers would see the proxy's files, its key and its token among them; remove it, or have the node's proxy serve the pod (interception ebpf, without the annotation {})",
        annotation::SIDECAR
    )]
    ProcessNamespace { field: &'static str },
    #[error("spec.volumes: {name:?} is the name of a volume of the proxy's; rename yours")]
    Volume { name: String },
    #[error(
        "spec.containers[{container:?}].volumeMounts: the volume {name:?} is the proxy's alone: who has its token and the API server's CA needs no proxy; remove the mount"
    )]
    Mount { container: String, name: String },
    #[error(
        "spec.ephemeralContainers[{container:?}].targetContainerName: the proxy's processes have its key and its token; name another container, or run a program in the proxy's by exec"
    )]
    Target { container: String },
    #[error(
        "spec.automountServiceAccountToken: no container has a service account's token and CA at {}, which the kubeconfig of interception kubeconfig names; have it mounted, or use interception ebpf or env",
        trust::SERVICE_ACCOUNT
    )]
    NoToken,
    #[error(
        "spec.os: nothing can stand between a pod on Windows and the API server; remove the label {}",
        label::ENABLE_PROXY
    )]
    Windows,
    #[error(
        "{field}: {what} brings the API server's own CA, with which the operator could get past its proxy; mount the projected token that Kubernetes adds by itself, or annotate the pod {}: \"true\"",
        annotation::FAIL_OPEN
    )]
    RealCa { field: String, what: &'static str },
    #[error(
        "spec.securityContext.sysctls[net.ipv4.ip_unprivileged_port_start]: with {value:?} the proxy, which has no privilege, cannot listen at port 443, as it has to for clients that ignore KUBERNETES_SERVICE_HOST; set at most 443 or remove it, or use another interception than env"
    )]
    Ports { value: String },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Variables {
    name: String,
    env: Vec<Variable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Variable {
    key: String,
    value: String,
}

impl Interception {
    /// What an annotation asks for; `None` is `auto`.
    fn read(value: &str) -> Result<Option<Self>, Refusal> {
        match value {
            "auto" => Ok(None),
            "ebpf" => Ok(Some(Self::Ebpf)),
            "env" => Ok(Some(Self::Env)),
            "kubeconfig" => Ok(Some(Self::Kubeconfig)),
            _ => Err(Refusal::Interception { value: value.to_owned() }),
        }
    }
}

/// The pod to admit, with the label of `shard`; without a shard it is enrolled all the same. `handler` is that of its
/// `RuntimeClass`.
///
/// # Errors
/// Where the pod cannot be served, or asks for something impossible.
pub fn inject(
    pod: &Pod,
    shard: Option<&str>,
    settings: &SidecarSettings,
    handler: Option<&str>,
) -> Result<Pod, Refusal> {
    let mut pod = pod.clone();
    let annotated = |key: &str| pod.metadata.annotations.as_ref()?.get(key).cloned();
    let interception = annotated(annotation::INTERCEPTION).map(|value| Interception::read(&value)).transpose()?;
    let fail_open = annotated(annotation::FAIL_OPEN).is_some_and(|value| value == "true");
    let asked = annotated(annotation::SIDECAR).is_some_and(|value| value == "true");
    let resources = annotated(annotation::PROXY_RESOURCE)
        .map(|text| parsed::<ResourceRequirements>(annotation::PROXY_RESOURCE, &text))
        .transpose()?;
    let variables = annotated(annotation::ENV_INJECT)
        .map(|text| parsed::<Vec<Variables>>(annotation::ENV_INJECT, &text))
        .transpose()?;
    let spec = pod.spec.get_or_insert_default();
    if spec.host_network == Some(true) {
        return Err(Refusal::HostNetwork);
    }
    if is_windows(spec) {
        return Err(Refusal::Windows);
    }
    let interception = runtime::interception(interception.flatten(), spec, handler)?;
    let sidecar_wanted = asked || interception != Interception::Ebpf;
    sidecar::check(spec, sidecar_wanted)?;
    redirect::check(spec, interception)?;
    trust::check_names(spec)?;
    if !fail_open {
        trust::check(spec)?;
    }
    for wanted in variables.into_iter().flatten() {
        add_variables(spec, wanted)?;
    }
    trust::apply(spec, fail_open);
    affinity::apply(spec, interception);
    operators(spec).for_each(capabilities::apply);
    if sidecar_wanted {
        sidecar::add(spec, settings, resources, interception);
    }
    if let Some(shard) = shard {
        let labels = pod.metadata.labels.get_or_insert_default();
        labels.insert(label::SHARDING_CONFIG_INJECTED.to_owned(), shard.to_owned());
    }
    redirect::apply(&mut pod, interception);
    let annotations = pod.metadata.annotations.get_or_insert_default();
    annotations.insert(annotation::INJECTED.to_owned(), "true".to_owned());
    Ok(pod)
}

/// Whether the ephemeral containers of a pod that was injected may be there.
///
/// # Errors
/// Where one could read what is the proxy's alone.
pub fn check_ephemeral(pod: &Pod) -> Result<(), Refusal> {
    pod.spec.as_ref().map_or(Ok(()), sidecar::check_ephemeral)
}

/// Keeps the pod from being Ready until its version is promoted. Other readiness gates stay.
pub fn add_readiness_gate(pod: &mut Pod) {
    let gates = pod.spec.get_or_insert_default().readiness_gates.get_or_insert_default();
    if gates.iter().all(|gate| gate.condition_type != names::PROMOTED) {
        gates.push(PodReadinessGate { condition_type: names::PROMOTED.to_owned() });
    }
}

fn parsed<T: for<'de> Deserialize<'de>>(annotation: &'static str, text: &str) -> Result<T, Refusal> {
    serde_json::from_str(text).map_err(|source| Refusal::Annotation { annotation, source })
}

fn add_variables(spec: &mut PodSpec, wanted: Variables) -> Result<(), Refusal> {
    let mut containers = operators(spec);
    let container = containers.find(|container| container.name == wanted.name);
    let container = container.ok_or(Refusal::NoContainer { name: wanted.name })?;
    for Variable { key, value } in wanted.env {
        set_variable(container, &key, &value);
    }
    Ok(())
}

/// All containers, the proxy's included.
fn containers(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    spec.init_containers.iter().flatten().chain(&spec.containers)
}

/// The pod's own containers, init containers included.
fn operators(spec: &mut PodSpec) -> impl Iterator<Item = &mut Container> {
    let init = spec.init_containers.iter_mut().flatten();
    init.filter(|container| container.name != CONTAINER).chain(&mut spec.containers)
}

/// Sets or replaces a variable. A new one comes first, because others may refer to it.
fn set_variable(container: &mut Container, name: &str, value: &str) {
    let variable = EnvVar { name: name.to_owned(), value: Some(value.to_owned()), value_from: None };
    let variables = container.env.get_or_insert_default();
    variables.retain(|one| one.name != name || *one == variable);
    if !variables.contains(&variable) {
        variables.insert(0, variable);
    }
}

fn is_windows(spec: &PodSpec) -> bool {
    let selected = spec.node_selector.as_ref().and_then(|labels| labels.get("kubernetes.io/os"));
    let named = spec.os.as_ref().map(|os| &os.name);
    [selected, named].into_iter().flatten().any(|os| os == "windows")
}

#[cfg(test)]
mod tests;

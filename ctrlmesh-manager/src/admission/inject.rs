//! What has to be in an operator's pod so that it reaches the API server through its proxy only?
//!
//! Pure and idempotent: takes the pod as it is admitted and its shard, gives the pod. There is no init container and no
//! privilege. In mode `ebpf` the node's proxy serves the pod, and only what it trusts is changed: its volumes with the
//! API server's CA hold the mesh's instead. In the modes `env` and `kubeconfig`, or where it asks for one, it also gets
//! a proxy of its own: a native sidecar, the first of its init containers, so that all others start behind it.
//!
//! What would bring the API server's CA in another way, as far as the pod says so, is refused. What a Secret or another
//! ConfigMap holds is not known here: whoever puts that CA there lets the operator past its shard.

use std::str::FromStr;

use ctrlmesh_common::names::{annotation, label, sidecar as proxy};
use k8s_openapi::api::core::v1::{Container, EnvVar, Pod, PodSpec, ResourceRequirements};
use serde::Deserialize;

mod sidecar;
mod trust;
mod redirect;

/// The name of the proxy's container, which no other container of the pod may have.
pub const CONTAINER: &str = proxy::CONTAINER;

/// What the manager knows of the sidecar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The proxy's image.
    pub image: String,
    /// When a node pulls it: `Always`, `IfNotPresent` or `Never`.
    pub pull_policy: String,
    /// Where the manager's gRPC is, as `HOST:PORT`.
    pub manager: String,
}

/// How an operator's connections reach the proxy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Interception {
    /// The kernel redirects them.
    #[default]
    Ebpf,
    /// The variables that Kubernetes tells every pod of the API server name the sidecar.
    Env,
    /// A kubeconfig that names the sidecar.
    Kubeconfig,
}

/// A pod that is not admitted.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// It has no network of its own.
    #[error(
        "spec.hostNetwork: a pod in its node's network cannot be told from others there, and its proxy would serve them all; remove hostNetwork, or the label {}",
        label::ENABLE_PROXY
    )]
    HostNetwork,
    /// It asks for what there is not.
    #[error(
        "metadata.annotations[{}]: {value:?} is none of ebpf, env, kubeconfig",
        annotation::INTERCEPTION
    )]
    Interception {
        /// What it asks for.
        value: String,
    },
    /// An annotation cannot be read.
    #[error("metadata.annotations[{annotation}]: {source}")]
    Annotation {
        /// Which.
        annotation: &'static str,
        /// What is wrong.
        #[source]
        source: serde_json::Error,
    },
    /// An annotation names a container that is not there.
    #[error("metadata.annotations[{}]: the pod has no container {name:?}", annotation::ENV_INJECT)]
    NoContainer {
        /// The name.
        name: String,
    },
    /// A container has the proxy's name.
    #[error("spec.{field}: {CONTAINER:?} is the name of the proxy's container; rename yours")]
    Container {
        /// Among which containers.
        field: &'static str,
    },
    /// A volume has the name of one of the proxy's.
    #[error("spec.volumes: {name:?} is the name of a volume of the proxy's; rename yours")]
    Volume {
        /// The name.
        name: String,
    },
    /// A container mounts what is the proxy's.
    #[error(
        "spec.containers[{container:?}].volumeMounts: the volume {name:?} is the proxy's alone: who has its token and the API server's CA needs no proxy; remove the mount"
    )]
    Mount {
        /// Which.
        container: String,
        /// The volume.
        name: String,
    },
    /// A kubeconfig would name files that are not there.
    #[error(
        "spec.automountServiceAccountToken: no container has a service account's token and CA at {}, which the kubeconfig of interception kubeconfig names; have it mounted, or use interception ebpf or env",
        trust::SERVICE_ACCOUNT
    )]
    NoToken,
    /// It runs on Windows.
    #[error(
        "spec.os: nothing can stand between a pod on Windows and the API server; remove the label {}",
        label::ENABLE_PROXY
    )]
    Windows,
    /// It would trust the API server itself.
    #[error(
        "{field}: {what} brings the API server's own CA, with which the operator could get past its proxy; mount the projected token that Kubernetes adds by itself, or annotate the pod {}: \"true\"",
        annotation::FAIL_OPEN
    )]
    RealCa {
        /// Where in the pod.
        field: String,
        /// What is in it.
        what: &'static str,
    },
    /// The proxy could not listen where it has to.
    #[error(
        "spec.securityContext.sysctls[net.ipv4.ip_unprivileged_port_start]: with {value:?} the proxy, which has no privilege, cannot listen at port 443, as it has to for clients that ignore KUBERNETES_SERVICE_HOST; set at most 443 or remove it, or use another interception than env"
    )]
    Ports {
        /// What is asked for.
        value: String,
    },
}

/// Variables for one container.
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

// === impl Interception ===

impl FromStr for Interception {
    type Err = Refusal;

    fn from_str(value: &str) -> Result<Self, Refusal> {
        match value {
            "ebpf" => Ok(Self::Ebpf),
            "env" => Ok(Self::Env),
            "kubeconfig" => Ok(Self::Kubeconfig),
            _ => Err(Refusal::Interception { value: value.to_owned() }),
        }
    }
}

/// `pod` as it is to be admitted into the shard called `shard`; without one it is enrolled all the same.
///
/// # Errors
/// Where the pod cannot be served, or asks for what cannot be had.
pub fn inject(pod: &Pod, shard: Option<&str>, settings: &Settings) -> Result<Pod, Refusal> {
    let mut pod = pod.clone();
    let annotated = |key: &str| pod.metadata.annotations.as_ref()?.get(key).cloned();
    let interception =
        annotated(annotation::INTERCEPTION).map(|value| value.parse()).transpose()?;
    let interception: Interception = interception.unwrap_or_default();
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

fn parsed<T: for<'de> Deserialize<'de>>(
    annotation: &'static str,
    text: &str,
) -> Result<T, Refusal> {
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

/// All containers, also the proxy's.
fn containers(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    spec.init_containers.iter().flatten().chain(&spec.containers)
}

/// The pod's own containers, those that initialise it included.
fn operators(spec: &mut PodSpec) -> impl Iterator<Item = &mut Container> {
    let init = spec.init_containers.iter_mut().flatten();
    init.filter(|container| container.name != CONTAINER).chain(&mut spec.containers)
}

/// Sets a variable, in the place of the one of this name, if there is one. A new one comes first: others may refer to it.
fn set_variable(container: &mut Container, name: &str, value: &str) {
    let variable =
        EnvVar { name: name.to_owned(), value: Some(value.to_owned()), value_from: None };
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

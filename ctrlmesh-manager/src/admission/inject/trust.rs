//! Replaces the API server's CA in an operator's pod by the mesh's.
//!
//! So the operator cannot verify the API server when it dials past its proxy. A pod that may fail open trusts both.

use std::collections::BTreeSet;

use ctrlmesh_common::names::root_ca;
use k8s_openapi::api::core::v1::{
    ConfigMapProjection, Container, KeyToPath, PodSpec, ProjectedVolumeSource, Volume, VolumeProjection,
};

use super::{Refusal, containers, operators, sidecar};
use crate::rules::pod;

/// Where a service account's token and CA are, in every container.
pub(super) const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Part of the name and signer of the `ClusterTrustBundle` with the API server's CA.
const API_SERVER_SIGNER: &str = "kube-apiserver-serving";

/// The volume that marks a fail-open pod, where no other volume does.
const FAIL_OPEN: &str = "ctrlmesh-fail-open";

///
/// # Errors
/// Where another volume has the name of our marker.
pub(super) fn check_names(spec: &PodSpec) -> Result<(), Refusal> {
    let mut volumes = spec.volumes.iter().flatten();
    let is_taken = volumes.any(|volume| volume.name == FAIL_OPEN && *volume != fail_open_volume());
    if is_taken { Err(Refusal::Volume { name: FAIL_OPEN.to_owned() }) } else { Ok(()) }
}

///
/// # Errors
/// Where a volume or variable visibly brings the API server's CA in another way than its ConfigMap.
pub(super) fn check(spec: &PodSpec) -> Result<(), Refusal> {
    let as_account: BTreeSet<&str> = containers(spec).flat_map(mounted_as_account).collect();
    for volume in spec.volumes.iter().flatten() {
        let as_account = as_account.contains(volume.name.as_str());
        if let Some(what) = brings_real_ca(volume, as_account) {
            let field = format!("spec.volumes[{:?}]", volume.name);
            return Err(Refusal::RealCa { field, what });
        }
    }
    for container in containers(spec) {
        let all = container.env_from.iter().flatten();
        // One key of our own ConfigMap has it, too.
        let mut maps = all.filter_map(|from| from.config_map_ref.as_ref());
        if let Some(map) = maps.find(|map| is_known(&map.name)) {
            let field = format!("spec.containers[{:?}].envFrom", container.name);
            let what = if map.name == root_ca::MESH {
                "the whole ConfigMap ctrlmesh-root-ca"
            } else {
                "the ConfigMap kube-root-ca.crt"
            };
            return Err(Refusal::RealCa { field, what });
        }
    }
    Ok(())
}

/// Whether a container has a service account's token and CA at the usual path.
pub(super) fn has_account(spec: &PodSpec) -> bool {
    containers(spec).flat_map(mounted_as_account).next().is_some()
}

/// Volumes that a container mounts at the service account's path.
fn mounted_as_account(container: &Container) -> impl Iterator<Item = &str> {
    let mounts = container.volume_mounts.iter().flatten();
    let there = mounts.filter(|mount| {
        let path = plain(&mount.mount_path);
        // In most images `/var/run` is a link to `/run`.
        let path = path.strip_prefix("/var").unwrap_or(&path);
        let account = SERVICE_ACCOUNT.strip_prefix("/var").unwrap_or(SERVICE_ACCOUNT);
        matches!(path.strip_prefix(account), Some("" | "/ca.crt"))
    });
    there.map(|mount| mount.name.as_str())
}

/// The path without empty parts and `.`.
fn plain(path: &str) -> String {
    let parts = path.split('/').filter(|part| !matches!(*part, "" | "."));
    parts.fold(String::new(), |path, part| path + "/" + part)
}

/// The part of a volume that brings the API server's CA. `as_account`: it is mounted at the service account's path.
fn brings_real_ca(volume: &Volume, as_account: bool) -> Option<&'static str> {
    let sources = || volume.projected.iter().flat_map(|all| all.sources.iter().flatten());
    if sources().any(is_real_bundle) {
        return Some("this ClusterTrustBundle");
    }
    let secret = volume.secret.is_some() || sources().any(|source| source.secret.is_some());
    if as_account && secret {
        return Some("a Secret in the place of the service account's token");
    }
    let maps = sources().filter_map(|source| source.config_map.as_ref());
    let maps = maps.map(|map| (&map.name, &map.items));
    let maps = volume.config_map.iter().map(|map| (&map.name, &map.items)).chain(maps);
    let mut others = maps.filter(|(name, items)| !is_known(name) && makes_ca(items.as_deref()));
    (as_account && others.next().is_some()).then_some("another ConfigMap in the place of the service account's CA")
}

/// Whether these items include the file with the CA; no items are all keys.
fn makes_ca(items: Option<&[KeyToPath]>) -> bool {
    let items = items.unwrap_or_default();
    items.is_empty() || items.iter().any(|item| item.path == root_ca::KEY)
}

fn is_real_bundle(source: &VolumeProjection) -> bool {
    let Some(bundle) = &source.cluster_trust_bundle else { return false };
    let texts = [&bundle.signer_name, &bundle.name].into_iter().flatten();
    texts.into_iter().any(|text| text.contains(API_SERVER_SIGNER))
}

fn is_known(config_map: &str) -> bool {
    config_map == root_ca::CLUSTER || config_map == root_ca::MESH
}

/// Replaces the API server's CA in every volume and variable by the mesh's, or by both where the pod may fail open.
///
/// Fail-open is read back from there, because anybody who may patch pods can write annotations. A pod without such a
/// volume gets one that nobody mounts.
pub(super) fn apply(spec: &mut PodSpec, fail_open: bool) {
    if let Some(volumes) = spec.volumes.as_mut().filter(|_| !fail_open) {
        volumes.retain(|volume| volume.name != FAIL_OPEN);
    }
    let key = if fail_open { root_ca::FAIL_OPEN_KEY } else { root_ca::KEY };
    for container in operators(spec) {
        let sources = container.env.iter_mut().flatten().filter_map(|one| one.value_from.as_mut());
        for map in sources.filter_map(|source| source.config_map_key_ref.as_mut()) {
            if is_known(&map.name) {
                root_ca::MESH.clone_into(&mut map.name);
                key.clone_into(&mut map.key);
            }
        }
    }
    let ours = |volume: &&mut Volume| volume.name != sidecar::VOLUME;
    for volume in spec.volumes.iter_mut().flatten().filter(ours) {
        let projected = volume.projected.iter_mut();
        let sources = projected.flat_map(|projected| projected.sources.iter_mut().flatten());
        for map in sources.filter_map(|source| source.config_map.as_mut()) {
            trust(&mut map.name, &mut map.items, key);
        }
        if let Some(map) = volume.config_map.as_mut() {
            trust(&mut map.name, &mut map.items, key);
        }
    }
    if fail_open && !pod::trusts_both_cas(spec) {
        spec.volumes.get_or_insert_default().push(fail_open_volume());
    }
}

fn fail_open_volume() -> Volume {
    let map = ConfigMapProjection {
        name: root_ca::MESH.to_owned(),
        items: Some(vec![sidecar::item(root_ca::FAIL_OPEN_KEY, root_ca::KEY)]),
        optional: None,
    };
    let source = VolumeProjection { config_map: Some(map), ..VolumeProjection::default() };
    // As the API server defaults it, so that a second review recognizes it.
    let projected = ProjectedVolumeSource { default_mode: Some(0o644), sources: Some(vec![source]) };
    Volume { name: FAIL_OPEN.to_owned(), projected: Some(projected), ..Volume::default() }
}

/// Replaces a ConfigMap in a volume. Without items a volume has all keys, and ours has too many.
fn trust(name: &mut String, items: &mut Option<Vec<KeyToPath>>, key: &str) {
    if !is_known(name) {
        return;
    }
    root_ca::MESH.clone_into(name);
    let items = items.get_or_insert_default();
    if items.is_empty() {
        items.push(sidecar::item(key, root_ca::KEY));
    }
    for item in items {
        key.clone_into(&mut item.key);
    }
}

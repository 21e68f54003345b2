//! Whom does the operator believe to be the API server?
//!
//! The mesh's CA alone, wherever the pod says that it believes the cluster's: what the operator dials past its proxy does
//! not verify then. Where it may get past, it believes both.

use std::collections::BTreeSet;

use ctrlmesh_common::names::root_ca;
use k8s_openapi::api::core::v1::{Container, KeyToPath, PodSpec, Volume, VolumeProjection};

use super::redirect::SERVICE_ACCOUNT;
use super::{Refusal, containers, operators, sidecar};

/// What the name of the bundle with the API server's CA has in it, and of who signs for it.
const API_SERVER_SIGNER: &str = "kube-apiserver-serving";

/// # Errors
/// Where a volume or a variable brings the API server's CA in another way than its ConfigMap, and says so.
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
        let mut all = container.env_from.iter().flatten();
        let map = all.find(|from| {
            from.config_map_ref.as_ref().is_some_and(|map| map.name == root_ca::CLUSTER)
        });
        if map.is_some() {
            let field = format!("spec.containers[{:?}].envFrom", container.name);
            return Err(Refusal::RealCa { field, what: "the ConfigMap kube-root-ca.crt" });
        }
    }
    Ok(())
}

/// Whether a container has a service account's token and CA where Kubernetes mounts them.
pub(super) fn has_account(spec: &PodSpec) -> bool {
    containers(spec).flat_map(mounted_as_account).next().is_some()
}

/// The volumes that a container has where a service account's CA is.
fn mounted_as_account(container: &Container) -> impl Iterator<Item = &str> {
    let mounts = container.volume_mounts.iter().flatten();
    let there = mounts.filter(|mount| {
        let path = plain(&mount.mount_path);
        // `/var/run` is a link to `/run` in most images.
        let path = path.strip_prefix("/var").unwrap_or(&path);
        let account = SERVICE_ACCOUNT.strip_prefix("/var").unwrap_or(SERVICE_ACCOUNT);
        matches!(path.strip_prefix(account), Some("" | "/ca.crt"))
    });
    there.map(|mount| mount.name.as_str())
}

/// `path` without what names nothing.
fn plain(path: &str) -> String {
    let parts = path.split('/').filter(|part| !matches!(*part, "" | "."));
    parts.fold(String::new(), |path, part| path + "/" + part)
}

/// What in a volume, which may stand where a service account's CA does, is the API server's.
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
    (as_account && others.next().is_some())
        .then_some("another ConfigMap in the place of the service account's CA")
}

/// Whether what is picked of a ConfigMap may be the file with the CA; where nothing is picked, it may.
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

/// Every volume and variable that holds the API server's CA holds the mesh's instead; where the operator may get past
/// its proxy, both.
pub(super) fn apply(spec: &mut PodSpec, fail_open: bool) {
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
}

/// The same for what of a ConfigMap is in a volume. Where nothing is picked, all keys are: of ours that would be too many.
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

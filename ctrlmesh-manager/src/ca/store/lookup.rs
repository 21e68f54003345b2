//! Looks for existing authorities, in the Secret or, if it is gone, in the published trust bundle.

use std::time::{Duration, SystemTime};

use ctrlmesh_common::names::{self, root_ca};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::ListParams;
use kube::{Api, Client};
use tokio::time;
use tracing::{debug, warn};

use super::{Authorities, CaStoreError};
use crate::ca::recovery::{LOOKS_EVERY, LeaseWatch, TrustedAuthorities};

/// As long as a renewal may take: where a read takes longer, its holder cannot renew either.
const LEASE: Duration = Duration::from_secs(2);

pub(super) enum Lookup {
    Secret(Box<Authorities>),
    /// The Secret is gone, and only certificates that pods trust are left.
    Trusted(TrustedAuthorities),
}

/// The authorities of the Secret, once it exists. Where nobody restores it, the certificates that pods trust.
pub(super) async fn look_up(
    client: &Client,
    namespace: &str,
    lease_watch: &mut LeaseWatch,
) -> Result<Lookup, CaStoreError> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
    let (maps, leases) = (Api::namespaced(client.clone(), namespace), Api::namespaced(client.clone(), namespace));
    let mut warned = false;
    loop {
        let secret = secrets.get_opt(names::CA_SECRET).await.map_err(CaStoreError::Secret)?;
        if let Some(secret) = secret {
            return Ok(Lookup::Secret(Box::new(Authorities::read(&secret)?)));
        }
        let trusted = published(&maps).await?;
        if trusted.is_empty() {
            return Ok(Lookup::Trusted(trusted));
        }
        if !warned {
            warn!(
                secret = names::CA_SECRET,
                "the certificate authorities that are believed are gone; waiting for the leader to restore them"
            );
            warned = true;
        }
        // Before the Lease is read, so that a holder that could not reach the API server has renewed it.
        time::sleep(LOOKS_EVERY).await;
        if is_gone(&leases, lease_watch).await? {
            return Ok(Lookup::Trusted(trusted));
        }
    }
}

/// Whether no leader lives that knows the keys.
async fn is_gone(leases: &Api<Lease>, lease_watch: &mut LeaseWatch) -> Result<bool, CaStoreError> {
    let failed = |lease: &str, source| CaStoreError::Lease { lease: lease.to_owned(), source };
    match time::timeout(LEASE, leases.get_opt(&lease_watch.lease)).await {
        Ok(Ok(lease)) => Ok(lease_watch.is_gone(lease.and_then(|lease| lease.metadata.resource_version))),
        Ok(Err(source)) => Err(failed(&lease_watch.lease, source)),
        Err(_elapsed) => {
            debug!(lease = lease_watch.lease, "lease not reached in time");
            Ok(false)
        }
    }
}

/// The published trust bundle. Listed, because reading a ConfigMap by name needs a right that nothing else needs.
async fn published(maps: &Api<ConfigMap>) -> Result<TrustedAuthorities, CaStoreError> {
    let ours = ListParams::default().fields(&format!("metadata.name={}", root_ca::MESH));
    let list = maps.list(&ours).await.map_err(CaStoreError::TrustedAuthorities)?;
    let now = SystemTime::now();
    Ok(list.items.first().map(|map| TrustedAuthorities::of(map, now)).unwrap_or_default())
}

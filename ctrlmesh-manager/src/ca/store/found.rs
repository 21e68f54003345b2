//! Are there authorities already, or will the leader write them again?

use std::time::{Duration, SystemTime};

use ctrlmesh_common::names::{self, root_ca};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::ListParams;
use kube::{Api, Client};
use tokio::time;
use tracing::{debug, warn};

use super::{Authorities, VaultError};
use crate::ca::published::{LOOKS_EVERY, Published, Restorer};

/// How long the Lease may take to be read: as long as to be renewed. Later, its holder could not renew it either.
const LEASE: Duration = Duration::from_secs(2);

/// What there is.
pub(super) enum Found {
    /// The authorities, in the Secret.
    Secret(Box<Authorities>),
    /// Only those that are believed.
    Believed(Published),
}

/// The authorities of the Secret, once it is there; where nobody writes it again, those that are believed.
pub(super) async fn find(
    client: &Client,
    namespace: &str,
    restorer: &mut Restorer,
) -> Result<Found, VaultError> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
    let (maps, leases) =
        (Api::namespaced(client.clone(), namespace), Api::namespaced(client.clone(), namespace));
    let mut said = false;
    loop {
        let secret = secrets.get_opt(names::CA_SECRET).await.map_err(VaultError::Secret)?;
        if let Some(secret) = secret {
            return Ok(Found::Secret(Box::new(Authorities::read(&secret)?)));
        }
        let believed = published(&maps).await?;
        if believed.is_empty() {
            return Ok(Found::Believed(believed));
        }
        if !said {
            warn!(
                secret = names::CA_SECRET,
                "the certificate authorities that are believed are gone; waiting for the leader to restore them"
            );
            said = true;
        }
        // Before the Lease, so that whoever could not reach the API server until now has renewed it.
        time::sleep(LOOKS_EVERY).await;
        if is_gone(&leases, restorer).await? {
            return Ok(Found::Believed(believed));
        }
    }
}

/// Whether nobody leads who knows the keys.
async fn is_gone(leases: &Api<Lease>, restorer: &mut Restorer) -> Result<bool, VaultError> {
    let failed = |lease: &str, source| VaultError::Lease { lease: lease.to_owned(), source };
    match time::timeout(LEASE, leases.get_opt(&restorer.lease)).await {
        Ok(Ok(lease)) => {
            Ok(restorer.is_gone(lease.and_then(|lease| lease.metadata.resource_version)))
        }
        Ok(Err(source)) => Err(failed(&restorer.lease, source)),
        Err(_elapsed) => {
            debug!(lease = restorer.lease, "lease not reached in time");
            Ok(false)
        }
    }
}

/// Whom everybody believes. Listed, because to read any such ConfigMap by name takes a right that nothing else needs.
async fn published(maps: &Api<ConfigMap>) -> Result<Published, VaultError> {
    let ours = ListParams::default().fields(&format!("metadata.name={}", root_ca::MESH));
    let list = maps.list(&ours).await.map_err(VaultError::Published)?;
    let now = SystemTime::now();
    Ok(list.items.first().map(|map| Published::of(map, now)).unwrap_or_default())
}

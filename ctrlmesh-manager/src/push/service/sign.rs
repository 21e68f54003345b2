//! Signs certificates for proxies.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use ctrlmesh_common::wire::{SignRequest, Signed};
use tokio::time;
use tonic::{Response, Status};
use tracing::debug;

use super::PushService;
use crate::ca::authority::SignError;
use crate::ca::rotation::Holder;
use crate::metrics::Refused;
use crate::push::identity::Identity;
use crate::push::policy_store::Subject;
use crate::telemetry;

/// How long a new pod may be unknown here.
const BECOME_KNOWN: Duration = Duration::from_secs(5);

/// Signs for node proxies, and for pods with a sidecar and a ShardingConfig.
///
/// The owner of a certificate can pose as the API server to an operator, and no other pod needs one. That of a pod is
/// good in its namespace only.
pub(super) async fn answer(
    push: &PushService,
    identity: &Identity,
    asked: SignRequest,
) -> Result<Response<Signed>, Status> {
    let is_node = identity.account == push.accounts.node;
    if !is_node {
        let why = match time::timeout(BECOME_KNOWN, served_inside(push, identity)).await {
            Ok(true) => None,
            Ok(false) => Some("this pod has no proxy inside that could need one"),
            Err(_elapsed) => Some("no ShardingConfig speaks of this pod"),
        };
        if let Some(why) = why {
            let status = Status::permission_denied(why);
            return Err(push.refuse(Refused::Foreign, identity, status));
        }
    }
    if !push.signing_quota.take(&identity.uid) {
        let status = Status::resource_exhausted("too many certificates for one pod");
        return Err(push.refuse(Refused::Csr, identity, status));
    }
    let holder = if is_node { Holder::Node } else { Holder::Pod { namespace: &identity.pod.namespace } };
    let signed = push.ca_store.current().mesh.sign(holder, &asked.request, SystemTime::now());
    let chain = signed.map_err(|error| match error {
        SignError::Derive(_) | SignError::Sign(_) => Status::internal(telemetry::chain(&error)),
        _ => push.refuse(Refused::Csr, identity, Status::invalid_argument(telemetry::chain(&error))),
    })?;
    push.metrics.signed.inc();
    debug!(pod = %identity.pod, "certificate signed");
    let chain = chain.into_iter().map(|one| Bytes::copy_from_slice(&one)).collect();
    Ok(Response::new(Signed { chain }))
}

/// Waits until a ShardingConfig covers the pod. Returns whether it has a sidecar, which never changes.
async fn served_inside(push: &PushService, identity: &Identity) -> bool {
    let subject = Subject::Pod(identity.pod.clone(), identity.uid.clone());
    let mut reader = push.store.follow(subject);
    loop {
        if let Some(inside) = reader.read().iter().find_map(|pod| pod.is_served_inside()) {
            return inside;
        }
        reader.changed().await;
    }
}

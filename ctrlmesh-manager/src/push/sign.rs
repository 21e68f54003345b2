//! Who is given a certificate?

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use ctrlmesh_common::wire::{SignRequest, Signed};
use tokio::time;
use tonic::{Response, Status};
use tracing::debug;

use super::Push;
use crate::board::Subject;
use crate::identity::Identity;
use crate::metrics::Refused;
use crate::telemetry;

/// How long a pod that asks for a certificate may take to become known.
const BECOME_KNOWN: Duration = Duration::from_secs(5);

/// Signs for node proxies, and for pods of which a ShardingConfig speaks: whoever has a certificate can speak to an
/// operator as the API server does.
pub(super) async fn answer(
    push: &Push,
    identity: &Identity,
    asked: SignRequest,
) -> Result<Response<Signed>, Status> {
    if identity.account != push.accounts.node
        && time::timeout(BECOME_KNOWN, spoken_of(push, identity)).await.is_err()
    {
        let status = Status::permission_denied("no ShardingConfig speaks of this pod");
        return Err(push.refuse(Refused::Foreign, identity, status));
    }
    if !push.signatures.take(&identity.uid) {
        let status = Status::resource_exhausted("too many certificates for one pod");
        return Err(push.refuse(Refused::Csr, identity, status));
    }
    let signed = push.vault.current().mesh.sign(&asked.request, SystemTime::now());
    let chain = signed.map_err(|error| {
        let status = Status::invalid_argument(telemetry::chain(&error));
        push.refuse(Refused::Csr, identity, status)
    })?;
    push.metrics.signed.inc();
    debug!(pod = %identity.pod, "certificate signed");
    let chain = chain.into_iter().map(|one| Bytes::copy_from_slice(&one)).collect();
    Ok(Response::new(Signed { chain }))
}

/// Waits until a ShardingConfig speaks of the pod; one that is new may not be known yet.
async fn spoken_of(push: &Push, identity: &Identity) {
    let subject = Subject::Pod(identity.pod.clone(), identity.uid.clone());
    let mut reader = push.board.follow(subject);
    while !reader.read().iter().any(|posted| posted.is_of_a_shard()) {
        reader.changed().await;
    }
}

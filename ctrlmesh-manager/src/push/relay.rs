//! How does the leader learn what proxies told another replica?

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ctrlmesh_common::wire::{Receipts, Relayed};
use tonic::{Response, Status, Streaming};

use super::Push;
use crate::board::Receipt;
use crate::identity::Identity;
use crate::metrics::Refused;
use crate::pod::PodName;

/// Takes what another replica heard, for as long as this one leads.
pub(super) async fn take(
    push: Arc<Push>,
    identity: Arc<Identity>,
    mut receipts: Streaming<Receipts>,
) -> Result<Response<Relayed>, Status> {
    if identity.account != push.accounts.manager {
        let status = Status::permission_denied("only a manager relays");
        return Err(push.refuse(Refused::Foreign, &identity, status));
    }
    let mut leadership = push.leadership.clone();
    loop {
        let message = tokio::select! {
            () = push.drain.started() => break,
            () = leadership.lost() => return Err(Status::failed_precondition("does not lead")),
            message = receipts.message() => message?,
        };
        let Some(message) = message else { break };
        for receipt in message.receipts {
            receive(&push, receipt);
        }
    }
    Ok(Response::new(Relayed {}))
}

fn receive(push: &Push, receipt: ctrlmesh_common::wire::Receipt) {
    let Some(pod) = receipt.pod else { return };
    let at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(receipt.last_contact));
    let taken = Receipt {
        uid: pod.uid,
        node: None,
        epoch: receipt.epoch,
        refused: (!receipt.refused.is_empty()).then_some(receipt.refused),
        connected: receipt.connected,
        last_contact: at.unwrap_or_else(SystemTime::now),
    };
    push.board.receive(&PodName { namespace: pod.namespace, name: pod.name }, taken);
}

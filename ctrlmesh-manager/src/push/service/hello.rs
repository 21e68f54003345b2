//! Reads the first message of a proxy, and checks which pods it may follow.

use std::time::Duration;

use ctrlmesh_common::wire::{Content, Hello, Report};
use tokio::time;
use tonic::{Status, Streaming};

use super::PushService;
use crate::metrics::Refused;
use crate::push::identity::Identity;
use crate::push::policy_store::Subject;

const HELLO: Duration = Duration::from_secs(10);

pub(super) async fn read(
    push: &PushService,
    identity: &Identity,
    inbound: &mut Streaming<Report>,
) -> Result<Hello, Status> {
    let first = time::timeout(HELLO, inbound.message()).await;
    let refuse = |reason, status| Err(push.refuse(reason, identity, status));
    match first {
        Ok(Ok(Some(Report { content: Some(Content::Hello(hello)) }))) => Ok(hello),
        Ok(Ok(_)) => refuse(Refused::Message, Status::invalid_argument("the first message is no hello")),
        Ok(Err(status)) => refuse(Refused::Message, status),
        Err(_elapsed) => refuse(Refused::Slow, Status::deadline_exceeded("no hello came in time")),
    }
}

/// The pods that the proxy asks for.
///
/// # Errors
/// Where its token is for another pod or node.
pub(super) fn subject(push: &PushService, identity: &Identity, hello: &Hello) -> Result<Subject, Status> {
    if !hello.node.is_empty() {
        if identity.account != push.accounts.node {
            return Err(Status::permission_denied("its service account is not that of node proxies"));
        }
        return match &identity.node {
            Some(node) if *node == hello.node => Ok(Subject::Node(node.clone())),
            _ => Err(Status::permission_denied("its token is not of that node")),
        };
    }
    let pod = hello.pod.as_ref().ok_or_else(|| Status::permission_denied("names neither node nor pod"))?;
    let own = pod.namespace == identity.pod.namespace
        && pod.name == identity.pod.name
        && (pod.uid.is_empty() || pod.uid == identity.uid);
    if !own {
        return Err(Status::permission_denied("its token is not of that pod"));
    }
    Ok(Subject::Pod(identity.pod.clone(), identity.uid.clone()))
}

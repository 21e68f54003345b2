//! Proxies reconnect to a replica that has not reviewed their token.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use ctrlmesh_common::wire;
use ctrlmesh_manager::push::identity::{Identity, ReviewedIdentity, TicketKey};
use ctrlmesh_manager::push::service::ReviewSchedule;
use ctrlmesh_manager::rules::pod::PodName;
use data_encoding::BASE64;
use tonic::Code;

use crate::attacks;
use crate::bed::{AUDIENCE, Bed, of_pod, policy, soon};
use crate::token::{self, TestPod};

/// A pod with a policy, its token, and the ticket that it was given.
async fn with_ticket(bed: &Bed, name: &str) -> (TestPod, String, Bytes) {
    let pod = bed.pod(name, "node-a").await;
    bed.publish(&[(&pod, "node-a", policy(1, "a=1"))]);
    let token = pod.token(&bed.client, AUDIENCE).await;
    let ticket = bed.follow(&token, of_pod(&pod)).await.unwrap().update().await.ticket;
    assert!(!ticket.is_empty());
    (pod, token, ticket)
}

/// How many reviews there were since the manager began, and how many tickets were believed.
fn counted(bed: &Bed) -> (u64, u64) {
    (bed.metric("token_reviews_total"), bed.metric("token_review_tickets_total"))
}

#[tokio::test]
async fn a_proxy_with_a_ticket_costs_a_new_manager_no_review() {
    let mut bed = Bed::new().await;
    let (pod, token, ticket) = with_ticket(&bed, "op-0").await;
    assert_eq!(counted(&bed), (1, 0));
    bed.follow(&token, of_pod(&pod)).await.unwrap().update().await;
    assert_eq!(counted(&bed), (1, 0), "what was found out is remembered");
    for _ in 0..2 {
        bed.restart().await;
        bed.publish(&[(&pod, "node-a", policy(1, "a=1"))]);
        let mut stream = bed.follow_with(&token, of_pod(&pod), &ticket).await.unwrap();
        let told = stream.update().await;
        assert_eq!((told.policies.len(), counted(&bed)), (1, (0, 1)));
        // The next one says when the token was reviewed, not when it was shown: nobody goes on and on by them.
        assert_eq!(told.ticket, ticket);
    }
}

#[tokio::test]
async fn a_ticket_takes_nobody_further_than_its_own_token() {
    let mut bed = Bed::new().await;
    let (pod, token, ticket) = with_ticket(&bed, "op-0").await;
    let (other, its_token, its_ticket) = with_ticket(&bed, "op-1").await;
    bed.restart().await;
    bed.publish(&[(&pod, "node-a", policy(1, "a=1")), (&other, "node-a", policy(1, "a=2"))]);
    // Its own pod only, as by the token.
    let foreign = bed.follow_with(&token, of_pod(&other), &ticket).await.err().unwrap();
    assert_eq!((foreign.code(), counted(&bed)), (Code::PermissionDenied, (0, 1)));
    // One that says nothing of this token is as none: another's, one for an earlier token, one that is forged.
    let mut forged = ticket.to_vec();
    forged[0] ^= 1;
    for wrong in [&*its_ticket, &*ticket, &forged, b"nonsense"] {
        let token = pod.token(&bed.client, AUDIENCE).await;
        bed.follow_with(&token, of_pod(&pod), wrong).await.unwrap().update().await;
    }
    assert_eq!(counted(&bed), (4, 1));
    // For a certificate, which is good for a day, the API server is asked, and so it is for what managers say.
    let mut stream = bed.follow_with(&its_token, of_pod(&other), &its_ticket).await.unwrap();
    stream.update().await;
    assert_eq!(counted(&bed), (4, 2));
    let shown = (wire::REVIEW_TICKET, BASE64.encode(&its_ticket));
    let head = [("authorization", format!("Bearer {its_token}")), shown];
    attacks::call_with(&bed, wire::SIGN, &head).await;
    assert_eq!(counted(&bed), (5, 2));
    bed.restart().await;
    attacks::call_with(&bed, wire::RELAY, &head).await;
    assert_eq!(counted(&bed), (1, 0));
    bed.restart().await;
    bed.publish(&[]);
    attacks::call_with(&bed, wire::FOLLOW, &head).await;
    assert_eq!(counted(&bed), (0, 1), "padded, too");
}

#[tokio::test]
async fn a_proxy_is_reviewed_repeatedly_until_its_pod_is_gone() {
    let mut bed = Bed::new().await;
    bed.review_schedule = ReviewSchedule { interval: Duration::from_millis(200) };
    bed.restart().await;
    let (pod, token, mut ticket) = with_ticket(&bed, "op-0").await;
    let mut stream = bed.follow_with(&token, of_pod(&pod), &ticket).await.unwrap();
    // It is told by a ticket of its own each time.
    for number in 0..3 {
        let told = stream.update().await;
        assert_eq!(told.policies.len(), usize::from(number == 0));
        assert!(number == 0 || told.ticket != ticket);
        ticket = told.ticket;
    }
    assert!(counted(&bed).0 > 2);
    attacks::gone(&bed, &pod, &token).await;
    let ended = loop {
        if let Err(status) = soon("an update", stream.updates.message()).await {
            break status;
        }
    };
    assert_eq!(ended.code(), Code::Unauthenticated, "{ended}");
    assert!(ended.message().contains("not good any more"), "{ended}");
}

/// What a replica says that had the token reviewed just now.
fn ticket(bed: &Bed, pod: &TestPod, token: &str) -> Bytes {
    let name = PodName { namespace: pod.namespace.clone(), name: pod.name.clone() };
    let account = format!("{}/operator", pod.namespace);
    let identity = Identity { pod: name, uid: pod.uid.clone(), node: None, account };
    let proven = ReviewedIdentity { identity: Arc::new(identity), reviewed: SystemTime::now() };
    TicketKey::by(bed.ca_store.current().manager.current.key()).issue(token, &proven)
}

#[tokio::test]
async fn a_ticket_makes_no_ended_or_refused_token_good() {
    let bed = Bed::new().await;
    let (pod, gone) = (bed.pod("op-0", "node-a").await, bed.pod("op-1", "node-a").await);
    bed.publish(&[(&pod, "node-a", policy(1, "a=1"))]);
    let token = pod.token(&bed.client, AUDIENCE).await;
    let live = ticket(&bed, &pod, &token);
    bed.follow_with(&token, of_pod(&pod), &live).await.unwrap().update().await;
    assert_eq!(counted(&bed), (0, 1), "it is read as one of this replica");
    // Over for longer than the API server bears with (a minute), and not yet for so long that it is not asked.
    let ended = token::shifted(bed.plane, &token, Duration::from_secs(700));
    let wrong = ticket(&bed, &pod, &ended);
    let refused = bed.follow_with(&ended, of_pod(&pod), &wrong).await.err().unwrap();
    assert_eq!((refused.code(), counted(&bed)), (Code::Unauthenticated, (1, 1)));
    // The API server refuses it, and that is remembered.
    let token = gone.token(&bed.client, AUDIENCE).await;
    attacks::gone(&bed, &gone, &token).await;
    let ticket = ticket(&bed, &gone, &token);
    for shown in [&[], &*ticket] {
        let refused = bed.follow_with(&token, of_pod(&gone), shown).await.err().unwrap();
        assert_eq!((refused.code(), counted(&bed)), (Code::Unauthenticated, (2, 1)));
    }
}

//! Review tickets: signed results of token reviews, which proxies present when they reconnect.
//!
//! A ticket holds the identity and the time of the review. Its MAC key is known to replicas only. Without tickets, a
//! manager that starts would have ten thousand tokens reviewed at once. A stream that begins with a ticket is reviewed
//! when the former stream would have been.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aws_lc_rs::hmac::{self, HMAC_SHA256};
use bytes::Bytes;
use ctrlmesh_runtime::unix_time;
use serde::{Deserialize, Serialize};

use super::review_cache::token_digest;
use super::{Identity, ReviewedIdentity};
use crate::rules::pod::PodName;

/// Validity after the review. A stream is reviewed every four to six minutes; the rest is time to reconnect.
pub(super) const VALIDITY: Duration = Duration::from_mins(8);

/// Clock difference between replicas.
const CLOCK_SKEW: Duration = Duration::from_mins(1);

/// Separates this key from others that are derived from the same secret.
const PURPOSE: &[u8] = b"ctrlmesh review ticket 1";

/// A ticket begins with its MAC.
const MAC_BYTES: usize = 32;

/// Issues and reads tickets.
#[derive(Debug)]
pub struct TicketKey(hmac::Key);

/// Follows the MAC, as JSON.
#[derive(Debug, Deserialize, Serialize)]
struct TicketContent {
    namespace: String,
    name: String,
    uid: String,
    node: Option<String>,
    account: String,
    /// Milliseconds since 1970.
    reviewed: u64,
}

impl TicketKey {
    /// The key is derived from `secret`, which only replicas have.
    pub fn by(secret: &str) -> Self {
        let secret = hmac::Key::new(HMAC_SHA256, secret.as_bytes());
        Self(hmac::Key::new(HMAC_SHA256, hmac::sign(&secret, PURPOSE).as_ref()))
    }

    pub fn issue(&self, token: &str, proven: &ReviewedIdentity) -> Bytes {
        let Identity { pod, uid, node, account } = &*proven.identity;
        let content = TicketContent {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: uid.clone(),
            node: node.clone(),
            account: account.clone(),
            reviewed: unix_time::millis(proven.reviewed),
        };
        // Strings and a number always serialize.
        let content = serde_json::to_vec(&content).unwrap_or_default();
        let mac = hmac::sign(&self.0, &signed(token, &content));
        [mac.as_ref(), &content].concat().into()
    }

    /// None where the ticket is forged, expired, or for another token.
    pub fn read(&self, token: &str, ticket: &[u8], now: SystemTime) -> Option<ReviewedIdentity> {
        let (mac, text) = ticket.split_at_checked(MAC_BYTES)?;
        hmac::verify(&self.0, &signed(token, text), mac).ok()?;
        let content: TicketContent = serde_json::from_slice(text).ok()?;
        let reviewed = UNIX_EPOCH.checked_add(Duration::from_millis(content.reviewed))?;
        let ago = match now.duration_since(reviewed) {
            Ok(ago) => ago,
            Err(ahead) if ahead.duration() <= CLOCK_SKEW => Duration::ZERO,
            Err(_) => return None,
        };
        let pod = PodName { namespace: content.namespace, name: content.name };
        let (uid, node, account) = (content.uid, content.node, content.account);
        let identity = Arc::new(Identity { pod, uid, node, account });
        (ago < VALIDITY).then_some(ReviewedIdentity { identity, reviewed })
    }
}

/// Bound to the token's digest.
fn signed(token: &str, content: &[u8]) -> Vec<u8> {
    [&token_digest(token), content].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECONDS: u64 = 1_700_000_000;

    fn proven() -> ReviewedIdentity {
        let pod = PodName { namespace: "ns".to_owned(), name: "op-0".to_owned() };
        let (uid, node) = ("u".to_owned(), Some("n".to_owned()));
        let identity = Arc::new(Identity { pod, uid, node, account: "ns/op".to_owned() });
        ReviewedIdentity { identity, reviewed: UNIX_EPOCH + Duration::from_secs(SECONDS) }
    }

    #[test]
    fn a_ticket_is_valid_for_a_while() {
        let (proven, tickets) = (proven(), TicketKey::by("secret"));
        let ticket = tickets.issue("token", &proven);
        let at = |now| TicketKey::by("secret").read("token", &ticket, now);
        let reviewed = proven.reviewed;
        assert_eq!(at(reviewed).as_ref(), Some(&proven));
        assert_eq!(at(reviewed + VALIDITY - Duration::from_secs(1)).as_ref(), Some(&proven));
        assert_eq!(at(reviewed + VALIDITY), None);
        assert_eq!(at(reviewed - CLOCK_SKEW), Some(proven));
        assert_eq!(at(reviewed - CLOCK_SKEW - Duration::from_secs(1)), None);
    }

    #[test]
    fn a_forged_or_foreign_ticket_is_rejected() {
        let (proven, tickets) = (proven(), TicketKey::by("secret"));
        let ticket = tickets.issue("token", &proven);
        let read = |tickets: &TicketKey, token: &str, ticket: &[u8]| tickets.read(token, ticket, proven.reviewed);
        assert_eq!(read(&tickets, "another", &ticket), None);
        assert_eq!(read(&TicketKey::by("another"), "token", &ticket), None);
        for at in 0..ticket.len() {
            let mut forged = ticket.to_vec();
            forged[at] ^= 1;
            assert_eq!(read(&tickets, "token", &forged), None, "byte {at}");
            assert_eq!(read(&tickets, "token", &ticket[..at]), None, "{at} bytes");
        }
        // The key is not the secret itself: other MACs by the secret are no tickets.
        let secret = hmac::Key::new(HMAC_SHA256, b"secret");
        let mac = hmac::sign(&secret, &signed("token", &ticket[MAC_BYTES..]));
        let other = [mac.as_ref(), &ticket[MAC_BYTES..]].concat();
        assert_eq!(read(&tickets, "token", &other), None);
    }
}

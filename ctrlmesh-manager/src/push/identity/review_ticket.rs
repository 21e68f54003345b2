//! What does a proxy show whose token was reviewed a moment ago, elsewhere or by a manager that has ended since?
//!
//! Each proxy that follows is given a voucher: what the API server said of its token, and when, under a key that only
//! replicas have. A manager that begins would else have ten thousand tokens reviewed at once. A stream that begins with a
//! voucher is reviewed when the one before would have been.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aws_lc_rs::hmac::{self, HMAC_SHA256};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::{Identity, Proven, key};
use crate::rules::pod::PodName;

/// How long after a review a voucher says something: a stream is reviewed every four to six minutes, and who lost it
/// needs some time to come back.
pub(super) const LASTS: Duration = Duration::from_mins(8);

/// How far the clocks of two replicas may differ.
const CLOCK_SKEW: Duration = Duration::from_mins(1);

/// What the keys of vouchers differ in from whatever else is made of the same secret.
const PURPOSE: &[u8] = b"ctrlmesh voucher 1";

/// Bytes of the MAC, with which a voucher begins.
const MAC_BYTES: usize = 32;

/// Gives vouchers, and reads them.
#[derive(Debug)]
pub struct Vouching(hmac::Key);

/// What a voucher says, after its MAC, in JSON.
#[derive(Debug, Deserialize, Serialize)]
struct Vouched {
    namespace: String,
    name: String,
    uid: String,
    node: Option<String>,
    account: String,
    /// Milliseconds since 1970.
    reviewed: u64,
}

// === impl Vouching ===

impl Vouching {
    /// With a key that follows from `secret`, which nobody but replicas has.
    pub fn by(secret: &str) -> Self {
        let secret = hmac::Key::new(HMAC_SHA256, secret.as_bytes());
        Self(hmac::Key::new(HMAC_SHA256, hmac::sign(&secret, PURPOSE).as_ref()))
    }

    /// Says of `token` what was found out.
    pub fn issue(&self, token: &str, proven: &Proven) -> Bytes {
        let since = proven.reviewed.duration_since(UNIX_EPOCH).unwrap_or_default();
        let Identity { pod, uid, node, account } = &*proven.identity;
        let vouched = Vouched {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: uid.clone(),
            node: node.clone(),
            account: account.clone(),
            reviewed: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
        };
        // Strings and a number: there is nothing in it that could not be written.
        let vouched = serde_json::to_vec(&vouched).unwrap_or_default();
        let mac = hmac::sign(&self.0, &signed(token, &vouched));
        [mac.as_ref(), &vouched].concat().into()
    }

    /// What a voucher says of `token`, where it does at `now`.
    pub fn read(&self, token: &str, voucher: &[u8], now: SystemTime) -> Option<Proven> {
        let (mac, text) = voucher.split_at_checked(MAC_BYTES)?;
        hmac::verify(&self.0, &signed(token, text), mac).ok()?;
        let said: Vouched = serde_json::from_slice(text).ok()?;
        let reviewed = UNIX_EPOCH.checked_add(Duration::from_millis(said.reviewed))?;
        let ago = match now.duration_since(reviewed) {
            Ok(ago) => ago,
            Err(ahead) if ahead.duration() <= CLOCK_SKEW => Duration::ZERO,
            Err(_) => return None,
        };
        let pod = PodName { namespace: said.namespace, name: said.name };
        let (uid, node, account) = (said.uid, said.node, said.account);
        let identity = Arc::new(Identity { pod, uid, node, account });
        (ago < LASTS).then_some(Proven { identity, reviewed })
    }
}

/// What is signed: that of another token is worth nothing.
fn signed(token: &str, vouched: &[u8]) -> Vec<u8> {
    [&key(token), vouched].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECONDS: u64 = 1_700_000_000;

    fn proven() -> Proven {
        let pod = PodName { namespace: "ns".to_owned(), name: "op-0".to_owned() };
        let (uid, node) = ("u".to_owned(), Some("n".to_owned()));
        let identity = Arc::new(Identity { pod, uid, node, account: "ns/op".to_owned() });
        Proven { identity, reviewed: UNIX_EPOCH + Duration::from_secs(SECONDS) }
    }

    #[test]
    fn a_voucher_says_for_a_while_what_was_found_out() {
        let (proven, vouching) = (proven(), Vouching::by("secret"));
        let voucher = vouching.issue("token", &proven);
        let at = |now| Vouching::by("secret").read("token", &voucher, now);
        let reviewed = proven.reviewed;
        assert_eq!(at(reviewed).as_ref(), Some(&proven));
        assert_eq!(at(reviewed + LASTS - Duration::from_secs(1)).as_ref(), Some(&proven));
        assert_eq!(at(reviewed + LASTS), None);
        assert_eq!(at(reviewed - CLOCK_SKEW), Some(proven));
        assert_eq!(at(reviewed - CLOCK_SKEW - Duration::from_secs(1)), None);
    }

    #[test]
    fn what_is_forged_or_anothers_says_nothing() {
        let (proven, vouching) = (proven(), Vouching::by("secret"));
        let voucher = vouching.issue("token", &proven);
        let read = |vouching: &Vouching, token: &str, voucher: &[u8]| {
            vouching.read(token, voucher, proven.reviewed)
        };
        assert_eq!(read(&vouching, "another", &voucher), None);
        assert_eq!(read(&Vouching::by("another"), "token", &voucher), None);
        for at in 0..voucher.len() {
            let mut forged = voucher.to_vec();
            forged[at] ^= 1;
            assert_eq!(read(&vouching, "token", &forged), None, "byte {at}");
            assert_eq!(read(&vouching, "token", &voucher[..at]), None, "{at} bytes");
        }
        // The key is not the secret itself: a MAC that something else makes with it is none of ours.
        let secret = hmac::Key::new(HMAC_SHA256, b"secret");
        let mac = hmac::sign(&secret, &signed("token", &voucher[MAC_BYTES..]));
        let other = [mac.as_ref(), &voucher[MAC_BYTES..]].concat();
        assert_eq!(read(&vouching, "token", &other), None);
    }
}

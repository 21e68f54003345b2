//! Who asks?
//!
//! A pod, as its service-account token says: a token made out to us that the API server vouches for and that is bound
//! to one pod. What the API server said is believed for a short time, so that who comes back does not cost a review.
//!
//! A review costs the API server something, and others have to wait for it. So what no signature could make good is not
//! reviewed at all, and who shows one bad token after the other has to wait for a while, whatever it shows.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use aws_lc_rs::digest::{self, SHA256, SHA256_OUTPUT_LEN};
use ctrlmesh_common::names::TOKEN_AUDIENCE;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use kube::api::PostParams;
use kube::{Api, Client};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;
use tokio::sync::Semaphore;
use tokio::time::{self, Instant};

use crate::metrics::{self, Refused};
use crate::rules::pod::PodName;

mod addresses;
mod claims;
mod review_ticket;

use addresses::Addresses;
pub use review_ticket::Vouching;

/// How long what the API server said is believed by this replica, whoever asks.
const BELIEVED: Duration = Duration::from_mins(1);

/// How long it may take until it is one's turn. Apart from the time for the answer: those who wait would else run out of it
/// together, and come back to wait again.
const TURN: Duration = Duration::from_secs(10);

/// How long the API server may take.
const DEADLINE: Duration = Duration::from_secs(5);

/// How many reviews are asked for at once: ten thousand proxies that come back together are to be no flood.
const AT_ONCE: usize = 32;

/// How many reviews are remembered: every proxy that a manager is planned for, twice.
const REMEMBERED: usize = 20_000;

/// How many refusals are remembered, apart from those: whoever shows nonsense makes nobody be reviewed anew.
const REFUSED: usize = 4_000;

/// Longest token that is sent to the API server, in bytes.
const MAX_TOKEN_BYTES: usize = 8 * 1024;

/// Before the name of a service account, as a user's name.
const SERVICE_ACCOUNT: &str = "system:serviceaccount:";

/// A pod that asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The pod.
    pub pod: PodName,
    /// Its UID.
    pub uid: String,
    /// The node that it runs on, where the token says.
    pub node: Option<String>,
    /// Its service account, as `NAMESPACE/NAME`.
    pub account: String,
}

/// Who asks, and since when that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proven {
    /// Who.
    pub identity: Arc<Identity>,
    /// When the API server said so.
    pub reviewed: SystemTime,
}

/// A token that proves nothing.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// It cannot be one.
    #[error("the token has {bytes} bytes, at most {MAX_TOKEN_BYTES} are read")]
    TooLarge {
        /// Its size.
        bytes: usize,
    },
    /// The API server does not vouch for it, or not to us.
    #[error(
        "the API server does not vouch for the token, or it is not made out to `{TOKEN_AUDIENCE}`"
    )]
    Unknown,
    /// It is bound to no pod.
    #[error("the token is bound to no pod")]
    Unbound,
    /// Too many that proved nothing came from the same address.
    #[error("too many tokens from this address proved nothing; none is reviewed for a while")]
    TooMany,
    /// The API server cannot be asked.
    #[error("review the token")]
    Review(#[source] Box<kube::Error>),
    /// The API server does not answer in time.
    #[error("review the token in time")]
    Late,
}

/// Finds out who asks.
#[derive(Debug)]
pub struct Reviewer {
    reviews: Api<TokenReview>,
    known: Mutex<HashMap<Key, Remembered<Proven>>>,
    refused: Mutex<HashMap<Key, Remembered<Nothing>>>,
    at_once: Semaphore,
    addresses: Addresses,
    asked: Counter,
    vouched: Counter,
}

/// The digest of a token: the token itself is not kept.
type Key = [u8; SHA256_OUTPUT_LEN];

#[derive(Debug)]
struct Remembered<T> {
    what: T,
    at: Instant,
}

/// What a token proves that proves nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Nothing {
    Unknown,
    Unbound,
}

// === impl IdentityError ===

impl IdentityError {
    /// As what it is counted.
    pub fn reason(&self) -> Refused {
        match self {
            Self::TooLarge { .. } | Self::Unknown => Refused::Token,
            Self::Unbound => Refused::Unbound,
            Self::TooMany => Refused::TooMany,
            Self::Review(_) | Self::Late => Refused::Unavailable,
        }
    }
}

// === impl Nothing ===

impl From<Nothing> for IdentityError {
    fn from(nothing: Nothing) -> Self {
        match nothing {
            Nothing::Unknown => Self::Unknown,
            Nothing::Unbound => Self::Unbound,
        }
    }
}

// === impl Reviewer ===

impl Reviewer {
    /// Asks the API server behind `client`.
    pub fn new(client: Client, registry: &mut Registry) -> Self {
        Self {
            reviews: Api::all(client),
            known: Mutex::default(),
            refused: Mutex::default(),
            at_once: Semaphore::new(AT_ONCE),
            addresses: Addresses::default(),
            asked: asked(registry),
            vouched: vouched(registry),
        }
    }

    /// Who shows `token`, from `address`; where that is not known, what is `vouched` of it counts, if anything is.
    ///
    /// # Errors
    /// Where it proves nothing.
    pub async fn identify(
        &self,
        token: &str,
        address: IpAddr,
        vouched: impl FnOnce() -> Option<Proven>,
    ) -> Result<Proven, IdentityError> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(IdentityError::TooLarge { bytes: token.len() });
        }
        let key = key(token);
        let now = Instant::now();
        if let Some(proven) = recall(&self.known, &key, now, BELIEVED) {
            return Ok(proven);
        }
        if let Some(nothing) = recall(&self.refused, &key, now, BELIEVED) {
            return Err(nothing.into());
        }
        let ends = claims::possible(token, SystemTime::now())?;
        // What was refused since it was given no voucher makes good.
        let refused = recall(&self.refused, &key, now, review_ticket::LASTS).is_some();
        let is_good = !refused && SystemTime::now() < ends;
        if let Some(proven) = is_good.then(vouched).flatten() {
            self.vouched.inc();
            return Ok(proven);
        }
        let under_way = self.addresses.reviews_of(address, now)?;
        let _turn = under_way.acquire().await.map_err(|_closed| IdentityError::Late)?;
        let reviewed = self.review(token, key).await;
        if matches!(reviewed, Err(IdentityError::Unknown | IdentityError::Unbound)) {
            self.addresses.was_bad(address);
        }
        reviewed
    }

    /// Asks the API server, whatever is remembered.
    ///
    /// # Errors
    /// Where the token proves nothing (any more).
    pub async fn identify_again(&self, token: &str) -> Result<Proven, IdentityError> {
        self.review(token, key(token)).await
    }

    async fn review(&self, token: &str, key: Key) -> Result<Proven, IdentityError> {
        let late = |_elapsed| IdentityError::Late;
        let turn = time::timeout(TURN, self.at_once.acquire()).await.map_err(late)?;
        let asked = SystemTime::now();
        let reviewed = time::timeout(DEADLINE, self.ask(token)).await.map_err(late)??;
        drop(turn);
        let at = Instant::now();
        match reviewed {
            Ok(identity) => {
                let proven = Proven { identity: Arc::new(identity), reviewed: asked };
                let remembered = Remembered { what: proven.clone(), at };
                remember(&self.known, key, remembered, (REMEMBERED, BELIEVED));
                Ok(proven)
            }
            Err(nothing) => {
                drop(self.known.lock().unwrap_or_else(PoisonError::into_inner).remove(&key));
                let remembered = Remembered { what: nothing, at };
                remember(&self.refused, key, remembered, (REFUSED, review_ticket::LASTS));
                Err(nothing.into())
            }
        }
    }

    async fn ask(&self, token: &str) -> Result<Result<Identity, Nothing>, IdentityError> {
        self.asked.inc();
        let review = TokenReview {
            spec: TokenReviewSpec {
                audiences: Some(vec![TOKEN_AUDIENCE.to_owned()]),
                token: token.to_owned(),
            },
            ..TokenReview::default()
        };
        let answer = self
            .reviews
            .create(&PostParams::default(), &review)
            .await
            .map_err(|error| IdentityError::Review(Box::new(error)))?;
        let status = answer.status.unwrap_or_default();
        let ours = status.audiences.iter().flatten().any(|audience| audience == TOKEN_AUDIENCE);
        if status.authenticated != Some(true) || !ours {
            return Ok(Err(Nothing::Unknown));
        }
        Ok(identity(&status.user.unwrap_or_default()).ok_or(Nothing::Unbound))
    }
}

fn recall<T: Clone>(
    remembered: &Mutex<HashMap<Key, Remembered<T>>>,
    key: &Key,
    now: Instant,
    lasts: Duration,
) -> Option<T> {
    let remembered = remembered.lock().unwrap_or_else(PoisonError::into_inner);
    let fresh = |one: &&Remembered<T>| now.duration_since(one.at) < lasts;
    remembered.get(key).filter(fresh).map(|one| one.what.clone())
}

/// Remembers at most so many, for so long.
fn remember<T>(
    all: &Mutex<HashMap<Key, Remembered<T>>>,
    key: Key,
    one: Remembered<T>,
    (most, lasts): (usize, Duration),
) {
    let now = Instant::now();
    let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
    if all.len() >= most {
        all.retain(|_, one| now.duration_since(one.at) < lasts);
    }
    if all.len() >= most {
        all.clear();
    }
    all.insert(key, one);
}

fn asked(registry: &mut Registry) -> Counter {
    metrics::counter(registry, "token_reviews", "Tokens that the API server was asked about")
}

fn vouched(registry: &mut Registry) -> Counter {
    let help = "Tokens believed by a voucher, without a review";
    metrics::counter(registry, "token_vouchers", help)
}

fn key(token: &str) -> Key {
    let mut key = Key::default();
    key.copy_from_slice(digest::digest(&SHA256, token.as_bytes()).as_ref());
    key
}

/// The pod that a user is; nothing where it is none.
fn identity(user: &UserInfo) -> Option<Identity> {
    let account = user.username.as_deref()?.strip_prefix(SERVICE_ACCOUNT)?;
    let (namespace, account) = account.split_once(':')?;
    let extra = |key: &str| {
        let values = user.extra.as_ref()?.get(&format!("authentication.kubernetes.io/{key}"))?;
        values.first().filter(|value| !value.is_empty()).cloned()
    };
    Some(Identity {
        pod: PodName { namespace: namespace.to_owned(), name: extra("pod-name")? },
        uid: extra("pod-uid")?,
        node: extra("node-name"),
        account: format!("{namespace}/{account}"),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn user(name: &str, extra: &[(&str, &str)]) -> UserInfo {
        let extra: BTreeMap<_, _> = extra
            .iter()
            .map(|(key, value)| {
                (format!("authentication.kubernetes.io/{key}"), vec![(*value).to_owned()])
            })
            .collect();
        UserInfo { username: Some(name.to_owned()), extra: Some(extra), ..UserInfo::default() }
    }

    #[test]
    fn only_a_token_that_is_bound_to_a_pod_is_an_identity() {
        let bound = [("pod-name", "op-0"), ("pod-uid", "u"), ("node-name", "n")];
        let found = identity(&user("system:serviceaccount:ns:op", &bound)).unwrap();
        let pod = PodName { namespace: "ns".to_owned(), name: "op-0".to_owned() };
        assert_eq!((found.pod, found.uid.as_str()), (pod, "u"));
        assert_eq!((found.node.as_deref(), found.account.as_str()), (Some("n"), "ns/op"));
        assert_eq!(identity(&user("system:serviceaccount:ns:op", &bound[..1])), None, "no UID");
        assert_eq!(identity(&user("system:serviceaccount:ns:op", &[])), None, "not bound");
        assert_eq!(identity(&user("admin", &bound)), None, "no service account");
        assert_eq!(identity(&UserInfo::default()), None);
    }

    #[test]
    fn what_the_api_server_said_is_believed_for_a_minute_and_no_longer() {
        let (known, key, at) = (Mutex::default(), [7; SHA256_OUTPUT_LEN], Instant::now());
        remember(&known, key, Remembered { what: "somebody", at }, (REMEMBERED, BELIEVED));
        let after = |passed| recall(&known, &key, at + passed, BELIEVED);
        assert_eq!(after(Duration::ZERO), Some("somebody"));
        assert_eq!(after(Duration::from_secs(59)), Some("somebody"));
        assert_eq!(after(Duration::from_mins(1)), None);
        assert_eq!(recall(&known, &[8; SHA256_OUTPUT_LEN], at, BELIEVED), None);
    }
}

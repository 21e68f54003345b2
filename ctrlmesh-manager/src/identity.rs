//! Who asks?
//!
//! A pod, as its service-account token says: a token made out to us that the API server vouches for and that is bound
//! to one pod. What the API server said is believed for a short time, so that who comes back does not cost a review.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

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
use crate::pod::PodName;

/// How long a review is believed; a pod that is deleted keeps its access for this long.
const BELIEVED: Duration = Duration::from_mins(1);

/// How long the API server may take.
const DEADLINE: Duration = Duration::from_secs(5);

/// How many reviews are asked for at once: ten thousand proxies that come back together are to be no flood.
const AT_ONCE: usize = 32;

/// How many reviews are remembered: every proxy that a manager is planned for, twice.
const REMEMBERED: usize = 20_000;

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
    remembered: Mutex<HashMap<Key, Remembered>>,
    at_once: Semaphore,
    asked: Counter,
}

/// The digest of a token: the token itself is not kept.
type Key = [u8; SHA256_OUTPUT_LEN];

#[derive(Debug)]
struct Remembered {
    /// Nothing where the API server does not vouch for it.
    identity: Option<Arc<Identity>>,
    until: Instant,
}

// === impl IdentityError ===

impl IdentityError {
    /// As what it is counted.
    pub fn reason(&self) -> Refused {
        match self {
            Self::TooLarge { .. } | Self::Unknown => Refused::Token,
            Self::Unbound => Refused::Unbound,
            Self::Review(_) | Self::Late => Refused::Unavailable,
        }
    }
}

// === impl Reviewer ===

impl Reviewer {
    /// Asks the API server behind `client`.
    pub fn new(client: Client, registry: &mut Registry) -> Self {
        Self {
            reviews: Api::all(client),
            remembered: Mutex::default(),
            at_once: Semaphore::new(AT_ONCE),
            asked: asked(registry),
        }
    }

    /// Who shows `token`.
    ///
    /// # Errors
    /// Where it proves nothing.
    pub async fn identify(&self, token: &str) -> Result<Arc<Identity>, IdentityError> {
        let key = key(token);
        let now = Instant::now();
        match self.recall(&key, now) {
            Some(remembered) => remembered,
            None => self.review(token, key).await,
        }
    }

    /// Asks the API server, whatever is remembered.
    ///
    /// # Errors
    /// Where the token proves nothing (any more).
    pub async fn identify_again(&self, token: &str) -> Result<Arc<Identity>, IdentityError> {
        self.review(token, key(token)).await
    }

    async fn review(&self, token: &str, key: Key) -> Result<Arc<Identity>, IdentityError> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(IdentityError::TooLarge { bytes: token.len() });
        }
        let identity = time::timeout(DEADLINE, self.ask(token))
            .await
            .map_err(|_elapsed| IdentityError::Late)??
            .map(Arc::new);
        self.remember(key, identity.clone());
        identity.ok_or(IdentityError::Unknown)
    }

    /// Nothing where the API server does not vouch for the token.
    async fn ask(&self, token: &str) -> Result<Option<Identity>, IdentityError> {
        let _permit = self.at_once.acquire().await.map_err(|_closed| IdentityError::Late)?;
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
            return Ok(None);
        }
        identity(&status.user.unwrap_or_default()).map(Some).ok_or(IdentityError::Unbound)
    }

    /// What is remembered of the token, if anything is.
    fn recall(&self, key: &Key, now: Instant) -> Option<Result<Arc<Identity>, IdentityError>> {
        let remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        let one = remembered.get(key).filter(|one| now < one.until)?.identity.clone();
        drop(remembered);
        Some(one.ok_or(IdentityError::Unknown))
    }

    fn remember(&self, key: Key, identity: Option<Arc<Identity>>) {
        let now = Instant::now();
        let mut remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        if remembered.len() >= REMEMBERED {
            remembered.retain(|_, one| now < one.until);
        }
        if remembered.len() >= REMEMBERED {
            remembered.clear();
        }
        remembered.insert(key, Remembered { identity, until: now + BELIEVED });
    }
}

fn asked(registry: &mut Registry) -> Counter {
    metrics::counter(registry, "token_reviews", "Tokens that the API server was asked about")
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
}

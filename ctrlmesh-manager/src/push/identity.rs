//! Identifies the calling pod by its service-account token.
//!
//! The token must be for our audience, and bound to a pod. The API server reviews it.
//!
//! A review is expensive, and others wait for it. So results are cached for a short time. A token that no signature
//! could make valid is not reviewed. An address that keeps sending bad tokens has to wait.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

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

mod address_limits;
mod claims;
mod review_cache;
mod review_ticket;

use address_limits::AddressLimits;
use review_cache::{ReviewCache, TokenDigest, token_digest};
pub use review_ticket::TicketKey;

/// How long this replica trusts a review.
const TRUSTED_FOR: Duration = Duration::from_mins(1);

/// Wait for a slot, apart from [`DEADLINE`]: otherwise all waiting calls would time out together, and come back to wait
/// again.
const TURN: Duration = Duration::from_secs(10);

const DEADLINE: Duration = Duration::from_secs(5);

/// Concurrent reviews, so that ten thousand reconnecting proxies do not flood the API server.
const AT_ONCE: usize = 32;

/// Cached reviews: twice the proxies that a manager is planned for.
const MAX_IDENTITIES: usize = 20_000;

/// Cached rejections. A separate cache: bad tokens must not evict good ones.
const MAX_REJECTIONS: usize = 4_000;

const MAX_TOKEN_BYTES: usize = 8 * 1024;

const SERVICE_ACCOUNT: &str = "system:serviceaccount:";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub pod: PodName,
    pub uid: String,
    /// Where the token names it.
    pub node: Option<String>,
    /// `NAMESPACE/NAME`.
    pub account: String,
}

/// An identity, and when the API server confirmed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReviewedIdentity {
    pub identity: Arc<Identity>,
    pub reviewed: SystemTime,
}

#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error("the token has {bytes} bytes, at most {MAX_TOKEN_BYTES} are read")]
    TooLarge { bytes: usize },
    /// Not authenticated, or for another audience.
    #[error("the API server does not vouch for the token, or it is not made out to `{TOKEN_AUDIENCE}`")]
    Unknown,
    #[error("the token is bound to no pod")]
    Unbound,
    #[error("too many tokens from this address proved nothing; none is reviewed for a while")]
    TooMany,
    #[error("review the token")]
    Review(#[source] Box<kube::Error>),
    #[error("review the token in time")]
    Late,
}

#[derive(Debug)]
pub struct Reviewer {
    reviews: Api<TokenReview>,
    identities: ReviewCache<ReviewedIdentity>,
    rejections: ReviewCache<Rejection>,
    at_once: Semaphore,
    address_limits: AddressLimits,
    asked: Counter,
    by_ticket: Counter,
}

/// Why the API server's answer identifies no pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rejection {
    Unknown,
    Unbound,
}

impl IdentityError {
    pub fn reason(&self) -> Refused {
        match self {
            Self::TooLarge { .. } | Self::Unknown => Refused::Token,
            Self::Unbound => Refused::Unbound,
            Self::TooMany => Refused::TooMany,
            Self::Review(_) | Self::Late => Refused::Unavailable,
        }
    }
}

impl From<Rejection> for IdentityError {
    fn from(rejection: Rejection) -> Self {
        match rejection {
            Rejection::Unknown => Self::Unknown,
            Rejection::Unbound => Self::Unbound,
        }
    }
}

impl Reviewer {
    pub fn new(client: Client, registry: &mut Registry) -> Self {
        Self {
            reviews: Api::all(client),
            identities: ReviewCache::new(MAX_IDENTITIES, TRUSTED_FOR),
            rejections: ReviewCache::new(MAX_REJECTIONS, review_ticket::VALIDITY),
            at_once: Semaphore::new(AT_ONCE),
            address_limits: AddressLimits::default(),
            asked: asked(registry),
            by_ticket: by_ticket(registry),
        }
    }

    /// The pod that sent `token` from `address`. An unknown token may be identified by its review `ticket`.
    ///
    /// # Errors
    /// Where the token identifies no pod.
    pub async fn identify(
        &self,
        token: &str,
        address: IpAddr,
        ticket: impl FnOnce() -> Option<ReviewedIdentity>,
    ) -> Result<ReviewedIdentity, IdentityError> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(IdentityError::TooLarge { bytes: token.len() });
        }
        let key = token_digest(token);
        if let Some(identity) = self.identities.get(&key, TRUSTED_FOR) {
            return Ok(identity);
        }
        if let Some(rejection) = self.rejections.get(&key, TRUSTED_FOR) {
            return Err(rejection.into());
        }
        let ends = claims::possible(token, SystemTime::now())?;
        // A later rejection overrules a ticket.
        let refused = self.rejections.get(&key, review_ticket::VALIDITY).is_some();
        let is_good = !refused && SystemTime::now() < ends;
        if let Some(identity) = is_good.then(ticket).flatten() {
            self.by_ticket.inc();
            return Ok(identity);
        }
        let under_way = self.address_limits.reviews_of(address, Instant::now())?;
        let _turn = under_way.acquire().await.map_err(|_closed| IdentityError::Late)?;
        let reviewed = self.review(token, key).await;
        if matches!(reviewed, Err(IdentityError::Unknown | IdentityError::Unbound)) {
            self.address_limits.was_bad(address);
        }
        reviewed
    }

    /// Reviews the token, whatever is cached.
    ///
    /// # Errors
    /// Where the token identifies no pod (any more).
    pub async fn identify_again(&self, token: &str) -> Result<ReviewedIdentity, IdentityError> {
        self.review(token, token_digest(token)).await
    }

    async fn review(&self, token: &str, key: TokenDigest) -> Result<ReviewedIdentity, IdentityError> {
        let late = |_elapsed| IdentityError::Late;
        let turn = time::timeout(TURN, self.at_once.acquire()).await.map_err(late)?;
        let asked = SystemTime::now();
        let reviewed = time::timeout(DEADLINE, self.ask(token)).await.map_err(late)??;
        drop(turn);
        match reviewed {
            Ok(identity) => {
                let identity = ReviewedIdentity { identity: Arc::new(identity), reviewed: asked };
                self.identities.insert(key, identity.clone());
                Ok(identity)
            }
            Err(rejection) => {
                self.identities.remove(&key);
                self.rejections.insert(key, rejection);
                Err(rejection.into())
            }
        }
    }

    async fn ask(&self, token: &str) -> Result<Result<Identity, Rejection>, IdentityError> {
        self.asked.inc();
        let review = TokenReview {
            spec: TokenReviewSpec { audiences: Some(vec![TOKEN_AUDIENCE.to_owned()]), token: token.to_owned() },
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
            return Ok(Err(Rejection::Unknown));
        }
        Ok(identity(&status.user.unwrap_or_default()).ok_or(Rejection::Unbound))
    }
}

fn asked(registry: &mut Registry) -> Counter {
    metrics::counter(registry, "token_reviews", "Tokens that the API server was asked about")
}

fn by_ticket(registry: &mut Registry) -> Counter {
    let help = "Tokens believed by a ticket, without a review";
    metrics::counter(registry, "token_review_tickets", help)
}

/// None where the user is no service account, or the token is not bound to a pod.
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
            .map(|(key, value)| (format!("authentication.kubernetes.io/{key}"), vec![(*value).to_owned()]))
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

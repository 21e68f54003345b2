//! Tells service-account tokens for the API server from other credentials.

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use serde::Deserialize;

/// What begins the subject of a service account's token.
const SUBJECT: &str = "system:serviceaccount:";

/// What API servers are called, where an audience names them. `--api-audiences` is the issuer by default, and managed
/// clusters use this.
const API_SERVER: &str = "kubernetes.default.svc";

/// What begins a subprotocol that is a token
/// (k8s.io/apiserver/pkg/authentication/request/websocket).
pub const TOKEN_SUBPROTOCOL: &[u8] = b"base64url.bearer.authorization.k8s.io.";

/// A longer token is none that an API server issues, in bytes.
const MAX_BYTES: usize = 32 << 10;

/// A service account's token: what it says of itself. Its signature is not looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceAccountToken {
    issuer: String,
    audiences: Vec<String>,
}

#[derive(Deserialize)]
struct Claims {
    #[serde(default)]
    iss: String,
    #[serde(default)]
    sub: String,
    #[serde(default)]
    aud: Audiences,
}

/// RFC 7519, section 4.1.3.
#[derive(Deserialize)]
#[serde(untagged)]
enum Audiences {
    One(String),
    Many(Vec<String>),
}

impl ServiceAccountToken {
    /// The tokens in the value of a header, however it is written.
    pub fn in_header(value: &[u8]) -> impl Iterator<Item = Self> {
        let words = value.split(|byte| !byte.is_ascii_alphanumeric() && !b"-_.".contains(byte));
        words.filter_map(|word| Self::read(str::from_utf8(word).ok()?).or_else(|| Self::in_protocol(word)))
    }

    /// How a WebSocket client of an API server gives its token: as the name of a subprotocol.
    fn in_protocol(word: &[u8]) -> Option<Self> {
        let token = BASE64_URL_SAFE_NO_PAD.decode(word.strip_prefix(TOKEN_SUBPROTOCOL)?).ok()?;
        Self::read(str::from_utf8(&token).ok()?)
    }

    /// `None` where it is no token of a service account.
    pub fn read(token: &str) -> Option<Self> {
        let mut parts = token.trim().split('.');
        let (_header, claims) = (parts.next()?, parts.next()?);
        if token.len() > MAX_BYTES || parts.count() != 1 {
            return None;
        }
        let claims = BASE64_URL_SAFE_NO_PAD.decode(claims.trim_end_matches('=')).ok()?;
        let Claims { iss, sub, aud } = serde_json::from_slice(&claims).ok()?;
        let audiences = match aud {
            Audiences::One(one) => vec![one],
            Audiences::Many(many) => many,
        };
        sub.starts_with(SUBJECT).then_some(Self { issuer: iss, audiences })
    }

    /// Whether the API server may accept it; `mounted` are tokens that Kubernetes has made for that.
    ///
    /// Tokens from Secrets have no audience; the API server accepts them.
    pub fn is_for_api_server(&self, mounted: &[Self]) -> bool {
        let is_mounted = |one: &String| mounted.iter().any(|mounted| mounted.audiences.contains(one));
        let is_named = |one: &String| {
            let host = one.split_once("://").map_or(one.as_str(), |(_, rest)| rest);
            host.strip_prefix(API_SERVER).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', ':', '/']))
        };
        let accepts = |one: &String| *one == self.issuer || is_named(one) || is_mounted(one);
        self.audiences.is_empty() || self.audiences.iter().any(accepts)
    }
}

impl Default for Audiences {
    fn default() -> Self {
        Self::Many(Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn token(claims: &Value) -> String {
        let encoded = |value: &Value| BASE64_URL_SAFE_NO_PAD.encode(value.to_string());
        format!("{}.{}.c2ln", encoded(&json!({"alg": "RS256"})), encoded(claims))
    }

    fn of(claims: &Value) -> Option<ServiceAccountToken> {
        ServiceAccountToken::in_header(format!("bearer  {}", token(claims)).as_bytes()).next()
    }

    #[test]
    fn tokens_of_service_accounts_are_told_by_whom_they_are_for() {
        let subject = "system:serviceaccount:ops:widget";
        let issuer = "https://oidc.example.com/id/1";
        let mounted = of(&json!({"sub": subject, "iss": issuer, "aud": ["api"]})).unwrap();
        for (claims, is_for_api_server) in [
            (json!({"sub": subject, "iss": issuer, "aud": [issuer]}), true),
            (json!({"sub": subject, "iss": issuer, "aud": issuer}), true),
            (json!({"sub": subject, "iss": issuer, "aud": ["vault", "https://kubernetes.default.svc"]}), true),
            (json!({"sub": subject, "iss": issuer, "aud": ["https://kubernetes.default.svc.cluster.local"]}), true),
            (json!({"sub": subject, "iss": "kubernetes/serviceaccount"}), true),
            (json!({"sub": subject, "iss": issuer, "aud": ["api"]}), true),
            (json!({"sub": subject, "iss": issuer, "aud": ["vault"]}), false),
            (json!({"sub": subject, "iss": issuer, "aud": "sts.amazonaws.com"}), false),
            (json!({"sub": subject, "iss": issuer, "aud": ["https://kubernetes.default.svcs.example.com"]}), false),
        ] {
            assert_eq!(
                of(&claims).unwrap().is_for_api_server(std::slice::from_ref(&mounted)),
                is_for_api_server,
                "{claims}"
            );
        }
        let api = of(&json!({"sub": subject, "iss": issuer, "aud": ["api"]})).unwrap();
        assert!(!api.is_for_api_server(&[]));
    }

    #[test]
    fn other_credentials_are_none_of_a_service_account() {
        let user = token(&json!({"sub": "alice", "iss": "https://example.com", "aud": "api"}));
        for header in [
            format!("Bearer {user}"),
            "Basic YTpi".to_owned(),
            "Bearer".to_owned(),
            "Bearer abc".to_owned(),
            "Bearer a.b.c".to_owned(),
            format!("Bearer {}.more", token(&json!({"sub": "system:serviceaccount:a:b"}))),
        ] {
            assert_eq!(ServiceAccountToken::in_header(header.as_bytes()).count(), 0, "{header}");
        }
    }

    #[test]
    fn a_token_is_found_however_the_header_is_written() {
        let token = token(&json!({"sub": "system:serviceaccount:a:b"}));
        let protocol = BASE64_URL_SAFE_NO_PAD.encode(&token);
        for header in [
            token.clone(),
            format!("Bearer\t{token}"),
            format!("Bearer {token}, x=\"a.b\""),
            format!("Basic {token}"),
            format!("\u{e4} {token}"),
            format!("v5.channel.k8s.io, base64url.bearer.authorization.k8s.io.{protocol}"),
        ] {
            assert_eq!(ServiceAccountToken::in_header(header.as_bytes()).count(), 1, "{header}");
        }
        assert_eq!(ServiceAccountToken::in_header(&[b"\xff ", token.as_bytes()].concat()).count(), 1);
    }

    proptest! {
        #[test]
        fn whatever_stands_there_is_read_without_a_panic(header in prop::collection::vec(any::<u8>(), 0..200)) {
            let _read = ServiceAccountToken::in_header(&header).count();
            let _read = ServiceAccountToken::in_header(&[TOKEN_SUBPROTOCOL, &header[..]].concat()).count();
        }
    }
}

//! Checks the claims of a token before its signature.
//!
//! Pure. The claims are not trusted. But a token without the right claims need not be reviewed.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ctrlmesh_common::names::TOKEN_AUDIENCE;
use data_encoding::BASE64URL_NOPAD;
use serde::Deserialize;

use super::IdentityError;

/// How long ago, by our clock, a token may have expired and still be reviewed.
const CLOCK_SKEW: Duration = Duration::from_mins(5);

/// Unverified claims.
#[derive(Debug, Deserialize)]
struct Claims {
    #[serde(default)]
    aud: Audiences,
    exp: Option<f64>,
    #[serde(default, rename = "kubernetes.io")]
    kubernetes: Bound,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Audiences {
    Many(Vec<String>),
    One(String),
}

#[derive(Debug, Default, Deserialize)]
struct Bound {
    pod: Option<BoundTo>,
}

#[derive(Debug, Deserialize)]
struct BoundTo {
    #[serde(default)]
    uid: String,
}

impl Default for Audiences {
    fn default() -> Self {
        Self::Many(Vec::new())
    }
}

/// The expiry of a token that may be valid: for our audience, bound to a pod, and not long expired.
pub(super) fn possible(token: &str, now: SystemTime) -> Result<SystemTime, IdentityError> {
    let mut parts = token.split('.');
    let (Some(_), Some(claims), Some(_), None) = (parts.next(), parts.next(), parts.next(), parts.next()) else {
        return Err(IdentityError::Unknown);
    };
    let claims = BASE64URL_NOPAD.decode(claims.as_bytes()).ok();
    let claims = claims.and_then(|claims| serde_json::from_slice::<Claims>(&claims).ok());
    let claims = claims.ok_or(IdentityError::Unknown)?;
    let ours = match &claims.aud {
        Audiences::Many(all) => all.iter().any(|audience| audience == TOKEN_AUDIENCE),
        Audiences::One(one) => one == TOKEN_AUDIENCE,
    };
    let long_ago = now.duration_since(UNIX_EPOCH).unwrap_or_default().saturating_sub(CLOCK_SKEW);
    let end = claims.exp.filter(|end| *end >= long_ago.as_secs_f64());
    let end = end.and_then(|end| Duration::try_from_secs_f64(end).ok());
    let end = end.and_then(|end| UNIX_EPOCH.checked_add(end));
    let (Some(end), true) = (end, ours) else { return Err(IdentityError::Unknown) };
    match claims.kubernetes.pod {
        Some(pod) if !pod.uid.is_empty() => Ok(end),
        _ => Err(IdentityError::Unbound),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(claims: &serde_json::Value) -> String {
        format!("e30.{}.c2ln", BASE64URL_NOPAD.encode(claims.to_string().as_bytes()))
    }

    #[test]
    fn tokens_with_wrong_claims_are_not_reviewed() {
        let now = UNIX_EPOCH + Duration::from_secs(1_000_000);
        let good = serde_json::json!({"aud": ["ctrlmesh"], "exp": 1_000_000, "kubernetes.io": {"pod": {"name": "p", "uid": "u"}}});
        assert_eq!(possible(&token(&good), now).unwrap(), now);
        let mut single = good.clone();
        single["aud"] = "ctrlmesh".into();
        possible(&token(&single), now).unwrap();
        for (field, value) in [
            ("aud", serde_json::json!(["https://kubernetes.default.svc"])),
            ("aud", serde_json::Value::Null),
            ("exp", serde_json::json!(999_000)),
            ("exp", serde_json::json!(1e300)),
            ("exp", serde_json::Value::Null),
        ] {
            let mut wrong = good.clone();
            wrong[field] = value;
            let refused = possible(&token(&wrong), now);
            assert!(matches!(refused, Err(IdentityError::Unknown)), "{wrong}");
        }
        for wrong in ["", "nonsense", "a.b", "a.b.c", "a.e30.c.d", "a.bm8.c"] {
            assert!(matches!(possible(wrong, now), Err(IdentityError::Unknown)), "{wrong}");
        }
        let mut unbound = good;
        unbound["kubernetes.io"] = serde_json::json!({"serviceaccount": {"name": "x"}});
        assert!(matches!(possible(&token(&unbound), now), Err(IdentityError::Unbound)));
    }
}

//! Issues and renews the manager's serving certificate.
//!
//! It lives for a day. It is renewed after two thirds of that, and when the authorities change. Names that no widely
//! known authority covers are left out until one does: with one such name, clients would reject the whole certificate.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::sign::CertifiedKey;
use rustls_pki_types::PrivatePkcs8KeyDer;
use tokio::time;
use tracing::{info, warn};

use crate::ca::authority::{AuthorityError, LEAF_VALIDITY, Names};
use crate::ca::store::{Authorities, CaStore};
use crate::telemetry;
use crate::tls::{self, Presented};

/// Pause after a failed issue.
const RETRY: Duration = Duration::from_mins(1);

/// How often a new authority is checked for being widely known.
const LOOK: Duration = Duration::from_mins(10);

#[derive(Debug, thiserror::Error)]
pub enum ServingError {
    #[error("issue the manager's certificate")]
    Issue(#[from] AuthorityError),
    #[error("use the manager's certificate")]
    Use(#[from] rustls::Error),
}

///
/// # Errors
/// Where it cannot be issued.
pub fn first(ca_store: &CaStore, names: &Names) -> Result<Arc<Presented>, ServingError> {
    Ok(Arc::new(Presented::new(issue(&ca_store.current(), names, SystemTime::now())?.0)))
}

pub async fn follow(ca_store: Arc<CaStore>, names: Names, presented: Arc<Presented>) {
    let mut changed = ca_store.changes();
    let mut wait = renewal(&ca_store.current(), &names, SystemTime::now());
    loop {
        let by = ca_store.current().manager.bundle();
        tokio::select! {
            () = time::sleep(wait) => {}
            gone = changed.changed() => {
                if gone.is_err() {
                    return;
                }
                if ca_store.current().manager.bundle() == by {
                    continue;
                }
            }
        }
        let now = SystemTime::now();
        wait = match issue(&ca_store.current(), &names, now) {
            Ok((key, missing)) => {
                presented.replace(key);
                info!("serving certificate renewed");
                if !missing.is_empty() {
                    warn!(names = missing, "not presented yet: the authority for them is not known everywhere");
                }
                renewal(&ca_store.current(), &names, now)
            }
            Err(error) => {
                warn!(error = telemetry::chain(&error), "serving certificate kept");
                RETRY
            }
        };
    }
}

/// How long a certificate that is issued `now` is presented.
fn renewal(authorities: &Authorities, names: &Names, now: SystemTime) -> Duration {
    let (by, of) = authorities.manager.serving_authority(names, now);
    let left = by.validity().1.duration_since(now).unwrap_or_default();
    let all = of == *names;
    let longest = if all { LEAF_VALIDITY } else { LOOK };
    // Where the authority has expired, its successor is waited for.
    (left.min(longest) * 2 / 3).max(RETRY)
}

/// The certificate, and the names that it lacks, printed.
fn issue(authorities: &Authorities, names: &Names, now: SystemTime) -> Result<(CertifiedKey, String), ServingError> {
    let (by, of) = authorities.manager.serving_authority(names, now);
    let leaf = by.issue(&of, now)?;
    let key = PrivatePkcs8KeyDer::from(leaf.key).into();
    Ok((CertifiedKey::from_der(leaf.chain, key, &tls::provider())?, names.missing_from(&of)))
}

#[cfg(test)]
mod tests {
    use x509_parser::certificate::X509Certificate;
    use x509_parser::prelude::{FromDer as _, GeneralName};

    use super::*;
    use crate::ca::rotation::{AuthorityKind, Rotation, Step};

    const LIFE: Duration = Duration::from_hours(24 * 400);

    fn authorities(names: &Names, now: SystemTime) -> Authorities {
        let rotation = |kind| Rotation::begin(kind, names, LIFE, now, Vec::new()).unwrap();
        Authorities { mesh: rotation(AuthorityKind::Mesh), manager: rotation(AuthorityKind::Manager) }
    }

    fn names_of(key: &CertifiedKey) -> usize {
        let (_, leaf) = X509Certificate::from_der(&key.cert[0]).unwrap();
        let names = leaf.subject_alternative_name().unwrap().unwrap();
        let dns = names.value.general_names.iter();
        dns.filter(|name| matches!(name, GeneralName::DNSName(_))).count()
    }

    #[test]
    fn a_new_name_waits_until_its_authority_is_widely_known() {
        let now = SystemTime::now();
        let old = Names::of(["manager.ns.svc"]);
        let names = Names::of(["manager.ns.svc", "manager.example.com"]);
        let mut all = authorities(&old, now);
        let (key, missing) = issue(&all, &names, now).unwrap();
        assert_eq!((names_of(&key), missing.as_str()), (1, "manager.example.com"));
        assert!(renewal(&all, &names, now) < LOOK);
        all.manager = all.manager.apply(Step::Prepare, AuthorityKind::Manager, &names, LIFE, now).unwrap();
        assert_eq!(names_of(&issue(&all, &names, now).unwrap().0), 1);
        let later = now + Duration::from_hours(24);
        let (key, missing) = issue(&all, &names, later).unwrap();
        assert_eq!((names_of(&key), missing.as_str()), (2, ""));
        assert_eq!(renewal(&all, &names, later), LEAF_VALIDITY * 2 / 3);
    }

    #[test]
    fn an_expired_authority_is_retried_with_a_pause() {
        let now = SystemTime::now();
        let names = Names::of(["manager.ns.svc"]);
        assert_eq!(renewal(&authorities(&names, now), &names, now + LIFE * 2), RETRY);
    }
}

//! Which certificate does the manager present?
//!
//! One that it issues itself, with an authority for the manager, for a day; renewed at two thirds of that, and when the
//! authorities change. Where it was given names that no authority may speak for which everybody knows, it goes without
//! them until one is: with a single name too many nobody would believe the rest either.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::sign::CertifiedKey;
use rustls_pki_types::PrivatePkcs8KeyDer;
use tokio::time;
use tracing::{info, warn};

use crate::ca::authority::{AuthorityError, LEAF_VALIDITY, Names};
use crate::ca::store::{Authorities, Vault};
use crate::telemetry;
use crate::tls::{self, Presented};

/// How long to wait after a certificate could not be issued.
const RETRY: Duration = Duration::from_mins(1);

/// How often it is looked whether an authority that is new is known by now.
const LOOK: Duration = Duration::from_mins(10);

/// A certificate that cannot be presented.
#[derive(Debug, thiserror::Error)]
pub enum ServingError {
    /// It cannot be issued.
    #[error("issue the manager's certificate")]
    Issue(#[from] AuthorityError),
    /// The TLS library does not take it.
    #[error("use the manager's certificate")]
    Use(#[from] rustls::Error),
}

/// The first certificate, for `names`.
///
/// # Errors
/// Where it cannot be issued.
pub fn first(vault: &Vault, names: &Names) -> Result<Arc<Presented>, ServingError> {
    Ok(Arc::new(Presented::new(issue(&vault.current(), names, SystemTime::now())?.0)))
}

/// Renews the certificate for ever.
pub async fn follow(vault: Arc<Vault>, names: Names, presented: Arc<Presented>) {
    let mut changed = vault.changes();
    let mut wait = renewal(&vault.current(), &names, SystemTime::now());
    loop {
        let by = vault.current().manager.bundle();
        tokio::select! {
            () = time::sleep(wait) => {}
            gone = changed.changed() => {
                if gone.is_err() {
                    return;
                }
                if vault.current().manager.bundle() == by {
                    continue;
                }
            }
        }
        let now = SystemTime::now();
        wait = match issue(&vault.current(), &names, now) {
            Ok((key, missing)) => {
                presented.replace(key);
                info!("serving certificate renewed");
                if !missing.is_empty() {
                    warn!(
                        names = missing,
                        "not presented yet: the authority for them is not known everywhere"
                    );
                }
                renewal(&vault.current(), &names, now)
            }
            Err(error) => {
                warn!(error = telemetry::chain(&error), "serving certificate kept");
                RETRY
            }
        };
    }
}

/// How long the certificate that is issued `now` is presented.
fn renewal(authorities: &Authorities, names: &Names, now: SystemTime) -> Duration {
    let (by, of) = authorities.manager.presents(names, now);
    let left = by.validity().1.duration_since(now).unwrap_or_default();
    let all = of == *names;
    let longest = if all { LEAF_VALIDITY } else { LOOK };
    // Where the authority has ended, the next one is waited for.
    (left.min(longest) * 2 / 3).max(RETRY)
}

/// The certificate, and the names that it does not have, printed.
fn issue(
    authorities: &Authorities,
    names: &Names,
    now: SystemTime,
) -> Result<(CertifiedKey, String), ServingError> {
    let (by, of) = authorities.manager.presents(names, now);
    let leaf = by.issue(&of, now)?;
    let key = PrivatePkcs8KeyDer::from(leaf.key).into();
    Ok((CertifiedKey::from_der(leaf.chain, key, &tls::provider())?, names.beyond(&of)))
}

#[cfg(test)]
mod tests {
    use x509_parser::certificate::X509Certificate;
    use x509_parser::prelude::{FromDer as _, GeneralName};

    use super::*;
    use crate::ca::rotation::{Due, Kind, Line};

    const LIFE: Duration = Duration::from_hours(24 * 400);

    fn authorities(names: &Names, now: SystemTime) -> Authorities {
        let line = |kind| Line::begin(kind, names, LIFE, now, Vec::new()).unwrap();
        Authorities { mesh: line(Kind::Mesh), manager: line(Kind::Manager) }
    }

    fn names_of(key: &CertifiedKey) -> usize {
        let (_, leaf) = X509Certificate::from_der(&key.cert[0]).unwrap();
        let names = leaf.subject_alternative_name().unwrap().unwrap();
        let dns = names.value.general_names.iter();
        dns.filter(|name| matches!(name, GeneralName::DNSName(_))).count()
    }

    #[test]
    fn a_name_that_is_new_waits_until_its_authority_is_known_and_the_others_stay_believed() {
        let now = SystemTime::now();
        let old = Names::of(["manager.ns.svc"]);
        let names = Names::of(["manager.ns.svc", "manager.example.com"]);
        let mut all = authorities(&old, now);
        let (key, missing) = issue(&all, &names, now).unwrap();
        assert_eq!((names_of(&key), missing.as_str()), (1, "manager.example.com"));
        assert!(renewal(&all, &names, now) < LOOK);
        all.manager = all.manager.step(Due::Prepare, Kind::Manager, &names, LIFE, now).unwrap();
        assert_eq!(names_of(&issue(&all, &names, now).unwrap().0), 1);
        let later = now + Duration::from_hours(24);
        let (key, missing) = issue(&all, &names, later).unwrap();
        assert_eq!((names_of(&key), missing.as_str()), (2, ""));
        assert_eq!(renewal(&all, &names, later), LEAF_VALIDITY * 2 / 3);
    }

    #[test]
    fn where_the_authority_has_ended_it_is_not_tried_without_a_pause() {
        let now = SystemTime::now();
        let names = Names::of(["manager.ns.svc"]);
        assert_eq!(renewal(&authorities(&names, now), &names, now + LIFE * 2), RETRY);
    }
}

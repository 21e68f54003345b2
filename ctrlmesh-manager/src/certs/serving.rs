//! Which certificate does the manager present?
//!
//! One that it issues itself, with the authority for the manager, for a day; renewed at two thirds of that, and when
//! the authority changes.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::sign::CertifiedKey;
use rustls_pki_types::PrivatePkcs8KeyDer;
use tokio::time;
use tracing::{info, warn};

use crate::certs::authority::{AuthorityError, LEAF_VALIDITY, Names};
use crate::certs::vault::{Authorities, Vault};
use crate::telemetry;
use crate::tls::{self, Presented};

/// How long to wait after a certificate could not be issued.
const RETRY: Duration = Duration::from_mins(1);

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
    Ok(Arc::new(Presented::new(issue(&vault.current(), names)?)))
}

/// Renews the certificate for ever.
pub async fn follow(vault: Arc<Vault>, names: Names, presented: Arc<Presented>) {
    let mut changed = vault.changes();
    let mut wait = renewal(&vault.current());
    loop {
        let by = vault.current().manager.current.pem().to_owned();
        tokio::select! {
            () = time::sleep(wait) => {}
            gone = changed.changed() => {
                if gone.is_err() {
                    return;
                }
                if vault.current().manager.current.pem() == by {
                    continue;
                }
            }
        }
        wait = match issue(&vault.current(), &names) {
            Ok(key) => {
                presented.replace(key);
                info!("serving certificate renewed");
                renewal(&vault.current())
            }
            Err(error) => {
                warn!(error = telemetry::chain(&error), "serving certificate kept");
                RETRY
            }
        };
    }
}

/// How long the certificate that is issued now is presented.
fn renewal(authorities: &Authorities) -> Duration {
    let end = authorities.manager.current.validity().1;
    let left = end.duration_since(SystemTime::now()).unwrap_or_default();
    // Where the authority has ended, the next one is waited for.
    (left.min(LEAF_VALIDITY) * 2 / 3).max(RETRY)
}

fn issue(authorities: &Authorities, names: &Names) -> Result<CertifiedKey, ServingError> {
    let leaf = authorities.manager.current.issue(names, SystemTime::now())?;
    let key = PrivatePkcs8KeyDer::from(leaf.key).into();
    Ok(CertifiedKey::from_der(leaf.chain, key, &tls::provider())?)
}

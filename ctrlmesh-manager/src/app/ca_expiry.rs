//! Shows in the metrics when the certificate authorities that sign now expire.

use std::sync::Arc;

use ctrlmesh_runtime::unix_time;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use crate::ca::store::Authorities;

#[derive(Clone, Debug, Default)]
pub(super) struct CaExpiry(Family<AuthorityLabels, Gauge>);

#[derive(Clone, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct AuthorityLabels {
    authority: &'static str,
}

impl CaExpiry {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let this = Self::default();
        let help = "When the certificate authority that signs now expires, in seconds since 1970";
        registry.register("ca_expiry_timestamp_seconds", help, this.0.clone());
        this
    }

    /// Follows the authorities until their source ends.
    pub(super) async fn follow(self, mut authorities: watch::Receiver<Arc<Authorities>>) {
        loop {
            let now = authorities.borrow_and_update().clone();
            for (authority, rotation) in [("mesh", &now.mesh), ("manager", &now.manager)] {
                let (_, not_after) = rotation.current.validity();
                let seconds = i64::try_from(unix_time::millis(not_after) / 1000).unwrap_or(i64::MAX);
                self.0.get_or_create(&AuthorityLabels { authority }).set(seconds);
            }
            if authorities.changed().await.is_err() {
                return;
            }
        }
    }
}

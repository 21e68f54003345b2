//! Metrics of the connection to the manager.

use std::time::SystemTime;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::{counter, gauge};

#[derive(Clone, Debug)]
pub struct ManagerMetrics {
    /// 1 while the stream of policies is open.
    pub connected: Gauge,
    pub refused: Counter,
    last_contact: Gauge,
}

impl ManagerMetrics {
    pub(super) fn register(to: &mut Registry) -> Self {
        let contact = "When the manager last said something, in seconds since 1970";
        Self {
            connected: gauge(to, "manager_connected", "1 while the manager tells policies"),
            refused: counter(to, "policies_refused", "Policies that could not be put in force"),
            last_contact: gauge(to, "manager_last_contact_seconds", contact),
        }
    }

    pub fn message_received(&self, at: SystemTime) {
        let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.last_contact.set(i64::try_from(since.as_secs()).unwrap_or(i64::MAX));
    }
}

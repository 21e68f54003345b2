//! The metrics of calls to the admission webhooks of pods.

use http::StatusCode;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// The metrics of all webhooks.
#[derive(Clone, Debug, Default)]
pub struct WebhookMetrics {
    requests: Family<RequestLabels, Counter>,
    passed: Counter,
}

/// Who has answered a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WebhookRoute {
    /// The pod that was called, because the object is its own, or nobody's in particular.
    Local,
    /// A pod of the owner.
    Owner,
    /// The pod that was called, because the owner could not be asked.
    Fallback,
    /// Nobody, because the owner could not be asked.
    Refused,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct RequestLabels {
    route: &'static str,
    result: &'static str,
}

impl WebhookMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let help = "Calls to the webhooks of pods, by who has answered, and with what";
        registry.register("webhook_requests", help, metrics.requests.clone());
        let help = "Connections to the webhooks of pods that were passed unread: there was no certificate, or no TLS";
        registry.register("webhook_connections_passed", help, metrics.passed.clone());
        metrics
    }

    /// Counts a call.
    pub fn answered(&self, route: WebhookRoute, status: StatusCode) {
        let result = if status.is_success() { "ok" } else { "error" };
        self.requests.get_or_create(&RequestLabels { route: route.name(), result }).inc();
    }

    /// Counts a connection of which nothing can be read.
    pub fn passed(&self) {
        self.passed.inc();
    }
}

impl WebhookRoute {
    /// As metrics and the access log have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Owner => "owner",
            Self::Fallback => "fallback",
            Self::Refused => "refused",
        }
    }
}

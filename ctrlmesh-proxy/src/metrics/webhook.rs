//! The metrics of calls to the admission webhooks of pods.

use std::time::Duration;

use http::StatusCode;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::{Registry, Unit};

use crate::metrics::histogram::AddedTime;

const OK: &str = "ok";
const ERROR: &str = "error";

/// The metrics of all webhooks.
#[derive(Clone, Debug, Default)]
pub struct WebhookMetrics {
    requests: Family<RequestLabels, Counter>,
    passed: Counter,
    /// Of calls that a server has answered.
    added: Family<RouteLabels, AddedTime>,
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

#[derive(Clone, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct RouteLabels {
    route: &'static str,
}

impl WebhookMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let help = "Calls to the webhooks of pods, by who has answered, and with what";
        registry.register("webhook_requests", help, metrics.requests.clone());
        let help = "Connections to the webhooks of pods that were passed unread: there was no certificate, or no TLS";
        registry.register("webhook_connections_passed", help, metrics.passed.clone());
        let help = "Time from the head of a call to a webhook to that of its answer, without the time of the server that answered";
        registry.register_with_unit("webhook_added", help, Unit::Seconds, metrics.added.clone());
        for route in [WebhookRoute::Local, WebhookRoute::Owner, WebhookRoute::Fallback] {
            drop(metrics.added.get_or_create_owned(&RouteLabels { route: route.name() }));
        }
        // The first error is seen to be one more than before only if there was a zero before.
        for route in [WebhookRoute::Local, WebhookRoute::Owner, WebhookRoute::Fallback, WebhookRoute::Refused] {
            for result in [OK, ERROR] {
                drop(metrics.requests.get_or_create_owned(&RequestLabels { route: route.name(), result }));
            }
        }
        metrics
    }

    /// Counts a call.
    pub fn answered(&self, route: WebhookRoute, status: StatusCode) {
        let result = if status.is_success() { OK } else { ERROR };
        self.requests.get_or_create(&RequestLabels { route: route.name(), result }).inc();
    }

    /// Records the time that was added to a call that a server has answered.
    pub fn added(&self, route: WebhookRoute, time: Duration) {
        self.added.get_or_create(&RouteLabels { route: route.name() }).observe(time, None);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;

    #[test]
    fn the_added_time_is_kept_by_route() {
        let metrics = Metrics::new();
        metrics.webhooks.added(WebhookRoute::Owner, Duration::from_micros(300));
        metrics.webhooks.added(WebhookRoute::Fallback, Duration::from_secs(5));
        let page = metrics.render().unwrap();
        for line in [
            "# TYPE ctrlmesh_proxy_webhook_added_seconds histogram",
            "ctrlmesh_proxy_webhook_added_seconds_count{route=\"local\"} 0",
            "ctrlmesh_proxy_webhook_added_seconds_sum{route=\"owner\"} 0.0003",
            "ctrlmesh_proxy_webhook_added_seconds_bucket{le=\"0.000256\",route=\"owner\"} 0",
            "ctrlmesh_proxy_webhook_added_seconds_bucket{le=\"0.000512\",route=\"owner\"} 1",
            "ctrlmesh_proxy_webhook_added_seconds_bucket{le=\"0.065536\",route=\"fallback\"} 0",
            "ctrlmesh_proxy_webhook_added_seconds_bucket{le=\"+Inf\",route=\"fallback\"} 1",
        ] {
            assert!(page.lines().any(|shown| shown == line), "no `{line}` in\n{page}");
        }
    }
}

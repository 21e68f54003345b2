//! The metrics of connections to other servers than the API server.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::metrics::bounded::BoundedNames;

/// The metrics of all egress.
#[derive(Clone, Debug, Default)]
pub struct EgressMetrics {
    connections: Family<ProtocolLabels, Counter>,
    refused: Family<RuleLabels, Counter>,
    failed: Counter,
    known: BoundedNames,
}

/// What a client speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EgressProtocol {
    Http1,
    Http2,
    Tls,
    /// It is a client of the forward proxy.
    Forward,
    Other,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct ProtocolLabels {
    protocol: &'static str,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct RuleLabels {
    rule: String,
}

impl EgressMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let help = "Connections to other servers than the API server, by what the client speaks";
        registry.register("egress_connections", help, metrics.connections.clone());
        let help = "Requests, and connections without HTTP, that were refused, by trafficInterceptRule or reason";
        registry.register("egress_refused", help, metrics.refused.clone());
        let help = "Connections to other servers that could not be opened";
        registry.register("egress_failed", help, metrics.failed.clone());
        metrics
    }

    /// Counts a client's connection.
    pub fn connected(&self, protocol: EgressProtocol) {
        self.connections.get_or_create(&ProtocolLabels { protocol: protocol.name() }).inc();
    }

    /// Counts what is refused whatever the rules say.
    pub fn refused_without_rule(&self, reason: &'static str) {
        self.refused.get_or_create_owned(&RuleLabels { rule: reason.to_owned() }).inc();
    }

    /// Counts what `NAMESPACE/BREAKER/RULE` refused.
    pub fn refused(&self, rule: &str) {
        let rule = self.known.bounded(rule).to_owned();
        self.refused.get_or_create_owned(&RuleLabels { rule }).inc();
    }

    /// Counts a server that cannot be reached.
    pub fn failed(&self) {
        self.failed.inc();
    }
}

impl EgressProtocol {
    fn name(self) -> &'static str {
        match self {
            Self::Http1 => "http1",
            Self::Http2 => "http2",
            Self::Tls => "tls",
            Self::Forward => "forward",
            Self::Other => "other",
        }
    }
}

//! What is counted about those who ask, and where is it shown?
//!
//! Each module registers its own metrics; what several of them refuse is counted here, so that it stands in one place.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Before every name.
pub const PREFIX: &str = "ctrlmesh_manager";

/// Why somebody who asked the manager was refused.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Refused {
    /// TLS failed: plaintext, a certificate authority that it does not know, a version that is too old.
    Tls,
    /// It said nothing, or too little, in time.
    Slow,
    /// As many are connected as may be.
    TooMany,
    /// No token.
    NoToken,
    /// A token that the API server does not vouch for: expired, forged, for another audience, of a pod that is gone.
    Token,
    /// A token that is bound to no pod.
    Unbound,
    /// It spoke of a pod or a node that is not its own.
    Foreign,
    /// A message that is too large, or not what was to come.
    Message,
    /// A certificate signing request that asks for what must not be had.
    Csr,
    /// The API server could not be asked.
    Unavailable,
}

/// In the order of [`Refused`].
const REFUSED: [&str; 10] = [
    "tls",
    "slow",
    "too_many",
    "no_token",
    "token",
    "unbound",
    "foreign",
    "message",
    "csr",
    "unavailable",
];

/// Who asked and was refused.
#[derive(Clone, Debug)]
pub struct Refusals([Counter; REFUSED.len()]);

/// Counts something that exists for as long as this does.
#[derive(Debug)]
pub struct Open(Gauge);

#[derive(Clone, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

// === impl Refusals ===

impl Refusals {
    /// Registers a counter for each reason.
    pub fn register(registry: &mut Registry) -> Self {
        let family: Family<ReasonLabels, Counter> = Family::default();
        registry.register("refused", "Connections and calls refused, by reason", family.clone());
        Self(REFUSED.map(|reason| family.get_or_create_owned(&ReasonLabels { reason })))
    }

    /// Counts one.
    pub fn count(&self, reason: Refused) {
        self.0[reason as usize].inc();
    }
}

// === impl Open ===

impl Open {
    /// One more.
    pub fn new(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Registers a counter.
pub fn counter(registry: &mut Registry, name: &str, help: &str) -> Counter {
    let counter = Counter::default();
    registry.register(name, help, counter.clone());
    counter
}

/// Registers a gauge.
pub fn gauge(registry: &mut Registry, name: &str, help: &str) -> Gauge {
    let gauge = Gauge::default();
    registry.register(name, help, gauge.clone());
    gauge
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text;

    use super::*;

    #[test]
    fn a_refusal_is_counted_under_its_reason() {
        let mut registry = Registry::with_prefix(PREFIX);
        let refusals = Refusals::register(&mut registry);
        refusals.count(Refused::Unavailable);
        refusals.count(Refused::NoToken);
        let mut page = String::new();
        text::encode(&mut page, &registry).unwrap();
        for line in [
            r#"ctrlmesh_manager_refused_total{reason="unavailable"} 1"#,
            r#"ctrlmesh_manager_refused_total{reason="no_token"} 1"#,
            r#"ctrlmesh_manager_refused_total{reason="tls"} 0"#,
        ] {
            assert!(page.contains(line), "{page}");
        }
    }
}

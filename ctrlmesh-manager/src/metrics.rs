//! Registers metrics, and counts refused connections and calls.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

pub const PREFIX: &str = "ctrlmesh_manager";

/// Why a connection or call was refused.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Refused {
    /// The TLS handshake failed: plaintext, a CA that the client does not trust, or an old version.
    Tls,
    /// The client was silent or too slow.
    Slow,
    TooMany,
    NoToken,
    /// The API server rejects the token: expired, forged, for another audience, or of a deleted pod.
    Token,
    Unbound,
    /// About a pod or node that is not its own.
    Foreign,
    /// A message that is too large or unexpected.
    Message,
    /// A forbidden certificate signing request.
    Csr,
    Unavailable,
}

/// In the order of [`Refused`].
const REFUSED: [&str; 10] =
    ["tls", "slow", "too_many", "no_token", "token", "unbound", "foreign", "message", "csr", "unavailable"];

#[derive(Clone, Debug)]
pub struct Refusals([Counter; REFUSED.len()]);

/// Adds one to a gauge until it is dropped.
#[derive(Debug)]
pub struct Open(Gauge);

#[derive(Clone, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

impl Refusals {
    pub fn register(registry: &mut Registry) -> Self {
        let family: Family<ReasonLabels, Counter> = Family::default();
        registry.register("refused", "Connections and calls refused, by reason", family.clone());
        Self(REFUSED.map(|reason| family.get_or_create_owned(&ReasonLabels { reason })))
    }

    pub fn count(&self, reason: Refused) {
        self.0[reason as usize].inc();
    }
}

impl Open {
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

pub fn counter(registry: &mut Registry, name: &str, help: &str) -> Counter {
    let counter = Counter::default();
    registry.register(name, help, counter.clone());
    counter
}

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

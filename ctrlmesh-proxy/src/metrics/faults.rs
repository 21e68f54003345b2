//! The metrics of faults, by fault.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::metrics::bounded::BoundedNames;

/// The metrics of all faults.
#[derive(Clone, Debug, Default)]
pub struct FaultMetrics {
    injected: Family<FaultLabels, Counter>,
    known: BoundedNames,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct FaultLabels {
    fault: String,
    effect: &'static str,
}

impl FaultMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let help = "Requests that a fault of a FaultInjection hit, by fault and effect";
        registry.register("faults_injected", help, metrics.injected.clone());
        metrics
    }

    /// Counts a request that `NAMESPACE/INJECTION/FAULT` hit.
    pub fn injected(&self, fault: &str, effect: &'static str) {
        let fault = self.known.bounded(fault).to_owned();
        self.injected.get_or_create_owned(&FaultLabels { fault, effect }).inc();
    }
}

#[cfg(test)]
mod tests {
    use crate::metrics::Metrics;
    use crate::metrics::bounded::MAX_NAMES;

    #[test]
    fn faults_beyond_the_bound_share_their_series() {
        let metrics = Metrics::new();
        for at in 0..MAX_NAMES + 3 {
            metrics.faults.injected(&format!("ns/storm/{at}"), "abort");
        }
        metrics.faults.injected("ns/storm/0", "abort");
        let page = metrics.render().unwrap();
        for line in [
            r#"ctrlmesh_proxy_faults_injected_total{fault="ns/storm/0",effect="abort"} 2"#,
            r#"ctrlmesh_proxy_faults_injected_total{fault="other",effect="abort"} 3"#,
        ] {
            assert!(page.lines().any(|shown| shown == line), "no `{line}` in\n{page}");
        }
    }
}

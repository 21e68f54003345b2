//! The metrics of guards, by rule. A rule's series go with the last pod that has the rule.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use ctrlmesh_runtime::sync::lock;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::Open;

/// Rules with series of their own. Further ones share those of [`OTHER`].
const MAX_RULES: usize = 512;

/// No rule is called so: the names of others have two slashes.
const OTHER: &str = "other";

const ALLOWED: &str = "allowed";
const REFUSED: &str = "refused";

/// The metrics of all rules.
#[derive(Clone, Debug, Default)]
pub struct GuardMetrics {
    requests: Family<OutcomeLabels, Counter>,
    open: Family<RuleLabels, Gauge>,
    /// How many pods have each rule.
    pods: Arc<Mutex<HashMap<String, usize>>>,
}

/// The metrics of one rule of one pod.
#[derive(Debug)]
pub struct RuleMetrics {
    of: GuardMetrics,
    rule: String,
    pub allowed: Counter,
    pub refused: Counter,
    gauge: Gauge,
    open: Option<Open>,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct OutcomeLabels {
    rule: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct RuleLabels {
    rule: String,
}

impl GuardMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let help = "Requests that a rule of a CircuitBreaker matched, by rule and outcome";
        registry.register("guard_requests", help, metrics.requests.clone());
        registry.register("guard_open", "Pods whose breaker of that rule is open, by rule", metrics.open.clone());
        metrics
    }

    /// The metrics of `NAMESPACE/BREAKER/RULE`, for one pod.
    pub fn rule(&self, rule: String) -> RuleMetrics {
        let mut pods = lock(&self.pods);
        let rule = if pods.len() < MAX_RULES || pods.contains_key(&rule) { rule } else { OTHER.to_owned() };
        *pods.entry(rule.clone()).or_default() += 1;
        let requests = |outcome| self.requests.get_or_create_owned(&OutcomeLabels { rule: rule.clone(), outcome });
        let (allowed, refused) = (requests(ALLOWED), requests(REFUSED));
        let gauge = self.open.get_or_create_owned(&RuleLabels { rule: rule.clone() });
        drop(pods);
        RuleMetrics { of: self.clone(), rule, allowed, refused, gauge, open: None }
    }

    fn remove(&self, rule: &str) {
        for outcome in [ALLOWED, REFUSED] {
            self.requests.remove(&OutcomeLabels { rule: rule.to_owned(), outcome });
        }
        self.open.remove(&RuleLabels { rule: rule.to_owned() });
    }
}

impl RuleMetrics {
    /// Returns whether that is new.
    pub fn set_open(&mut self, is_open: bool) -> bool {
        let is_new = self.open.is_some() != is_open;
        if is_new {
            self.open = is_open.then(|| Open::new(&self.gauge));
        }
        is_new
    }
}

impl Drop for RuleMetrics {
    fn drop(&mut self) {
        self.open = None;
        let mut pods = lock(&self.of.pods);
        let count = pods.entry(self.rule.clone()).or_default();
        *count = count.saturating_sub(1);
        if *count == 0 {
            pods.remove(&self.rule);
            // Under the lock, so that nobody takes these series meanwhile.
            self.of.remove(&self.rule);
        }
        drop(pods);
    }
}

#[cfg(test)]
mod tests {
    use crate::metrics::Metrics;

    use super::*;

    #[test]
    fn the_gauge_counts_pods_and_goes_with_the_last() {
        let metrics = Metrics::new();
        let [mut one, mut other] = [(); 2].map(|()| metrics.guards.rule("ns/wild/creates".to_owned()));
        assert!(one.set_open(true) && !one.set_open(true) && other.set_open(true));
        other.refused.inc();
        let page = metrics.render().unwrap();
        for line in [
            r#"ctrlmesh_proxy_guard_open{rule="ns/wild/creates"} 2"#,
            r#"ctrlmesh_proxy_guard_requests_total{rule="ns/wild/creates",outcome="refused"} 1"#,
            r#"ctrlmesh_proxy_guard_requests_total{rule="ns/wild/creates",outcome="allowed"} 0"#,
        ] {
            assert!(page.lines().any(|shown| shown == line), "no `{line}` in\n{page}");
        }
        drop(one);
        assert!(metrics.render().unwrap().contains(r#"guard_open{rule="ns/wild/creates"} 1"#));
        drop(other);
        assert!(!metrics.render().unwrap().contains("creates"));
    }

    #[test]
    fn rules_beyond_the_bound_share_their_series() {
        let metrics = Metrics::new();
        let rules: Vec<RuleMetrics> =
            (0..MAX_RULES + 3).map(|at| metrics.guards.rule(format!("ns/wild/{at}"))).collect();
        let page = metrics.render().unwrap();
        let shown = page.lines().filter(|line| line.starts_with("ctrlmesh_proxy_guard_open{")).count();
        assert_eq!(shown, MAX_RULES + 1);
        assert_eq!(rules[MAX_RULES].rule, OTHER);
    }
}

//! The proxy's metrics.
//!
//! Series of the request path are looked up at start, so counting is one atomic addition. Those of pods are looked up
//! once a request.

mod busy_namespaces;
mod bounded;
mod channel;
mod egress;
mod exemplar;
mod faults;
mod guards;
mod histogram;
mod reasons;
mod pods;
mod spans;
mod webhook;

use std::sync::Arc;
use std::time::Duration;

use opentelemetry::trace::TraceId;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

pub use crate::metrics::channel::ManagerMetrics;
pub use crate::metrics::egress::{EgressMetrics, EgressProtocol};
pub use crate::metrics::faults::FaultMetrics;
pub use crate::metrics::guards::{GuardMetrics, RuleMetrics};
use crate::metrics::histogram::AddedTime;
pub use crate::metrics::pods::{MemberRequests, PodMetrics, PodPolicyLabels, PodRequests, ResourceRequests};
use crate::metrics::reasons::{CLIENT_ERRORS, OUTCOMES, UPSTREAM_ERRORS, VERBS};
pub use crate::metrics::reasons::{ClientError, Outcome, UpstreamError, Verb};
pub use crate::metrics::spans::{DroppedSpan, SpanMetrics};
pub use crate::metrics::webhook::{WebhookMetrics, WebhookRoute};

#[derive(Debug)]
pub struct Metrics {
    registry: Arc<Registry>,
    requests: Vec<[Counter; OUTCOMES.len()]>,
    pub injected: Counter,
    pub renamed: Counter,
    pub refused: Counter,
    pub writes_refused: Counter,
    pub writes_unconfirmed: Counter,
    pub writes_cut: Counter,
    pub tunnelled: Counter,
    pub spliced: Counter,
    pub expired: Counter,
    pub restarted: Counter,
    pub accepted: Counter,
    upstream_errors: [Counter; UPSTREAM_ERRORS.len()],
    client_errors: [Counter; CLIENT_ERRORS.len()],
    added: AddedTime,
    open: Gauges,
    pub pods: PodMetrics,
    pub manager: ManagerMetrics,
    pub guards: GuardMetrics,
    pub faults: FaultMetrics,
    pub egress: EgressMetrics,
    pub webhooks: WebhookMetrics,
    pub spans: SpanMetrics,
    pub unread: Gauge,
    served: Gauge,
    waiting: Gauge,
    bypass_filter: Gauge,
}

#[derive(Debug)]
struct Gauges {
    connections: Gauge,
    upstream_connections: Gauge,
    streams: Gauge,
    watches: Gauge,
    tunnels: Gauge,
}

/// Raises a gauge until it is dropped.
#[derive(Debug)]
pub struct Open(Gauge);

#[derive(Clone, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct RequestLabels {
    verb: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

impl Metrics {
    pub fn new() -> Arc<Self> {
        Self::with_exemplars(false)
    }

    /// Where `traced`, series of requests show the trace of one of them.
    pub fn with_exemplars(traced: bool) -> Arc<Self> {
        let mut registry = Registry::with_prefix("ctrlmesh_proxy");
        let to = &mut registry;
        let metrics = Self {
            requests: requests(to),
            injected: counter(to, "injected", "Requests whose selector was narrowed"),
            renamed: counter(to, "renamed", "Requests whose leader-election lock was renamed"),
            refused: counter(to, "refused", "Requests refused by policy"),
            writes_refused: counter(to, "writes_refused", "Writes refused: the pod's owner does not own the object"),
            writes_unconfirmed: counter(
                to,
                "writes_unconfirmed",
                "Writes refused: the manager has not confirmed the policy for 15 s",
            ),
            writes_cut: counter(
                to,
                "writes_cut",
                "Writes cut: the object was taken away or the policy not confirmed, and they took too long",
            ),
            tunnelled: counter(to, "tunnelled", "Tunnels opened: upgrades and opaque connections"),
            spliced: counter(to, "watches_spliced", "Open watches carried over to a new policy"),
            expired: counter(to, "watches_expired", "Open watches ended with 410 by a new policy"),
            restarted: counter(to, "pods_restarted", "Pods whose containers were ended because they lose objects"),
            accepted: counter(to, "accepted", "Connections accepted"),
            upstream_errors: reasons(to, "upstream_errors", "Failures to ask the API server", UPSTREAM_ERRORS),
            client_errors: reasons(to, "client_errors", "Connections of clients ended early", CLIENT_ERRORS),
            open: gauges(to),
            unread: gauge(to, "unread_bytes", "What waits for those who do not read, and what is held for it"),
            served: gauge(to, "pods_served", "Pods whose connections are served, in node mode"),
            waiting: gauge(to, "pods_waiting", "Pods that cannot be served yet, in node mode"),
            bypass_filter: gauge(to, "bypass_filter", "1 while the node drops what pods send past the proxy"),
            added: added(to, traced),
            pods: PodMetrics::register(to, traced),
            manager: ManagerMetrics::register(to),
            guards: GuardMetrics::register(to),
            faults: FaultMetrics::register(to),
            egress: EgressMetrics::register(to),
            webhooks: WebhookMetrics::register(to),
            spans: SpanMetrics::register(to),
            registry: Arc::default(),
        };
        Arc::new(Self { registry: Arc::new(registry), ..metrics })
    }

    /// Pairs with [`Self::end_request`].
    pub fn begin_request(&self) {
        self.open.streams.inc();
    }

    pub fn end_request(&self, verb: Verb, outcome: Outcome) {
        self.open.streams.dec();
        self.requests[verb.at()][outcome as usize].inc();
    }

    pub fn upstream_error(&self, reason: UpstreamError) {
        self.upstream_errors[reason as usize].inc();
    }

    pub fn client_error(&self, reason: ClientError) {
        self.client_errors[reason as usize].inc();
    }

    /// Records the time that the proxy added to one request, of which `trace` is the recorded trace.
    pub fn added(&self, time: Duration, trace: Option<TraceId>) {
        self.added.observe(time, trace);
    }

    pub fn connection(&self) -> Open {
        Open::new(&self.open.connections)
    }

    /// Of clients.
    pub fn open_connections(&self) -> i64 {
        self.open.connections.get()
    }

    pub fn upstream_connection(&self) -> Open {
        Open::new(&self.open.upstream_connections)
    }

    pub fn watch(&self) -> Open {
        Open::new(&self.open.watches)
    }

    pub fn tunnel(&self) -> Open {
        self.tunnelled.inc();
        Open::new(&self.open.tunnels)
    }

    pub fn pods(&self, served: usize, waiting: usize) {
        self.served.set(i64::try_from(served).unwrap_or(i64::MAX));
        self.waiting.set(i64::try_from(waiting).unwrap_or(i64::MAX));
    }

    /// Whether what pods send past the proxy is dropped.
    pub fn bypass_filter(&self, works: bool) {
        self.bypass_filter.set(works.into());
    }

    pub fn registry(&self) -> Arc<Registry> {
        self.registry.clone()
    }

    /// Everything, in the text format of `OpenMetrics`.
    ///
    /// # Errors
    ///
    /// Fails when a metric cannot be written as text.
    pub fn render(&self) -> Result<String, std::fmt::Error> {
        let mut page = String::new();
        text::encode(&mut page, &self.registry)?;
        Ok(page)
    }
}

impl Open {
    fn new(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.dec();
    }
}

fn requests(registry: &mut Registry) -> Vec<[Counter; OUTCOMES.len()]> {
    let family: Family<RequestLabels, Counter> = Family::default();
    registry.register("requests", "Requests that ended, by Kubernetes verb and outcome", family.clone());
    let of = |verb| OUTCOMES.map(|outcome| family.get_or_create_owned(&RequestLabels { verb, outcome }));
    VERBS.map(of).to_vec()
}

fn gauges(to: &mut Registry) -> Gauges {
    Gauges {
        connections: gauge(to, "connections", "Open connections of clients"),
        upstream_connections: gauge(to, "upstream_connections", "Open connections to the API server"),
        streams: gauge(to, "streams", "Requests under way, watches included"),
        watches: gauge(to, "watches", "Open watches"),
        tunnels: gauge(to, "tunnels", "Open tunnels"),
    }
}

fn added(registry: &mut Registry, traced: bool) -> AddedTime {
    let histogram = AddedTime::new(traced);
    let help = "Time from the end of a request's head to its being sent on, and the same for its response";
    registry.register_with_unit("added", help, Unit::Seconds, histogram.clone());
    histogram
}

fn counter(registry: &mut Registry, name: &str, help: &str) -> Counter {
    let counter = Counter::default();
    registry.register(name, help, counter.clone());
    counter
}

fn gauge(registry: &mut Registry, name: &str, help: &str) -> Gauge {
    let gauge = Gauge::default();
    registry.register(name, help, gauge.clone());
    gauge
}

fn reasons<const N: usize>(
    registry: &mut Registry,
    name: &str,
    help: &str,
    reasons: [&'static str; N],
) -> [Counter; N] {
    let family: Family<ReasonLabels, Counter> = Family::default();
    registry.register(name, help, family.clone());
    reasons.map(|reason| family.get_or_create_owned(&ReasonLabels { reason }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_count_by_verb_and_outcome() {
        let metrics = Metrics::new();
        for (verb, outcome) in [("watch", Outcome::Ok), ("brew", Outcome::Refused)] {
            metrics.begin_request();
            metrics.end_request(Verb::of(verb), outcome);
        }
        metrics.begin_request();
        let page = metrics.render().unwrap();
        assert!(page.contains(r#"ctrlmesh_proxy_requests_total{verb="watch",outcome="ok"} 1"#), "{page}");
        assert!(page.contains(r#"ctrlmesh_proxy_requests_total{verb="other",outcome="refused"} 1"#), "{page}");
        assert!(page.contains(r#"ctrlmesh_proxy_requests_total{verb="get",outcome="ok"} 0"#), "{page}");
        assert!(page.contains("ctrlmesh_proxy_streams 1"), "{page}");
    }

    #[test]
    fn the_added_time_is_a_histogram_in_seconds() {
        let metrics = Metrics::new();
        for microseconds in [3, 100, 1_000_000] {
            metrics.added(Duration::from_micros(microseconds), None);
        }
        let page = metrics.render().unwrap();
        for line in [
            "# TYPE ctrlmesh_proxy_added_seconds histogram",
            "ctrlmesh_proxy_added_seconds_sum 1.000103",
            "ctrlmesh_proxy_added_seconds_count 3",
            "ctrlmesh_proxy_added_seconds_bucket{le=\"0.000004\"} 1",
            "ctrlmesh_proxy_added_seconds_bucket{le=\"0.000128\"} 2",
            "ctrlmesh_proxy_added_seconds_bucket{le=\"0.065536\"} 2",
            "ctrlmesh_proxy_added_seconds_bucket{le=\"+Inf\"} 3",
        ] {
            assert!(page.lines().any(|shown| shown == line), "no `{line}` in\n{page}");
        }
    }

    #[test]
    fn a_gauge_falls_when_its_guard_is_dropped() {
        let metrics = Metrics::new();
        let open = metrics.watch();
        assert!(metrics.render().unwrap().contains("ctrlmesh_proxy_watches 1"));
        drop(open);
        assert!(metrics.render().unwrap().contains("ctrlmesh_proxy_watches 0"));
    }

    #[test]
    fn the_docs_list_every_metric() {
        let metrics = Metrics::new();
        let _rule = metrics.guards.rule("ops/wild/creates".to_owned());
        let docs = include_str!("../../docs/reference/metrics.md");
        let page = metrics.render().unwrap();
        let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE ctrlmesh_proxy_"));
        let mut seen = 0;
        for (name, kind) in types.filter_map(|line| line.split_once(' ')) {
            let name = format!("{name}{}", if kind == "counter" { "_total" } else { "" });
            let shown = ["`", "{"].map(|after| format!("`ctrlmesh_proxy_{name}{after}"));
            let is_shown = shown.iter().any(|shown| docs.contains(shown));
            assert!(is_shown, "{name} is not in docs/reference/metrics.md");
            seen += 1;
        }
        assert!(seen > 20, "{page}");
    }
}

//! Adds up what the metrics of a proxy say of each pod.
//!
//! Pure.

use std::collections::BTreeMap;

use super::exposition::{Sample, samples};

/// What the names of all metrics of pods begin with.
const PREFIX: &str = "ctrlmesh_proxy_pod_";

/// Kubernetes verbs that write.
const WRITES: [&str; 5] = ["create", "update", "patch", "delete", "deletecollection"];

/// A pod, as the metrics of its proxy name it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PodKey {
    pub(crate) namespace: String,
    pub(crate) pod: String,
    /// Empty: its proxy does not know it.
    pub(crate) shard: String,
}

/// What a proxy has counted of one pod since it serves it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Counters {
    pub(super) requests: f64,
    pub(super) writes: f64,
    /// By policy.
    pub(super) refused: f64,
    /// Answers with a status from 500, and requests that were aborted.
    pub(super) failed: f64,
    pub(super) events: f64,
    pub(super) bytes: f64,
    /// Number and seconds of the answers whose time is known.
    pub(super) answers: f64,
    pub(super) answer_seconds: f64,
    /// How many answers took no longer than this, in nanoseconds. The last one is for all.
    pub(super) buckets: BTreeMap<u64, f64>,
    /// Requests by namespace of their objects.
    pub(super) namespaces: BTreeMap<String, f64>,
}

/// By pod.
pub(super) fn counters(page: &str) -> BTreeMap<PodKey, Counters> {
    let mut pods: BTreeMap<PodKey, Counters> = BTreeMap::new();
    for sample in samples(page, PREFIX) {
        let label = |name| sample.label(name).to_owned();
        let key = PodKey { namespace: label("namespace"), pod: label("pod"), shard: label("shard") };
        pods.entry(key).or_default().add(&sample);
    }
    pods
}

impl Counters {
    fn add(&mut self, sample: &Sample<'_>) {
        let value = sample.value;
        match sample.name.strip_prefix(PREFIX).unwrap_or_default() {
            "requests_total" => {
                self.requests += value;
                self.writes += if WRITES.contains(&sample.label("verb")) { value } else { 0.0 };
                match sample.label("outcome") {
                    "refused" => self.refused += value,
                    "server_error" | "aborted" => self.failed += value,
                    _ => {}
                }
            }
            "watch_events_total" => self.events += value,
            "response_bytes_total" => self.bytes += value,
            "request_seconds_sum" => self.answer_seconds += value,
            "request_seconds_count" => self.answers += value,
            "request_seconds_bucket" => *self.buckets.entry(nanoseconds(sample.label("le"))).or_default() += value,
            "namespace_requests_total" => {
                *self.namespaces.entry(sample.label("object_namespace").to_owned()).or_default() += value;
            }
            _ => {}
        }
    }

    /// What was counted since `before`. A counter that is lower than before has begun anew.
    pub(super) fn since(&self, before: &Self) -> Self {
        let number = |read: fn(&Self) -> f64| increase(read(self), read(before));
        Self {
            requests: number(|one| one.requests),
            writes: number(|one| one.writes),
            refused: number(|one| one.refused),
            failed: number(|one| one.failed),
            events: number(|one| one.events),
            bytes: number(|one| one.bytes),
            answers: number(|one| one.answers),
            answer_seconds: number(|one| one.answer_seconds),
            buckets: increases(&self.buckets, &before.buckets),
            namespaces: increases(&self.namespaces, &before.namespaces),
        }
    }

    /// The time in seconds within which 99 of 100 requests were answered, as far as buckets can say it: the end of that
    /// bucket. Infinite where it is longer than the last one. `None`: there was no answer.
    pub(super) fn slowest_hundredth(&self) -> Option<f64> {
        let all = self.buckets.values().copied().fold(0.0, f64::max);
        let (end, _) = self.buckets.iter().find(|(_, count)| all > 0.0 && **count >= all * 0.99)?;
        Some(if *end == u64::MAX { f64::INFINITY } else { std::time::Duration::from_nanos(*end).as_secs_f64() })
    }
}

fn increase(now: f64, before: f64) -> f64 {
    if now >= before { now - before } else { now }
}

fn increases<K: Ord + Clone>(now: &BTreeMap<K, f64>, before: &BTreeMap<K, f64>) -> BTreeMap<K, f64> {
    let of = |(key, value): (&K, &f64)| (key.clone(), increase(*value, before.get(key).copied().unwrap_or_default()));
    now.iter().map(of).collect()
}

/// Of a bucket's upper end in seconds. What is no number of seconds, such as `+Inf`, is longer than all.
fn nanoseconds(seconds: &str) -> u64 {
    let end = seconds.parse().ok().and_then(|seconds| std::time::Duration::try_from_secs_f64(seconds).ok());
    end.and_then(|end| u64::try_from(end.as_nanos()).ok()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = r#"ctrlmesh_proxy_pod_requests_total{namespace="ops",pod="a",shard="s",verb="patch",group="",resource="pods",outcome="ok"} 4
ctrlmesh_proxy_pod_requests_total{namespace="ops",pod="a",shard="s",verb="list",group="",resource="pods",outcome="refused"} 2
ctrlmesh_proxy_pod_requests_total{namespace="ops",pod="b",shard="t",verb="get",group="",resource="pods",outcome="aborted"} 1
ctrlmesh_proxy_pod_watch_events_total{namespace="ops",pod="a",shard="s",group="",resource="pods"} 7
ctrlmesh_proxy_pod_response_bytes_total{namespace="ops",pod="a",shard="s",group="",resource="pods"} 100
ctrlmesh_proxy_pod_request_seconds_sum{namespace="ops",pod="a",shard="s",verb="patch"} 0.5
ctrlmesh_proxy_pod_request_seconds_count{namespace="ops",pod="a",shard="s",verb="patch"} 100
ctrlmesh_proxy_pod_request_seconds_bucket{le="0.001",namespace="ops",pod="a",shard="s",verb="patch"} 98
ctrlmesh_proxy_pod_request_seconds_bucket{le="0.002",namespace="ops",pod="a",shard="s",verb="patch"} 99
ctrlmesh_proxy_pod_request_seconds_bucket{le="+Inf",namespace="ops",pod="a",shard="s",verb="patch"} 100
ctrlmesh_proxy_pod_namespace_requests_total{namespace="ops",pod="a",shard="s",object_namespace="shop"} 5
ctrlmesh_proxy_requests_total{verb="get",outcome="ok"} 9
"#;

    fn key(pod: &str, shard: &str) -> PodKey {
        PodKey { namespace: "ops".to_owned(), pod: pod.to_owned(), shard: shard.to_owned() }
    }

    #[test]
    fn what_metrics_say_of_a_pod_is_added_up() {
        let all = counters(PAGE);
        let a = &all[&key("a", "s")];
        assert_eq!((a.requests, a.writes, a.refused, a.failed), (6.0, 4.0, 2.0, 0.0));
        assert_eq!((a.events, a.bytes, a.namespaces["shop"]), (7.0, 100.0, 5.0));
        assert_eq!(a.slowest_hundredth(), Some(0.002));
        assert_eq!((all.len(), all[&key("b", "t")].failed), (2, 1.0));
        assert_eq!(all[&key("b", "t")].slowest_hundredth(), None);
    }

    #[test]
    fn a_counter_that_begins_anew_counts_from_nothing() {
        let before = Counters { requests: 10.0, writes: 5.0, ..Counters::default() };
        let now = Counters { requests: 12.0, writes: 1.0, ..Counters::default() };
        let since = now.since(&before);
        assert_eq!((since.requests, since.writes), (2.0, 1.0));
    }
}

//! Says how many requests pods make in a second, and how fast these are answered.
//!
//! Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Serialize, Serializer};

use super::counters::{Counters, PodKey};

/// What one pod did within a time.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PodTraffic {
    pub(crate) key: PodKey,
    pub(super) counters: Counters,
    pub(super) within: Duration,
}

impl PodTraffic {
    /// So many requests within two seconds.
    #[cfg(test)]
    pub(crate) fn of_requests(namespace: &str, pod: &str, requests: f64) -> Self {
        let (namespace, pod, shard) = (namespace.to_owned(), pod.to_owned(), String::new());
        let counters = Counters { requests, ..Counters::default() };
        Self { key: PodKey { namespace, pod, shard }, counters, within: Duration::from_secs(2) }
    }

    /// Requests for objects of these namespaces within two seconds.
    #[cfg(test)]
    pub(crate) fn of_namespaces(namespace: &str, pod: &str, requests: &[(&str, f64)]) -> Self {
        let mut traffic = Self::of_requests(namespace, pod, requests.iter().map(|(_, count)| count).sum());
        traffic.counters.namespaces = requests.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
        traffic
    }

    /// For how long they were counted. Never zero.
    pub(crate) fn seconds(&self) -> f64 {
        self.within.as_secs_f64().max(f64::MIN_POSITIVE)
    }

    pub(crate) fn requests(&self) -> f64 {
        self.counters.requests
    }

    /// Requests by the namespace of their objects.
    pub(crate) fn by_namespace(&self) -> impl Iterator<Item = (&str, f64)> {
        self.counters.namespaces.iter().map(|(namespace, count)| (namespace.as_str(), *count))
    }
}

/// In a second.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Rates {
    pub(crate) requests: f64,
    pub(crate) writes: f64,
    /// By policy.
    pub(crate) refused: f64,
    /// Answers with a status from 500, and requests that were aborted.
    pub(crate) failed: f64,
    /// Of watches.
    pub(crate) events: f64,
    /// Of response bodies.
    pub(crate) bytes: f64,
    /// Mean time until an answer. Absent: there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mean_seconds: Option<f64>,
    /// Within which 99 of 100 answers came. Infinite, and null in JSON: longer than the proxy measures.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "finite")]
    pub(crate) p99_seconds: Option<f64>,
}

impl Rates {
    pub(crate) fn of<'a>(pods: impl IntoIterator<Item = &'a PodTraffic>) -> Self {
        let (mut rates, mut all) = (Self::default(), Counters::default());
        for pod in pods {
            let (counters, seconds) = (&pod.counters, pod.seconds());
            rates.requests += counters.requests / seconds;
            rates.writes += counters.writes / seconds;
            rates.refused += counters.refused / seconds;
            rates.failed += counters.failed / seconds;
            rates.events += counters.events / seconds;
            rates.bytes += counters.bytes / seconds;
            all.answers += counters.answers;
            all.answer_seconds += counters.answer_seconds;
            counters.buckets.iter().for_each(|(end, count)| *all.buckets.entry(*end).or_default() += count);
        }
        rates.mean_seconds = (all.answers > 0.0).then(|| all.answer_seconds / all.answers);
        rates.p99_seconds = all.slowest_hundredth();
        rates
    }
}

/// Requests in a second by the namespace of their objects.
pub(super) fn by_namespace<'a>(pods: impl IntoIterator<Item = &'a PodTraffic>) -> BTreeMap<&'a str, f64> {
    let mut namespaces = BTreeMap::new();
    for pod in pods {
        for (namespace, count) in pod.by_namespace().filter(|(_, count)| *count > 0.0) {
            *namespaces.entry(namespace).or_default() += count / pod.seconds();
        }
    }
    namespaces
}

#[expect(clippy::ref_option, reason = "as serde calls it")]
fn finite<S: Serializer>(seconds: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
    seconds.filter(|seconds| seconds.is_finite()).serialize(serializer)
}

/// Groups pods by this.
pub(super) fn grouped<K: Ord>(pods: &[PodTraffic], by: impl Fn(&PodTraffic) -> K) -> BTreeMap<K, Vec<&PodTraffic>> {
    let mut groups: BTreeMap<K, Vec<&PodTraffic>> = BTreeMap::new();
    for pod in pods {
        groups.entry(by(pod)).or_default().push(pod);
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, requests: f64, seconds: u64) -> PodTraffic {
        let counters = Counters {
            requests,
            answers: requests,
            answer_seconds: requests / 100.0,
            buckets: BTreeMap::from([(10_000_000, requests), (u64::MAX, requests)]),
            namespaces: BTreeMap::from([("shop".to_owned(), requests), ("idle".to_owned(), 0.0)]),
            ..Counters::default()
        };
        let key = PodKey { pod: name.to_owned(), ..PodKey::default() };
        PodTraffic { key, counters, within: Duration::from_secs(seconds) }
    }

    #[test]
    fn rates_of_pods_are_added_up() {
        let pods = [pod("a", 20.0, 10), pod("b", 30.0, 5)];
        let rates = Rates::of(&pods);
        assert!((rates.requests - 8.0).abs() < 1e-9, "{rates:?}");
        assert_eq!((rates.p99_seconds, rates.mean_seconds.map(|mean| (mean * 1e3).round())), (Some(0.01), Some(10.0)));
        assert_eq!(by_namespace(&pods).into_iter().collect::<Vec<_>>(), [("shop", 8.0)]);
        assert_eq!(Rates::of(&[]), Rates::default());
    }

    #[test]
    fn pods_are_grouped_by_what_is_asked_for() {
        let pods = [pod("a", 1.0, 1), pod("b", 1.0, 1), pod("a", 1.0, 1)];
        let groups = grouped(&pods, |pod| pod.key.pod.clone());
        let sizes: Vec<_> = groups.values().map(Vec::len).collect();
        assert_eq!(sizes, [2, 1]);
    }
}

//! Writes the metrics of pods when they are scraped.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ctrlmesh_runtime::sync::lock;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

use super::super::reasons::{OUTCOMES, VERBS};
use super::{Pod, PodMetrics, PodRequests, ResourceRequests};

/// A pod as one scrape shows it.
struct ShownPod {
    /// `NAMESPACE/NAME`.
    full_name: String,
    namespace: String,
    name: String,
    shard: String,
    epoch: Option<u64>,
    requests: Option<Arc<PodRequests>>,
    bypassed: u64,
}

impl ShownPod {
    fn labels(&self) -> [(&str, &str); 3] {
        [("namespace", &self.namespace), ("pod", &self.name), ("shard", &self.shard)]
    }
}

impl PodMetrics {
    fn shown(&self) -> Vec<ShownPod> {
        let shown = |(pod, state): (&String, &Pod)| {
            let (namespace, name) = pod.split_once('/').unwrap_or(("", pod));
            let policy = state.policy.clone().unwrap_or_default();
            ShownPod {
                full_name: pod.clone(),
                namespace: namespace.to_owned(),
                name: name.to_owned(),
                shard: policy.shard,
                epoch: state.policy.as_ref().map(|policy| policy.epoch),
                requests: state.requests.upgrade(),
                bypassed: state.bypassed,
            }
        };
        lock(&self.pods).iter().map(shown).collect()
    }
}

impl Collector for PodMetrics {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let pods = self.shown();
        let served: Vec<(&ShownPod, &PodRequests)> =
            pods.iter().filter_map(|pod| Some((pod, pod.requests.as_deref()?))).collect();
        epochs(&mut to, &pods)?;
        bypassed(&mut to, &pods)?;
        requests(&mut to, &served)?;
        let help = "Frames of watches, bookmarks included, but for objects that were there before";
        of_resources(&mut to, &served, "watch_events", help, None, |one| &one.watch_events)?;
        let help = "Bytes of response bodies, but for those of tunnels";
        of_resources(&mut to, &served, "response", help, Some(&Unit::Bytes), |one| &one.response_bytes)?;
        answer_times(&mut to, &served)?;
        namespaces(&mut to, &served)?;
        members(&mut to, &served)
    }
}

fn epochs(to: &mut DescriptorEncoder<'_>, pods: &[ShownPod]) -> fmt::Result {
    let mut family = to.encode_descriptor("policy_epoch", "Epoch of the policy in force", None, MetricType::Gauge)?;
    for (pod, epoch) in pods.iter().filter_map(|pod| Some((pod, pod.epoch?))) {
        let epoch = i64::try_from(epoch).unwrap_or(i64::MAX);
        family.encode_family(&[("pod", pod.full_name.as_str())])?.encode_gauge(&epoch)?;
    }
    Ok(())
}

fn bypassed(to: &mut DescriptorEncoder<'_>, pods: &[ShownPod]) -> fmt::Result {
    let help = "Packets that pods sent to the API server past the proxy, and that were dropped";
    let mut family = to.encode_descriptor("pod_bypass_packets", help, None, MetricType::Counter)?;
    pods.iter().filter(|pod| pod.bypassed > 0).try_for_each(|pod| counter(&mut family, &pod.labels(), pod.bypassed))
}

fn requests(to: &mut DescriptorEncoder<'_>, pods: &[(&ShownPod, &PodRequests)]) -> fmt::Result {
    let help = "Requests of pods that ended, by verb, resource and outcome";
    let mut family = to.encode_descriptor("pod_requests", help, None, MetricType::Counter)?;
    for (pod, requests) in pods {
        for resource in requests.resources() {
            let traces = lock(&resource.traces);
            for (at_verb, (verb, counts)) in VERBS.iter().zip(&resource.counts).enumerate() {
                for (at_outcome, (outcome, count)) in OUTCOMES.iter().zip(counts).enumerate() {
                    let count = count.load(Ordering::Relaxed);
                    let [namespace, name, shard] = pod.labels();
                    let [group, plural] = resource.labels();
                    let labels = [namespace, name, shard, ("verb", verb), group, plural, ("outcome", outcome)];
                    match traces.get(&(at_verb, at_outcome)) {
                        Some(trace) => trace.encode(count, family.encode_family(&labels)?)?,
                        None if count > 0 => counter(&mut family, &labels, count)?,
                        None => {}
                    }
                }
            }
        }
    }
    Ok(())
}

fn of_resources(
    to: &mut DescriptorEncoder<'_>,
    pods: &[(&ShownPod, &PodRequests)],
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    count_of: impl Fn(&ResourceRequests) -> &AtomicU64,
) -> fmt::Result {
    let name = format!("pod_{name}");
    let mut family = to.encode_descriptor(&name, help, unit, MetricType::Counter)?;
    for (pod, requests) in pods {
        for resource in requests.resources() {
            let count = count_of(&resource).load(Ordering::Relaxed);
            let [namespace, name, shard] = pod.labels();
            let [group, plural] = resource.labels();
            if count > 0 {
                counter(&mut family, &[namespace, name, shard, group, plural], count)?;
            }
        }
    }
    Ok(())
}

fn answer_times(to: &mut DescriptorEncoder<'_>, pods: &[(&ShownPod, &PodRequests)]) -> fmt::Result {
    let help = "Time from the end of a request's head to the API server's answer, but for watches, tunnels and logs";
    let mut family = to.encode_descriptor("pod_request", help, Some(&Unit::Seconds), MetricType::Histogram)?;
    for (pod, requests) in pods {
        for (verb, times) in VERBS.iter().zip(&requests.answer_times) {
            let [namespace, name, shard] = pod.labels();
            if !times.is_empty() {
                times.encode(family.encode_family(&[namespace, name, shard, ("verb", verb)])?)?;
            }
        }
    }
    Ok(())
}

fn namespaces(to: &mut DescriptorEncoder<'_>, pods: &[(&ShownPod, &PodRequests)]) -> fmt::Result {
    let help = "Requests of pods for objects in a namespace, by that; those of quiet ones as `_other`";
    let mut family = to.encode_descriptor("pod_namespace_requests", help, None, MetricType::Counter)?;
    for (pod, requests) in pods {
        let mut counts = lock(&requests.namespaces).counts();
        counts.sort_unstable();
        for (of, count) in counts {
            let [namespace, name, shard] = pod.labels();
            counter(&mut family, &[namespace, name, shard, ("object_namespace", &of)], count)?;
        }
    }
    Ok(())
}

fn members(to: &mut DescriptorEncoder<'_>, pods: &[(&ShownPod, &PodRequests)]) -> fmt::Result {
    let help = "Requests of pods to member clusters that ended, by the member and outcome";
    let mut family = to.encode_descriptor("pod_member_requests", help, None, MetricType::Counter)?;
    for (pod, requests) in pods {
        for (cluster, member) in &*lock(&requests.members) {
            for (outcome, count) in OUTCOMES.iter().zip(&member.0) {
                let count = count.load(Ordering::Relaxed);
                let [namespace, name, shard] = pod.labels();
                if count > 0 {
                    let labels = [namespace, name, shard, ("cluster", cluster), ("outcome", outcome)];
                    counter(&mut family, &labels, count)?;
                }
            }
        }
    }
    Ok(())
}

fn counter(family: &mut MetricEncoder<'_>, labels: &[(&str, &str)], count: u64) -> fmt::Result {
    let labels: Vec<(&str, &str)> = labels.to_vec();
    family.encode_family(&labels)?.encode_counter::<NoLabelSet, _, u64>(&count, None)
}

impl ResourceRequests {
    fn labels(&self) -> [(&str, &str); 2] {
        [("group", &self.group), ("resource", &self.resource)]
    }
}

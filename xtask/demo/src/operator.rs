//! Describes an operator to the observer, and reads its objects.
//!
//! Reading is pure: JSON in, [`World`] out.

use std::collections::BTreeMap;

use ctrlmesh_common::names::{LOCK_SEPARATOR, label};
use serde_json::Value;

use crate::audit::Resource;
use crate::view::{Pod, Work, World};

/// An operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operator {
    /// Its namespace.
    pub namespace: &'static str,
    /// Its Deployment, and its service account.
    pub name: &'static str,
    /// The label, `key=value`, by which its pods are known.
    pub label: &'static str,
    /// The name of its leader-election lock; none where it has none.
    pub lock: Option<&'static str>,
    /// Whether its status may say that an object is done before everything for it is made: then it is once the operator
    /// has written nothing for a while.
    pub settles: bool,
    /// The kind of its work.
    pub resource: Resource,
    /// The path of all its work.
    pub work: &'static str,
    /// The port of its metrics.
    pub metrics: u16,
    /// The metric that counts its reconciles.
    pub reconciles: &'static str,
    /// The metric with which its client counts the API server's answers, and the label of their status.
    pub answers: (&'static str, &'static str),
}

/// What the API server has of it, each as JSON.
#[derive(Clone, Debug, Default)]
pub struct ClusterObjects {
    /// The list of its pods.
    pub pods: Value,
    /// The list of the Leases of its namespace that have not expired.
    pub leases: Value,
    /// The list of the ShardingConfigs of its namespace; null before there is such a kind.
    pub configs: Value,
    /// The list of its work.
    pub work: Value,
}

impl Operator {
    /// The example operator, with Websites.
    pub fn example() -> Self {
        Self {
            namespace: "example-operator",
            name: "example-operator",
            label: "app=example-operator",
            lock: Some("websites.web.example.com"),
            settles: false,
            resource: Resource::new("web.example.com", "websites"),
            work: "/apis/web.example.com/v1alpha1/websites",
            metrics: 8080,
            reconciles: "controller_runtime_reconcile_total",
            answers: ("rest_client_requests_total", "code"),
        }
    }

    /// prometheus-operator, with Prometheuses. It elects no leader: where several run, all work.
    pub fn prometheus() -> Self {
        Self {
            namespace: "default",
            name: "prometheus-operator",
            label: "app.kubernetes.io/name=prometheus-operator",
            lock: None,
            settles: true,
            resource: Resource::new("monitoring.coreos.com", "prometheuses"),
            work: "/apis/monitoring.coreos.com/v1/prometheuses",
            metrics: 8080,
            reconciles: "prometheus_operator_reconcile_operations_total",
            answers: ("prometheus_operator_kubernetes_client_http_requests_total", "status_code"),
        }
    }

    /// How many replicas of it run while nothing is divided: where it has no lock, several would all work.
    pub fn replicas_alone(&self) -> usize {
        if self.lock.is_some() { 3 } else { 1 }
    }

    /// What `found` says.
    pub fn world(&self, found: &ClusterObjects) -> World {
        let root = items(&found.configs).find(|config| config["spec"].get("root").is_some());
        let work: Vec<Work> = items(&found.work).map(read_work).collect();
        let pods: BTreeMap<String, Pod> = items(&found.pods).filter(|pod| is_alive(pod)).map(read_pod).collect();
        let shard = |(name, pod): (&String, &Pod)| pod.shard.clone().map(|shard| (name.clone(), [shard].into()));
        World {
            shards: pods.iter().filter_map(shard).collect(),
            pods,
            addresses: items(&found.pods).flat_map(addresses).collect(),
            locks: self.lock.map(|lock| locks(&found.leases, lock)),
            resource: self.resource.clone(),
            settles: self.settles,
            spaces: work.iter().map(|work| work.namespace.clone()).collect(),
            work,
            epoch: root.and_then(|root| root["status"]["epoch"].as_i64()),
            acknowledged: acknowledged(&found.configs),
        }
    }
}

/// The sum of a metric, of all its labels, in a text as Prometheus reads it; none where it is not there.
pub fn metric(text: &str, name: &str) -> Option<f64> {
    samples(text, name).fold(None, |sum, (_, value)| Some(sum.unwrap_or_default() + value))
}

/// The sums of a metric by the values of one of its labels.
pub fn by_label(text: &str, name: &str, label: &str) -> BTreeMap<String, f64> {
    let mut sums = BTreeMap::new();
    for (labels, value) in samples(text, name) {
        let at = ["{", ","].map(|before| labels.split_once(&format!("{before}{label}=\"")));
        if let Some((_, rest)) = at.into_iter().flatten().next() {
            let named = rest.split('"').next().unwrap_or_default();
            *sums.entry(named.to_owned()).or_default() += value;
        }
    }
    sums
}

/// What a metric counts: the labels, as they are written, and the number.
fn samples<'a>(text: &'a str, name: &'a str) -> impl Iterator<Item = (&'a str, f64)> {
    text.lines().filter_map(move |line| {
        let rest = line.strip_prefix(name).filter(|rest| rest.starts_with(['{', ' ']))?;
        let (labels, value) = rest.rsplit_once(' ')?;
        Some((labels, value.parse().ok()?))
    })
}

fn addresses(pod: &Value) -> impl Iterator<Item = String> {
    let all = pod["status"]["podIPs"].as_array().into_iter().flatten();
    all.filter_map(|one| Some(one["ip"].as_str()?.to_owned()))
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list["items"].as_array().into_iter().flatten()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn labels(object: &Value) -> BTreeMap<String, String> {
    let labels = object["metadata"]["labels"].as_object().into_iter().flatten();
    labels.map(|(key, value)| (key.clone(), text(value))).collect()
}

fn is_alive(pod: &Value) -> bool {
    let over = matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
    pod["metadata"].get("deletionTimestamp").is_none() && !over
}

fn read_pod(pod: &Value) -> (String, Pod) {
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    let mut conditions = conditions.filter(|one| one["type"] == "Ready");
    let containers = pod["status"]["containerStatuses"].as_array().into_iter().flatten();
    let read = Pod {
        shard: labels(pod).remove(label::SHARDING_CONFIG_INJECTED),
        ready: conditions.any(|one| one["status"] == "True"),
        restarts: containers.filter_map(|one| one["restartCount"].as_u64()).sum(),
        ..Pod::default()
    };
    (text(&pod["metadata"]["name"]), read)
}

/// Who holds `lock` and the shards' own: client-go calls the holder `<host name>_<uuid>`, and a pod's is its name.
fn locks(leases: &Value, lock: &str) -> BTreeMap<String, String> {
    let ours = items(leases).filter_map(|lease| {
        let name = text(&lease["metadata"]["name"]);
        let rest = name.strip_prefix(lock)?;
        let fits = rest.is_empty() || rest.starts_with(LOCK_SEPARATOR);
        let holder = text(&lease["spec"]["holderIdentity"]);
        let pod = holder.split('_').next().filter(|pod| fits && !pod.is_empty())?.to_owned();
        Some((name, pod))
    });
    ours.collect()
}

fn acknowledged(configs: &Value) -> BTreeMap<String, i64> {
    let pods = items(configs).flat_map(|config| config["status"]["pods"].as_array().into_iter().flatten());
    pods.filter_map(|pod| Some((text(&pod["name"]), pod["epoch"].as_i64()?))).collect()
}

/// An object is done where its status speaks of what its specification is now.
fn read_work(object: &Value) -> Work {
    let (meta, status) = (&object["metadata"], &object["status"]);
    let conditions = status["conditions"].as_array().into_iter().flatten();
    let mut observed = conditions.map(|one| &one["observedGeneration"]).chain([&status["observedGeneration"]]);
    Work {
        namespace: text(&meta["namespace"]),
        name: text(&meta["name"]),
        labels: labels(object),
        done: observed.any(|seen| seen.is_i64() && *seen == meta["generation"]),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_the_api_server_has_becomes_a_world() {
        let pod = |name: &str, ready: &str| {
            json!({"metadata": {"name": name, "labels": {label::SHARDING_CONFIG_INJECTED: "op-1-normal"}},
                "status": {"conditions": [{"type": "Ready", "status": ready}], "containerStatuses": [{"restartCount": 2}]}})
        };
        let mut leaving = pod("op-c", "True");
        leaving["metadata"]["deletionTimestamp"] = json!("2026-11-21T15:00:00Z");
        leaving["status"]["podIPs"] = json!([{"ip": "10.0.0.7"}]);
        let lease = |name: &str, holder: &str| json!({"metadata": {"name": name}, "spec": {"holderIdentity": holder}});
        let found = ClusterObjects {
            pods: json!({"items": [pod("op-a", "True"), pod("op-b", "False"), leaving]}),
            leases: json!({"items": [
                lease("websites.web.example.com---op-1-normal", "op-a_2b1f"),
                lease("websites.web.example.com", ""),
                lease("another", "op-b_1"),
            ]}),
            configs: json!({"items": [
                {"spec": {"root": {}}, "status": {"epoch": 7}},
                {"spec": {}, "status": {"epoch": 7, "pods": [{"name": "op-a", "epoch": 7}, {"name": "op-b"}]}},
            ]}),
            work: json!({"items": [
                {"metadata": {"namespace": "a", "name": "one", "generation": 2, "labels": {"slot": "3"}}, "status": {"observedGeneration": 2}},
                {"metadata": {"namespace": "a", "name": "two", "generation": 2}, "status": {"observedGeneration": 1}},
                {"metadata": {"namespace": "a", "name": "new", "generation": 1}},
                {"metadata": {"namespace": "a", "name": "old", "generation": 4}, "status": {"conditions": [{"observedGeneration": 4}]}},
            ]}),
        };
        let world = Operator::example().world(&found);
        assert_eq!(world.pods.keys().collect::<Vec<_>>(), ["op-a", "op-b"]);
        assert_eq!(world.addresses, ["10.0.0.7".to_owned()].into(), "of one that is leaving");
        assert!(world.works("op-a") && !world.works("op-b"));
        assert_eq!(world.pods["op-a"].restarts, 2);
        assert_eq!((world.epoch, &world.acknowledged), (Some(7), &[("op-a".to_owned(), 7)].into()));
        assert_eq!(world.work.iter().map(|work| work.done).collect::<Vec<_>>(), [true, false, false, true]);
        assert_eq!(Operator::example().world(&ClusterObjects::default()).pods.len(), 0);
    }

    #[test]
    fn a_metric_is_summed_over_its_labels() {
        let text =
            "# HELP a_total x\na_total{result=\"ok\"} 3\na_total{result=\"error, no\"} 1.5e1\na_total_seconds 9\n";
        assert_eq!(metric(text, "a_total"), Some(18.0));
        assert_eq!(metric(text, "b_total"), None);
        let by = by_label(text, "a_total", "result");
        assert_eq!(by, [("ok".to_owned(), 3.0), ("error, no".to_owned(), 15.0)].into());
    }
}

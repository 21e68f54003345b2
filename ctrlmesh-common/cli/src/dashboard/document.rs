//! What the page shows: each root as `ctrlmesh status` has it, with what moves, its trial and its traffic.
//!
//! Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use ctrlmesh_common::api::{CircuitBreaker, RolloutStatus, ShardingConfig};
use ctrlmesh_common::slots::Slot;
use jiff::Timestamp;
use kube::ResourceExt as _;
use serde::Serialize;

use crate::status::overview::{self, Overview};
use crate::status::shards::ShardOverview;
use crate::top::sample::Sample;
use crate::top::traffic::{PodTraffic, Rates};

/// What pods ask for, or why that is not known. `None`: it is being counted.
pub(super) type Traffic = Option<Result<Arc<Sample>, String>>;

/// What the page shows.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Page {
    roots: Vec<PageRoot>,
    /// Why rates are missing. Absent: none are, or they are being counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    no_rates: Option<String>,
    /// Since when this is not renewed, and why. Absent: it is as the cluster is.
    #[serde(skip_serializing_if = "Option::is_none")]
    stale: Option<Stale>,
}

#[derive(Clone, Debug, Serialize)]
struct Stale {
    since: Timestamp,
    error: String,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct PageRoot {
    #[serde(flatten)]
    overview: Overview,
    is_well: bool,
    /// Former owners of slots that are on their way.
    moving: BTreeMap<Slot, String>,
    /// The same of namespaces that a canary has, or had, by name.
    moving_namespaces: BTreeMap<String, String>,
    /// Absent: the root tries no versions.
    #[serde(skip_serializing_if = "Option::is_none")]
    rollout: Option<RolloutStatus>,
    /// By shard.
    rates: BTreeMap<String, Rates>,
}

impl Page {
    pub(super) fn of(configs: &[ShardingConfig], breakers: &[CircuitBreaker], traffic: &Traffic) -> Self {
        let roots = overview::overviews(configs, breakers).into_iter().map(|overview| {
            let mut all = configs.iter();
            let is_it = |one: &&ShardingConfig| {
                one.namespace().as_ref() == Some(&overview.namespace) && one.name_any() == overview.name
            };
            PageRoot::of(all.find(is_it), overview, traffic)
        });
        let no_rates = match traffic {
            Some(Err(why)) => Some(why.clone()),
            Some(Ok(sample)) if !sample.not_read.is_empty() => Some(sample.not_read.join("; ")),
            Some(Ok(_)) | None => None,
        };
        Self { roots: roots.collect(), no_rates, stale: None }
    }

    /// The same, which cannot be renewed.
    pub(super) fn stale(mut self, since: Timestamp, error: String) -> Self {
        self.stale = Some(Stale { since, error });
        self
    }
}

impl PageRoot {
    fn of(config: Option<&ShardingConfig>, overview: Overview, traffic: &Traffic) -> Self {
        let status = config.and_then(|config| config.status.as_ref());
        let revoked = status.and_then(|status| status.ownership.as_ref()?.revoked.as_ref());
        let pods = traffic.iter().flatten().flat_map(|sample| &sample.pods);
        let pods: Vec<&PodTraffic> = pods.filter(|pod| pod.key.namespace == overview.namespace).collect();
        let rates = |shard: &ShardOverview| {
            let its = pods.iter().copied().filter(|pod| shard.pods.iter().any(|one| one.name == pod.key.pod));
            let its: Vec<_> = its.collect();
            (!its.is_empty()).then(|| (shard.name.clone(), Rates::of(its)))
        };
        Self {
            is_well: overview.is_well(),
            moving_namespaces: revoked.map(|revoked| revoked.namespaces.clone()).unwrap_or_default(),
            moving: revoked.map(|revoked| revoked.slots.clone()).unwrap_or_default(),
            rollout: status.and_then(|status| status.rollout.clone()),
            rates: overview.shards.iter().filter_map(rates).collect(),
            overview,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn configs() -> Vec<ShardingConfig> {
        let config = |name: &str, labels: Value, spec: Value, status: Value| {
            json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig", "spec": spec,
                "metadata": {"namespace": "ops", "name": name, "labels": labels}, "status": status})
        };
        let rule = json!({"root": {"prefix": "web", "targetDeployment": "web"}});
        let table = json!({"epoch": 4, "slots": {"1": "web-1-normal"}, "revoked": {"epoch": 4,
            "slots": {"2": "web-2-normal"}, "namespaces": {"shop": "web-2-normal"}}});
        let made = json!({"ctrlmesh.kusionstack.io/auto-sharding-root": "web"});
        let all = json!([
            config("web", json!({}), rule, json!({"ownership": table})),
            config("web-1-normal", made, json!({}), json!({"pods": [{"name": "web-a"}]})),
        ]);
        serde_json::from_value(all).unwrap()
    }

    fn page(traffic: &Traffic) -> Value {
        serde_json::to_value(Page::of(&configs(), &[], traffic)).unwrap()
    }

    #[test]
    fn a_root_has_what_moves_and_the_rates_of_its_shards() {
        let pods = ["web-a", "foreign"].map(|pod| PodTraffic::of_requests("ops", pod, 5.0));
        let sample = Sample { pods: pods.into(), not_read: vec!["ops/side: gone".to_owned()] };
        let traffic = Some(Ok(sample.into()));
        assert_eq!(page(&traffic)["noRates"], "ops/side: gone");
        let root = &page(&traffic)["roots"][0];
        assert_eq!((&root["isWell"], &root["movingNamespaces"]), (&json!(false), &json!({"shop": "web-2-normal"})));
        assert_eq!((&root["name"], &root["moving"]), (&json!("web"), &json!({"2": "web-2-normal"})));
        assert_eq!(root["shards"][0]["slots"], json!(["1"]));
        let rates = root["rates"].as_object().unwrap();
        assert_eq!((rates.len(), &rates["web-1-normal"]["requests"]), (1, &json!(2.5)));
    }

    #[test]
    fn what_is_missing_says_why() {
        let none = page(&Some(Err("no proxy runs".to_owned())));
        assert_eq!((&none["noRates"], none.get("stale")), (&json!("no proxy runs"), None));
        let stale = Page::of(&configs(), &[], &None).stale(Timestamp::UNIX_EPOCH, "gone".to_owned());
        let stale = serde_json::to_value(stale).unwrap();
        assert_eq!(stale["stale"], json!({"since": "1970-01-01T00:00:00Z", "error": "gone"}));
        assert_eq!(stale.get("noRates"), None);
    }
}

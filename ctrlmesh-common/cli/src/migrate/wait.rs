//! Waits for what a step needs before the next one may begin.

use std::time::Duration;

use ctrlmesh_common::names::label;
use ctrlmesh_common::ownership::UNSHARDED;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{DynamicObject, ListParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use tokio::time::{self, Instant};

use super::error::MigrateError;
use super::object::{ObjectRef, POLICY, Resource, SHARDING_CONFIG};
use super::read::{self, OUR_MANAGER};
use super::snapshot::{Snapshot, is_disabled, is_enrolled, is_fenced, replicas};

/// Between two looks.
const PERIOD: Duration = Duration::from_millis(250);

/// Waits in one cluster, each time for so long at most.
#[derive(Clone)]
pub(super) struct Waiter {
    pub(super) client: Client,
    pub(super) timeout: Duration,
}

impl Waiter {
    /// Looks again and again, until `look` has no reason to wait any more.
    async fn until(
        &self,
        what: &str,
        mut look: impl AsyncFnMut() -> Result<Option<String>, MigrateError>,
    ) -> Result<(), MigrateError> {
        let end = Instant::now() + self.timeout;
        loop {
            let Some(reason) = look().await? else { return Ok(()) };
            if Instant::now() >= end {
                return Err(MigrateError::Waited { seconds: self.timeout.as_secs(), what: what.to_owned(), reason });
            }
            time::sleep(PERIOD).await;
        }
    }

    /// No pod of the Deployment is left.
    pub(super) async fn stopped(&self, deployment: &DynamicObject) -> Result<(), MigrateError> {
        let labels = deployment.data.pointer("/spec/selector/matchLabels").and_then(Value::as_object).cloned();
        let pairs = labels.into_iter().flatten().filter_map(|(key, value)| Some(format!("{key}={}", value.as_str()?)));
        let selector = pairs.collect::<Vec<_>>().join(",");
        let pods = Resource { group: "", version: "v1", kind: "Pod", plural: "pods" }.api_resource();
        let namespace = deployment.namespace().unwrap_or_default();
        let pods: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &namespace, &pods);
        self.until("the predecessor's manager has stopped", async || {
            let left = pods.list(&ListParams::default().labels(&selector)).await.map_err(|source| {
                MigrateError::Read { what: format!("pods of namespace {namespace}"), source: Box::new(source) }
            })?;
            let names: Vec<String> = left.items.iter().map(ResourceExt::name_any).collect();
            Ok((!names.is_empty()).then(|| format!("pods {} are left", names.join(", "))))
        })
        .await
    }

    /// The workload has only pods of its newest template, and all are ready.
    pub(super) async fn rolled_out(&self, workload: &ObjectRef) -> Result<(), MigrateError> {
        self.until(&format!("{workload} has rolled out"), async || {
            Ok(read::get(&self.client, workload).await?.and_then(|workload| unfinished(&workload)))
        })
        .await
    }

    /// A condition of a root is True, of its newest generation.
    pub(super) async fn condition(&self, root: &ObjectRef, condition: &str) -> Result<(), MigrateError> {
        self.until(&format!("{root} is {condition}"), async || {
            Ok(read::get(&self.client, root).await?.and_then(|root| missing(&root, condition)))
        })
        .await
    }

    /// Pods without a proxy own all that a root divides.
    pub(super) async fn handed_back(&self, root: &ObjectRef) -> Result<(), MigrateError> {
        self.until(&format!("{root} has handed back what its shards own"), async || {
            Ok(read::get(&self.client, root).await?.and_then(|root| sharded(&root)))
        })
        .await
    }

    /// A manager of ours leads, or none does.
    pub(super) async fn leading(&self, namespace: &str, wanted: bool) -> Result<(), MigrateError> {
        let what = if wanted { "a manager of ours leads" } else { "no manager of ours leads" };
        self.until(what, async || {
            Ok(match (leads(&self.client, namespace).await?, wanted) {
                (false, true) => Some(format!("nobody holds Lease {namespace}/{OUR_MANAGER}; apply deploy/")),
                (true, false) => Some(format!("somebody holds Lease {namespace}/{OUR_MANAGER}; stop the managers")),
                _ => None,
            })
        })
        .await
    }

    /// No root is kept by its fence, and no fence is left.
    pub(super) async fn unfenced(&self) -> Result<(), MigrateError> {
        self.until("no root is fenced", async || {
            let roots = read::list(&self.client, SHARDING_CONFIG, "").await?;
            let kept = roots.iter().find(|root| is_fenced(root));
            let policies = read::list(&self.client, POLICY, label::FENCE_ROOT).await?;
            let names = kept.into_iter().chain(&policies).map(|one| format!("{} is left", one.name_any()));
            Ok(names.collect::<Vec<_>>().into_iter().next())
        })
        .await
    }
}

/// Whether a manager of ours holds the Lease now.
///
/// # Errors
/// The API server does not say it.
pub(super) async fn leads(client: &Client, namespace: &str) -> Result<bool, MigrateError> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    let lease = leases.get_opt(OUR_MANAGER).await.map_err(|source| MigrateError::Read {
        what: format!("Lease {namespace}/{OUR_MANAGER}"),
        source: Box::new(source),
    })?;
    let now = Timestamp::now();
    Ok(lease.and_then(|lease| lease.spec).is_some_and(|spec| {
        let until = spec.renew_time.and_then(|renewed| {
            let lives = SignedDuration::from_secs(spec.lease_duration_seconds.unwrap_or_default().into());
            renewed.0.checked_add(lives).ok()
        });
        spec.holder_identity.is_some_and(|holder| !holder.is_empty()) && until.is_some_and(|until| until > now)
    }))
}

/// The workload of each root that is there, and the root.
pub(super) fn targets(snapshot: &Snapshot) -> Vec<(ObjectRef, ObjectRef)> {
    let of_root = |root: &DynamicObject| {
        let (kind, workload) = snapshot.target(root)?;
        Some((kind.of_object(workload), SHARDING_CONFIG.of_object(root)))
    };
    snapshot.roots().filter_map(of_root).collect()
}

/// The workload of each root that divides and is enrolled, and the root.
pub(super) fn enrolled(snapshot: &Snapshot) -> Vec<(ObjectRef, ObjectRef)> {
    let of_root = |root: &DynamicObject| {
        let (kind, workload) = snapshot.target(root)?;
        let is = is_enrolled(workload.data.pointer("/spec/template/metadata/labels"));
        is.then(|| (kind.of_object(workload), SHARDING_CONFIG.of_object(root)))
    };
    snapshot.roots().filter(|root| !is_disabled(root)).filter_map(of_root).collect()
}

/// Why a workload has not rolled out.
fn unfinished(workload: &DynamicObject) -> Option<String> {
    let number = |path: &str| workload.data.pointer(path).and_then(Value::as_i64).unwrap_or_default();
    let wanted = replicas(workload);
    let observed = number("/status/observedGeneration");
    if workload.metadata.generation.is_some_and(|generation| observed < generation) {
        return Some("its controller has not seen the change".to_owned());
    }
    let counts =
        ["updatedReplicas", "readyReplicas", "replicas"].map(|field| (field, number(&format!("/status/{field}"))));
    let wrong = counts.into_iter().find(|(_, count)| *count != wanted);
    wrong.map(|(field, count)| format!("{field} is {count} of {wanted}"))
}

/// What a shard of a root owns still, or what moves. A root that is not fenced has no table that counts.
fn sharded(root: &DynamicObject) -> Option<String> {
    if root.data.pointer("/spec/root/fence") == Some(&json!("Off")) {
        return None;
    }
    let table = root.data.pointer("/status/ownership")?;
    if let Some(revoked) = table.get("revoked").filter(|revoked| !revoked.is_null()) {
        return Some(format!("on its way: {revoked}"));
    }
    let owners = ["slots", "namespaces"].into_iter().filter_map(|field| table.get(field)?.as_object());
    let (what, owner) = owners.flatten().find(|(_, owner)| **owner != json!(UNSHARDED))?;
    Some(format!("{what} belongs to {}", owner.as_str().unwrap_or_default()))
}

/// Why a condition does not hold.
fn missing(root: &DynamicObject, kind: &str) -> Option<String> {
    let conditions = root.data.pointer("/status/conditions").and_then(Value::as_array);
    let Some(condition) = conditions.into_iter().flatten().find(|one| one["type"] == kind) else {
        return Some("no manager has said so yet".to_owned());
    };
    let is_newest = condition["observedGeneration"].as_i64() >= root.metadata.generation;
    let message = condition["message"].as_str().unwrap_or_default().to_owned();
    if condition["status"] == "True" && is_newest { None } else { Some(message) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(content: &Value) -> DynamicObject {
        let mut all = json!({"metadata": {"name": "op", "generation": 2}});
        all.as_object_mut().unwrap().extend(content.as_object().unwrap().clone());
        serde_json::from_value(all).unwrap()
    }

    #[test]
    fn a_rollout_ends_with_the_last_ready_pod() {
        let status = |observed: i64, updated: i64, ready: i64| {
            object(&json!({"spec": {"replicas": 3}, "status": {"observedGeneration": observed, "replicas": 3,
                "updatedReplicas": updated, "readyReplicas": ready}}))
        };
        assert_eq!(unfinished(&status(2, 3, 3)), None);
        assert!(unfinished(&status(1, 3, 3)).unwrap().contains("not seen"));
        assert_eq!(unfinished(&status(2, 2, 3)).unwrap(), "updatedReplicas is 2 of 3");
        assert_eq!(unfinished(&status(2, 3, 2)).unwrap(), "readyReplicas is 2 of 3");
    }

    #[test]
    fn a_root_is_handed_back_when_pods_without_a_proxy_own_all() {
        let table = |table: Value| object(&json!({"spec": {"root": {}}, "status": {"ownership": table}}));
        assert_eq!(sharded(&table(json!({"slots": {"0": UNSHARDED}, "namespaces": {"a": UNSHARDED}}))), None);
        assert_eq!(sharded(&object(&json!({}))), None, "it never had a table");
        let pinned = json!({"slots": {"0": UNSHARDED}, "namespaces": {"a": "op-0-canary"}});
        assert_eq!(sharded(&table(pinned)).as_deref(), Some("a belongs to op-0-canary"));
        let moving = json!({"slots": {"0": UNSHARDED}, "revoked": {"epoch": 3}});
        assert!(sharded(&table(moving)).unwrap().contains("on its way"));
    }

    #[test]
    fn a_condition_of_an_older_generation_does_not_count() {
        let root = |generation: i64, status: &str| {
            object(&json!({"status": {"conditions": [{"type": "Settled", "status": status, "message": "why",
                "observedGeneration": generation}]}}))
        };
        assert_eq!(missing(&root(2, "True"), "Settled"), None);
        assert_eq!(missing(&root(1, "True"), "Settled").as_deref(), Some("why"));
        assert_eq!(missing(&root(2, "False"), "Settled").as_deref(), Some("why"));
        assert!(missing(&root(2, "True"), "Labelled").is_some());
    }
}

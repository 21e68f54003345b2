//! Waits for what a step needs before the next one may begin.

mod lease;

use std::sync::Mutex;
use std::time::Duration;

use ctrlmesh_common::names::label;
use ctrlmesh_common::ownership::UNSHARDED;
use ctrlmesh_runtime::sync::lock;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::api::{DynamicObject, ListParams, PostParams};
use kube::core::Selector;
use kube::{Api, Client, Error, ResourceExt};
use serde::Deserialize as _;
use serde::de::Error as _;
use serde_json::{Value, json};
use tokio::time::{self, Instant};

use self::lease::{Leadership, LeaseWatch, Renewal};
use super::error::MigrateError;
use super::object::{MUTATING, ObjectRef, POD, POLICY, SHARDING_CONFIG};
use super::read::{self, OUR_MANAGER};
use super::snapshot::{
    Snapshot, has_fence_off, is_disabled, is_fenced, is_finished, is_to_be_enrolled, kept_by_partition, replicas,
};
use super::steps::guard;
use super::steps::webhooks::OUR_WEBHOOKS;

/// Between two looks.
const PERIOD: Duration = Duration::from_millis(250);

/// A namespace that is always there, and that webhooks mostly leave out.
const KUBE_SYSTEM: &str = "kube-system";

/// Waits in one cluster, each time for so long at most.
pub(super) struct Waiter {
    pub(super) client: Client,
    pub(super) timeout: Duration,
    /// The renewal of our managers' Lease after which none came.
    last_renewal: Mutex<Option<Renewal>>,
}

impl Waiter {
    pub(super) fn new(client: Client, timeout: Duration) -> Self {
        Self { client, timeout, last_renewal: Mutex::default() }
    }

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

    /// No pod of the Deployment runs any more.
    pub(super) async fn stopped(&self, deployment: &DynamicObject) -> Result<(), MigrateError> {
        let selector = pod_selector(deployment)?;
        let namespace = deployment.namespace().unwrap_or_default();
        let pods: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &namespace, &POD.api_resource());
        self.until(&format!("Deployment {namespace}/{} has stopped", deployment.name_any()), async || {
            let left = pods.list(&ListParams::default().labels_from(&selector)).await.map_err(|source| {
                MigrateError::Read { what: format!("pods of namespace {namespace}"), source: Box::new(source) }
            })?;
            let names: Vec<String> =
                left.items.iter().filter(|pod| !is_finished(pod)).map(ResourceExt::name_any).collect();
            Ok((!names.is_empty()).then(|| format!("pods {} are left", names.join(", "))))
        })
        .await
    }

    /// The API server enforces a policy that refuses pods. It does so some time after the policy is written.
    pub(super) async fn enforced(&self, policy: &str, system: &str) -> Result<(), MigrateError> {
        self.until(&format!("the API server enforces {} {policy}", POLICY.kind), async || {
            let mut reason = None;
            // A webhook that nobody answers may refuse the pod first, in one namespace.
            for namespace in [system, KUBE_SYSTEM] {
                match self.probe(policy, namespace).await? {
                    None => return Ok(None),
                    told => reason = reason.or(told),
                }
            }
            Ok(reason)
        })
        .await
    }

    /// Why it is not known that the policy is enforced.
    async fn probe(&self, policy: &str, namespace: &str) -> Result<Option<String>, MigrateError> {
        let pods: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), namespace, &POD.api_resource());
        let pod = serde_json::from_value(guard::probe(policy))
            .map_err(|source| MigrateError::Content { object: policy.to_owned(), source })?;
        match pods.create(&PostParams { dry_run: true, ..PostParams::default() }, &pod).await {
            Ok(_) => Ok(Some("a pod that it refuses would be let in".to_owned())),
            Err(Error::Api(status)) if status.message.contains(&format!("{} '{policy}'", POLICY.kind)) => Ok(None),
            Err(Error::Api(status)) => Ok(Some(status.message)),
            Err(source) => Err(MigrateError::Probe { policy: policy.to_owned(), source: Box::new(source) }),
        }
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
        let mut watch = LeaseWatch::default();
        self.until(what, async || {
            Ok(match (self.look(namespace, &mut watch).await?, wanted) {
                (Leadership::Held, true) | (Leadership::Vacant, false) => None,
                (_, true) => Some(format!("nobody renews Lease {namespace}/{OUR_MANAGER}; apply deploy/")),
                (_, false) => Some(format!("somebody holds Lease {namespace}/{OUR_MANAGER}; stop the managers")),
            })
        })
        .await
    }

    /// Whether a manager of ours leads. It may take as long as a Lease lasts to know that.
    pub(super) async fn leads(&self, namespace: &str) -> Result<bool, MigrateError> {
        let mut watch = LeaseWatch::after(lock(&self.last_renewal).clone());
        let mut leads = false;
        self.until("it is known whether a manager of ours leads", async || {
            let leadership = self.look(namespace, &mut watch).await?;
            leads = leadership == Leadership::Held;
            let is_unknown = leadership == Leadership::Unknown;
            Ok(is_unknown.then(|| format!("Lease {namespace}/{OUR_MANAGER} was not watched for long enough")))
        })
        .await?;
        *lock(&self.last_renewal) = watch.into_last();
        Ok(leads)
    }

    async fn look(&self, namespace: &str, watch: &mut LeaseWatch) -> Result<Leadership, MigrateError> {
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), namespace);
        let lease = leases.get_opt(OUR_MANAGER).await.map_err(|source| MigrateError::Read {
            what: format!("Lease {namespace}/{OUR_MANAGER}"),
            source: Box::new(source),
        })?;
        Ok(watch.look(lease.and_then(|lease| lease.spec).as_ref(), Instant::now()))
    }

    /// The API server can ask our webhook for pods. It trusts who answers once our leader has written a bundle.
    pub(super) async fn trusted_webhook(&self) -> Result<(), MigrateError> {
        let webhooks = MUTATING.named(None, OUR_WEBHOOKS);
        self.until("the API server trusts our webhook", async || {
            Ok(untrusted(read::get(&self.client, &webhooks).await?.as_ref()))
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

/// The workload of each root that is there, and the root.
pub(super) fn targets(snapshot: &Snapshot) -> Vec<(ObjectRef, ObjectRef)> {
    let of_root = |root: &DynamicObject| {
        let (kind, workload) = snapshot.target(root)?;
        Some((kind.of_object(workload), SHARDING_CONFIG.of_object(root)))
    };
    snapshot.roots().filter_map(of_root).collect()
}

/// A workload that a migration enrols.
pub(super) struct Enrolled {
    pub(super) workload: ObjectRef,
    pub(super) root: ObjectRef,
    /// No pod is kept by a partition.
    pub(super) is_whole: bool,
}

/// The workload of each root that divides and is enrolled.
pub(super) fn enrolled(snapshot: &Snapshot) -> Vec<Enrolled> {
    let of_root = |root: &DynamicObject| {
        let (kind, workload) = snapshot.target(root)?;
        let is = workload.data.pointer("/spec/template/metadata").is_some_and(is_to_be_enrolled);
        is.then(|| Enrolled {
            workload: kind.of_object(workload),
            root: SHARDING_CONFIG.of_object(root),
            is_whole: kept_by_partition(workload) == 0,
        })
    };
    snapshot.roots().filter(|root| !is_disabled(root)).filter_map(of_root).collect()
}

/// By which the Deployment knows its pods.
fn pod_selector(deployment: &DynamicObject) -> Result<Selector, MigrateError> {
    let selector = LabelSelector::deserialize(&deployment.data["spec"]["selector"]);
    selector
        .and_then(|selector| Selector::try_from(selector).map_err(serde_json::Error::custom))
        .map_err(|source| MigrateError::Selector { deployment: deployment.name_any(), source })
}

/// Why a workload has not rolled out.
fn unfinished(workload: &DynamicObject) -> Option<String> {
    let number = |path: &str| workload.data.pointer(path).and_then(Value::as_i64).unwrap_or_default();
    let wanted = replicas(workload);
    let observed = number("/status/observedGeneration");
    if workload.metadata.generation.is_some_and(|generation| observed < generation) {
        return Some("its controller has not seen the change".to_owned());
    }
    let to_update = wanted - kept_by_partition(workload);
    let updated = number("/status/updatedReplicas");
    if updated < to_update {
        return Some(format!("updatedReplicas is {updated} of {to_update}"));
    }
    let counts = ["readyReplicas", "replicas"].map(|field| (field, number(&format!("/status/{field}"))));
    let wrong = counts.into_iter().find(|(_, count)| *count != wanted);
    wrong.map(|(field, count)| format!("{field} is {count} of {wanted}"))
}

/// Why the API server cannot ask the webhooks of our configuration.
fn untrusted(webhooks: Option<&DynamicObject>) -> Option<String> {
    let Some(webhooks) = webhooks else {
        return Some(format!("there is no {} {OUR_WEBHOOKS}; apply deploy/", MUTATING.kind));
    };
    let hooks = webhooks.data.get("webhooks").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let has_bundle = |hook: &Value| {
        hook.pointer("/clientConfig/caBundle").and_then(Value::as_str).is_some_and(|bundle| !bundle.is_empty())
    };
    let is_trusted = !hooks.is_empty() && hooks.iter().all(has_bundle);
    (!is_trusted).then(|| format!("{} {OUR_WEBHOOKS} has no caBundle yet, which our leader writes", MUTATING.kind))
}

/// What a shard of a root owns still, or what moves. A root that is not fenced has no table that counts.
fn sharded(root: &DynamicObject) -> Option<String> {
    if has_fence_off(root) {
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
mod tests;

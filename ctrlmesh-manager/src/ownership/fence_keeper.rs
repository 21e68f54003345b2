//! Keeps the policies of all fences in the cluster as the roots say, and has every endpoint asked what it enforces.
//!
//! Only the leader does. What exists is replaced only in the version that was observed, so that a former leader
//! changes nothing. A policy that cannot be written holds no other up.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::{Stream, StreamExt as _, stream};
use k8s_openapi::api::admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::core::GroupVersion;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::watcher::{self, Config, Event, watcher};
use kube::{Api, Client, Resource, ResourceExt as _, discovery};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::{self, Instant};
use tracing::{info, warn};

use super::fence_plan::{self, Action, Existing, FencePlan, Stage};
use super::fence_state::{States, Unfenced};
use super::informer_policy;
use super::probe::Question;
use super::prober::{Prober, Target, Targets};
use crate::cluster::backoff::Backoff;
use crate::cluster::cache::Cache;
use crate::cluster::plan::Plans;
use crate::cluster::write_error::{WriteError, within};
use crate::telemetry;

const FIELD_MANAGER: &str = "ctrlmesh-manager";

/// Interval of discovery while the API server has no such policies.
const DISCOVERY: Duration = Duration::from_mins(1);

/// Limit for one write.
const DEADLINE: Duration = Duration::from_secs(10);

/// First and longest delay after a failed write.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// Roots whose policies are written at once.
const CONCURRENT: usize = 8;

/// The pause after a decision, as a multiple of its duration.
const PAUSE_FACTOR: u32 = 4;

pub struct FenceKeeper<Dial, MayWrite> {
    pub client: Client,
    /// The manager's namespace.
    pub namespace: String,
    pub cache: Arc<Cache>,
    pub plans: Plans,
    /// Makes a client of the API server at exactly this address.
    pub dial: Dial,
    /// Whether this replica leads now.
    pub may_write: MayWrite,
    pub states: watch::Sender<Arc<States>>,
}

/// When the policy of a root may be written again, and why it is not.
#[derive(Debug)]
struct Failure {
    count: u32,
    not_before: Instant,
    why: String,
}

type Failures = BTreeMap<String, Failure>;

impl<Dial, MayWrite> FenceKeeper<Dial, MayWrite>
where
    Dial: Fn(SocketAddr) -> Option<Client> + Send + Sync,
    MayWrite: Fn() -> bool + Send + Sync,
{
    /// Works until it is dropped: while this replica leads.
    pub async fn lead(&self) {
        let targets = watch::Sender::default();
        let Self { client, namespace: home, cache, dial, states, .. } = self;
        let prober = Prober { client, cache, home, dial, states };
        let asked = prober.run(targets.subscribe());
        tokio::join!(Box::pin(self.keep(&targets)), Box::pin(asked));
    }

    async fn keep(&self, targets: &watch::Sender<Targets>) {
        loop {
            let why = match self.is_served().await {
                Ok(true) => {
                    Box::pin(self.follow(targets)).await;
                    time::sleep(RETRY.0).await;
                    continue;
                }
                Ok(false) => Unfenced::Unsupported,
                Err(error) => Unfenced::NotWritten { why: telemetry::chain(&error) },
            };
            let wait = if why == Unfenced::Unsupported { DISCOVERY } else { RETRY.0 };
            self.leave_open(targets, &why, Instant::now() + wait).await;
        }
    }

    async fn is_served(&self) -> kube::Result<bool> {
        let group = GroupVersion::gv("admissionregistration.k8s.io", "v1");
        let group = discovery::pinned_group(&self.client, &group).await?;
        Ok(group.recommended_kind("ValidatingAdmissionPolicy").is_some())
    }

    /// Says of every root that it has no fence, and why, for a while.
    async fn leave_open(&self, targets: &watch::Sender<Targets>, why: &Unfenced, until: Instant) {
        let mut plans = self.plans.clone();
        loop {
            plans.mark_unchanged();
            self.open_all(targets, why);
            let changed = async { plans.changed().await.is_ok() };
            if !time::timeout_at(until, changed).await.unwrap_or_default() {
                return time::sleep_until(until).await;
            }
        }
    }

    fn open_all(&self, targets: &watch::Sender<Targets>, why: &Unfenced) {
        let Some(plan) = self.plans.borrow().clone() else { return };
        let stages = fence_plan::plan(&plan.snapshot, &Existing::default(), &self.namespace).stages;
        let open = |(root, stage)| {
            // Where policies cannot be listed, some may be left.
            let is_removed = stage == Stage::Removed && *why == Unfenced::Unsupported;
            (root, Target::Open(if is_removed { Unfenced::Removed } else { why.clone() }))
        };
        publish(targets, stages.into_iter().map(open).collect());
    }

    /// Follows roots and policies until the API server does not serve policies any more.
    async fn follow(&self, targets: &watch::Sender<Targets>) {
        // All are watched: ours may have lost its labels.
        let (policies, policy_events) = self.watch::<ValidatingAdmissionPolicy>();
        let (bindings, binding_events) = self.watch::<ValidatingAdmissionPolicyBinding>();
        let mut events = pin!(stream::select(policy_events, binding_events));
        let mut plans = self.plans.clone();
        let mut failures = Failures::new();
        let (mut backoff, mut due) = (Backoff::default(), None);
        loop {
            let retry = async {
                match due {
                    Some(due) => time::sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                Some(ok) = events.next() => match ok {
                    Ok(()) => {}
                    Err(error) if is_gone(&error) => return,
                    Err(error) => {
                        let why = telemetry::chain(&error);
                        warn!(error = why, "watch of the fences failed; goes on");
                        // Nothing is known before the first list.
                        if policies.all().is_none() || bindings.all().is_none() {
                            self.open_all(targets, &Unfenced::NotWritten { why });
                        }
                        continue;
                    }
                },
                changed = plans.changed() => if changed.is_err() { return std::future::pending().await },
                () = retry => {}
            }
            let (Some(policies), Some(bindings)) = (policies.all(), bindings.all()) else { continue };
            let now = Instant::now();
            if !backoff.is_over(now) {
                due = Some(backoff.until(now));
                continue;
            }
            let Some(plan) = plans.borrow_and_update().clone() else { continue };
            let plan = fence_plan::plan(&plan.snapshot, &Existing { policies, bindings }, &self.namespace);
            backoff = Backoff::after(now, Instant::now(), PAUSE_FACTOR);
            self.write(&plan, &mut failures).await;
            due = failures.values().map(|failure| failure.not_before).min();
            publish(targets, stated(plan.stages, &failures));
        }
    }

    fn watch<K>(&self) -> (Watched<K>, impl Stream<Item = Result<(), watcher::Error>> + Send + use<K, Dial, MayWrite>)
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
    {
        let (store, writer) = reflector::store();
        let is_listed = Arc::new(AtomicBool::new(false));
        let listed = Arc::clone(&is_listed);
        let events = watcher(Api::<K>::all(self.client.clone()), Config::default()).default_backoff();
        let events = reflector::reflector(writer, events).map(move |event| {
            if matches!(event, Ok(Event::InitDone)) {
                listed.store(true, Ordering::Release);
            }
            event.map(drop)
        });
        (Watched { store, is_listed }, events)
    }

    /// Writes what is missing, where it is not too early to try again.
    async fn write(&self, plan: &FencePlan, failures: &mut Failures) {
        failures.retain(|root, _| plan.actions.contains_key(root));
        let now = Instant::now();
        let is_due = |root: &String| failures.get(root).is_none_or(|failure| now >= failure.not_before);
        let due = plan.actions.iter().filter(|(root, _)| is_due(root));
        let writes = due.map(|(root, actions)| async move { (root, Box::pin(self.write_all(actions)).await) });
        let written: Vec<_> = stream::iter(writes.collect::<Vec<_>>()).buffer_unordered(CONCURRENT).collect().await;
        for (root, written) in written {
            match written {
                // A watch tells what there is now.
                Ok(()) => drop(failures.remove(root)),
                Err(error) => {
                    warn!(root, error = telemetry::chain(&error), "fence not written; tried again");
                    let count = failures.get(root).map_or(0, |failure| failure.count);
                    let wait = RETRY.0.saturating_mul(1 << count.min(16)).min(RETRY.1);
                    let not_before = Instant::now() + wait;
                    let failure = Failure { count: count.saturating_add(1), not_before, why: telemetry::chain(&error) };
                    failures.insert(root.clone(), failure);
                }
            }
        }
    }

    async fn write_all(&self, actions: &[Action]) -> Result<(), WriteError> {
        for action in actions {
            if !(self.may_write)() {
                return Err(WriteError::Lost);
            }
            match within(DEADLINE, Box::pin(self.write_one(action))).await {
                // Another version is there: a watch brings it.
                Err(error) if error.is_conflict() => return Ok(()),
                written => written?,
            }
        }
        Ok(())
    }

    /// The manager's namespace: what is left of the fences is deleted with it. What keeps the informer running has no
    /// owner: it has to be there still when ctrlmesh is installed again.
    async fn owner(&self, name: &str) -> kube::Result<Option<OwnerReference>> {
        if name == informer_policy::NAME {
            return Ok(None);
        }
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        Ok(namespaces.get(&self.namespace).await?.owner_ref(&()))
    }

    async fn write_one(&self, action: &Action) -> kube::Result<()> {
        let policies = || Api::<ValidatingAdmissionPolicy>::all(self.client.clone());
        let bindings = || Api::<ValidatingAdmissionPolicyBinding>::all(self.client.clone());
        match action {
            Action::WritePolicy(policy) => {
                put(&policies(), policy.as_ref(), self.owner(&policy.name_any()).await?).await
            }
            Action::WriteBinding(binding) => {
                put(&bindings(), binding.as_ref(), self.owner(&binding.name_any()).await?).await
            }
            Action::RemoveBinding(binding) => remove(&bindings(), binding.as_ref()).await,
            // Its table goes first: what has no policy is not looked for any more.
            Action::RemovePolicy(policy) => {
                let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.namespace);
                if let Some(table) = maps.get_opt(&policy.name_any()).await? {
                    remove(&maps, &table).await?;
                }
                remove(&policies(), policy.as_ref()).await
            }
        }
    }
}

/// The objects of one kind.
struct Watched<K: Resource<DynamicType = ()> + Clone + 'static> {
    store: Store<K>,
    is_listed: Arc<AtomicBool>,
}

impl<K: Resource<DynamicType = ()> + Clone + 'static> Watched<K> {
    /// By name; none until they were listed.
    fn all(&self) -> Option<BTreeMap<String, K>> {
        let is_listed = self.is_listed.load(Ordering::Acquire);
        let all = self.store.state().into_iter();
        is_listed.then(|| all.map(|one| (ObjectRef::from_obj(one.as_ref()).name, K::clone(&one))).collect())
    }
}

/// Creates it, or replaces the version that it names.
async fn put<K>(api: &Api<K>, wanted: &K, owner: Option<OwnerReference>) -> kube::Result<()>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize,
{
    let params = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
    let (name, mut wanted) = (wanted.name_any(), wanted.clone());
    wanted.meta_mut().owner_references = owner.map(|owner| vec![owner]);
    match wanted.resource_version() {
        None => drop(api.create(&params, &wanted).await?),
        Some(_) => drop(api.replace(&name, &params, &wanted).await?),
    }
    info!(kind = K::kind(&()).as_ref(), name, "fence written");
    Ok(())
}

/// Removes the version that was observed.
async fn remove<K>(api: &Api<K>, there: &K) -> kube::Result<()>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let exactly = Preconditions { uid: there.uid(), resource_version: there.resource_version() };
    let params = DeleteParams { preconditions: Some(exactly), ..DeleteParams::default() };
    let name = there.name_any();
    api.delete(&name, &params).await?;
    info!(kind = K::kind(&()).as_ref(), name, "fence removed");
    Ok(())
}

/// Whether the API server does not know the kind.
fn is_gone(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::InitialListFailed(kube::Error::Api(status)) if status.code == 404)
}

fn publish(targets: &watch::Sender<Targets>, now: Targets) {
    targets.send_if_modified(|before| {
        let differs = *before != now;
        *before = now;
        differs
    });
}

fn stated(stages: BTreeMap<String, Stage>, failures: &Failures) -> Targets {
    let target = |(root, stage): (String, Stage)| {
        let not_written = |why: &str| Target::Open(Unfenced::NotWritten { why: why.to_owned() });
        let (namespace, name) = root.split_once('/').unwrap_or_default();
        let target = match stage {
            Stage::Written { revision } => {
                Target::Ask(Question { namespace: namespace.to_owned(), root: name.to_owned(), revision })
            }
            Stage::Removed => Target::Open(Unfenced::Removed),
            Stage::WithoutPods => not_written("the ownership table names no pod of the operator yet"),
            Stage::Unwritten => not_written(failures.get(&root).map_or("it is being written", |one| &one.why)),
        };
        (root, target)
    };
    stages.into_iter().map(target).collect()
}

#[cfg(test)]
mod tests;

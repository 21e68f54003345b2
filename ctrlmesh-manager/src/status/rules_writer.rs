//! Writes the statuses of CircuitBreakers and FaultInjections, and their events.
//!
//! Only the leader writes: each status once a second at most, counts alone every ten seconds, and nothing while nothing
//! changes. Each write names the version that it is based on.

use std::collections::HashMap;
use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::PostParams;
use kube::core::NamespaceResourceScope;
use kube::core::object::HasStatus;
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::{self, Instant};
use tracing::warn;

use crate::cluster::cache::{Cache, CachedRules};
use crate::cluster::event_recorder::EventRecorder;
use crate::cluster::plan::{Plan, Plans};
use crate::cluster::write_error::within;
use crate::labels::ObjectCounts;
use crate::push::policy_store::PolicyStore;
use crate::rules::object_name::{full_name, name, namespace};
use crate::status::cluster_writer::{EventNote, FIELD_MANAGER};
use crate::status::finding::seconds;
use crate::status::targets::{Observed, ReceiptsByPod};

const PERIOD: Duration = Duration::from_secs(1);

/// Between two writes of a status of which only counts have changed.
const COUNTS_PERIOD: Duration = Duration::from_secs(10);

/// After a write that failed.
const RETRY: Duration = Duration::from_secs(5);

/// After a write that was not taken as it was sent.
const PRUNED_RETRY: Duration = Duration::from_mins(1);

/// A new leader's watches may lag behind for so long.
const NEW_LEADER: Duration = Duration::from_mins(1);

/// Limit for one write.
const DEADLINE: Duration = Duration::from_secs(10);

/// A kind of objects whose rules the proxies enforce, and whose status says what they do.
pub(super) trait RulesKind:
    Resource<DynamicType = (), Scope = NamespaceResourceScope>
    + HasStatus<Status: Clone + Default + PartialEq + Send + Sync>
    + Clone
    + Debug
    + Serialize
    + DeserializeOwned
    + Send
    + Sync
    + 'static
{
    /// What proxies are asked for.
    type Read: Send + Sync;

    fn cached(cache: &Cache) -> Vec<CachedRules<Self, Self::Read>>;
    /// Whether the status depends on how many objects there are.
    fn counts_objects(read: &Self::Read) -> bool;
    fn set_written(status: &mut Self::Status, at: Time);
    /// The status as it should be, but for the time of the write.
    fn compute(cached: &CachedRules<Self, Self::Read>, observed: Observed<'_>) -> Self::Status;
    /// Whether the newer one may wait.
    fn differ_in_counts_only(before: &Self::Status, after: &Self::Status) -> bool;
    /// What is to be told once the newer one is written.
    fn events(before: &Self::Status, after: &Self::Status) -> Vec<EventNote>;
}

pub struct RulesWriter<Kind, MayWrite> {
    pub client: Client,
    pub recorder: EventRecorder,
    pub cache: Arc<Cache>,
    /// How many objects there are of each kind.
    pub objects: ObjectCounts,
    pub plans: Plans,
    pub store: Arc<PolicyStore>,
    /// Whether this replica leads now.
    pub may_write: MayWrite,
    pub kind: PhantomData<fn() -> Kind>,
}

/// What the statuses were computed from.
struct Basis {
    plan: Arc<Plan>,
    receipts: u64,
    /// Of what was counted; 0 if nothing counts.
    objects: u64,
    /// The resourceVersion of each.
    versions: Vec<Option<String>>,
    new_leader: bool,
}

/// When the status of each was written last, and from when on it may be again.
type Writes = HashMap<String, (Instant, Instant)>;

#[expect(private_bounds, reason = "only the kinds here can be written")]
impl<Kind: RulesKind, MayWrite: Fn() -> bool + Send + Sync> RulesWriter<Kind, MayWrite> {
    /// Writes for ever.
    pub async fn run(self) {
        let mut ticks = time::interval(PERIOD);
        ticks.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        let (mut last, mut since, mut writes) = (None::<Basis>, None, Writes::new());
        loop {
            ticks.tick().await;
            let plan = self.plans.borrow().clone();
            let Some(plan) = plan.filter(|_| (self.may_write)()) else {
                (last, since) = (None, None);
                continue;
            };
            let since = *since.get_or_insert_with(Instant::now);
            let cached = Kind::cached(&self.cache);
            let basis = self.basis(plan, &cached, since);
            if cached.is_empty() || last.as_ref().is_some_and(|last| *last == basis) {
                continue;
            }
            writes.retain(|name, _| cached.iter().any(|one| full_name(one.object.meta()) == *name));
            let is_done = self.write_all(&basis, &cached, &mut writes).await;
            last = is_done.then_some(basis);
        }
    }

    /// Taken before the receipts are read, so that a later one counts as new.
    fn basis(&self, plan: Arc<Plan>, cached: &[CachedRules<Kind, Kind::Read>], since: Instant) -> Basis {
        let versions = cached.iter().map(|one| one.object.resource_version()).collect();
        let (receipts, new_leader) = (*self.store.receipts_changed().borrow(), since.elapsed() < NEW_LEADER);
        let counts = cached.iter().any(|one| Kind::counts_objects(&one.read));
        let objects = if counts { self.objects.version() } else { 0 };
        Basis { plan, receipts, objects, versions, new_leader }
    }

    /// Returns whether every status is as it should be.
    async fn write_all(&self, basis: &Basis, cached: &[CachedRules<Kind, Kind::Read>], writes: &mut Writes) -> bool {
        let receipts: ReceiptsByPod = self.store.receipts();
        let mut is_done = true;
        for one in cached.iter().filter(|one| one.object.meta().deletion_timestamp.is_none()) {
            let (plan, new_leader, now) = (&*basis.plan, basis.new_leader, Timestamp::now());
            let status =
                Kind::compute(one, Observed { plan, receipts: &receipts, objects: &self.objects, new_leader, now });
            let before = one.object.status().cloned().unwrap_or_default();
            if status == before {
                continue;
            }
            is_done = false;
            let name = full_name(one.object.meta());
            let last = writes.get(&name).copied();
            let is_soon = last.is_some_and(|(written, _)| written.elapsed() < COUNTS_PERIOD);
            let is_held = last.is_some_and(|(_, next)| Instant::now() < next);
            if is_held || is_soon && Kind::differ_in_counts_only(&before, &status) || !(self.may_write)() {
                continue;
            }
            let pause = self.write(&one.object, &before, status, now).await;
            let now = Instant::now();
            writes.insert(name, (now, now + pause));
        }
        is_done
    }

    /// Returns for how long the status is not written again.
    async fn write(&self, object: &Kind, before: &Kind::Status, mut status: Kind::Status, now: Timestamp) -> Duration {
        let events = Kind::events(before, &status);
        let mut object = object.clone();
        Kind::set_written(&mut status, Time(seconds(now)));
        *object.status_mut() = Some(status);
        let (kind, name) = (Kind::kind(&()), full_name(object.meta()));
        match within(DEADLINE, Box::pin(self.replace(&object))).await {
            Err(error) if error.is_conflict() => return Duration::ZERO,
            Err(error) => {
                warn!(%kind, name, error = &error as &dyn std::error::Error, "status not written; tried again");
                return RETRY;
            }
            Ok(taken) if taken.status() != object.status() => {
                warn!(
                    %kind,
                    name,
                    "the API server keeps a part of the status only: is its definition an older one?"
                );
                return PRUNED_RETRY;
            }
            Ok(_) => {}
        }
        for note in &events {
            self.publish(&object, note).await;
        }
        Duration::ZERO
    }

    async fn replace(&self, object: &Kind) -> kube::Result<Kind> {
        let objects: Api<Kind> = Api::namespaced(self.client.clone(), namespace(object.meta()));
        let params = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
        objects.replace_status(name(object.meta()), &params, object).await
    }

    /// An event may be lost.
    async fn publish(&self, object: &Kind, note: &EventNote) {
        let (event, object) = (note.into(), object.object_ref(&()));
        let published = Box::pin(self.recorder.publish(&event, &object));
        if let Err(error) = within(DEADLINE, published).await {
            warn!(reason = note.reason, error = &error as &dyn std::error::Error, "event not written");
        }
    }
}

impl PartialEq for Basis {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.plan, &other.plan)
            && (self.receipts, self.objects, self.new_leader) == (other.receipts, other.objects, other.new_leader)
            && self.versions == other.versions
    }
}

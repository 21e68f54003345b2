//! Keeps what the manager needs of the cluster in memory, by one watch for each kind.
//!
//! Of each object it keeps only what decisions need. Of pods, it keeps only the enrolled ones. When the API
//! server is gone, the last state stays.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::pin::pin;
use std::sync::{Arc, Mutex};

use ctrlmesh_common::api::{CircuitBreaker, FaultInjection, LabelsStatus, ManagerState, Root, ShardingConfig};
use ctrlmesh_common::names::{MANAGER_STATE, resource_list};
use ctrlmesh_runtime::sync::lock;
use futures::{Stream, StreamExt as _};
use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod};
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Config, Event, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tracing::warn;

use crate::cluster::served_resources::ServedResources;
use crate::drain::Drain;
use crate::rules::balance::RootLoads;
use crate::rules::label_scheme::{Scheme, SchemeError};
use crate::rules::object_name::full_name;
use crate::rules::pod::{self, Member};
use crate::rules::shard::Labelling;
use crate::rules::shared::Shared;
use crate::rules::workload::{DeploymentInfo, SetInfo};
use crate::telemetry;

mod snapshot;
mod rules;
mod store;
mod namespace_info;
mod stopped_pods;
mod unenrolled;
mod unfit_nodes;
mod reported;
mod served;

pub use namespace_info::NamespaceInfo;
pub use reported::EndedContainers;
use reported::as_it_runs;
pub use rules::{CachedBreaker, CachedInjection, CachedRules};
pub use snapshot::Snapshot;
use stopped_pods::StoppedPods;
use store::ObjectStore;

/// Objects per page of a list.
const PAGE: u32 = 500;

#[derive(Debug)]
pub struct Cache {
    state: Mutex<State>,
    /// Used when the `ManagerState` names no labels.
    default_labelling: Labelling,
    scheme: watch::Sender<Option<Arc<Scheme>>>,
    version: watch::Sender<u64>,
    synced: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct State {
    configs: ObjectStore<Shared<ShardingConfig>>,
    breakers: ObjectStore<CachedBreaker>,
    injections: ObjectStore<CachedInjection>,
    members: ObjectStore<Shared<Member>>,
    namespaces: ObjectStore<NamespaceInfo>,
    sets: ObjectStore<SetInfo>,
    deployments: ObjectStore<DeploymentInfo>,
    served: Arc<ServedResources>,
    schemes: ObjectStore<Option<LabelsStatus>>,
    /// Not part of `synced`: it only serves warnings.
    listed: ObjectStore<String>,
    /// By namespace.
    unenrolled: BTreeMap<String, ObjectStore<Shared<Member>>>,
    stopped: StoppedPods,
    /// Handlers. Not part of `synced`: of a class that is not known, its name says enough.
    runtimes: ObjectStore<String>,
    /// Not part of `synced`: they only explain why a proxy is waited for.
    unfit_nodes: ObjectStore<()>,
    ended: EndedContainers,
    /// UIDs of pods that wait for their lock.
    waiting: BTreeSet<String>,
    /// UIDs of pods on silent nodes.
    silent: BTreeSet<String>,
    /// Of roots that are divided by load.
    loads: Arc<RootLoads>,
}

impl Cache {
    /// Starts the watches. Pods of `own`, the manager's namespace, are left out. The `ManagerState` decides
    /// how objects are labelled; without it, `default_labelling` does.
    pub fn start(client: &Client, own: &str, default_labelling: Labelling, drain: &Drain) -> Arc<Self> {
        let cache = Arc::new(Self::new(default_labelling));
        let config = Config::default().page_size(PAGE);
        let (labels, elsewhere) = pod::watch_selectors(own);
        let enrolled = config.clone().labels(&labels).fields(&elsewhere);
        let this = || Arc::clone(&cache);
        let configs = watcher(Api::<ShardingConfig>::all(client.clone()), config.clone());
        drain.spawn_until_started(this().follow(
            configs,
            |state| &mut state.configs,
            |mut config| {
                config.metadata.managed_fields = None;
                (full_name(&config.metadata), Shared::from(config))
            },
        ));
        let breakers = watcher(Api::<CircuitBreaker>::all(client.clone()), config.clone());
        drain.spawn_until_started(this().follow(breakers, |state| &mut state.breakers, CachedRules::read));
        let injections = watcher(Api::<FaultInjection>::all(client.clone()), config.clone());
        drain.spawn_until_started(this().follow(injections, |state| &mut state.injections, CachedRules::read));
        let pods = this().note_stopped(watcher(Api::<Pod>::all(client.clone()), enrolled));
        drain.spawn_until_started(this().follow(
            pods,
            |state| &mut state.members,
            |pod| (full_name(&pod.metadata), Shared::from(Member::from(&pod))),
        ));
        let namespaces = Api::<PartialObjectMeta<Namespace>>::all(client.clone());
        let namespaces = watcher(namespaces, config.clone());
        drain.spawn_until_started(this().follow(
            namespaces,
            |state| &mut state.namespaces,
            |one| (one.metadata.name.clone().unwrap_or_default(), NamespaceInfo::from(one.metadata)),
        ));
        drain.spawn_until_started(unenrolled::follow(this(), client.clone(), drain.clone()));
        drain.spawn_until_started(this().follow_served(client.clone()));
        this().watch_scheme(client, drain);
        this().watch_workloads(client, &config, drain);
        drain.spawn_until_started(this().follow_unfit_nodes(client));
        cache
    }

    fn new(default_labelling: Labelling) -> Self {
        Self {
            state: Mutex::default(),
            default_labelling,
            scheme: watch::Sender::new(None),
            version: watch::Sender::new(0),
            synced: watch::Sender::new(false),
        }
    }

    fn watch_scheme(self: Arc<Self>, client: &Client, drain: &Drain) {
        let one = Config::default().fields(&format!("metadata.name={MANAGER_STATE}"));
        let states = watcher(Api::<ManagerState>::all(client.clone()), one);
        drain.spawn_until_started(self.follow(states, |state| &mut state.schemes, read_labels));
    }

    fn watch_workloads(self: Arc<Self>, client: &Client, config: &Config, drain: &Drain) {
        let sets = watcher(Api::<StatefulSet>::all(client.clone()), config.clone());
        drain.spawn_until_started(Arc::clone(&self).follow(
            sets,
            |state| &mut state.sets,
            |set| (full_name(&set.metadata), SetInfo::from(&set)),
        ));
        let runtimes = watcher(Api::<RuntimeClass>::all(client.clone()), config.clone());
        drain.spawn_until_started(Arc::clone(&self).follow(
            runtimes,
            |state| &mut state.runtimes,
            |one| (one.metadata.name.unwrap_or_default(), one.handler),
        ));
        let deployments = watcher(Api::<Deployment>::all(client.clone()), config.clone());
        drain.spawn_until_started(self.follow(
            deployments,
            |state| &mut state.deployments,
            |one| (full_name(&one.metadata), DeploymentInfo::from(&one)),
        ));
    }

    /// Watches the list of labelled kinds in namespace `own`. Only the account of `client` may read it.
    pub fn watch_list(self: &Arc<Self>, client: Client, own: &str, drain: &Drain) {
        let one = Config::default().fields(&format!("metadata.name={}", resource_list::NAME));
        let maps = watcher(Api::<ConfigMap>::namespaced(client, own), one);
        drain.spawn_until_started(Arc::clone(self).follow(
            maps,
            |state| &mut state.listed,
            |map| {
                let name = full_name(&map.metadata);
                (name, map.data.and_then(|mut all| all.remove(resource_list::KEY)).unwrap_or_default())
            },
        ));
    }

    /// Waits until every watch has been listed once.
    pub async fn synced(&self) {
        let mut synced = self.synced.subscribe();
        // The sender lives as long as `self`.
        drop(synced.wait_for(|synced| *synced).await);
    }

    pub fn changes(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    pub fn snapshot(&self) -> Snapshot {
        let state = lock(&self.state);
        let (sets, deployments) = (&state.sets.current, &state.deployments.current);
        // They are known by `NAMESPACE/NAME`, of which `a-b/c` comes before `a/c`.
        let mut members: Vec<_> = state.members.current.values().map(|one| as_it_runs(one, &state)).collect();
        members.sort_by(|one, other| one.name.cmp(&other.name));
        Snapshot {
            configs: state.configs.current.values().cloned().collect(),
            breakers: state.breakers.current.values().map(|one| one.read.clone()).collect(),
            injections: state.injections.current.values().map(|one| one.read.clone()).collect(),
            members,
            namespaces: state.namespaces.current.keys().cloned().collect(),
            first_ordinals: sets.iter().map(|(name, set)| (name.clone(), set.first_ordinal)).collect(),
            set_accounts: sets.iter().map(|(name, set)| (name.clone(), set.account.clone())).collect(),
            deployment_accounts: deployments.iter().map(|(name, one)| (name.clone(), one.account.clone())).collect(),
            update_revisions: present(sets.iter().map(|(name, set)| (name, &set.update_revision))),
            set_obstacles: present(sets.iter().map(|(name, set)| (name, &set.obstacle))),
            deployment_obstacles: present(deployments.iter().map(|(name, one)| (name, &one.obstacle))),
            progress_deadlines: present(deployments.iter().map(|(name, one)| (name, &one.progress_deadline))),
            runtime_handlers: state.runtimes.current.clone(),
            unfit_nodes: state.unfit_nodes.current.keys().cloned().collect(),
            served: Arc::clone(&state.served),
            listed: state.listed.synced.then(|| state.listed.current.values().next().cloned().unwrap_or_default()),
            scheme: self.scheme().unwrap_or_default(),
            unenrolled: unenrolled::known(&state),
            stopped: state.stopped.uids(),
            evidence: Arc::default(),
            follows: false,
            held_back: <_>::default(),
            waiting: state.waiting.clone(),
            loads: Arc::clone(&state.loads),
        }
    }

    pub fn breakers(&self) -> Vec<CachedBreaker> {
        lock(&self.state).breakers.current.values().cloned().collect()
    }

    pub fn injections(&self) -> Vec<CachedInjection> {
        lock(&self.state).injections.current.values().cloned().collect()
    }

    /// What `read` finds in ShardingConfigs, by `NAMESPACE/NAME`. Nothing else is copied.
    pub fn in_configs<T>(&self, read: impl Fn(&ShardingConfig) -> Option<T>) -> BTreeMap<String, T> {
        let of = |(name, config): (&String, &Shared<ShardingConfig>)| Some((name.clone(), read(config)?));
        lock(&self.state).configs.current.iter().filter_map(of).collect()
    }

    /// The same, of the one called `NAMESPACE/NAME`.
    pub fn in_config<T>(&self, name: &str, read: impl FnOnce(&ShardingConfig) -> Option<T>) -> Option<T> {
        read(lock(&self.state).configs.current.get(name)?)
    }

    /// The roots, each by `NAMESPACE/NAME` with what `read` makes of it, and what the API server serves.
    pub fn roots<T>(&self, read: impl Fn(&Root) -> T) -> (BTreeMap<String, T>, Arc<ServedResources>) {
        let roots = self.in_configs(|config| config.spec.root.as_ref().map(&read));
        (roots, Arc::clone(&lock(&self.state).served))
    }

    /// `None` until the first list of `ManagerState`.
    pub fn scheme(&self) -> Option<Arc<Scheme>> {
        self.scheme.borrow().clone()
    }

    /// Whether the `ManagerState` names the scheme.
    pub fn is_scheme_written(&self) -> bool {
        let written = {
            let state = lock(&self.state);
            state.schemes.current.values().flatten().next().cloned()
        };
        self.scheme().is_some_and(|scheme| written == Some(scheme.written()))
    }

    pub async fn scheme_written(&self) {
        // The sender lives as long as `self`.
        drop(self.changes().wait_for(|_version| self.is_scheme_written()).await);
    }

    pub fn schemes(&self) -> watch::Receiver<Option<Arc<Scheme>>> {
        self.scheme.subscribe()
    }

    pub fn namespaces(&self) -> BTreeMap<String, NamespaceInfo> {
        lock(&self.state).namespaces.current.clone()
    }

    async fn follow<K, V: PartialEq>(
        self: Arc<Self>,
        events: impl Stream<Item = Result<Event<K>, watcher::Error>>,
        of: impl Fn(&mut State) -> &mut ObjectStore<V>,
        read: fn(K) -> (String, V),
    ) where
        K: Resource + DeserializeOwned + Clone + Debug + Send + 'static,
    {
        let mut events = pin!(events.default_backoff());
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => self.take(event, &of, read),
                Err(error) => {
                    warn!(kind = std::any::type_name::<K>(), %error, "watch failed; goes on");
                }
            }
        }
    }

    /// Reads the scheme from the `ManagerState`. If it was removed or is invalid, the last scheme stays, and
    /// the leader writes it again.
    fn follow_scheme(&self, state: &State) {
        if !state.schemes.synced {
            return;
        }
        let written = state.schemes.current.values().flatten().next();
        let read = written.and_then(|written| {
            let warn_invalid = |error: &SchemeError| {
                let (error, state) = (telemetry::chain(error), MANAGER_STATE);
                warn!(error, state, "not read; what was known holds, or what is wanted");
            };
            Scheme::read(written).inspect_err(warn_invalid).ok()
        });
        let scheme = match read {
            Some(scheme) => scheme,
            None if self.scheme.borrow().is_some() => return,
            None => Scheme::settled(self.default_labelling.clone()),
        };
        self.scheme.send_if_modified(|before| {
            let differs = before.as_deref() != Some(&scheme);
            if differs {
                *before = Some(Arc::new(scheme));
            }
            differs
        });
    }

    fn take<K, V: PartialEq>(
        &self,
        event: Event<K>,
        of: impl Fn(&mut State) -> &mut ObjectStore<V>,
        read: fn(K) -> (String, V),
    ) {
        let mut state = lock(&self.state);
        let changed = of(&mut state).take(event, read);
        if changed {
            self.follow_scheme(&state);
        }
        let synced = state.synced() && self.scheme.borrow().is_some();
        drop(state);
        if changed {
            self.version.send_modify(|version| *version = version.wrapping_add(1));
        }
        self.report_synced(synced);
    }

    /// Wakes whoever waits in [`Self::synced`]. A late `false` changes nothing: watches report after they released the
    /// lock, so the one that completed the cache may report before one that found it incomplete.
    fn report_synced(&self, synced: bool) {
        self.synced.send_if_modified(|before| synced && !std::mem::replace(before, true));
    }
}

impl State {
    fn synced(&self) -> bool {
        self.configs.synced
            && self.breakers.synced
            && self.injections.synced
            && self.members.synced
            && self.namespaces.synced
            && self.sets.synced
            && self.deployments.synced
            && self.schemes.synced
            && unenrolled::are_known(self)
    }
}

fn present<'a, V: Clone + 'a>(all: impl Iterator<Item = (&'a String, &'a Option<V>)>) -> BTreeMap<String, V> {
    all.filter_map(|(name, value)| Some((name.clone(), value.clone()?))).collect()
}

fn read_labels(state: ManagerState) -> (String, Option<LabelsStatus>) {
    (full_name(&state.metadata), state.status.and_then(|status| status.labels))
}

#[cfg(test)]
mod tests;

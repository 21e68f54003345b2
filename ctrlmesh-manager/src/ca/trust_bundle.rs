//! Distributes the trust bundle.
//!
//! Pods get theirs in a ConfigMap of their namespace, which exists before they start. The API server gets it as
//! `caBundle` of our webhook configurations. The leader keeps both up to date.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::names::root_ca;
use ctrlmesh_common::wire;
use futures::StreamExt as _;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::{ByteString, ClusterResourceScope};
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{Config, watcher};
use kube::{Api, Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::sync::{Semaphore, watch};
use tokio::task;
use tokio::time::{self, MissedTickBehavior};
use tracing::{info, warn};

use crate::ca::authority::AuthorityError;
use crate::ca::cluster_ca::ClusterCa;
use crate::ca::store::CaStore;
use crate::leader::lease::Leadership;
use crate::telemetry;

mod digests;
mod published_maps;
mod recent_writes;

use digests::Digests;
use published_maps::PublishedMaps;
use recent_writes::RecentWrites;

const MANAGER: &str = "ctrlmesh-manager";

const PART_OF: &str = "app.kubernetes.io/part-of=ctrlmesh";

const PERIOD: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub enum TrustBundleError {
    #[error("write the ConfigMap `{}` in namespace {namespace:?}", root_ca::MESH)]
    Write { namespace: String, source: kube::Error },
    #[error("derive the authority of namespace {namespace:?}")]
    Derive { namespace: String, source: AuthorityError },
    #[error("keep the webhook configurations")]
    Webhooks(#[source] kube::Error),
}

/// How many admissions write at once. Hundreds of pods are created in one namespace together, and requests for many
/// namespaces that do not exist must not become a flood.
const AT_ONCE: usize = 4;

pub struct TrustBundle {
    client: Client,
    ca_store: Arc<CaStore>,
    cluster: ClusterCa,
    /// The manager's namespace.
    own: String,
    digests: Digests,
    recent_writes: RecentWrites,
    /// Limits writes on behalf of admissions.
    room: Semaphore,
}

/// What is checked in one round.
#[derive(Debug)]
enum Scope {
    /// One namespace, whose ConfigMap changed.
    Namespace(String),
    /// Namespaces that have enrolled pods, but no ConfigMap yet.
    Missing,
    /// All namespaces and the webhook configurations.
    All,
}

impl TrustBundle {
    /// `own` is the manager's namespace. Proxies there believe the mesh's authority alone when they call each other.
    pub fn new(client: Client, ca_store: Arc<CaStore>, cluster: ClusterCa, own: String) -> Self {
        let room = Semaphore::new(AT_ONCE);
        let (digests, recent_writes) = (Digests::default(), RecentWrites::default());
        Self { client, ca_store, cluster, own, digests, recent_writes, room }
    }

    /// Ensures that `namespace` has the ConfigMap. Awaited before a pod is admitted there.
    ///
    /// # Errors
    /// Where it cannot be written; the pod could not start without it.
    pub async fn in_namespace(&self, namespace: &str) -> Result<(), TrustBundleError> {
        if self.recent_writes.has(namespace, self.digest(self.common(), namespace)?) {
            return Ok(());
        }
        // The semaphore is never closed.
        let _room = self.room.acquire().await;
        // Another admission may have written it meanwhile, or the bundle may have changed.
        if self.recent_writes.has(namespace, self.digest(self.common(), namespace)?) {
            return Ok(());
        }
        self.write(namespace).await
    }

    /// Keeps everything up to date, while this replica leads. `namespaces` have enrolled pods; the manager's own gets
    /// the ConfigMap, too.
    pub async fn follow(self: Arc<Self>, leadership: Leadership, namespaces: watch::Receiver<BTreeSet<String>>) {
        let mut election = leadership.clone();
        loop {
            election.acquired().await;
            let mut here = leadership.clone();
            tokio::select! {
                () = self.keep(&leadership, namespaces.clone()) => return,
                // Another replica leads now.
                () = here.lost() => {}
            }
        }
    }

    /// Watches the `ConfigMaps`: repeated lists would have the API server read every one of the cluster.
    async fn keep(&self, leadership: &Leadership, mut namespaces: watch::Receiver<BTreeSet<String>>) {
        let maps: Api<ConfigMap> = Api::all(self.client.clone());
        let ours = Config::default().fields(&format!("metadata.name={}", root_ca::MESH));
        let mut events = pin!(watcher(maps, ours).default_backoff());
        let mut changes = self.ca_store.changes();
        let mut ticks = time::interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut maps_there = PublishedMaps::default();
        // Whether a namespace was skipped because it was written a moment ago.
        let mut again = false;
        loop {
            let scope = tokio::select! {
                event = events.next() => match event {
                    Some(Ok(event)) => maps_there.take(event).map_or(Scope::All, Scope::Namespace),
                    Some(Err(error)) => {
                        warn!(%error, "watch failed; goes on");
                        continue;
                    }
                    None => return,
                },
                _ = ticks.tick() => Scope::All,
                () = time::sleep(recent_writes::VALIDITY), if again => Scope::All,
                known = changes.changed() => match known {
                    Ok(()) => Scope::All,
                    Err(_gone) => return,
                },
                known = namespaces.changed() => match known {
                    Ok(()) => Scope::Missing,
                    Err(_gone) => return,
                },
            };
            if maps_there.is_whole() {
                let mut all = namespaces.borrow_and_update().clone();
                all.insert(self.own.clone());
                again = Box::pin(self.check(scope, all, again, &maps_there, leadership)).await;
            }
        }
    }

    /// Checks `scope` and repairs it; `all` are the namespaces that need the ConfigMap. Returns whether a namespace was
    /// skipped, now or `before`, because it was written a moment ago.
    async fn check(
        &self,
        scope: Scope,
        all: BTreeSet<String>,
        before: bool,
        maps_there: &PublishedMaps,
        leadership: &Leadership,
    ) -> bool {
        match scope {
            Scope::Namespace(namespace) => {
                let is_asked = all.contains(&namespace) || maps_there.has(&namespace);
                before | self.repair(is_asked.then_some(namespace), maps_there, leadership).await
            }
            Scope::Missing => {
                let missing = all.into_iter().filter(|namespace| !maps_there.has(namespace));
                before | self.repair(missing, maps_there, leadership).await
            }
            Scope::All => {
                let known = maps_there.namespaces();
                let again = self.repair(all.into_iter().chain(known), maps_there, leadership).await;
                Box::pin(self.webhooks(leadership)).await;
                again
            }
        }
    }

    /// Writes the ConfigMap where it is missing or different. Returns whether a namespace was skipped because it was
    /// written a moment ago.
    async fn repair(
        &self,
        namespaces: impl IntoIterator<Item = String>,
        maps_there: &PublishedMaps,
        leadership: &Leadership,
    ) -> bool {
        let (mut skipped, common) = (false, self.common());
        for namespace in namespaces.into_iter().collect::<BTreeSet<_>>() {
            if !leadership.is_held() {
                break;
            }
            // A namespace that fails, such as one that is being deleted, does not block the others.
            match self.repair_one(&namespace, common, maps_there).await {
                Ok(was_skipped) => skipped |= was_skipped,
                Err(error) => warn!(error = telemetry::chain(&error), "certificate authorities not published"),
            }
            // To derive what thousands of namespaces believe takes a while.
            task::yield_now().await;
        }
        skipped
    }

    /// Returns whether it is wrong and was skipped.
    async fn repair_one(
        &self,
        namespace: &str,
        common: u64,
        maps_there: &PublishedMaps,
    ) -> Result<bool, TrustBundleError> {
        let digest = self.digest(common, namespace)?;
        if maps_there.digest(namespace) == Some(digest) {
            return Ok(false);
        }
        let was_written = self.recent_writes.has(namespace, digest);
        if !was_written {
            self.write(namespace).await?;
        }
        Ok(was_written)
    }

    async fn write(&self, namespace: &str) -> Result<(), TrustBundleError> {
        let data = self.data(namespace)?;
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), namespace);
        let map = json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": root_ca::MESH},
            "data": data,
        });
        let params = PatchParams::apply(MANAGER).force();
        let written = maps.patch(root_ca::MESH, &params, &Patch::Apply(&map)).await;
        written.map_err(|source| TrustBundleError::Write { namespace: namespace.to_owned(), source })?;
        info!(namespace, "certificate authorities published");
        self.recent_writes.remember(namespace, digest(&data));
        Ok(())
    }

    /// What the ConfigMap of `namespace` is to hold.
    fn data(&self, namespace: &str) -> Result<BTreeMap<String, String>, TrustBundleError> {
        let authorities = self.ca_store.current();
        let mesh = if namespace == self.own {
            authorities.mesh.bundle()
        } else {
            let derive = |source| TrustBundleError::Derive { namespace: namespace.to_owned(), source };
            authorities.mesh.bundle_of(namespace).map_err(derive)?
        };
        let both = format!("{mesh}{}", self.cluster.pem());
        Ok(BTreeMap::from([
            (root_ca::KEY.to_owned(), mesh),
            (root_ca::FAIL_OPEN_KEY.to_owned(), both),
            (root_ca::MANAGER_KEY.to_owned(), authorities.manager.bundle()),
        ]))
    }

    /// A digest of what the data of all namespaces follow from.
    fn common(&self) -> u64 {
        let authorities = self.ca_store.current();
        let [mesh, manager] = authorities.bundles();
        wire::digest([mesh, manager, authorities.mesh.seeds(), self.cluster.pem()].concat().as_bytes())
    }

    fn digest(&self, common: u64, namespace: &str) -> Result<u64, TrustBundleError> {
        self.digests.of(common, namespace, || Ok(digest(&self.data(namespace)?)))
    }

    /// Sets the `caBundle` of our webhook configurations.
    async fn webhooks(&self, leadership: &Leadership) {
        let validating = self.update(leadership, |one: &mut ValidatingWebhookConfiguration| {
            one.webhooks.iter_mut().flatten().map(|hook| &mut hook.client_config).collect()
        });
        let mutating = self.update(leadership, |one: &mut MutatingWebhookConfiguration| {
            one.webhooks.iter_mut().flatten().map(|hook| &mut hook.client_config).collect()
        });
        for written in [validating.await, mutating.await] {
            if let Err(error) = written.map_err(TrustBundleError::Webhooks) {
                warn!(error = telemetry::chain(&error), "certificate authorities not published");
            }
        }
    }

    async fn update<K>(
        &self,
        leadership: &Leadership,
        clients: impl Fn(&mut K) -> Vec<&mut WebhookClientConfig>,
    ) -> Result<(), kube::Error>
    where
        K: Resource<DynamicType = (), Scope = ClusterResourceScope> + Clone + Debug + DeserializeOwned + Serialize,
    {
        let configurations: Api<K> = Api::all(self.client.clone());
        for mut one in configurations.list(&ListParams::default().labels(PART_OF)).await? {
            if set(clients(&mut one), &self.bundle()) && leadership.is_held() {
                let name = one.meta().name.clone().unwrap_or_default();
                log_outcome(&name, configurations.replace(&name, &PostParams::default(), &one).await);
            }
        }
        Ok(())
    }

    fn bundle(&self) -> ByteString {
        ByteString(self.ca_store.current().manager.bundle().into_bytes())
    }
}

/// Returns whether a bundle was changed.
fn set(clients: Vec<&mut WebhookClientConfig>, bundle: &ByteString) -> bool {
    let mut changed = false;
    for client in clients.into_iter().filter(|client| client.ca_bundle.as_ref() != Some(bundle)) {
        client.ca_bundle = Some(bundle.clone());
        changed = true;
    }
    changed
}

/// A configuration that cannot be written, such as a foreign one with our label, does not block the others. A conflict
/// is ignored: the next round reads the change.
fn log_outcome<T>(name: &str, written: Result<T, kube::Error>) {
    match written {
        Ok(_) => info!(configuration = name, "webhook configuration believes the manager"),
        Err(kube::Error::Api(status)) if status.code == 409 => {}
        Err(error) => {
            let error = telemetry::chain(&error);
            warn!(configuration = name, error, "webhook configuration does not believe the manager");
        }
    }
}

fn digest(data: &BTreeMap<String, String>) -> u64 {
    wire::digest(json!(data).to_string().as_bytes())
}

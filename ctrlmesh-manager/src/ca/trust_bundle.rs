//! Distributes the trust bundle.
//!
//! Pods get it in a ConfigMap of their namespace, which exists before they start. The API server gets it as `caBundle`
//! of our webhook configurations. The leader keeps both up to date.

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
use tokio::time::{self, MissedTickBehavior};
use tracing::{info, warn};

use crate::ca::cluster_ca::ClusterCa;
use crate::ca::store::CaStore;
use crate::leader::lease::Leadership;
use crate::telemetry;

mod published_maps;
mod recent_writes;

use published_maps::PublishedMaps;
use recent_writes::RecentWrites;

const MANAGER: &str = "ctrlmesh-manager";

const PART_OF: &str = "app.kubernetes.io/part-of=ctrlmesh";

const PERIOD: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub enum TrustBundleError {
    #[error("write the ConfigMap `{}` in namespace {namespace:?}", root_ca::MESH)]
    Write { namespace: String, source: kube::Error },
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
    pub fn new(client: Client, ca_store: Arc<CaStore>, cluster: ClusterCa) -> Self {
        let room = Semaphore::new(AT_ONCE);
        Self { client, ca_store, cluster, recent_writes: RecentWrites::default(), room }
    }

    /// Ensures that `namespace` has the ConfigMap. Awaited before a pod is admitted there.
    ///
    /// # Errors
    /// Where it cannot be written; the pod could not start without it.
    pub async fn in_namespace(&self, namespace: &str) -> Result<(), TrustBundleError> {
        if self.recent_writes.has(namespace, digest(&self.data())) {
            return Ok(());
        }
        // The semaphore is never closed.
        let _room = self.room.acquire().await;
        // Another admission may have written it meanwhile, or the bundle may have changed.
        let data = self.data();
        if self.recent_writes.has(namespace, digest(&data)) {
            return Ok(());
        }
        self.write(namespace, &data).await
    }

    /// Keeps everything up to date, while this replica leads. `namespaces` have enrolled pods; `own` gets the
    /// ConfigMap, too.
    pub async fn follow(
        self: Arc<Self>,
        leadership: Leadership,
        namespaces: watch::Receiver<BTreeSet<String>>,
        own: String,
    ) {
        let mut election = leadership.clone();
        loop {
            election.acquired().await;
            let mut here = leadership.clone();
            tokio::select! {
                () = self.keep(&leadership, namespaces.clone(), &own) => return,
                // Another replica leads now.
                () = here.lost() => {}
            }
        }
    }

    /// Watches the `ConfigMaps`: repeated lists would have the API server read every one of the cluster.
    async fn keep(&self, leadership: &Leadership, mut namespaces: watch::Receiver<BTreeSet<String>>, own: &str) {
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
                all.insert(own.to_owned());
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
        let data = self.data();
        let digest = digest(&data);
        let wrong = namespaces.into_iter().filter(|one| maps_there.digest(one) != Some(digest));
        let (stand, wrong): (BTreeSet<_>, BTreeSet<_>) = wrong.partition(|one| self.recent_writes.has(one, digest));
        for namespace in wrong {
            if !leadership.is_held() {
                break;
            }
            // A namespace that fails, such as one that is being deleted, does not block the others.
            if let Err(error) = self.write(&namespace, &data).await {
                warn!(error = telemetry::chain(&error), "certificate authorities not published");
            }
        }
        !stand.is_empty()
    }

    async fn write(&self, namespace: &str, data: &BTreeMap<String, String>) -> Result<(), TrustBundleError> {
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
        self.recent_writes.remember(namespace, digest(data));
        Ok(())
    }

    fn data(&self) -> BTreeMap<String, String> {
        let authorities = self.ca_store.current();
        let mesh = authorities.mesh.bundle();
        let both = format!("{mesh}{}", self.cluster.pem());
        BTreeMap::from([
            (root_ca::KEY.to_owned(), mesh),
            (root_ca::FAIL_OPEN_KEY.to_owned(), both),
            (root_ca::MANAGER_KEY.to_owned(), authorities.manager.bundle()),
        ])
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

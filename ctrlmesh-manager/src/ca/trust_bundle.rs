//! How does everybody come to believe the authorities?
//!
//! Pods through a ConfigMap in their namespace, which is there before they are; the API server through the `caBundle`
//! of the webhook configurations. Both are put right for ever by the leader.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::names::root_ca;
use ctrlmesh_common::wire;
use futures::StreamExt as _;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{Config, watcher};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::{Semaphore, watch};
use tokio::time::{self, MissedTickBehavior};
use tracing::{info, warn};

use crate::ca::cluster::Cluster;
use crate::ca::store::Vault;
use crate::leader::lease::Leadership;
use crate::telemetry;

mod there;
mod written;

use there::There;
use written::Written;

/// Who writes.
const MANAGER: &str = "ctrlmesh-manager";

/// The label of the webhook configurations that are ours.
const PART_OF: &str = "app.kubernetes.io/part-of=ctrlmesh";

/// How often everything is looked at.
const PERIOD: Duration = Duration::from_secs(30);

/// What believes in us could not be told.
#[derive(Debug, thiserror::Error)]
pub enum RootsError {
    /// A `ConfigMap` could not be written.
    #[error("write the ConfigMap `{}` in namespace {namespace:?}", root_ca::MESH)]
    Write {
        /// Where.
        namespace: String,
        /// Why.
        #[source]
        source: kube::Error,
    },
    /// The webhook configurations could not be read or written.
    #[error("keep the webhook configurations")]
    Webhooks(#[source] kube::Error),
}

/// How many write for pods that are being admitted: hundreds are made in one namespace at once, and who asks for many
/// namespaces that there are not is not to make a flood of it.
const AT_ONCE: usize = 4;

/// Tells everybody whom to believe.
pub struct Roots {
    client: Client,
    vault: Arc<Vault>,
    /// The cluster's own certificate authority.
    cluster: Cluster,
    /// What was written a moment ago.
    written: Written,
    /// For those that are admitted.
    room: Semaphore,
}

/// Where it is looked whether all is right.
#[derive(Debug)]
enum Look {
    /// In one namespace, where something has happened.
    At(String),
    /// In namespaces that have enrolled pods, and perhaps had none before.
    WhereItIsMissing,
    /// In all namespaces, and in the webhook configurations.
    Everywhere,
}

// === impl Roots ===

impl Roots {
    /// `cluster` is the API server's own authority.
    pub fn new(client: Client, vault: Arc<Vault>, cluster: Cluster) -> Self {
        let room = Semaphore::new(AT_ONCE);
        Self { client, vault, cluster, written: Written::default(), room }
    }

    /// Sees to it that the ConfigMap is in `namespace`: to be awaited before a pod is admitted there.
    ///
    /// # Errors
    /// Where it cannot be written; the pod could not start without it.
    pub async fn in_namespace(&self, namespace: &str) -> Result<(), RootsError> {
        if self.written.stands(namespace, digest(&self.data())) {
            return Ok(());
        }
        // It is never closed.
        let _room = self.room.acquire().await;
        // Somebody who came before has perhaps written it meanwhile, and what there is to write may be another.
        let data = self.data();
        if self.written.stands(namespace, digest(&data)) {
            return Ok(());
        }
        self.write(namespace, &data).await
    }

    /// Puts everything right for ever, where this replica leads. `namespaces` are those that have enrolled pods; the
    /// ConfigMap is in `own`, too.
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
                // Another replica does now.
                () = here.lost() => {}
            }
        }
    }

    /// The same while it leads. The `ConfigMaps` are watched: to list them again and again would cost the API server a
    /// look at every one of the cluster.
    async fn keep(
        &self,
        leadership: &Leadership,
        mut namespaces: watch::Receiver<BTreeSet<String>>,
        own: &str,
    ) {
        let maps: Api<ConfigMap> = Api::all(self.client.clone());
        let ours = Config::default().fields(&format!("metadata.name={}", root_ca::MESH));
        let mut events = pin!(watcher(maps, ours).default_backoff());
        let mut changes = self.vault.changes();
        let mut ticks = time::interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut there = There::default();
        // Whether something was passed over because it was written a moment ago.
        let mut again = false;
        loop {
            let look = tokio::select! {
                event = events.next() => match event {
                    Some(Ok(event)) => there.take(event).map_or(Look::Everywhere, Look::At),
                    Some(Err(error)) => {
                        warn!(%error, "watch failed; goes on");
                        continue;
                    }
                    None => return,
                },
                _ = ticks.tick() => Look::Everywhere,
                () = time::sleep(written::STANDS), if again => Look::Everywhere,
                known = changes.changed() => match known {
                    Ok(()) => Look::Everywhere,
                    Err(_gone) => return,
                },
                known = namespaces.changed() => match known {
                    Ok(()) => Look::WhereItIsMissing,
                    Err(_gone) => return,
                },
            };
            if there.is_whole() {
                let mut all = namespaces.borrow_and_update().clone();
                all.insert(own.to_owned());
                again = self.look(look, all, again, &there, leadership).await;
            }
        }
    }

    /// Looks there whether all is right, and puts it right; `all` are the namespaces that need the ConfigMap. Gives whether
    /// something was passed over, now or `before`, because it was written a moment ago.
    async fn look(
        &self,
        look: Look,
        all: BTreeSet<String>,
        before: bool,
        there: &There,
        leadership: &Leadership,
    ) -> bool {
        match look {
            Look::At(namespace) => {
                let is_asked = all.contains(&namespace) || there.has(&namespace);
                before | self.repair(is_asked.then_some(namespace), there, leadership).await
            }
            Look::WhereItIsMissing => {
                let missing = all.into_iter().filter(|namespace| !there.has(namespace));
                before | self.repair(missing, there, leadership).await
            }
            Look::Everywhere => {
                let known = there.namespaces();
                let again = self.repair(all.into_iter().chain(known), there, leadership).await;
                self.webhooks(leadership).await;
                again
            }
        }
    }

    /// Writes the ConfigMap into those namespaces where it is missing, or says something else; gives whether one was passed
    /// over, because it was written there just now.
    async fn repair(
        &self,
        namespaces: impl IntoIterator<Item = String>,
        there: &There,
        leadership: &Leadership,
    ) -> bool {
        let data = self.data();
        let digest = digest(&data);
        let wrong = namespaces.into_iter().filter(|one| there.digest(one) != Some(digest));
        let (stand, wrong): (BTreeSet<_>, BTreeSet<_>) =
            wrong.partition(|one| self.written.stands(one, digest));
        for namespace in wrong {
            if !leadership.is_held() {
                break;
            }
            // One namespace, such as one that is being removed, does not stand in another's way.
            if let Err(error) = self.write(&namespace, &data).await {
                warn!(error = telemetry::chain(&error), "certificate authorities not published");
            }
        }
        !stand.is_empty()
    }

    async fn write(
        &self,
        namespace: &str,
        data: &BTreeMap<String, String>,
    ) -> Result<(), RootsError> {
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), namespace);
        let map = json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": root_ca::MESH},
            "data": data,
        });
        let params = PatchParams::apply(MANAGER).force();
        let written = maps.patch(root_ca::MESH, &params, &Patch::Apply(&map)).await;
        written.map_err(|source| RootsError::Write { namespace: namespace.to_owned(), source })?;
        info!(namespace, "certificate authorities published");
        self.written.remember(namespace, digest(data));
        Ok(())
    }

    fn data(&self) -> BTreeMap<String, String> {
        let authorities = self.vault.current();
        let mesh = authorities.mesh.bundle();
        let both = format!("{mesh}{}", self.cluster.pem());
        BTreeMap::from([
            (root_ca::KEY.to_owned(), mesh),
            (root_ca::FAIL_OPEN_KEY.to_owned(), both),
            (root_ca::MANAGER_KEY.to_owned(), authorities.manager.bundle()),
        ])
    }

    /// Tells the API server whom to believe when it calls our webhooks.
    async fn webhooks(&self, leadership: &Leadership) {
        for told in [self.validating(leadership).await, self.mutating(leadership).await] {
            if let Err(error) = told.map_err(RootsError::Webhooks) {
                warn!(error = telemetry::chain(&error), "certificate authorities not published");
            }
        }
    }

    /// Those that check.
    async fn validating(&self, leadership: &Leadership) -> Result<(), kube::Error> {
        let configurations: Api<ValidatingWebhookConfiguration> = Api::all(self.client.clone());
        for mut one in configurations.list(&ListParams::default().labels(PART_OF)).await? {
            let clients = one.webhooks.iter_mut().flatten().map(|hook| &mut hook.client_config);
            if set(clients, &self.bundle()) && leadership.is_held() {
                let name = one.metadata.name.clone().unwrap_or_default();
                told(&name, configurations.replace(&name, &PostParams::default(), &one).await);
            }
        }
        Ok(())
    }

    /// Those that change.
    async fn mutating(&self, leadership: &Leadership) -> Result<(), kube::Error> {
        let configurations: Api<MutatingWebhookConfiguration> = Api::all(self.client.clone());
        for mut one in configurations.list(&ListParams::default().labels(PART_OF)).await? {
            let clients = one.webhooks.iter_mut().flatten().map(|hook| &mut hook.client_config);
            if set(clients, &self.bundle()) && leadership.is_held() {
                let name = one.metadata.name.clone().unwrap_or_default();
                told(&name, configurations.replace(&name, &PostParams::default(), &one).await);
            }
        }
        Ok(())
    }

    fn bundle(&self) -> ByteString {
        ByteString(self.vault.current().manager.bundle().into_bytes())
    }
}

/// Whether any of them had to be changed.
fn set<'a>(
    clients: impl Iterator<Item = &'a mut WebhookClientConfig>,
    bundle: &ByteString,
) -> bool {
    let mut changed = false;
    for client in clients.filter(|client| client.ca_bundle.as_ref() != Some(bundle)) {
        client.ca_bundle = Some(bundle.clone());
        changed = true;
    }
    changed
}

/// One that cannot be written, such as somebody else's with our label, does not stand in another's way. A change in between
/// is none of our business: the next look sees it.
fn told<T>(name: &str, written: Result<T, kube::Error>) {
    match written {
        Ok(_) => info!(configuration = name, "webhook configuration believes the manager"),
        Err(kube::Error::Api(status)) if status.code == 409 => {}
        Err(error) => {
            let error = telemetry::chain(&error);
            warn!(
                configuration = name,
                error, "webhook configuration does not believe the manager"
            );
        }
    }
}

fn digest(data: &BTreeMap<String, String>) -> u64 {
    wire::digest(json!(data).to_string().as_bytes())
}

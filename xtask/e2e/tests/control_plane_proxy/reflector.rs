//! A policy change under a running kube-rs reflector.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::sync::{Arc, Mutex};

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::reflector::Store;
use kube::runtime::reflector::store;
use kube::runtime::watcher;
use kube::runtime::watcher::Event;
use kube::{Api, Client, Config, ResourceExt as _};
use serde_json::json;

use crate::bed::{ALWAYS, Bed, changes, create_objects, selector_after, write, write_policy};
use crate::harness::proxy::Proxy;
use crate::harness::{soon, until};

/// A reflector, and what it saw besides its store.
pub(crate) struct Reflector {
    store: Store<ConfigMap>,
    seen: Arc<Mutex<ReflectorLog>>,
    task: tokio::task::JoinHandle<()>,
}

#[derive(Debug, Default)]
struct ReflectorLog {
    /// How often it listed.
    lists: usize,
    /// The newest version of each object, by UID.
    versions: HashMap<String, u64>,
    /// Each version of the object that is always seen.
    always: BTreeSet<u64>,
    /// Events that were older than what was seen before, and errors.
    wrong: Vec<String>,
}

impl Reflector {
    async fn start(bed: &Bed, proxy: &Proxy, config: watcher::Config) -> Self {
        Self::start_at(bed, proxy, "", config).await
    }

    /// Of the cluster to which the path leads.
    pub(crate) async fn start_at(bed: &Bed, proxy: &Proxy, path: &str, config: watcher::Config) -> Self {
        let api = Api::namespaced(client(bed, proxy, path).await, &bed.namespace);
        let (store, mut writer) = store();
        let seen = Arc::<Mutex<ReflectorLog>>::default();
        let record = seen.clone();
        let task = tokio::spawn(async move {
            let mut events = Box::pin(watcher(api, config));
            while let Some(event) = events.next().await {
                let mut seen = record.lock().unwrap();
                match &event {
                    Ok(event) => {
                        seen.note(event);
                        writer.apply_watcher_event(event);
                    }
                    Err(error) => seen.wrong.push(error.to_string()),
                }
            }
        });
        soon("the first list", store.wait_until_ready()).await.unwrap();
        Self { store, seen, task }
    }

    /// Name and version of what it holds.
    pub(crate) fn state(&self) -> BTreeMap<String, String> {
        let objects = self.store.state();
        objects.iter().map(|one| (one.name_any(), one.resource_version().unwrap())).collect()
    }

    /// Whether it listed once only, and saw nothing in a wrong order.
    pub(crate) fn assert_spliced(&self) {
        let seen = std::mem::take(&mut *self.seen.lock().unwrap());
        assert_eq!((seen.lists, seen.wrong), (1, Vec::new()));
    }
}

impl Drop for Reflector {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl ReflectorLog {
    fn note(&mut self, event: &Event<ConfigMap>) {
        let object = match event {
            Event::Init => return self.lists += 1,
            Event::InitDone => return,
            Event::InitApply(object) | Event::Apply(object) | Event::Delete(object) => object,
        };
        let version: u64 = object.resource_version().unwrap().parse().unwrap();
        if object.name_any() == ALWAYS {
            self.always.insert(version);
        }
        let newest = self.versions.entry(object.uid().unwrap()).or_default();
        if version < *newest {
            self.wrong.push(format!("{event} at {version} after {newest}"));
        }
        *newest = version.max(*newest);
    }
}

/// What kube-rs makes of the proxy's address, the mesh CA and the pod's token.
async fn client(bed: &Bed, proxy: &Proxy, path: &str) -> Client {
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    let kubeconfig = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "proxy",
        "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "operator"}}],
        "clusters": [{"name": "proxy", "cluster": {
            "server": format!("https://{}{path}", proxy.address),
            "certificate-authority": bed.pki.path("mesh.crt"),
        }}],
        "users": [{"name": "operator", "user": {"token": bed.token}}],
    });
    let file = bed.pki.path("kubeconfig");
    fs::write(&file, kubeconfig.to_string()).unwrap();
    let kubeconfig = Kubeconfig::read_from(file).unwrap();
    let options = KubeConfigOptions::default();
    Client::try_from(Config::from_custom_kubeconfig(kubeconfig, &options).await.unwrap()).unwrap()
}

/// Changes the policy under churn, and waits after each change until the watch has gone over, where that is asked for.
async fn changes_reach_a_reflector(config: watcher::Config, wait_for_each: bool) {
    let bed = Bed::new().await;
    create_objects(&bed).await;
    let proxy = bed.proxy("policy", "slot in (5,6,9)");
    let reflector = Reflector::start(&bed, &proxy, config).await;
    let mut selector = String::new();
    let mut written = Vec::new();
    for change in 0..changes() {
        selector = selector_after(change);
        write_policy(&bed.pki, "policy", &selector);
        if !wait_for_each {
            for _ in 0..6 {
                written.push(write(&bed, written.len()).await);
            }
            continue;
        }
        #[expect(clippy::cast_precision_loss, reason = "a small count")]
        let wanted = (change + 1) as f64;
        let spliced = async {
            while proxy.metric("ctrlmesh_proxy_watches_spliced_total").await < wanted {
                written.push(write(&bed, written.len()).await);
            }
        };
        soon("the watch to go over to the new policy", spliced).await;
    }
    until("the store to equal the API server", || async { reflector.state() == bed.truth(&selector).await }).await;
    assert!(proxy.metric("ctrlmesh_proxy_watches_expired_total").await == 0.0);
    let seen = std::mem::take(&mut *reflector.seen.lock().unwrap());
    assert_eq!((seen.lists, seen.wrong), (1, Vec::new()));
    written.retain(|version| !seen.always.contains(version));
    assert!(written.is_empty(), "versions that were never seen: {written:?}");
}

#[tokio::test]
async fn policy_changes_reach_a_kube_rs_reflector_without_a_relist() {
    changes_reach_a_reflector(watcher::Config::default(), true).await;
}

#[tokio::test]
async fn a_kube_rs_reflector_with_streamed_lists_follows_policies() {
    changes_reach_a_reflector(watcher::Config::default().streaming_lists(), true).await;
}

/// Most changes fall between two watches, and are led over when the next begins.
#[tokio::test]
async fn a_kube_rs_reflector_with_short_watches_follows_policies() {
    changes_reach_a_reflector(watcher::Config::default().timeout(1), false).await;
}

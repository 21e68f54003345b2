//! An operator in kube-rs: it publishes websites, as `deploy/example-operator` does in Go.
//!
//! It reads from the caches of kube-rs' controller, writes by server-side apply, and comes back by a timer. With
//! `--cost-ms=N` it takes N ms for each website, one after the other, and does not come back to those that are done.
#![forbid(unsafe_code)]
#![allow(clippy::print_stderr, reason = "what it logs")]

use std::env;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams};
use kube::runtime::controller::{self, Action};
use kube::runtime::{Controller, watcher};
use kube::{Client, Resource as _, ResourceExt as _};
use serde_json::{Value, json};
use tokio::time;

/// After how long a website is looked at again where nothing changes, and where something failed.
const AGAIN: Duration = Duration::from_secs(1);

struct Publisher {
    client: Client,
    websites: ApiResource,
    /// How long each website takes.
    cost: Option<Duration>,
}

/// Why a website is not published.
#[derive(Debug, thiserror::Error)]
#[error("publish {website}: {source:#}")]
struct NotPublished {
    website: String,
    source: anyhow::Error,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let client = Client::try_default().await.context("the kubeconfig")?;
    let websites = ApiResource::from_gvk(&GroupVersionKind::gvk("web.example.com", "v1alpha1", "Website"));
    let all = Api::all_with(client.clone(), &websites);
    let cost = cost()?;
    let publisher = Arc::new(Publisher { client: client.clone(), websites: websites.clone(), cost });
    // Else 0, which sets no bound.
    let at_once = u16::from(cost.is_some());
    let mut controller = Controller::new_with(all, watcher::Config::default(), websites)
        .with_config(controller::Config::default().concurrency(at_once));
    if cost.is_none() {
        controller = controller.owns(Api::<ConfigMap>::all(client), watcher::Config::default());
    }
    controller
        .run(reconcile, |_, _, _| Action::requeue(AGAIN), publisher)
        .for_each(async |outcome| {
            if let Err(error) = outcome {
                eprintln!("{error}");
            }
        })
        .await;
    Ok(())
}

fn cost() -> Result<Option<Duration>> {
    let cost = env::args().find_map(|argument| argument.strip_prefix("--cost-ms=").map(str::to_owned));
    let cost =
        cost.map(|cost| cost.parse().with_context(|| format!("--cost-ms={cost}: a number of ms"))).transpose()?;
    Ok(cost.map(Duration::from_millis))
}

async fn reconcile(website: Arc<DynamicObject>, publisher: Arc<Publisher>) -> Result<Action, NotPublished> {
    if let Some(cost) = publisher.cost {
        if website.data["status"]["observedGeneration"].as_i64() == website.metadata.generation {
            return Ok(Action::await_change());
        }
        time::sleep(cost).await;
    }
    let outcome = publisher.publish(&website).await;
    outcome.map_err(|source| NotPublished { website: website.name_any(), source })?;
    Ok(if publisher.cost.is_some() { Action::await_change() } else { Action::requeue(AGAIN) })
}

impl Publisher {
    async fn publish(&self, website: &DynamicObject) -> Result<()> {
        let namespace = website.namespace().context("a website is in a namespace")?;
        let name = website.name_any();
        let by = PatchParams::apply("kube-rs-operator").force();
        let (title, pages) = (&website.data["spec"]["title"], website.data["spec"]["pages"].as_u64().unwrap_or(1));
        let owner = website.controller_owner_ref(&self.websites).context("a website without UID")?;
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), &namespace);
        for number in 0..pages {
            let page = json!({
                "apiVersion": "v1", "kind": "ConfigMap",
                "metadata": {"name": format!("{name}-page-{number}"), "labels": {"web.example.com/site": name},
                    "ownerReferences": [owner]},
                "data": {"index.html": format!("<h1>{}</h1><p>page {number}</p>\n", title.as_str().unwrap_or_default())},
            });
            maps.patch(&format!("{name}-page-{number}"), &by, &Patch::Apply(&page)).await?;
        }
        let status = json!({
            "apiVersion": "web.example.com/v1alpha1", "kind": "Website", "metadata": {"name": name},
            "status": {"observedGeneration": website.metadata.generation, "pages": pages},
        });
        let all: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &namespace, &self.websites);
        all.patch_status(&name, &by, &Patch::<&Value>::Apply(&status)).await?;
        Ok(())
    }
}

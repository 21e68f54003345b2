//! An operator in kube-rs: it publishes websites, as `deploy/example-operator` does in Go.
//!
//! It reads from the caches of kube-rs' controller, writes by server-side apply, and comes back by a timer.
#![forbid(unsafe_code)]
#![allow(clippy::print_stderr, reason = "what it logs")]

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams};
use kube::runtime::controller::Action;
use kube::runtime::{Controller, watcher};
use kube::{Client, Resource as _, ResourceExt as _};
use serde_json::{Value, json};

/// After how long a website is looked at again where nothing changes, and where something failed.
const AGAIN: Duration = Duration::from_secs(1);

struct Publisher {
    client: Client,
    websites: ApiResource,
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
    let publisher = Arc::new(Publisher { client: client.clone(), websites: websites.clone() });
    Controller::new_with(all, watcher::Config::default(), websites)
        .owns(Api::<ConfigMap>::all(client), watcher::Config::default())
        .run(reconcile, |_, _, _| Action::requeue(AGAIN), publisher)
        .for_each(async |outcome| {
            if let Err(error) = outcome {
                eprintln!("{error}");
            }
        })
        .await;
    Ok(())
}

async fn reconcile(website: Arc<DynamicObject>, publisher: Arc<Publisher>) -> Result<Action, NotPublished> {
    let outcome = publisher.publish(&website).await;
    outcome.map_err(|source| NotPublished { website: website.name_any(), source })?;
    Ok(Action::requeue(AGAIN))
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

//! Knows which kinds the API server serves.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_runtime::sync::lock;
use futures::{FutureExt as _, StreamExt as _};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{Config, watcher};
use kube::{Api, Client};
use tokio::time;
use tracing::warn;

use super::{Cache, PAGE};
use crate::cluster::served_resources::ServedResources;

/// Delay between a change of a CRD and discovery, because the API server needs a moment; and the interval
/// without a change.
const SERVED: (Duration, Duration) = (Duration::from_secs(2), Duration::from_mins(1));

impl Cache {
    /// Runs discovery at intervals, and soon after a change of a CRD.
    pub(super) async fn follow_served(self: Arc<Self>, client: Client) {
        let definitions = Api::<PartialObjectMeta<CustomResourceDefinition>>::all(client.clone());
        let config = Config::default().page_size(PAGE);
        let mut definitions = pin!(watcher(definitions, config).default_backoff());
        loop {
            match ServedResources::discover(&client).await {
                Ok(served) => {
                    let mut state = lock(&self.state);
                    let changed = *state.served != served;
                    state.served = Arc::new(served);
                    drop(state);
                    if changed {
                        self.version.send_modify(|version| *version = version.wrapping_add(1));
                    }
                }
                Err(error) => warn!(%error, "what is served is not known; what was known holds"),
            }
            drop(time::timeout(SERVED.1, definitions.next()).await);
            time::sleep(SERVED.0).await;
            // Definitions are often created in bulk.
            while definitions.next().now_or_never().flatten().is_some() {}
        }
    }
}

//! Follows the cluster for all pages that are open.

use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::api::{CircuitBreaker, ShardingConfig};
use jiff::Timestamp;
use kube::Client;
use tokio::sync::watch;
use tokio::time;

use super::document::{Page, Traffic};
use crate::cluster::answer::{self, Answer};
use crate::top::sample::Sampler;

/// Between two looks at the cluster.
const PERIOD: Duration = Duration::from_secs(2);

/// For so long requests are counted.
const COUNTED: Duration = Duration::from_secs(5);

/// What the page shows now, in JSON. Empty until it is known.
pub(super) type State = Arc<str>;

/// The roots that pages show.
#[derive(Clone)]
pub(super) struct Roots {
    pub(super) client: Client,
    /// `None`: of all namespaces.
    pub(super) namespace: Option<String>,
}

impl Roots {
    /// # Errors
    /// The API server does not say it.
    pub(super) async fn read(&self, traffic: &Traffic) -> Answer<Page> {
        let namespace = self.namespace.as_deref();
        let configs: Vec<ShardingConfig> = answer::list_in(&self.client, namespace, "").await?;
        let breakers: Answer<Vec<CircuitBreaker>> = answer::list_in(&self.client, namespace, "").await;
        // Breakers are an extra: whoever may not read them sees the rest.
        Ok(Page::of(&configs, &breakers.unwrap_or_default(), traffic))
    }

    /// Looks again and again while a page is open, and sends what has changed.
    pub(super) async fn follow(self, state: watch::Sender<State>, traffic: watch::Receiver<Traffic>) {
        let (mut last, mut stale_since) = (None, None);
        loop {
            if state.receiver_count() > 0 {
                let counted = traffic.borrow().clone();
                let page = match self.read(&counted).await {
                    Ok(page) => {
                        stale_since = None;
                        last = Some(page.clone());
                        page
                    }
                    Err(why) => {
                        let since = *stale_since.get_or_insert_with(Timestamp::now);
                        let page = last.clone().unwrap_or_else(|| Page::of(&[], &[], &None));
                        page.stale(since, why.to_string())
                    }
                };
                send(&state, &page);
            } else {
                // Who opens the page later is shown nothing that is old.
                state.send_if_modified(|state| !std::mem::replace(state, "".into()).is_empty());
            }
            time::sleep(PERIOD).await;
        }
    }
}

fn send(state: &watch::Sender<State>, page: &Page) {
    // It has only names and numbers in it, and each can be written.
    let Ok(text) = serde_json::to_string(page) else { return };
    state.send_if_modified(|state| {
        let is_new = **state != *text;
        if is_new {
            *state = text.into();
        }
        is_new
    });
}

/// Counts requests again and again while a page is open.
pub(super) async fn count(client: Client, is_open: impl Fn() -> bool, traffic: watch::Sender<Traffic>) {
    let mut sampler = None;
    loop {
        if !is_open() {
            sampler = None;
            traffic.send_replace(None);
            time::sleep(PERIOD).await;
            continue;
        }
        let counted = match &mut sampler {
            None => Sampler::open(client.clone()).await.map(|opened| sampler = Some(opened)).map(|()| None),
            Some(sampler) => sampler.next().await.map(Some),
        };
        match counted {
            Ok(Some(sample)) => drop(traffic.send_replace(Some(Ok(sample.into())))),
            Ok(None) => {}
            Err(error) => {
                sampler = None;
                traffic.send_replace(Some(Err(error.to_string())));
            }
        }
        time::sleep(COUNTED).await;
    }
}

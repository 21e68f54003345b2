//! Keeps what node proxies say of the webhooks of pods with a sidecar, per replica that got it.
//!
//! A sidecar speaks for its pod. Of the calls to the pod's webhook it knows nothing: the node's proxy takes them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use ctrlmesh_common::wire::WebhookState;
use ctrlmesh_runtime::sync::lock;
use tokio::sync::watch;

use super::by_replica::{self, ByReplica, OfPod};
use crate::rules::pod::PodName;

/// What a node proxy that is connected says.
#[derive(Clone, Debug, PartialEq)]
pub struct SidecarWebhook {
    /// Of the pod with the webhook.
    pub uid: String,
    /// UID of the proxy's pod: during a handover there are two.
    pub by: Arc<str>,
    pub state: WebhookState,
}

#[derive(Debug)]
pub(super) struct SidecarWebhooks {
    by_pod: Mutex<ByReplica<SidecarWebhook>>,
    /// Sent to at each change.
    changed: watch::Sender<u64>,
}

impl SidecarWebhooks {
    pub(super) fn new(changed: watch::Sender<u64>) -> Self {
        Self { by_pod: Mutex::default(), changed }
    }

    pub(super) fn states(&self) -> BTreeMap<PodName, WebhookState> {
        let by_pod = lock(&self.by_pod);
        let state =
            |(pod, all): (&PodName, &OfPod<SidecarWebhook>)| Some((pod.clone(), all.values().next()?.state.clone()));
        by_pod.iter().filter_map(state).collect()
    }

    pub(super) fn here(&self) -> BTreeMap<PodName, SidecarWebhook> {
        let by_pod = lock(&self.by_pod);
        let here = |(pod, all): (&PodName, &OfPod<SidecarWebhook>)| Some((pod.clone(), all.get(&None)?.clone()));
        by_pod.iter().filter_map(here).collect()
    }

    /// Takes what replica `at` got; none: this one.
    pub(super) fn take(&self, at: Option<&Arc<str>>, pod: &PodName, said: SidecarWebhook) {
        lock(&self.by_pod).entry(pod.clone()).or_default().insert(at.cloned(), said);
        self.change();
    }

    /// The proxy `by` says nothing of it any more, unless another one has said something since.
    pub(super) fn forget(&self, at: Option<&Arc<str>>, pod: &PodName, by: &str) {
        self.retain(|one, replica, said| one != pod || *replica != at.cloned() || *said.by != *by);
    }

    /// What replica `at` got does not count any more.
    pub(super) fn lose(&self, at: &Arc<str>) {
        self.retain(|_, replica, _| replica.as_ref() != Some(at));
    }

    /// Keeps those of pods that still exist, by name and UID.
    pub(super) fn keep(&self, is_there: impl Fn(&PodName, &str) -> bool) {
        self.retain(|pod, _, said| is_there(pod, &said.uid));
    }

    fn retain(&self, counts: impl Fn(&PodName, &Option<Arc<str>>, &SidecarWebhook) -> bool) {
        if by_replica::retain(&mut lock(&self.by_pod), counts) {
            self.change();
        }
    }

    fn change(&self) {
        self.changed.send_modify(|count| *count = count.wrapping_add(1));
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::name;
    use super::*;

    fn said(by: &str, error: &str) -> SidecarWebhook {
        let state = WebhookState { error: error.to_owned(), ..WebhookState::default() };
        SidecarWebhook { uid: "a-uid".to_owned(), by: Arc::from(by), state }
    }

    #[test]
    fn what_a_proxy_has_said_counts_until_it_is_gone() {
        let webhooks = SidecarWebhooks::new(watch::Sender::new(0));
        let error = || webhooks.states().get(&name("a")).map(|state| state.error.clone());
        let replica: Arc<str> = Arc::from("replica");
        webhooks.take(Some(&replica), &name("a"), said("old", "there"));
        assert_eq!((error().as_deref(), webhooks.here().len()), (Some("there"), 0));
        webhooks.take(None, &name("a"), said("new", "here"));
        assert_eq!((error().as_deref(), webhooks.here().len()), (Some("here"), 1));
        // The proxy before it leaves.
        webhooks.forget(None, &name("a"), "old");
        assert_eq!(error().as_deref(), Some("here"));
        webhooks.forget(None, &name("a"), "new");
        assert_eq!(error().as_deref(), Some("there"));
        let changes = webhooks.changed.subscribe();
        webhooks.lose(&replica);
        assert_eq!((error(), changes.has_changed().unwrap()), (None, true));
        webhooks.take(None, &name("a"), said("new", ""));
        webhooks.keep(|pod, uid| *pod == name("a") && uid == "another");
        assert_eq!(error(), None);
    }
}

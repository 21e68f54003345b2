//! Says whether reviews of a pod's webhook are routed: its port is taken, and its certificate read.
//!
//! The certificate is looked for as soon as the port is taken, and then until there is one: connections look for later
//! ones.

use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::policy::Webhook;
use ctrlmesh_common::wire::WebhookState;
use ctrlmesh_runtime::drain::Drain;
use tokio::sync::watch;
use tokio::time;
use tokio_util::sync::CancellationToken;

use super::PodWebhook;
use crate::policy::{PublishWebhook, while_served};

/// Between two reports to the manager.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Longer than that while nothing changes and there is no certificate: its files are looked for before each report.
const CERTIFICATE_WAIT: Duration = Duration::from_secs(1);

/// Whether calls to the pod's webhook reach the proxy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum PortState {
    /// The policy names no webhook, or this one was not tried yet.
    #[default]
    Unknown,
    /// Those to this port do.
    Taken(u16),
    /// Those to this port do not.
    NotTaken {
        port: u16,
        /// With its causes.
        error: String,
    },
}

impl PodWebhook {
    /// Says what has become of the port that the policy names.
    pub(crate) fn set_port(&self, state: PortState) {
        self.port.send_if_modified(|port| {
            let is_new = *port != state;
            *port = state;
            is_new
        });
    }

    /// Publishes the state as it changes, until shutdown or until the pod is `gone`.
    pub(crate) async fn report(
        self: Arc<Self>,
        publish: PublishWebhook,
        drain: Drain,
        gone: Option<CancellationToken>,
    ) {
        while_served(self.publish(publish), &drain, gone.as_ref()).await;
    }

    async fn publish(&self, publish: PublishWebhook) {
        let (mut policies, mut ports) = (self.policy.clone(), self.port.subscribe());
        loop {
            let policy = policies.borrow_and_update().clone();
            let port = ports.borrow_and_update().clone();
            let state = match &policy.webhook {
                Some(webhook) => self.state(webhook, port).await,
                None => None,
            };
            let waits_for_certificate = state.as_ref().is_some_and(|state| state.port_taken && !state.certificate_read);
            if state.is_some() || policy.webhook.is_none() {
                publish.publish(state.map(Arc::new));
            }
            time::sleep(REPORT_INTERVAL).await;
            tokio::select! {
                () = changed(&mut policies) => {}
                () = changed(&mut ports) => {}
                () = time::sleep(CERTIFICATE_WAIT), if waits_for_certificate => {}
            }
        }
    }

    /// `None` where it is not known yet whether the port is taken.
    async fn state(&self, webhook: &Webhook, port: PortState) -> Option<WebhookState> {
        let wanted = webhook.port.get();
        match port {
            PortState::Taken(port) if port == wanted => {
                let error = self.certificate.check(&self.pod, webhook, &self.files).await.err();
                let (certificate_read, error) = (error.is_none(), error.unwrap_or_default().to_owned());
                Some(WebhookState { port_taken: true, certificate_read, error })
            }
            PortState::NotTaken { port, error } if port == wanted => {
                Some(WebhookState { port_taken: false, certificate_read: false, error }.truncated())
            }
            _ => None,
        }
    }
}

/// Never completes where there are no more changes.
async fn changed<T>(changes: &mut watch::Receiver<T>) {
    if changes.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use ctrlmesh_common::policy::Policy;
    use ctrlmesh_common::policy::webhook::OnUnowned;
    use tempfile::TempDir;

    use super::*;
    use crate::egress::PodFiles;
    use crate::policy::{PodName, WebhookReports};

    /// A pod with a webhook, and what it reports.
    struct Bed {
        folder: TempDir,
        policy: watch::Sender<Arc<Policy>>,
        webhook: Arc<PodWebhook>,
        reports: WebhookReports,
        drain: Drain,
    }

    impl Bed {
        fn new() -> Self {
            let folder = TempDir::new().unwrap();
            let path = |name: &str| folder.path().join(name).display().to_string();
            let webhook = Webhook {
                port: 9443.try_into().unwrap(),
                certificate: path("tls.crt"),
                key: path("tls.key"),
                on_unowned: OnUnowned::Local,
                peers: Vec::new(),
            };
            let policy = watch::Sender::new(Arc::new(Policy { webhook: Some(webhook), ..Policy::default() }));
            let webhook = PodWebhook::new("ops/a".to_owned(), policy.subscribe(), None, PodFiles::own());
            let (reports, drain) = (WebhookReports::default(), Drain::default());
            let publish = reports.begin("ops/a".parse().unwrap());
            drain.spawn(webhook.clone().report(publish, drain.clone(), None));
            Self { folder, policy, webhook, reports, drain }
        }

        fn write(&self, name: &str, text: impl AsRef<[u8]>) {
            fs::write(self.folder.path().join(name), text).unwrap();
        }

        async fn until(&self, is_it: impl Fn(Option<&WebhookState>) -> bool) {
            let (mut changes, pod) = (self.reports.changes(), "ops/a".parse::<PodName>().unwrap());
            let is_it = changes.wait_for(|all| is_it(all.get(&pod).map(|pod| &*pod.state)));
            drop(time::timeout(Duration::from_secs(20), is_it).await.expect("in time").unwrap());
        }
    }

    fn fails(state: Option<&WebhookState>, port_taken: bool, error: &str) -> bool {
        state.is_some_and(|state| state.port_taken == port_taken && !state.certificate_read && state.error == error)
    }

    #[tokio::test]
    async fn the_port_counts_before_the_certificate_which_is_looked_for() {
        let bed = Bed::new();
        bed.webhook.set_port(PortState::NotTaken { port: 9443, error: "find its addresses".to_owned() });
        bed.until(|state| fails(state, false, "find its addresses")).await;
        bed.webhook.set_port(PortState::Taken(9443));
        bed.until(|state| fails(state, true, super::super::certificate::NOT_FOUND)).await;
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let other = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        bed.write("tls.crt", made.cert.pem());
        bed.write("tls.key", other.signing_key.serialize_pem());
        bed.until(|state| fails(state, true, "key and certificate do not fit together")).await;
        bed.write("tls.key", made.signing_key.serialize_pem());
        bed.until(|state| {
            state.is_some_and(|state| state.port_taken && state.certificate_read && state.error.is_empty())
        })
        .await;
        bed.policy.send_replace(Arc::default());
        bed.until(|state| state.is_none()).await;
        assert!(bed.drain.finish(Duration::from_secs(9)).await);
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_said_of_a_port_that_was_not_tried() {
        let bed = Bed::new();
        bed.webhook.set_port(PortState::Taken(443));
        time::sleep(Duration::from_secs(9)).await;
        bed.until(|state| state.is_none()).await;
        bed.webhook.set_port(PortState::NotTaken { port: 9443, error: "é".repeat(200) });
        bed.until(|state| fails(state, false, &"é".repeat(128))).await;
    }
}

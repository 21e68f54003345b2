//! A watch over a WebSocket.

use std::sync::Arc;

use crate::policy::Reading;
use crate::session::Session;
use crate::traffic::OpenWatch;
use crate::watch::WatchRequest;
use crate::watch::splice::RequestTemplate;

/// A watch whose frames the proxy does not read. It ends when the policy changes, and the client lists again.
#[derive(Debug)]
pub(crate) struct UpgradedWatch {
    template: RequestTemplate,
    in_force: Reading,
    _open: Option<OpenWatch>,
}

impl UpgradedWatch {
    pub(crate) fn new(session: &Session, watch: WatchRequest) -> Arc<Self> {
        let open = watch.template.info().ok().and_then(|info| session.traffic.watched.begin(&info));
        Arc::new(Self { template: watch.template, in_force: watch.in_force, _open: open })
    }

    /// Completes when the policy means another watch, or when shutdown begins.
    pub(crate) async fn outdated(&self, session: &Session) {
        let drain = &session.server.drain;
        while !drain.has_started() && self.template.means_the_same(self.in_force.policy(), &session.policy.current()) {
            session.policy.change_or_shutdown(drain).await;
        }
    }
}

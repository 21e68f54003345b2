//! How does a watch over a WebSocket follow the policy?

use std::sync::Arc;

use crate::policy::Reading;
use crate::session::Session;
use crate::watch::Asked;
use crate::watch::splice::Kept;

/// A watch over a WebSocket, of which nothing is read: it ends when the policy changes, and the client lists again.
#[derive(Debug)]
pub(crate) struct UpgradedWatch {
    kept: Kept,
    in_force: Reading,
}

impl UpgradedWatch {
    /// Of a watch that the API server granted.
    pub(crate) fn new(asked: Asked) -> Arc<Self> {
        Arc::new(Self { kept: asked.kept, in_force: asked.in_force })
    }

    /// Completes once it must end: the policy means another watch, or shutdown has begun.
    pub(crate) async fn replaced(&self, session: &Session) {
        let drain = &session.server.drain;
        while !drain.has_started()
            && self.kept.means_the_same(self.in_force.policy(), &session.policy.current())
        {
            session.policy.alarm(drain).await;
        }
    }
}

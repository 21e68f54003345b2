//! Sends a write, and knows until when the API server may carry it out.

use std::error::Error;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use http::{Request, Response};
use tracing::debug;

use crate::net::body::Relay;
use crate::policy::{Validity, Write};
use crate::serve::failure::Failure;
use crate::serve::pending::Pending;
use crate::serve::unless_gone;
use crate::session::Session;
use crate::upstream::UsedConnection;

type Sending = Pin<Box<dyn Future<Output = Result<Response<Relay>, Failure>>>>;

/// How many writes that were given up the proxy waits for, of one connection of a client. An API server takes as many
/// requests at once on one of its own.
const MAX_GIVEN_UP: usize = 100;

/// A write that goes on where its client gives it up: the API server may carry it out all the same, so it counts as
/// under way until it is answered or cut.
struct UntilAnswered {
    /// `None` once it is over.
    sending: Option<Sending>,
    used: Rc<UsedConnection>,
    session: Rc<Session>,
    /// Where nobody waits for its end, it ends with its client.
    is_awaited: bool,
}

impl Session {
    /// Sends the write, as long as nothing forbids it.
    pub(super) async fn send_write(
        self: &Rc<Self>,
        request: Request<Relay>,
        write: Write,
        pending: &Pending,
        on_informational: impl FnMut(Response<()>) + 'static,
    ) -> Result<Response<Relay>, Failure> {
        let (validity, long_running) = (pending.validity.clone(), pending.long_running);
        let is_awaited = write.is_fenced() && !long_running;
        let used = Rc::<UsedConnection>::default();
        let (session, using) = (self.clone(), used.clone());
        let sending = Box::pin(async move {
            let sending = session.send(&using, request, long_running, on_informational);
            let answered = unless_forbidden(sending, &write, validity.as_ref()).await;
            if let Err(Failure::Cut | Failure::Lapsed) = answered {
                // The network may be down, and would deliver it later.
                session.upstream.reset(&using);
            }
            answered
        });
        UntilAnswered { sending: Some(sending), used, session: self.clone(), is_awaited }.await
    }

    /// Waits for the end of a write without its client, as long as the pod is served.
    async fn finish_write(self: Rc<Self>, sending: Sending, used: Rc<UsedConnection>) {
        let given_up = &self.resources.given_up;
        given_up.set(given_up.get() + 1);
        match unless_gone(self.gone.as_ref(), sending).await {
            Some(Ok(_)) => {}
            Some(Err(error)) => {
                debug!(error = &error as &dyn Error, "a write that its client gave up failed");
                // Counts it. Nobody waits for the status.
                drop(self.failed(&error, false));
            }
            None => self.upstream.reset(&used),
        }
        given_up.set(given_up.get() - 1);
    }
}

impl Future for UntilAnswered {
    type Output = Result<Response<Relay>, Failure>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(sending) = &mut self.sending else { return Poll::Pending };
        let answered = sending.as_mut().poll(cx);
        if answered.is_ready() {
            self.sending = None;
        }
        answered
    }
}

impl Drop for UntilAnswered {
    fn drop(&mut self) {
        let Some(sending) = self.sending.take() else { return };
        let is_room = self.session.resources.given_up.get() < MAX_GIVEN_UP;
        if self.is_awaited && self.used.is_used() && is_room {
            let session = self.session.clone();
            self.session.server.drain.spawn_local(session.finish_write(sending, self.used.clone()));
        }
    }
}

async fn unless_forbidden(
    sending: impl Future<Output = Result<Response<Relay>, Failure>>,
    write: &Write,
    validity: Option<&Validity>,
) -> Result<Response<Relay>, Failure> {
    let answered = write.unless_cut(sending);
    let answered = match validity {
        None => answered.await,
        Some(validity) => tokio::select! {
            biased;
            answered = answered => answered,
            () = validity.over() => return Err(Failure::Lapsed),
        },
    };
    answered.ok_or(Failure::Cut)?
}

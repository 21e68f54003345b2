//! The reads that lead a watch over to another policy, while they are under way.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use ctrlmesh_request::rewrite::Encoding;
use tokio::sync::mpsc;

use crate::policy::Reading;
use crate::session::Session;
use crate::watch::splice;
use crate::watch::splice::{RequestTemplate, SpliceOutcome, Transition};

/// The reads between two watches.
pub(super) struct SpliceInProgress {
    encoding: Encoding,
    reads: Pin<Box<dyn Future<Output = SpliceOutcome>>>,
    outcome: Option<SpliceOutcome>,
    pages: mpsc::Receiver<Bytes>,
}

pub(super) enum SpliceEvent {
    /// Frames for the client.
    Page(Bytes),
    Done(SpliceOutcome),
}

impl SpliceInProgress {
    pub(super) fn begin(
        session: Rc<Session>,
        template: Rc<RequestTemplate>,
        encoding: Encoding,
        over: Transition,
        reading: Option<Reading>,
    ) -> Self {
        let (send, pages) = mpsc::channel(1);
        let reads = Box::pin(splice::run(session, template, encoding, over, reading, send));
        Self { encoding, reads, outcome: None, pages }
    }

    /// Of the old watch.
    pub(super) fn encoding(&self) -> Encoding {
        self.encoding
    }

    pub(super) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<SpliceEvent> {
        loop {
            // The last page may still be in the channel when the reads are done.
            if let Poll::Ready(Some(page)) = self.pages.poll_recv(cx) {
                return Poll::Ready(SpliceEvent::Page(page));
            }
            if let Some(outcome) = self.outcome.take() {
                return Poll::Ready(SpliceEvent::Done(outcome));
            }
            match self.reads.as_mut().poll(cx) {
                Poll::Ready(outcome) => self.outcome = Some(outcome),
                // A page may have been sent before the reads went pending.
                Poll::Pending => {
                    let page = ready!(self.pages.poll_recv(cx));
                    return page.map_or(Poll::Pending, |page| Poll::Ready(SpliceEvent::Page(page)));
                }
            }
        }
    }
}

//! How does an open watch follow the policy?
//!
//! Outside a change its bytes pass as they come. At a change it is cut at the end of a frame, what joins and what
//! leaves is read at the version that the client last saw, and it goes on with the new selector. Where that cannot be
//! done it ends with 410, and the client lists anew. At shutdown it ends at the end of a frame.

pub(crate) mod splice;
pub(crate) mod upgraded;
mod lock_rename;
mod page_permit;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use ctrlmesh_request::decide::Rename;
use ctrlmesh_request::request::RequestInfo;
use ctrlmesh_request::rewrite::Encoding;
use ctrlmesh_request::rewrite::watch;
use ctrlmesh_request::rewrite::watch::Frames;
use ctrlmesh_runtime::poll_on_wake::PollOnWake;
use http::response::Parts;
use http::{HeaderMap, Response};
use hyper::body::{Body as _, Frame};
use thiserror::Error;
use tokio::sync::mpsc;
use tracing::debug;

use crate::metrics::Open;
use crate::net::body::{BodyError, Relay};
use crate::policy::{InForce, Reading};
use crate::session::Session;
use crate::watch::lock_rename::Renaming;
use crate::watch::splice::{Kept, Over, Spliced};

/// A watch that a client asked for.
#[derive(Debug)]
pub(crate) struct Asked {
    /// What is needed to ask for the like again.
    pub(crate) kept: Kept,
    /// The policy under which it is asked for.
    pub(crate) in_force: Reading,
    /// Those under which the client may have read what it goes on from.
    pub(crate) suspects: Vec<Arc<InForce>>,
}

/// A watch, on its way to the client.
pub(crate) struct Watch {
    session: Rc<Session>,
    kept: Rc<Kept>,
    upstream: Relay,
    /// What is known of its frames; nothing where they are compressed.
    frames: Option<(Encoding, Frames)>,
    rename: Option<Renaming>,
    /// The policy under which the client reads.
    in_force: Reading,
    /// Wakes this watch at the next change of the policy, and at shutdown.
    alarm: Option<PollOnWake<Pin<Box<dyn Future<Output = ()>>>>>,
    /// Whether the last events that passed are older than what the client knows. One that takes no bookmarks would go on
    /// from there.
    went_back: bool,
    state: State,
    _open: Open,
}

/// The reads between two watches.
struct Splicing {
    encoding: Encoding,
    reads: Pin<Box<dyn Future<Output = Spliced>>>,
    done: Option<Spliced>,
    pages: mpsc::Receiver<Bytes>,
}

/// What comes of them next.
enum Next {
    /// Frames for the client.
    Page(Bytes),
    /// Nothing more.
    Done(Spliced),
}

/// The API server's answer to this watch is none whose frames can be read.
#[derive(Debug, Error)]
#[error("read the frames of the watch")]
pub(crate) struct Unreadable(pub(crate) Rc<Kept>);

enum State {
    /// Bytes pass.
    Passing,
    /// The policy changed: the watch is to be cut as soon as a frame ends.
    Cutting,
    /// The reads between the old watch and the new one are under way.
    Splicing(Box<Splicing>),
    /// Nothing comes any more.
    Ended,
}

// === impl Watch ===

impl Watch {
    /// Begins to pass on a watch that the API server granted; where its client may have read what it goes on from under
    /// another policy, it is led over first.
    ///
    /// # Errors
    ///
    /// Fails where it would have to be led over, or a lock renamed in it, and its frames cannot be read.
    pub(crate) fn new(
        session: Rc<Session>,
        asked: Asked,
        response: Response<Relay>,
        rename: Option<Rename>,
    ) -> Result<Response<Box<Self>>, Unreadable> {
        let Asked { kept, in_force, suspects } = asked;
        let frames = kept.info().ok().and_then(|info| frames(&info, response.headers()));
        let open = session.server.metrics.watch();
        let (head, upstream) = response.into_parts();
        let mut this = Box::new(Self {
            session,
            kept: Rc::new(kept),
            upstream,
            frames,
            rename: rename.map(Renaming::new),
            in_force,
            alarm: None,
            went_back: false,
            state: State::Passing,
            _open: open,
        });
        // Nothing passes by the name that only the server may know.
        if this.rename.is_some() && this.frames.is_none() {
            return Err(Unreadable(this.kept.clone()));
        }
        if !suspects.is_empty() {
            this.begin_led_over(head.clone(), suspects)?;
        }
        Ok(Response::from_parts(head, this))
    }

    /// Leads a watch over that has just begun.
    fn begin_led_over(&mut self, head: Parts, old: Vec<Arc<InForce>>) -> Result<(), Unreadable> {
        let frames = self.frames.as_mut();
        let (encoding, frames) = frames.ok_or_else(|| Unreadable(self.kept.clone()))?;
        let (encoding, at) = (*encoding, frames.at());
        let upstream = std::mem::replace(&mut self.upstream, Relay::Empty);
        let begun = Some((self.kept.target().clone(), Response::from_parts(head, upstream)));
        let new = self.in_force.policy().clone();
        self.lead_over(encoding, Over { at, old, new, begun }, None);
        Ok(())
    }

    fn lead_over(&mut self, encoding: Encoding, over: Over, reading: Option<Reading>) {
        let (session, kept) = (self.session.clone(), self.kept.clone());
        let (send, pages) = mpsc::channel(1);
        let reads = Box::pin(splice::run(session, kept, encoding, over, reading, send));
        self.state = State::Splicing(Box::new(Splicing { encoding, reads, done: None, pages }));
    }

    /// What the client gets next.
    pub(crate) fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        loop {
            self.look_up(cx);
            if matches!(self.state, State::Cutting)
                && self.at_boundary()
                && let Some(last) = self.cut()
            {
                return Poll::Ready(Some(Ok(Frame::data(last))));
            }
            match &mut self.state {
                State::Ended => return Poll::Ready(None),
                State::Splicing(splicing) => {
                    let encoding = splicing.encoding;
                    let bytes = match ready!(splicing.poll_next(cx)) {
                        Next::Page(page) if !self.has_room(&page) => {
                            self.state = State::Ended;
                            self.session.server.metrics.expired.inc();
                            watch::expired(encoding, "more waits for the client than may").into()
                        }
                        Next::Page(page) => {
                            self.went_back |= !page.is_empty() && !self.kept.takes_bookmarks();
                            self.rename_all(page, encoding)
                        }
                        Next::Done(spliced) => self.resume(spliced).unwrap_or_default(),
                    };
                    if !bytes.is_empty() {
                        return Poll::Ready(Some(Ok(Frame::data(bytes))));
                    }
                }
                State::Passing | State::Cutting => {
                    match ready!(Pin::new(&mut self.upstream).poll_frame(cx)) {
                        Some(Ok(frame)) => {
                            if let Some(frame) = self.pass(frame) {
                                return Poll::Ready(Some(frame));
                            }
                        }
                        last => {
                            let expired = self.expire().map(|last| Ok(Frame::data(last)));
                            return Poll::Ready(expired.or(last));
                        }
                    }
                }
            }
        }
    }

    /// Whether a page may wait for the client to read it.
    fn has_room(&self, page: &Bytes) -> bool {
        self.session.counted.unread.backlog().has_room(page.len())
    }

    /// Notices shutdown and changes of the policy, and makes sure to be woken at the next.
    ///
    /// The alarm is asked each time: one that was set while the last change was still being told is woken for that one
    /// alone, and asking sets it anew.
    fn look_up(&mut self, cx: &mut Context<'_>) {
        loop {
            let changed = self.session.policy.has_changed_since(self.in_force.policy());
            let draining = self.session.server.drain.has_started();
            if matches!(self.state, State::Passing) && (draining || changed && self.concerns_us()) {
                self.state = State::Cutting;
            }
            if draining {
                self.alarm = None;
                return;
            }
            let Session { policy, server, .. } = &*self.session;
            let alarm =
                self.alarm.get_or_insert_with(|| PollOnWake::new(policy.alarm(&server.drain)));
            if Pin::new(alarm).poll(cx).is_pending() {
                return;
            }
            self.alarm = None;
        }
    }

    /// Whether the new policy means another watch; if not, it is in force from here on.
    fn concerns_us(&mut self) -> bool {
        let now = self.session.policy.read(self.in_force.of());
        let same = self.kept.means_the_same(self.in_force.policy(), now.policy());
        if same {
            self.reads(now);
        }
        !same
    }

    /// Goes on under another policy; gives the one before.
    fn reads(&mut self, now: Reading) -> Reading {
        if let Ok(info) = self.kept.info() {
            self.session.policy.answered(&now, &info);
        }
        std::mem::replace(&mut self.in_force, now)
    }

    fn at_boundary(&self) -> bool {
        // Compressed frames have no end that we see, and renamed ones pass only whole.
        self.rename.is_some() || self.frames.as_ref().is_none_or(|(_, frames)| frames.at_boundary())
    }

    /// What ends the watch of a client that would go on from an older version than it knows. It lists instead.
    fn expire(&mut self) -> Option<Bytes> {
        let (encoding, frames) = self.frames.as_ref()?;
        if !self.went_back || !frames.at_boundary() {
            return None;
        }
        let last = watch::expired(*encoding, "the last events are older than what you know");
        self.upstream = Relay::Empty;
        self.state = State::Ended;
        self.session.server.metrics.expired.inc();
        Some(last.into())
    }

    /// Ends the old watch, and begins to read what leads over to the new one; or ends with what is returned.
    fn cut(&mut self) -> Option<Bytes> {
        if self.session.server.drain.has_started() {
            let last = self.expire();
            self.upstream = Relay::Empty;
            self.state = State::Ended;
            return last;
        }
        self.upstream = Relay::Empty;
        self.state = State::Ended;
        let (encoding, mut frames) = self.frames.take()?;
        let now = self.session.policy.read(self.in_force.of());
        let new = now.policy().clone();
        let before = self.reads(now);
        let over = Over { at: frames.at(), old: vec![before.policy().clone()], new, begun: None };
        self.lead_over(encoding, over, Some(before));
        None
    }

    /// Goes on with the new watch, or ends with what is returned.
    fn resume(&mut self, spliced: Spliced) -> Option<Bytes> {
        let metrics = self.session.server.metrics.clone();
        match spliced {
            Spliced::Joined { target, response } => {
                metrics.spliced.inc();
                let info = RequestInfo::parse("GET", target.as_str()).ok();
                self.frames = info.and_then(|info| frames(&info, response.headers()));
                self.upstream = response.into_body();
                self.state = State::Passing;
                self.rename.iter_mut().for_each(Renaming::begin);
                None
            }
            Spliced::Expired(error) => {
                metrics.expired.inc();
                self.state = State::Ended;
                Some(error)
            }
        }
    }

    /// The frames of a splice, with their lock renamed.
    fn rename_all(&mut self, bytes: Bytes, encoding: Encoding) -> Bytes {
        let Some(renaming) = &mut self.rename else { return bytes };
        renaming.whole(&bytes, encoding).unwrap_or_else(|_broken| {
            self.state = State::Ended;
            watch::expired(encoding, "the leader-election lock cannot be renamed").into()
        })
    }

    /// What of a piece of the old watch goes to the client.
    fn pass(&mut self, frame: Frame<Bytes>) -> Option<Result<Frame<Bytes>, BodyError>> {
        let mut data = match frame.into_data() {
            Ok(data) => data,
            Err(trailers) => return Some(Ok(trailers)),
        };
        let Some((encoding, frames)) = &mut self.frames else { return Some(Ok(Frame::data(data))) };
        if let Some(renaming) = &mut self.rename {
            data = match renaming.pass(&data, *encoding, frames) {
                Ok(data) => data,
                Err(error) => return Some(Err(error)),
            };
            self.went_back &= data.is_empty();
            return (!data.is_empty()).then_some(Ok(Frame::data(data)));
        }
        let fed = match frames.feed(&data) {
            Ok(fed) => fed,
            Err(error) => {
                debug!(error = &error as &dyn std::error::Error, "watch is not made of frames");
                return Some(Err(BodyError::GivenUp));
            }
        };
        self.went_back &= fed.is_none();
        if matches!(self.state, State::Cutting)
            && let Some(end) = fed
        {
            // The rest belongs to a frame of the watch that ends here. That was a new event: nothing is older.
            data.truncate(end);
            self.cut();
        }
        Some(Ok(Frame::data(data)))
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("kept", &self.kept).finish_non_exhaustive()
    }
}

// === impl Splicing ===

impl Splicing {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Next> {
        loop {
            // The last page may still be there when all is done.
            if let Poll::Ready(Some(page)) = self.pages.poll_recv(cx) {
                return Poll::Ready(Next::Page(page));
            }
            if let Some(done) = self.done.take() {
                return Poll::Ready(Next::Done(done));
            }
            match self.reads.as_mut().poll(cx) {
                Poll::Ready(done) => self.done = Some(done),
                // It may have sent a page before it went to wait.
                Poll::Pending => {
                    let page = ready!(self.pages.poll_recv(cx));
                    return page.map_or(Poll::Pending, |page| Poll::Ready(Next::Page(page)));
                }
            }
        }
    }
}

/// How to read the frames of a watch, if they can be read.
fn frames(info: &RequestInfo<'_>, headers: &HeaderMap) -> Option<(Encoding, Frames)> {
    if headers.contains_key(http::header::CONTENT_ENCODING) {
        return None;
    }
    let kind = headers.get(http::header::CONTENT_TYPE)?.to_str().ok()?;
    let encoding = Encoding::of(kind)?;
    Some((encoding, Frames::new(encoding, info)))
}

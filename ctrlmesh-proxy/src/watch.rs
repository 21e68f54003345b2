//! An open watch, which follows changes of the policy.
//!
//! While the policy stays, bytes pass as they come. When the policy changes, the watch is cut at the end of a frame.
//! The proxy reads which objects join and leave, as of the version that the client last saw, and continues with the new
//! selector. Where that is impossible the watch ends with 410, and the client lists again. At shutdown the watch ends
//! at the end of a frame.

pub(crate) mod splice;
pub(crate) mod upgraded;
mod lock_rename;
mod page_permit;
mod splice_in_progress;

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
use tracing::debug;

use crate::metrics::{Open, ResourceRequests};
use crate::net::body::{BodyError, Relay};
use crate::policy::{InForce, Reading};
use crate::session::Session;
use crate::traffic::{self, Kind, OpenWatch};
use crate::watch::lock_rename::LockRenamer;
use crate::watch::splice::{RequestTemplate, SpliceOutcome, Transition};
use crate::watch::splice_in_progress::{SpliceEvent, SpliceInProgress};

/// A watch that a client requested.
#[derive(Debug)]
pub(crate) struct WatchRequest {
    pub(crate) template: RequestTemplate,
    /// The policy in force when the client sent the request.
    pub(crate) in_force: Reading,
    /// Earlier policies under which the client may have read the version that it continues from.
    pub(crate) suspects: Vec<Arc<InForce>>,
}

/// The response body of a watch.
pub(crate) struct Watch {
    session: Rc<Session>,
    template: Rc<RequestTemplate>,
    upstream: Relay,
    /// `None` where they are compressed, or of an unknown content type.
    frames: Option<(Encoding, Frames)>,
    rename: Option<LockRenamer>,
    /// The policy under which the client reads.
    in_force: Reading,
    /// Wakes this watch at the next change of the policy, and at shutdown.
    change_or_shutdown: Option<PollOnWake<Pin<Box<dyn Future<Output = ()>>>>>,
    /// Whether the last events that passed are older than what the client knows. A client that takes no bookmarks would
    /// continue from their version.
    went_back: bool,
    /// The group and the plural of what it shows, where it is counted which changes are followed by writes.
    counted: Option<Box<Kind>>,
    state: State,
    /// As metrics count its events.
    requests: Arc<ResourceRequests>,
    /// As metrics count it.
    _counted: Open,
    /// As the manager is told of it, where it shows more than one name.
    _open: Option<OpenWatch>,
}

/// The frames of the API server's answer cannot be read.
#[derive(Debug, Error)]
#[error("read the frames of the watch")]
pub(crate) struct UnreadableFrames(pub(crate) Rc<RequestTemplate>);

enum State {
    Passing,
    /// The policy changed; the watch is to be cut at the end of a frame.
    Cutting,
    /// The reads between the old watch and the new one are under way.
    SpliceInProgress(Box<SpliceInProgress>),
    Ended,
}

impl Watch {
    /// Passes on a watch that the API server granted. It is spliced first where its client may have read under another
    /// policy.
    ///
    /// # Errors
    /// The watch has to be spliced, or a lock renamed in it, and its frames cannot be read.
    pub(crate) fn new(
        session: Rc<Session>,
        watch: WatchRequest,
        response: Response<Relay>,
        rename: Option<Rename>,
    ) -> Result<Response<Box<Self>>, UnreadableFrames> {
        let WatchRequest { template, in_force, suspects } = watch;
        let info = template.info().ok();
        let counted = info.as_ref().and_then(|info| traffic::counted_changes(in_force.policy(), info));
        let frames = info.as_ref().and_then(|info| frames(info, response.headers()));
        // The name that the lock has on the server must not reach the client.
        if frames.is_none() && (rename.is_some() || !suspects.is_empty()) {
            return Err(UnreadableFrames(Rc::new(template)));
        }
        let (group, resource) = info.as_ref().map_or(("", ""), |info| (info.api_group(), info.resource()));
        let requests = session.requests.resource(group, resource);
        let open = info.and_then(|info| session.traffic.watched.begin(&info));
        let counted_open = session.server.metrics.watch();
        let (head, upstream) = response.into_parts();
        let mut this = Box::new(Self {
            session,
            template: Rc::new(template),
            upstream,
            frames,
            rename: rename.map(LockRenamer::new),
            in_force,
            change_or_shutdown: None,
            went_back: false,
            counted,
            state: State::Passing,
            requests,
            _counted: counted_open,
            _open: open,
        });
        if !suspects.is_empty() {
            this.begin_spliced(head.clone(), suspects)?;
        }
        Ok(Response::from_parts(head, this))
    }

    /// Splices a watch that has just begun.
    fn begin_spliced(&mut self, head: Parts, old: Vec<Arc<InForce>>) -> Result<(), UnreadableFrames> {
        let frames = self.frames.as_mut();
        let (encoding, frames) = frames.ok_or_else(|| UnreadableFrames(self.template.clone()))?;
        let (encoding, at) = (*encoding, frames.at());
        let upstream = std::mem::replace(&mut self.upstream, Relay::Empty);
        let begun = Some((self.template.target().clone(), Response::from_parts(head, upstream)));
        let new = self.in_force.policy().clone();
        self.splice(encoding, Transition { at, old, new, begun }, None);
        Ok(())
    }

    fn splice(&mut self, encoding: Encoding, over: Transition, reading: Option<Reading>) {
        let (session, template) = (self.session.clone(), self.template.clone());
        let splice = SpliceInProgress::begin(session, template, encoding, over, reading);
        self.state = State::SpliceInProgress(Box::new(splice));
    }

    pub(crate) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        loop {
            self.check_policy(cx);
            if matches!(self.state, State::Cutting)
                && self.at_boundary()
                && let Some(last) = self.cut()
            {
                return Poll::Ready(Some(Ok(Frame::data(last))));
            }
            match &mut self.state {
                State::Ended => return Poll::Ready(None),
                State::SpliceInProgress(splicing) => {
                    let encoding = splicing.encoding();
                    let bytes = match ready!(splicing.poll_next(cx)) {
                        SpliceEvent::Page(page) if !self.has_room(&page) => {
                            self.state = State::Ended;
                            self.session.server.metrics.expired.inc();
                            watch::expired(encoding, "more waits for the client than may").into()
                        }
                        SpliceEvent::Page(page) => {
                            self.went_back |= !page.is_empty() && !self.template.takes_bookmarks();
                            self.rename_all(page, encoding)
                        }
                        SpliceEvent::Done(spliced) => self.resume(spliced).unwrap_or_default(),
                    };
                    if !bytes.is_empty() {
                        return Poll::Ready(Some(Ok(Frame::data(bytes))));
                    }
                }
                State::Passing | State::Cutting => match ready!(Pin::new(&mut self.upstream).poll_frame(cx)) {
                    Some(Ok(frame)) => {
                        if let Some(frame) = self.pass(frame) {
                            return Poll::Ready(Some(frame));
                        }
                    }
                    last => {
                        let expired = self.expire().map(|last| Ok(Frame::data(last)));
                        return Poll::Ready(expired.or(last));
                    }
                },
            }
        }
    }

    /// Whether the memory budget lets a page wait for the client.
    fn has_room(&self, page: &Bytes) -> bool {
        self.session.resources.unread.budget().has_room(page.len())
    }

    /// Notices shutdown and changes of the policy, and registers for the next.
    ///
    /// The future is polled each time: one that was registered while a change was being published is woken for that
    /// change only, and polling registers it anew.
    fn check_policy(&mut self, cx: &mut Context<'_>) {
        loop {
            let changed = self.session.policy.has_changed_since(self.in_force.policy());
            let draining = self.session.server.drain.has_started();
            if matches!(self.state, State::Passing) && (draining || changed && self.needs_splice()) {
                self.state = State::Cutting;
            }
            if draining {
                self.change_or_shutdown = None;
                return;
            }
            let Session { policy, server, .. } = &*self.session;
            let change = self
                .change_or_shutdown
                .get_or_insert_with(|| PollOnWake::new(policy.change_or_shutdown(&server.drain)));
            if Pin::new(change).poll(cx).is_pending() {
                return;
            }
            self.change_or_shutdown = None;
        }
    }

    /// Whether the new policy means another watch. If not, the watch continues under it.
    fn needs_splice(&mut self) -> bool {
        let now = self.session.policy.read(self.in_force.of());
        let same = self.template.means_the_same(self.in_force.policy(), now.policy());
        if same {
            self.replace_policy(now);
        }
        !same
    }

    /// Continues under another policy, and returns the one before.
    fn replace_policy(&mut self, now: Reading) -> Reading {
        if let Ok(info) = self.template.info() {
            self.session.policy.answered(&now, &info);
            self.counted = traffic::counted_changes(now.policy(), &info);
        }
        std::mem::replace(&mut self.in_force, now)
    }

    fn at_boundary(&self) -> bool {
        // The proxy cannot see the ends of compressed frames, and passes renamed ones only whole.
        self.rename.is_some() || self.frames.as_ref().is_none_or(|(_, frames)| frames.at_boundary())
    }

    /// The 410 for a client that would continue from an older version than it knows.
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

    /// Ends the old watch and begins the splice; or ends with the frame that it returns.
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
        self.session.traffic.changes.forget();
        let now = self.session.policy.read(self.in_force.of());
        let new = now.policy().clone();
        let before = self.replace_policy(now);
        let over = Transition { at: frames.at(), old: vec![before.policy().clone()], new, begun: None };
        self.splice(encoding, over, Some(before));
        None
    }

    /// Continues with the new watch, or ends with the frame that it returns.
    fn resume(&mut self, spliced: SpliceOutcome) -> Option<Bytes> {
        let metrics = self.session.server.metrics.clone();
        match spliced {
            SpliceOutcome::Joined { target, response } => {
                metrics.spliced.inc();
                let info = self.template.read(&target).ok();
                self.frames = info.and_then(|info| frames(&info, response.headers()));
                self.upstream = response.into_body();
                self.state = State::Passing;
                self.rename.iter_mut().for_each(LockRenamer::reset);
                None
            }
            SpliceOutcome::Expired(error) => {
                metrics.expired.inc();
                self.state = State::Ended;
                Some(error)
            }
        }
    }

    /// Renames the lock in the frames of a splice.
    fn rename_all(&mut self, bytes: Bytes, encoding: Encoding) -> Bytes {
        let Some(renamer) = &mut self.rename else { return bytes };
        renamer.rename_whole(&bytes, encoding).unwrap_or_else(|_broken| {
            self.state = State::Ended;
            watch::expired(encoding, "the leader-election lock cannot be renamed").into()
        })
    }

    /// The part of an upstream frame that goes to the client.
    fn pass(&mut self, frame: Frame<Bytes>) -> Option<Result<Frame<Bytes>, BodyError>> {
        let mut data = match frame.into_data() {
            Ok(data) => data,
            Err(trailers) => return Some(Ok(trailers)),
        };
        let Some((encoding, frames)) = &mut self.frames else { return Some(Ok(Frame::data(data))) };
        let (changes, counted) = (&self.session.traffic.changes, self.counted.as_deref());
        let encoding = *encoding;
        let on_live = |frame: &[u8]| {
            self.requests.watch_event();
            if let Some(kind) = counted {
                changes.shown_in(frame, encoding, kind);
            }
        };
        if let Some(renamer) = &mut self.rename {
            data = match renamer.rename_completed(&data, encoding, frames, on_live) {
                Ok(data) => data,
                Err(error) => return Some(Err(error)),
            };
            self.went_back &= data.is_empty();
            return (!data.is_empty()).then_some(Ok(Frame::data(data)));
        }
        let fed = match frames.feed_each(&data, on_live) {
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
            // The rest belongs to a frame that is cut off. The last whole frame was a new event, so nothing went back.
            data.truncate(end);
            self.cut();
        }
        Some(Ok(Frame::data(data)))
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("template", &self.template).finish_non_exhaustive()
    }
}

/// `None` where the frames of a watch cannot be read.
fn frames(info: &RequestInfo<'_>, headers: &HeaderMap) -> Option<(Encoding, Frames)> {
    if headers.contains_key(http::header::CONTENT_ENCODING) {
        return None;
    }
    let kind = headers.get(http::header::CONTENT_TYPE)?.to_str().ok()?;
    let encoding = Encoding::of(kind)?;
    Some((encoding, Frames::new(encoding, info)))
}

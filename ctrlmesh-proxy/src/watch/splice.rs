//! Which reads lead an open watch from one selector to another?

use std::fmt;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::selector::Selector;
use ctrlmesh_request::decide;
use ctrlmesh_request::decide::{Decision, LockPlan, Plan};
use ctrlmesh_request::request::{RequestInfo, TargetError};
use ctrlmesh_request::rewrite::Encoding;
use ctrlmesh_request::rewrite::watch;
use ctrlmesh_request::rewrite::watch::{Ask, Expired, Splice};
use http::header::HeaderName;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use thiserror::Error;
use tokio::sync::mpsc;
use tokio::time;
use tracing::debug;

use crate::net::body::Relay;
use crate::net::memory_budget::{Backlog, Waiting};
use crate::policy::{InForce, Reading};
use crate::session::Session;
use crate::upstream::SendError;
use crate::watch::page_permit::{MAX_PAGE_BYTES, Turn};

/// How to ask for a list of which only the version matters.
const METADATA_ONLY: &str =
    "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";

/// What a client says of its own request that is not said of ours: it has no body and becomes nothing else, and its
/// answer is looked at.
const NOT_OURS: [HeaderName; 7] = [
    header::ACCEPT_ENCODING,
    header::CONTENT_LENGTH,
    header::CONTENT_TYPE,
    header::CONTENT_ENCODING,
    header::EXPECT,
    header::CONNECTION,
    header::UPGRADE,
];

/// What of a watch request is needed to ask for the like again.
#[derive(Clone)]
pub(crate) struct Kept {
    /// Scheme and authority as they came.
    uri: Uri,
    /// The client's own target: its selector, not ours.
    target: PathAndQuery,
    headers: HeaderMap,
    /// Counts it for as long as the watch lives.
    counted: Option<Arc<Waiting>>,
}

/// From where to where a watch is led over.
pub(crate) struct Over {
    /// The version up to which the client has seen everything.
    pub(crate) at: Option<u64>,
    /// The policy under which it saw that, or those of which one may be that policy.
    pub(crate) old: Vec<Arc<InForce>>,
    /// The policy that is in force.
    pub(crate) new: Arc<InForce>,
    /// The watch that goes on from that version, where it was begun already.
    pub(crate) begun: Option<(PathAndQuery, Response<Relay>)>,
}

/// How a splice ended.
pub(crate) enum Spliced {
    /// The watch goes on.
    Joined {
        /// What was asked for.
        target: PathAndQuery,
        /// The new watch.
        response: Response<Relay>,
    },
    /// The watch ends with this frame.
    Expired(Bytes),
}

/// Why a watch cannot go on.
#[derive(Debug, Error)]
pub(crate) enum SpliceError {
    #[error("read the watch's own request")]
    Request(#[source] TargetError),
    #[error("lead over to a new selector")]
    Expired(#[source] Expired),
    #[error("lead over from a version that is not known")]
    NoVersion,
    #[error("ask the API server")]
    Upstream(#[source] SendError),
    #[error("ask the API server in time")]
    Timeout,
    #[error("send what was read")]
    Gone,
    #[error("read a list of at most {MAX_PAGE_BYTES} bytes")]
    List,
    #[error("ask for what no request can name")]
    Target,
    #[error("lead over to another name of the leader-election lock")]
    Lock,
    #[error("lead a table over, or what is shown in a way that is not known here")]
    Table,
    #[error("begin a watch, which was answered by {status}")]
    Watch { status: StatusCode },
}

// === impl Kept ===

impl Kept {
    /// Keeps what is needed of a watch request.
    pub(crate) fn of(request: &Request<Relay>, target: PathAndQuery) -> Self {
        let headers = request.headers().clone();
        Self { uri: request.uri().clone(), target, headers, counted: None }
    }

    /// The same, counted as what waits; `None` where too much does already.
    pub(crate) fn counted(mut self, backlog: &Arc<Backlog>) -> Option<Self> {
        let headers = self.headers.iter();
        let headers = headers.map(|(name, value)| name.as_str().len() + value.len());
        let bytes = 2 * self.target.as_str().len() + headers.sum::<usize>();
        self.counted = Some(Arc::new(backlog.wait(bytes)?));
        Some(self)
    }

    /// What the client asked for.
    pub(crate) fn info(&self) -> Result<RequestInfo<'_>, TargetError> {
        RequestInfo::parse("GET", self.target.as_str())
    }

    /// Its target.
    pub(crate) fn target(&self) -> &PathAndQuery {
        &self.target
    }

    /// Whether the client takes events that hold nothing but a version.
    pub(crate) fn takes_bookmarks(&self) -> bool {
        self.info().is_ok_and(|info| info.query().is_set("allowWatchBookmarks"))
    }

    /// Whether two policies mean the same watch.
    pub(crate) fn means_the_same(&self, one: &Policy, other: &Policy) -> bool {
        self.info().is_ok_and(|info| {
            selector(one, &info) == selector(other, &info) && same_lock(one, other, &info)
        })
    }

    /// How to ask for a list of what the watch is of.
    fn list_accept(&self, encoding: Encoding) -> Result<HeaderValue, SpliceError> {
        let client = self.headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
        let accept = watch::list_accept(encoding, client.unwrap_or_default());
        let accept = accept.ok_or(SpliceError::Table)?;
        HeaderValue::try_from(accept).map_err(|_unfit| SpliceError::Target)
    }

    /// A request for `target` in the client's name.
    fn request(&self, target: PathAndQuery) -> Result<Request<Relay>, SpliceError> {
        let mut parts = self.uri.clone().into_parts();
        parts.path_and_query = Some(target);
        let mut request = Request::new(Relay::Empty);
        *request.method_mut() = Method::GET;
        *request.uri_mut() = Uri::from_parts(parts).map_err(|_unfit| SpliceError::Target)?;
        *request.headers_mut() = self.headers.clone();
        for name in NOT_OURS {
            request.headers_mut().remove(name);
        }
        Ok(request)
    }
}

impl fmt::Debug for Kept {
    /// Headers hold the client's credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kept").field("target", &self.target).finish_non_exhaustive()
    }
}

/// Leads a watch over; what the client gets is sent into `pages` as it is read, one page at a time. Where one of several policies may be the one under which the client read, all of them are led
/// over from: what it has already is sent again, as it is, and what it never had is deleted, which means nothing to it.
pub(crate) async fn run(
    session: Rc<Session>,
    kept: Rc<Kept>,
    encoding: Encoding,
    over: Over,
    reading: Option<Reading>,
    pages: mpsc::Sender<Bytes>,
) -> Spliced {
    let done = Box::pin(reads(&session, &kept, encoding, over, &pages)).await;
    drop(reading);
    Box::pin(clear(&session, &kept)).await;
    done.unwrap_or_else(|error| {
        debug!(error = &error as &dyn std::error::Error, "watch expires");
        Spliced::Expired(watch::expired(encoding, "the proxy's policy changed").into())
    })
}

async fn reads(
    session: &Session,
    kept: &Kept,
    encoding: Encoding,
    over: Over,
    pages: &mpsc::Sender<Bytes>,
) -> Result<Spliced, SpliceError> {
    let info = kept.info().map_err(SpliceError::Request)?;
    let at = over.at.ok_or(SpliceError::NoVersion)?;
    let accept = kept.list_accept(encoding)?;
    let plan = Plan {
        selector: selector(&over.new, &info),
        lock: lock(&over.new, &info),
        ..Plan::default()
    };
    let mut next = None;
    for old in &over.old {
        if !same_lock(old, &over.new, &info) {
            return Err(SpliceError::Lock);
        }
        let old = selector(old, &info);
        let splice = Splice::new(&info, &plan, encoding, at, old.as_ref());
        let mut splice = splice.map_err(SpliceError::Expired)?;
        next = Some(loop {
            let target = match splice.ask() {
                Ask::List(target) => target,
                Ask::Watch(target) => break target,
            };
            let mut request = kept.request(path(&target)?)?;
            request.headers_mut().insert(header::ACCEPT, accept.clone());
            // The page before was taken: as long as one is not, nobody asks how this goes on, and it has no turn. Who does
            // not take it is gone, and so is this.
            let place = pages.reserve().await.map_err(|_gone| SpliceError::Gone)?;
            let mut turn = Turn::come().await;
            let (status, kind, body) = list(session, request, &mut turn).await?;
            let page =
                splice.answer(status.as_u16(), &kind, &body).map_err(SpliceError::Expired)?;
            drop((body, turn));
            place.send(page.into());
        });
    }
    let (target, response) = match over.begun {
        Some(begun) => begun,
        None => begin(session, kept, &next.ok_or(SpliceError::Target)?).await?,
    };
    Ok(Spliced::Joined { target, response })
}

/// Begins the watch that goes on.
async fn begin(
    session: &Session,
    kept: &Kept,
    target: &str,
) -> Result<(PathAndQuery, Response<Relay>), SpliceError> {
    let target = path(target)?;
    let request = kept.request(target.clone())?;
    let response = in_time(session, async {
        session.upstream.send(request, |_| {}).await.map_err(SpliceError::Upstream)
    });
    let response = response.await?;
    match response.status() {
        StatusCode::OK => Ok((target, response)),
        status => Err(SpliceError::Watch { status }),
    }
}

/// Asks for a version that is newer than whatever was read under policies that nobody reads under any more.
pub(crate) async fn clear(session: &Session, kept: &Kept) {
    let Ok(info) = kept.info() else { return };
    let unread = session.policy.unread(&session.policy.current(), &info);
    if unread.is_empty() {
        return;
    }
    match Box::pin(version(session, kept, &info)).await {
        Ok(version) => {
            session.policy.was_read_until(&unread, &info, version);
        }
        Err(_unknown) => debug!("the API server does not say of which version it is"),
    }
}

/// The version that a collection has now.
pub(crate) async fn version(
    session: &Session,
    kept: &Kept,
    info: &RequestInfo<'_>,
) -> Result<u64, SpliceError> {
    let now = session.policy.current();
    let target = watch::newest(info, selector(&now, info).as_ref()).ok_or(SpliceError::Target)?;
    let mut request = kept.request(path(&target)?)?;
    request.headers_mut().insert(header::ACCEPT, HeaderValue::from_static(METADATA_ONLY));
    let (_, kind, body) = list(session, request, &mut Turn::of_one()).await?;
    let encoding = Encoding::of(&kind).ok_or(SpliceError::List)?;
    watch::list_version(&body, encoding).ok_or(SpliceError::List)
}

/// Status, content type and body of a list.
async fn list(
    session: &Session,
    request: Request<Relay>,
    turn: &mut Turn,
) -> Result<(StatusCode, String, Bytes), SpliceError> {
    in_time(session, read_list(session, request, turn)).await
}

async fn read_list(
    session: &Session,
    request: Request<Relay>,
    turn: &mut Turn,
) -> Result<(StatusCode, String, Bytes), SpliceError> {
    let response = session.upstream.send(request, |_| {}).await.map_err(SpliceError::Upstream)?;
    let (head, body) = response.into_parts();
    let kind = head
        .headers
        .get(header::CONTENT_TYPE)
        .and_then(|kind| kind.to_str().ok())
        .unwrap_or_default();
    let body = turn.read(body).await.map_err(|_no_page| SpliceError::List)?;
    Ok((head.status, kind.to_owned(), body))
}

/// What the API server gives, if it does so in time.
async fn in_time<T>(
    session: &Session,
    asked: impl Future<Output = Result<T, SpliceError>>,
) -> Result<T, SpliceError> {
    let answered = time::timeout(session.server.response_timeout, asked).await;
    answered.unwrap_or(Err(SpliceError::Timeout))
}

fn path(target: &str) -> Result<PathAndQuery, SpliceError> {
    target.parse().map_err(|_unfit| SpliceError::Target)
}

/// What limits the objects that a watch is of.
///
/// Not by way of a decision: that would refuse an old version, which is just what is led over here.
fn selector(policy: &Policy, info: &RequestInfo<'_>) -> Option<Selector> {
    policy.selector_for(info.api_group(), info.resource())
}

/// Whether two policies mean the same lock for what a watch is of.
fn same_lock(one: &Policy, other: &Policy, info: &RequestInfo<'_>) -> bool {
    lock(one, info) == lock(other, info)
}

/// What is renamed for a watch: the decision without the limits, which have no say in it.
fn lock(policy: &Policy, info: &RequestInfo<'_>) -> Option<LockPlan> {
    policy.lock.as_ref()?;
    let alone = Policy { limits: Vec::new(), ..policy.clone() };
    match decide::decide(&alone, info) {
        Decision::Rewrite(plan) => plan.lock,
        Decision::Pass | Decision::Refuse(_) => None,
    }
}

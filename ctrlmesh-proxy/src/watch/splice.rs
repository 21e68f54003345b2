//! Reads the pages that carry an open watch from one selector to another.

use std::fmt;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::selector::Selector;
use ctrlmesh_request::decide;
use ctrlmesh_request::decide::{Decision, LockPlan, Plan};
use ctrlmesh_request::request::{Member, RequestInfo, TargetError};
use ctrlmesh_request::rewrite::Encoding;
use ctrlmesh_request::rewrite::watch;
use ctrlmesh_request::rewrite::watch::{Expired, NextRead, Splice};
use http::header::HeaderName;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use thiserror::Error;
use tokio::sync::mpsc;
use tokio::time;
use tracing::debug;

use crate::net::body::Relay;
use crate::net::memory_budget::{MemoryBudget, Reservation};
use crate::policy::{InForce, Reading};
use crate::session::Session;
use crate::upstream::SendError;
use crate::upstream::UsedConnection;
use crate::watch::page_permit::{MAX_PAGE_BYTES, PagePermit};

/// The `Accept` of a list of which only the version matters.
const METADATA_ONLY: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";

/// Headers of the client's request that the proxy's own requests leave out: those have no body and no upgrade, and the
/// proxy reads their answers.
const OMITTED_HEADERS: [HeaderName; 7] = [
    header::ACCEPT_ENCODING,
    header::CONTENT_LENGTH,
    header::CONTENT_TYPE,
    header::CONTENT_ENCODING,
    header::EXPECT,
    header::CONNECTION,
    header::UPGRADE,
];

/// A client's watch request, from which the proxy makes further requests in the client's name.
#[derive(Clone)]
pub(crate) struct RequestTemplate {
    /// For scheme and authority.
    uri: Uri,
    /// With the client's own selector.
    target: PathAndQuery,
    /// The member cluster to which it leads.
    member: Option<Box<Member>>,
    headers: HeaderMap,
    /// The memory of this template, while the watch lives.
    reservation: Option<Arc<Reservation>>,
}

/// A watch's step from earlier policies to the one in force.
pub(crate) struct Transition {
    /// The version up to which the client has seen everything, if known.
    pub(crate) at: Option<u64>,
    /// The policy under which the client saw that; several where it may be any of them.
    pub(crate) old: Vec<Arc<InForce>>,
    /// The policy in force.
    pub(crate) new: Arc<InForce>,
    /// The watch from that version, where it has begun already.
    pub(crate) begun: Option<(PathAndQuery, Response<Relay>)>,
}

pub(crate) enum SpliceOutcome {
    /// The watch continues with `response`, the answer to `target`.
    Joined { target: PathAndQuery, response: Response<Relay> },
    /// The watch ends with this frame.
    Expired(Bytes),
}

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

impl RequestTemplate {
    /// `info` is what the target says.
    pub(crate) fn new(request: &Request<Relay>, target: PathAndQuery, info: &RequestInfo<'_>) -> Self {
        let (headers, member) = (request.headers().clone(), info.member().cloned().map(Box::new));
        Self { uri: request.uri().clone(), target, member, headers, reservation: None }
    }

    /// Takes the template's memory from `budget`; `None` where that is used up.
    pub(crate) fn reserved(mut self, budget: &Arc<MemoryBudget>) -> Option<Self> {
        let headers = self.headers.iter();
        let headers = headers.map(|(name, value)| name.as_str().len() + value.len());
        let bytes = 2 * self.target.as_str().len() + headers.sum::<usize>();
        self.reservation = Some(Arc::new(budget.reserve(bytes)?));
        Some(self)
    }

    pub(crate) fn info(&self) -> Result<RequestInfo<'_>, TargetError> {
        self.read(&self.target)
    }

    /// Another target, at the same server.
    pub(crate) fn read<'t>(&self, target: &'t PathAndQuery) -> Result<RequestInfo<'t>, TargetError> {
        RequestInfo::parse("GET", target.as_str())?.at(self.member.as_deref())
    }

    pub(crate) fn target(&self) -> &PathAndQuery {
        &self.target
    }

    pub(crate) fn takes_bookmarks(&self) -> bool {
        self.info().is_ok_and(|info| info.query().is_set("allowWatchBookmarks"))
    }

    /// Whether both policies rewrite this watch in the same way.
    pub(crate) fn means_the_same(&self, one: &Policy, other: &Policy) -> bool {
        self.info().is_ok_and(|info| selector(one, &info) == selector(other, &info) && same_lock(one, other, &info))
    }

    /// The `Accept` of a list of the watched resource.
    fn list_accept(&self, encoding: Encoding) -> Result<HeaderValue, SpliceError> {
        let client = self.headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
        let accept = watch::list_accept(encoding, client.unwrap_or_default());
        let accept = accept.ok_or(SpliceError::Table)?;
        HeaderValue::try_from(accept).map_err(|_unfit| SpliceError::Target)
    }

    /// A request of the proxy's own, without a body.
    pub(crate) fn request(&self, target: PathAndQuery) -> Result<Request<Relay>, SpliceError> {
        let mut parts = self.uri.clone().into_parts();
        parts.path_and_query = Some(target);
        let mut request = Request::new(Relay::Empty);
        *request.method_mut() = Method::GET;
        *request.uri_mut() = Uri::from_parts(parts).map_err(|_unfit| SpliceError::Target)?;
        *request.headers_mut() = self.headers.clone();
        for name in OMITTED_HEADERS {
            request.headers_mut().remove(name);
        }
        Ok(request)
    }
}

impl fmt::Debug for RequestTemplate {
    /// Without the headers, which hold the client's credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestTemplate").field("target", &self.target).finish_non_exhaustive()
    }
}

/// Carries a watch over to the new policy, and sends the client's frames into `pages` as they are read.
///
/// Where the client may have read under any of several policies, the splice starts from all of them. The client gets
/// objects again that it has, and deletions of objects that it never had; both are harmless.
pub(crate) async fn run(
    session: Rc<Session>,
    template: Rc<RequestTemplate>,
    encoding: Encoding,
    over: Transition,
    reading: Option<Reading>,
    pages: mpsc::Sender<Bytes>,
) -> SpliceOutcome {
    let outcome = Box::pin(read_pages(&session, &template, encoding, over, &pages)).await;
    drop(reading);
    Box::pin(clear(&session, &template)).await;
    outcome.unwrap_or_else(|error| {
        debug!(error = &error as &dyn std::error::Error, "watch expires");
        SpliceOutcome::Expired(watch::expired(encoding, "the proxy's policy changed").into())
    })
}

async fn read_pages(
    session: &Session,
    template: &RequestTemplate,
    encoding: Encoding,
    over: Transition,
    pages: &mpsc::Sender<Bytes>,
) -> Result<SpliceOutcome, SpliceError> {
    let info = template.info().map_err(SpliceError::Request)?;
    let at = over.at.ok_or(SpliceError::NoVersion)?;
    let accept = template.list_accept(encoding)?;
    let plan = Plan { selector: selector(&over.new, &info), lock: lock(&over.new, &info), ..Plan::default() };
    let mut next = None;
    for old in &over.old {
        if !same_lock(old, &over.new, &info) {
            return Err(SpliceError::Lock);
        }
        let old = selector(old, &info);
        let splice = Splice::new(&info, &plan, encoding, at, old.as_ref());
        let mut splice = splice.map_err(SpliceError::Expired)?;
        next = Some(loop {
            let target = match splice.next_read() {
                NextRead::List(target) => target,
                NextRead::Watch(target) => break target,
            };
            let mut request = template.request(path(&target)?)?;
            request.headers_mut().insert(header::ACCEPT, accept.clone());
            // Waits until the client has taken the page before, so that a client that does not read holds no permit.
            let slot = pages.reserve().await.map_err(|_gone| SpliceError::Gone)?;
            let mut permit = PagePermit::acquire().await;
            let (status, kind, body) = list(session, request, &mut permit).await?;
            let page = splice.answer(status.as_u16(), &kind, &body).map_err(SpliceError::Expired)?;
            drop((body, permit));
            slot.send(page.into());
        });
    }
    let (target, response) = match over.begun {
        Some(begun) => begun,
        None => begin(session, template, &next.ok_or(SpliceError::Target)?).await?,
    };
    Ok(SpliceOutcome::Joined { target, response })
}

/// Begins the watch under the new policy.
async fn begin(
    session: &Session,
    template: &RequestTemplate,
    target: &str,
) -> Result<(PathAndQuery, Response<Relay>), SpliceError> {
    let target = path(target)?;
    let request = template.request(target.clone())?;
    let response = in_time(session, async {
        session.upstream.send(&UsedConnection::default(), request, |_| {}).await.map_err(SpliceError::Upstream)
    });
    let response = response.await?;
    match response.status() {
        StatusCode::OK => Ok((target, response)),
        status => Err(SpliceError::Watch { status }),
    }
}

/// Asks the API server for a version that is newer than everything read under policies without readers.
pub(crate) async fn clear(session: &Session, template: &RequestTemplate) {
    let Ok(info) = template.info() else { return };
    let unread = session.policy.unread(&session.policy.current(), &info);
    if unread.is_empty() {
        return;
    }
    match Box::pin(version(session, template, &info)).await {
        Ok(version) => {
            session.policy.was_read_until(&unread, &info, version);
        }
        Err(_unknown) => debug!("the API server does not tell its version"),
    }
}

/// The current version of a collection.
pub(crate) async fn version(
    session: &Session,
    template: &RequestTemplate,
    info: &RequestInfo<'_>,
) -> Result<u64, SpliceError> {
    let now = session.policy.current();
    let target = watch::newest(info, selector(&now, info).as_ref()).ok_or(SpliceError::Target)?;
    let mut request = template.request(path(&target)?)?;
    request.headers_mut().insert(header::ACCEPT, HeaderValue::from_static(METADATA_ONLY));
    let (_, kind, body) = list(session, request, &mut PagePermit::unlimited()).await?;
    let encoding = Encoding::of(&kind).ok_or(SpliceError::List)?;
    watch::list_version(&body, encoding).ok_or(SpliceError::List)
}

/// Status, content type and body of a list.
async fn list(
    session: &Session,
    request: Request<Relay>,
    permit: &mut PagePermit,
) -> Result<(StatusCode, String, Bytes), SpliceError> {
    in_time(session, read_list(session, request, permit)).await
}

async fn read_list(
    session: &Session,
    request: Request<Relay>,
    permit: &mut PagePermit,
) -> Result<(StatusCode, String, Bytes), SpliceError> {
    let response =
        session.upstream.send(&UsedConnection::default(), request, |_| {}).await.map_err(SpliceError::Upstream)?;
    let (head, body) = response.into_parts();
    let kind = head.headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let body = permit.read(body).await.map_err(|_no_page| SpliceError::List)?;
    Ok((head.status, kind.to_owned(), body))
}

/// Limits a request to the response timeout.
async fn in_time<T>(
    session: &Session,
    request: impl Future<Output = Result<T, SpliceError>>,
) -> Result<T, SpliceError> {
    let answered = time::timeout(session.server.response_timeout, request).await;
    answered.unwrap_or(Err(SpliceError::Timeout))
}

fn path(target: &str) -> Result<PathAndQuery, SpliceError> {
    target.parse().map_err(|_unfit| SpliceError::Target)
}

/// The selector that a policy adds to a watch.
///
/// Not by [`decide::decide`], which would refuse an old version: a splice starts from one.
fn selector(policy: &Policy, info: &RequestInfo<'_>) -> Option<Selector> {
    policy.selector_of(info.resource_key())
}

/// Whether both policies rename the same lock in a watch.
fn same_lock(one: &Policy, other: &Policy, info: &RequestInfo<'_>) -> bool {
    lock(one, info) == lock(other, info)
}

/// The lock that a policy renames in a watch. The decision is made without limits, which do not matter for it.
fn lock(policy: &Policy, info: &RequestInfo<'_>) -> Option<LockPlan> {
    policy.lock.as_ref()?;
    let without_limits = Policy { limits: Vec::new(), ..policy.clone() };
    match decide::decide(&without_limits, info) {
        Decision::Rewrite(plan) => plan.lock,
        Decision::Pass | Decision::Refuse(_) => None,
    }
}

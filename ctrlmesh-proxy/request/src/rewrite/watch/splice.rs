//! Continues a watch under another selector without a relist.
//!
//! Three reads use one version, the last that the client has seen. Objects that join are listed and sent as ADDED.
//! Objects that leave are listed and sent as DELETED. A watch of the new selector goes on from that version. So no
//! event is missed, repeated or out of order. Where that is impossible, the watch ends with 410, and the client lists
//! again.

use ctrlmesh_common::selector::Selector;

use super::difference;
use crate::decide::Plan;
use crate::request::{Query, RequestInfo};
use crate::rewrite::document::Encoding;
use crate::rewrite::list::{self, Change};
use crate::rewrite::selector::{escaped, narrowed};
use crate::rewrite::status::Status;

/// The objects of the first page, whose size is unknown, and of the smallest.
const MIN_PAGE_OBJECTS: usize = 100;

/// The objects of the largest page: as many as client-go asks for.
const MAX_PAGE_OBJECTS: usize = 500;

/// The page size to aim for, in bytes: a client that does not read makes the proxy keep a page.
const PAGE_BYTES: usize = 1 << 20;

/// Parameters of a watch that a list does not have, or that the proxy sets.
const NOT_IN_LIST: [&str; 8] = [
    "watch",
    "resourceVersion",
    "resourceVersionMatch",
    "allowWatchBookmarks",
    "sendInitialEvents",
    "timeoutSeconds",
    "limit",
    "continue",
];

/// The most pairs that are added to a query.
const ADDED_PAIRS: usize = 5;

/// Parameters of a watch that say where it begins.
const WATCH_START: [&str; 5] = ["resourceVersion", "resourceVersionMatch", "sendInitialEvents", "limit", "continue"];

/// The next request of a splice: its target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NextRead {
    /// The whole response goes to [`Splice::answer`].
    List(String),
    /// The response goes on where the client's watch was cut.
    Watch(String),
}

/// Why a watch cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Expired {
    #[error("a watch of one name cannot be limited anew")]
    Named,
    #[error("the new limit cannot be compared with the old one")]
    Incomparable,
    #[error("the query has no room for the new limit")]
    LongQuery,
    #[error("the API server answered {status} to a list at version {at}")]
    Refused { status: u16, at: u64 },
    /// The list is in another encoding, of another version, or no list.
    #[error("the API server's list cannot become events")]
    Unreadable,
}

/// A watch that is being moved to another selector.
#[derive(Clone, Debug)]
pub struct Splice {
    encoding: Encoding,
    at: u64,
    list_path: String,
    watch_path: String,
    query: Vec<u8>,
    selector: Option<Selector>,
    bookmarks: bool,
    /// The lists that are left, in reverse order.
    lists: Vec<(Selector, Change)>,
    /// The continue token of the current list.
    page: Option<String>,
    limit: usize,
}

/// The `Accept` parameters of client-go's metadata client.
const METADATA: &str = ";as=PartialObjectMetadata;g=meta.k8s.io;v=v1";

/// The `Accept` of a splice's lists, for a watch with `accept`. `None` where that asks for Tables, or for a form that
/// this proxy does not know.
pub fn list_accept(encoding: Encoding, accept: &str) -> Option<String> {
    let shown = |clause: &str| {
        let (_, parameters) = clause.split_once(';').unwrap_or_default();
        parameters.split(';').any(|parameter| {
            let (name, _) = parameter.split_once('=').unwrap_or((parameter, ""));
            name.trim().eq_ignore_ascii_case("as")
        })
    };
    let clauses: Vec<&str> = accept.split(',').map(str::trim).collect();
    // The API server takes the first that it can serve. It can serve metadata of every kind.
    let as_metadata = clauses.first().is_some_and(|first| shown(first));
    let known = clauses
        .iter()
        .filter(|clause| shown(clause))
        .all(|clause| as_metadata && clause.strip_suffix(METADATA).is_some_and(|kind| !kind.contains(';')));
    if !known {
        return None;
    }
    let kind = match encoding {
        Encoding::Json => "application/json",
        Encoding::Protobuf => "application/vnd.kubernetes.protobuf",
        Encoding::Cbor => "application/cbor",
    };
    let shown = if as_metadata { ";as=PartialObjectMetadataList;g=meta.k8s.io;v=v1" } else { "" };
    Some(format!("{kind}{shown}"))
}

/// The frame that ends a watch, so that the client lists again.
pub fn expired(encoding: Encoding, message: &str) -> Vec<u8> {
    let status = Status { code: 410, reason: "Expired", message: format!("ctrlmesh: {message}"), retry_after: None };
    list::error(encoding, &status)
}

/// The target of a list that tells the current version of a watch's collection. It is limited to one object, or to the
/// one that the watch names. `None` where the query would be too long for the server.
pub fn newest(request: &RequestInfo<'_>, selector: Option<&Selector>) -> Option<String> {
    if !request.query().has_room_for(ADDED_PAIRS) {
        return None;
    }
    let prefix = String::from_utf8_lossy(request.prefix());
    let mut path = without_watch(request, &String::from_utf8_lossy(request.raw_path()));
    let mut query = without(request.query().raw(), &NOT_IN_LIST);
    let mut rest = "limit=1".to_owned();
    if !request.name_in_path().is_empty() {
        path = without_watch(request, &without_name(request));
        query = without(&query, &["fieldSelector"]);
        // A client that may list only this object may list it so.
        let field = format!("metadata.name={}", field_value(request.name_in_path()));
        rest = format!("fieldSelector={}&limit=1", escaped(field.as_bytes()));
    }
    let query = selector.map_or_else(|| query.clone(), |selector| narrowed(&query, selector));
    Some(joined(&format!("{prefix}{path}"), &query, &rest))
}

/// The version of a list; nothing where it is another answer.
pub fn list_version(body: &[u8], encoding: Encoding) -> Option<u64> {
    let listed = list::events(body, encoding, Change::Joins).ok()?;
    // An answer without a kind of items is no list.
    listed.kind.map(|_list| listed.version)
}

impl Splice {
    /// Of the watch that `request` asked for, of which the client has seen everything up to `at`.
    ///
    /// `old` is the policy's selector that it had; `plan` is what the new policy says of it.
    ///
    /// # Errors
    /// Where it cannot go on.
    pub fn new(
        request: &RequestInfo<'_>,
        plan: &Plan,
        encoding: Encoding,
        at: u64,
        old: Option<&Selector>,
    ) -> Result<Self, Expired> {
        if !request.name_in_path().is_empty() {
            return Err(Expired::Named);
        }
        if !request.query().has_room_for(ADDED_PAIRS) {
            return Err(Expired::LongQuery);
        }
        let everything = Selector::everything();
        let new = plan.selector.as_ref().unwrap_or(&everything);
        let difference = difference(old.unwrap_or(&everything), new).ok_or(Expired::Incomparable)?;
        let leaves = difference.leaves.into_iter().map(|selector| (selector, Change::Leaves));
        let joins = difference.joins.into_iter().map(|selector| (selector, Change::Joins));
        // The lock is renamed here; the selector is put in for each request.
        let renamed = crate::rewrite::target(request, &Plan { lock: plan.lock.clone(), ..Plan::default() });
        let (path, query) = renamed.split_once('?').unwrap_or((&renamed, ""));
        let prefix = String::from_utf8_lossy(request.prefix());
        let behind = path.strip_prefix(&*prefix).unwrap_or(path);
        Ok(Self {
            encoding,
            at,
            list_path: format!("{prefix}{}", without_watch(request, behind)),
            watch_path: path.to_owned(),
            query: query.as_bytes().to_vec(),
            selector: plan.selector.clone(),
            bookmarks: request.query().is_set("allowWatchBookmarks"),
            lists: leaves.rev().chain(joins.rev()).collect(),
            page: None,
            limit: MIN_PAGE_OBJECTS,
        })
    }

    /// A list stays the same until it is answered.
    pub fn next_read(&self) -> NextRead {
        let Some((selector, _)) = self.lists.last() else {
            let query = without(&self.query, &WATCH_START);
            let query = self.selector.as_ref().map_or_else(|| query.clone(), |selector| narrowed(&query, selector));
            return NextRead::Watch(joined(&self.watch_path, &query, &format!("resourceVersion={}", self.at)));
        };
        let query = narrowed(&without(&self.query, &NOT_IN_LIST), selector);
        let limit = self.limit;
        let where_from = match &self.page {
            Some(token) => format!("limit={limit}&continue={}", escaped(token.as_bytes())),
            None => format!("limit={limit}&resourceVersion={}&resourceVersionMatch=Exact", self.at),
        };
        NextRead::List(joined(&self.list_path, &query, &where_from))
    }

    /// Takes the answer to a list; gives frames for the client.
    ///
    /// # Errors
    /// The watch cannot go on. Frames that were sent so far are right, and [`expired`] must follow them.
    pub fn answer(&mut self, status: u16, content_type: &str, body: &[u8]) -> Result<Vec<u8>, Expired> {
        if status != 200 {
            return Err(Expired::Refused { status, at: self.at });
        }
        let Some((_, change)) = self.lists.last() else { return Err(Expired::Unreadable) };
        if Encoding::of(content_type) != Some(self.encoding) {
            return Err(Expired::Unreadable);
        }
        let listed = list::events(body, self.encoding, *change).map_err(|_error| Expired::Unreadable)?;
        if listed.version != self.at {
            return Err(Expired::Unreadable);
        }
        let mut frames = listed.frames;
        if let Some(bytes) = body.len().checked_div(listed.items) {
            self.limit = (PAGE_BYTES / bytes.max(1)).clamp(MIN_PAGE_OBJECTS, MAX_PAGE_OBJECTS);
        }
        self.page = listed.next;
        if self.page.is_none() {
            self.lists.pop();
        }
        if self.lists.is_empty()
            && self.bookmarks
            && let Some(kind) = &listed.kind
        {
            frames.extend(list::bookmark(self.encoding, kind, self.at));
        }
        Ok(frames)
    }
}

/// The path of the list of which this is the watch.
fn without_watch(request: &RequestInfo<'_>, path: &str) -> String {
    if !request.is_verb_in_path() {
        return path.to_owned();
    }
    // The segment behind the version: `/api/v1/watch/…`, `/apis/group/v1/watch/…`.
    let at = if request.api_prefix() == "apis" { 4 } else { 3 };
    let segments = path.split('/').enumerate().filter(|(number, _)| *number != at);
    segments.map(|(_, segment)| segment).collect::<Vec<_>>().join("/")
}

/// The path as it came, up to the name.
fn without_name(request: &RequestInfo<'_>) -> String {
    let at = request.path()[..request.name_range().start].matches('/').count();
    let path = String::from_utf8_lossy(request.raw_path());
    path.split('/').take(at).collect::<Vec<_>>().join("/")
}

/// A text as the value of a field selector's term.
fn field_value(text: &str) -> String {
    let mut value = String::with_capacity(text.len());
    for letter in text.chars() {
        if matches!(letter, '\\' | ',' | '=') {
            value.push('\\');
        }
        value.push(letter);
    }
    value
}

fn without(query: &[u8], keys: &[&str]) -> Vec<u8> {
    let pairs = Query::new(query).pairs().filter(|pair| !keys.iter().any(|key| pair.is(key)));
    pairs.map(|pair| pair.raw).collect::<Vec<_>>().join(&b'&')
}

fn joined(path: &str, query: &[u8], rest: &str) -> String {
    let query = String::from_utf8_lossy(query);
    if query.is_empty() { format!("{path}?{rest}") } else { format!("{path}?{query}&{rest}") }
}

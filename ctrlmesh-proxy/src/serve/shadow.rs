//! Sends a shadow's writes as dry runs, and sees what becomes of the objects.
//!
//! A write changes of an object what differs between the dry run's answer and the object right behind it. 10 s later it
//! is known whether the object is so, because somebody else wrote the same. The proxy looks with the pod's own
//! credentials.

use std::collections::HashSet;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;
use std::{mem, slice};

use bytes::Bytes;
use ctrlmesh_common::wire::{MAX_SHADOW_FIELD_BYTES, MAX_SHADOW_FIELDS};
use ctrlmesh_request::decide::{Refusal, becomes_dry_run};
use ctrlmesh_request::request::RequestInfo;
use ctrlmesh_request::shadow;
use ctrlmesh_request::shadow::{IntendedWrite, Intent, Outcome, UnreadableOptions};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use hyper::body::Body as _;
use serde_json::Value;
use tokio::time;

use crate::net::body::Relay;
use crate::policy::until_gone;
use crate::serve::failure::Failure;
use crate::serve::headers;
use crate::serve::lock;
use crate::serve::target::with_target;
use crate::serve::wait_time::WaitTime;
use crate::session::Session;
use crate::shadow::Verdict;
use crate::traffic::PodTraffic;
use crate::upstream::UsedConnection;
use crate::watch::splice::RequestTemplate;

/// How long the old version may take to write the same.
const LATER: Duration = Duration::from_secs(10);

/// A write that was sent as a dry run.
pub(super) struct DryRun {
    write: IntendedWrite,
    /// Whether the answer is in JSON.
    is_json: bool,
    /// `None` where there is no memory for it.
    template: Option<RequestTemplate>,
}

/// What there is.
enum Seen {
    Object(Value),
    Nothing,
    /// It is not known.
    Unknown,
}

impl Session {
    /// Makes a write a dry run. Gives what is to be compared: nothing where the pod did not mean to write, or only of
    /// an event.
    pub(super) async fn dry_run(
        &self,
        request: &mut Request<Relay>,
        info: &RequestInfo<'_>,
        waits: &WaitTime,
    ) -> Result<Option<Box<DryRun>>, Failure> {
        if !becomes_dry_run(info) {
            return Ok(None);
        }
        if info.verb().starts_with("delete") && !request.body().is_end_stream() {
            let body = mem::replace(request.body_mut(), Relay::Empty);
            *request.body_mut() = self.dry_options(request.headers_mut(), body, waits).await?;
        }
        let sent = request.uri().path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        let target = shadow::target(sent.as_str()).ok_or(Failure::Refused(Refusal::AmbiguousQuery))?;
        *request.uri_mut() = with_target(request.uri(), target).ok_or(Failure::Target)?;
        let Some(write) = IntendedWrite::of(info, sent.as_str()) else { return Ok(None) };
        let is_json = accept_json(request.headers_mut());
        let template = RequestTemplate::new(request, sent, info).reserved(self.resources.unread.budget());
        Ok(Some(Box::new(DryRun { write, is_json, template })))
    }

    /// The body of a deletion, as that of a dry run.
    async fn dry_options(&self, headers: &mut HeaderMap, body: Relay, waits: &WaitTime) -> Result<Relay, Failure> {
        let deadline = self.server.response_timeout;
        let body = lock::collect_within(body, deadline, &self.resources.collect, waits).await.map_err(Failure::Lock)?;
        if body.is_empty() {
            return Ok(Relay::Empty);
        }
        let kind = headers.get(header::CONTENT_TYPE).map_or(Ok(""), HeaderValue::to_str);
        let kind = kind.ok().filter(|_| !headers.contains_key(header::CONTENT_ENCODING));
        let options = kind.ok_or(UnreadableOptions).and_then(|kind| shadow::delete_options(kind, &body));
        let options = options.map_err(Failure::Options)?;
        Ok(lock::replace(headers, options.into(), &body))
    }

    /// The API server has answered a dry run. An answer that says what the object would be is read whole before it
    /// passes.
    pub(super) async fn dry_run_answered(
        self: &Rc<Self>,
        run: Box<DryRun>,
        response: &mut Response<Relay>,
        waits: &WaitTime,
    ) -> Result<(), Failure> {
        let DryRun { write, is_json, template } = *run;
        let report = &self.traffic.shadow;
        if !response.status().is_success() {
            report.known(&match response.status() {
                // Somebody wrote first, or has deleted it already.
                StatusCode::CONFLICT => Verdict::Unknown,
                StatusCode::NOT_FOUND if write.verb == "delete" => Verdict::Equal,
                _ => Verdict::Refused,
            });
            return Ok(());
        }
        let needs_answer = matches!(write.outcome(), Outcome::Object(_) | Outcome::New(_));
        let mut answer = Value::Null;
        if needs_answer && is_json && template.is_some() {
            let body = mem::replace(response.body_mut(), Relay::Empty);
            let deadline = self.server.response_timeout;
            let collected = lock::collect_within(body, deadline, &self.resources.collect, waits).await;
            let collected = collected.inspect_err(|_| report.known(&Verdict::Unknown)).map_err(Failure::DryRun)?;
            answer = serde_json::from_slice(&collected).unwrap_or_default();
            *response.body_mut() = Relay::full(collected);
        }
        let is_known = !needs_answer || is_object(&answer);
        let Some((write, template)) = write.named(&answer).zip(template).filter(|_| is_known) else {
            report.known(&Verdict::Unknown);
            return Ok(());
        };
        if report.took(&write) {
            let waiting = Waiting { traffic: self.traffic.clone(), write, verdict: Verdict::Unknown };
            self.server.drain.spawn_local(compare(Rc::downgrade(self), waiting, answer, template));
        }
        Ok(())
    }

    /// What there is at a path, asked for in JSON.
    async fn look(&self, template: &RequestTemplate, path: &str) -> Seen {
        let asking = async {
            let mut request = template.request(path.parse().ok()?).ok()?;
            request.headers_mut().insert(header::ACCEPT, HeaderValue::from_static("application/json"));
            let response = self.send(&UsedConnection::default(), request, false, |_| {}).await.ok()?;
            let (head, body) = response.into_parts();
            let body: Bytes = lock::collect(body, &self.resources.collect).await.ok()?;
            Some(match head.status {
                StatusCode::OK => serde_json::from_slice(&body).map_or(Seen::Unknown, Seen::Object),
                StatusCode::NOT_FOUND => Seen::Nothing,
                _ => Seen::Unknown,
            })
        };
        let seen = time::timeout(self.server.response_timeout, Box::pin(asking)).await;
        seen.ok().flatten().unwrap_or(Seen::Unknown)
    }
}

/// A write of which it is not known yet what became of it. On drop, it is known, or will never be.
struct Waiting {
    traffic: Arc<PodTraffic>,
    write: IntendedWrite,
    verdict: Verdict,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.traffic.shadow.ended(&self.write, mem::replace(&mut self.verdict, Verdict::Unknown));
    }
}

/// Says what became of a write, as long as the client's connection is open.
async fn compare(session: Weak<Session>, mut waiting: Waiting, answer: Value, template: RequestTemplate) {
    let Some((drain, gone)) = session.upgrade().map(|here| (here.server.drain.clone(), here.gone.clone())) else {
        return;
    };
    let write = waiting.write.clone();
    let comparing = async {
        match write.outcome() {
            Outcome::Object(path) => became(&session, &template, path, answer, &write).await,
            Outcome::Deleted(path) | Outcome::Emptied(path) => was_deleted(&session, &template, path).await,
            Outcome::New(_) | Outcome::Unseen => Verdict::Unknown,
        }
    };
    tokio::select! {
        verdict = comparing => waiting.verdict = verdict,
        () = drain.started() => {}
        () = until_gone(gone.as_ref()) => {}
    }
}

/// Whether the object at `path` becomes as the answer of the dry run has it.
async fn became(
    session: &Weak<Session>,
    template: &RequestTemplate,
    path: &str,
    answer: Value,
    write: &IntendedWrite,
) -> Verdict {
    let intent = match (look(session, template, path).await, write.verb == "create") {
        (Seen::Object(before), false) if version(&before) == version(&answer) => Intent::change(&before, &answer),
        // Somebody has written in between, and it is not known any more what this write would have changed.
        (Seen::Object(_), false) | (Seen::Unknown, _) => return Verdict::Unknown,
        (Seen::Object(now), true) => {
            let intent = Intent::creation(&write.resource, &answer);
            if intent.is_whole() && intent.unmet(Some(&now)).is_empty() {
                return Verdict::Equal;
            }
            intent
        }
        (Seen::Nothing, _) => Intent::creation(&write.resource, &answer),
    };
    drop(answer);
    if intent.is_empty() {
        return Verdict::Equal;
    }
    time::sleep(LATER).await;
    let unmet = match look(session, template, path).await {
        Seen::Object(now) => intent.unmet(Some(&now)),
        Seen::Nothing => intent.unmet(None),
        Seen::Unknown => return Verdict::Unknown,
    };
    if unmet.is_empty() {
        return if intent.is_whole() { Verdict::Equal } else { Verdict::Unknown };
    }
    let fields = unmet.iter().take(MAX_SHADOW_FIELDS).map(|field| {
        let mut text = field.describe(write.is_secret());
        text.truncate(text.floor_char_boundary(MAX_SHADOW_FIELD_BYTES));
        text
    });
    Verdict::Different(fields.collect())
}

/// Whether what is at `path` is deleted now, or a little later. An object of the same name may have been made anew.
async fn was_deleted(session: &Weak<Session>, template: &RequestTemplate, path: &str) -> Verdict {
    let mut first: Option<HashSet<String>> = None;
    for wait in [Duration::ZERO, LATER] {
        time::sleep(wait).await;
        let left = match look(session, template, path).await {
            Seen::Object(object) => left(&object),
            Seen::Nothing => HashSet::new(),
            Seen::Unknown => return Verdict::Unknown,
        };
        if first.get_or_insert_with(|| left.clone()).is_disjoint(&left) {
            return Verdict::Equal;
        }
    }
    Verdict::Different(Vec::new())
}

async fn look(session: &Weak<Session>, template: &RequestTemplate, path: &str) -> Seen {
    match session.upgrade() {
        Some(session) => session.look(template, path).await,
        None => Seen::Unknown,
    }
}

/// The UIDs of an object, or of the items of a list, that are not being deleted.
fn left(object: &Value) -> HashSet<String> {
    let all = object["items"].as_array().map_or_else(|| slice::from_ref(object), Vec::as_slice);
    let staying = all.iter().filter(|one| !one["metadata"]["deletionTimestamp"].is_string());
    staying.filter_map(|one| one["metadata"]["uid"].as_str().map(str::to_owned)).collect()
}

/// Whether an answer has the object, and not only a part or a view of it.
fn is_object(answer: &Value) -> bool {
    answer.is_object() && !matches!(answer["kind"].as_str(), Some("PartialObjectMetadata" | "Table" | "Status"))
}

fn version(object: &Value) -> &str {
    object["metadata"]["resourceVersion"].as_str().unwrap_or_default()
}

/// Has the API server answer in JSON, and uncompressed, where the client takes that.
fn accept_json(headers: &mut HeaderMap) -> bool {
    let accept = headers::accept(headers);
    let json = accept.and_then(|accept| HeaderValue::try_from(shadow::json_accept(&accept)?).ok());
    let is_json = json.is_some();
    if let Some(json) = json {
        headers.insert(header::ACCEPT, json);
        headers.remove(header::ACCEPT_ENCODING);
    }
    is_json
}

//! Answers the page: its files, what it shows, and the explanation of an object.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt as _, stream};
use http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS};
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Serialize;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time;

use super::access::Access;
use super::bundle::{self, File};
use super::live::{Roots, State, count};
use crate::cluster::Connection;
use crate::explain;
use crate::failure;

/// Connections at once.
const CONNECTIONS: usize = 32;

/// Limit for the head of a request.
const HEAD: Duration = Duration::from_secs(10);

/// After so much silence a comment shows that the server is there.
const SILENCE: Duration = Duration::from_secs(15);

/// Headers of each answer: the page loads and sends nothing elsewhere, and nobody else shows it.
const HEADERS: [(http::HeaderName, &str); 4] = [
    (CONTENT_SECURITY_POLICY, "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (REFERRER_POLICY, "no-referrer"),
    (CACHE_CONTROL, "no-store"),
];

const JSON: &str = "application/json";

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// What answers need.
pub(super) struct Server {
    access: Access,
    connection: Connection,
    roots: Roots,
    state: watch::Sender<State>,
}

/// Why there is no answer.
#[derive(Serialize)]
struct Problem<'a> {
    error: &'a str,
}

impl Server {
    pub(super) fn new(access: Access, connection: Connection, namespace: Option<String>) -> Self {
        let roots = Roots { client: connection.client.clone(), namespace };
        Self { access, connection, roots, state: watch::Sender::new("".into()) }
    }

    /// Serves until the program ends, or can follow the cluster no more.
    pub(super) async fn run(self, listener: TcpListener) {
        let (this, mut tasks, mut followers) = (Arc::new(self), JoinSet::new(), JoinSet::new());
        let (traffic, counted) = (watch::Sender::new(None), this.state.clone());
        followers.spawn(this.roots.clone().follow(this.state.clone(), traffic.subscribe()));
        followers.spawn(count(this.connection.client.clone(), move || counted.receiver_count() > 0, traffic));
        let places = Arc::new(Semaphore::new(CONNECTIONS));
        loop {
            let Ok(place) = places.clone().acquire_owned().await else { return };
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => {
                        let this = this.clone();
                        tasks.spawn(async move {
                            this.serve(stream).await;
                            drop(place);
                        });
                    }
                    // Too many files are open: others close meanwhile.
                    Err(_) => time::sleep(Duration::from_millis(100)).await,
                },
                Some(_ended) = tasks.join_next() => {}
                // They go on for ever. Without them the page would show what was.
                Some(_panicked) = followers.join_next() => return,
            }
        }
    }

    async fn serve(self: Arc<Self>, stream: TcpStream) {
        let service = service_fn(|request| self.answer(request));
        let mut builder = http1::Builder::new();
        let connection = builder.timer(TokioTimer::new()).header_read_timeout(HEAD);
        // A browser that goes away is no error.
        drop(connection.serve_connection(TokioIo::new(stream), service).await);
    }

    async fn answer(&self, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
        let mut response = match self.access.check(&request) {
            Ok(()) => self.allowed(&request).await,
            Err(status) => problem(status, "only the page that `ctrlmesh dashboard` opens may ask"),
        };
        for (name, value) in HEADERS {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        Ok(response)
    }

    async fn allowed(&self, request: &Request<Incoming>) -> Response<Body> {
        match request.uri().path() {
            "/api/status" => match self.roots.read(&None).await {
                Ok(page) => json(&page),
                Err(why) => problem(StatusCode::BAD_GATEWAY, &why.to_string()),
            },
            "/api/events" => self.events(),
            "/api/explain" => self.explain(request.uri().query().unwrap_or_default()).await,
            path => match bundle::file(path) {
                Some(File { media_type, text, .. }) => response(StatusCode::OK, media_type, text),
                None => problem(StatusCode::NOT_FOUND, "there is no such page"),
            },
        }
    }

    /// What the page shows, whenever it changes. A page that reads slowly gets the newest state only.
    fn events(&self) -> Response<Body> {
        let mut state = self.state.subscribe();
        // What was sent to others before is new to this page.
        state.mark_changed();
        let messages = stream::unfold(state, |mut state| async {
            let message = match time::timeout(SILENCE, next(&mut state)).await {
                Ok(text) => format!("data: {}\n\n", text?),
                Err(_silent) => ":\n\n".to_owned(),
            };
            Some((message, state))
        });
        let frames = messages.map(|message| Ok(Frame::data(Bytes::from(message))));
        let mut response = Response::new(StreamBody::new(frames).boxed_unsync());
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        response
    }

    async fn explain(&self, query: &str) -> Response<Body> {
        let fields: BTreeMap<_, _> = form_urlencoded::parse(query.as_bytes()).collect();
        let field = |name| fields.get(name).map(|value| value.trim()).filter(|value| !value.is_empty());
        let (Some(resource), Some(name)) = (field("resource"), field("name")) else {
            return problem(StatusCode::BAD_REQUEST, "resource and name are needed");
        };
        let mut connection = self.connection.clone();
        if let Some(namespace) = field("namespace") {
            namespace.clone_into(&mut connection.namespace);
        }
        match Box::pin(explain::explained(&connection, resource, name)).await {
            Ok(explained) => json(&explained),
            Err(error) => problem(StatusCode::UNPROCESSABLE_ENTITY, &failure::causes(&error)),
        }
    }
}

/// What changes next, and is known. `None`: nothing any more.
async fn next(state: &mut watch::Receiver<State>) -> Option<State> {
    loop {
        state.changed().await.ok()?;
        let text = state.borrow_and_update().clone();
        if !text.is_empty() {
            return Some(text);
        }
    }
}

fn json(content: &impl Serialize) -> Response<Body> {
    match serde_json::to_string(content) {
        Ok(text) => response(StatusCode::OK, JSON, text),
        Err(error) => problem(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

fn problem(status: StatusCode, error: &str) -> Response<Body> {
    response(status, JSON, serde_json::to_string(&Problem { error }).unwrap_or_default())
}

fn response(status: StatusCode, media_type: &'static str, text: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(Full::new(text.into()).boxed_unsync());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
    response
}

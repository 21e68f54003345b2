//! An API server of tests.

use http::{Method, Request, Response};
use kube::client::Body;
use kube::{Client, Error};
use serde_json::Value;

/// A client whose requests are answered by `answer`, with a status and an object.
pub(super) fn client(answer: impl Fn(&Method, &str) -> (u16, Value) + Clone + Send + Sync + 'static) -> Client {
    let service = tower::service_fn(move |request: Request<Body>| {
        let (code, object) = answer(request.method(), request.uri().path());
        let answer = Response::builder().status(code).body(Body::from(object.to_string().into_bytes()));
        std::future::ready(Ok::<_, Error>(answer.unwrap()))
    });
    Client::new(service, "default")
}

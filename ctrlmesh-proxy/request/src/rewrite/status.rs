//! Encodes refusals as `metav1.Status`, in an encoding that the client accepts.

use serde_json::json;

use super::document::{Encoding, cbor_map, cbor_number, cbor_text, envelope, protobuf_field};
use super::lock::LockError;
use crate::decide::Refusal;
use crate::request::TargetError;

/// Sent to clients with a refusal that soon does not hold any more.
pub const RETRY_AFTER_SECONDS: u32 = 1;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    pub code: u16,
    /// One of the reasons that clients of the API server branch on.
    pub reason: &'static str,
    pub message: String,
    /// When to come again, in seconds: for `Retry-After`, and in the details.
    pub retry_after: Option<u32>,
}

impl Status {
    fn outcome(&self) -> &'static str {
        if self.code < 400 { "Success" } else { "Failure" }
    }
}

/// A Status in the encoding that a client accepts: its content type and its bytes.
///
/// Protobuf where the client names it before JSON, or JSON not at all; else JSON.
pub fn encode(status: &Status, accept: Option<&str>) -> (&'static str, Vec<u8>) {
    match accepted(accept.unwrap_or_default()) {
        Encoding::Protobuf => ("application/vnd.kubernetes.protobuf", protobuf(status)),
        Encoding::Json | Encoding::Cbor => ("application/json", json(status)),
    }
}

pub(super) fn json(status: &Status) -> Vec<u8> {
    let mut body = json!({
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": status.outcome(),
        "message": status.message,
        "reason": status.reason,
        "code": status.code,
    });
    if let Some(seconds) = status.retry_after {
        body["details"] = json!({ "retryAfterSeconds": seconds });
    }
    body.to_string().into_bytes()
}

pub(super) fn protobuf(status: &Status) -> Vec<u8> {
    let mut message = [
        protobuf_field(1, b""),
        protobuf_field(2, status.outcome().as_bytes()),
        protobuf_field(3, status.message.as_bytes()),
        protobuf_field(4, status.reason.as_bytes()),
    ]
    .concat();
    if let Some(seconds) = status.retry_after {
        message.extend(protobuf_field(5, &number(5, seconds)));
    }
    message.extend(number(6, u32::from(status.code)));
    envelope("v1", "Status", &message)
}

pub(super) fn cbor(status: &Status) -> Vec<u8> {
    cbor_map(&[
        ("kind", cbor_text("Status")),
        ("apiVersion", cbor_text("v1")),
        ("metadata", cbor_map(&[])),
        ("status", cbor_text(status.outcome())),
        ("message", cbor_text(&status.message)),
        ("reason", cbor_text(status.reason)),
        ("code", cbor_number(status.code)),
    ])
}

fn number(field: u8, mut number: u32) -> Vec<u8> {
    let mut bytes = vec![field << 3];
    while number >= 0x80 {
        bytes.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    bytes.push(number.to_le_bytes()[0]);
    bytes
}

fn accepted(accept: &str) -> Encoding {
    let types = accept.split(',').map(|one| one.split(';').next().unwrap_or_default().trim().to_ascii_lowercase());
    for media_type in types {
        match media_type.as_str() {
            "application/vnd.kubernetes.protobuf" => return Encoding::Protobuf,
            "application/json" | "application/*" | "*/*" => return Encoding::Json,
            _ => {}
        }
    }
    Encoding::Json
}

impl From<&Refusal> for Status {
    fn from(refusal: &Refusal) -> Self {
        let retry_after = match refusal {
            Refusal::Unconfirmed => Some(RETRY_AFTER_SECONDS),
            Refusal::Guarded(refused) => refused.retry_after,
            _ => None,
        };
        let (code, reason) = match refusal {
            Refusal::AmbiguousPath { .. } | Refusal::AmbiguousQuery | Refusal::LockAcrossNamespaces => {
                (400, "BadRequest")
            }
            Refusal::Method => (405, "MethodNotAllowed"),
            Refusal::Expired { .. } | Refusal::UnknownContinue { .. } => (410, "Expired"),
            Refusal::Unconfirmed => (503, "ServiceUnavailable"),
            Refusal::ReservedName { .. }
            | Refusal::LockCollection
            | Refusal::Proxied { .. }
            | Refusal::Fenced(_)
            | Refusal::Shadow { .. } => (403, "Forbidden"),
            Refusal::Guarded(_) => (429, "TooManyRequests"),
        };
        Self { code, reason, message: format!("ctrlmesh: {refusal}"), retry_after }
    }
}

impl From<TargetError> for Status {
    fn from(error: TargetError) -> Self {
        let message = format!("ctrlmesh-proxy could not understand the request: {error}");
        Self { code: 400, reason: "BadRequest", message, retry_after: None }
    }
}

impl From<&LockError> for Status {
    fn from(error: &LockError) -> Self {
        let (code, reason, message) = match error {
            LockError::TooLarge => (413, "RequestEntityTooLarge", error.to_string()),
            LockError::Document(source) => (400, "BadRequest", format!("{error}: {source}")),
            LockError::ReservedName { .. } => (403, "Forbidden", error.to_string()),
        };
        Self { code, reason, message: format!("ctrlmesh: {message}"), retry_after: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guard::{Cause, Refused};
    use crate::rewrite::document::Document;

    fn refusal() -> Status {
        Status { code: 410, reason: "Expired", message: "too \"old\"".to_owned(), retry_after: Some(300) }
    }

    #[test]
    fn a_status_is_in_what_the_client_accepts() {
        for (accept, content_type) in [
            (None, "application/json"),
            (Some("application/json"), "application/json"),
            (Some("application/vnd.kubernetes.protobuf"), "application/vnd.kubernetes.protobuf"),
            (
                Some("application/vnd.kubernetes.protobuf;stream=watch, application/json"),
                "application/vnd.kubernetes.protobuf",
            ),
            (Some("application/json, application/vnd.kubernetes.protobuf"), "application/json"),
            (Some("text/html"), "application/json"),
            (Some("application/json;as=Table;g=meta.k8s.io;v=v1"), "application/json"),
        ] {
            assert_eq!(encode(&refusal(), accept).0, content_type, "{accept:?}");
        }
    }

    #[test]
    fn a_guards_refusal_says_when_to_come_again() {
        let refused = |retry_after| {
            let (breaker, rule) = ("ops/wild".to_owned(), "creates".to_owned());
            let refused = Refused { breaker, rule, cause: Cause::Empty, retry_after, holds: false };
            Status::from(&Refusal::Guarded(Box::new(refused)))
        };
        let status = refused(Some(7));
        assert_eq!((status.code, status.reason, status.retry_after), (429, "TooManyRequests", Some(7)));
        let body: serde_json::Value = serde_json::from_slice(&json(&refused(None))).unwrap();
        assert!(body["details"].is_null(), "no time would be true");
    }

    #[test]
    fn a_json_status_holds_every_field() {
        let body: serde_json::Value = serde_json::from_slice(&json(&refusal())).unwrap();
        assert_eq!(body["code"], 410);
        assert_eq!(body["reason"], "Expired");
        assert_eq!(body["message"], "too \"old\"");
        assert_eq!(body["details"]["retryAfterSeconds"], 300);
        assert_eq!(
            (&body["kind"], &body["apiVersion"], &body["status"]),
            (&"Status".into(), &"v1".into(), &"Failure".into())
        );
    }

    #[test]
    fn a_protobuf_status_is_laid_out_as_the_servers_own() {
        let recorded = include_bytes!("../../tests/recorded/lease-exists.protobuf");
        let message = "leases.coordination.k8s.io \"op---s1\" already exists".to_owned();
        let ours = protobuf(&Status { code: 409, reason: "AlreadyExists", message, retry_after: None });
        // The server's own has ListMeta with empty texts where ours is empty, and details.
        let read = |body: &[u8]| {
            let document = Document { body, encoding: Encoding::Protobuf };
            let root = document.root().unwrap();
            document.text_of(&root, "message").unwrap().unwrap().into_owned()
        };
        assert_eq!(read(&ours), read(recorded));
        let code_and_tail = |body: &[u8]| body[body.len() - 3 - 4..].to_vec();
        assert_eq!(code_and_tail(&ours), code_and_tail(recorded));
    }
}

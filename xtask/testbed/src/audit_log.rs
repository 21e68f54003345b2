//! Reads the audit log of an API server: one JSON event of `audit.k8s.io/v1` a line.

use std::collections::BTreeMap;
use std::path::Path;
use std::{fs, io};

use jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;

/// Where the API server puts the name of the pod that a token is bound to.
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";

/// The same for its UID.
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";

/// A request, at one stage. Texts are empty where the log has none.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AuditEvent {
    /// The same for all events of one request.
    #[serde(rename = "auditID")]
    pub id: String,
    /// A watch has an event when it begins (`ResponseStarted`), and one when it ends (`ResponseComplete`).
    pub stage: String,
    /// Path and query.
    #[serde(rename = "requestURI", default)]
    pub uri: String,
    /// As authorisation has it.
    pub verb: String,
    #[serde(default)]
    pub user: User,
    /// As whom the user asked.
    #[serde(default)]
    pub impersonated_user: User,
    /// The last is the connection's. Those before it are from headers, which anybody can write.
    #[serde(rename = "sourceIPs", default)]
    pub sources: Vec<String>,
    /// The program, as it calls itself.
    #[serde(default)]
    pub user_agent: String,
    /// What the path names.
    #[serde(rename = "objectRef", default)]
    pub object: ObjectReference,
    #[serde(default)]
    pub response_status: ResponseStatus,
    /// Null where the log has no bodies.
    #[serde(default)]
    pub response_object: Value,
    #[serde(rename = "requestReceivedTimestamp")]
    pub received: Timestamp,
    /// When it came to this stage.
    #[serde(rename = "stageTimestamp")]
    pub at: Timestamp,
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct User {
    pub username: String,
    pub extra: BTreeMap<String, Vec<String>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ObjectReference {
    /// Plural.
    pub resource: String,
    pub api_group: String,
    pub namespace: String,
    pub name: String,
    pub subresource: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ResponseStatus {
    /// Of HTTP; 0 where there was no answer.
    pub code: u16,
}

impl AuditEvent {
    /// Nothing where `line` is no event, or only a part of one.
    pub fn parse(line: &str) -> Option<Self> {
        serde_json::from_str(line).ok()
    }

    /// The events of all lines that contain `mark`: to parse a whole log takes seconds.
    ///
    /// # Errors
    /// Where the log cannot be read.
    pub fn read(log: &Path, mark: &str) -> io::Result<Vec<Self>> {
        let text = fs::read_to_string(log)?;
        Ok(text.lines().filter(|line| line.contains(mark)).filter_map(Self::parse).collect())
    }

    /// Whether it asks for one object to be created, changed or deleted, and for no dry run.
    pub fn is_write(&self) -> bool {
        let writes = match self.verb.as_str() {
            // What is asked of an object and changes nothing of it: a pod's exec, a token.
            "create" => self.object.subresource.is_empty(),
            "update" | "patch" | "delete" => true,
            _ => false,
        };
        writes && !self.object.resource.is_empty() && self.query("dryRun").is_none()
    }

    /// Whether the user had no right to it.
    pub fn is_forbidden(&self) -> bool {
        self.annotations.get("authorization.k8s.io/decision").is_some_and(|decision| decision == "forbid")
    }

    /// The first value of `key` in the query.
    pub fn query(&self, key: &str) -> Option<String> {
        let (_, query) = self.uri.split_once('?')?;
        let mut pairs = form_urlencoded::parse(query.as_bytes());
        pairs.find(|(name, _)| name == key).map(|(_, value)| value.into_owned())
    }
}

impl User {
    /// The pod that the user's token is bound to.
    pub fn pod_name(&self) -> Option<&str> {
        self.first(POD_NAME)
    }

    /// The UID of that pod.
    pub fn pod_uid(&self) -> Option<&str> {
        self.first(POD_UID)
    }

    fn first(&self, key: &str) -> Option<&str> {
        self.extra.get(key)?.first().map(String::as_str)
    }
}

impl ObjectReference {
    /// `resource/subresource`, as RBAC rules name it.
    pub fn with_subresource(&self) -> String {
        let slash = if self.subresource.is_empty() { "" } else { "/" };
        format!("{}{slash}{}", self.resource, self.subresource)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CREATION: &str = r#"{"kind":"Event","apiVersion":"audit.k8s.io/v1","level":"Metadata","auditID":"a1","stage":"ResponseComplete","requestURI":"/api/v1/namespaces/a/configmaps?fieldManager=x","verb":"create","user":{"username":"system:serviceaccount:ops:op","extra":{"authentication.kubernetes.io/pod-name":["op-0"],"authentication.kubernetes.io/pod-uid":["u"]}},"sourceIPs":["10.213.0.2"],"userAgent":"op/v0","objectRef":{"resource":"configmaps","namespace":"a","apiVersion":"v1"},"responseStatus":{"metadata":{},"code":201},"requestReceivedTimestamp":"2026-11-21T15:00:00.000000Z","stageTimestamp":"2026-11-21T15:00:01.500000Z","annotations":{"authorization.k8s.io/decision":"allow"}}"#;

    #[test]
    fn an_event_says_who_wrote_what_by_which_pod() {
        let event = AuditEvent::parse(CREATION).unwrap();
        assert_eq!((event.user.pod_name(), event.user.pod_uid()), (Some("op-0"), Some("u")));
        assert_eq!((event.object.with_subresource().as_str(), event.response_status.code), ("configmaps", 201));
        assert!(event.is_write() && !event.is_forbidden());
        assert_eq!((event.query("fieldManager").as_deref(), event.query("field")), (Some("x"), None));
        let refused = AuditEvent::parse(&CREATION.replace("allow", "forbid")).unwrap();
        assert!(refused.is_forbidden());
    }

    #[test]
    fn a_dry_run_a_token_and_a_read_are_no_writes() {
        let changed = |from: &str, to: &str| AuditEvent::parse(&CREATION.replace(from, to)).unwrap();
        assert!(changed(r#""create""#, r#""patch""#).is_write());
        assert!(!changed(r#""create""#, r#""get""#).is_write());
        assert!(!changed(r#""resource":"configmaps","#, "").is_write(), "it is about no resource");
        assert!(!changed("fieldManager=x", "fieldManager=x&dryRun=All").is_write());
        let of_token = |verb: &str| {
            let event = changed(r#""create""#, &format!("{verb:?}"));
            AuditEvent { object: ObjectReference { subresource: "token".to_owned(), ..event.object.clone() }, ..event }
        };
        assert!(!of_token("create").is_write() && of_token("update").is_write());
        assert_eq!(of_token("create").object.with_subresource(), "configmaps/token");
    }

    #[test]
    fn half_a_line_is_no_event() {
        assert!(AuditEvent::parse(&CREATION[..200]).is_none() && AuditEvent::parse("").is_none());
    }
}

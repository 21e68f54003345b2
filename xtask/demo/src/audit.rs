//! Parses one line of the API server's audit log.
//!
//! Pure. Only what the observer needs is read: who asked, as which pod, from where, for what, and what came of it.

use std::fmt;

use ctrlmesh_common::selector::Selector;
use ctrlmesh_testbed::audit_log::AuditEvent;
use jiff::Timestamp;

/// A kind of objects, as paths of the API have it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Resource {
    /// The API group; empty for the core group.
    pub group: String,
    /// The plural, in lower case.
    pub plural: String,
}

/// An object.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Object {
    /// Its kind.
    pub resource: Resource,
    /// Its namespace; empty where it is in none.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// What was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Objects of a kind, once or from now on, in one namespace or (empty) in all.
    Read {
        /// Their kind.
        resource: Resource,
        /// The namespace; empty: all.
        namespace: String,
        /// Which of them; nothing where the selector cannot be read.
        selector: Option<Selector>,
        /// Whether it is a watch.
        watch: bool,
    },
    /// One object was to be created, changed or deleted.
    Write(Object),
    /// Anything else: one object, a dry run, something that is no object.
    Other,
}

/// One line of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The same for all lines of one request.
    pub id: String,
    /// Whether the request is over: a watch has a line when it begins, and one when it ends.
    pub ended: bool,
    /// When.
    pub at: Timestamp,
    /// The user.
    pub user: String,
    /// The pod that the user's token is bound to; none for all others.
    pub pod: Option<String>,
    /// The program, as it calls itself.
    pub agent: String,
    /// The address that the connection came from. What headers say of others before it anybody can write.
    pub source: String,
    /// What was asked for.
    pub request: Request,
    /// The verb, as authorisation has it.
    pub verb: String,
    /// The HTTP status; 0 where there was none.
    pub code: u16,
}

impl Resource {
    /// The kind called `plural` in `group`.
    pub fn new(group: &str, plural: &str) -> Self {
        Self { group: group.to_owned(), plural: plural.to_owned() }
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dot = if self.group.is_empty() { "" } else { "." };
        write!(out, "{}{dot}{}", self.plural, self.group)
    }
}

impl fmt::Display for Object {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} {}/{}", self.resource, self.namespace, self.name)
    }
}

impl Event {
    /// Reads a line; nothing where it is none, or only a part of one.
    pub fn parse(line: &str) -> Option<Self> {
        let event = AuditEvent::parse(line)?;
        Some(Self {
            ended: matches!(event.stage.as_str(), "ResponseComplete" | "Panic"),
            pod: event.user.pod_name().map(str::to_owned),
            request: request(&event),
            source: event.sources.into_iter().next_back().unwrap_or_default(),
            id: event.id,
            at: event.at,
            user: event.user.username,
            agent: event.user_agent,
            verb: event.verb,
            code: event.response_status.code,
        })
    }
}

fn request(event: &AuditEvent) -> Request {
    let reference = &event.object;
    let resource = Resource::new(&reference.api_group, &reference.resource);
    let namespace = reference.namespace.clone();
    match event.verb.as_str() {
        "list" | "watch" if reference.name.is_empty() => {
            let selector = event.query("labelSelector").unwrap_or_default();
            let selector = Selector::parse(&selector).ok();
            Request::Read { resource, namespace, selector, watch: event.verb == "watch" }
        }
        _ if event.is_write() => Request::Write(Object { resource, namespace, name: reference.name.clone() }),
        _ => Request::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WATCH: &str = r#"{"kind":"Event","apiVersion":"audit.k8s.io/v1","level":"Metadata","auditID":"a1","stage":"ResponseStarted","requestURI":"/apis/web.example.com/v1alpha1/websites?labelSelector=ctrlmesh.kusionstack.io%2Fsharding-hash+in+%280%2C1%29&watch=true","verb":"watch","user":{"username":"system:serviceaccount:ops:op","groups":["system:serviceaccounts"],"extra":{"authentication.kubernetes.io/pod-name":["op-0"],"authentication.kubernetes.io/node-name":["node"]}},"sourceIPs":["10.213.0.2"],"userAgent":"op/v0","objectRef":{"resource":"websites","apiGroup":"web.example.com","apiVersion":"v1alpha1"},"responseStatus":{"metadata":{},"code":200},"requestReceivedTimestamp":"2026-11-21T15:00:00.000000Z","stageTimestamp":"2026-11-21T15:00:01.500000Z","annotations":{}}"#;

    fn written(verb: &str, uri: &str, subresource: &str) -> Request {
        let line = WATCH
            .replace(r#""verb":"watch""#, &format!(r#""verb":"{verb}""#))
            .replace("/apis/web.example.com/v1alpha1/websites?", &format!("{uri}?"))
            .replace(
                r#""apiVersion":"v1alpha1"}"#,
                &format!(r#""namespace":"a","name":"b","subresource":"{subresource}"}}"#),
            );
        Event::parse(&line).unwrap().request
    }

    #[test]
    fn the_source_is_the_connections_address_not_a_headers() {
        let line = WATCH.replace(r#"["10.213.0.2"]"#, r#"["10.0.0.9","10.213.0.2"]"#);
        assert_eq!(Event::parse(&line).unwrap().source, "10.213.0.2");
    }

    #[test]
    fn a_watch_says_who_watches_what_from_where() {
        let event = Event::parse(WATCH).unwrap();
        assert_eq!((event.pod.as_deref(), event.code, event.ended), (Some("op-0"), 200, false));
        assert_eq!((event.source.as_str(), event.agent.as_str()), ("10.213.0.2", "op/v0"));
        assert_eq!(event.at, "2026-11-21T15:00:01.5Z".parse().unwrap());
        let Request::Read { resource, namespace, selector, watch } = event.request else { panic!("{event:?}") };
        assert_eq!(resource.to_string(), "websites.web.example.com");
        assert!(namespace.is_empty() && watch);
        assert_eq!(selector.unwrap().to_string(), "ctrlmesh.kusionstack.io/sharding-hash in (0,1)");
    }

    #[test]
    fn a_write_names_its_object_and_a_dry_run_or_a_token_is_none() {
        let object = Object {
            resource: Resource::new("web.example.com", "websites"),
            namespace: "a".to_owned(),
            name: "b".to_owned(),
        };
        assert_eq!(written("patch", "/x", "status"), Request::Write(object.clone()));
        assert_eq!(written("create", "/x", ""), Request::Write(object));
        assert_eq!(written("create", "/x", "token"), Request::Other);
        assert_eq!(written("update", "/x?dryRun=All&y", ""), Request::Other);
        assert_eq!(written("get", "/x", ""), Request::Other);
    }
}
